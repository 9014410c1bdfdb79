"""The oracle of packed sequences: that of dense calls, one sequence after the other."""

import itertools
from typing import Any

import torch
from torch import Tensor

from ..mask import Mask
from .oracle import attention, gradients


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool | str = False,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    mask: Mask | None = None,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
    descale_v: Tensor | None = None,
    descale_out: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The oracle of packed sequences: what `flash_cute.varlen_fwd` should return, one sequence after the other.

    Args:
        q, k, v: `(Tq, Hq, D)`, `(Tk, Hkv, D)` and `(Tk, Hkv, Dv)`.
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, causal: as in `flash_cute.varlen_fwd`.
        alibi_slopes: `(Hq,)` or `(B, Hq)`.
        mask: as in `flash_cute.varlen_fwd`: of all keys, its rows those of the packed tensor.
        descale_q, descale_k, descale_v, descale_out: as in `attention`, by sequence.
        options: further arguments of `attention`, by keyword.

    Returns:
        `(out, lse)`: `(Tq, Hq, Dv)` and `(Hq, Tq)`, both float64.

    Example:
        >>> q, k, v = (torch.randn(10, 2, 8) for _ in range(3))
        >>> offsets = torch.tensor([0, 3, 10], dtype=torch.int32)
        >>> out, lse = varlen_attention(q, k, v, offsets, offsets)
        >>> torch.allclose(out[:3].transpose(0, 1), attention(*(x[:3].transpose(0, 1)[None] for x in (q, k, v)))[0][0])
        True
    """
    out = torch.zeros((*q.shape[:2], v.shape[2]), dtype=torch.float64, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, dtype=torch.float64, device=q.device)
    of_q, of_k = ranges(cu_seqlens_q, seqused_q, q.shape[0]), ranges(cu_seqlens_k, seqused_k, k.shape[0])
    descales = {"descale_q": descale_q, "descale_k": descale_k, "descale_v": descale_v, "descale_out": descale_out}
    for b, (rows, keys) in enumerate(zip(of_q, of_k, strict=True)):
        part_q, part_k, part_v = (_alone(x) for x in (q[rows], k[keys], v[keys]))
        given: dict[str, Any] = {"alibi_slopes": _slopes_of(alibi_slopes, b), **options}
        given["mask"] = _mask_of(mask, rows, keys)
        given |= {name: x if x is None or x.numel() == 1 else x[b : b + 1] for name, x in descales.items()}
        part_out, part_lse = attention(part_q, part_k, part_v, causal, **given)
        out[rows], lse[:, rows] = part_out[0].transpose(0, 1), part_lse[0]
    return out, lse


def varlen_gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    causal: bool | str = False,
    *,
    dlse: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    mask: Mask | None = None,
    **options: Any,
) -> tuple[Tensor, ...]:
    """The oracle of the backward of packed sequences: what `flash_cute.varlen_bwd` should return.

    Args:
        dout: `(Tq, Hq, Dv)`, the gradient of out.
        dlse: `(Hq, Tq)`, the gradient of the LSE; `None`: 0.
        Others: as in `varlen_attention`.

    Returns:
        `(dq, dk, dv)`, shaped like q, k and v, float64; with `sinks` `(dq, dk, dv, dsinks)`.

    Example:
        >>> q, k, v = (torch.randn(10, 2, 8) for _ in range(3))
        >>> offsets = torch.tensor([0, 3, 10], dtype=torch.int32)
        >>> dq, dk, dv = varlen_gradients(torch.ones(10, 2, 8), q, k, v, offsets, offsets)
        >>> torch.allclose(dv[3:].sum(0), torch.full((2, 8), 7.0).double())  # every row's weights sum to 1
        True
    """
    sinks: Tensor | None = options.get("sinks")
    totals = [torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v, sinks) if x is not None]
    of_q, of_k = ranges(cu_seqlens_q, seqused_q, q.shape[0]), ranges(cu_seqlens_k, seqused_k, k.shape[0])
    for b, (rows, keys) in enumerate(zip(of_q, of_k, strict=True)):
        part_dout, part_q, part_k, part_v = (_alone(x) for x in (dout[rows], q[rows], k[keys], v[keys]))
        given: dict[str, Any] = {
            "dlse": None if dlse is None else dlse[None, :, rows],
            "alibi_slopes": _slopes_of(alibi_slopes, b),
        }
        given["mask"] = _mask_of(mask, rows, keys)
        parts = gradients(part_dout, part_q, part_k, part_v, causal, **given, **options)
        for total, where, part in zip(totals, (rows, keys, keys), parts, strict=False):
            total[where] = part[0].transpose(0, 1)
        if sinks is not None:
            totals[3] += parts[3]
    return tuple(totals)


def ranges(cu_seqlens: Tensor, seqused: Tensor | None, total: int) -> list[slice]:
    """What is in use of each sequence, whatever the offsets hold, as `flash_cute.varlen_attention` says."""
    offsets = itertools.accumulate((min(max(offset, 0), total) for offset in cu_seqlens.tolist()), max)
    found = []
    for b, (start, end) in enumerate(itertools.pairwise(offsets)):
        if seqused is not None:
            end = min(end, start + max(0, int(seqused[b])))
        found.append(slice(start, end))
    return found


def _alone(x: Tensor) -> Tensor:
    """A sequence's (N, H, D) as a batch of one, (1, H, N, D)."""
    return x.transpose(0, 1).unsqueeze(0)


def _mask_of(mask: Mask | None, rows: slice, keys: slice) -> Mask | None:
    """A sequence's part of the mask of a packed call."""
    if mask is None:
        return None
    *intervals, matrix, blocks = mask.tensors
    part = Mask(*(None if x is None else x[:, :, keys] for x in intervals)).rows_from(rows.start)  # type: ignore[arg-type]
    if matrix is not None:
        of_rows = matrix if matrix.shape[2] == 1 else matrix[:, :, rows]
        part = part.with_matrix(of_rows if matrix.shape[3] == 1 else of_rows[..., keys])
    if blocks is not None:
        row, key = (torch.arange(x.start, x.stop, device=blocks.device) // 64 for x in (rows, keys))
        part = part.with_matrix(blocks[:, :, row][..., key])
    return part


def _slopes_of(alibi_slopes: Tensor | None, b: int) -> Tensor | None:
    return alibi_slopes if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes[b]
