"""The measured figures: the CSVs that bench/run.py writes, read back."""

from __future__ import annotations

import argparse
import csv
import functools
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
RESULTS = BENCH / "results"
GPUS = ("h200", "h100")  # whose figures are published, the first in preference

SHAPE_COLUMNS = ("direction", "B", "H", "Hkv", "N", "M", "D", "dtype", "causal")
# Of problems that are more than a shape; a CSV may lack them, and an option that is not there is the empty text.
OPTION_COLUMNS = ("Dv", "window", "softcap", "sinks", "alibi", "lengths", "page", "append", "cache_dtype")
# What may stand behind the name of a provider of ours; the first behind a peer's too.
DETERMINISTIC = ":deterministic"
PLAIN = ":plain"  # the same problem without softcap, sinks and ALiBi, or with the new keys in the cache already
DENSE = ":dense"  # a packed batch of equal lengths, or a cache of them, as a dense call
BF16 = ":bf16"  # a float8 problem's values, or those of a float8 cache, in bfloat16
ROW_INVARIANT = ":row-invariant"  # a row's bits are the same in training, prefill and decoding
BATCH_DEPENDENT = ":batch-dependent"  # over a cache: the bits may depend on the batch
CONTIGUOUS = ":contiguous"  # the keys of a cache one after the other, not in pages
OTHERS = ("fa3", "fa4")  # peers that a run may lack, and that have figures in a run of their own (`others`)
# Peers that, as the sm80 kernels, use no instruction that came with Hopper: what those kernels are compared with.
PORTABLE = ("sdpa", "flash", "efficient", "math", "flash-attn", "triton")

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
    "vllm-fa3": "vLLM's FlashAttention-3",
    "vllm-flashmla": "vLLM's FlashMLA",
    "cudnn-paged": "cuDNN (pages)",
    "triton": "Triton tutorial",
}
CLOCKS = {
    "events": "TFLOP/s",
    "graph": "TFLOP/s of the kernels alone, by graph replay",
    "wall": "TFLOP/s in wall time, host's work included",
    "host": "host microseconds per call",
}


def gpu_name(gpu: str) -> str:
    """What the folder of a GPU's CSVs is called: h200 of "NVIDIA H200", h100 of "NVIDIA H100 80GB HBM3"."""
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
    options = options_text(shape)
    text = f"D {shape['D']:<3} {mask:<6} N {length:<9} B {shape['B']} H {heads} {shape['dtype']}"
    return f"{text} {options}" if options else text


def options_text(shape: Mapping[str, Any]) -> str:
    """What a problem has beside its shape, in words; empty for most."""
    named = {"Dv": "Dv {}", "window": "window {}", "softcap": "softcap {}", "sinks": "sinks", "alibi": "ALiBi"}
    named |= {"lengths": "lengths {}" if shape.get("page") else "packed {}", "page": "pages of {}", "append": "append"}
    named |= {"cache_dtype": "{} cache"}
    texts = {name: str(shape[name]) for name in OPTION_COLUMNS if shape.get(name)}
    if "window" in texts:  # a side without a limit is the empty text
        texts["window"] = "/".join(side or "-" for side in texts["window"].split(","))
    return ", ".join(named[name].format(text) for name, text in texts.items())


def problem_key(row: Mapping[str, Any]) -> tuple[str, ...]:
    """What a row of a CSV measured, whether it has columns for the options or not."""
    return tuple(str(row.get(name) or "") for name in (*SHAPE_COLUMNS, *OPTION_COLUMNS))


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
        names = ("D", "causal", "N", "M", "B", "H", "Hkv", "dtype")
        return *(self.row[name] for name in names), options_text(self.row)

    @property
    def key(self) -> tuple[str, ...]:
        """Of `others`."""
        return problem_key({**self.row, "direction": self.direction})

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
    def of_caches(self) -> bool:
        """Whether its problems are calls over caches, whose rate is that of the bytes of keys and values."""
        return any(figure.row.get("page") for figure in self.figures)

    @property
    def title(self) -> str:
        if self.of_caches and self.clock != "host":
            return "microseconds (TB/s of keys and values)" + {"graph": ", by graph replay"}.get(self.clock, "")
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

    @property
    def ours(self) -> list[str]:
        return [name for name in self.providers if name.startswith("flash_cute")]

    def baselines(self, ours: str) -> dict[str, str]:
        """What ours is compared with of its own, by what the ratio says: its default mode, or a simpler problem."""
        names = {
            "deterministic / default": ours.removesuffix(DETERMINISTIC),
            "row-invariant / default": ours.removesuffix(ROW_INVARIANT),
            "batch-dependent / default": ours.removesuffix(BATCH_DEPENDENT),
            "with / without the option": ours + PLAIN,
            "cache / dense" if self.of_caches else "packed / dense": ours + DENSE,
            "pages / contiguous": ours + CONTIGUOUS,
            "float8 / bfloat16": ours + BF16,
        }
        return {title: name for title, name in names.items() if name != ours and self.ratios(ours, name)}

    def rivals(self, ours: str) -> list[str]:
        """The peers among which `best` chooses: of the same mode, and for the sm80 kernels' speed the portable ones."""
        peers = [peer for mine, peer in self.pairs if mine == ours and not peer.startswith("flash_cute")]
        same_mode = [peer for peer in peers if peer.endswith(DETERMINISTIC) == ours.endswith(DETERMINISTIC)]
        portable = [peer for peer in same_mode if peer in PORTABLE]
        return portable if ":sm80" in ours and self.clock != "host" and portable else same_mode

    def best(self, ours: str, shape: tuple[str, ...]) -> tuple[str, float] | None:
        """The fastest peer measured on that shape, and the ratio of ours to it."""
        figure = self.find(shape, ours)
        found = {peer: figure.ratio(peer) for peer in self.rivals(ours)} if figure else {}
        ratios = {peer: ratio for peer, ratio in found.items() if ratio is not None}
        return min(ratios.items(), key=lambda item: item[1]) if ratios else None

    def best_ratios(self, ours: str) -> list[tuple[tuple[str, ...], str, float]]:
        """(shape, best peer, ratio) of every shape that a peer was measured on."""
        found = [(shape, self.best(ours, shape)) for shape in self.shapes]
        return [(shape, *best) for shape, best in found if best is not None]


@dataclass(frozen=True)
class Results:
    """One CSV. `facts` is what its figures belong to; `absent` names each peer that was not there, and why."""

    path: Path
    facts: dict[str, str]
    tables: Sequence[Table]
    absent: dict[str, str]


def csv_file(text: str) -> Path:
    """A flag's argument: a CSV that one of this folder's scripts wrote, with rows; argparse prints what is wrong."""
    path, columns = Path(text), {"median_us", "rms_out", "plan_us", "over_us", "attention_share", "over_exact"}
    try:
        with path.open(errors="replace") as file:
            header, row = file.readline(), file.readline()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text}: {(error.strerror or str(error)).lower()}") from None
    if not columns.intersection(header.rstrip("\n").split(",")) or not row:
        raise argparse.ArgumentTypeError(f"{text}: expected a CSV with rows that bench/run.py wrote, got another file")
    return path


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


def csv_of(name: str) -> Path:
    """The CSV of that name: itself, or that of the first of `GPUS` that has it; perhaps of none."""
    folders = (RESULTS, *(RESULTS / gpu for gpu in GPUS))
    found = (path for folder in folders if (path := folder / f"{name}.csv").exists())
    return next(found, RESULTS / GPUS[0] / f"{name}.csv")


def name_of(path: Path) -> str:
    """What a CSV is called: h200/paper.csv if it is a published one, else as its file."""
    absolute = path.resolve()
    return absolute.relative_to(RESULTS).as_posix() if absolute.is_relative_to(RESULTS) else path.name


@functools.cache
def others(gpu: str) -> dict[tuple[str, ...], dict[str, str]]:
    """By `problem_key`: TFLOP/s of cuDNN, FlashAttention-3 and -4 side by side on such a GPU; see bench/README.md."""
    path = BENCH / f"others_{gpu_name(gpu)}.csv"
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {problem_key(row): row for row in csv.DictReader(file)}


def others_over(gpu: str, key: tuple[str, ...], peer: str, measured: Sequence[str]) -> float | None:
    """How many times as fast as `peer` the fastest of them was that is not in `measured`; at least 1.

    None where that other run has no such shape or not that peer.
    """
    row = others(gpu).get(key)
    if row is None or not row.get(peer):
        return None
    if peer == "cudnn" and not {"fa3", "fa4"} & set(measured):
        return float(row["best_over_cudnn"])
    rates = [float(row[name]) for name in ("cudnn", "fa3", "fa4") if row[name] and name not in measured]
    return max(1.0, *(rate / float(row[peer]) for rate in rates), 1.0)


def other_rate(name: str, chosen: Sequence[Figure]) -> float | None:
    """TFLOP/s at which a peer that is not in this run would stand, on the shape of all of `chosen`.

    It is the rate of a peer in this run, times the other's rate over its in the run of `others`.
    """
    if any(figure.provider == name for figure in chosen):
        return None
    for figure in chosen:
        row = others(figure.row["gpu"]).get(figure.key, {})
        if row.get(name) and row.get(figure.provider):
            return figure.number("tflops") * float(row[name]) / float(row[figure.provider])
    return None


def belongs_to(facts: dict[str, str]) -> str:
    """What the figures belong to, as a phrase."""
    parts = [facts["gpu"], f"torch {facts['torch']}"]
    parts += [f"cuDNN {facts['cudnn']}"] if facts["cudnn"] else []
    parts += [f"driver {facts['driver']}"] if facts["driver"] else []
    parts += [f"commit {facts['commit']}"]
    return ", ".join(parts)
