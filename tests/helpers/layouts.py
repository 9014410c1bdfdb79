"""The same values laid out in memory in other ways, with NaN in every gap between them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

View = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Layout:
    """How a (B, H, N, D) tensor is stored; `in_place`: whether a 16-bit kernel reads it as it stands."""

    name: str
    make: View
    in_place: bool

    def __str__(self) -> str:
        return self.name


def _nan(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.full(shape, math.nan, dtype=like.dtype, device=like.device)


def _permuted(*order: int) -> View:
    """Stored with the dims in this order."""
    inverse = [order.index(i) for i in range(4)]
    return lambda x: x.permute(order).contiguous().permute(inverse)


def surrounded(x: torch.Tensor) -> torch.Tensor:
    """A slice out of the middle of a larger tensor of NaN: heads, rows and columns on every side."""
    b, h, n, d = x.shape
    view = _nan(x, b + 2, h + 2, n + 5, d + 16)[1 : b + 1, 1 : h + 1, 2 : n + 2, 8 : d + 8]
    return view.copy_(x)


def _wide_rows(x: torch.Tensor) -> torch.Tensor:
    b, h, n, d = x.shape
    return _nan(x, b, h, n, d + 24)[..., :d].copy_(x)


def _one_of_three(x: torch.Tensor) -> torch.Tensor:
    """The middle third of a packed (B, N, 3, H, D) projection, as q, k and v of one matrix product are."""
    b, h, n, d = x.shape
    return _nan(x, b, n, 3, h, d)[:, :, 1].transpose(1, 2).copy_(x)


def _misaligned_storage(x: torch.Tensor) -> torch.Tensor:
    return _nan(x, x.numel() + 9)[1 : x.numel() + 1].view(x.shape).copy_(x)


def _odd_stride(dim: int) -> View:
    """Dense but for one odd stride: the batches, heads or rows (dim) are one element too far apart."""

    def make(x: torch.Tensor) -> torch.Tensor:
        strides = [0, 0, 0, 1]
        step = 1
        for i in (3, 2, 1, 0):
            strides[i] = step + (i == dim)
            step = strides[i] * x.shape[i]
        return _nan(x, step + 16).as_strided(x.shape, strides).copy_(x)

    return make


def _strided_columns(x: torch.Tensor) -> torch.Tensor:
    b, h, n, d = x.shape
    return _nan(x, b, h, n, 2 * d)[..., ::2].copy_(x)


LAYOUTS = (
    Layout("contiguous", lambda x: x.contiguous(), in_place=True),
    Layout("bnhd", _permuted(0, 2, 1, 3), in_place=True),
    Layout("nbhd", _permuted(2, 0, 1, 3), in_place=True),
    Layout("hbnd", _permuted(1, 0, 2, 3), in_place=True),
    Layout("nhbd", _permuted(2, 1, 0, 3), in_place=True),
    Layout("surrounded", surrounded, in_place=True),
    Layout("wide_rows", _wide_rows, in_place=True),
    Layout("one_of_three", _one_of_three, in_place=True),
    Layout("one_batch_expanded", lambda x: x[:1].expand_as(x), in_place=True),
    Layout("one_head_expanded", lambda x: x[:, :1].expand_as(x), in_place=True),
    Layout("one_row_expanded", lambda x: x[:, :, :1].expand_as(x), in_place=True),
    Layout("all_expanded", lambda x: x[:1, :1, :1].expand_as(x), in_place=True),
    Layout("misaligned_storage", _misaligned_storage, in_place=False),
    Layout("odd_row_stride", _odd_stride(2), in_place=False),
    Layout("odd_head_stride", _odd_stride(1), in_place=False),
    Layout("odd_batch_stride", _odd_stride(0), in_place=False),
    Layout("strided_columns", _strided_columns, in_place=False),
    Layout("columns_first", _permuted(0, 1, 3, 2), in_place=False),
    Layout("one_column_expanded", lambda x: x[..., :1].expand_as(x), in_place=False),
)
# Without those that repeat values: where a row's keys or gradients are all alike, dS is the difference of equal
# numbers, and the rounding of out, from which delta comes, outweighs it; the unfused computation has the difference
# exactly.
DISTINCT_LAYOUTS = [x for x in LAYOUTS if "expanded" not in x.name]
