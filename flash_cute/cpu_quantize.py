"""Quantisation to float8 on the CPU: the arithmetic of csrc/quantize, in float32 and with its roundings.

The sums of a mean alone are in another order, so that it may differ in the last bits, and k's values by a step.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ._layout import empty_quantized
from .cpu_varlen import spans

BLOCK = 128  # rows that share a descale
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
LEAST_DESCALE = 2.0**-126  # a normal number, whose inverse is one too
NAN = 0x7F  # in both types


class Kind(NamedTuple):
    """How a tensor is quantised; as the operator has it (csrc/api/ops_quantize.cpp)."""

    dtype: torch.dtype
    per: str
    heads_kv: int
    center: bool
    seed: int | None


class Quantized(NamedTuple):
    """Of a dense tensor: values (B, H, N, D) float8, the descales, the mean (B, heads_kv, D), the shift (B, H, N)."""

    values: Tensor
    descale: Tensor
    mean: Tensor
    shift: Tensor


def quantize(
    x: Tensor,
    name: str,
    dtype: str,
    per: str,
    heads_kv: int,
    center: bool,
    seed: int | None,
    key_mean: Tensor | None,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The kernel of `flash_cute::quantize_fp8` for CPU tensors; the library checks the arguments."""
    arguments = (x, name, dtype, per, heads_kv, center, seed, key_mean, cu_seqlens, max_seqlen)
    torch.ops.flash_cute.check_quantize_fp8(*arguments)
    kind = Kind(getattr(torch, dtype), per, heads_kv, center, seed)
    with torch.no_grad():
        out = empty_quantized(x, kind.dtype)
        if cu_seqlens is None:
            made = _dense(x, kind, key_mean)
            out.copy_(made.values)
            results = made[1:]
        else:
            results = _packed(out, x, kind, key_mean, cu_seqlens, max_seqlen)
        descale, mean, shift = results
        # An operator's results do not share memory.
        mean, shift = (y if asked else y.new_empty(0) for y, asked in ((mean, center), (shift, key_mean is not None)))
        return out, descale, mean, shift


def rotation_signs(seed: int, head_dim: int) -> Tensor:
    """(D,) float32: what each column is multiplied by before the transform; csrc/api/quantize.cpp has the same."""
    return torch.tensor(_signs(seed)[:head_dim])


def _packed(
    out: Tensor, x: Tensor, kind: Kind, key_mean: Tensor | None, cu_seqlens: Tensor, max_seqlen: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Each sequence as a batch of one. Rows of no sequence are 0."""
    rows, heads, head_dim = x.shape
    start, length = (part.tolist() for part in spans(cu_seqlens, None, rows))
    blocks = -(-(rows if max_seqlen is None else max_seqlen) // BLOCK)
    of_entry = {"head": (kind.heads_kv,), "block": (heads, blocks), "channel": (kind.heads_kv, head_dim)}[kind.per]
    descale = torch.ones(len(start), *of_entry)
    mean = torch.zeros(len(start), kind.heads_kv, head_dim)
    shift = torch.zeros(heads, rows)
    out.view(torch.uint8).zero_()
    for b, (first, count) in enumerate(zip(start, length, strict=True)):
        if count == 0:
            continue
        of_rows = slice(first, first + count)
        alone = x[of_rows].transpose(0, 1).unsqueeze(0)
        made = _dense(alone, kind, None if key_mean is None else key_mean[b : b + 1])
        out[of_rows] = made.values[0].transpose(0, 1)
        if kind.per == "block":
            used = min(blocks, made.descale.shape[2])
            descale[b, :, :used] = made.descale[0, :, :used]
            out[of_rows][blocks * BLOCK :].view(torch.uint8).fill_(NAN)  # there are no descales for them
        else:
            descale[b] = made.descale[0]
        mean[b], shift[:, of_rows] = made.mean[0], made.shift[0]
        if kind.per == "block":
            shift[:, of_rows][:, blocks * BLOCK :] = math.nan
    return descale, mean, shift


def _dense(x: Tensor, kind: Kind, key_mean: Tensor | None) -> Quantized:
    batch, heads, rows, head_dim = x.shape
    y = x.float()
    if kind.seed is not None:
        y = _rotate(y, kind.seed)
    mean = torch.zeros(batch, kind.heads_kv, head_dim)
    if kind.center and rows:
        mean = (y.double().where(y.isfinite(), 0).sum(2) / rows).float()  # (B, H, D)
        y = y - mean.unsqueeze(2)
    shift = torch.zeros(batch, heads, rows)
    if key_mean is not None:
        of_heads = key_mean.double().repeat_interleave(heads // max(kind.heads_kv, 1), 1)
        shift = (y.double() * of_heads.unsqueeze(2)).sum(3).float()
    sizes = y.abs()
    descale = _descale(sizes.where(sizes < math.inf, 0), kind)
    if kind.per == "block":
        of_rows = descale.repeat_interleave(BLOCK, 2)[:, :, :rows].unsqueeze(3)
    else:
        of_group = descale.unsqueeze(2) if kind.per == "head" else descale  # (B, heads_kv, 1 or D)
        of_rows = of_group.repeat_interleave(heads // max(kind.heads_kv, 1), 1).unsqueeze(2)
    largest = LARGEST[kind.dtype]
    return Quantized((y / of_rows).clamp(-largest, largest).to(kind.dtype), descale, mean, shift)


def _descale(sizes: Tensor, kind: Kind) -> Tensor:
    """The largest of `sizes` (B, H, N, D) over the largest finite value: of heads, blocks or channels."""
    batch, heads, rows, head_dim = sizes.shape
    if kind.per == "block":
        padded = torch.nn.functional.pad(sizes, (0, 0, 0, -rows % BLOCK))
        parts = padded.unflatten(2, (-(-rows // BLOCK), BLOCK)).flatten(3)  # (B, H, blocks, columns)
        amax = parts.amax(3)
    else:
        of_group = sizes.view(batch, kind.heads_kv, heads // max(kind.heads_kv, 1), rows, head_dim)
        dims = (2, 3, 4) if kind.per == "head" else (2, 3)
        shape = (batch, kind.heads_kv) if kind.per == "head" else (batch, kind.heads_kv, head_dim)
        amax = of_group.amax(dims) if sizes.numel() else sizes.new_zeros(shape)
    return (amax / LARGEST[kind.dtype]).clamp(min=LEAST_DESCALE).where(amax > 0, 1.0)


def _rotate(y: Tensor, seed: int) -> Tensor:
    """Each part of the last dim by the orthogonal transform: signs, then a Walsh-Hadamard transform."""
    head_dim = y.shape[3]
    size = head_dim & -head_dim  # the largest power of two that divides it
    y = y * rotation_signs(seed, head_dim)
    distance = 1
    while distance < size:
        pairs = y.unflatten(3, (-1, 2, distance))
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack((a + b, a - b), -2).flatten(3)
        distance *= 2
    return y * (1 / math.sqrt(size))


@cache
def _signs(seed: int) -> list[float]:
    """Of 256 columns, from splitmix64."""
    mask, state, signs = (1 << 64) - 1, seed & ((1 << 64) - 1), []
    for _ in range(4):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
        z ^= z >> 31
        signs += [-1.0 if z >> i & 1 else 1.0 for i in range(64)]
    return signs
