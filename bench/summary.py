"""Ratios of measured CSVs beside the bars that the project sets itself, cell by cell, with geometric means.

    python bench/summary.py bench/results/h100-*.csv

The bar of a ratio to cuDNN is how far the best of FlashAttention-3 and -4 was ahead of cuDNN on that shape
(`others_h100.csv`); that of the portable sm80 kernels is FlashAttention-2's speed; that of a deterministic mode 0.85
times its default mode's; that of the host's time a peer's. A cell may miss its bar by its spread, by at most 0.02.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if not __package__:
    # Run as a script: bench/ must not hide the standard library's `profile`, nor this tree the installed package.
    sys.path[:] = [*sys.path[1:], str(ROOT)]

from bench import figures  # noqa: E402
from bench.figures import Figure, Results, Table  # noqa: E402

DETERMINISTIC_BAR = 0.85
LARGEST_ALLOWANCE = 0.02


def bar_of(figure: Figure, peer: str) -> float | None:
    """The least ratio to that peer, or None where none is set."""
    if figure.clock == "host":
        return 1.0
    if peer.startswith("flash_cute"):
        return DETERMINISTIC_BAR
    portable = ":sm80" in figure.provider
    if peer == "flash" and portable:
        return 1.0
    return figures.others_over_cudnn(figure.key) if peer == "cudnn" and not portable else None


def print_pair(table: Table, ours: str, peer: str) -> None:
    """The cells of one pair of providers that have a bar, and their means."""
    lines, ratios, bars, missed = [], [], [], 0
    for shape in table.shapes:
        figure = table.find(shape, ours)
        ratio = figure.ratio(peer) if figure else None
        bar = bar_of(figure, peer) if figure else None
        if figure is None or ratio is None or bar is None:
            continue
        spread = figure.number(f"ratio_{peer}_spread")
        reached = ratio >= bar - min(spread, LARGEST_ALLOWANCE)
        missed += not reached
        ratios.append(ratio)
        bars.append(bar)
        lines.append(
            f"  {figure.label:<42} {ratio:6.3f} ±{spread:.3f}  bar {bar:.2f}  {ratio / bar:6.3f} of it"
            + ("" if reached else "  MISSED")
        )
    if not lines:
        return
    print(f"\n{table.title}: {figures.provider_title(ours)} / {figures.provider_title(peer)}")
    print(*lines, sep="\n")
    mean, mean_bar = statistics.geometric_mean(ratios), statistics.geometric_mean(bars)
    print(
        f"  geometric mean of {len(ratios)}: {mean:.3f}, of the bars {mean_bar:.3f}: {mean / mean_bar:.3f} of it; "
        f"{missed} missed"
    )


def print_summary(results: Results) -> None:
    print(f"\n{results.path.name}: {figures.belongs_to(results.facts)}")
    for table in results.tables:
        for ours, peer in table.pairs:
            print_pair(table, ours, peer)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench/summary.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("csv", type=Path, nargs="+", help="what bench/run.py wrote")
    for path in parser.parse_args(arguments).csv:
        print_summary(figures.read(path))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
