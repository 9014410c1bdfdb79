"""The mask of a call, as the CPU path and `explain` read it: which keys each row sees."""

from typing import NamedTuple

import torch
from torch import Tensor


class Band(NamedTuple):
    """Row i of len_q sees columns j with `i + lower <= j <= i + upper` and `0 <= j < len_k`; `lower <= upper`.

    The same as csrc/contract/params.h has for the kernels. A side without a limit is clamped to the first value that
    limits no row, so that limits compare and add without a case of their own.
    """

    lower: int
    upper: int
    len_q: int
    len_k: int

    @property
    def limits_left(self) -> bool:
        """Whether some row does not see the first key for being too far behind it."""
        return self.lower > 1 - self.len_q

    @property
    def limits_right(self) -> bool:
        """Whether some row does not see the last key for being too far ahead of it."""
        return self.upper < self.len_k - 1

    def rows(self) -> slice:
        """The rows that see a key. Those before look at keys before the first, those behind at keys after the last."""
        if self.len_k == 0:
            return slice(0, 0)
        start = min(max(0, -self.upper), self.len_q)
        return slice(start, max(start, min(self.len_q, self.len_k - self.lower)))

    def keys(self, rows: slice) -> slice:
        """The keys that some of the rows see."""
        begin = min(max(0, rows.start + self.lower), self.len_k)
        return slice(begin, max(begin, min(self.len_k, rows.stop + self.upper)))

    def sees(self, rows: slice, keys: slice) -> Tensor:
        """(rows, keys) bool: whether a row sees the key."""
        distance = torch.arange(keys.start, keys.stop) - torch.arange(rows.start, rows.stop).unsqueeze(-1)
        return (distance >= self.lower) & (distance <= self.upper)

    def hide(self, scores: Tensor, rows: slice, keys: slice) -> Tensor:
        """`scores` (..., rows, keys) with -inf, in place, where a row does not see the key."""
        # What all of the rows see begins where the last one does and ends where the first one does.
        begin = min(max(keys.start, rows.stop - 1 + self.lower), keys.stop)
        end = max(begin, min(keys.stop, rows.start + self.upper + 1))
        for part in (slice(keys.start, begin), slice(end, keys.stop)):
            if part.start < part.stop:
                distance = torch.arange(part.start, part.stop) - torch.arange(rows.start, rows.stop).unsqueeze(-1)
                hidden = (distance < self.lower) | (distance > self.upper)
                scores[..., part.start - keys.start : part.stop - keys.start].masked_fill_(hidden, -torch.inf)
        return scores


def make_band(causal: str, window_left: int | None, window_right: int | None, len_q: int, len_k: int) -> Band:
    """The band of checked arguments."""
    offset = 0 if causal == "top_left" else len_k - len_q
    if causal != "none":
        window_right = 0
    lowest, highest = min(1 - len_q, len_k), max(len_k - 1, -len_q)  # no limit
    lower = lowest if window_left is None else min(max(offset - window_left, lowest), len_k)
    upper = highest if window_right is None else max(min(offset + window_right, highest), -len_q)
    return Band(lower, upper, len_q, len_k)


def seen_keys(causal: str, window_left: int | None, len_q: int, len_k: int) -> range:
    """The keys that the rows see, and perhaps some between them that none sees.

    All from the first of them on, so that rows stay at their distance from the last; where the first row has position
    0, all up to the last of them.
    """
    if len_q == 0:
        return range(0)
    if causal == "top_left":
        return range(min(len_q, len_k))
    if window_left is None:
        return range(len_k)
    return range(min(max(0, len_k - len_q - window_left), len_k), len_k)


# Elements of a tile's (batch, query heads, rows, keys): 4 MiB in float32, which caches hold, and under a causal mask
# small tiles have less to mask: 64 MiB took 1.5 to 2 times as long. With so many keys that few rows fit, larger.
SCORES = 1 << 20
FEW_ROWS = 32
LARGEST = 16  # times SCORES


def tile_rows(q: Tensor, k: Tensor, band: Band) -> int:
    """How many query rows the CPU path works on at a time."""
    keys, most = band.len_k, band.len_q
    if band.limits_left and band.limits_right:
        width = band.upper - band.lower
        most = max(64, width)  # rows more than a window has keys would make most of a tile's scores hidden ones
        keys = min(keys, most + width)
    row = max(1, q.shape[0] * q.shape[1] * keys)
    return max(1, min(most, max(SCORES // row, min(FEW_ROWS, LARGEST * SCORES // row))))
