"""The CSVs of `bench/models.py` (and of `bench/layers.py`), as tables. It imports neither torch nor flash_cute."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from bench import errors, figures

NONE = "none"
OURS = "flash_cute"
MODELS = {"llama": "Llama-3-8B", "gemma2": "Gemma-2-9B", "gpt_oss": "gpt-oss-20b"}
DIRECTIONS = {"prefill": "prefill", "train": "training step"}
TITLES = {
    OURS: OURS,
    "sdpa": "PyTorch (SDPA)",
    "fa3": "FlashAttention-3",
    "eager": "unfused",
    "flex_attention": "FlexAttention",
    NONE: "no attention",
}
COLUMNS = ["model", "direction", "B", "N", "provider", "median_ms", "best_ms", "spread", "attention_ms"]
COLUMNS += ["attention_share"]


def writer(
    path: Path | None, peers: Sequence[str], facts: Mapping[str, str]
) -> AbstractContextManager[Callable[[errors.Rows], None]]:
    ratios = [f"ratio_{peer}{end}" for peer in peers for end in ("", "_spread")]
    return errors.rows_to(path, [*COLUMNS, *ratios, "rounds", "calls", "difference", "missing", *facts])


@dataclass(frozen=True)
class Steps:
    """One CSV: its rows, those that were not timed apart, and what they belong to."""

    path: Path
    facts: dict[str, str]
    rows: Sequence[dict[str, str]]
    missing: Sequence[dict[str, str]]

    @property
    def cells(self) -> list[tuple[str, str, str]]:
        """(model, direction, N) of each."""
        return list(dict.fromkeys((row["model"], row["direction"], row["N"]) for row in self.rows))

    def of(self, cell: tuple[str, str, str]) -> dict[str, dict[str, str]]:
        """The rows of a cell by provider."""
        return {row["provider"]: row for row in self.rows if (row["model"], row["direction"], row["N"]) == cell}

    @property
    def providers(self) -> list[str]:
        """Those that were timed somewhere, ours first, no attention last."""
        found = dict.fromkeys(row["provider"] for row in self.rows)
        return sorted(found, key=lambda name: (name != OURS, name == NONE))

    def best_ratio(self, cell: tuple[str, str, str]) -> tuple[str, float] | None:
        """The fastest peer of a cell, and its time over ours."""
        ours = self.of(cell).get(OURS, {})
        ratios = {name: float(ours[f"ratio_{name}"]) for name in self.providers if ours.get(f"ratio_{name}")}
        return min(ratios.items(), key=lambda item: item[1]) if ratios else None


def is_steps(path: Path) -> bool:
    with path.open() as file:
        return "attention_share" in file.readline().split(",")


def read(path: Path) -> Steps:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    timed = [row for row in rows if row["median_ms"]]
    if not timed:
        raise ValueError(f"{path}: no figures")
    names = ("gpu", "torch", "cudnn", "driver", "commit", "transformers")
    facts = {name: timed[0].get(name) or "" for name in names}
    return Steps(path, facts, timed, [row for row in rows if row["missing"]])


def cell_text(cell: tuple[str, str, str]) -> str:
    model, direction, length = cell
    return f"{MODELS.get(model, model)}, {DIRECTIONS[direction]}, N {int(length):,}"


def belongs_to(steps: Steps) -> str:
    return f"{figures.belongs_to(steps.facts)}, Transformers {steps.facts['transformers']}"


def markdown_lines(steps: Steps) -> Iterator[str]:
    """A line per cell: milliseconds of a step with each implementation, in brackets the attention's share."""
    providers = steps.providers
    heads = ["4 layers of", *(TITLES.get(name, name) for name in providers), "ratio to best peer"]
    yield f"| {' | '.join(heads)} |"
    yield f"| {' | '.join('---' for _ in heads)} |"
    ratios = []
    for cell in steps.cells:
        found = steps.of(cell)
        texts = [cell_text(cell)]
        for name in providers:
            row = found.get(name)
            share = f" ({100 * float(row['attention_share']):.0f} %)" if row and row["attention_share"] else ""
            texts.append(f"{float(row['median_ms']):.2f}{share}" if row else "-")
        best = steps.best_ratio(cell)
        if best is not None:
            ratios.append(best[1])
        texts.append(f"{best[1]:.3f} {TITLES.get(best[0], best[0])}" if best else "-")
        yield f"| {' | '.join(texts)} |"
    if len(ratios) > 1:
        blanks = [""] * len(providers)
        yield f"| {' | '.join(['geometric mean', *blanks, f'{statistics.geometric_mean(ratios):.3f}'])} |"
    yield ""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in steps.missing:
        cell = cell_text((row["model"], row["direction"], row["N"]))
        reasons.setdefault((row["provider"], row["missing"]), []).append(cell)
    for (name, reason), cells in reasons.items():
        yield f"* Not measured: {TITLES.get(name, name)} ({'; '.join(cells)}): {reason}."
    if reasons:
        yield ""


def is_layers(path: Path) -> bool:
    """Whether it is a CSV of `bench/layers.py`."""
    with path.open() as file:
        return "over_us" in file.readline().split(",")


def layer_facts(path: Path) -> dict[str, str]:
    with path.open(newline="") as file:
        row = next(csv.DictReader(file))
    return {name: row[name] for name in ("gpu", "torch", "cudnn", "driver", "commit")}


def layer_lines(path: Path) -> Iterator[str]:
    """A line per layer: microseconds, and in brackets what it adds, in each mode."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    yield f"| host microseconds per call (over flash_cute's function) | {' | '.join(modes)} |"
    yield f"| --- | {' | '.join('---' for _ in modes)} |"
    for layer in dict.fromkeys(row["layer"] for row in rows):
        found = {row["mode"]: row for row in rows if row["layer"] == layer}
        cells = (f"{float(found[mode]['median_us']):.1f} ({float(found[mode]['over_us']):+.1f})" for mode in modes)
        yield f"| {layer} | {' | '.join(cells)} |"
    yield ""
