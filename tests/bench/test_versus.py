"""Two builds side by side (bench/versus.py): the same problem, taken in turns, and a wrong or refusing one is named."""

from __future__ import annotations

import csv
import importlib
import io
import os
import subprocess
import sys
from pathlib import Path

import bench_commands
import pytest
import torch
from repository import ROOT

import flash_cute

SITE = Path(flash_cute.__file__).parents[1]
SHAPE = ("--B", "1", "--H", "4", "--Hkv", "2", "--N", "65", "--D", "32", "--causal", "--dtype", "fp32")

# A build whose forward is off by 10 % and which has no backward; it prints to standard output, as a library may.
ANOTHER_BUILD = """
import torch
__version__ = "0"
print("loaded")
def fwd(q, k, v, causal=False):
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5 + torch.full((q.shape[2], k.shape[2]), -torch.inf).triu(1)
    return 1.1 * scores.softmax(-1) @ v, scores.logsumexp(-1)
def bwd(*tensors, causal):
    raise ValueError("no backward in this build\\nat all")
"""


def flags(other: Path, path: Path, *options: str) -> list[str]:
    """Of a small problem on the CPU."""
    builds = ["--ours", str(SITE), "--other", f"{other}=old", *SHAPE, "--device", "cpu"]
    return [*builds, "--rounds", "3", "--seconds", "0.002", "--out", str(path), *options]


def rows_of(path: Path) -> dict[str, dict[str, str]]:
    """The CSV's rows by direction."""
    with path.open(newline="") as file:
        return {row["direction"]: row for row in csv.DictReader(file)}


def test_both_builds_are_timed_on_the_same_problem(tmp_path: Path) -> None:
    """As a command."""
    path = tmp_path / "versus.csv"
    command = [sys.executable, "bench/versus.py", *flags(SITE, path, "--backend", "cpu", "--deterministic")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    printed, rows = done.stdout, rows_of(path)
    assert list(rows) == ["fwd", "bwd"]
    for row in rows.values():
        # the same code on the same inputs: the same bits
        assert float(row["difference"]) == 0 and not row["missing"]
        assert float(row["ratio"]) > 0 and float(row["ours_us"]) > 0 and float(row["other_us"]) > 0
        assert (row["ours"], row["other"]) == ("ours", "old") and int(row["rounds"]) in (3, 9)
    assert "fwd: " in printed and "bwd: " in printed


def test_options_and_packed_batches_are_timed(tmp_path: Path) -> None:
    """Later flags count: 3 packed sequences, with every option."""
    options = ("--lengths", "9+2x33", "--window", "7,", "--softcap", "5", "--sinks", "--alibi", "--Dv", "8")
    path = tmp_path / "versus.csv"
    bench_commands.run("versus", *flags(SITE, path, *options))
    rows = rows_of(path)
    assert list(rows) == ["fwd", "bwd"]
    for row in rows.values():
        assert float(row["difference"]) == 0 and not row["missing"]
        assert (row["B"], row["lengths"], row["window"], row["Dv"]) == ("3", "9+2x33", "7,", "8")


def test_a_worker_selects_a_device_with_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--device cuda` is the current one: torch.cuda.set_device takes no device without an index."""
    monkeypatch.setattr(sys, "path", ["what the script's own folder is", *sys.path, str(ROOT)])
    worker = importlib.import_module("bench.versus_worker")
    selected: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", selected.append)
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # no command
    for name in ("cuda", "cuda:1"):
        reading, writing = os.pipe()
        worker.main(torch.device(name), writing)
        os.close(reading)
    assert selected == [torch.device("cuda", 3), torch.device("cuda", 1)]


def test_ratio_is_that_of_rounds_and_above_1_where_ours_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    module = importlib.import_module("bench.versus")
    (workload, *_) = module.workloads.paper_grid()
    # the card's clock halves after the first round: the ratio of a round does not see that
    cell = module.Cell(workload, {"ours": [1.0, 2.0, 2.0], "other": [1.2, 2.4, 3.2]}, difference=0.0)
    assert cell.ratio == pytest.approx(1.2)
    assert not cell.is_wrong and module.Cell(workload).is_wrong


def test_wrong_and_refusing_builds_are_named(tmp_path: Path) -> None:
    package = tmp_path / "site" / "flash_cute"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(ANOTHER_BUILD)
    path = tmp_path / "versus.csv"
    printed = bench_commands.run("versus", *flags(package.parent, path), status=1)
    rows = rows_of(path)
    assert float(rows["fwd"]["difference"]) == pytest.approx(1 / 11, rel=1e-3) and "WRONG" in printed
    assert rows["bwd"]["missing"] == "old: no backward in this build"
