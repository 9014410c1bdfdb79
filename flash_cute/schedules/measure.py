"""Runs the schedules beside each other and beside PyTorch's attention on the GPU: speed, and error against float64."""

from __future__ import annotations

import csv
import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .. import fwd as library_fwd
from .. import reference
from .._timing import Contender, attention_flops, input_sets, measure, rotate, tflops
from . import _library

__all__ = ["COLUMNS", "PEERS", "Problem", "plot", "read_csv", "run", "turns", "write_csv"]

PEERS = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
}
LIBRARY = "flash_cute sm80"
COLUMNS = {
    "gpu": "",
    "torch": "",
    "dtype": "",
    "B": "",
    "H": "",
    "Hkv": "",
    "N": "",
    "D": "",
    "causal": "",
    "name": "a schedule, the library's sm80 backend, or a backend of SDPA",
    "tflops": "of the contract's FLOPs; empty: it does not serve the call",
    "spread": "half the distance between the rounds' quartiles, as a share",
    "error": "largest of out against float64",
    "allowed": "what the contract allows",
    "lse_error": "largest, as a share of max(1, |lse|); SDPA returns none",
    "reason": "why it does not serve the call",
}
ERROR_LENGTH = 2048  # rows and keys of the call whose error is measured: float64 scores of one head take 32 MB


@dataclass(frozen=True)
class Problem:
    """One call."""

    D: int
    N: int
    B: int = 1
    H: int = 32
    Hkv: int = 32
    causal: bool = False
    dtype: torch.dtype = torch.float16

    @property
    def flops(self) -> float:
        return attention_flops(self.B, self.H, self.N, self.N, self.D, causal=self.causal)

    def inputs(self, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator("cuda").manual_seed(seed)

        def normal(heads: int) -> Tensor:
            shape = (self.B, heads, self.N, self.D)
            return torch.randn(shape, generator=generator, device="cuda", dtype=self.dtype)

        return normal(self.H), normal(self.Hkv), normal(self.Hkv)


def run(
    problem: Problem,
    schedules: Sequence[str],
    *,
    peers: Sequence[str] = tuple(PEERS),
    rounds: int = 7,
    seconds: float = 0.2,
    seed: int = 0,
    on_turn: Callable[[], None] | None = None,
) -> list[dict[str, Any]]:
    """A row for each schedule that serves the head dim, for the library and for the peers; keys as in COLUMNS."""
    serving = [name for name in schedules if name in _library.names(problem.D)]
    calls: dict[str, Callable[..., Any]] = {
        name: functools.partial(_library.fwd, causal=problem.causal, schedule=name) for name in serving
    }
    contexts: dict[str, Callable[[], AbstractContextManager[object]]] = {}
    calls[LIBRARY] = functools.partial(library_fwd, causal=problem.causal, backend="sm80")
    for name in peers:
        calls[name] = functools.partial(_sdpa, causal=problem.causal, grouped=problem.Hkv != problem.H)
        contexts[name] = functools.partial(sdpa_kernel, PEERS[name])
    sets = [problem.inputs(seed + i) for i in range(_sets(problem))]
    contenders = [Contender(name, rotate(call, sets), contexts.get(name, nullcontext)) for name, call in calls.items()]
    failures: dict[str, str] = {}
    timings = measure(
        contenders,
        torch.device("cuda"),
        clock="graph",
        rounds=rounds,
        seconds=seconds,
        failures=failures,
        on_turn=on_turn,
    )
    rows = []
    for name, call in calls.items():
        row: dict[str, Any] = dict.fromkeys(COLUMNS) | _describe(problem) | {"name": name}
        if name in timings:
            row["tflops"] = round(tflops(problem.flops, timings[name].median), 1)
            row["spread"] = round(timings[name].spread, 4)
            with contexts.get(name, nullcontext)():
                row |= _error(problem, call, seed)
        else:
            row["reason"] = failures[name]
        rows.append(row)
    return rows


def turns(problem: Problem, schedules: Sequence[str], peers: Sequence[str], rounds: int) -> int:
    """How often `run` calls on_turn, were every contender to serve the call."""
    serving = sum(name in _library.names(problem.D) for name in schedules)
    return rounds * (serving + len(peers) + 1)


def _sets(problem: Problem) -> int:
    element = torch.finfo(problem.dtype).bits // 8
    return input_sets(element * problem.B * problem.N * problem.D * (problem.H + 2 * problem.Hkv), torch.device("cuda"))


def _sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, grouped: bool) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)


def _describe(problem: Problem) -> dict[str, Any]:
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "dtype": str(problem.dtype).removeprefix("torch."),
        "B": problem.B,
        "H": problem.H,
        "Hkv": problem.Hkv,
        "N": problem.N,
        "D": problem.D,
        "causal": problem.causal,
    }


def _error(problem: Problem, call: Callable[..., Any], seed: int) -> dict[str, float | None]:
    """Of one KV head and at most ERROR_LENGTH rows and keys."""
    group = problem.H // problem.Hkv
    small = Problem(problem.D, min(problem.N, ERROR_LENGTH), 1, group, 1, problem.causal, problem.dtype)
    q, k, v = small.inputs(seed)
    result = call(q, k, v)
    out, lse = result if isinstance(result, tuple) else (result, None)
    given = reference.attention(q, k, v, problem.causal)[1].float() if lse is None else lse
    found = reference.compare(out, given, q, k, v, problem.causal)
    lse_error = None if lse is None else float(f"{found.lse_error:.3g}")
    return {
        "error": float(f"{found.out_error:.3g}"),
        "allowed": float(f"{found.out_allowed:.3g}"),
        "lse_error": lse_error,
    }


def write_csv(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(COLUMNS), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows as text; what was None is empty."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """TFLOP/s over the lengths, and the largest error of each name. Needs matplotlib.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["name"] for row in rows if row["tflops"] is not None))
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    speed, error = figure.subplots(1, 2)
    for name in names:
        mine = [row for row in rows if row["name"] == name and row["tflops"] is not None]
        style = "--" if name in PEERS else "-"
        speed.plot([row["N"] for row in mine], [row["tflops"] for row in mine], style, marker="o", label=name)
    speed.set_xscale("log", base=2)
    speed.set_ylim(bottom=0)
    speed.set_xlabel("rows and keys")
    speed.set_ylabel("TFLOP/s")
    speed.grid(alpha=0.3)
    speed.legend(fontsize=8)
    errors = [max(row["error"] for row in rows if row["name"] == name and row["error"] is not None) for name in names]
    error.barh(names[::-1], errors[::-1])
    error.set_xlabel("largest error of out against float64")
    row = rows[0]
    mask = "causal" if row["causal"] else "full"
    figure.suptitle(f"{row['gpu']}, D {row['D']}, {row['H']} heads, batch {row['B']}, {row['dtype']}, {mask}")
    figure.savefig(path, dpi=120)
