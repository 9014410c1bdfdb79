"""The plan's choices, judged by times that `bench/choices.py` measured before: no GPU is needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bench.workloads import DTYPES, Workload
from flash_cute.tune._measure import Call, candidates

SMEM_BYTES = 227 << 10  # that a CTA of a Hopper GPU may have: the times are of the choices that fit


def times_text(seconds: Mapping[str, float]) -> str:
    return " ".join(f"{name}={time * 1e6:.2f}" for name, time in seconds.items())


def times_of(row: Mapping[str, str]) -> dict[str, float]:
    """Microseconds by choice."""
    pairs = (text.rpartition("=") for text in row.get("times", "").split())
    return {name: float(time) for name, _, time in pairs}


def workload_of(row: Mapping[str, str]) -> Workload:
    shape: dict[str, Any] = {name: int(row[name]) for name in ("B", "H", "Hkv", "N", "M", "D")}
    shape |= {name: row[name] for name in ("dtype", "causal", "direction", "lengths")}
    if row["window"]:
        shape["window"] = tuple(int(side) if side else None for side in row["window"].split(","))
    return Workload(**shape)


def call_without_memory(workload: Workload) -> Call:
    def empty(heads: int, length: int) -> torch.Tensor:
        shape = (workload.rows, heads, workload.D) if workload.lengths else (workload.B, heads, length, workload.D)
        return torch.empty(shape, dtype=DTYPES[workload.dtype], device="meta")

    lengths: tuple[Any, ...] = ()
    if workload.lengths:
        offsets = torch.empty(workload.B + 1, dtype=torch.int32, device="meta")
        lengths = (offsets, offsets, None, None, workload.N, workload.N)
    score = (workload.causal, *(workload.window or (None, None)), None, None, None, None)
    tensors = (
        empty(workload.H, workload.N),
        empty(workload.Hkv, workload.M),
        empty(workload.Hkv, workload.M),
    )
    return Call(tensors, lengths, score, False)


def judged(row: Mapping[str, str], capability: int = 90) -> dict[str, str] | None:
    """The row with this build's choice in place of the one that was then the plan's; None if it was not timed."""
    times = times_of(row)
    call, backward = call_without_memory(workload_of(row)), row["direction"] == "bwd"
    plan = candidates(call, backward, capability, SMEM_BYTES)["plan"]
    if plan not in times:
        return None
    best = min(times, key=lambda name: times[name])
    found = {"plan": plan, "best": best, "plan_us": f"{times[plan]:.2f}", "best_us": f"{times[best]:.2f}"}
    return {**row, **found, "ratio": f"{times[plan] / times[best]:.4f}"}
