"""When each tile runs, if a multiprocessor computes key tiles at a steady rate."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from .kernels import Kernel, Problem

__all__ = ["Run", "Timeline", "timeline"]


@dataclass(frozen=True)
class Run:
    """One tile, or a part of one, on one multiprocessor's slot; times in key tiles."""

    slot: int
    start: int
    end: int
    m_block: int
    head: int  # of all batches
    key_begin: int = 0  # the first of its key tiles


@dataclass(frozen=True)
class Timeline:
    """Every tile of a launch."""

    runs: tuple[Run, ...]
    slots: int

    @property
    def length(self) -> int:
        return max((run.end for run in self.runs), default=0)

    @property
    def balance(self) -> float:
        """Work over what the slots could do until the last is done: 1 is perfect."""
        work = sum(run.end - run.start for run in self.runs)
        return work / (self.slots * self.length) if self.length else 1.0


def timeline(kernel: Kernel, problem: Problem, sms: int) -> Timeline:
    """The real scheduler's tiles on `sms` multiprocessors.

    CTAs of one tile each are started in order, on whichever slot is free first; a persistent grid's tiles are where its
    schedule puts them. A visit takes one unit of time per key tile. CTAs that share a tile have one slot.
    """
    slots = max(1, sms * kernel.shape["ctas_per_sm"] // kernel.ctas_per_tile)
    tiles = kernel.schedule(problem, sms)
    runs = []
    free = [(0, slot) for slot in range(slots)]
    busy_until = [0] * slots
    for i in range(len(tiles["m_block"])):
        key_begin, length = int(tiles["begin"][i]), int(tiles["end"][i] - tiles["begin"][i])
        if "cta" in tiles:
            key_begin = int(tiles["key_begin"][i])
            length = int(tiles["key_end"][i]) - key_begin
            slot = int(tiles["cta"][i])
            start = busy_until[slot]
            busy_until[slot] += length
        else:
            start, slot = heapq.heappop(free)
            heapq.heappush(free, (start + length, slot))
        head = int(tiles["batch"][i]) * problem.heads_q + int(tiles["head"][i])
        runs.append(Run(slot, start, start + length, int(tiles["m_block"][i]), head, key_begin))
    return Timeline(tuple(runs), slots)
