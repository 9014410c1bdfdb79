"""A mask by intervals of rows per key, as the CPU path reads it; `flash_cute.Mask` is the caller's."""

from typing import NamedTuple

import torch
from torch import Tensor

from ._call_options import MaskTensors
from .band import SCORES, Band


class ColumnMask(NamedTuple):
    """Row i sees key j if `first[..., j] <= i < limit[..., j]` of one of the intervals."""

    intervals: tuple[tuple[Tensor, Tensor], ...]  # (first, limit) each, (B or 1, Hkv or 1, Nk)

    def sees(self, rows: slice, keys: slice) -> Tensor:
        """(B or 1, Hkv or 1, rows, keys) bool."""
        row = torch.arange(rows.start, rows.stop).unsqueeze(-1)
        seen = None
        for first, limit in self.intervals:
            one = (row >= first[..., None, keys]) & (row < limit[..., None, keys])
            seen = one if seen is None else seen | one
        assert seen is not None
        return seen

    def hide(self, scores: Tensor, rows: slice, keys: slice) -> Tensor:
        """`scores` (B, Hkv, group, rows, keys) with -inf, in place, where a row does not see the key."""
        return scores.masked_fill_(~self.sees(rows, keys).unsqueeze(2), -torch.inf)

    def blind(self, rows: slice, band: Band) -> Tensor:
        """(B or 1, Hkv or 1, rows) bool: which rows see no key in the band."""
        parts = []
        step = max(1, SCORES // max(1, self.intervals[0][0].numel()))
        for start in range(rows.start, rows.stop, step):
            tile = slice(start, min(start + step, rows.stop))
            keys = band.keys(tile)
            seen = self.sees(tile, keys)
            parts.append(~(seen & band.sees(tile, keys)).any(-1))
        return torch.cat(parts, -1)


def make_column_mask(tensors: MaskTensors, len_q: int) -> ColumnMask | None:
    """The mask of checked arguments; None where it hides nothing, so that such a call has the bits of one without."""
    intervals = [(tensors.first_row, tensors.row_limit)]
    if tensors.first_row_2 is not None and tensors.row_limit_2 is not None:
        intervals.append((tensors.first_row_2, tensors.row_limit_2))
    if any(bool(((first <= 0) & (limit >= len_q)).all()) for first, limit in intervals):
        return None
    return ColumnMask(tuple(intervals))


def of_heads(x: Tensor, heads_q: int) -> Tensor:
    """(B or 1, Hkv or 1, ...) as (B or 1, Hq or 1, ...)."""
    return x if x.shape[1] == 1 else x.repeat_interleave(heads_q // x.shape[1], 1)
