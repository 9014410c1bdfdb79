"""The CSVs of `bench/choices.py`, read back, as tables and as a plot. It imports neither torch nor flash_cute."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench import figures

Row = Mapping[str, str]
# What the sm90 forward's tiles are called in CSVs from before they were named by their rows. "wide" was the name of the
# tile for many rows, which has 192 of them up to head dim 128 and 128 above.
EARLIER_TILES = {
    "tall": "rows256",
    "wide": "rows192",
    "wide_late": "rows192_late",
    "pair": "rows128",
    "pair_late": "rows128_late",
    "narrow": "rows64",
}
WORST = 8  # shapes of a direction that a table names
BOUNDS = (1.03, 1.10)  # of the mean and of the worst


def is_choices(path: Path) -> bool:
    with path.open() as file:
        return "plan_us" in file.readline().split(",")


def read(path: Path) -> list[dict[str, str]]:
    """The rows, with today's names of tiles."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        for column in ("plan", "best", "times"):
            row[column] = " ".join(_name_now(name, int(row["D"])) for name in row[column].split())
    return rows


def _name_now(choice: str, head_dim: int) -> str:
    """Of a choice, as in "sm90:wide:split", that may go on with its time."""
    backend, *words = choice.split(":")
    if backend == "sm90" and words:
        tile = "rows128" if words[0] == "wide" and head_dim > 128 else EARLIER_TILES.get(words[0], words[0])
        words[0] = tile
    return ":".join((backend, *words))


def facts_of(rows: Sequence[Row]) -> dict[str, str]:
    return {name: rows[0].get(name) or "" for name in ("gpu", "torch", "cudnn", "driver", "commit")}


def by_direction(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return {
        name: [row for row in rows if row["direction"] == name] for name in dict.fromkeys(r["direction"] for r in rows)
    }


def ratio(row: Row) -> float:
    return float(row["ratio"])


def percent(value: float) -> str:
    return f"{100 * (value - 1):.1f} %"


def markdown(rows: Sequence[Row]) -> Iterator[str]:
    """How much slower the plan's choice is than the best one; then the shapes at which it is so most."""
    yield "| direction | shapes | mean | worst | plan's is the best | within 3 % | choices per shape |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for direction, own in by_direction(rows).items():
        ratios = [ratio(row) for row in own]
        counts = statistics.mean(float(row["choices"]) for row in own)
        best = sum(row["plan"] == row["best"] for row in own)
        near = sum(value <= BOUNDS[0] for value in ratios)
        cells = (figures.DIRECTIONS[direction], len(own), percent(statistics.mean(ratios)), percent(max(ratios)))
        yield f"| {' | '.join(map(str, (*cells, best, near, f'{counts:.1f}')))} |"
    yield ""
    yield "| direction | shape | plan | best | slower by | best's time, us |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for direction, own in by_direction(rows).items():
        worst = sorted(own, key=ratio, reverse=True)[:WORST]
        for row in (row for row in worst if ratio(row) > 1):
            cells = (figures.DIRECTIONS[direction], shape_text(row), row["plan"], row["best"], percent(ratio(row)))
            yield f"| {' | '.join((*cells, row['best_us']))} |"
    yield ""


def shape_text(row: Row) -> str:
    """A shape in few words; of a packed batch how many sequences there are."""
    heads = row["H"] if row["H"] == row["Hkv"] else f"{row['H']}/{row['Hkv']}"
    length = row["N"] if row["N"] == row["M"] else f"{row['N']} x {row['M']}"
    mask = f"window {row['window'].partition(',')[0]}" if row["window"] else figures.MASKS[row["causal"]]
    packed = f", packed to {sum(map(int, row['lengths'].split('+')))}" if row["lengths"] else ""
    return f"B {row['B']}, H {heads}, N {length}{packed}, D {row['D']}, {mask}, {row['dtype']}"


def draw(rows: Sequence[Row], out: Path) -> None:
    """A panel per direction: how much slower the plan's choice is, over the best one's time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    directions = by_direction(rows)
    canvas, panels = plt.subplots(1, len(directions), figsize=(5.2 * len(directions), 3.8), sharey=True, squeeze=False)
    colours = {"full": "#0072B2", "causal": "#D55E00", "window": "#009E73"}
    for axes, (direction, own) in zip(panels[0], directions.items(), strict=True):
        for mask, colour in colours.items():
            found = [r for r in own if ("window" if r["window"] else figures.MASKS[r["causal"]]) == mask]
            times, slower = [float(r["best_us"]) for r in found], [100 * (ratio(r) - 1) for r in found]
            axes.plot(times, slower, "o", color=colour, markersize=3.5, alpha=0.6, label=mask)
        mean = 100 * (statistics.mean(ratio(row) for row in own) - 1)
        axes.axhline(mean, color="#555555", linewidth=1, label="mean")
        axes.axhline(100 * (BOUNDS[1] - 1), color="#bbbbbb", linewidth=0.8, linestyle="--")
        axes.set_xscale("log")
        axes.set_xlabel("time of the best choice, us", fontsize=9)
        axes.set_title(f"{figures.DIRECTIONS[direction]}: mean {mean:.2f} %", fontsize=10)
        axes.grid(axis="y", color="#dddddd", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("the plan's choice is slower by, %", fontsize=9)
    panels[0][0].legend(frameon=False, fontsize=8)
    foot = f"{figures.belongs_to(facts_of(rows))}; a dot per random shape"
    canvas.text(0.5, 0.005, foot, ha="center", va="bottom", fontsize=7, color="#555555")
    canvas.tight_layout(rect=(0, 0.03, 1, 1))
    canvas.savefig(out, dpi=110)
    plt.close(canvas)
    print(f"wrote {out}")
