"""What float8 attention is given in every measurement: e4m3 values, and the factors that they are multiplied by.

A problem's dtype is "e4m3", and its inputs are six tensors: q, k and v in float8, and for each of them the factors
`(B, Hkv)` in float32 that give back what it stands for. Every provider gets the same: all heads of a tensor have one
factor, since cuDNN takes no more, and it is a power of two, so that bfloat16 holds the same values exactly.
"""

from __future__ import annotations

import math

import torch

LARGEST = 448.0  # of e4m3
Tensors = tuple[torch.Tensor, ...]


def quantised(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    """float32 q (B, H, N, D), k (B, Hkv, M, D) and v (B, Hkv, M, Dv) in e4m3, and the factors of each, (B, Hkv)."""
    factors = [_factor(x) for x in (q, k, v)]
    values = (x.div(factor).to(torch.float8_e4m3fn) for x, factor in zip((q, k, v), factors, strict=True))
    return *values, *(torch.full(k.shape[:2], factor, device=k.device) for factor in factors)


def _factor(x: torch.Tensor) -> float:
    """The least power of two with which the largest value does not pass e4m3's largest."""
    largest = float(x.abs().max())
    return 2.0 ** math.ceil(math.log2(largest / LARGEST)) if largest else 1.0


def dequantised(inputs: Tensors, dtype: torch.dtype) -> Tensors:
    """What the inputs stand for: q, k and v in a wider dtype."""
    values, factors = inputs[:3], inputs[3:]
    pairs = zip(values, factors, strict=True)
    return tuple((x.float() * _spread(factor, x, of_v=i == 2)).to(dtype) for i, (x, factor) in enumerate(pairs))


def _spread(factor: torch.Tensor, x: torch.Tensor, of_v: bool) -> torch.Tensor:
    """A factor by head, by block of 128 rows, or, `of_v`, by column, as `flash_cute.attention` takes it."""
    heads = factor.repeat_interleave(x.shape[1] // factor.shape[1], 1)
    if factor.dim() == 2:
        return heads[..., None, None]
    return heads[:, :, None] if of_v else heads.repeat_interleave(128, 2)[:, :, : x.shape[2], None]
