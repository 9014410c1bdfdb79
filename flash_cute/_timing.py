"""Time attention calls fairly: contenders interleaved in one process, medians of rounds, four clocks.

The clocks, each in seconds per call:

* ``"events"``: CUDA events round back-to-back calls. The time of the kernels where they outlast the host's work.
* ``"graph"``: CUDA events round replays of a CUDA graph of the calls. The time of the kernels alone.
* ``"wall"``: the host's clock round back-to-back calls and the wait for the last. What a user sees.
* ``"host"``: the host's clock round the calls alone, in batches so short that the launch queue never fills. What a call
  costs the CPU thread.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

Clock = Literal["events", "graph", "wall", "host"]

CALLS_IN_GRAPH = 64
CALLS_IN_HOST_BATCH = 64  # the launch queue holds 1024 launches; the slowest contender makes 4 per call
MOST_INPUT_SETS = 64


def attention_flops(
    batch: int, heads: int, nq: int, nk: int, head_dim: int, *, causal: bool, backward: bool = False
) -> float:
    """Floating-point operations of one attention: 4*B*H*Nq*Nk*D, half when causal, 2.5 times that backward."""
    forward = 4.0 * batch * heads * nq * nk * head_dim * (0.5 if causal else 1.0)
    return 2.5 * forward if backward else forward


def tflops(flops: float, seconds: float) -> float:
    """Rate in TFLOP/s of `flops` operations done in `seconds`."""
    return flops / seconds * 1e-12 if seconds > 0 else math.nan


def input_sets(bytes_of_one: int, device: torch.device) -> int:
    """How many copies of the inputs to rotate among, so that no call finds its inputs in the L2 cache."""
    if device.type != "cuda":
        return 2
    cache: int = torch.cuda.get_device_properties(device).L2_cache_size
    return min(MOST_INPUT_SETS, max(2, 1 + math.ceil(2 * cache / max(1, bytes_of_one))))


def rotate(function: Callable[..., object], argument_sets: Iterable[Sequence[object]]) -> Callable[[], object]:
    """A call without arguments that gives `function` the next of `argument_sets` each time."""
    following = itertools.cycle(argument_sets).__next__
    return lambda: function(*following())


@dataclass(frozen=True)
class Contender:
    """Something to time: `context` is entered once round each batch of calls, outside the timed part."""

    name: str
    call: Callable[[], object]
    context: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(frozen=True)
class Timing:
    """Seconds per call of one contender, one entry per round; `calls`: the calls of a round."""

    rounds: tuple[float, ...]
    calls: int

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def best(self) -> float:
        return min(self.rounds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles of the rounds, as a share of the median."""
        return half_quartile_range(self.rounds) / self.median


@dataclass(frozen=True)
class Ratio:
    """How many times as fast as a peer, from the rounds that ran next to each other."""

    median: float
    spread: float


def half_quartile_range(values: Sequence[float]) -> float:
    """Half the distance between the first and third quartile; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2


def speed_ratio(ours: Timing, peer: Timing) -> Ratio:
    """The peer's time over ours, round by round: above 1 when ours is faster."""
    ratios = [theirs / mine for mine, theirs in zip(ours.rounds, peer.rounds, strict=True)]
    return Ratio(statistics.median(ratios), half_quartile_range(ratios))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Batch:
    """One contender's batch of calls, ready to be timed again and again on one clock."""

    def __init__(self, contender: Contender, clock: Clock, device: torch.device, seconds: float) -> None:
        self.contender = contender
        self.clock = clock
        self.device = device
        self.graph: torch.cuda.CUDAGraph | None = None
        self.graph_calls = 1
        self.replays = 0
        self.calls = 1
        with contender.context():
            for _ in range(3):
                contender.call()
        synchronize(device)
        self.calls = 2
        one_call = min(self.run(), self.run())
        wanted = max(1, math.ceil(seconds / one_call))
        self.calls = min(wanted, CALLS_IN_HOST_BATCH) if clock == "host" else wanted
        if clock == "graph":
            self._capture(wanted)
            one_call = self.run()  # the kernels alone may be much shorter than the calls were
            self.replays = max(1, math.ceil(seconds / (one_call * self.graph_calls)))
            self.calls = self.replays * self.graph_calls
        self.run()

    def _capture(self, wanted: int) -> None:
        """Capture the calls; as many as the rotation has input sets, unless one call is long."""
        self.graph_calls = min(wanted, CALLS_IN_GRAPH)
        graph = torch.cuda.CUDAGraph()
        with self.contender.context(), torch.cuda.graph(graph):
            for _ in range(self.graph_calls):
                self.contender.call()
        self.graph = graph
        self.replays = 1
        self.calls = self.graph_calls

    def run(self) -> float:
        """Seconds per call, over one batch. The device is idle at the start and at the end."""
        with self.contender.context():
            if self.graph is not None:
                return self._by_events(self.graph.replay, self.replays) / self.calls
            if self.clock in ("events", "graph"):
                return self._by_events(self.contender.call, self.calls) / self.calls
            return self._by_host_clock() / self.calls

    def _by_events(self, call: Callable[[], object], times: int) -> float:
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        stop = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(times):
            call()
        stop.record()
        torch.cuda.synchronize(self.device)
        return float(start.elapsed_time(stop)) * 1e-3

    def _by_host_clock(self) -> float:
        call = self.contender.call
        start = time.perf_counter()
        for _ in range(self.calls):
            call()
        if self.clock == "wall":
            synchronize(self.device)
        elapsed = time.perf_counter() - start
        synchronize(self.device)
        return elapsed


def measure(
    contenders: Sequence[Contender],
    device: torch.device,
    *,
    clock: Clock = "events",
    rounds: int = 7,
    seconds: float = 0.2,
    failures: dict[str, str] | None = None,
    on_turn: Callable[[], None] | None = None,
) -> dict[str, Timing]:
    """Time the contenders in turn, about `seconds` each.

    The card's clock follows its power draw, so contenders are compared only within a round, never one after the other,
    and the order of the rounds is such that each follows each other equally often.

    Args:
        contenders: what to time; each is warmed up first. Names must differ.
        device: where the calls run. A CPU has only the clocks "wall" and "host".
        clock: see the module's text.
        rounds: how many times each contender has its turn.
        seconds: measured time a contender, all rounds together.
        failures: where given, a contender that raises is left out and its reason stored here; else the error is raised.
        on_turn: called after each turn, outside what is timed; for a progress bar.

    Returns:
        A `Timing` for each contender that ran, by name.
    """
    if device.type != "cuda" and clock in ("events", "graph"):
        raise ValueError(f"clock: expected 'wall' or 'host' on device {device}, given {clock!r}")
    batches: list[_Batch] = []
    for contender in contenders:
        try:
            batches.append(_Batch(contender, clock, device, seconds / rounds))
        except Exception as error:
            if failures is None:
                raise
            failures[contender.name] = first_line(error)
    samples: dict[str, list[float]] = {batch.contender.name: [] for batch in batches}
    for turn in range(rounds):
        for position in turn_order(turn, len(batches)):
            batch = batches[position]
            samples[batch.contender.name].append(batch.run())
            if on_turn is not None:
                on_turn()
    return {batch.contender.name: Timing(tuple(samples[batch.contender.name]), batch.calls) for batch in batches}


def turn_order(turn: int, count: int) -> list[int]:
    """The order of a round: a row of a Williams design (Williams, Aust. J. Sci. Res. A 2, 1949).

    Over `count` rounds (twice as many for an odd count) each stands once in each place, and each directly follows each
    other equally often: whoever comes after the one that heats the card most finds it at a lower clock.
    """
    row = [(place // 2 if place % 2 == 0 else count - 1 - place // 2) for place in range(count)]
    shifted = [(item + turn) % count for item in row]
    return shifted[::-1] if count % 2 and turn // count % 2 else shifted


def first_line(error: BaseException) -> str:
    """An error as one line, for tables."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
