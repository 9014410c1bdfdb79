"""What the constructors have in common: int32 tensors of rows, made on the device without waiting for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import mask as _mask
from .._refusals import shown

# A row past every row.
NO_LIMIT = torch.iinfo(torch.int32).max


def make(*tensors: Tensor) -> _mask.Mask:
    """The mask of the tensors of one interval or two, each (N,), (B, N) or (B, H, N), of numbers that int32 holds."""
    return _mask.Mask(*(_of_three_dims(x.int()) for x in torch.broadcast_tensors(*tensors)))


def _of_three_dims(x: Tensor) -> Tensor:
    """(N,) and (B, N) as (1, 1, N) and (B, 1, N)."""
    return x[None, None] if x.dim() == 1 else x.unsqueeze(1) if x.dim() == 2 else x


def check_integers(name: str, x: Any, dims: tuple[str, ...]) -> Tensor:
    """`x`, if it is an integer tensor of one of the shapes, which are given in words."""
    if not isinstance(x, Tensor):
        raise ValueError(f"flash_cute: {name}: expected a torch.Tensor, got {shown(x)}")
    if x.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"flash_cute: {name}: expected int32 or int64, got {str(x.dtype).removeprefix('torch.')}")
    if x.dim() not in [shape.count(",") + (not shape.endswith(",)")) for shape in dims]:
        raise ValueError(f"flash_cute: {name}: expected the shape {' or '.join(dims)}, got {tuple(x.shape)}")
    return x


def check_count(name: str, number: Any, least: int = 0) -> int:
    """`number`, if it is one of the host's."""
    if isinstance(number, torch.SymInt):
        return number  # type: ignore[return-value]
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        why = ", whose value is not waited for" if isinstance(number, Tensor) else ""
        raise ValueError(f"flash_cute: {name}: expected a number of at least {least}, got {shown(number)}{why}")
    return number


def per_item(name: str, number: Any, device: Any) -> Tensor:
    """A number, or a tensor of one for each batch item, as (1,) or (B, 1)."""
    if isinstance(number, Tensor):
        return check_integers(name, number, ("(B,)",)).unsqueeze(-1)
    return torch.tensor([check_count(name, number)], device=device)


def runs(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Of each token the first of its run of equal ids, and the first behind it: int64, shaped like ids (..., N)."""
    length = ids.shape[-1]
    index = torch.arange(length, device=ids.device).expand(ids.shape)
    if length == 0:
        return index, index
    begins = torch.cat((torch.ones_like(ids[..., :1], dtype=torch.bool), ids[..., 1:] != ids[..., :-1]), -1)
    begin = index.where(begins, 0).cummax(-1).values
    # The first beginning from a token on; of the token behind this one.
    following = index.where(begins, length).flip(-1).cummin(-1).values.flip(-1)
    return begin, torch.cat((following[..., 1:], torch.full_like(following[..., :1], length)), -1)


def spans(begin: Tensor, end: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each of `length` tokens whether one of the spans holds it, and that one's begin and end, each (..., length).

    `begin` (..., n), ascending, and `end`; where a span has no token, `begin` may be that of the next.
    """
    index = torch.arange(length, device=begin.device)
    if begin.shape[-1] == 0:
        nothing = torch.zeros((*begin.shape[:-1], length), dtype=torch.long, device=begin.device)
        return nothing.bool(), nothing, nothing
    tokens = index.expand((*begin.shape[:-1], length)).contiguous()
    number = torch.searchsorted(begin.long().contiguous(), tokens, right=True) - 1
    of_token = number.clamp(min=0)
    first, limit = (x.long().gather(-1, of_token) for x in (begin, end))
    return (number >= 0) & (index < limit), first, limit


def merge(first: Tensor, limit: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """The unions of intervals (..., n): of how many that do not touch each is, (...,), and the first two of them."""
    limit = torch.maximum(limit, first)
    empty = limit == first
    first, order = first.masked_fill(empty, NO_LIMIT).sort(-1)
    limit = limit.masked_fill(empty, 0).gather(-1, order)
    reached = limit.cummax(-1).values
    begins = first < NO_LIMIT
    begins[..., 1:] &= first[..., 1:] > reached[..., :-1]
    number = begins.cumsum(-1)  # from 1, of the union that an interval belongs to
    real = first < NO_LIMIT
    unions = []
    for which in (1, 2):
        of_this = real & (number == which)
        one = first.masked_fill(~of_this, NO_LIMIT).amin(-1)
        unions.append((one, limit.masked_fill(~of_this, 0).amax(-1)))
    return begins.sum(-1), [(one.where(one < NO_LIMIT, 0), last) for one, last in unions]
