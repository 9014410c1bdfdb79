"""What float8 tensors stand for: their values times their descales."""

import torch
from torch import Tensor

from ._fp8_types import BLOCK


def of_rows(descale: Tensor | None, x: Tensor) -> Tensor | None:
    """The factors of q or k `(B, H, N, D)`, so that they broadcast. `descale`: as in `attention`; None: 1.

    The last of too few blocks serves the rows behind it, as those of packed sequences need it.
    """
    if descale is None or descale.numel() == 1:
        return None if descale is None else descale.reshape(())
    if descale.dim() == 2:
        return _of_heads(descale, x.shape[1])[..., None, None]
    blocks = torch.arange(x.shape[2], device=x.device) // BLOCK
    return descale[:, :, blocks.clamp(max=descale.shape[2] - 1), None]


def of_columns(descale: Tensor | None, heads: int) -> Tensor | None:
    """The factors of v `(B, H, N, D)`, or of an out with `heads`."""
    if descale is None or descale.numel() == 1:
        return None if descale is None else descale.reshape(())
    if descale.dim() == 2:
        return _of_heads(descale, heads)[..., None, None]
    return descale.unsqueeze(2)


def dequantised(x: Tensor, factors: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`x` times its factors."""
    values = x.to(dtype)
    return values if factors is None else values * factors.to(dtype)


def _of_heads(descale: Tensor, heads: int) -> Tensor:
    """(B, heads) of (B, Hkv): the query heads of a key head have its factor."""
    groups = heads // max(1, descale.shape[1])
    return descale.repeat_interleave(groups, 1) if groups > 1 else descale
