"""How exact a forward in float8 is, by kind of inputs and length: root mean square errors over that of the result.

    python bench/run.py --fp8-errors --out bench/results/GPU/fp8-errors.csv
    python bench/run.py --fp8-errors --device cpu --head-dims 64 --N 256 --peers none
    python bench/run.py --fp8-errors --trained --N 4096     # and q, k and v of a model, trained for this

Inputs are drawn in float32 (`INPUTS`) and quantised to e4m3 once, so that every provider gets the same: with a factor
per tensor, since cuDNN takes no more. What our own quantiser makes of them is measured as providers of its own
(`QUANTISERS`): `flash_cute:head+rotate` is `quantize_fp8(per="head", rotate=True)`, and attention. `error` stands
against float64 on what was drawn: what a user sees. `exact`, a provider of its own, is the attention of the quantised
inputs in float64, rounded to bfloat16 at the end: only another quantiser could do better, and `over_exact` is an error
over its. `arithmetic` stands against float64 on the quantised inputs: what a provider's own roundings add.

Four blocks of 64 rows are compared, the last of each quarter of the sequence, in every head: the first rows of a causal
mask see few keys, and their results are so large that they would hide the others'.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import flash_cute
from bench import backends, case_flags, errors, float8, trained
from bench.environment import environment
from bench.figures import MASKS
from bench.workloads import Inputs, Workload, case
from flash_cute import reference

HEADS = 4
BLOCKS, ROWS = 4, 64
EXACT = errors.EXACT
Measured = dict[str, tuple[float, ...] | str]  # by provider: error and arithmetic, or why there are none


# Options of flash_cute.quantize_fp8 by what a provider's name says.
QUANTISERS: dict[str, dict[str, object]] = {
    "head": {"per": "head"},
    "head+rotate": {"per": "head", "rotate": True},
    "block": {"per": "block"},
    "block+rotate": {"per": "block", "rotate": True},
}


def values_of_mean_1(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, generator: torch.Generator) -> None:
    """Sums over many keys that do not cancel: where a sum is kept in few bits, it falls behind."""
    v += 1


def high_scores(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, generator: torch.Generator) -> None:
    """Scores of standard deviation 8 in the first head to 16 in the last, as video models have them."""
    q *= torch.linspace(8, 16, q.shape[1], device=q.device)[:, None, None]


def outliers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, generator: torch.Generator) -> None:
    """One value of a thousand is ten times as large, of any tensor."""
    for x in (q, k, v):
        x[torch.rand(x.shape, generator=generator, device=x.device) < 0.001] *= 10


# The kinds of inputs: what is done to standard normal float32 q, k and v before they are quantised.
INPUTS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Generator], None]] = {
    "randn": lambda q, k, v, generator: None,
    "mean 1": values_of_mean_1,
    "scores 8 to 16": high_scores,
    "outliers": outliers,
}
TRAINED = "trained, layer "  # and its number


@dataclass(frozen=True)
class Case:
    """One problem, in e4m3."""

    workload: Workload
    inputs: str

    def draw(self, device: torch.device, seed: int) -> Inputs:
        """q, k and v in float32, before they are quantised."""
        if self.inputs.startswith(TRAINED):
            return trained.layers(self.workload.D, device)[int(self.inputs.removeprefix(TRAINED)) - 1]
        drawn = replace(self.workload, dtype="fp32").make_inputs(device, seed)
        INPUTS[self.inputs](*drawn, torch.Generator(device).manual_seed(seed + 1))
        return drawn


def cases(head_dims: Sequence[int], lengths: Sequence[int], heads: int) -> list[Case]:
    return [
        Case(replace(case(1, heads, length, head_dim, causal), dtype="e4m3"), inputs)
        for head_dim in head_dims
        for length in lengths
        for causal in (False, True)
        for inputs in INPUTS
    ]


def trained_cases(head_dims: Sequence[int], device: torch.device) -> Iterator[Case]:
    """The layers of a model of each head dim, which is trained for this."""
    for head_dim in head_dims:
        for layer, (q, k, _) in enumerate(trained.layers(head_dim, device), 1):
            shape = case(1, q.shape[1], q.shape[2], head_dim, True, Hkv=k.shape[1], dtype="e4m3")
            yield Case(shape, f"{TRAINED}{layer}")


def blocks(length: int) -> list[slice]:
    """The rows that are compared: the last of each part of the sequence."""
    ends = [length * (part + 1) // BLOCKS for part in range(BLOCKS)]
    return [slice(max(0, end - min(ROWS, length // BLOCKS)), end) for end in ends]


def exact(workload: Workload, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """out of the compared rows in float64, (B, H, rows, Dv): of a causal mask, a block sees the keys up to its end."""
    causal = workload.is_causal
    found = []
    for rows in blocks(workload.N):
        keys = slice(0, rows.stop if causal else None)
        found.append(reference.attention(q[:, :, rows], k[:, :, keys], v[:, :, keys], causal)[0])
    return torch.cat(found, 2)


def compared_rows(out: torch.Tensor) -> torch.Tensor:
    """Of what a provider returned."""
    return torch.cat([out[:, :, rows] for rows in blocks(out.shape[2])], 2)


def relative(given: torch.Tensor, right: torch.Tensor) -> float:
    return float((given.double() - right).norm() / right.norm())


def measure(
    case: Case, providers: Sequence[str], device: torch.device, seed: int, quantisers: Sequence[str] = ()
) -> Measured:
    """Of exact arithmetic and of each provider; and of ours on what each of these quantisers makes."""
    workload, drawn = case.workload, case.draw(device, seed)
    inputs = float8.quantised(*drawn)
    right = exact(workload, *drawn)
    best = exact(workload, *float8.dequantised(inputs, torch.float32))

    def both(out: torch.Tensor, best: torch.Tensor = best) -> tuple[float, ...]:
        return relative(out, right), relative(out, best)

    measured: Measured = {EXACT: both(best.bfloat16())}
    for name in providers:
        try:
            (out,) = backends.first_call(backends.prepare(name, workload, device), workload, inputs)
            measured[name] = both(compared_rows(out))
        except backends.Unavailable as reason:
            measured[name] = str(reason)
    for how in quantisers:
        *values, descales = flash_cute.quantize_fp8(*drawn, **QUANTISERS[how])
        own = (*values, *descales[:3])
        (out,) = backends.first_call(backends.prepare("flash_cute", workload, device), workload, own)
        # Rotated q and k have the products of q and k.
        measured[f"flash_cute:{how}"] = both(
            compared_rows(out), exact(workload, *float8.dequantised(own, torch.float32))
        )
    return measured


def rows_of(case: Case, measured: Measured, facts: dict[str, str]) -> Iterator[dict[str, object]]:
    w = case.workload
    shape = {name: getattr(w, name) for name in ("B", "H", "N", "D", "dtype", "causal")}
    least = measured[EXACT][0]
    assert isinstance(least, float)
    for name, found in measured.items():
        row: dict[str, object] = {**shape, "inputs": case.inputs, "provider": name, **facts}
        if isinstance(found, str):
            yield {**row, "missing": found}
            continue
        error, arithmetic = found
        yield {**row, "error": f"{error:.3e}", "arithmetic": f"{arithmetic:.3e}", "over_exact": f"{error / least:.3f}"}


def print_case(case: Case, measured: Measured) -> None:
    w = case.workload
    text = f"D {w.D:<3} {MASKS[w.causal]:<6} N {w.N:<6} {case.inputs:<16}"
    for found in measured.values():
        text += f" {'-' if isinstance(found, str) else '{:.4f} ({:.4f})'.format(*found):>22}"
    print(text, flush=True)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/run.py --fp8-errors", description=(__doc__ or "").split("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--head-dims", default="64,128,256", help="separated by commas")
    parser.add_argument("--N", default="4096,16384,131072", help="queries and keys, separated by commas")
    parser.add_argument("--H", type=int, default=HEADS, help=f"heads ({HEADS})")
    parser.add_argument("--ours", default="flash_cute,flash_cute:bf16", help="providers of ours")
    parser.add_argument("--peers", default="fa3,cudnn", help="peers, or none (fa3,cudnn)")
    parser.add_argument(
        "--quantise", default=",".join(QUANTISERS), help=f"of {','.join(QUANTISERS)}, or none (all): see above"
    )
    parser.add_argument("--trained", action="store_true", help="also q, k and v of a model, trained for this")
    parser.add_argument("--device", type=case_flags.device_name, default="cuda", help="cuda (default) or cpu")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs (0)")
    parser.add_argument("--commit", default="", help="commit to name in the CSV (git's)")
    parser.add_argument("--out", type=Path, help="CSV to write")
    flags = parser.parse_args(arguments)
    if flags.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("there is no CUDA GPU here; --device cpu with a small --N measures the CPU path")
    flags.providers = [*flags.ours.split(","), *(flags.peers.split(",") if flags.peers != "none" else [])]
    for name in flags.providers:
        if name not in (*backends.OURS, *backends.PEERS):
            parser.error(f"provider: expected one of {', '.join(backends.OURS + backends.PEERS)}, given {name!r}")
    flags.quantisers = flags.quantise.split(",") if flags.quantise != "none" else []
    for name in flags.quantisers:
        if name not in QUANTISERS:
            parser.error(f"--quantise: expected some of {', '.join(QUANTISERS)}, given {name!r}")
    flags.head_dims = [int(head_dim) for head_dim in flags.head_dims.split(",")]
    flags.lengths = [int(length) for length in flags.N.split(",")]
    if min(flags.lengths) < BLOCKS:
        parser.error(f"--N: expected {BLOCKS} or more, given {min(flags.lengths)}")
    return flags


def main(arguments: Sequence[str]) -> int:
    flags = parse(arguments)
    device = torch.device(flags.device)
    started = time.perf_counter()
    facts = environment(device, flags.commit)
    print(", ".join(f"{name} {value}" for name, value in facts.items() if value), f"seed {flags.seed}", sep=", ")
    absent = {name: reason for name in flags.providers if (reason := backends.absent(name))}
    present = [name for name in flags.providers if name not in absent]
    quantisers = [] if backends.absent("flash_cute") else flags.quantisers
    reasons = {f"{name}: {reason}": 0 for name, reason in absent.items()}
    print("\nerror, and in brackets that of the arithmetic alone")
    print(f"{'':<38}{''.join(f' {name:>22}' for name in (EXACT, *present, *quantisers))}")
    ran = False
    with errors.rows_to(flags.out, [*errors.FLOAT8_COLUMNS, *facts]) as write:
        write([{"provider": name, "missing": reason, **facts} for name, reason in absent.items()])
        chosen = cases(flags.head_dims, flags.lengths, flags.H)
        if flags.trained:
            chosen += trained_cases(flags.head_dims, device)
        for index, one in enumerate(chosen):
            measured = measure(one, present, device, flags.seed + index, quantisers)
            print_case(one, measured)
            write(list(rows_of(one, measured, facts)))
            for name, found in measured.items():
                if isinstance(found, str):
                    reasons[f"{name}: {found}"] = reasons.get(f"{name}: {found}", 0) + 1
                else:
                    ran |= name != EXACT
    for reason, number in reasons.items():
        print(f"not measured{f', {number} cases' if number else ''}: {reason}")
    print(f"\n{time.perf_counter() - started:.0f} s in all")
    return 0 if ran else 1
