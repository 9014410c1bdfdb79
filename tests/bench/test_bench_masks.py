"""The benchmark of masks: its problems against their dense definitions, and what it does with its providers."""

from __future__ import annotations

import csv
import importlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_commands
import pytest
import torch
from repository import ROOT

import flash_cute

CPU = torch.device("cpu")
TRIES = ("--masks", "--device", "cpu", "--rounds", "2", "--seconds", "0.001", "--commit", "abc")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """bench's modules. The folder comes last on the path: it must not hide the installed package."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    names = ("mask_cases", "mask_grid", "masks", "providers.masks")
    found = {name: importlib.import_module(f"bench.{name}") for name in names}
    return SimpleNamespace(prepared=found.pop("providers.masks"), **found)


def small(bench: SimpleNamespace, group: str = "") -> list[Any]:
    return [case for case in bench.mask_grid.cases(64) if group in ("", case.group)]


def seen(case: Any) -> torch.Tensor:
    """(B, N, N) of the mask and the call's `causal`."""
    return case.make_mask(CPU).dense(case.N, case.causal)[:, 0].expand(case.B, -1, -1)


def test_flex_attention_is_given_the_same_mask(bench: SimpleNamespace) -> None:
    cases = small(bench, "constructors")
    assert len(cases) == 8
    for case in cases:
        i, j = torch.arange(case.N)[:, None], torch.arange(case.N)
        assert torch.equal(case.make_mask_mod(CPU)(0, 0, i, j).expand(case.N, -1), seen(case)[0]), case.name
        assert 0 < seen(case).sum() < case.N**2, case.name


def test_pairs_are_those_that_are_seen(bench: SimpleNamespace) -> None:
    for case in small(bench):
        mask = case.make_mask(CPU)
        assert case.pairs(mask) == int(seen(case).sum()), case.label
    rows = torch.tensor([[[0, 2, 5]]], dtype=torch.int32)
    overlapping = flash_cute.Mask(rows - 3, rows + 2, rows - 1, rows + 4)
    for causal in (False, True):
        expected = int(overlapping.dense(4, "top_left" if causal else False).sum())
        assert bench.mask_cases.seen_pairs(overlapping, 2, 4, causal) == 2 * expected


def test_a_quarter_of_the_blocks_is_seen(bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many in each row of blocks, so that `seen` is exact."""
    given = []

    def from_blocks(blocks: torch.Tensor, keys: int) -> flash_cute.Mask:
        given.append(blocks)
        return bench.mask_grid.full_mask(keys, CPU)

    monkeypatch.setattr(flash_cute.Mask, "from_blocks", staticmethod(from_blocks), raising=False)
    for case in bench.mask_grid.blocks(16):
        mask = case.make_mask(CPU)
        assert given[-1].dtype == torch.bool and given[-1].shape == (1, 1, case.N // 64, case.N // 64)
        assert (given[-1].sum(-1) == case.N // 256).all()
        assert case.pairs(mask) == int(given[-1].sum()) * 64 * 64
    assert len(given) == 2


def test_packed_calls_have_the_work_they_say(bench: SimpleNamespace) -> None:
    """Documents and padded keys as many pairs as the mask leaves; copies of a prefix more, real rows alone fewer."""
    cases = bench.mask_cases
    for case in small(bench):
        for name in {cases.PACKED, cases.REPLICATED, cases.UNPADDED} & set(case.peers):
            pairs = bench.prepared.packing(name, case, CPU).pairs
            expected = case.pairs(case.make_mask(CPU))
            if name == cases.REPLICATED:
                lengths = [case.prefix + part for part in case.parts]
                expected = sum(n * (n + 1) // 2 for n in lengths)
            elif name == cases.UNPADDED:
                expected = sum(n * n for n in case.parts)
            assert pairs == expected, case.label


def test_every_provider_computes_the_same(bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward; FlexAttention has no backward on a CPU."""
    chosen = [case for case in small(bench) if case.group not in ("bands", "constructors") or case.N == 64]
    chosen += [case for case in small(bench, "constructors") if case.name in ("images", "tree")]
    compared = set()
    for case in chosen:
        problem = bench.masks.Problem(case, CPU, 3)
        assert set(problem.missing) <= {"fa3"}, (case.label, problem.missing)
        assert all(found < 1e-5 for found in problem.differences.values()), (case.label, problem.differences)
        compared |= set(problem.differences)
    assert compared == set(bench.mask_cases.PEERS) - set(bench.mask_cases.OTHER_PROBLEMS)


def test_a_wrong_provider_is_not_timed(bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = flash_cute.varlen_bwd

    def wrong(*given: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        dq, dk, dv = right(*given, **options)
        return dq, dk * 1.1, dv

    monkeypatch.setattr(flash_cute, "varlen_bwd", wrong)
    path = tmp_path / "masks.csv"
    printed = bench_commands.run("run", *TRIES, "--only", "grpo", "--out", str(path), status=1)
    assert "wrong: differs by 1.00e-01 from flash_cute" in printed
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["provider"] == "flash_cute:replicated"]
    assert len(rows) == 3 and not any(row["median_us"] for row in rows)


def test_rows_of_a_step(bench: SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / "masks.csv"
    bench_commands.run("run", *TRIES, "--only", "grpo", "--out", str(path))
    with path.open(newline="") as file:
        rows = {(row["direction"], row["provider"]): row for row in csv.DictReader(file)}
    (case,) = small(bench, "grpo")
    for direction, products in (("step", 7), ("fwd", 2), ("bwd", 5)):
        ours, other = (rows[direction, name] for name in ("flash_cute", "flash_cute:replicated"))
        assert float(ours["ratio_flash_cute:replicated"]) > 0 and not other["ratio_flash_cute:replicated"]
        assert int(ours["pairs"]) == case.pairs(case.make_mask(CPU)) < int(other["pairs"])
        for row in (ours, other):
            operations = 2 * products * int(row["pairs"]) * case.H * case.D
            assert float(row["tflops"]) == pytest.approx(operations / float(row["median_us"]) * 1e-6, abs=6e-3)
        assert other["difference"].endswith("from flash_cute") and ours["commit"] == "abc" and ours["gpu"]


def test_other_problems_are_compared_by_their_rate(bench: SimpleNamespace) -> None:
    timing = importlib.import_module("flash_cute._timing").Timing
    (case,) = small(bench, "published")
    problem = bench.masks.Problem(bench.mask_cases.without(case, ["fa3"]), CPU, 0)
    name = bench.mask_cases.CAUSAL
    row = problem.ratios({"flash_cute": timing((1.0, 2.0), 1), name: timing((3.0, 6.0), 1)})
    all_pairs = case.N * (case.N + 1) // 2
    assert float(row[f"ratio_{name}"]) == pytest.approx(3 * problem.pairs / all_pairs, abs=1e-4)


def test_a_padded_call_that_goes_on_to_pytorch_is_not_ours(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flash_cute.integrations import sdpa

    case = small(bench, "padding")[0]
    monkeypatch.setattr(sdpa, "attempt", lambda *given: "no kernel for it")
    problem = bench.masks.Problem(case, CPU, 0)
    assert problem.missing["flash_cute"] == "passed on to PyTorch: no kernel for it"


def test_no_row_is_started_when_time_is_over(bench: SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / "masks.csv"
    bench_commands.run("run", *TRIES, "--budget", "0", "--out", str(path), status=1)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(len(case.directions) for case in small(bench))
    assert {row["missing"] for row in rows} == {"not started: 0 s are over"}


def test_the_host_and_the_kernels(bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.masks, "HOST_ROUNDS", 2)
    rows = list(bench.masks.host_rows(CPU))
    assert {(row["direction"], row["provider"]) for row in rows} == {
        (direction, name) for direction in ("fwd", "bwd") for name in ("flash_cute", "flash_cute:band")
    }
    assert all(row["clock"] == "host" for row in rows) and "ratio_flash_cute:band" in rows[0]
    with monkeypatch.context() as patch:
        patch.setattr(bench.masks.providers, "prepare", lambda *given: 1 / 0)
        rows = list(bench.masks.host_rows(CPU))
        assert {row["missing"] for row in rows} == {"division by zero"} and len(rows) == 2
    (row,) = bench.masks.kernel_rows(CPU, 64)
    assert row["missing"] == "kernels are those of a GPU"
    signature = "void flash_cute::masks::tile_mask_kernel<90>(flash_cute::masks::Params, int)"
    assert bench.masks.kernel_name(signature) == "tile_mask_kernel"
    assert bench.masks.kernel_name("Memset (Device)") == "Memset (Device)"


def test_kernels_are_compiled_ahead_in_processes(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each with arguments that the tool takes; one that fails or does not end is named, and ends nothing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    asked = []

    def fake_run(command: list[str], *, env: dict[str, str], timeout: float, **options: Any) -> Any:
        assert command[0] == sys.executable and Path(command[1]).name == "run.py" and command[2] == "--masks"
        assert int(env["TORCHINDUCTOR_COMPILE_THREADS"]) >= 1 and 0 < timeout <= 9
        name = bench.masks.parse(command[3:]).compile
        asked.append(name)
        if name == "tree":
            raise subprocess.TimeoutExpired(command, timeout)
        return SimpleNamespace(returncode=int(name == "images"), stderr="first\nno compiler\n")

    monkeypatch.setattr(subprocess, "run", fake_run)
    cases = small(bench, "constructors")
    bench.masks.compile_ahead(cases, 0, 9)
    assert sorted(asked) == sorted(case.name for case in cases)
    printed = capsys.readouterr().out
    assert "not compiled ahead: images: no compiler" in printed and "tree: stopped after 9 s" in printed
    assert printed.count("not compiled ahead") == 2


def test_published_figures_are_of_the_rate(bench: SimpleNamespace) -> None:
    (case,) = small(bench, "published")
    problem = bench.masks.Problem(replace(case, peers=(), published=(1e-3, 2e-3)), CPU, 0)
    for direction, figure in (("fwd", 1e-3), ("bwd", 2e-3)):
        (row,) = problem.rows(direction, 2, 0.001)
        rate = 2 * {"fwd": 2, "bwd": 5}[direction] * problem.pairs * case.H * case.D / float(row["median_us"]) * 1e-6
        assert float(row["ratio_published"]) == pytest.approx(rate / figure, rel=0.01, abs=2e-4)


def test_unknown_names_are_refused(bench: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    for flag, words in (("--only", "expected some of bands"), ("--without", "expected some of flash_cute:band")):
        with pytest.raises(SystemExit):
            bench.masks.main(["--device", "cpu", flag, "nothing"])
        assert words in capsys.readouterr().err


@pytest.mark.cuda
def test_flex_attention_on_a_gpu(bench: SimpleNamespace) -> None:
    case = next(case for case in small(bench, "constructors") if case.name == "images")
    problem = bench.masks.Problem(case, torch.device("cuda"), 0)
    assert not problem.missing and len(problem.calls[bench.mask_cases.FLEX].results()) == 4
