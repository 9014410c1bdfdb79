"""Masks of context parallelism: q has some pieces of a sequence's rows, and the keys are all of the sequence's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import mask as _mask
from .._refusals import shown
from .intervals import check_count, make
from .matrices import from_matrix

MOST_PIECES = 8


def context_parallel(
    rows: Sequence[tuple[int, int, int]], length: int, *, left: int | None = None, device: Any = None
) -> _mask.Mask:
    """Causal attention of pieces of a sequence's rows over all of its keys, as a rank of context parallelism has it.

    Two pieces are what a rank has where work is dealt in a zigzag: one from the front and one from the back. Pass
    `causal=False` with it, and no window.

    Args:
        rows: `(begin, end, position)` of each piece, at most 8: rows begin to end - 1 of q are the sequence's rows from
            `position` on. Pieces ascend in q; rows of no piece see nothing.
        length: N, the keys of the whole sequence.
        left: how many keys before its own a row sees; `None`: all.
        device: where the mask is to be.

    Returns:
        A mask for N keys. Up to two pieces are intervals; more are a matrix, see `Mask.from_matrix`, and q's rows then
        end with the last piece. Pieces that continue each other are one.

    Raises:
        ValueError: pieces that overlap or do not ascend, more than 8 of them, or a negative number.

    Example:
        >>> print(Mask.context_parallel([(0, 2, 0), (2, 4, 6)], 8).draw(4))
        #.......
        ##......
        #######.
        ########
    """
    pieces = _joined(rows)
    left = None if left is None else check_count("left", left)
    key = torch.arange(check_count("length", length), device=device)
    if len(pieces) > 2:
        return from_matrix(_matrix(pieces, key, left))
    pieces += [(0, 0, 0)] * (2 - len(pieces))
    intervals = []
    for begin, end, position in pieces[: max(1, sum(begin < end for begin, end, _ in pieces))]:
        own = key - position + begin  # the row that stands at the key's position
        limit = torch.full_like(own, end) if left is None else (own + left + 1).clamp(max=end)
        intervals += [own.clamp(min=begin), limit]
    return make(*intervals)


def _matrix(pieces: list[tuple[int, int, int]], key: Tensor, left: int | None) -> Tensor:
    """(rows up to the last piece's end, keys)."""
    row = torch.arange(pieces[-1][1], device=key.device)
    at = torch.full_like(row, -1)
    for begin, end, position in pieces:
        at = torch.where((row >= begin) & (row < end), row - begin + position, at)
    back = at.unsqueeze(-1) - key
    seen = (back >= 0) & (at.unsqueeze(-1) >= 0)
    return seen if left is None else seen & (back <= left)


def _joined(rows: Any) -> list[tuple[int, int, int]]:
    """The pieces that have rows, checked, those that continue each other as one."""
    where = "flash_cute: rows: expected"
    if not isinstance(rows, Sequence) or not all(isinstance(x, Sequence) and len(x) == 3 for x in rows):
        raise ValueError(f"{where} pieces (begin, end, position), got {shown(rows)}")
    if len(rows) > MOST_PIECES:
        raise ValueError(f"{where} at most {MOST_PIECES} pieces, got {len(rows)}")
    joined: list[tuple[int, int, int]] = []
    last = 0
    for piece in rows:
        begin, end, position = (check_count("rows", x) for x in piece)
        if not last <= begin <= end:
            raise ValueError(f"{where} pieces that ascend and do not overlap, got {shown(rows)}")
        last = end
        if begin == end:
            continue
        if joined and joined[-1][1] == begin and joined[-1][2] + begin - joined[-1][0] == position:
            begin, _, position = joined.pop()
        joined.append((begin, end, position))
    return joined
