"""Compare the speed of two builds of flash_cute, cell by cell, on one GPU.

    python bench/versus.py --ours SITE_A --other SITE_B --grid paper --out versus.csv
    python bench/versus.py --ours SITE_A=new --other SITE_B=3bfd7be --backend sm80 --directions bwd --D 128 --causal

A SITE is a folder that holds an installed flash_cute (`pip install --target SITE .`). Each build runs in a process of
its own (`versus_worker.py`), and the two take turns: one computes while the other waits, and the order changes from
round to round. Both get the same inputs, and their results are compared. A ratio is the other's time over ours in the
same round, its median over the rounds; above 1, ours is faster. A cell whose ratio is below 0.99, or whose rounds
differ by more than 1 %, is measured for three times as many rounds. The same SITE given twice shows the noise.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
if not __package__:
    # Run as a script: bench/ must not hide the standard library's `profile`, nor this tree the installed package.
    sys.path[:] = [*sys.path[1:], str(ROOT)]

from bench import case_flags, figures, workloads  # noqa: E402
from bench.workloads import Workload  # noqa: E402

SLOWER = 0.99
LARGEST_SPREAD = 0.01
LARGEST_DIFFERENCE, LARGEST_OF_FLOAT8 = 0.02, 0.08  # of ||x - y|| / ||y||, as in `bench/timing.py`
SIDES = ("ours", "other")


class Refused(Exception):
    """A build's error on a problem, in its own words."""


class Build:
    """A worker process with one build of the library.

    Attributes:
        label: its name in the CSV.
        facts: where it was loaded from, its version, the GPU.
    """

    def __init__(self, site: Path, label: str, device: str) -> None:
        path = os.pathsep.join(filter(None, [str(site.resolve()), os.environ.get("PYTHONPATH", "")]))
        self.label = label
        replies, end = os.pipe()  # not standard output, to which a library may print
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "bench" / "versus_worker.py"), device, str(end)],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=sys.stderr,
            text=True,
            pass_fds=[end],
        )
        os.close(end)
        self.replies = os.fdopen(replies)
        self.facts: dict[str, Any] = {}

    def load(self, site: Path) -> None:
        """Wait until the worker has loaded its build, and see that it is the one in `site`."""
        self.facts = self.ask("facts")
        if not Path(self.facts["path"]).is_relative_to(site.resolve()):
            raise SystemExit(f"{self.label}: expected flash_cute in {site}, it was loaded from {self.facts['path']}")

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        print(json.dumps({"do": command, **arguments}), file=self.process.stdin, flush=True)
        line = self.replies.readline()
        if not line:
            raise SystemExit(f"{self.label}: its process ended with status {self.process.wait()} during {command!r}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise Refused(f"{self.label}: {reply['error']}")
        return reply

    def close(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # of a process that ended early: `ask` has said so
            self.process.stdin.close()
        self.process.wait()
        self.replies.close()


@dataclass
class Cell:
    """What was measured of one workload: for each side the seconds per call, one entry per round."""

    workload: Workload
    seconds: dict[str, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})
    calls: int = 0
    sets: int = 0
    difference: float = math.nan
    missing: str = ""

    @property
    def ratios(self) -> list[float]:
        return [other / ours for ours, other in zip(self.seconds["ours"], self.seconds["other"], strict=True)]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def is_wrong(self) -> bool:
        """NaN counts."""
        largest = LARGEST_OF_FLOAT8 if self.workload.is_float8 else LARGEST_DIFFERENCE
        return not self.missing and not self.difference <= largest


def spread(values: Sequence[float]) -> float:
    """Half the distance between the quartiles, as a share of the median."""
    from flash_cute._timing import half_quartile_range

    return half_quartile_range(values) / statistics.median(values)


def measure(
    workload: Workload, builds: dict[str, Build], options: dict[str, Any], *, rounds: int, seconds: float, seed: int
) -> Cell:
    """Compare and time both builds on one workload; their memory is free again afterwards."""
    cell = Cell(workload)
    names = ("B", "H", "Hkv", "N", "M", "D", "direction", "window", "softcap", "sinks", "alibi")
    shape = {name: getattr(workload, name) for name in names}
    shape |= {"Dv": workload.head_dim_v, "lengths": workload.sequences}
    shape["dtype"] = str(workloads.DTYPES[workload.dtype]).removeprefix("torch.")
    causal = False if workload.causal == "none" else workload.causal
    if workload.direction == "fwd":
        options = {name: value for name, value in options.items() if name != "deterministic"}
    try:
        with tempfile.TemporaryDirectory() as folder:
            samples, estimates = [], []
            for side in SIDES:
                path = Path(folder, side)
                arguments = {"shape": shape, "causal": causal, "options": options, "seed": seed, "sample": str(path)}
                prepared = builds[side].ask("prepare", **arguments)
                samples.append(torch.load(path))
                estimates.append(prepared["seconds"])
                cell.sets = prepared["sets"]
            cell.difference = max(_difference(*pair) for pair in zip(*samples, strict=True))
        cell.calls = max(2, math.ceil(seconds / statistics.mean(estimates)))
        _take_turns(cell, builds, rounds)
        if cell.ratio < SLOWER or spread(cell.ratios) > LARGEST_SPREAD:
            _take_turns(cell, builds, 2 * rounds)
    except Refused as error:
        cell.missing = str(error)
    for build in builds.values():
        build.ask("release")
    return cell


def _take_turns(cell: Cell, builds: dict[str, Build], rounds: int) -> None:
    for turn in range(rounds):
        for side in SIDES if turn % 2 == 0 else SIDES[::-1]:
            cell.seconds[side].append(builds[side].ask("turn", calls=cell.calls)["seconds"])


def _difference(ours: torch.Tensor, other: torch.Tensor) -> float:
    if ours.shape != other.shape:
        return math.inf
    return float((ours - other).norm() / other.norm().clamp_min(1e-30))


def row_of(grid: str, cell: Cell, facts: dict[str, str]) -> dict[str, object]:
    from flash_cute._timing import tflops

    row: dict[str, object] = {"grid": grid}
    row |= cell.workload.columns
    row |= {"missing": cell.missing, **facts}
    if cell.missing:
        return row
    for side in SIDES:
        median = statistics.median(cell.seconds[side])
        row[f"{side}_us"] = f"{median * 1e6:.3f}"
        row[f"{side}_tflops"] = f"{tflops(cell.workload.flops, median):.2f}"
        row[f"{side}_spread"] = f"{spread(cell.seconds[side]):.4f}"
    row |= {"ratio": f"{cell.ratio:.4f}", "ratio_spread": f"{spread(cell.ratios):.4f}"}
    row |= {"rounds": len(cell.ratios), "calls": cell.calls, "input_sets": cell.sets}
    return {**row, "difference": f"{cell.difference:.2e}"}


COLUMNS = [
    "grid",
    *figures.SHAPE_COLUMNS,
    *figures.OPTION_COLUMNS,
    *(f"{side}_{column}" for side in SIDES for column in ("us", "tflops", "spread")),
    *("ratio", "ratio_spread", "rounds", "calls", "input_sets", "difference", "missing"),
    *("ours", "other", "options", "gpu", "torch", "driver"),
]


@contextmanager
def csv_rows(path: Path | None) -> Iterator[Any]:
    """A function that writes a row at once: a run that is cut off leaves what it measured."""
    if path is None:
        yield lambda row: None
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()

        def write(row: dict[str, object]) -> None:
            writer.writerow(row)
            file.flush()

        yield write


def print_cell(cell: Cell, row: dict[str, object]) -> None:
    text = f"{cell.workload.direction} {cell.workload.label:<44}"
    if cell.missing:
        print(f"{text} {cell.missing}", flush=True)
        return
    text += f" {row['ours_tflops']:>9} {row['other_tflops']:>9}   {row['ratio']} ±{row['ratio_spread']}"
    text += f" ({row['rounds']} rounds)"
    text += "  SLOWER" if cell.ratio < SLOWER else ""
    text += f"  WRONG: differs by {row['difference']}" if cell.is_wrong else ""
    print(text, flush=True)


def print_means(cells: Sequence[Cell]) -> None:
    print("\ngeometric mean of the ratios (least, greatest; cells, of them below 0.99)")
    for direction in dict.fromkeys(cell.workload.direction for cell in cells):
        ratios = [cell.ratio for cell in cells if cell.workload.direction == direction and not cell.missing]
        if ratios:
            below = sum(ratio < SLOWER for ratio in ratios)
            mean = statistics.geometric_mean(ratios)
            print(f"  {direction}: {mean:.4f} ({min(ratios):.4f}, {max(ratios):.4f}; {len(ratios)}, {below})")


def _site(text: str) -> tuple[Path, str]:
    """PATH or PATH=LABEL."""
    path, _, label = text.partition("=")
    if not Path(path, "flash_cute").is_dir():
        raise argparse.ArgumentTypeError(f"expected a folder that holds an installed flash_cute, given {path!r}")
    return Path(path), label


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/versus.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ours", type=_site, required=True, metavar="SITE[=LABEL]", help="one build")
    parser.add_argument("--other", type=_site, required=True, metavar="SITE[=LABEL]", help="the build to compare with")
    parser.add_argument("--grid", default="", help="one or several grids of bench/run.py; without it, a single case")
    parser.add_argument("--directions", default="fwd,bwd", help="fwd, bwd or both, separated by a comma (both)")
    parser.add_argument("--backend", help="insist on sm80 or sm90 in both builds")
    parser.add_argument("--deterministic", action="store_true", help="the backward's deterministic mode")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each build per cell (7)")
    parser.add_argument("--seconds", type=float, default=0.04, help="measured time of one turn (0.04)")
    parser.add_argument(
        "--device", type=case_flags.device_name, default="cuda", help="cuda (default), or cpu to try the tool"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs (0)")
    parser.add_argument("--out", type=Path, help="CSV to write")
    case_flags.add_shape_flags(parser)
    flags = parser.parse_args(arguments)
    flags.directions = flags.directions.split(",")
    for direction in flags.directions:
        if direction not in ("fwd", "bwd"):
            parser.error(f"--directions: expected fwd, bwd or both, given {direction!r}")
    flags.grids = flags.grid.split(",") if flags.grid else ["case"]
    for grid in flags.grids:
        if grid not in (*workloads.GRIDS, "case"):
            parser.error(f"--grid: expected one or several of {', '.join(workloads.GRIDS)}, given {grid!r}")
    if flags.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("there is no CUDA GPU; --device cpu tries the tool on the CPU")
    return flags


def facts_of(builds: dict[str, Build], options: dict[str, Any]) -> dict[str, str]:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    except (OSError, subprocess.SubprocessError):
        driver = ""
    named = {side: build.label for side, build in builds.items()}
    chosen = " ".join(f"{name}={value}" for name, value in options.items())
    gpu = builds["ours"].facts["gpu"]
    return {**named, "options": chosen, "gpu": gpu, "torch": torch.__version__, "driver": driver}


def main(arguments: Sequence[str] | None = None) -> int:
    flags = parse(arguments)
    started = time.perf_counter()
    sys.path.insert(0, str(flags.ours[0]))  # the FLOPs and medians are those of the installed package
    options: dict[str, Any] = {"backend": flags.backend} if flags.backend else {}
    options |= {"deterministic": True} if flags.deterministic else {}
    cells: list[Cell] = []
    with ExitStack() as stack:
        builds: dict[str, Build] = {}
        for side in SIDES:
            site, label = getattr(flags, side)
            builds[side] = Build(site, label or side, flags.device)
            stack.callback(builds[side].close)
        for side in SIDES:
            builds[side].load(getattr(flags, side)[0])
        facts = facts_of(builds, options)
        print(", ".join(f"{name} {value}" for name, value in facts.items() if value), f"seed {flags.seed}", sep=", ")
        print(f"{'TFLOP/s of each build':<48} {facts['ours']:>9} {facts['other']:>9}   ratio")
        write = stack.enter_context(csv_rows(flags.out))
        for grid in flags.grids:
            for direction in flags.directions:
                for workload in _workloads(grid, direction, flags):
                    cell = measure(
                        workload, builds, options, rounds=flags.rounds, seconds=flags.seconds, seed=flags.seed
                    )
                    row = row_of(grid, cell, facts)
                    write(row)
                    print_cell(cell, row)
                    cells.append(cell)
    print_means(cells)
    print(f"\n{time.perf_counter() - started:.0f} s in all")
    return 0 if any(not cell.missing for cell in cells) and not any(cell.is_wrong for cell in cells) else 1


def _workloads(grid: str, direction: workloads.Direction, flags: argparse.Namespace) -> list[Workload]:
    if grid == "case":
        return [case_flags.from_flags(flags, direction)]
    return [replace(workload, direction=direction) for workload in workloads.GRIDS[grid]()]


if __name__ == "__main__":
    sys.exit(main())
