"""Counts the calls that flash_cute served in place of PyTorch's own attention, and those that it passed on, and why."""

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_MOST_REASONS = 100  # a reason names sizes and dtypes, so there may be many; the rest are counted together


@dataclass(frozen=True)
class Report:
    """What `report()` returns; prints as text, and has the same as data.

    enabled: whether `enable()` is in force. served: calls by the entry that took them. passed_on: calls by the reason.
    """

    enabled: bool
    served: dict[str, int]
    passed_on: dict[str, int]

    @property
    def data(self) -> dict[str, Any]:
        return {"enabled": self.enabled, "served": self.served, "passed_on": self.passed_on}

    def __str__(self) -> str:
        lines = [f"scaled_dot_product_attention: flash_cute is {'enabled' if self.enabled else 'not enabled'}"]
        lines.append(f"served by flash_cute: {sum(self.served.values())}")
        lines += [f"  {count:>8} {entry}" for entry, count in self.served.items()]
        lines.append(f"passed on to PyTorch: {sum(self.passed_on.values())}")
        lines += [f"  {count:>8} {reason}" for reason, count in self.passed_on.items()]
        return "\n".join(lines)


class Tally:
    """The counters; any thread may count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Of each entry: how often it has been ticked, which needs no lock (0.3 us less), and how many of these ticks do
        # not count: a report's own, and what was before a reset.
        self._served: dict[str, itertools.count[int]] = {}
        self._not_served: Counter[str] = Counter()
        self._passed_on: Counter[str] = Counter()

    def serve(self, entry: str) -> None:
        self.counter(entry)()

    def counter(self, entry: str) -> Callable[[], int]:
        """What counts a call of `entry`, for those who call it often."""
        ticks = self._served.get(entry)
        if ticks is None:
            ticks = self._served.setdefault(entry, itertools.count())
        return ticks.__next__

    def pass_on(self, reason: str) -> None:
        with self._lock:
            if reason not in self._passed_on and len(self._passed_on) >= _MOST_REASONS:
                reason = "other reasons"
            self._passed_on[reason] += 1

    def report(self, enabled: bool, reset: bool) -> Report:
        with self._lock:
            served: Counter[str] = Counter()
            for entry, ticks in list(self._served.items()):
                total = next(ticks)
                served[entry] = total - self._not_served[entry]
                self._not_served[entry] = total + 1 if reset else self._not_served[entry] + 1
            passed_on = dict(self._passed_on.most_common())
            if reset:
                self._passed_on.clear()
        return Report(enabled, {entry: count for entry, count in served.most_common() if count}, passed_on)


class _PerThread(threading.local):
    passing_on = False


tally = Tally()
# `passing_on`: whether this thread is within a call that is counted as passed on already, which stays PyTorch's.
this_thread = _PerThread()
