"""Draw a CSV of bench/run.py: TFLOP/s over N, a panel a head dim and mask.

    python bench/plot.py bench/results/h100-paper.csv

Writes a PNG beside each CSV. Where no length varies, the head dim is the axis, and a panel is a mask and dtype. On an
H100, hollow marks show where FlashAttention-3 and -4 would stand: cuDNN's rate in this CSV, times their rate over
cuDNN's in `others_h100.csv`.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parents[1]
if not __package__:
    # Run as a script: bench/ must not hide the standard library's `profile`, nor this tree the installed package.
    sys.path[:] = [*sys.path[1:], str(ROOT)]

from bench import figures  # noqa: E402
from bench.figures import Figure, Results, Table  # noqa: E402

# Okabe and Ito's colours, told apart by every kind of colour vision; marker and dash differ as well.
OURS = (("#D55E00", "o", "-"), ("#CC79A7", "s", "-"), ("#E69F00", "^", "-"), ("#882255", "d", "-"))
PEERS = (
    ("#0072B2", "D", "--"),
    ("#009E73", "v", "-."),
    ("#56B4E9", "P", ":"),
    ("#000000", "X", ":"),
    ("#F0E442", "*", "--"),
    ("#999999", "h", "-."),
    ("#666666", "<", ":"),
)
OTHERS = (("fa3", "#000000", "^"), ("fa4", "#8C564B", "s"))


def styles(providers: Sequence[str]) -> dict[str, tuple[str, str, str]]:
    ours = [name for name in providers if name.startswith("flash_cute")]
    peers = [name for name in providers if name not in ours]
    return {**dict(zip(ours, OURS, strict=False)), **dict(zip(peers, PEERS, strict=False))}


def panel_of(figure: Figure, axis: str) -> tuple[str, str]:
    """The row and the column of the panel that a figure belongs to."""
    if axis == "N":
        return figure.mask, f"head dim {figure.row['D']}"
    return figure.mask, figure.row["dtype"]


def draw_others(axes: Axes, chosen: Sequence[Figure], axis: str) -> None:
    """Marks of those that were measured beside cuDNN in another run."""
    for name, colour, marker in OTHERS:
        points = []
        for figure in chosen:
            row = figures.others_h100().get(figure.key, {})
            if figure.provider == "cudnn" and row.get(name):
                rate = figure.number("tflops") * float(row[name]) / float(row["cudnn"])
                points.append((figure.number(axis), rate))
        if points:
            label = f"{figures.provider_title(name)}, scaled from another run"
            places, rates = zip(*points, strict=True)
            axes.errorbar(places, rates, fmt=marker, label=label, color=colour, fillstyle="none", markersize=7)


def draw_panel(axes: Axes, chosen: Sequence[Figure], axis: str, look: dict[str, tuple[str, str, str]]) -> None:
    for provider, (colour, marker, line) in look.items():
        points = sorted((one for one in chosen if one.provider == provider), key=lambda one: one.number(axis))
        if not points:
            continue
        axes.errorbar(
            [one.number(axis) for one in points],
            [one.number("tflops") for one in points],
            yerr=[one.number("tflops") * one.number("spread") for one in points],
            label=figures.provider_title(provider),
            color=colour,
            marker=marker,
            linestyle=line,
            linewidth=2 if provider.startswith("flash_cute") else 1.4,
            markersize=5,
            capsize=2,
        )
    ticks = sorted({int(figure.row[axis]) for figure in chosen})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)


def axis_of(table: Table) -> str | None:
    """What varies along the axis; None where several shapes would stand at one place of it."""
    axis = "N" if len({figure.row["N"] for figure in table.figures}) > 1 else "D"
    places = [(panel_of(figure, axis), figure.provider, figure.row[axis]) for figure in table.figures]
    return axis if len(set(places)) == len(places) else None


def draw(results: Results, table: Table, axis: str, out: Path) -> None:
    places = dict.fromkeys(panel_of(figure, axis) for figure in table.figures)
    rows = list(dict.fromkeys(row for row, _ in places))
    columns = list(dict.fromkeys(column for _, column in places))
    size = (max(6.4, 3.6 * len(columns)), 2.6 * len(rows) + 1.1)
    canvas, panels = plt.subplots(len(rows), len(columns), figsize=size, sharey="row", squeeze=False)
    look = styles(table.providers)
    for r, row in enumerate(rows):
        for c, column in enumerate(columns):
            chosen = [figure for figure in table.figures if panel_of(figure, axis) == (row, column)]
            if chosen:
                draw_panel(panels[r][c], chosen, axis, look)
            if table.clock == "events" and "H100" in results.facts["gpu"]:
                draw_others(panels[r][c], chosen, axis)
            panels[r][c].set_title(f"{column}, {row}", fontsize=10)
        panels[r][0].set_ylim(bottom=0)  # of the whole row, once all of it is drawn: it ends the autoscaling
        panels[r][0].set_ylabel("TFLOP/s" + (f", {table.direction_title}" if table.direction != "fwd" else ""))
    for c in range(len(columns)):
        panels[-1][c].set_xlabel("length N" if axis == "N" else "head dim")
    named: dict[str, Any] = {}
    for axes in panels.flat:
        handles, labels = axes.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    legend_rows = math.ceil(len(named) / 4)
    columns_of_legend = math.ceil(len(named) / legend_rows)
    canvas.legend(
        handles=list(named.values()),
        labels=list(named),
        loc="upper center",
        ncols=columns_of_legend,
        frameon=False,
        fontsize=9,
    )
    canvas.text(0.5, 0.005, figures.belongs_to(results.facts), ha="center", va="bottom", fontsize=7, color="#555555")
    canvas.tight_layout(rect=(0, 0.02, 1, 1 - (0.15 + 0.2 * legend_rows) / size[1]))
    canvas.savefig(out, dpi=130)
    plt.close(canvas)
    print(f"wrote {out}")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench/plot.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("csv", type=Path, nargs="+", help="what bench/run.py wrote")
    parser.add_argument("--out", type=Path, help="PNG to write (beside the CSV)")
    flags = parser.parse_args(arguments)
    for path in flags.csv:
        results = figures.read(path)
        for table in results.tables:
            axis = axis_of(table)
            if table.clock == "host" or axis is None:
                print(f"{path.name}, clock {table.clock}: a table, not a plot")
                continue
            draw(results, table, axis, flags.out or path.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
