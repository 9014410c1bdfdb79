"""Offsets of packed sequences that no caller should give: some by name, and random ones of every kind."""

from __future__ import annotations

import torch

# cu_seqlens of 20 rows that no caller should give.
BAD_OFFSETS = {
    "first_is_not_0": (3, 8, 20),
    "first_is_negative": (-5, 8, 20),
    "past_the_end": (0, 8, 1000),
    "all_past_the_end": (100, 200, 300),
    "all_negative": (-7, -3, -1),
    "descending": (20, 8, 0),
    "one_goes_back": (0, 12, 5, 20),
    "extremes": (-(2**31), 2**31 - 1, 4, 2**31 - 1, -(2**31), 9),
}

KINDS = ("random", "descending", "past_the_end", "negative", "overlapping", "extreme", "one_goes_back")


def bad_offsets(kind: str, sequences: int, total: int, rng: torch.Generator) -> torch.Tensor:
    """(sequences + 1,) int32."""
    uniform = torch.rand(sequences + 1, generator=rng)
    ascending = (uniform.sort()[0] * total).long()
    if kind == "random":
        made = ((uniform - 0.1) * 1.2 * total).long()
    elif kind == "descending":
        made = ascending.flip(0)
    elif kind == "past_the_end":
        made = ascending * 3
    elif kind == "negative":
        made = ascending - total // 2
    elif kind == "overlapping":
        made = torch.where(torch.arange(sequences + 1) % 2 == 0, 0, total)
    elif kind == "extreme":
        ends = torch.tensor([-(2**31), -1, 0, total // 3, total, 2**31 - 1])
        made = ends[torch.randint(0, len(ends), (sequences + 1,), generator=rng)]
    else:
        made = ascending
        made[sequences // 2] = 0
    return made.to(torch.int32)
