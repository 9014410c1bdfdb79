"""The measured figures: the CSVs that bench/run.py writes, read back."""

from __future__ import annotations

import csv
import functools
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
OTHERS = Path(__file__).resolve().parent / "others_h100.csv"

SHAPE_COLUMNS = ("direction", "B", "H", "Hkv", "N", "M", "D", "dtype", "causal")
MASKS = {"none": "full", "bottom_right": "causal", "top_left": "top_left"}
DIRECTIONS = {"fwd": "forward", "bwd": "backward", "train": "forward and backward, through autograd"}

PROVIDERS = {
    "sdpa": "PyTorch (SDPA)",
    "cudnn": "cuDNN",
    "flash": "FlashAttention-2",
    "efficient": "memory-efficient",
    "math": "unfused",
    "flash-attn": "flash-attn",
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
    "triton": "Triton tutorial",
}
CLOCKS = {
    "events": "TFLOP/s",
    "graph": "TFLOP/s of the kernels alone, by graph replay",
    "wall": "TFLOP/s in wall time, host's work included",
    "host": "host microseconds a call",
}


def gpu_prefix(gpu: str) -> str:
    """What the names of a GPU's CSVs begin with: h200 of "NVIDIA H200", h100 of "NVIDIA H100 80GB HBM3"."""
    words = [word for word in re.findall(r"\w+", gpu) if re.search(r"[a-zA-Z].*\d", word)]
    return (words[0] if words else gpu.split()[-1]).lower()


def provider_title(name: str) -> str:
    base, _, options = name.partition(":")
    title = PROVIDERS.get(base, base)
    return f"{title} ({options.replace(':', ', ')})" if options else title


def shape_label(shape: Mapping[str, Any]) -> str:
    """A shape in words; the keys are those of a CSV and of `Workload`."""
    heads = f"{shape['H']}" if shape["H"] == shape["Hkv"] else f"{shape['H']}/{shape['Hkv']}"
    length = f"{shape['N']}" if shape["N"] == shape["M"] else f"{shape['N']}x{shape['M']}"
    mask = MASKS[shape["causal"]]
    return f"D {shape['D']:<3} {mask:<6} N {length:<9} B {shape['B']} H {heads} {shape['dtype']}"


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
    def direction(self) -> str:
        return self.row.get("direction") or "fwd"

    @property
    def mask(self) -> str:
        return MASKS[self.row["causal"]]

    @property
    def label(self) -> str:
        return shape_label(self.row)

    @property
    def shape(self) -> tuple[str, ...]:
        return tuple(self.row[name] for name in ("D", "causal", "N", "M", "B", "H", "Hkv", "dtype"))

    @property
    def key(self) -> tuple[str, ...]:
        """Of `others_h100`."""
        return self.direction, *(self.row[name] for name in SHAPE_COLUMNS[1:])

    def number(self, column: str) -> float:
        return float(self.row[column])

    def ratio(self, peer: str) -> float | None:
        text = self.row.get(f"ratio_{peer}", "")
        return float(text) if text else None


@dataclass(frozen=True)
class Table:
    """The figures of one direction, clock and mode of a CSV."""

    direction: str
    clock: str
    mode: str
    figures: Sequence[Figure]

    @property
    def direction_title(self) -> str:
        return DIRECTIONS[self.direction]

    @property
    def title(self) -> str:
        of_direction = "" if self.direction == "fwd" else f", {self.direction_title}"
        return CLOCKS[self.clock] + of_direction + (f", {self.mode} mode" if self.clock == "host" else "")

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
        names = self.providers
        return [(mine, peer) for mine in names for peer in names if self.ratios(mine, peer)]

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
    tables: dict[tuple[str, str, str], list[Figure]] = {}
    for figure in measured:
        tables.setdefault((figure.direction, figure.clock, figure.mode), []).append(figure)
    return Results(path, facts, [Table(*key, chosen) for key, chosen in tables.items()], absent)


@functools.cache
def others_h100() -> dict[tuple[str, ...], dict[str, str]]:
    """By `SHAPE_COLUMNS`: TFLOP/s of cuDNN, FlashAttention-3 and -4 side by side on an H100; see bench/README.md."""
    with OTHERS.open(newline="") as file:
        return {tuple(row[name] for name in SHAPE_COLUMNS): row for row in csv.DictReader(file)}


def others_over_cudnn(key: tuple[str, ...]) -> float | None:
    """How many times as fast as cuDNN the fastest of them was, cuDNN among them."""
    row = others_h100().get(key)
    return float(row["best_over_cudnn"]) if row else None


def belongs_to(facts: dict[str, str]) -> str:
    """What the figures belong to, as a phrase."""
    parts = [facts["gpu"], f"torch {facts['torch']}"]
    parts += [f"cuDNN {facts['cudnn']}"] if facts["cudnn"] else []
    parts += [f"driver {facts['driver']}"] if facts["driver"] else []
    parts += [f"commit {facts['commit']}"]
    return ", ".join(parts)
