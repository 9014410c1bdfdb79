"""Draw a CSV of `bench/run.py --accuracy`: each provider's errors over those of the best peer."""

from __future__ import annotations

import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from bench import figures
from bench.errors import RESULTS, Errors
from bench.look import LOOKS


def relative(errors: Errors, result: str, dtype: str, inputs: str) -> dict[str, list[float]]:
    """By provider: its error over that of the best peer, for each head dim and mask."""
    chosen = [row for row in errors.rows if (row["dtype"], row["inputs"]) == (dtype, inputs)]
    ratios: dict[str, list[float]] = {}
    for case in dict.fromkeys((row["D"], row["causal"]) for row in chosen):
        found = {row["provider"]: float(row[f"rms_{result}"]) for row in chosen if (row["D"], row["causal"]) == case}
        peers = [error for name, error in found.items() if not name.startswith("flash_cute")]
        for name, error in found.items() if peers and min(peers) > 0 else ():
            ratios.setdefault(name, []).append(error / min(peers))
    return ratios


def draw_panel(axes: Axes, errors: Errors, result: str, dtype: str) -> None:
    """Per kind of inputs a column of dots for each provider, a dot per head dim and mask; a dash is their median."""
    width = 0.8 / len(errors.providers)
    for place, inputs in enumerate(errors.inputs):
        ratios = relative(errors, result, dtype, inputs)
        for index, provider in enumerate(errors.providers):
            values = ratios.get(provider, [])
            if not values:
                continue
            x = place + (index - (len(errors.providers) - 1) / 2) * width
            colour = LOOKS[provider][0]
            label = figures.provider_title(provider)
            axes.plot([x] * len(values), values, "o", color=colour, markersize=3.5, alpha=0.55, label=label)
            axes.hlines(statistics.median(values), x - width / 2, x + width / 2, color=colour, linewidth=1.6)
    axes.axhline(1, color="#888888", linewidth=0.8, zorder=0)
    axes.set_xticks(range(len(errors.inputs)), [inputs.replace(" ", "\n") for inputs in errors.inputs], fontsize=8)
    axes.grid(axis="y", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{result}, {dtype}", fontsize=10)


def draw(errors: Errors, out: Path) -> None:
    """A panel per result and dtype."""
    dtypes = list(dict.fromkeys(row["dtype"] for row in errors.rows))
    size = (3.7 * len(RESULTS), 2.9 * len(dtypes) + 0.9)
    canvas, panels = plt.subplots(len(dtypes), len(RESULTS), figsize=size, sharey="row", squeeze=False)
    for row, dtype in zip(panels, dtypes, strict=True):
        for axes, result in zip(row, RESULTS, strict=True):
            draw_panel(axes, errors, result, dtype)
        row[0].set_ylabel("RMS error / that of the best peer", fontsize=9)
    handles, labels = panels[0][0].get_legend_handles_labels()
    named = dict(zip(labels, handles, strict=True))
    canvas.legend(list(named.values()), list(named), loc="upper center", ncols=len(named), frameon=False, fontsize=9)
    foot = f"{figures.belongs_to(errors.facts)}; a dot per head dim and mask, a dash for their median"
    canvas.text(0.5, 0.005, foot, ha="center", va="bottom", fontsize=7, color="#555555")
    canvas.tight_layout(rect=(0, 0.02, 1, 1 - 0.35 / size[1]))
    canvas.savefig(out, dpi=110)
    plt.close(canvas)
    print(f"wrote {out}")
