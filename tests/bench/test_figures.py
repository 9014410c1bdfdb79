"""Published figures: no number is typed by hand, the best peer is named where it is ahead, every peer is drawn."""

from __future__ import annotations

import csv
import importlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import bench_commands
import pytest
from repository import ROOT

from flash_cute.report import built_architectures

# An older run of the H100's, with portable kernels beside the sm90 ones and FlashAttention-2, without FlashAttention-3.
WITHOUT_FA3 = ROOT / "tests/bench/data/h100/paper.csv"
FACTS = {"gpu": "NVIDIA H200", "torch": "2.11.0", "cudnn": "9.19.0", "driver": "580", "commit": "abc"}
# Rates of ours, cuDNN, FlashAttention-3 and FlashAttention-2, by head dim.
RATES = {64: (500, 400, 450, 250), 256: (980, 600, 1000, 260)}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """bench's modules. The folder comes last on the path: it must not hide the installed package."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    names = ("figures", "readme", "workloads")
    return SimpleNamespace(**{name: importlib.import_module(f"bench.{name}") for name in names})


@pytest.fixture
def paper(tmp_path: Path) -> Path:
    """A CSV of two lengths of two head dims, in which FlashAttention-3 is ahead of ours at head dim 256."""
    rows = []
    for head_dim, rates in RATES.items():
        for length in (4096, 16384):
            heads = 2048 // head_dim
            shape = {"direction": "fwd", "B": 16384 // length, "H": heads, "Hkv": heads, "N": length, "M": length}
            shape |= {"D": head_dim, "dtype": "bf16", "causal": "bottom_right", "clock": "events", "mode": "grad"}
            for name, rate in zip(("flash_cute:sm90", "cudnn", "fa3", "flash"), rates, strict=True):
                row = {**shape, "provider": name, "median_us": 1e5 / rate, "spread": 0.01, "tflops": rate, **FACTS}
                if name == "flash_cute:sm90":
                    for peer, theirs in zip(("cudnn", "fa3", "flash"), rates[1:], strict=True):
                        row |= {f"ratio_{peer}": rate / theirs, f"ratio_{peer}_spread": 0.004}
                rows.append(row)
    path = tmp_path / "h200/paper.csv"
    path.parent.mkdir()
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_choices_table_and_plot(bench: SimpleNamespace, tmp_path: Path) -> None:
    """The mean and the worst of each direction, and the worst shapes with what the plan chose."""
    table = importlib.import_module("bench.choice_table")
    shape = {"B": 1, "H": 8, "Hkv": 2, "N": 64, "M": 64, "D": 64, "dtype": "bf16", "causal": "bottom_right", "Dv": ""}
    shape |= {"window": "", "softcap": "", "sinks": "", "alibi": "", "lengths": ""}
    times = {"choices": 4, "plan_us": "10.00", "best_us": "9.00", "times": "a=10.00 b=9.00", **FACTS}
    rows = [{"direction": "fwd", **shape, "plan": "a", "best": "a", "ratio": "1.0000", **times}] * 3
    rows += [{"direction": "fwd", **shape, "plan": "a", "best": "b", "ratio": "1.1111", **times, "window": "127,0"}]
    rows += [{"direction": "bwd", **shape, "plan": "c", "best": "c", "ratio": "1.0000", **times, "lengths": "64+3"}]
    path = tmp_path / "choices.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    assert table.is_choices(path)
    lines = list(table.markdown(table.read(path)))
    assert "| forward | 4 | 2.8 % | 11.1 % | 3 | 3 | 4.0 |" in lines
    assert "| backward | 1 | 0.0 % | 0.0 % | 1 | 1 | 4.0 |" in lines
    assert "| forward | B 1, H 8/2, N 64, D 64, window 127, bf16 | a | b | 11.1 % | 9.00 |" in lines
    assert "packed to 67" in table.shape_text(rows[-1])
    table.draw(table.read(path), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10000


@pytest.mark.parametrize(
    ("head_dim", "before", "now"),
    [
        (128, "sm90:wide:whole", "sm90:rows192:whole"),
        (160, "sm90:wide:whole", "sm90:rows128:whole"),
        (64, "sm90:pair_late:split", "sm90:rows128_late:split"),
        (64, "sm90:rows256:split", "sm90:rows256:split"),
        (64, "sm90:whole", "sm90:whole"),
        (64, "sm80:a100", "sm80:a100"),
    ],
)
def test_earlier_names_of_tiles_are_read(
    bench: SimpleNamespace, tmp_path: Path, head_dim: int, before: str, now: str
) -> None:
    table = importlib.import_module("bench.choice_table")
    path = tmp_path / "choices.csv"
    path.write_text(f"D,plan,best,times\n{head_dim},{before},{before},{before}=10.00 sm80:h100=9.00\n")
    assert table.read(path) == [{"D": str(head_dim), "plan": now, "best": now, "times": f"{now}=10.00 sm80:h100=9.00"}]


@pytest.mark.skipif(
    built_architectures() != {"sm80", "sm90"}, reason="this build has not the kernels of both architectures"
)
def test_choices_are_judged_by_stored_times(bench: SimpleNamespace) -> None:
    """This build's choice for a row's shape, by the row's times; whatever the plan's was then."""
    judge = importlib.import_module("bench.judge")
    row = {"direction": "fwd", "B": "2", "H": "16", "Hkv": "4", "N": "4096", "M": "4096", "D": "128", "dtype": "bf16"}
    row |= {"causal": "bottom_right", "window": "", "lengths": "", "plan": "sm80:a100"}
    times = {"sm90:rows192_late:whole": 2e-6, "sm90:rows64:whole": 1e-6, "sm80:a100": 4e-6}
    found = judge.judged(row | {"times": judge.times_text(times)})
    assert (found["plan"], found["best"], found["ratio"]) == ("sm90:rows192_late:whole", "sm90:rows64:whole", "2.0000")
    packed = row | {"lengths": "4000+96", "direction": "bwd", "window": "127,0", "times": "sm90:whole=3.00 sm80:a100=3"}
    assert judge.judged(packed)["ratio"] == "1.0000"
    assert judge.judged(packed | {"times": "sm90:another=3.00"}) is None
    assert judge.judged(packed | {"times": ""}) is None


def test_random_shapes_are_of_every_kind(bench: SimpleNamespace) -> None:
    choices = importlib.import_module("bench.choices")
    for direction in ("fwd", "bwd"):
        found = choices.random_workloads(0, 200, direction)
        assert found == choices.random_workloads(0, 200, direction)
        assert all(w.flops <= choices.MOST_FLOPS and w.H % w.Hkv == 0 and w.N >= 1 for w in found)
        assert {w.D for w in found} == set(choices.HEAD_DIMS)
        kinds = (lambda w: w.lengths, lambda w: w.window, lambda w: w.M > w.N, lambda w: w.Hkv < w.H, lambda w: w.B > 8)
        assert all(sum(bool(kind(w)) for w in found) >= 8 for kind in kinds)


def test_each_row_names_the_best_peer(bench: SimpleNamespace, paper: Path) -> None:
    (table,) = bench.figures.read(paper).tables
    lines = bench.readme.markdown_table(table)
    # the batch and the heads follow from N and D, and the dtype is the same in all rows: said once, not in columns
    assert lines[0] == (
        "| D | mask | N | flash_cute (sm90) | cuDNN | FlashAttention-3 | FlashAttention-2 | ratio to best peer |"
    )
    assert lines[2] == "| 64 | causal | 4096 | 500 | 400 | 450 | 250 | 1.111 FlashAttention-3 |"
    assert lines[4] == "| 256 | causal | 4096 | 980 | 600 | 1000 | 260 | 0.980 FlashAttention-3 |"
    assert lines[-1].endswith("| 1.043 |")
    assert bench.readme.shared(table) == ["bf16", "B x N = 16,384, H x D = 2,048"]
    (sentence,) = bench.readme.standing(table)
    assert "in 2 of 4 shapes; least 0.980 (D 256 causal N 4096, FlashAttention-3)" in sentence


def test_sentence_of_both_directions(bench: SimpleNamespace, paper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest peer of each shape: 500 over 450 and 980 over 1000, so 1.04 in the mean and 0.98 at least."""
    results = paper.parents[1]
    monkeypatch.setattr(bench.readme, "ROOT", results)
    monkeypatch.setattr(bench.figures, "RESULTS", results)
    text = "<!-- bench:sentence:paper,paper -->\nold\n<!-- end bench -->"
    filled = bench.readme.filled(text, results / "docs/page.md")
    assert "](../h200/paper.png)" in filled and "old" not in filled
    said = "is 1.04 times as fast as the best of cuDNN, FlashAttention-3 and FlashAttention-2 "
    assert f"{said}(geometric mean of 4 shapes, least 0.980)" in filled


def test_peers_that_were_not_in_the_run_are_named_where_they_would_be_ahead(bench: SimpleNamespace) -> None:
    """FlashAttention-3 on the H100: 698 where cuDNN had 543, and cuDNN and flash_cute have 609 and 787 in this run."""
    (table,) = bench.figures.read(WITHOUT_FA3).tables
    sentences = list(bench.readme.behind_others(table))
    assert [sentence.split(",")[0] for sentence in sentences] == ["* FlashAttention-3", "* FlashAttention-4"]
    assert "D 256 causal N 16384 (0.922)" in sentences[0]
    chosen = [one for one in table.figures if one.shape[:3] == ("128", "bottom_right", "16384")]
    assert bench.figures.other_rate("fa3", chosen) == pytest.approx(609 * 698 / 543, rel=1e-3)
    assert bench.figures.other_rate("cudnn", chosen) is None


def test_portable_kernels_are_compared_with_portable_peers(bench: SimpleNamespace) -> None:
    (table,) = bench.figures.read(WITHOUT_FA3).tables
    assert table.rivals("flash_cute:sm80") == ["flash"]
    assert set(table.rivals("flash_cute:sm90")) == {"cudnn", "flash"}


def test_figures_of_the_newest_gpu_are_shown(
    bench: SimpleNamespace, paper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = paper.parents[1]
    monkeypatch.setattr(bench.figures, "RESULTS", results)
    (results / "h100").mkdir()
    (results / "h100/paper.csv").write_text("")
    (results / "h100/odd.csv").write_text("")
    assert bench.figures.csv_of("paper") == paper
    assert bench.figures.csv_of("odd") == results / "h100/odd.csv"
    assert bench.figures.csv_of("h100/paper") == results / "h100/paper.csv"
    assert bench.figures.csv_of("nothing") == results / "h200/nothing.csv"
    assert bench.figures.name_of(results / "h100/odd.csv") == "h100/odd.csv"


@pytest.mark.parametrize("gpu", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
def test_each_cell_of_the_main_grid_has_a_bar(bench: SimpleNamespace, gpu: str) -> None:
    for direction in ("fwd", "bwd"):
        for workload in (*bench.workloads.paper_grid(), *bench.workloads.llama_grid()):
            shape = replace(workload, direction=direction)
            key = bench.figures.problem_key(shape.columns)
            row = bench.figures.others(gpu)[key]
            rates = [float(row[name]) for name in ("cudnn", "fa3", "fa4") if row[name]]
            # On the H100 the ratio was measured too: it is not the quotient of these medians.
            bar = bench.figures.others_over(gpu, key, "cudnn", measured=["flash_cute", "cudnn"])
            assert bar == pytest.approx(max(rates) / rates[0], abs=0.08)
            # those that were measured are no bar but themselves
            assert bench.figures.others_over(gpu, key, "cudnn", measured=["cudnn", "fa3", "fa4"]) == 1


def test_summary_has_the_bars(paper: Path) -> None:
    deterministic_csv = ROOT / "bench/results/h100/sm90-bwd-deterministic.csv"
    printed = bench_commands.run("summary", str(deterministic_csv), str(WITHOUT_FA3))
    deterministic, speed = printed.split("\npaper.csv")
    assert deterministic.count("bar 0.85") == 24
    # of cuDNN, D 64, full, N 16384; and FlashAttention-2's for the portable kernels
    assert " bar 1.25 " in speed and speed.split("flash_cute (sm80) / the best peer")[1].count("bar 1.00") == 18
    assert speed.count("geometric mean of 18: ") == 2
    # 0.980 with a spread of 0.004 is below FlashAttention-3, which was measured: its bar is 1
    assert bench_commands.run("summary", str(paper)).count("FlashAttention-3  MISSED") == 2


def test_plots_are_drawn(bench: SimpleNamespace, paper: Path, tmp_path: Path) -> None:
    """Lines over the length, bars where there is a single one, in both marks of those that were not measured."""
    pytest.importorskip("matplotlib")
    plot = importlib.import_module("bench.plot")
    for csv_path in (paper, WITHOUT_FA3, *(bench.figures.RESULTS / f"h100/{name}.csv" for name in ("dims", "odd"))):
        picture = tmp_path / f"{csv_path.stem}.png"
        assert plot.main([str(csv_path), "--out", str(picture)]) == 0
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_published_tables_are_those_of_the_csvs() -> None:
    command = [sys.executable, "bench/readme.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("command", ["plot", "summary"])
@pytest.mark.parametrize(
    "text, sentence",
    [
        (None, "no such file or directory"),
        ("a,b\n1,2\n", "expected a CSV with rows that bench/run.py wrote, got another file"),
        ("B,median_us\n", "expected a CSV with rows that bench/run.py wrote, got another file"),
    ],
)
def test_what_is_no_csv(
    command: str, text: str | None, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sentence, not a traceback."""
    if command == "plot":
        pytest.importorskip("matplotlib")
    path = tmp_path / "missing.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as exit_:
        bench_commands.run(command, str(path))
    assert exit_.value.code == 2 and f"argument csv: {path}: {sentence}\n" in capsys.readouterr().err
