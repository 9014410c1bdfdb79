"""The forward of float8 tensors on the CPU: that of float32 tensors, to which they are dequantised."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import cpu, cpu_varlen
from ._call_options import Fp8Options, Lengths, split_dense, split_fp8, split_packed
from ._descale import dequantised, of_columns, of_rows
from ._fp8_types import BLOCK, DTYPES
from ._layout import empty_out

REASON = "q, k and v are dequantised to float32."


def fwd(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """The kernel of `flash_cute::fp8_fwd` and `_fp8_fwd` for CPU tensors; the library checks the arguments.

    `given`: the values of an Fp8Options and of a CallOptions, and backend.
    """
    fp8, rest = split_fp8(given)
    options, (backend,) = split_dense(rest)
    torch.ops.flash_cute.check_fp8_fwd(q, k, v, *fp8, *options, backend)
    with torch.no_grad():
        factors = (of_rows(fp8.descale_q, q), of_rows(fp8.descale_k, k), of_columns(fp8.descale_v, k.shape[1]))
        of_out = of_columns(fp8.descale_out, q.shape[1])
        for name, x in zip(_NAMES, (*factors, of_out), strict=True):
            check_factors(name, x)
        tensors = [dequantised(x, y, torch.float32) for x, y in zip((q, k, v), factors, strict=True)]
        out, lse = cpu.fwd(*tensors, *options, backend)
        return _quantised(out, of_out, empty_out(q, v.shape[3], DTYPES[fp8.out_dtype])), lse


def varlen_fwd(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """The kernel of `flash_cute::fp8_varlen_fwd` and `_fp8_varlen_fwd`; after the Fp8Options come those of Lengths."""
    fp8, rest = split_fp8(given)
    lengths, options, (backend,) = split_packed(rest)
    torch.ops.flash_cute.check_fp8_varlen_fwd(q, k, v, *fp8, *lengths, *options, backend)
    with torch.no_grad():
        *factors, of_out = _packed_factors(fp8, lengths, q, k)
        tensors = [dequantised(x, y, torch.float32) for x, y in zip((q, k, v), factors, strict=True)]
        out, lse = cpu_varlen.fwd(*tensors, *lengths, *options, backend)
        return _quantised(out, of_out, empty_out(q, v.shape[2], DTYPES[fp8.out_dtype])), lse


_NAMES = ("descale_q", "descale_k", "descale_v", "descale_out")


def check_factors(name: str, factors: Tensor | None) -> None:
    """Raise for a factor that no quantiser gives: a CUDA call, which does not wait for the device, cannot see it."""
    if factors is None:
        return
    bad = factors[~(factors.isfinite() & (factors > 0))]
    if bad.numel():
        raise ValueError(f"flash_cute: {name}: expected finite numbers above 0, got {bad.flatten()[0].item():g}")


def _quantised(out: Tensor, factors: Tensor | None, result: Tensor) -> Tensor:
    """`out` divided by its factors, in `result`; what float8 cannot hold becomes the largest that it can."""
    if factors is not None:
        out = out / factors
    if result.dtype.itemsize == 1:
        most = torch.finfo(result.dtype).max
        out = out.clamp(-most, most)
    return result.copy_(out)


class _Places(NamedTuple):
    """Of each row of a packed tensor: its sequence, its block there, and whether the sequence uses it."""

    sequence: Tensor
    block: Tensor
    used: Tensor


def _places(cu_seqlens: Tensor, seqused: Tensor | None, total: int) -> _Places:
    start, length = cpu_varlen.spans(cu_seqlens, seqused, total)
    rows = torch.arange(total)
    sequence = (torch.searchsorted(start, rows, right=True) - 1).clamp(min=0)
    position = rows - start[sequence]
    used = (position >= 0) & (position < length[sequence])
    return _Places(sequence, position.clamp(min=0) // BLOCK, used)


def _packed_factors(fp8: Fp8Options, lengths: Lengths, q: Tensor, k: Tensor) -> list[Tensor | None]:
    """The factors of q, k, v and out, `(T, H, 1)`, of v perhaps `(T, H, Dv)`, or numbers."""
    if lengths.cu_seqlens_q.shape[0] == 1:  # no sequence
        return [None] * 4
    of_q = _places(lengths.cu_seqlens_q, lengths.seqused_q, q.shape[0])
    of_k = _places(lengths.cu_seqlens_k, lengths.seqused_k, k.shape[0])
    found: list[Tensor | None] = []
    for name, descale, places in zip(_NAMES, fp8[:4], (of_q, of_k, of_k, of_q), strict=True):
        if descale is None or descale.numel() == 1:
            factors = used = None if descale is None else descale.reshape(())
        else:
            heads = q.shape[1] if places is of_q else k.shape[1]
            factors = _packed_factor(descale, places, heads, name == "descale_v")
            used = factors[places.used]
        check_factors(name, used)
        found.append(factors)
    return found


def _packed_factor(descale: Tensor, places: _Places, heads: int, by_column: bool) -> Tensor:
    if descale.dim() == 2:
        factors = descale[places.sequence]  # (T, Hkv) or (T, Hq)
        groups = heads // max(1, factors.shape[1])
        return (factors.repeat_interleave(groups, 1) if groups > 1 else factors).unsqueeze(-1)
    if by_column:
        return descale[places.sequence]  # (T, Hkv, Dv)
    return descale[places.sequence, :, places.block.clamp(max=descale.shape[2] - 1)].unsqueeze(-1)
