"""Draw a CSV of bench/run.py: TFLOP/s over N, a panel per head dim and mask, or bars where the shapes are few.

    python bench/plot.py bench/results/h100/paper.csv

Writes a PNG beside each CSV. Lines need two lengths or more in each panel; other grids are drawn as bars, a group per
shape. Hollow marks show where FlashAttention-3 and -4 would stand that were not in the run: the rate of a peer that
was, times theirs over its in a run of their own (`others_GPU.csv`). The CSVs of `--accuracy`, `--choices` and
`--models` have plots of their own.
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
from matplotlib.figure import Figure as MplFigure

ROOT = Path(__file__).resolve().parents[1]
if not __package__:
    # Run as a script: bench/ must not hide the standard library's `profile`, nor this tree the installed package.
    sys.path[:] = [*sys.path[1:], str(ROOT)]

from bench import choice_table, errors, figures, plot_accuracy, plot_steps, steps  # noqa: E402
from bench.figures import Figure, Results, Table  # noqa: E402
from bench.look import LOOKS  # noqa: E402


def panel_of(figure: Figure) -> tuple[str, str]:
    """The row and the column of the panel that a figure belongs to, where lines are drawn."""
    words = (figure.mask, figures.options_text(figure.row))
    return ", ".join(filter(None, words)), f"head dim {figure.row['D']}"


def draw_others(axes: Axes, places: dict[float, list[Figure]]) -> None:
    """Marks of those that were measured in another run; `places` has the figures of one shape by their place."""
    for name in figures.OTHERS:
        colour, marker, _ = LOOKS[name]
        rates = {place: figures.other_rate(name, chosen) for place, chosen in places.items()}
        points = {place: rate for place, rate in rates.items() if rate is not None}
        if points:
            label = f"{figures.provider_title(name)}, scaled from another run"
            hollow = {"color": colour, "fillstyle": "none", "markersize": 7, "zorder": 3}
            axes.errorbar(list(points), list(points.values()), fmt=marker, label=label, **hollow)


def draw_lines(axes: Axes, chosen: Sequence[Figure], providers: Sequence[str]) -> None:
    """The rates of one panel over the length."""
    for provider in providers:
        colour, marker, line = LOOKS[provider]
        points = sorted((one for one in chosen if one.provider == provider), key=lambda one: one.number("N"))
        if not points:
            continue
        axes.errorbar(
            [one.number("N") for one in points],
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
    places: dict[float, list[Figure]] = {}
    for figure in chosen:
        places.setdefault(figure.number("N"), []).append(figure)
    draw_others(axes, places)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(places), [f"{place:,.0f}" for place in places])
    axes.minorticks_off()


def is_by_length(table: Table) -> bool:
    """Whether lines over the length can be drawn: each panel has several lengths, and one shape at each."""
    lengths: dict[tuple[str, str], list[str]] = {}
    for figure in table.figures:
        if figure.provider == table.providers[0]:
            lengths.setdefault(panel_of(figure), []).append(figure.row["N"])
    return all(len(set(of_panel)) == len(of_panel) > 1 for of_panel in lengths.values())


def draw_by_length(table: Table) -> MplFigure:
    places = dict.fromkeys(panel_of(figure) for figure in table.figures)
    rows = list(dict.fromkeys(row for row, _ in places))
    columns = list(dict.fromkeys(column for _, column in places))
    size = (max(6.4, 3.6 * len(columns)), 2.6 * len(rows) + 1.1)
    canvas, panels = plt.subplots(len(rows), len(columns), figsize=size, sharey="row", squeeze=False)
    for r, row in enumerate(rows):
        for c, column in enumerate(columns):
            chosen = [figure for figure in table.figures if panel_of(figure) == (row, column)]
            if chosen:
                draw_lines(panels[r][c], chosen, table.providers)
            panels[r][c].set_title(f"{column}, {row}", fontsize=10)
    for axes in panels[-1]:
        axes.set_xlabel("length N")
    return canvas


def bar_label(figure: Figure, table: Table) -> str:
    """What tells a shape from the others of its table, a line each."""
    row = figure.row
    lines = {
        "D": f"D {row['D']}",
        "causal": figure.mask,
        "N": row["N"] if row["N"] == row["M"] else f"{row['N']} x {row['M']}",
        "Hkv": f"{row['H']} heads" if row["H"] == row["Hkv"] else f"{row['H']}/{row['Hkv']} heads",
    }
    varying = [column for column in lines if len({one.row[column] for one in table.figures}) > 1]
    options = figures.options_text(row).replace(", ", "\n").replace("packed ", "packed\n")
    return "\n".join([*(lines[column] for column in varying or ["D"]), *filter(None, [options])])


def draw_bars(table: Table) -> MplFigure:
    """A group of bars per shape, a bar per provider; a panel per dtype."""
    dtypes = list(dict.fromkeys(figure.row["dtype"] for figure in table.figures))
    shapes = [[shape for shape in table.shapes if shape[7] == dtype] for dtype in dtypes]
    size = (max(6.4, 0.95 * max(map(len, shapes)) + 1.5), 2.9 * len(dtypes) + 1.1)
    canvas, panels = plt.subplots(len(dtypes), 1, figsize=size, squeeze=False)
    width = 0.84 / len(table.providers)
    for (axes,), dtype, of_dtype in zip(panels, dtypes, shapes, strict=True):
        for index, provider in enumerate(table.providers):
            offset = (index - (len(table.providers) - 1) / 2) * width
            found = {place: table.find(shape, provider) for place, shape in enumerate(of_dtype)}
            bars = {place: figure for place, figure in found.items() if figure is not None}
            axes.bar(
                [place + offset for place in bars],
                [figure.number("tflops") for figure in bars.values()],
                width,
                yerr=[figure.number("tflops") * figure.number("spread") for figure in bars.values()],
                label=figures.provider_title(provider),
                color=LOOKS[provider][0],
                error_kw={"linewidth": 0.8, "ecolor": "#444444"},
            )
        groups = [[figure for figure in table.figures if figure.shape == shape] for shape in of_dtype]
        draw_others(axes, dict(enumerate(groups)))
        axes.set_xticks(range(len(groups)), [bar_label(group[0], table) for group in groups], fontsize=8)
        axes.set_title(dtype, fontsize=10)
    return canvas


def draw(results: Results, table: Table, out: Path) -> None:
    canvas = draw_by_length(table) if is_by_length(table) else draw_bars(table)
    named: dict[str, Any] = {}
    for axes in canvas.axes:
        axes.grid(axis="y", color="#dddddd", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=0)  # once all of it is drawn: it ends the autoscaling
        if axes.get_subplotspec().is_first_col():
            axes.set_ylabel("TFLOP/s" + (f", {table.direction_title}" if table.direction != "fwd" else ""))
        handles, labels = axes.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    add_legend(canvas, named, figures.belongs_to(results.facts))
    canvas.savefig(out, dpi=130)
    plt.close(canvas)
    print(f"wrote {out}")


def add_legend(canvas: MplFigure, named: dict[str, Any], foot: str) -> None:
    """One legend above all panels, and what the figures belong to below them."""
    width, height = canvas.get_size_inches()
    legend_rows = math.ceil(len(named) / max(1, min(4, int(width / 1.9))))
    canvas.legend(
        handles=list(named.values()),
        labels=list(named),
        loc="upper center",
        ncols=math.ceil(len(named) / legend_rows),
        frameon=False,
        fontsize=9,
    )
    canvas.text(0.5, 0.005, foot, ha="center", va="bottom", fontsize=7, color="#555555")
    canvas.tight_layout(rect=(0, 0.02, 1, 1 - (0.15 + 0.2 * legend_rows) / height))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench/plot.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("csv", type=figures.csv_file, nargs="+", help="what bench/run.py wrote")
    parser.add_argument("--out", type=Path, help="PNG to write (beside the CSV)")
    flags = parser.parse_args(arguments)
    for path in flags.csv:
        out = flags.out or path.with_suffix(".png")
        if errors.is_accuracy(path):
            plot_accuracy.draw(errors.read(path), out)
            continue
        if choice_table.is_choices(path):
            choice_table.draw(choice_table.read(path), out)
            continue
        if steps.is_layers(path) or errors.is_float8(path):
            print(f"{figures.name_of(path)}: a table, not a plot")
            continue
        if steps.is_steps(path):
            plot_steps.draw(steps.read(path), out)
            continue
        results = figures.read(path)
        for table in results.tables:
            if table.clock == "host" or len(results.tables) > 1 or table.of_caches:
                print(f"{figures.name_of(path)}, clock {table.clock}: a table, not a plot")
                continue
            draw(results, table, out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
