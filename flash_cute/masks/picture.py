"""A mask as characters."""

from __future__ import annotations

import torch
from torch import Tensor


def draw(seen: Tensor, width: int) -> str:
    """Lines of `seen` (Nq, Nk) bool: `#` where all of a character's rows see all of its keys, `+` some, `.` none."""
    len_q, len_k = seen.shape
    keys = max(1, -(-len_k // width))  # of a character
    rows = max(1, keys, -(-len_q // (2 * width)))
    lines = []
    for start in range(0, len_q, rows):
        line = []
        for part in seen[start : start + rows].split(keys, 1):
            line.append("#" if bool(part.all()) else "+" if bool(torch.any(part)) else ".")
        lines.append("".join(line))
    return "\n".join(lines)
