"""Measure every published figure in one process: speed of each grid, the deterministic mode, host time, accuracy.

    python bench/all.py --out bench/results --commit COMMIT
    python bench/all.py --out bench/results --only paper,bwd-paper --rounds 7 --seconds 0.2

A run is a call of `bench/run.py`; it writes OUT/GPU/RUN.csv after each cell (GPU is h200, say), and what it prints
to OUT/GPU/RUN.log. The most important come first, and none is started after `--budget` seconds. All of them take
about nine minutes on an H200, and `--budget` ends it earlier.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
if not __package__:
    # Run as a script: bench/ must not hide the standard library's `profile`, nor this tree the installed package.
    sys.path[:] = [*sys.path[1:], str(ROOT)]

from bench import figures, run  # noqa: E402

BOTH = "flash_cute:sm90,flash_cute:sm80"
HOPPER_PEERS = "cudnn,fa3"  # these and the sm90 kernels use Hopper's own instructions
ALL_PEERS = "cudnn,fa3,flash"
WITH_AND_WITHOUT = "flash_cute:sm90,flash_cute:sm90:plain,flash_cute:sm80,flash_cute:sm80:plain"
FLOAT8_AND_BFLOAT16 = "flash_cute:sm90,flash_cute:sm90:bf16"
PACKED_AND_DENSE = "flash_cute:sm90,flash_cute:sm90:dense,flash_cute:sm80,flash_cute:sm80:dense"
OVER_CACHES = "flash_cute:sm90,flash_cute:sm90:contiguous,flash_cute:sm90:dense,flash_cute:sm90:plain,flash_cute:sm80"
CACHE_PEERS = "vllm-fa3,vllm-fa3:contiguous,vllm-fa3:invariant,vllm-flashmla,cudnn-paged,cudnn,sdpa,flash"
DEFAULT_AND_DETERMINISTIC = "flash_cute:{0},flash_cute:{0}:deterministic"


def speed(grid: str, ours: str, peers: str, direction: str = "fwd") -> list[str]:
    return ["--grid", grid, "--ours", ours, "--peers", peers, "--direction", direction]


# The arguments of bench/run.py by the name of the run, the most important first.
RUNS: dict[str, list[str]] = {
    "paper": speed("paper", "flash_cute:sm90", HOPPER_PEERS),
    "bwd-paper": speed("paper", "flash_cute:sm90", HOPPER_PEERS, "bwd"),
    "window": speed("window", BOTH, "fa3,flash"),
    "varlen": speed("varlen", PACKED_AND_DENSE, "fa3,flash"),
    "dv": speed("dv", BOTH, ALL_PEERS),
    "options": speed("options", WITH_AND_WITHOUT, "none"),
    "bwd-window": speed("window", BOTH, "fa3,flash", "bwd"),
    "bwd-varlen": speed("varlen", PACKED_AND_DENSE, "fa3,flash", "bwd"),
    "bwd-dv": speed("dv", BOTH, ALL_PEERS, "bwd"),
    "bwd-options": speed("options", WITH_AND_WITHOUT, "none", "bwd"),
    "accuracy": ["--accuracy", "--ours", BOTH, "--peers", ALL_PEERS],
    "fp8": speed("fp8", FLOAT8_AND_BFLOAT16, "fa3,cudnn"),
    "fp8-errors": ["--fp8-errors", "--trained", "--ours", FLOAT8_AND_BFLOAT16, "--peers", "fa3,cudnn"],
    "decode": speed("decode", OVER_CACHES, CACHE_PEERS),
    "prefill": speed("prefill", "flash_cute,flash_cute:dense", CACHE_PEERS),
    "decode-host": speed("decode-host", "flash_cute,flash_cute:plain", CACHE_PEERS),
    "llama": speed("llama", BOTH, ALL_PEERS),
    "bwd-llama": speed("llama", BOTH, ALL_PEERS, "bwd"),
    "models": ["--models"],
    "sm80-paper": speed("paper", "flash_cute:sm80", "flash"),
    "sm80-bwd-paper": speed("paper", "flash_cute:sm80", "flash", "bwd"),
    "odd": speed("odd", BOTH, ALL_PEERS),
    "dims": speed("dims", BOTH, ALL_PEERS),
    "bwd-dims": speed("dims", BOTH, ALL_PEERS, "bwd"),
    "sm90-bwd-deterministic": speed(
        "deterministic", DEFAULT_AND_DETERMINISTIC.format("sm90"), "fa3:deterministic", "bwd"
    ),
    "sm80-bwd-deterministic": speed("deterministic", DEFAULT_AND_DETERMINISTIC.format("sm80"), "none", "bwd"),
    "host": speed("host", BOTH, ALL_PEERS),
    "train-host": speed("host", "flash_cute", ALL_PEERS, "train"),
    "fp16": speed("fp16", BOTH, "cudnn,flash"),
    "small": speed("small", BOTH, ALL_PEERS),
    "large": speed("large", BOTH, "efficient"),
    "bwd-large": speed("large", BOTH, "efficient", "bwd"),
    "choices": ["--choices"],
    "masks": ["--masks"],
}

# Runs with flags of their own: what they measure, and for how long, is theirs to say.
UNTIMED = ("accuracy", "choices", "fp8-errors", "masks", "models")

# Where a call takes ten milliseconds, a round of a fiftieth of a second has two, at whatever clock the provider before
# has left. Such rounds are this many times as long.
LONGER = {"large": 14}


def arguments_of(name: str, flags: argparse.Namespace, path: Path) -> list[str]:
    arguments = [*RUNS[name], "--out", str(path), "--commit", flags.commit]
    if name in UNTIMED:
        return arguments
    arguments += ["--seconds", str(flags.seconds * LONGER.get(name, 1))]
    # The host's time has short rounds and needs many of them: run.py's own number.
    return arguments if "host" in name else [*arguments, "--rounds", str(flags.rounds)]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/all.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the CSVs and logs")
    parser.add_argument("--only", default=",".join(RUNS), help=f"runs, separated by commas (all): {', '.join(RUNS)}")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each provider per cell (5)")
    parser.add_argument(
        "--seconds", type=float, default=0.1, help="measured time per provider and cell (0.1; of large 14 times that)"
    )
    parser.add_argument("--budget", type=float, default=500, help="start no run after so many seconds (500)")
    parser.add_argument("--commit", default="", help="commit to name in the CSVs (git's)")
    flags = parser.parse_args(arguments)
    flags.only = flags.only.split(",")
    for name in flags.only:
        if name not in RUNS:
            parser.error(f"--only: expected one or several of {', '.join(RUNS)}, given {name!r}")
    if not torch.cuda.is_available():
        parser.error("there is no CUDA GPU here, and every run is sized for one")
    return flags


def main(arguments: Sequence[str] | None = None) -> int:
    flags = parse(arguments)
    folder = flags.out / figures.gpu_name(torch.cuda.get_device_name())
    folder.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    failed = False
    for name in flags.only:
        before = time.perf_counter()
        if before - started > flags.budget:
            print(f"{name}: not started, {flags.budget:.0f} s are over", flush=True)
            continue
        path = folder / f"{name}.csv"
        with path.with_suffix(".log").open("w") as log, redirect_stdout(log):
            try:
                status = run.main(arguments_of(name, flags, path))
            except Exception as error:  # the runs after it are worth having
                print(error)
                status = 2
        torch.cuda.empty_cache()
        failed |= status != 0
        ended = f"exit status {status}, see {path.with_suffix('.log').name}" if status else "ok"
        print(f"{name}: {time.perf_counter() - before:.0f} s, {ended}", flush=True)
    print(f"{time.perf_counter() - started:.0f} s in all")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
