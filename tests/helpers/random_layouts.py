"""Tensors in random layouts: any order of dims, expanded dims, sizes of 0 and 1, gaps, offsets, strided last dims."""

from __future__ import annotations

import random

import torch


def layout(x: torch.Tensor, draw: random.Random) -> torch.Tensor:
    """x, or a part of it where dims are expanded, stored in another way, with NaN in every gap."""
    for dim in range(x.dim()):
        if x.shape[dim] > 0 and draw.random() < 0.15:
            x = x.narrow(dim, 0, 1).expand_as(x)
    # From the innermost dim to the outermost one; that of columns is the innermost one more often than not.
    order = list(range(x.dim()))
    draw.shuffle(order)
    if draw.random() < 0.6:
        order.remove(x.dim() - 1)
        order.insert(0, x.dim() - 1)
    strides, step = [0] * x.dim(), 1
    for dim in order:
        if x.stride(dim) == 0 and x.shape[dim] > 1:
            continue  # expanded
        if draw.random() < 0.2:
            step *= draw.choice((2, 3, 8))
        if draw.random() < 0.15:
            step += draw.choice((1, 4, 8))
        strides[dim] = step
        if x.shape[dim] == 1 and draw.random() < 0.5:
            strides[dim] = draw.choice((0, 1, 5, 1000))  # without a meaning
        step *= max(1, x.shape[dim])
    first = draw.choice((0, 0, 1, 4, 8))
    last = sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True) if size > 1)
    memory = torch.full((first + last + 1,), torch.nan, dtype=x.dtype, device=x.device)
    view = memory.as_strided(x.shape, strides, first)
    once = tuple(slice(1) if x.stride(d) == 0 and x.shape[d] > 1 else slice(None) for d in range(x.dim()))
    view[once].copy_(x[once])
    return view


def places(x: torch.Tensor) -> tuple[int, ...]:
    """The strides that matter: those of dims of size 1, and of no elements, may be others where a tensor is fake."""
    return tuple(stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1 and x.numel() > 0)


def size(draw: random.Random, *usual: int) -> int:
    """One of the usual sizes, or 0 or 1."""
    return draw.choice((*usual, *usual, *usual, 1, 1, 1, 0)) if draw.random() < 0.7 else draw.choice(usual)
