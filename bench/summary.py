"""Ratios of measured CSVs beside the bars that the project sets itself, cell by cell, with geometric means.

    python bench/summary.py bench/results/h200/*.csv

The bar of the ratio to the best peer is 1 (with a window, packed, or with a head dim of v's own 1.05, and of a window
of 128 keys 1.3), or more where a peer that was not in the run would have been ahead of it: by how far FlashAttention-3
and -4 were ahead of it on that shape and GPU in a run of their own (`others_GPU.csv`). The peers of the sm80 kernels
are those that use no Hopper instruction either, and their bar is 1. A deterministic mode is held to 0.85 times its
default mode's speed, a packed batch to 0.97 of the dense call's, sinks to 0.99 of the speed without, and a softcap or
ALiBi to 0.85, backward 0.9. A call over a cache is held to 1 times the dense call's speed, in pages or with an append
to 0.97 of the speed without. A forward in float8 is held to 1.25 times the speed of the same values in bfloat16 and to
1.02 times the best peer's, or with a head dim of 64 to their speeds. A cell may miss its bar by its spread, by at most
0.02.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if not __package__:
    # Run as a script: bench/ must not hide the standard library's `profile`, nor this tree the installed package.
    sys.path[:] = [*sys.path[1:], str(ROOT)]

from bench import choice_table, errors, figures, steps  # noqa: E402
from bench.figures import Figure, Results, Table  # noqa: E402

DETERMINISTIC_BAR = 0.85
PACKED_BAR = 0.97  # of the dense call
PAGES_BAR = 0.97  # of the same call over contiguous caches, or with the new keys in the cache already
SINKS_BAR = 0.99  # of the same call without
MODIFIED_SCORE_BARS = {"fwd": 0.85, "bwd": 0.9, "train": 0.85}
FLOAT8_BAR = 1.25  # of the same values in bfloat16; with a head dim below 128 1
FLOAT8_AHEAD = 1.02  # of the best peer in float8; likewise
AHEAD = 1.05  # of the best peer, where a problem is more than a shape
FAR_AHEAD = 1.3  # with a window as narrow as a tile
LARGEST_ALLOWANCE = 0.02


@dataclass(frozen=True)
class Line:
    """A cell of the summary: the ratio of ours to `peer`, and its bar."""

    figure: Figure
    peer: str
    ratio: float
    bar: float

    @property
    def spread(self) -> float:
        return self.figure.number(f"ratio_{self.peer}_spread")

    @property
    def is_reached(self) -> bool:
        return self.ratio >= self.bar - min(self.spread, LARGEST_ALLOWANCE)

    @property
    def text(self) -> str:
        return (
            f"  {self.figure.label:<42} {self.ratio:6.3f} ±{self.spread:.3f}  bar {self.bar:.2f}  "
            f"{self.ratio / self.bar:6.3f} of it  {figures.provider_title(self.peer)}"
            + ("" if self.is_reached else "  MISSED")
        )


def to_best_peer(table: Table, ours: str, gpu: str) -> list[Line]:
    lines = []
    for shape, peer, ratio in table.best_ratios(ours):
        figure = table.find(shape, ours)
        assert figure is not None
        bar = 1.0
        if table.clock == "events" and ":sm80" not in ours and figures.DETERMINISTIC not in ours:
            bar = figures.others_over(gpu, figure.key, peer, table.providers) or 1.0
            bar *= bar_of_options(figure)
        lines.append(Line(figure, peer, ratio, bar))
    return lines


def bar_of_options(figure: Figure) -> float:
    """What the options of a problem multiply its bar by."""
    row = figure.row
    if row.get("window") == "127,0":
        return FAR_AHEAD
    if row["dtype"] == "e4m3":
        return FLOAT8_AHEAD if int(row["D"]) >= 128 else 1.0
    return AHEAD if any(row.get(name) for name in ("window", "lengths", "Dv")) else 1.0


def to_baseline(table: Table, ours: str, base: str) -> list[Line]:
    """Ratios to ours in another mode; see `Table.baselines`."""
    found = [(one, one.ratio(base)) for one in table.figures if one.provider == ours]
    return [Line(figure, base, ratio, bar_of_baseline(figure, base)) for figure, ratio in found if ratio is not None]


def bar_of_baseline(figure: Figure, base: str) -> float:
    if figure.row.get("page"):
        return 1.0 if base.endswith(figures.DENSE) else PAGES_BAR
    if base.endswith(figures.DENSE):
        return PACKED_BAR
    if base.endswith(figures.BF16):
        return FLOAT8_BAR if int(figure.row["D"]) >= 128 else 1.0
    if base.endswith(figures.PLAIN):
        modified = figure.row.get("softcap") or figure.row.get("alibi")
        return MODIFIED_SCORE_BARS[figure.direction] if modified else SINKS_BAR
    return DETERMINISTIC_BAR


def print_lines(title: str, lines: Sequence[Line]) -> None:
    if not lines:
        return
    print(f"\n{title}")
    print(*(line.text for line in lines), sep="\n")
    mean = statistics.geometric_mean(line.ratio for line in lines)
    bar = statistics.geometric_mean(line.bar for line in lines)
    missed = sum(not line.is_reached for line in lines)
    print(
        f"  geometric mean of {len(lines)}: {mean:.3f}, of the bars {bar:.3f}: {mean / bar:.3f} of it; {missed} missed"
    )


def print_summary(results: Results) -> None:
    print(f"\n{figures.name_of(results.path)}: {figures.belongs_to(results.facts)}")
    for table in results.tables:
        for ours in table.ours:
            title = f"{table.title}: {figures.provider_title(ours)}"
            print_lines(f"{title} / the best peer", to_best_peer(table, ours, results.facts["gpu"]))
            for of_ratio, base in table.baselines(ours).items():
                print_lines(f"{title}: {of_ratio}", to_baseline(table, ours, base))


def print_errors(found: errors.Errors) -> None:
    """The largest ratio of each result, and where."""
    print(f"\n{figures.name_of(found.path)}: {figures.belongs_to(found.facts)}")
    print("errors over those of the best peer, the largest")
    for ours in found.ours:
        for result in errors.RESULTS:
            row = max(found.of(ours), key=lambda row: float(row[f"ratio_{result}"]))
            where = f"D {row['D']} {figures.MASKS[row['causal']]} {row['dtype']} {row['inputs']}"
            best = figures.provider_title(row[f"best_{result}"])
            print(f"  {figures.provider_title(ours):<18} {result:<3} {row[f'ratio_{result}']} {best}, {where}")


def print_steps(found: steps.Steps) -> None:
    """The ratio of each step to that with the fastest peer; the bar is 1."""
    print(f"\n{figures.name_of(found.path)}: {steps.belongs_to(found)}")
    print("a step's time with the best peer over that with flash_cute")
    for cell in found.cells:
        best = found.best_ratio(cell)
        text = f"{best[1]:.3f} {steps.TITLES.get(best[0], best[0])}" if best else "no peer"
        print(f"  {steps.cell_text(cell):<40} {text}")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench/summary.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("csv", type=figures.csv_file, nargs="+", help="what bench/run.py wrote")
    for path in parser.parse_args(arguments).csv:
        if errors.is_accuracy(path):
            print_errors(errors.read(path))
        elif errors.is_float8(path):
            of_float8 = errors.read_float8(path)
            print(f"\n{figures.name_of(path)}: {figures.belongs_to(of_float8.facts)}")
            print("\n".join(errors.float8_lines(of_float8)))
        elif steps.is_layers(path):
            print(f"\n{figures.name_of(path)}: {figures.belongs_to(steps.layer_facts(path))}")
            print("\n".join(steps.layer_lines(path)))
        elif steps.is_steps(path):
            print_steps(steps.read(path))
        elif choice_table.is_choices(path):
            print("\n".join(choice_table.markdown(choice_table.read(path))))
        else:
            print_summary(figures.read(path))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
