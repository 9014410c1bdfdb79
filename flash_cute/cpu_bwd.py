"""The backward on the CPU: PyTorch's own where its arithmetic is ours, else the formulas, a tile of rows at a time.

    P  = exp(scale * Q K^T - lse)        dV = P^T dO
    dS = P * (dO V^T - delta)            dQ = scale * dS K
    delta = rowsum(dO * O) - dLSE        dK = scale * dS^T Q

With a sink the keys have a share of the weights, w = sigmoid(lse - sink): P becomes w P, dLSE becomes dLSE / w (the
LSE has no part in the sink), and dsink = -(1 - w) rowsum(dO * O), summed over batches and rows. A softcap multiplies dS
by 1 - tanh^2.

PyTorch's kernel knows no gradient of the LSE, no left limit of a window, no softcap, no ALiBi, no masks and no
row without a key in view, and its exp errs by up to 20 units in the last place (`Vectorized<float>::exp_u20`):
gradients of float32 were up to 7 times as far off as those of unfused attention. So float32 is computed in tiles, which
takes 1.1 to 1.2 times as long. The bottom-right mask is, as in the forward, a rectangle that every row sees and a
square under the diagonal.

16-bit inputs are computed in float32, as in the forward. In the tiles all query heads of a key head stand in one
matrix, so that k and v are not copied for them. Over rows the products sum a head at a time: one sum over all heads
would err by as many times more as there are heads.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ._call_options import CallOptions, split_dense, split_mask
from .band import Band, make_band, tile_rows
from .cpu import all_within, fold_heads, in_tiles, padded, readable, why_in_tiles
from .given_mask import GivenMask, make_given_mask, of_heads
from .score import LEAST_SHARE, Score, compute_dtype, gradient_of_sinks, make_score, share_of_keys

_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

# baddbmm adds a product with a side of up to 8 to its destination row by row, so that the sum over one head errs as one
# over all heads would. Of a larger one it adds the sums, 1.1 to 2 times as fast as bmm and add do.
SMALL_SIDE = 16
SAME_LSE = 2**-21  # relative: what the roundings of two computations of one LSE may differ by


def bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    *given: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The kernel of `flash_cute::bwd` and `flash_cute::_bwd` for CPU tensors; the library checks the arguments.

    `given`: the values of a CallOptions, deterministic, which it is in any case, and backend.
    """
    options, _ = split_dense(given)
    factor: float = torch.ops.flash_cute.check_bwd(dout, q, k, v, out, lse, dlse, *given)
    return checked_bwd(dout, q, k, v, out, lse, dlse, options, factor, None)


def masked_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    *given: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The kernel of `flash_cute::masked_bwd` and its twin. `given`: a MaskTensors' values, and as above."""
    mask, rest = split_mask(given)
    options, _ = split_dense(rest)
    factor: float = torch.ops.flash_cute.check_masked_bwd(dout, q, k, v, out, lse, dlse, *given)
    return checked_bwd(dout, q, k, v, out, lse, dlse, options, factor, make_given_mask(mask, q.shape[2]))


def checked_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    options: CallOptions,
    factor: float,
    mask: GivenMask | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The backward of checked arguments. `factor`: the scale, where the options may leave it to the head dim."""
    sinks = options.sinks
    with torch.no_grad():
        score = make_score(options, q, k, factor, mask)
        band = make_band(*options[:3], q.shape[2], k.shape[2])
        dq, dk, dv = _bwd(dout, q, k, v, out, lse, dlse, band, score, sinks)
        dsinks = torch.empty(0) if sinks is None else gradient_of_sinks(dout, out, lse, sinks)
        return dq, dk, dv, dsinks


def copies(q: Tensor, k: Tensor, v: Tensor) -> dict[str, str | None]:
    """Why each argument is copied; what `explain` says."""
    why = "computed in float32" if q.dtype in (torch.float16, torch.bfloat16) else None
    return dict.fromkeys(("q", "k", "v", "out", "dout"), why)


def reasons(q: Tensor, k: Tensor, v: Tensor, band: Band, score: Score, sinks: Tensor | None) -> list[str]:
    """How a call is computed, in sentences; what `explain` says."""
    rows = tile_rows(q, k, band)
    tiled = why_in_tiles(band, score, q.shape[3], v.shape[3])
    if tiled is not None:
        sentences = [in_tiles(rows, tiled)]
    elif q.dtype == torch.float32:
        sentences = [in_tiles(rows, "its exp errs by up to 20 units in the last place of float32")]
    else:
        sentences = [
            "PyTorch's own flash attention for the CPU does the arithmetic.",
            f"With a gradient of the LSE PyTorch's matrix products do, {rows} query rows at a time.",
        ]
    if sinks is not None:
        sentences.append("Each row's weights are scaled by the keys' share, from its LSE and the sink.")
    return sentences


def _bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    band: Band,
    score: Score,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = band.rows()
    if rows.start == rows.stop or q.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    precise = q.dtype == torch.float32 or not all_within(lse[:, :, rows], -1, torch.inf)
    share = None if sinks is None else share_of_keys(lse, sinks).clamp_(min=LEAST_SHARE)  # (B, Hq, Nq)
    if precise or dlse is not None or why_in_tiles(band, score, q.shape[3], v.shape[3]) is not None:
        return _bwd_in_tiles(dout, q, k, v, out, lse, dlse, band, score, share, normalise=precise)

    compute = compute_dtype(q)
    dout, seeing, out = (readable(x[:, :, rows], compute) for x in (dout, q, out))
    keys, values = readable(k, compute), readable(v, compute)
    if share is not None:
        lse = lse - share.log()  # of the keys and the sink
    dq, dk, dv = _bwd_of_pytorch(dout, seeing, keys, values, out, lse[:, :, rows], band, score.scale)
    if seeing.shape != q.shape:
        dq = torch.nn.functional.pad(dq, (0, 0, rows.start, band.len_q - rows.stop))
    return _laid_out_like(q, dq), _laid_out_like(k, dk), _laid_out_like(v, dv)


def _laid_out_like(like: Tensor, x: Tensor) -> Tensor:
    result = torch.empty_like(like)
    return x if (x.dtype, x.stride()) == (result.dtype, result.stride()) else result.copy_(x)


def _bwd_of_pytorch(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Band, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of attention where each row of q sees a key and no band limits it to the left."""
    head_dim, head_dim_v = q.shape[3], v.shape[3]
    dout, q, k, v, out = padded(dout, q, k, v, out)

    def gradients(keys: slice, top_left: bool) -> tuple[Tensor, Tensor, Tensor]:
        tensors = (dout, q, k[:, :, keys], v[:, :, keys], out, lse)
        dq, dk, dv = _flash_backward(*fold_heads(*tensors), 0.0, top_left, scale=scale)
        return dq.view(q.shape), dk.view(tensors[2].shape), dv.view(tensors[3].shape)

    if not band.limits_right:
        dq, dk, dv = gradients(slice(None), False)
    elif band.upper <= 0:
        dq, dk, dv = gradients(slice(None), True)
    else:
        one, other = gradients(slice(0, band.upper), False), gradients(slice(band.upper, None), True)
        dq, dk, dv = one[0] + other[0], torch.cat((one[1], other[1]), 2), torch.cat((one[2], other[2]), 2)
    return dq[..., :head_dim], dk[..., :head_dim], dv[..., :head_dim_v]


def _bwd_in_tiles(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    band: Band,
    score: Score,
    share: Tensor | None,
    normalise: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by the formulas.

    `share`: (B, Hq, Nq), that of the keys where there are sinks. `normalise`: P and delta from the scores, where
    `lse` is that of these keys: float32 rounds a large LSE and a large score by as much as exp(score - lse) is off
    then, where softmax, which subtracts the row's largest score from all, is not; and delta, summed from P, cancels as
    exactly against dO V^T as it does in softmax's own backward.
    """
    (batch, heads_q, len_q, _), heads_kv = q.shape, k.shape[1]
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    compute = compute_dtype(q)
    keys, values = (x.to(compute).flatten(0, 1) for x in (k, v))  # (B * Hkv, Nk, D), (B * Hkv, Nk, Dv)
    dk_sum, dv_sum = (torch.zeros(x.shape, dtype=compute) for x in (keys, values))
    group = heads_q // heads_kv

    def grouped(x: Tensor) -> Tensor:
        """(B, Hq, rows, ...) as (B * Hkv, group * rows, ...): the query heads of a key head under each other."""
        return x.to(compute).unflatten(1, (heads_kv, group)).flatten(2, 3).flatten(0, 1)

    def add_over_rows(total: Tensor, weights: Tensor, x: Tensor) -> None:
        """Adds weights^T x of grouped tensors to total (B * Hkv, keys, columns of x)."""
        heads = (y.unflatten(1, (group, -1)).unbind(1) for y in (weights, x))
        small = min(total.shape[1:]) < SMALL_SIDE
        for weights_of_head, x_of_head in zip(*heads, strict=True):
            if small:
                total.add_(torch.bmm(weights_of_head.mT, x_of_head))
            else:
                total.baddbmm_(weights_of_head.mT, x_of_head)

    step = tile_rows(q, k, band)
    seeing = band.rows()  # what the other rows hold must not reach a product
    dq[:, :, : seeing.start] = dq[:, :, seeing.stop :] = 0
    tiles = [slice(start, min(start + step, seeing.stop)) for start in range(seeing.start, seeing.stop, step)]
    seen_by = [band.keys(rows) for rows in tiles]
    # Used by every tile: in new memory the first access of each page is a fault.
    widest = max(seen.stop - seen.start for seen in seen_by)
    memory = torch.empty(3, batch * heads_q * min(step, len_q) * widest, dtype=compute)
    for rows, seen in zip(tiles, seen_by, strict=True):
        if seen.start == seen.stop:
            dq[:, :, rows] = 0
            continue
        tile_q, tile_dout, tile_lse = (x[:, :, rows] for x in (q, dout, lse))
        blind = tile_lse == -torch.inf  # (B, Hq, rows): P is exp(-inf) for them
        if score.mask is not None:  # here, too, what blind rows hold must not reach a product
            blind = blind | of_heads(score.mask.blind(rows, band), heads_q)
            tile_q, tile_dout = (x.masked_fill(blind.unsqueeze(-1), 0) for x in (tile_q, tile_dout))
        tile_q, tile_dout = grouped(tile_q), grouped(tile_dout)  # (B * Hkv, group * rows, D or Dv)
        delta = (dout[:, :, rows].to(compute) * out[:, :, rows].to(compute)).sum(-1)  # (B, Hq, rows)
        delta = grouped(delta.masked_fill_(blind, 0)).unsqueeze(-1)
        tile_lse = grouped(tile_lse.masked_fill(blind, torch.inf)).unsqueeze(-1)  # (B * Hkv, group * rows, 1)

        tile_k, tile_v = keys[:, seen], values[:, seen]
        shape = (*tile_q.shape[:2], tile_k.shape[1])  # (B * Hkv, group * rows, seen)
        scores, dp, p_dp = (x[: math.prod(shape)].view(shape) for x in memory)
        torch.bmm(tile_q, tile_k.mT, out=scores)
        slope_of_cap = score.slope_of_cap(scores)
        score.of_products(scores.view(batch, heads_kv, group, -1, shape[2]), rows, seen, band)
        torch.bmm(tile_dout, tile_v.mT, out=dp)
        whole = None
        if normalise:
            p, whole = _normalised(scores, tile_lse)
        else:
            p = scores.sub_(tile_lse).exp_()
        tile_share = None if share is None else grouped(share[:, :, rows].masked_fill(blind, 1)).unsqueeze(-1)
        if tile_share is not None:
            p *= tile_share
        if whole is not None:
            delta = torch.where(whole, torch.mul(p, dp, out=p_dp).sum(-1, keepdim=True), delta)
        if dlse is not None:
            flow = grouped(dlse[:, :, rows].masked_fill(blind, 0)).unsqueeze(-1)
            delta = delta - (flow if tile_share is None else flow / tile_share)
        add_over_rows(dv_sum[:, seen], p, tile_dout)
        ds = dp.sub_(delta).mul_(p)
        if slope_of_cap is not None:
            ds *= slope_of_cap
        add_over_rows(dk_sum[:, seen], ds, tile_q)
        dq[:, :, rows] = torch.bmm(ds, tile_k).mul_(score.scale).view(q[:, :, rows].shape)
    return dq, dk.copy_(dk_sum.mul_(score.scale).view(k.shape)), dv.copy_(dv_sum.view(v.shape))


def _normalised(scores: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """P (..., rows, keys), in the memory of `scores`, and (..., rows, 1): whether `lse` is that of these keys alone.

    A caller may give the LSE of more keys than these: then that is what P is divided by.
    """
    peak = scores.amax(-1, keepdim=True)
    peak.masked_fill_(peak == -torch.inf, 0)
    p = scores.sub_(peak).exp_()
    total = p.sum(-1, keepdim=True)
    whole = (peak + total.log() - lse).abs() <= SAME_LSE * peak.abs()
    return p.mul_(torch.where(whole, 1 / total, (peak - lse).exp())), whole
