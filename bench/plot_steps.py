"""Draw a CSV of `bench/run.py --models`: milliseconds of a step by implementation, the attention's part on top."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from bench import steps
from bench.look import LOOKS
from bench.steps import NONE, Steps

REST = "#D9D9D9"


def draw_panel(axes: Axes, found: Steps, cell: tuple[str, str, str], providers: list[str]) -> None:
    """A bar per implementation: grey is what a step takes without attention."""
    rows = found.of(cell)
    present = [name for name in providers if name in rows]
    for place, name in enumerate(present):
        total = float(rows[name]["median_ms"])
        part = float(rows[name]["attention_ms"] or 0)
        axes.bar(place, total - part, 0.7, color=REST)
        axes.bar(
            place,
            part,
            0.7,
            bottom=total - part,
            yerr=total * float(rows[name]["spread"]),
            color=LOOKS[name][0],
            error_kw={"linewidth": 0.8, "ecolor": "#444444"},
        )
        axes.annotate(f"{total:.1f}", (place, total), (0, 3), textcoords="offset points", ha="center", fontsize=8)
    axes.set_xticks(range(len(present)), [steps.TITLES.get(name, name) for name in present], fontsize=8, rotation=20)
    axes.set_title(steps.cell_text(cell), fontsize=9)
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def draw(found: Steps, out: Path) -> None:
    """A panel per model, direction and length: a column of panels per model."""
    models = list(dict.fromkeys(model for model, *_ in found.cells))
    columns = [[cell for cell in found.cells if cell[0] == model] for model in models]
    rows = max(map(len, columns))
    canvas, panels = plt.subplots(rows, len(models), figsize=(3.9 * len(models), 3.0 * rows + 0.3), squeeze=False)
    providers = [name for name in found.providers if name != NONE]
    for c, cells in enumerate(columns):
        for r in range(rows):
            if r < len(cells):
                draw_panel(panels[r][c], found, cells[r], providers)
            else:
                panels[r][c].set_visible(False)
    for row in panels:
        row[0].set_ylabel("ms per step", fontsize=9)
    foot = f"{steps.belongs_to(found)}; grey: the step without attention"
    canvas.text(0.5, 0.005, foot, ha="center", va="bottom", fontsize=7, color="#555555")
    canvas.tight_layout(rect=(0, 0.025, 1, 1))
    canvas.savefig(out, dpi=110)
    plt.close(canvas)
    print(f"wrote {out}")
