"""A call's mask as the CPU path reads it, a tile of rows and keys at a time; `flash_cute.Mask` is the caller's."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ._call_options import MaskTensors
from .band import SCORES, Band
from .masks.checks import BLOCK


class Squares(NamedTuple):
    """A tensor of bools with an element for `edge` rows by `edge` keys."""

    seen: Tensor  # (B or 1, Hkv or 1, rows or 1, keys or 1)
    edge: int
    # Of sequences in one tensor, which `seen` is of, with B 1: the first row and the first key of each, (B,) int64.
    starts: tuple[Tensor, Tensor] | None = None

    def tile(self, rows: slice, keys: slice) -> Tensor:
        """(B or 1, Hkv or 1, rows or 1, keys or 1) bool."""
        if self.starts is None and self.edge == 1:
            return self.seen[:, :, _within(self.seen, 2, rows), _within(self.seen, 3, keys)]
        row, key = (
            torch.zeros((1, 1), dtype=torch.long)
            if self.seen.shape[dim] == 1
            else (self._first(which) + torch.arange(part.start, part.stop)) // self.edge
            for which, (dim, part) in enumerate(((2, rows), (3, keys)))
        )  # (B or 1, rows or 1) and (B or 1, keys or 1)
        if row.shape[0] == 1 and key.shape[0] == 1:
            return self.seen.index_select(2, row[0]).index_select(3, key[0])
        return self.seen[0][:, row.unsqueeze(-1), key.unsqueeze(-2)].transpose(0, 1)

    def _first(self, which: int) -> Tensor:
        return torch.zeros((1, 1), dtype=torch.long) if self.starts is None else self.starts[which].unsqueeze(-1)


class GivenMask(NamedTuple):
    """Row i sees key j if `first[..., j] <= i < limit[..., j]` of one of the intervals, and all squares show it."""

    intervals: tuple[tuple[Tensor, Tensor], ...]  # (first, limit) each, (B or 1, Hkv or 1, Nk); none: they hide nothing
    squares: tuple[Squares, ...] = ()

    def sees(self, rows: slice, keys: slice) -> Tensor:
        """(B or 1, Hkv or 1, rows or 1, keys or 1) bool."""
        row = torch.arange(rows.start, rows.stop).unsqueeze(-1)
        seen = None
        for first, limit in self.intervals:
            one = (row >= first[..., None, keys]) & (row < limit[..., None, keys])
            seen = one if seen is None else seen | one
        for square in self.squares:
            tile = square.tile(rows, keys)
            seen = tile if seen is None else seen & tile
        assert seen is not None
        return seen

    def hide(self, scores: Tensor, rows: slice, keys: slice) -> Tensor:
        """`scores` (B, Hkv, group, rows, keys) with -inf, in place, where a row does not see the key."""
        return scores.masked_fill_(~self.sees(rows, keys).unsqueeze(2), -torch.inf)

    def blind(self, rows: slice, band: Band) -> Tensor:
        """(B or 1, Hkv or 1, rows) bool: which rows see no key in the band."""
        parts = []
        step = max(1, SCORES // max(1, self._items() * band.len_k))
        for start in range(rows.start, rows.stop, step):
            tile = slice(start, min(start + step, rows.stop))
            keys = band.keys(tile)
            seen = self.sees(tile, keys)
            parts.append(~(seen & band.sees(tile, keys)).any(-1))
        return torch.cat(parts, -1)

    def _items(self) -> int:
        """How many batch items and heads `sees` tells apart."""
        items = [first.shape[:2] for first, _ in self.intervals]
        for one in self.squares:
            items.append(one.seen.shape[:2])
            if one.starts is not None:
                items.append(torch.Size((one.starts[0].shape[0], 1)))
        return torch.broadcast_shapes(*items).numel()


def make_given_mask(tensors: MaskTensors, len_q: int) -> GivenMask | None:
    """The mask of checked arguments; None where it hides nothing, so that such a call has the bits of one without."""
    squares = [Squares(x, edge) for x, edge in ((tensors.matrix, 1), (tensors.blocks, BLOCK)) if x is not None]
    return without_idle_parts(GivenMask(intervals_of(tensors), tuple(squares)), len_q)


def intervals_of(tensors: MaskTensors) -> tuple[tuple[Tensor, Tensor], ...]:
    """(first, limit) of the mask's one interval or two."""
    one = (tensors.first_row, tensors.row_limit)
    if tensors.first_row_2 is None or tensors.row_limit_2 is None:
        return (one,)
    return (one, (tensors.first_row_2, tensors.row_limit_2))


def without_idle_parts(mask: GivenMask, len_q: int) -> GivenMask | None:
    """The mask without what hides nothing; None where none of it does."""
    squares = tuple(one for one in mask.squares if not bool(one.seen.all()))
    idle = any(bool(((first <= 0) & (limit >= len_q)).all()) for first, limit in mask.intervals)
    return None if idle and not squares else GivenMask(() if idle else mask.intervals, squares)


def of_heads(x: Tensor, heads_q: int) -> Tensor:
    """(B or 1, Hkv or 1, ...) as (B or 1, Hq or 1, ...)."""
    return x if x.shape[1] == 1 else x.repeat_interleave(heads_q // x.shape[1], 1)


def _within(x: Tensor, dim: int, part: slice) -> slice:
    """What to take of a dim for some rows or keys: the one that it has for all, or those."""
    return slice(0, 1) if x.shape[dim] == 1 else part
