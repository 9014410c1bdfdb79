"""The measured figures: the CSVs that bench/run.py writes, read back."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"

PROVIDERS = {
    "cudnn": "cuDNN",
    "flash": "FlashAttention-2",
    "efficient": "memory-efficient",
    "math": "unfused",
    "flash-attn": "flash-attn",
    "fa3": "FlashAttention-3",
    "triton": "Triton tutorial",
}
CLOCKS = {
    "events": "TFLOP/s",
    "graph": "TFLOP/s of the kernels alone, by graph replay",
    "wall": "TFLOP/s in wall time, host's work included",
    "host": "host microseconds a call",
}


def provider_title(name: str) -> str:
    ours, _, forced = name.partition(":")
    return f"{ours} ({forced})" if forced else PROVIDERS.get(name, name)


@dataclass(frozen=True)
class Figure:
    """One row of a CSV."""

    row: dict[str, str]

    @property
    def provider(self) -> str:
        return self.row["provider"]

    @property
    def clock(self) -> str:
        return self.row["clock"]

    @property
    def mode(self) -> str:
        return self.row["mode"]

    @property
    def mask(self) -> str:
        return {"none": "full", "bottom_right": "causal"}.get(self.row["causal"], self.row["causal"])

    @property
    def shape(self) -> tuple[str, ...]:
        return tuple(self.row[name] for name in ("D", "causal", "N", "M", "B", "H", "Hkv", "dtype"))

    def number(self, column: str) -> float:
        return float(self.row[column])

    def ratio(self, peer: str) -> float | None:
        text = self.row.get(f"ratio_{peer}", "")
        return float(text) if text else None


@dataclass(frozen=True)
class Table:
    """The figures of one clock and mode of a CSV."""

    clock: str
    mode: str
    figures: Sequence[Figure]

    @property
    def providers(self) -> list[str]:
        return list(dict.fromkeys(figure.provider for figure in self.figures))

    @property
    def shapes(self) -> list[tuple[str, ...]]:
        return list(dict.fromkeys(figure.shape for figure in self.figures))

    def find(self, shape: tuple[str, ...], provider: str) -> Figure | None:
        return next((one for one in self.figures if one.shape == shape and one.provider == provider), None)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """(ours, peer) of which there is a ratio."""
        peers = [name for name in self.providers if not name.startswith("flash_cute")]
        ours = [name for name in self.providers if name.startswith("flash_cute")]
        return [(mine, peer) for mine in ours for peer in peers if self.ratios(mine, peer)]

    def ratios(self, ours: str, peer: str) -> list[float]:
        ratios = [figure.ratio(peer) for figure in self.figures if figure.provider == ours]
        return [ratio for ratio in ratios if ratio is not None]

    def geometric_mean(self, ours: str, peer: str) -> float:
        return statistics.geometric_mean(self.ratios(ours, peer))


@dataclass(frozen=True)
class Results:
    """One CSV. `facts` is what its figures belong to; `absent` names each peer that was not there, and why."""

    path: Path
    facts: dict[str, str]
    tables: Sequence[Table]
    absent: dict[str, str]


def read(path: Path) -> Results:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise ValueError(f"{path}: no figures")
    names = ("gpu", "torch", "cuda", "cudnn", "driver", "python", "flash_cute", "commit", "matmul_tflops")
    facts = {name: rows[0].get(name) or "" for name in names}
    measured = [Figure(row) for row in rows if row["median_us"]]
    absent = {row["provider"]: row["missing"] for row in rows if not row["B"]}
    keys = dict.fromkeys((figure.clock, figure.mode) for figure in measured)
    tables = [
        Table(clock, mode, [figure for figure in measured if (figure.clock, figure.mode) == (clock, mode)])
        for clock, mode in keys
    ]
    return Results(path, facts, tables, absent)


def belongs_to(facts: dict[str, str]) -> str:
    """What the figures belong to, as a phrase."""
    parts = [facts["gpu"], f"torch {facts['torch']}"]
    parts += [f"cuDNN {facts['cudnn']}"] if facts["cudnn"] else []
    parts += [f"driver {facts['driver']}"] if facts["driver"] else []
    parts += [f"commit {facts['commit']}"]
    return ", ".join(parts)
