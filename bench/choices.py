"""How good the plan's choices are: beside the best of all choices, on random shapes.

    python bench/run.py --choices --out bench/results/GPU/choices.csv
    python bench/run.py --choices --shapes 20 --directions fwd
    python bench/run.py --choices --short
    python bench/run.py --choices --judge bench/results/GPU/choices.csv

Each shape is tuned as `flash_cute.tune` does it: every backend, tile and split that can serve the call is timed in
turns on graph replays, and those near the best once more beside the plan's own. A row has the time of both, and their
ratio: 1 where the plan's choice is the best, or no other is faster by more than the rounds differ. It also has the time
of every choice, so that another build's plan can be judged by it later (`--judge`), which needs no GPU.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from bench import choice_table, judge
from bench.environment import environment
from bench.workloads import DTYPES, Direction, Workload
from flash_cute._progress import Progress
from flash_cute.tune._measure import Call, Measured, tune_call

HEAD_DIMS = (64, 64, 128, 128, 128, 32, 96, 192, 256, 40, 80, 112, 160)
GROUPS = (1, 1, 2, 4, 8)
# A shape is made smaller until it takes at most about this: 200 shapes and both directions in two minutes of an H200.
MOST_FLOPS = 5e11
MOST_BYTES = 1 << 30


def random_length(draw: random.Random, most: int) -> int:
    """From 1 to `most`, as likely in each octave; half of them multiples of 128."""
    length = round(2 ** draw.uniform(0, math.log2(most)))
    return max(128, length // 128 * 128) if draw.random() < 0.5 else length


def random_workload(draw: random.Random, direction: Direction) -> Workload:
    """A shape of training, prefill, decoding or a packed batch."""
    shape: dict[str, Any] = {"D": draw.choice(HEAD_DIMS), "dtype": draw.choice(("bf16", "bf16", "fp16"))}
    shape["causal"] = draw.choice(("none", "bottom_right"))
    shape["Hkv"] = draw.choice((1, 2, 3, 4, 5, 8, 12, 16, 32))
    shape["H"] = shape["Hkv"] * draw.choice(GROUPS)
    shape["N"] = random_length(draw, 16384)
    shape["B"] = draw.choice((1, 1, 2, 3, 4, 8, 16, 32))
    kind = draw.random()
    if kind < 0.1:
        lengths = [random_length(draw, 8192) for _ in range(draw.randint(2, 24))]
        shape |= {"lengths": "+".join(map(str, lengths)), "B": len(lengths), "N": max(lengths)}
    shape["M"] = shape["N"] if kind < 0.7 else max(shape["N"], random_length(draw, 65536))
    if draw.random() < 0.1:
        shape |= {"causal": "bottom_right", "window": (draw.choice((127, 1023, 4095)), 0)}
    workload = Workload(direction=direction, **shape)
    while workload.flops > MOST_FLOPS or 2 * workload.input_bytes > MOST_BYTES:
        if workload.lengths:
            lengths = sorted(workload.sequences)[:-1]
            shape |= {"lengths": "+".join(map(str, lengths)), "B": len(lengths), "N": lengths[-1], "M": lengths[-1]}
        elif shape["B"] > 1:
            shape["B"] = (shape["B"] + 1) // 2
        elif shape["Hkv"] > 4:
            shape |= {"Hkv": shape["Hkv"] // 2, "H": shape["H"] // shape["Hkv"] * (shape["Hkv"] // 2)}
        else:
            shape |= {"N": (shape["N"] + 1) // 2, "M": (shape["M"] + 1) // 2}
        workload = Workload(direction=direction, **shape)
    return workload


def random_short_workload(draw: random.Random, direction: Direction) -> Workload:
    """A packed batch of a few to 128 sequences, which may all fit in one tile of rows each."""
    while True:
        shape: dict[str, Any] = {"D": draw.choice(HEAD_DIMS), "dtype": draw.choice(("bf16", "bf16", "fp16"))}
        shape["causal"] = draw.choice(("none", "bottom_right", "bottom_right"))
        shape["Hkv"] = draw.choice((1, 2, 3, 4, 5, 8, 12, 16, 32))
        shape["H"] = shape["Hkv"] * draw.choice(GROUPS)
        most = draw.choice((128, 256, 512, 1024, 4096))
        sequences = round(2 ** draw.uniform(1, 7))
        lengths = [random_length(draw, most) for _ in range(sequences)]
        shape |= {"lengths": "+".join(map(str, lengths)), "B": sequences, "N": max(lengths), "M": max(lengths)}
        if draw.random() < 0.15:
            shape |= {"causal": "bottom_right", "window": (draw.choice((127, 1023)), 0)}
        workload = Workload(direction=direction, **shape)
        if workload.flops <= MOST_FLOPS / 10 and 2 * workload.input_bytes <= MOST_BYTES / 4:
            return workload


def random_workloads(seed: int, count: int, direction: Direction, short: bool = False) -> list[Workload]:
    draw = random.Random(f"{seed} {direction} short" if short else f"{seed} {direction}")
    return [(random_short_workload if short else random_workload)(draw, direction) for _ in range(count)]


def call_of(workload: Workload, device: torch.device, seed: int) -> Call:
    """The workload's call, with inputs of its forward."""
    q, k, v = workload.make_inputs(device, seed)[:3]
    lengths: tuple[Any, ...] = ()
    if workload.lengths:
        offsets = workload.make_offsets(device)
        lengths = (offsets, offsets, None, None, workload.N, workload.N)
    score = (workload.causal, *(workload.window or (None, None)), None, None, None, None)
    return Call((q, k, v), lengths, score, False)


def row_of(workload: Workload, measured: Measured, facts: dict[str, str]) -> dict[str, object]:
    best, own = (measured.seconds[name] * 1e6 for name in (measured.best, measured.plan))
    times = {"plan_us": f"{own:.2f}", "best_us": f"{best:.2f}", "ratio": f"{measured.gain:.4f}"}
    chosen = {"plan": measured.plan, "best": measured.best, "choices": len(measured.seconds)}
    return {**workload.columns, **chosen, **times, "times": judge.times_text(measured.seconds), **facts}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/run.py --choices", description=(__doc__ or "").split("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--shapes", type=int, default=200, help="random shapes per direction (200)")
    parser.add_argument("--short", action="store_true", help="packed batches of short sequences")
    parser.add_argument("--directions", default="fwd,bwd", help="fwd, bwd or both (both)")
    parser.add_argument("--seconds", type=float, default=0.025, help="measured time per choice (0.025)")
    parser.add_argument("--seed", type=int, default=0, help="of the shapes and the inputs (0)")
    parser.add_argument("--commit", default="", help="commit to name in the CSV (git's)")
    parser.add_argument("--out", type=Path, help="CSV to write")
    parser.add_argument(
        "--judge", type=Path, nargs="+", help="measure nothing: this build's choices by the times of CSVs"
    )
    flags = parser.parse_args(arguments)
    flags.directions = flags.directions.split(",")
    for direction in flags.directions:
        if direction not in get_args(Direction)[:2]:
            parser.error(f"--directions: expected fwd, bwd or both, given {direction!r}")
    if not flags.judge and not torch.cuda.is_available():
        parser.error("there is no CUDA GPU here, and only its kernels have choices")
    return flags


def main(arguments: Sequence[str]) -> int:
    flags = parse(arguments)
    if flags.judge:
        rows = [judge.judged(row) for path in flags.judge for row in choice_table.read(path)]
        known = [row for row in rows if row is not None]
        if len(known) < len(rows):
            print(f"{len(rows) - len(known)} of {len(rows)} calls are left out: what the plan chooses was not timed.")
        print("\n".join(choice_table.markdown(known)))
        return 0
    device = torch.device("cuda", torch.cuda.current_device())
    started = time.perf_counter()
    facts = environment(device, flags.commit)
    print(", ".join(f"{name} {value}" for name, value in facts.items() if value), f"seed {flags.seed}", sep=", ")
    chosen = [
        w for direction in flags.directions for w in random_workloads(flags.seed, flags.shapes, direction, flags.short)
    ]
    rows: list[dict[str, object]] = []
    bar = Progress("choices", len(chosen))
    for index, workload in enumerate(chosen):
        call = call_of(workload, device, flags.seed + index)
        assert call.tensors[0].dtype == DTYPES[workload.dtype]
        rows.append(row_of(workload, tune_call(call, workload.direction == "bwd", flags.seconds), facts))
        bar()
    bar.close()
    if flags.out:
        flags.out.parent.mkdir(parents=True, exist_ok=True)
        with flags.out.open("w", newline="") as file:
            table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            table.writeheader()
            table.writerows(rows)
    text_rows = [{name: str(value) for name, value in row.items()} for row in rows]
    print("\n".join(choice_table.markdown(text_rows)))
    print(f"{time.perf_counter() - started:.0f} s in all")
    return 0
