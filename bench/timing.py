"""One cell of a table: every provider on one workload, checked against each other, then timed in turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bench import backends
from bench.caches import CacheWorkload
from bench.providers import caches, ours
from bench.workloads import Inputs, Workload
from flash_cute._timing import Clock, Contender, Ratio, Timing, input_sets, measure, rotate, speed_ratio

# Of ||x - y|| / ||y||: two right answers in bf16 differ by 0.004. In float8 each has an error of 0.025, from rounding
# the probabilities to three bits, and where out is float8 too of 0.037.
LARGEST_DIFFERENCE, LARGEST_OF_FLOAT8 = 0.02, 0.08


@dataclass
class Cell:
    """What was measured of one workload on one clock.

    Attributes:
        missing: the providers that were not timed, with the reason.
        compared_with: the first peer that ran, else the first of ours.
        differences: of the others, ||result - its|| / ||its||; of the gradients, the largest of the three. A provider
            that leaves options out (`:plain`) is not compared.
    """

    workload: Workload
    clock: Clock
    mode: str
    sets: int
    timings: dict[str, Timing] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    differences: dict[str, float] = field(default_factory=dict)
    compared_with: str = ""
    plans: dict[str, str] = field(default_factory=dict)

    def ratio(self, ours: str, peer: str) -> Ratio | None:
        if ours not in self.timings or peer not in self.timings:
            return None
        return speed_ratio(self.timings[ours], self.timings[peer])

    @property
    def wrong(self) -> list[str]:
        """Providers that give another answer than the one they were compared with."""
        return _wrong(self.differences, self.workload)


@contextmanager
def _both(first: AbstractContextManager[object], second: AbstractContextManager[object]) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(first)
        stack.enter_context(second)
        yield


def time_cell(
    workload: Workload,
    providers: Sequence[str],
    device: torch.device,
    *,
    clocks: Sequence[Clock],
    modes: Sequence[str] = ("grad",),
    rounds: int = 7,
    seconds: float = 0.2,
    seed: int = 0,
    triton_tutorial: Path | None = None,
) -> list[Cell]:
    """Measure the providers on one workload: a `Cell` per clock and mode.

    Args:
        workload: the problem.
        providers: names from `backends.OURS` and `backends.PEERS`; one with a wrong answer is not timed.
        device: where.
        clocks: see `flash_cute._timing`.
        modes: "grad" (grad mode on; what requires grad is the direction's) and "inference" (`torch.inference_mode`).
        rounds: turns of each provider.
        seconds: measured time per provider and cell.
        seed: of the random inputs.
        triton_tutorial: a copy of Triton's fused-attention tutorial.
    """
    sets = input_sets(workload.input_bytes, device)
    inputs = [workload.make_inputs(device, seed + index) for index in range(sets)]
    missing: dict[str, str] = {}
    ready: list[backends.Backend] = []
    results: dict[str, tuple[torch.Tensor, ...]] = {}
    for name in providers:
        try:
            backend = backends.prepare(name, workload, device, triton_tutorial)
            result = backends.first_call(backend, workload, inputs[0])
            if not ours.is_plain(name):
                results[name] = result
            ready.append(backend)
        except backends.Unavailable as reason:
            missing[name] = str(reason)
    compared_with, differences = _differences(results)
    results.clear()
    for name in _wrong(differences, workload):
        missing[name] = f"wrong: differs by {differences[name]:.2e} from {compared_with}"
    ready = [backend for backend in ready if backend.name not in missing]
    plans = {backend.name: _plan(backend.name, workload, inputs[0]) for backend in ready}

    cells = []
    for clock in clocks:
        for mode in modes:
            cell = Cell(workload, clock, mode, sets, {}, dict(missing), differences, compared_with, plans)
            contenders = [_contender(backend, inputs, mode) for backend in ready]
            cell.timings = measure(
                contenders, device, clock=clock, rounds=rounds, seconds=seconds, failures=cell.missing
            )
            cells.append(cell)
    return cells


def _contender(backend: backends.Backend, inputs: Sequence[Inputs], mode: str) -> Contender:
    with backend.context():
        call = rotate(backend.call, [backend.arrange(one) for one in inputs])
    if mode == "grad":
        return Contender(backend.name, call, backend.context)
    return Contender(backend.name, call, lambda: _both(torch.inference_mode(), backend.context()))


def _differences(results: dict[str, tuple[torch.Tensor, ...]]) -> tuple[str, dict[str, float]]:
    """The provider compared with (see `Cell`), and how far each other's results are from its."""
    if not results:
        return "", {}
    reference = next((name for name in results if not backends.is_ours(name)), next(iter(results)))
    return reference, {
        name: float(torch.stack([_difference(*both) for both in zip(tensors, results[reference], strict=True)]).max())
        for name, tensors in results.items()
        if name != reference
    }


def _difference(tensor: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    expected = expected.float()
    if tensor.shape != expected.shape:
        return expected.new_tensor(torch.inf)
    return (tensor.float() - expected).norm() / expected.norm().clamp_min(1e-30)


def _wrong(differences: dict[str, float], workload: Workload) -> list[str]:
    """NaN counts."""
    largest = LARGEST_OF_FLOAT8 if workload.is_float8 else LARGEST_DIFFERENCE
    return [name for name, difference in differences.items() if not difference <= largest]


def _plan(name: str, workload: Workload, inputs: Inputs) -> str:
    """The kernel and tile that the library names; empty for a peer."""
    if not ours.is_ours(name):
        return ""
    if isinstance(workload, CacheWorkload):
        return caches.plan(name, workload, inputs)
    return ours.plan(name, workload, inputs)
