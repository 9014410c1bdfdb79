"""The backward on the CPU: PyTorch's own where its arithmetic is ours, else the formulas, a tile of rows at a time.

    P  = exp(scale * Q K^T - lse)        dV = P^T dO
    dS = P * (dO V^T - delta)            dQ = scale * dS K
    delta = rowsum(dO * O) - dLSE        dK = scale * dS^T Q

PyTorch's kernel knows no gradient of the LSE, no left limit of a window and no row without a key in view, and takes
P as the formula has it, which is not enough where scores are large (see `STEEP`). The bottom-right mask is, as in the
forward, a rectangle that every row sees and a square under the diagonal.

16-bit inputs are computed in float32, as in the forward. In the tiles all query heads of a key head stand in one
matrix, so that k and v are not copied for them. Over rows the products sum a head at a time: one sum over all heads
would err by as many times more as there are heads.
"""

import torch
from torch import Tensor

from .band import Band, make_band, tile_rows
from .cpu import all_within, fold_heads, readable

_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

# float32 rounds an LSE of this size, and a score, by up to 2^-18: exp(score - lse) is off by that share, where softmax,
# which subtracts the row's largest score from all, is not. From here on each row's P is normalised as in softmax, and
# its delta is summed from P, so that it cancels as exactly against dO V^T as it does in softmax's own backward.
STEEP = 64
SAME_LSE = 2**-21  # relative: what the roundings of two computations of one LSE may differ by


def bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    causal: str,
    window_left: int | None,
    window_right: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    scale: float | None,
    deterministic: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The kernel of `flash_cute::bwd` and `flash_cute::_bwd` for CPU tensors; the library checks the arguments.

    It is deterministic whatever `deterministic` says.
    """
    options = (causal, window_left, window_right, softcap, sinks, alibi_slopes, scale, deterministic, backend)
    factor: float = torch.ops.flash_cute.check_bwd(dout, q, k, v, out, lse, dlse, *options)
    with torch.no_grad():
        band = make_band(causal, window_left, window_right, q.shape[2], k.shape[2])
        return *_bwd(dout, q, k, v, out, lse, dlse, band, factor), torch.empty(0)


def copies(q: Tensor) -> dict[str, str | None]:
    """Why each argument is copied; what `explain` says."""
    why = "computed in float32" if q.dtype in (torch.float16, torch.bfloat16) else None
    return dict.fromkeys(("q", "k", "v", "out", "dout"), why)


def reasons(q: Tensor, k: Tensor, causal: str) -> list[str]:
    """How a call is computed, in sentences; what `explain` says."""
    rows = tile_rows(q, k, make_band(causal, None, None, q.shape[2], k.shape[2]))
    return [
        "PyTorch's own flash attention for the CPU does the arithmetic.",
        "With a gradient of the LSE, or where float32 scores are so large that the LSE's rounding matters, PyTorch's "
        f"matrix products do, {rows} query rows at a time.",
    ]


def _bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    band: Band,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = band.rows()
    if rows.start == rows.stop or q.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    # Of 16-bit inputs the rounding is coarser than what a large LSE loses.
    limit = STEEP if q.dtype == torch.float32 else torch.inf
    steep = not all_within(lse[:, :, rows], -1, limit)
    if steep or dlse is not None or band.limits_left:
        return _bwd_in_tiles(dout, q, k, v, out, lse, dlse, band, scale, normalise=steep)

    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    dout, seeing, out = (readable(x[:, :, rows], compute) for x in (dout, q, out))
    keys, values = readable(k, compute), readable(v, compute)
    dq, dk, dv = _bwd_of_pytorch(dout, seeing, keys, values, out, lse[:, :, rows], band, scale)
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

    def gradients(keys: slice, top_left: bool) -> tuple[Tensor, Tensor, Tensor]:
        tensors = (dout, q, k[:, :, keys], v[:, :, keys], out, lse)
        dq, dk, dv = _flash_backward(*fold_heads(*tensors), 0.0, top_left, scale=scale)
        return dq.view(q.shape), dk.view(tensors[2].shape), dv.view(tensors[3].shape)

    if not band.limits_right:
        return gradients(slice(None), False)
    if band.upper <= 0:
        return gradients(slice(None), True)
    one, other = gradients(slice(0, band.upper), False), gradients(slice(band.upper, None), True)
    return one[0] + other[0], torch.cat((one[1], other[1]), 2), torch.cat((one[2], other[2]), 2)


def _bwd_in_tiles(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    band: Band,
    scale: float,
    normalise: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by the formulas. `normalise`: P and delta from the scores, where `lse` is that of these keys."""
    (batch, heads_q, len_q, head_dim), (_, heads_kv, _, _) = q.shape, k.shape
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    keys, values = k.to(compute), v.to(compute)  # (B, Hkv, Nk, D)
    dk_sum, dv_sum = (torch.zeros(k.shape, dtype=compute) for _ in range(2))
    group = heads_q // heads_kv

    def grouped(x: Tensor) -> Tensor:
        """(B, Hq, rows, ...) as (B, Hkv, group * rows, ...): the query heads of a key head under each other."""
        return x.to(compute).unflatten(1, (heads_kv, group)).flatten(2, 3)

    def sum_over_rows(weights: Tensor, x: Tensor) -> Tensor:
        """weights^T x of grouped tensors: (B, Hkv, keys, D)."""
        return (weights.unflatten(2, (group, -1)).mT @ x.unflatten(2, (group, -1))).sum(2)

    step = tile_rows(q, k, band)
    for start in range(0, len_q, step):
        rows = slice(start, min(start + step, len_q))
        count = rows.stop - start
        seen = band.keys(rows)
        tile_q, tile_dout = grouped(q[:, :, rows]), grouped(dout[:, :, rows])  # (B, Hkv, group * rows, D)
        tile_lse = lse[:, :, rows]  # (B, Hq, rows)
        blind = tile_lse == -torch.inf  # P is exp(-inf) for them
        delta = (dout[:, :, rows].to(compute) * out[:, :, rows].to(compute)).sum(-1)  # (B, Hq, rows)
        delta = grouped(delta.masked_fill_(blind, 0)).unsqueeze(-1)
        tile_lse = grouped(tile_lse.masked_fill(blind, torch.inf)).unsqueeze(-1)  # (B, Hkv, group * rows, 1)

        tile_k, tile_v = keys[:, :, seen], values[:, :, seen]
        scores = (tile_q @ tile_k.mT).mul_(scale)  # (B, Hkv, group * rows, seen)
        hidden = band.hidden(rows, seen)
        if hidden is not None:
            scores.unflatten(2, (group, -1)).masked_fill_(hidden, -torch.inf)
        dp = tile_dout @ tile_v.mT
        if normalise and scores.numel() > 0:
            p, whole = _normalised(scores, tile_lse)
            delta = torch.where(whole, (p * dp).sum(-1, keepdim=True), delta)
        else:
            p = scores.sub_(tile_lse).exp_()
        if dlse is not None:
            delta = delta - grouped(dlse[:, :, rows].masked_fill(blind, 0)).unsqueeze(-1)
        dv_sum[:, :, seen] += sum_over_rows(p, tile_dout)
        ds = dp.sub_(delta).mul_(p)
        dk_sum[:, :, seen] += sum_over_rows(ds, tile_q)
        dq[:, :, rows] = (ds @ tile_k).mul_(scale).view(batch, heads_q, count, head_dim)
    return dq, dk.copy_(dk_sum.mul_(scale)), dv.copy_(dv_sum)


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
