"""The choices that can serve a call, and their times."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _ops
from .._call_options import CallOptions
from .._progress import Progress
from .._timing import Contender, Ratio, Timing, input_sets, measure, rotate, speed_ratio

NEAR = 1.05  # choices within this of the best are timed again
FIRST_ROUNDS, LAST_ROUNDS = 3, 7
LEAST_GAIN = 0.005  # a smaller one is not told from the card's own variation

# What tells one kernel launch from another in a plan; of sm80 not `entry`, since tables of several chips share tiles.
IDENTITY = (
    *("backend", "kernel", "kernel_head_dim", "kernel_head_dim_v", "variant", "block_m", "block_n", "threads"),
    *("stages", "smem_bytes", "ctas_per_sm", "split_tiles", "split_ctas"),
)


@contextmanager
def choices_by_name() -> Iterator[None]:
    """Within it this thread's operators take a choice for a backend, as "sm90:rows192:split", and follow no tuning."""
    before = torch.ops.flash_cute.tuner_runs(True)
    try:
        yield
    finally:
        torch.ops.flash_cute.tuner_runs(before)


@dataclass(frozen=True)
class Call:
    """One attention; `lengths` of packed sequences, else empty."""

    tensors: tuple[Tensor, Tensor, Tensor]
    lengths: tuple[Any, ...]
    options: CallOptions
    deterministic: bool

    def plan(self, backward: bool, choice: str = "auto", capability: int = 0) -> dict[str, Any]:
        """What would run; raises ValueError where the choice cannot serve the call."""
        call = (*self.tensors, *self.lengths, *self.options, choice)
        with choices_by_name():
            if backward:
                operator = _ops.varlen_bwd_plan if self.lengths else _ops.bwd_plan
                found = operator(*call, self.deterministic, capability)
            else:
                operator = _ops.varlen_fwd_plan if self.lengths else _ops.fwd_plan
                found = operator(*call, capability)
        plan: dict[str, Any] = json.loads(found)
        return plan

    def forward(self, choice: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        operator = _ops.varlen_fwd_without_autograd if self.lengths else _ops.fwd_without_autograd
        result: tuple[Tensor, Tensor] = operator(q, k, v, *self.lengths, *self.options, choice)
        return result

    def backward(self, choice: str, dout: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """`tensors`: q, k, v, out and lse."""
        operator = _ops.varlen_bwd_without_autograd if self.lengths else _ops.bwd_without_autograd
        gradients: tuple[Tensor, ...]
        gradients = operator(dout, *tensors, None, *self.lengths, *self.options, self.deterministic, choice)
        return gradients

    def inputs(self, backward: bool) -> tuple[Tensor, ...]:
        """Copies of q, k and v, for a backward dout, q, k, v, out and lse."""
        tensors = tuple(_copy(x) for x in self.tensors)
        if not backward:
            return tensors
        out, lse = self.forward("auto", *tensors)
        return (torch.randn_like(out), *tensors, out, lse)

    def run(self, backward: bool, choice: str, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return self.backward(choice, *inputs) if backward else self.forward(choice, *inputs)


def _copy(x: Tensor) -> Tensor:
    """With x's strides; x itself where elements share memory."""
    if any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride(), strict=True)):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def candidates(call: Call, backward: bool, capability: int = 0, smem_bytes: int | None = None) -> dict[str, str]:
    """The choices that serve the call, each kernel once; under "plan" the name of the plan's own.

    `smem_bytes`: the shared memory that a CTA of the GPU may have; None: more than any tile has.
    """
    own = identity(call.plan(backward, capability=capability))
    tiles: list[str] = torch.ops.flash_cute.choices().split()
    of_sm80, of_sm90 = ([name for name in tiles if name.startswith(backend)] for backend in ("sm80", "sm90"))
    found: dict[tuple[Any, ...], str] = {}
    split = [f"{name}:{how}" for how in ("whole", "split") for name in (["sm90"] if backward else of_sm90)]
    for name in split + of_sm80:
        try:
            plan = call.plan(backward, name, capability)
        except (ValueError, RuntimeError):  # this backend does not serve the call, or is not in the build
            continue
        if name.startswith("sm90") and not backward and of_sm90[plan["entry"]] != name.rpartition(":")[0]:
            continue  # the head dim does not have this tile, so that the plan chose another
        if smem_bytes is None or plan["smem_bytes"] <= smem_bytes:
            found.setdefault(identity(plan), name)
    if own not in found:
        raise RuntimeError(f"flash_cute: the plan's own choice is not among {', '.join(found.values())}")
    return {"plan": found[own], **{name: name for name in found.values()}}


def identity(plan: Mapping[str, Any]) -> tuple[Any, ...]:
    """What two plans share if they launch the same kernel on the same grid."""
    entry = plan["entry"] if plan["backend"] == "sm90" else None
    return (*(plan[name] for name in IDENTITY), entry)


@dataclass(frozen=True)
class Measured:
    """One direction of a call: what each choice takes.

    Attributes:
        key: the call as a tuning table has it, see csrc/api/tuning.h.
        plan: the plan's own choice.
        best: the fastest; the plan's unless another was faster by more than the runs differ.
        seconds: by choice, the median of its last rounds.
        gain: how many times as fast as the plan's choice the best one is.
        failures: choices that did not run, with the reason.
    """

    key: dict[str, int]
    plan: str
    best: str
    seconds: dict[str, float]
    gain: float
    failures: dict[str, str]

    @property
    def direction(self) -> str:
        return "backward" if self.key["backward"] else "forward"


def tune_call(call: Call, backward: bool, seconds: float, progress: Progress | None = None) -> Measured:
    """Time the choices of one direction; `seconds`: per choice."""
    device = call.tensors[0].device
    properties: Any = torch.cuda.get_device_properties(device)
    names = candidates(call, backward, smem_bytes=properties.shared_memory_per_block_optin)
    own = names.pop("plan")
    failures: dict[str, str] = {}
    with torch.no_grad(), torch.cuda.device(device), choices_by_name():
        first = call.inputs(backward)
        sets = [first]
        needed = input_sets(sum(x.numel() * x.element_size() for x in first), device)
        sets += [call.inputs(backward) for _ in range(needed - 1)]

        def time(chosen: Sequence[str], rounds: int) -> dict[str, Timing]:
            contenders = [
                Contender(name, rotate(lambda *x, name=name: call.run(backward, name, x), sets)) for name in chosen
            ]
            share = {"rounds": rounds, "seconds": seconds * rounds / (FIRST_ROUNDS + LAST_ROUNDS)}
            return measure(contenders, device, clock="graph", failures=failures, on_turn=progress, **share)  # type: ignore[arg-type]

        if progress is not None:
            progress.steps = FIRST_ROUNDS * len(names) + 3 * LAST_ROUNDS
        timings = time(list(names), FIRST_ROUNDS)
        again = finalists(timings, own)
        if len(again) > 1:
            timings |= time(again, LAST_ROUNDS)
    best, gain = choose(timings, own, again)
    medians = {name: timing.median for name, timing in timings.items()}
    key: dict[str, int] = call.plan(backward)["tuning_key"]
    return Measured(key, own, best, medians, gain, failures)


def finalists(timings: Mapping[str, Timing], own: str) -> list[str]:
    """The plan's choice, and those that are near the best of the first rounds."""
    if own not in timings:
        raise RuntimeError(f"flash_cute: the plan's own choice, {own}, could not be timed")
    least = min(timing.median for timing in timings.values())
    near = [name for name, timing in timings.items() if timing.median <= NEAR * least and name != own]
    return [own, *sorted(near, key=lambda name: timings[name].median)]


def choose(timings: Mapping[str, Timing], own: str, again: Sequence[str]) -> tuple[str, float]:
    """The best of those timed in the last rounds, and how many times as fast as the plan's choice it is."""
    best, ratio = own, Ratio(1.0, 0.0)
    for name in again:
        found = speed_ratio(timings[name], timings[own])
        if name != own and found.median > ratio.median:
            best, ratio = name, found
    if ratio.median - 1 <= max(LEAST_GAIN, ratio.spread):
        return own, 1.0
    return best, ratio.median
