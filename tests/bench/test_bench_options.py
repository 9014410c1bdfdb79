"""The benchmark's problems that are more than a shape: windows, softcap, sinks, ALiBi, Dv, packed batches."""

from __future__ import annotations

import argparse
import csv
import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from repository import ROOT

CPU = torch.device("cpu")
# Of a small problem with grouped heads; each alone, and all that go together.
OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window": (7, 3), "causal": "none"},
    "left": {"window": (7, None)},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "Dv": {"Dv": 8},
    "packed": {"lengths": "9+2x33", "B": 3, "N": 33, "M": 33},
    "all": {"lengths": "9+2x33", "B": 3, "N": 33, "M": 33, "window": (7, None), "softcap": 5.0, "sinks": True, "Dv": 8}
    | {"alibi": True},
}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """bench's modules. The folder comes last on the path: it must not hide the installed package."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    names = ("all", "backends", "case_flags", "figures", "lengths", "look", "providers.pytorch", "readme", "run")
    names += ("summary", "timing", "workloads")
    return SimpleNamespace(**{name.split(".")[-1]: importlib.import_module(f"bench.{name}") for name in names})


def small(bench: SimpleNamespace, **changes: Any) -> Any:
    return replace(bench.workloads.Workload(2, 4, 2, 33, 33, 16, "bottom_right", "fp32"), **changes)


def visible(workload: Any, rows: int) -> torch.Tensor:
    """(rows, rows) bool, by the definition of the mask."""
    distance = torch.arange(rows) - torch.arange(rows)[:, None]
    left, right = workload.window or (None, None)
    right = 0 if workload.is_causal else right
    seen = torch.ones(rows, rows, dtype=torch.bool)
    seen &= distance >= -left if left is not None else seen
    return seen & (distance <= right) if right is not None else seen


def unfused(workload: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One sequence, (H, N, D) of all: the attention by its definition."""
    k, v = (x.repeat_interleave(workload.H // workload.Hkv, dim=0) for x in (k, v))
    scores = q @ k.mT / workload.D**0.5
    if workload.softcap:
        scores = workload.softcap * (scores / workload.softcap).tanh()
    if workload.alibi:
        distance = (torch.arange(scores.shape[-1]) - torch.arange(scores.shape[-2])[:, None]).abs()
        scores = scores - workload.make_slopes(CPU)[:, None, None] * distance
    scores = scores.masked_fill(~visible(workload, scores.shape[-1]), -torch.inf)
    if workload.sinks:
        sinks = workload.make_sinks(CPU)[:, None, None].expand(-1, scores.shape[-2], 1)
        return torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1] @ v
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("direction", ["fwd", "bwd", "train"])
def test_flash_cute_computes_the_problem(bench: SimpleNamespace, direction: str, option: str) -> None:
    workload = small(bench, direction=direction, **OPTIONS[option])
    inputs = workload.make_inputs(CPU, seed=0)
    leaves = [x.clone().requires_grad_() for x in inputs[:3]]
    if workload.lengths:
        parts = zip(*(x.split(list(workload.sequences)) for x in leaves), strict=True)
        out = torch.cat([unfused(workload, *(x.transpose(0, 1) for x in part)).transpose(0, 1) for part in parts])
    else:
        out = torch.stack([unfused(workload, *part) for part in zip(*leaves, strict=True)])
    expected = (out.detach(),) if direction == "fwd" else torch.autograd.grad(out, leaves, inputs[3])
    for name in ("flash_cute", "flash_cute:cpu:deterministic"):
        backend = bench.backends.prepare(name, workload, CPU)
        results = bench.backends.first_call(backend, workload, inputs)
        for given, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(given, wanted)


@pytest.mark.parametrize("option", OPTIONS)
def test_flops_are_those_that_the_mask_leaves(bench: SimpleNamespace, option: str) -> None:
    workload = small(bench, **OPTIONS[option])
    lengths = workload.sequences or (33, 33)
    # of a causal mask alone half of the square, as everywhere in the bench
    pairs = sum(float(visible(workload, n).sum()) if workload.window else n * n / 2 for n in lengths)
    assert workload.flops == 2 * 4 * pairs * (16 + workload.head_dim_v)
    backward = replace(workload, direction="bwd")
    assert backward.flops == 2 * 4 * pairs * (3 * 16 + 2 * workload.head_dim_v)


@pytest.mark.parametrize("option", OPTIONS)
def test_flags_name_a_workload(bench: SimpleNamespace, option: str) -> None:
    workload = small(bench, **OPTIONS[option])
    parser = argparse.ArgumentParser()
    bench.case_flags.add_direction_flag(parser)
    bench.case_flags.add_shape_flags(parser)
    flags = parser.parse_args(bench.case_flags.to_flags(workload))
    assert bench.case_flags.from_flags(flags, flags.direction) == workload


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--window", "7"), ("--window", "-1,0"), ("--lengths", "0x3"), ("--lengths", "a"), ("--device", "foo")],
)
def test_wrong_options_are_named(
    bench: SimpleNamespace, flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench.run.parse(["--device", "cpu", f"{flag}={value}"])
    assert f"argument {flag}" in capsys.readouterr().err


def test_the_same_batch_in_every_run(bench: SimpleNamespace) -> None:
    found = bench.lengths.documents()
    assert (len(found), sum(found), max(found), found[:3]) == (
        42,
        65761,
        8734,
        bench.lengths.lengths_of("documents")[:3],
    )
    found = bench.lengths.short()
    assert (len(found), sum(found)) == (96, 24441) and 1 <= min(found) <= max(found) <= 512


def test_a_peer_says_what_it_does_not_have(bench: SimpleNamespace) -> None:
    for option, words in (("alibi", "no ALiBi"), ("packed", "no packed batches"), ("sinks", "no sinks")):
        with pytest.raises(bench.backends.Unavailable, match=words):
            bench.backends.prepare("math", small(bench, **OPTIONS[option]), CPU)


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("option", ["window", "packed", "alibi"])
def test_flash_attention_2_is_called_with_what_its_operator_takes(
    bench: SimpleNamespace, option: str, direction: str
) -> None:
    """On meta tensors, since only a GPU computes it: argument for argument what the operators take."""
    workload = small(bench, dtype="fp16", direction=direction, **OPTIONS[option])
    meta = torch.device("meta")
    if (option, direction) == ("alibi", "bwd"):
        with pytest.raises(bench.backends.Unavailable, match="no ALiBi"):
            bench.backends.prepare("flash", workload, meta)
        return
    inputs = tuple(x.to(meta) for x in workload.make_inputs(CPU, seed=0))
    backend = bench.backends.prepare("flash", workload, meta)
    results = bench.backends.first_call(backend, workload, inputs)
    assert [x.shape for x in results] == [x.shape for x in (inputs[:1] if direction == "fwd" else inputs[:3])]


def test_a_refusal_of_ours_is_a_row(bench: SimpleNamespace) -> None:
    """As where a kernel of a problem does not exist: `flash_cute` is not timed, and says why in its own words."""
    workload = small(bench, sinks=True)
    (cell,) = bench.timing.time_cell(
        workload, ["flash_cute:sm90", "flash_cute"], CPU, clocks=["wall"], rounds=5, seconds=0.01
    )
    assert list(cell.timings) == ["flash_cute"] and "backend: expected" in cell.missing["flash_cute:sm90"]
    (row,) = (row for row in bench.run.rows_of("case", cell, [], {}) if row["provider"] == "flash_cute:sm90")
    assert "backend: expected" in row["missing"] and row["sinks"] == "yes"


def test_the_simpler_problem_is_timed_beside_it(bench: SimpleNamespace, tmp_path: Path) -> None:
    """`:plain` without the option, which gives another answer; `:dense` with the same work, which gives the same."""
    cases = {
        "plain": ["--B", "1", "--N", "65", "--softcap", "5", "--ours", "flash_cute,flash_cute:plain"],
        "dense": ["--lengths", "2x33", "--ours", "flash_cute,flash_cute:dense"],
    }
    common = ["--H", "4", "--D", "32", "--causal", "--dtype", "fp32", "--device", "cpu", "--peers", "none"]
    for mode, words in cases.items():
        path = tmp_path / f"{mode}.csv"
        assert bench.run.main([*words, *common, "--seconds", "0.01", "--rounds", "5", "--out", str(path)]) == 0
        with path.open(newline="") as file:
            ours, simpler = csv.DictReader(file)
        assert simpler["provider"] == f"flash_cute:{mode}" and float(ours[f"ratio_flash_cute:{mode}"]) > 0
        assert bool(simpler["difference"]) == (mode == "dense")
        results = bench.figures.read(path)
        (table,) = results.tables
        (column,) = bench.readme.ratio_columns(table)
        assert column.title == {"plain": "with / without the option", "dense": "packed / dense"}[mode]
        (line,) = bench.summary.to_baseline(table, "flash_cute", f"flash_cute:{mode}")
        assert line.bar == {"plain": 0.85, "dense": 0.97}[mode]
        assert bench.figures.options_text(ours) in bench.readme.markdown_table(table)[2] + str(
            bench.readme.shared(table)
        )


def test_modes_of_ours_are_compared(bench: SimpleNamespace) -> None:
    names = ("flash_cute:sm90", "flash_cute:sm90:plain", "flash_cute:sm80", "flash_cute:sm80:plain", "fa3")
    assert bench.backends.pairs(names) == [
        ("flash_cute:sm90", "flash_cute:sm90:plain"),
        ("flash_cute:sm90", "fa3"),
        ("flash_cute:sm80", "flash_cute:sm80:plain"),
        ("flash_cute:sm80", "fa3"),
    ]


def test_simpler_problems_are_refused_where_there_is_none(bench: SimpleNamespace) -> None:
    for name, option in (("flash_cute:plain", "packed"), ("flash_cute:dense", "sinks"), ("flash_cute:dense", "packed")):
        with pytest.raises(bench.backends.Unavailable):
            bench.backends.prepare(name, small(bench, **OPTIONS[option]), CPU)


def test_grids_have_the_published_problems(bench: SimpleNamespace) -> None:
    """Every row of the other packages' figures, with the same key; and every provider of a run has a look in a plot."""
    published = {key for key, row in bench.figures.others("NVIDIA H200").items() if any(key[9:])}
    for direction in ("fwd", "bwd"):
        cells = [*bench.workloads.window_grid(), *bench.workloads.varlen_grid(), *bench.workloads.dv_grid()]
        keys = {bench.figures.problem_key(replace(one, direction=direction).columns) for one in cells}
        assert len(keys) == 5 + 8 + 6 and keys == {key for key in published if key[0] == direction}
    assert len({one.label for one in bench.workloads.options_grid()}) == 27
    for words in bench.all.RUNS.values():
        if "--ours" in words:
            assert set(words[words.index("--ours") + 1].split(",")) <= set(bench.look.LOOKS)


def test_plots_of_options(bench: SimpleNamespace, tmp_path: Path) -> None:
    """Lines over the length of each option and head dim; bars where a grid has one length of each problem."""
    pytest.importorskip("matplotlib")
    plot = importlib.import_module("bench.plot")
    facts = {"gpu": "NVIDIA H200", "torch": "2.11.0", "cudnn": "", "driver": "", "commit": "abc"}
    for grid, by_length in (("options", True), ("window", False), ("varlen", False), ("dv", True)):
        path = tmp_path / f"{grid}.csv"
        rows = []
        for workload in bench.workloads.GRIDS[grid]():
            for name in ("flash_cute:sm90", "fa3"):
                row = {
                    **workload.columns,
                    "provider": name,
                    "clock": "events",
                    "mode": "grad",
                    "median_us": 1.0,
                    "spread": 0.01,
                }
                rows.append(
                    {**row, "tflops": 500, "ratio_fa3": 1.0 if name != "fa3" else "", "ratio_fa3_spread": 0.01, **facts}
                )
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        (table,) = bench.figures.read(path).tables
        assert plot.is_by_length(table) == by_length
        assert len(table.shapes) == len(bench.workloads.GRIDS[grid]())
        plot.main([str(path)])
        assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
