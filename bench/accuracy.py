"""How exact flash_cute is beside its peers: root mean square errors of out, dq, dk and dv against float64.

    python bench/run.py --accuracy --out bench/results/GPU/accuracy.csv
    python bench/run.py --accuracy --device cpu --head-dims 32 --N 128 --ours flash_cute --peers sdpa

Every provider gets the same inputs of five kinds (`INPUTS`), in bf16 and fp16, full and causal, and its own forward's
out and logsumexp for the backward. Prints, for each of ours, the ratio of its error to that of the best peer: above 1,
the peer is more exact.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench import backends, case_flags, errors
from bench.environment import environment
from bench.errors import RESULTS
from bench.workloads import DTYPES, Inputs, Workload
from flash_cute import reference

LENGTH = 2048
HEADS = 4


def peaky_scores(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Scores of standard deviation 4: a row's weight is on a few keys."""
    q *= 4


def common_part(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Values with a mean of 4 and a deviation of 1: out is close to that mean, and dS a difference of near sums."""
    v += 4


def outliers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """One channel in 32 of q, k and v is 4 times as large, as in trained models."""
    for x in (q, k, v):
        x[..., ::32] *= 4


def rising_scores(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Scores that rise by 20 from the first key to the last, so that the running maximum grows with every key tile."""
    length, head_dim = k.shape[2:]
    q += 1
    # q's common 1 times k's common part, summed over the head dim and scaled by 1 / sqrt(head_dim)
    k += torch.linspace(0, 20, length, device=k.device)[:, None] / head_dim**0.5


# The kinds of inputs: what is done to standard normal float32 q, k and v before they are rounded.
INPUTS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]] = {
    "randn": lambda q, k, v: None,
    "peaky scores": peaky_scores,
    "common part": common_part,
    "outliers": outliers,
    "rising scores": rising_scores,
}


@dataclass(frozen=True)
class Case:
    """One problem; `workload` is its forward."""

    workload: Workload
    inputs: str

    def make_inputs(self, device: torch.device, seed: int) -> Inputs:
        """q, k, v and dout (B, H, N, D), rounded to the workload's dtype."""
        w = self.workload
        wide = replace(w, dtype="fp32", direction="bwd").make_inputs(device, seed)
        INPUTS[self.inputs](*wide[:3])
        return tuple(x.to(DTYPES[w.dtype]) for x in wide)


def cases(head_dims: Sequence[int], dtypes: Sequence[str], length: int, heads: int) -> list[Case]:
    return [
        Case(Workload(1, heads, heads, length, length, head_dim, causal, dtype), inputs)
        for dtype in dtypes
        for head_dim in head_dims
        for causal in ("none", "bottom_right")
        for inputs in INPUTS
    ]


def rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def results(name: str, workload: Workload, inputs: Inputs, device: torch.device) -> tuple[torch.Tensor, ...]:
    """out, dq, dk and dv of a provider; raises `backends.Unavailable`."""
    backward = replace(workload, direction="bwd")
    forward = backends.prepare(name, workload, device)
    out = backends.first_call(forward, workload, inputs[:3])
    return *out, *backends.first_call(backends.prepare(name, backward, device), backward, inputs)


def measure(case: Case, providers: Sequence[str], device: torch.device, seed: int) -> dict[str, dict[str, float] | str]:
    """The errors of each provider by result (`RESULTS`), or why it was not measured."""
    inputs = case.make_inputs(device, seed)
    q, k, v, dout = inputs
    causal = backends.causal_argument(case.workload)
    out, _ = reference.attention(q, k, v, causal)
    exact = (out, *reference.gradients(dout, q, k, v, causal))
    measured: dict[str, dict[str, float] | str] = {}
    for name in providers:
        try:
            given = results(name, case.workload, inputs, device)
        except backends.Unavailable as reason:
            measured[name] = str(reason)
            continue
        measured[name] = {
            result: rms(x.double() - right) for result, x, right in zip(RESULTS, given, exact, strict=True)
        }
    return measured


def rows_of(
    case: Case, measured: dict[str, dict[str, float] | str], facts: dict[str, str]
) -> Iterator[dict[str, object]]:
    w = case.workload
    shape = {name: getattr(w, name) for name in ("B", "H", "N", "D", "dtype", "causal")}
    for name, found in measured.items():
        row: dict[str, object] = {**shape, "inputs": case.inputs, "provider": name}
        if isinstance(found, str):
            yield {**row, "missing": found, **facts}
            continue
        row |= {f"rms_{result}": f"{error:.4e}" for result, error in found.items()}
        if backends.is_ours(name):
            row |= errors.ratios_to_best(found, {peer: x for peer, x in measured.items() if isinstance(x, dict)})
        yield {**row, **facts}


def print_case(case: Case, rows: Sequence[dict[str, object]]) -> None:
    w = case.workload
    mask = "full" if w.causal == "none" else "causal"
    for row in rows:
        if backends.is_ours(str(row["provider"])):
            text = f"{w.dtype} D {w.D:<3} {mask:<6} {case.inputs:<13} {row['provider']:<16}"
            text += "".join(f" {row.get(f'ratio_{result}', '-'):>6}" for result in RESULTS)
            print(text, row.get("missing", ""), flush=True)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/run.py --accuracy", description=(__doc__ or "").split("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--head-dims", default="32,64,96,128,192,256", help="separated by commas")
    parser.add_argument("--dtypes", default="bf16,fp16", help="bf16, fp16 or both (both)")
    parser.add_argument("--N", type=int, default=LENGTH, help=f"queries and keys ({LENGTH})")
    parser.add_argument("--H", type=int, default=HEADS, help=f"heads ({HEADS})")
    parser.add_argument("--ours", help="providers of ours (flash_cute:sm90,flash_cute:sm80; on the CPU flash_cute)")
    parser.add_argument("--peers", help="peers (cudnn,flash,fa3; on the CPU sdpa)")
    parser.add_argument("--device", type=case_flags.device_name, default="cuda", help="cuda (default) or cpu")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs (0)")
    parser.add_argument("--commit", default="", help="commit to name in the CSV (git's)")
    parser.add_argument("--out", type=Path, help="CSV to write")
    flags = parser.parse_args(arguments)
    on_cpu = not flags.device.startswith("cuda")
    if not on_cpu and not torch.cuda.is_available():
        parser.error("there is no CUDA GPU here; --device cpu with a small --N measures the CPU path")
    ours = flags.ours or ("flash_cute" if on_cpu else "flash_cute:sm90,flash_cute:sm80")
    peers = flags.peers or ("sdpa" if on_cpu else "cudnn,flash,fa3")
    flags.providers = [*ours.split(","), *peers.split(",")]
    for name in flags.providers:
        if name not in (*backends.OURS, *backends.PEERS):
            parser.error(f"provider: expected one of {', '.join(backends.OURS + backends.PEERS)}, given {name!r}")
    return flags


def main(arguments: Sequence[str]) -> int:
    flags = parse(arguments)
    device = torch.device(flags.device)
    started = time.perf_counter()
    facts = environment(device, flags.commit)
    print(", ".join(f"{name} {value}" for name, value in facts.items() if value), f"seed {flags.seed}", sep=", ")
    absent = {name: reason for name in flags.providers if (reason := backends.absent(name))}
    present = [name for name in flags.providers if name not in absent]
    for name, reason in absent.items():
        print(f"absent: {name}: {reason}")
    chosen = cases([int(d) for d in flags.head_dims.split(",")], flags.dtypes.split(","), flags.N, flags.H)
    print(f"\nroot mean square error over that of the best peer\n{'':<48}{''.join(f' {name:>6}' for name in RESULTS)}")
    rows: list[dict[str, object]] = []
    with errors.writer(flags.out, facts) as write:
        write([{"provider": name, "missing": reason, **facts} for name, reason in absent.items()])
        for index, case in enumerate(chosen):
            found = list(rows_of(case, measure(case, present, device, flags.seed + index), facts))
            print_case(case, found)
            write(found)
            rows += found
    _print_summary(rows)
    print(f"\n{time.perf_counter() - started:.0f} s in all")
    return 0 if any("rms_out" in row for row in rows) else 1


def _print_summary(rows: Sequence[dict[str, Any]]) -> None:
    print("\nthe largest ratio of all inputs")
    for name in dict.fromkeys(str(row["provider"]) for row in rows if "ratio_out" in row):
        own = [row for row in rows if row["provider"] == name and "ratio_out" in row]
        largest = (max(float(row[f"ratio_{result}"]) for row in own) for result in RESULTS)
        print(f"{name:<48}{''.join(f' {ratio:>6.3f}' for ratio in largest)}")
    for name, reason in dict.fromkeys((str(row["provider"]), str(row["missing"])) for row in rows if "missing" in row):
        print(f"not measured: {name}: {reason}")
