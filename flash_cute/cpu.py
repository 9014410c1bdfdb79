"""The forward on the CPU: PyTorch's own flash attention does the arithmetic, its gaps are closed here.

Those gaps, in torch 2.11 and 2.13: its causal mask is the top-left one, it reports LSE 0 for a row whose
scores are all -inf, it reads a strided last dim wrongly, it dies of SIGFPE when there are no keys, and
in 16 bits its LSE is off by 6e-5. So 16-bit inputs are computed in float32 (twice as fast in float16
and as fast in bfloat16 on an AVX-512 CPU, LSE within 1e-5), and the bottom-right mask, which is a
rectangle that every row sees and a square under the diagonal, is the two computed apart and merged. Where a window
limits the keys to the left too, a tile of query rows at a time is computed by matrix products.
"""

import torch
from torch import Tensor

from .band import Band, make_band, tile_rows

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: str,
    window_left: int | None,
    window_right: int | None,
    scale: float | None,
    backend: str,
    deterministic: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """The kernel of `flash_cute::fwd` and `flash_cute::_fwd` for CPU tensors; the library checks the arguments.

    `deterministic` is for the backward: a forward always is.
    """
    factor: float = torch.ops.flash_cute.check_fwd(q, k, v, causal, window_left, window_right, scale, backend)
    with torch.no_grad():
        return _fwd(q, k, v, make_band(causal, window_left, window_right, q.shape[2], k.shape[2]), factor)


def copies(q: Tensor, k: Tensor, v: Tensor) -> dict[str, str | None]:
    """Why each argument is copied; what `explain` says."""
    return {name: _why_copied(x) for name, x in (("q", q), ("k", k), ("v", v))}


def reasons(q: Tensor, k: Tensor, causal: str) -> list[str]:
    """How a call is computed, in sentences; what `explain` says."""
    sentences = ["PyTorch's own flash attention for the CPU does the arithmetic."]
    if causal == "bottom_right" and q.shape[2] < k.shape[2]:
        sentences.append(
            f"The first {k.shape[2] - q.shape[2]} keys, which every row sees, and the square under the diagonal are "
            "computed apart and merged by their LSE."
        )
    return sentences


def _why_copied(x: Tensor) -> str | None:
    if x.dtype in (torch.float16, torch.bfloat16):
        return "computed in float32"
    return None if x.stride(-1) == 1 else "its last dim is not contiguous"


def _fwd(q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float) -> tuple[Tensor, Tensor]:
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.empty_like(q)  # (B, Hq, Nq, D), q's order of dims in memory
    lse = torch.empty(q.shape[:3], dtype=compute)  # (B, Hq, Nq)

    rows = band.rows()
    for blind in (slice(0, rows.start), slice(rows.stop, band.len_q)):
        out[:, :, blind] = 0
        lse[:, :, blind] = -torch.inf
    if rows.start == rows.stop or lse.numel() == 0:
        return out, lse

    q, k, v = _readable(q[:, :, rows], compute), _readable(k, compute), _readable(v, compute)
    shared = max(0, band.upper)  # leading keys that every row sees, unless a window limits them to the left
    if band.limits_left:
        part_out, part_lse = _attend_in_window(q, k, v, band, rows, scale)
    elif not band.limits_right:
        part_out, part_lse = _attend(q, k, v, False, scale)
    elif shared == 0:
        part_out, part_lse = _attend(q, k, v, True, scale)
    else:
        part_out, part_lse = _merge(
            _attend(q, k[:, :, :shared], v[:, :, :shared], False, scale),
            _attend(q, k[:, :, shared:], v[:, :, shared:], True, scale),
        )
    # Softmax is NaN where a row sees keys but all its scores are -inf, and where one is +inf or NaN.
    lost = ~part_lse.isfinite()
    if lost.any():  # seldom, and the pass over out is a tenth of a small problem's time
        part_out.masked_fill_(lost.unsqueeze(-1), torch.nan)
    out[:, :, rows] = part_out
    lse[:, :, rows] = part_lse
    return out, lse


def _readable(x: Tensor, dtype: torch.dtype) -> Tensor:
    x = x.to(dtype)
    return x if x.stride(-1) == 1 else x.contiguous()


def _attend(q: Tensor, k: Tensor, v: Tensor, top_left: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attention where every row sees at least one key: (out, lse), lse by its formula also for inf and NaN."""
    out, lse = _flash(q, k, v, 0.0, top_left, scale=scale)
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


def _attend_in_window(q: Tensor, k: Tensor, v: Tensor, band: Band, rows: slice, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of the rows `rows`, which q holds and of which each sees a key: (out, lse)."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
    group = q.shape[1] // k.shape[1]
    step = tile_rows(q, k, band)
    for start in range(rows.start, rows.stop, step):
        tile = slice(start, min(start + step, rows.stop))
        here = slice(tile.start - rows.start, tile.stop - rows.start)
        keys = band.keys(tile)
        # (B, Hkv, group, rows, keys)
        scores = q[:, :, here].unflatten(1, (-1, group)) @ k[:, :, keys].unsqueeze(2).mT
        scores *= scale
        hidden = band.hidden(tile, keys)
        if hidden is not None:
            scores.masked_fill_(hidden, -torch.inf)
        part_lse = scores.logsumexp(-1, keepdim=True)
        lse[:, :, here] = part_lse.flatten(1, 2).squeeze(-1)
        out[:, :, here] = (scores.sub_(part_lse).exp_() @ v[:, :, keys].unsqueeze(2)).flatten(1, 2)
    return out, lse


def _merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys."""
    lse = torch.logaddexp(one[1], other[1])
    out = sum(part * (part_lse - lse).exp_().unsqueeze(-1) for part, part_lse in (one, other))
    assert isinstance(out, Tensor)
    return out, lse
