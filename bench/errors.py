"""The CSVs of errors: written, read back, and as tables. It imports neither torch nor flash_cute.

Those of `bench/accuracy.py`, and those of `bench/fp8_errors.py`, whose functions have float8 in their names.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench import figures

RESULTS = ("out", "dq", "dk", "dv")
COLUMNS = [
    *("B", "H", "N", "D", "dtype", "causal", "inputs", "provider"),
    *(f"rms_{result}" for result in RESULTS),
    *(f"{column}_{result}" for result in RESULTS for column in ("ratio", "best")),
    "missing",
]
FLOAT8_COLUMNS = ["B", "H", "N", "D", "dtype", "causal", "inputs", "provider", "error", "arithmetic", "over_exact"]
FLOAT8_COLUMNS += ["missing"]
EXACT = "exact"  # exact arithmetic on float8 inputs, as if it were a provider


def ratios_to_best(ours: Mapping[str, float], measured: Mapping[str, Mapping[str, float]]) -> dict[str, object]:
    """Of each result our error over that of the peer with the least, and that peer."""
    peers = {name: found for name, found in measured.items() if not name.startswith("flash_cute")}
    columns: dict[str, object] = {}
    for result in RESULTS if peers else ():
        best = min(peers, key=lambda name: peers[name][result])
        error = peers[best][result]
        columns[f"ratio_{result}"] = f"{ours[result] / error:.3f}" if error else "1.000"
        columns[f"best_{result}"] = best
    return columns


Rows = Sequence[Mapping[str, object]]


@contextmanager
def rows_to(path: Path | None, columns: Sequence[str]) -> Iterator[Callable[[Rows], None]]:
    """A function that writes rows at once: a run that is cut off leaves what it measured."""
    if path is None:
        yield lambda rows: None
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, columns, lineterminator="\n")
        table.writeheader()

        def write(rows: Rows) -> None:
            table.writerows(rows)
            file.flush()

        yield write


def writer(path: Path | None, facts: Mapping[str, str]) -> AbstractContextManager[Callable[[Rows], None]]:
    return rows_to(path, [*COLUMNS, *facts])


@dataclass(frozen=True)
class Errors:
    """One CSV: its measured rows, and what they belong to."""

    path: Path
    facts: dict[str, str]
    rows: Sequence[dict[str, str]]

    def of(self, provider: str) -> list[dict[str, str]]:
        return [row for row in self.rows if row["provider"] == provider]

    @property
    def providers(self) -> list[str]:
        return list(dict.fromkeys(row["provider"] for row in self.rows))

    @property
    def ours(self) -> list[str]:
        return [name for name in self.providers if name.startswith("flash_cute")]

    @property
    def inputs(self) -> list[str]:
        return list(dict.fromkeys(row["inputs"] for row in self.rows))


def is_accuracy(path: Path) -> bool:
    with path.open() as file:
        return "rms_out" in file.readline().split(",")


def read(path: Path) -> Errors:
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["rms_out"]]
    if not rows:
        raise ValueError(f"{path}: no errors")
    names = ("gpu", "torch", "cudnn", "driver", "commit")
    return Errors(path, {name: rows[0].get(name) or "" for name in names}, rows)


def markdown_tables(errors: Errors) -> Iterator[str]:
    """For each of ours a line per head dim, mask and dtype: of each result the largest ratio of all inputs."""
    for name in errors.ours:
        yield f"{figures.provider_title(name)}:"
        yield ""
        yield f"| D | mask | dtype | {' | '.join(RESULTS)} |"
        yield f"| {' | '.join('---' for _ in range(3 + len(RESULTS)))} |"
        own = errors.of(name)
        for d, causal, dtype in dict.fromkeys((row["D"], row["causal"], row["dtype"]) for row in own):
            cells = [d, figures.MASKS[causal], dtype]
            chosen = [row for row in own if (row["D"], row["causal"], row["dtype"]) == (d, causal, dtype)]
            for result in RESULTS:
                worst = max(chosen, key=lambda row: float(row[f"ratio_{result}"]))
                cells.append(f"{float(worst[f'ratio_{result}']):.2f} {worst['inputs']}")
            yield f"| {' | '.join(cells)} |"
        yield ""


def is_float8(path: Path) -> bool:
    with path.open() as file:
        return "over_exact" in file.readline().split(",")


def read_float8(path: Path) -> Errors:
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["error"]]
    if not rows:
        raise ValueError(f"{path}: no errors")
    names = ("gpu", "torch", "cudnn", "driver", "commit")
    return Errors(path, {name: rows[0].get(name) or "" for name in names}, rows)


def float8_lines(errors: Errors) -> Iterator[str]:
    """A line per head dim, mask, length and kind of inputs: each provider's error, and that over the exact one's."""
    names = [name for name in errors.providers if name != EXACT]
    yield f"| D | mask | N | inputs | exact | {' | '.join(map(figures.provider_title, names))} |"
    yield f"| {' | '.join('---' for _ in range(5 + len(names)))} |"
    cases: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
    for row in errors.rows:
        case = row["D"], figures.MASKS[row["causal"]], row["N"], row["inputs"]
        cases.setdefault(case, {})[row["provider"]] = row
    for case, found in cases.items():
        cells = [*case, f"{float(found[EXACT]['error']):.4f}"]
        for name in names:
            row = found.get(name, {})
            cells.append(f"{float(row['error']):.4f} ({float(row['over_exact']):.2f})" if row else "-")
        yield f"| {' | '.join(cells)} |"
    yield ""
