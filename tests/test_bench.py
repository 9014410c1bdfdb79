"""The benchmark: it measures what it says, and no published figure is typed by hand."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def run(*command: str, cwd: Path = ROOT) -> str:
    done = subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What bench/run.py prints and writes for a small case on the CPU."""
    path = tmp_path_factory.mktemp("bench") / "case.csv"
    shape = ("--B", "1", "--H", "4", "--Hkv", "2", "--N", "65", "--D", "32", "--causal", "--dtype", "fp32")
    options = ("--device", "cpu", "--peers", "math,fa3,triton", "--seconds", "0.05", "--rounds", "5")
    return run("bench/run.py", *shape, *options, "--commit", "abc", "--out", str(path)), path


def test_csv_says_what_was_measured(measured: tuple[str, Path]) -> None:
    with measured[1].open(newline="") as file:
        rows = {row["provider"]: row for row in csv.DictReader(file)}
    ours, peer = rows["flash_cute"], rows["math"]
    flops = 4 * 4 * 65 * 65 * 32 / 2
    for row in (ours, peer):
        assert float(row["tflops"]) == pytest.approx(flops / float(row["median_us"]) * 1e-6, rel=0.01, abs=0.01)
        assert (row["rounds"], row["commit"], row["clock"], row["causal"]) == ("5", "abc", "wall", "bottom_right")
    assert float(ours["ratio_math"]) > 0 and float(ours["ratio_math_spread"]) >= 0
    assert float(ours["difference"].split()[0]) < 1e-5


def test_missing_peer_is_named(measured: tuple[str, Path]) -> None:
    printed, path = measured
    assert "absent: triton: no copy of Triton's fused-attention tutorial given" in printed
    with path.open(newline="") as file:
        missing = {row["provider"]: row["missing"] for row in csv.DictReader(file) if row["missing"]}
    assert "triton" in missing


def test_plot_is_drawn(measured: tuple[str, Path]) -> None:
    pytest.importorskip("matplotlib")
    run("bench/plot.py", str(measured[1]))
    assert measured[1].with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_published_tables_are_those_of_the_csvs() -> None:
    run("bench/readme.py", "--check")
