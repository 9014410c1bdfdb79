"""The forward on the CPU: PyTorch's own flash attention does the arithmetic, its gaps are closed here.

Those gaps, in torch 2.11 and 2.13: its causal mask is the top-left one, it reports LSE 0 for a row whose
scores are all -inf, it reads a strided last dim wrongly, it writes one wrongly (its out is like q, and where dims of q
overlap may have its last dim strided), it dies of SIGFPE when there are no keys, and in 16 bits its LSE is off by 6e-5.
So 16-bit inputs are computed in float32, with an LSE within 1e-5 (on an
AVX-512 CPU that is twice as fast in float16 and as fast in bfloat16; a third as fast where the CPU multiplies 16-bit
numbers itself, by AMX or AVX512-FP16), and the bottom-right mask, which is a rectangle that every row sees and a square
under the diagonal, is the two computed apart and merged. A v with a head dim of its own is padded with zeros to that of
q and k, or they to v's. Where a window limits the keys to the left too, scores are modified (softcap, ALiBi) or a mask
is given, a tile of query rows at a time is computed by matrix products. Sinks are applied last, from each
row's LSE.
"""

from typing import Any

import torch
from torch import Tensor

from . import _vml  # noqa: F401 (before anything is computed)
from ._call_options import CallOptions, split_dense, split_mask
from ._layout import empty_out
from .band import Band, make_band, tile_rows
from .given_mask import GivenMask, make_given_mask, of_heads
from .score import Score, compute_dtype, make_score, share_of_keys

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def fwd(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """The kernel of `flash_cute::fwd` and `flash_cute::_fwd` for CPU tensors; the library checks the arguments.

    `given`: the values of a CallOptions, backend, and perhaps deterministic. That is for the backward: a forward always
    is.
    """
    options, (backend, *_) = split_dense(given)
    factor: float = torch.ops.flash_cute.check_fwd(q, k, v, *options, backend)
    return checked_fwd(q, k, v, options, factor, None)


def masked_fwd(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """The kernel of `flash_cute::masked_fwd` and its twin. `given`: a MaskTensors' values, and as above."""
    mask, rest = split_mask(given)
    options, (backend, *_) = split_dense(rest)
    factor: float = torch.ops.flash_cute.check_masked_fwd(q, k, v, *mask, *options, backend)
    return checked_fwd(q, k, v, options, factor, make_given_mask(mask, q.shape[2]))


def checked_fwd(
    q: Tensor, k: Tensor, v: Tensor, options: CallOptions, factor: float, mask: GivenMask | None
) -> tuple[Tensor, Tensor]:
    """The forward of checked arguments. `factor`: the scale, where the options may leave it to the head dim."""
    with torch.no_grad():
        band = make_band(*options[:3], q.shape[2], k.shape[2])
        return _fwd(q, k, v, band, make_score(options, q, k, factor, mask), options.sinks)


def copies(q: Tensor, k: Tensor, v: Tensor) -> dict[str, str | None]:
    """Why each argument is copied; what `explain` says."""
    whys = {name: _why_copied(x) for name, x in (("q", q), ("k", k), ("v", v))}
    if whys["q"] is None and not _makes_rows_of_columns(q):
        whys["q"] = "its rows, heads or batches overlap in memory"
    return whys


def reasons(q: Tensor, k: Tensor, v: Tensor, band: Band, score: Score, sinks: Tensor | None) -> list[str]:
    """How a call is computed, in sentences; what `explain` says."""
    head_dim, head_dim_v = q.shape[3], v.shape[3]
    tiled = why_in_tiles(band, score, head_dim, head_dim_v)
    if tiled is not None:
        return [in_tiles(tile_rows(q, k, band), tiled), *_sinks_reason(sinks)]
    sentences = ["PyTorch's own flash attention for the CPU does the arithmetic."]
    if head_dim != head_dim_v:
        narrow, wide = ("v", "q and k") if head_dim_v < head_dim else ("q and k", "v")
        sentences.append(f"Zeros fill {narrow} up to {wide}'s head dim {max(head_dim, head_dim_v)}.")
    if band.limits_right and band.upper > 0:
        sentences.append(
            f"The first {band.upper} keys, which every row sees, and the square under the diagonal are "
            "computed apart and merged by their LSE."
        )
    return sentences + _sinks_reason(sinks)


def _sinks_reason(sinks: Tensor | None) -> list[str]:
    return [] if sinks is None else ["The sinks are applied last, from each row's LSE."]


def in_tiles(rows: int, why: str) -> str:
    """The sentence of a call that PyTorch's flash attention does not serve."""
    return (
        f"PyTorch's matrix products do the arithmetic, {rows} query rows at a time: its flash attention for the CPU "
        f"does not serve this, since {why}."
    )


def why_in_tiles(band: Band, score: Score, head_dim: int, head_dim_v: int) -> str | None:
    """Why PyTorch's flash attention does not serve a call, of which tiles of rows are computed then; None: it does."""
    if score.softcap is not None:
        return "it has no softcap"
    if score.slopes is not None:
        return "it has no ALiBi"
    if score.mask is not None:
        return "it has no such mask"
    if band.limits_left:
        return "it has no left limit of a window"
    if max(head_dim, head_dim_v) > MOST_PADDING * min(head_dim, head_dim_v):
        return f"it wants one head dim, and {head_dim} and {head_dim_v} are too far apart to pad"
    return None


# Times as many columns, with zeros, as a tensor has: with D 64 and Dv 512 tiles took 0.78 of the time, with 192 and 128
# 1.4 times as long, with 64 and 128 1.2 times.
MOST_PADDING = 4

# The LSE of parts that are merged: by its rounding the parts' weights are off, at 2^9 in float32 by 3e-5.
MOST_MERGED_LSE = 2.0**9


def _why_copied(x: Tensor) -> str | None:
    if x.dtype in (torch.float16, torch.bfloat16):
        return "computed in float32"
    return None if x.stride(-1) == 1 else "its last dim is not contiguous"


def _fwd(q: Tensor, k: Tensor, v: Tensor, band: Band, score: Score, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    compute = compute_dtype(q)
    out = empty_out(q, v.shape[3])  # (B, Hq, Nq, Dv), q's order of dims in memory
    rows = band.rows()
    if rows.start == rows.stop or out.numel() == 0:
        return out.zero_(), torch.full(q.shape[:3], -torch.inf, dtype=compute)

    seeing = readable(q[:, :, rows], compute)
    part_out, part_lse = _attend_in_band(seeing, readable(k, compute), readable(v, compute), band, score)
    regular = all_within(part_lse, 0, torch.inf)
    if not regular:
        # Softmax is NaN where a row sees keys but all its scores are -inf, and where one is +inf or NaN.
        part_out.masked_fill_(~part_lse.isfinite().unsqueeze(-1), torch.nan)
    if sinks is not None:
        part_out *= share_of_keys(part_lse, sinks).unsqueeze(-1)
        if not regular:  # all of its weight is the sink's where all scores are -inf
            nothing = (part_lse == -torch.inf) & (sinks != -torch.inf).unsqueeze(-1)
            part_out.masked_fill_(nothing.unsqueeze(-1), 0)
    if score.mask is not None:
        part_out.masked_fill_(of_heads(score.mask.blind(rows, band), q.shape[1]).unsqueeze(-1), 0)
    if seeing.shape == q.shape:
        as_it_is = part_out.dtype == out.dtype and part_out.stride() == out.stride()
        return part_out if as_it_is else out.copy_(part_out), part_lse.contiguous()
    lse = torch.empty(q.shape[:3], dtype=compute)  # (B, Hq, Nq)
    for blind in (slice(0, rows.start), slice(rows.stop, band.len_q)):
        out[:, :, blind] = 0
        lse[:, :, blind] = -torch.inf
    out[:, :, rows] = part_out
    lse[:, :, rows] = part_lse
    return out, lse


def readable(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` as PyTorch's kernels can read it, a copy where it must be."""
    x = x.to(dtype)
    return x if x.stride(-1) == 1 else x.contiguous()


def _makes_rows_of_columns(q: Tensor) -> bool:
    """Whether `empty_like(q)`, as PyTorch's kernel makes its out, surely has a contiguous last dim as q has."""
    return all(stride > 1 or size == 1 for size, stride in zip(q.shape[:-1], q.stride(), strict=False))


def all_within(x: Tensor, low: float, high: float) -> bool:
    """Whether `low < abs(x) < high` everywhere; x is not empty. Never where there is a NaN."""
    least, most = x.abs().aminmax()
    return low < least.item() and most.item() < high


def fold_heads(*tensors: Tensor) -> tuple[Tensor, ...]:
    """(B, H, N, ...) as (B * H, 1, N, ...) where that is a view of each, else as they are.

    PyTorch's kernels lay their results out as (B, N, H, D), and so what is contiguous comes back contiguous.
    """
    if all(x.shape[:2] == tensors[0].shape[:2] and x.is_contiguous() for x in tensors):
        return tuple(x.flatten(0, 1).unsqueeze(1) for x in tensors)
    return tensors


def padded(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, with zeros behind the columns of those that have fewer than others."""
    most = max(x.shape[-1] for x in tensors)
    return tuple(x if x.shape[-1] == most else torch.nn.functional.pad(x, (0, most - x.shape[-1])) for x in tensors)


def _attend_in_band(q: Tensor, k: Tensor, v: Tensor, band: Band, score: Score) -> tuple[Tensor, Tensor]:
    """Attention of the rows that see a key, which q holds: (out, lse)."""
    if why_in_tiles(band, score, q.shape[3], v.shape[3]) is not None:
        return _attend_in_tiles(q, k, v, band, score)
    if not band.limits_right:
        return _attend(q, k, v, False, score.scale)
    if band.upper <= 0:
        return _attend(q, k, v, True, score.scale)
    # The leading keys that every row sees, and the others.
    one, other = (slice(0, band.upper), slice(band.upper, None))
    parts = (
        _attend(q, k[:, :, one], v[:, :, one], False, score.scale),
        _attend(q, k[:, :, other], v[:, :, other], True, score.scale),
    )
    if all(all_within(lse, -1, MOST_MERGED_LSE) for _, lse in parts):
        return _merge(*parts)
    return _attend_in_tiles(q, k, v, band, score)


def _attend(q: Tensor, k: Tensor, v: Tensor, top_left: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention where every row sees at least one key: (out, lse), lse by its formula also for inf and NaN."""
    if not _makes_rows_of_columns(q):
        q = q.contiguous()
    out, lse = _flash(*fold_heads(*padded(q, k, v)), 0.0, top_left, scale=scale)
    out, lse = out.view(*q.shape[:3], -1)[..., : v.shape[3]], lse.view(q.shape[:3])
    if all_within(lse, 0, torch.inf):
        return out, lse
    suspect = (lse == 0) | ~lse.isfinite()  # 0 may also be honest: a single key, score 0
    group = q.shape[1] // k.shape[1]
    for batch, head in suspect.any(-1).nonzero().tolist():
        keys = k[batch, head // group]  # (Nk, D)
        for rows in suspect[batch, head].nonzero().squeeze(-1).split(1024):
            scores = scale * (q[batch, head, rows] @ keys.mT)  # (rows, Nk)
            if top_left:
                scores.masked_fill_(torch.arange(keys.shape[0]) > rows.unsqueeze(-1), -torch.inf)
            lse[batch, head, rows] = scores.logsumexp(-1)
    return out, lse


def _attend_in_tiles(q: Tensor, k: Tensor, v: Tensor, band: Band, score: Score) -> tuple[Tensor, Tensor]:
    """`_attend_in_band`, a tile of rows at a time, each with the keys that its rows see."""
    rows = band.rows()
    out, lse = empty_out(q, v.shape[3]), q.new_empty(q.shape[:3])
    heads = (k.shape[1], q.shape[1] // k.shape[1])  # Hkv, group
    step = tile_rows(q, k, band)
    for start in range(rows.start, rows.stop, step):
        tile = slice(start, min(start + step, rows.stop))
        here = slice(tile.start - rows.start, tile.stop - rows.start)
        keys = band.keys(tile)
        tile_q = q[:, :, here].unflatten(1, heads)  # (B, Hkv, group, rows, D)
        products = tile_q.flatten(2, 3) @ k[:, :, keys].mT
        scores = score.of_products(products.view(*tile_q.shape[:4], -1), tile, keys, band)
        lse[:, :, here] = scores.logsumexp(-1).flatten(1, 2)
        weights = scores.softmax(-1).flatten(2, 3)  # (B, Hkv, group * rows, keys)
        out[:, :, here] = (weights @ v[:, :, keys]).view(*tile_q.shape[:4], -1).flatten(1, 2)
    return out, lse


def _merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys."""
    lse = torch.logaddexp(one[1], other[1])
    out = sum(part * (part_lse - lse).exp_().unsqueeze(-1) for part, part_lse in (one, other))
    assert isinstance(out, Tensor)
    return out, lse
