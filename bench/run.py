"""Measure flash_cute beside its peers.

    python bench/run.py --grid paper --peers cudnn,flash --out bench/results/GPU/NAME.csv
    python bench/run.py --direction bwd --grid paper --peers cudnn,flash --out bench/results/GPU/NAME.csv
    python bench/run.py --accuracy --out bench/results/GPU/NAME.csv
    python bench/run.py --models --out bench/results/GPU/NAME.csv
    python bench/run.py --choices --out bench/results/GPU/NAME.csv
    python bench/run.py --fp8-errors --out bench/results/GPU/NAME.csv
    python bench/run.py --masks --out bench/results/GPU/NAME.csv

Prints a table (TFLOP/s, ratio to each peer, geometric mean of the ratios) and writes a CSV of every figure with its
spread and with the GPU, torch, cuDNN and commit that it belongs to.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
if not __package__:
    # Run as a script: bench/ must not hide the standard library's `profile`, nor this tree the installed package.
    sys.path[:] = [*sys.path[1:], str(ROOT)]

from bench import accuracy, backends, caches, case_flags, choices, figures, fp8_errors, masks, models, workloads  # noqa: E402
from bench.environment import environment, matrix_product_tflops  # noqa: E402
from bench.timing import Cell, time_cell  # noqa: E402
from bench.workloads import Workload  # noqa: E402
from flash_cute._timing import Clock, tflops  # noqa: E402

GRIDS = workloads.GRIDS | caches.GRIDS
CLOCKS_OF_GRID: dict[str, tuple[Clock, ...]] = {"small": ("wall", "graph"), "host": ("host",)}
CLOCKS_OF_GRID |= {"decode": ("graph",), "prefill": ("graph",), "decode-host": ("host",)}
HOST_ROUNDS = 41


def rows_of(grid: str, cell: Cell, pairs: Sequence[tuple[str, str]], facts: dict[str, str]) -> list[dict[str, object]]:
    """The CSV rows of a cell, one per provider; a provider that did not run has a row that says why."""
    w = cell.workload
    shape: dict[str, object] = {"grid": grid, **w.columns}
    rows: list[dict[str, object]] = []
    for name, timing in cell.timings.items():
        row: dict[str, object] = {
            **shape,
            "provider": name,
            "clock": cell.clock,
            "mode": cell.mode,
            "median_us": f"{timing.median * 1e6:.3f}",
            "best_us": f"{timing.best * 1e6:.3f}",
            "spread": f"{timing.spread:.4f}",
            "tflops": f"{tflops(w.flops, timing.median):.2f}",
            "rounds": len(timing.rounds),
            "calls": timing.calls,
            "input_sets": cell.sets,
            "cache_tbytes": f"{w.cache_bytes / timing.median * 1e-12:.4g}" if w.cache_bytes else "",
            "plan": cell.plans.get(name, ""),
        }
        if name in cell.differences:
            row["difference"] = f"{cell.differences[name]:.2e} from {cell.compared_with}"
        for ours, peer in pairs:
            ratio = cell.ratio(ours, peer)
            if ours == name and ratio is not None:
                row[f"ratio_{peer}"] = f"{ratio.median:.4f}"
                row[f"ratio_{peer}_spread"] = f"{ratio.spread:.4f}"
        rows.append({**row, **facts})
    for name, reason in cell.missing.items():
        rows.append({**shape, "provider": name, "clock": cell.clock, "mode": cell.mode, "missing": reason, **facts})
    return rows


def write_csv(
    path: Path, rows: Sequence[dict[str, object]], pairs: Sequence[tuple[str, str]], facts: dict[str, str]
) -> None:
    columns = ["grid", *figures.SHAPE_COLUMNS, *figures.OPTION_COLUMNS, "provider", "clock", "mode"]
    columns += ["median_us", "best_us", "spread", "tflops", "cache_tbytes"]
    for peer in dict.fromkeys(peer for _, peer in pairs):
        columns += [f"ratio_{peer}", f"ratio_{peer}_spread"]
    columns += ["rounds", "calls", "input_sets", "difference", "plan", "missing", *facts]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def short(name: str) -> str:
    """A provider's name as a column head."""
    return name.removeprefix("flash_cute:")


def pair_title(ours: str, peer: str) -> str:
    return f"{short(ours)}/{short(peer)}"


class Table:
    """The printed table: a line per cell as soon as it is measured, then the geometric means."""

    def __init__(self, providers: Sequence[str], direction: str, gpu: str) -> None:
        self.providers = providers
        self.direction = direction
        self.gpu = gpu
        self.has_others = bool(figures.others(gpu)) and "cudnn" in providers
        self.pairs = backends.pairs(providers)
        self.ratios: dict[tuple[str, Clock, str, str, str], list[float]] = {}
        self.reasons: dict[tuple[str, str], int] = {}

    def head(self, grid: str, clock: Clock, mode: str, of_caches: bool) -> None:
        unit = "us (TB/s of keys and values)" if of_caches else "TFLOP/s"
        unit = "us per call, median (best)" if clock == "host" else unit
        title = f"\n{grid}, {figures.DIRECTIONS[self.direction]}: {unit}, clock {clock}"
        print(title + (f", {mode} mode" if mode != "grad" else ""))
        rates = "".join(f" {short(name):>13}" for name in self.providers)
        ratios = "".join(f" {pair_title(*pair):>17}" for pair in self.pairs)
        print(f"{'':<42}{rates}{ratios}" + (" others/cudnn" if self.has_others else ""))

    def line(self, grid: str, cell: Cell) -> None:
        text = f"{cell.workload.label:<42}"
        for name in self.providers:
            text += f" {self._figure(cell, name):>{max(13, len(short(name)))}}"
        for ours, peer in self.pairs:
            ratio = cell.ratio(ours, peer)
            width = max(17, len(pair_title(ours, peer)))
            text += f" {f'{ratio.median:.3f} ±{ratio.spread:.3f}' if ratio else '-':>{width}}"
            if ratio:
                self.ratios.setdefault((grid, cell.clock, cell.mode, ours, peer), []).append(ratio.median)
        if self.has_others and cell.clock == "events":
            ahead = figures.others_over(self.gpu, figures.problem_key(cell.workload.columns), "cudnn", measured=[])
            text += f" {f'{ahead:.2f}' if ahead else '-':>12}"
        for name in cell.wrong:
            text += f"  WRONG: {name} differs by {cell.differences[name]:.2e} from {cell.compared_with}"
        for name, reason in cell.missing.items():
            self.reasons[name, reason] = self.reasons.get((name, reason), 0) + 1
        print(text, flush=True)

    def _figure(self, cell: Cell, name: str) -> str:
        timing = cell.timings.get(name)
        if timing is None:
            return "-"
        if cell.clock == "host":
            return f"{timing.median * 1e6:.1f} ({timing.best * 1e6:.1f})"
        if cell.workload.cache_bytes:
            rate = cell.workload.cache_bytes / timing.median * 1e-12
            return f"{timing.median * 1e6:.1f} ({rate:.2f})"
        rate = tflops(cell.workload.flops, timing.median)
        return f"{f'{rate:.0f}' if rate >= 100 else f'{rate:.3g}'} ±{timing.spread * 100:.1f}%"

    def foot(self) -> None:
        if self.ratios:
            print("\ngeometric mean of the ratios (least, cells, of them below 1)")
        for (grid, clock, mode, ours, peer), values in self.ratios.items():
            mean = statistics.geometric_mean(values)
            pair = pair_title(ours, peer)
            below = sum(value < 1 for value in values)
            print(f"  {grid:<6} {clock:<6} {mode:<9} {pair:<18} {mean:.3f} ({min(values):.3f}, {len(values)}, {below})")
        if self.reasons:
            print("\nnot measured")
        for (name, reason), cells in self.reasons.items():
            print(f"  {name}, {cells} cell{'s' if cells > 1 else ''}: {reason}")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/run.py",
        description=(__doc__ or "").split("\n")[0],
        epilog="--accuracy measures errors against float64 instead of speed, --models whole steps of models, --choices "
        "the plan's choices beside the best ones, --fp8-errors the errors of float8, --masks masks beside what "
        "else computes them: see --accuracy --help and so on. "
        f"providers: {', '.join(backends.OURS)} (ours); {', '.join(backends.PEERS)} (peers)",
    )
    parser.add_argument("--grid", help=f"one or several of {', '.join(GRIDS)}; without it, a single case")
    parser.add_argument("--ours", default="flash_cute", help="providers of ours, separated by commas (flash_cute)")
    parser.add_argument(
        "--peers",
        help="peers, separated by commas, or all, or none (cudnn,flash,fa3; on the CPU sdpa)",
    )
    parser.add_argument("--out", help="CSV to write; with {grid} in its name, one for each grid")
    parser.add_argument(
        "--clock", choices=["events", "graph", "wall", "host"], help="events, unless the grid has clocks of its own"
    )
    parser.add_argument("--seconds", type=float, default=0.2, help="measured time per provider and cell (0.2)")
    parser.add_argument(
        "--rounds", type=int, help=f"turns of each provider, 5 or more (7; {HOST_ROUNDS} on clock host)"
    )
    parser.add_argument(
        "--device",
        type=case_flags.device_name,
        default="cuda",
        help="cuda (default) or cpu, where grid cpu is of a fitting size",
    )
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the random inputs (the time)")
    parser.add_argument("--commit", default="", help="commit to name in the CSV (git's)")
    parser.add_argument("--triton-tutorial", type=Path, help="a copy of Triton's fused-attention tutorial")
    case_flags.add_direction_flag(parser)
    case_flags.add_shape_flags(parser)
    flags = parser.parse_args(arguments)
    if flags.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(
            "there is no CUDA GPU here, and the grids are sized for one; to measure the CPU path give "
            "--device cpu --grid cpu, or --device cpu and a small case such as --B 1 --H 4 --N 512"
        )
    if flags.peers is None:
        flags.peers = "sdpa" if flags.device == "cpu" else "cudnn,flash,fa3"
    if flags.rounds is not None and flags.rounds < 5:
        parser.error(f"--rounds: expected 5 or more, given {flags.rounds}")
    flags.grids = _names(flags.grid or "case")
    for grid in flags.grids:
        if grid not in GRIDS and grid != "case":
            parser.error(f"--grid: expected one or several of {', '.join(GRIDS)}, given {grid!r}")
        for one in cells_of(grid, flags) if flags.direction != "fwd" else ():
            if one.is_float8 or one.cache_bytes:
                what = "float8" if one.is_float8 else "a cache"
                parser.error(f"--direction: {what} has a forward alone, given {flags.direction}")
    flags.ours = _names(flags.ours)
    flags.peers = {"all": list(backends.PEERS), "none": []}.get(flags.peers, _names(flags.peers))
    for name in (*flags.ours, *flags.peers):
        if name not in (*backends.OURS, *backends.PEERS):
            parser.error(f"provider: expected one of {', '.join(backends.OURS + backends.PEERS)}, given {name!r}")
    return flags


def clocks_of(grid: str, flags: argparse.Namespace, device: torch.device) -> tuple[Clock, ...]:
    wanted: tuple[Clock, ...] = (flags.clock,) if flags.clock else CLOCKS_OF_GRID.get(grid, ("events",))
    if device.type == "cuda":
        return wanted
    return ("host",) if wanted == ("host",) else ("wall",)


def cells_of(grid: str, flags: argparse.Namespace) -> list[Workload]:
    if grid == "case":
        return [case_flags.from_flags(flags, flags.direction)]
    return [replace(workload, direction=flags.direction) for workload in GRIDS[grid]()]


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--accuracy" in arguments:
        return accuracy.main([argument for argument in arguments if argument != "--accuracy"])
    if "--models" in arguments:
        return models.main([argument for argument in arguments if argument != "--models"])
    if "--choices" in arguments:
        return choices.main([argument for argument in arguments if argument != "--choices"])
    if "--masks" in arguments:
        return masks.main([argument for argument in arguments if argument != "--masks"])
    if "--fp8-errors" in arguments:
        return fp8_errors.main([argument for argument in arguments if argument != "--fp8-errors"])
    flags = parse(arguments)
    device = torch.device(flags.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    started = time.perf_counter()
    facts = environment(device, flags.commit)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        facts["matmul_tflops"] = f"{matrix_product_tflops(device):.0f}"
    print(", ".join(f"{name} {value}" for name, value in facts.items() if value), f"seed {flags.seed}", sep=", ")

    providers = []
    rows: list[dict[str, object]] = []
    for name in (*flags.ours, *flags.peers):
        reason = backends.absent(name, flags.triton_tutorial)
        if reason is None:
            providers.append(name)
        else:
            print(f"absent: {name}: {reason}")
            rows.append({"grid": "", "provider": name, "missing": reason, **facts})
    table = Table(providers, flags.direction, facts["gpu"])
    right = True
    for grid in flags.grids:
        for cell in measured_cells(grid, flags, device, table):
            right &= not cell.wrong
            rows += rows_of(grid, cell, table.pairs, facts)
            if flags.out:  # after each cell: a run that is cut off leaves what it measured
                of_file = [row for row in rows if row["grid"] in ("", grid)] if "{grid}" in flags.out else rows
                write_csv(Path(flags.out.replace("{grid}", grid)), of_file, table.pairs, facts)
    table.foot()
    print(f"\n{time.perf_counter() - started:.0f} s in all")
    return 0 if right and any("tflops" in row for row in rows) else 1


def measured_cells(grid: str, flags: argparse.Namespace, device: torch.device, table: Table) -> Iterator[Cell]:
    """Measure a grid and print its table: line by line, or after the last cell where there are several tables."""
    clocks = clocks_of(grid, flags, device)
    modes = ("grad", "inference") if "host" in clocks and flags.direction == "fwd" else ("grad",)
    one_table = len(clocks) * len(modes) == 1
    problems = cells_of(grid, flags)
    of_caches = any(problem.cache_bytes for problem in problems)
    if one_table:
        table.head(grid, clocks[0], modes[0], of_caches)
    cells: list[Cell] = []
    for workload in problems:
        for cell in time_cell(
            workload,
            table.providers,
            device,
            clocks=clocks,
            modes=modes,
            rounds=flags.rounds or (HOST_ROUNDS if "host" in clocks else 7),
            seconds=flags.seconds,
            seed=flags.seed,
            triton_tutorial=flags.triton_tutorial,
        ):
            cells.append(cell)
            if one_table:
                table.line(grid, cell)
            yield cell
    if not one_table:
        for clock in clocks:
            for mode in modes:
                table.head(grid, clock, mode, of_caches)
                for cell in cells:
                    if (cell.clock, cell.mode) == (clock, mode):
                        table.line(grid, cell)


if __name__ == "__main__":
    sys.exit(main())
