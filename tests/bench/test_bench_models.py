"""The benchmark of whole steps of models: what it measures, on narrow layers and the CPU."""

from __future__ import annotations

import csv
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from repository import ROOT

pytest.importorskip("transformers", minversion="5.4")


@pytest.fixture(scope="module")
def bench() -> Any:
    """bench's modules. The folder comes last on the path: it must not hide the installed package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(ROOT)])
        names = ("layers", "models", "readme", "steps", "summary", "providers.transformers_attention")
        yield SimpleNamespace(**{name.split(".")[-1]: importlib.import_module(f"bench.{name}") for name in names})


@pytest.fixture(scope="module")
def measured(bench: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The CSV of all models on the CPU, FlashAttention-3's interface over flash_cute's CPU path."""
    path = tmp_path_factory.mktemp("models") / "models.csv"
    with pytest.MonkeyPatch.context() as patch:
        interface = importlib.import_module("flash_cute.integrations.flash_attn_interface")
        patch.setitem(sys.modules, "flash_attn_interface", interface)
        small = ("--device", "cpu", "--N", "160", "--dtype", "float32", "--rounds", "2", "--seconds", "0.001")
        assert bench.models.main([*small, "--commit", "abc", "--out", str(path)]) == 0
    return path


def test_every_implementation_computes_the_same(bench: SimpleNamespace, measured: Path) -> None:
    """Windows of 128 and sinks too; the rest says why it was not measured."""
    with measured.open(newline="") as file:
        rows = list(csv.DictReader(file))
    timed = {(row["model"], row["direction"], row["provider"]): row for row in rows if row["median_ms"]}
    for model in bench.models.MODELS:
        for direction in bench.models.DIRECTIONS:
            ours, bare = (timed[model, direction, name] for name in ("flash_cute", "none"))
            spent = float(ours["median_ms"]) - float(bare["median_ms"])
            assert float(ours["attention_ms"]) == pytest.approx(spent, abs=2e-3)
            assert float(ours["attention_share"]) == pytest.approx(spent / float(ours["median_ms"]), abs=2e-3)
            peer = "sdpa" if model == "llama" else "eager"
            assert float(ours[f"ratio_{peer}"]) > 0 and not bare["attention_share"]
            has_fa3 = (model, direction) != ("gpt_oss", "train")
            assert ((model, direction, "fa3") in timed) == has_fa3
            compared = [timed[model, direction, x] for x in ("flash_cute", "fa3") if (model, direction, x) in timed]
            assert all(float(row["difference"].split()[0]) < 1e-4 for row in compared if row["difference"])
    reasons = {(row["model"], row["provider"]): row["missing"] for row in rows if row["missing"]}
    assert reasons["gemma2", "sdpa"] == "Transformers' sdpa leaves the softcap out"
    assert reasons["gpt_oss", "fa3"].startswith("FlashAttention-3 has no sinks")
    assert reasons["llama", "eager"] == "measured where sdpa does not serve the model"


def test_a_wrong_implementation_is_not_timed(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import flash_cute.integrations.transformers as integration

    right = integration.attention
    monkeypatch.setattr(integration, "attention", lambda *args, **options: (2 * right(*args, **options)[0], None))
    arguments = ["--device", "cpu", "--N", "32", "--dtype", "float32", "--models-only", "llama", "--peers", "sdpa"]
    assert bench.models.main([*arguments, "--directions", "prefill", "--rounds", "2", "--seconds", "0.01"]) == 1
    assert "flash_cute     wrong: differs by" in capsys.readouterr().out
    monkeypatch.undo()
    integration.register()


def test_a_step_without_attention_still_has_all_gradients(bench: SimpleNamespace) -> None:
    q, k, v = (torch.randn(1, heads, 5, 8, requires_grad=True) for heads in (4, 2, 2))
    out, _ = bench.transformers_attention.no_attention(torch.nn.Module(), q, k, v)
    assert out.shape == (1, 5, 4, 8)
    assert [x.shape for x in torch.autograd.grad(out.sum(), (q, k, v))] == [q.shape, k.shape, v.shape]


def test_figures_are_read_back(
    bench: SimpleNamespace, measured: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert bench.steps.is_steps(measured)
    found = bench.steps.read(measured)
    assert len(found.cells) == 6
    lines = list(bench.steps.markdown_lines(found))
    assert lines[0].startswith("| 4 layers of | flash_cute |") and len([x for x in lines if x.startswith("| ")]) == 9
    assert "* Not measured: unfused (Llama-3-8B, prefill, N 160; " in "\n".join(lines)
    assert bench.summary.main([str(measured)]) == 0
    assert "gpt-oss-20b, training step, N 160" in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    plot_steps = importlib.import_module("bench.plot_steps")
    plot_steps.draw(found, tmp_path / "models.png")
    assert (tmp_path / "models.png").read_bytes().startswith(b"\x89PNG")


def test_layers_are_named_with_what_they_add(bench: SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / "layers.csv"
    assert bench.layers.main(["--device", "cpu", "--rounds", "2", "--out", str(path)]) == 0
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = {row["layer"] for row in rows}
    assert {"flash_cute.attention", "flash_attn.flash_attn_func", "sdpa.enable()", "transformers.attention"} <= names
    assert {"flash_cute.varlen_attention", "sdpa.varlen_attn", "transformers.attention, padded"} <= names
    bases = {row["layer"]: row["base"] for row in rows}
    assert bases["sdpa.sdpa"] == "flash_cute.attention" and bases["sdpa.varlen_attn"] == "flash_cute.varlen_attention"
    assert all(float(row["over_us"]) == 0 for row in rows if row["layer"] == row["base"])
    assert {row["mode"] for row in rows} == {"no_grad", "inference"}
    assert "flash_attn.flash_attn_func" in "\n".join(bench.steps.layer_lines(path))


def test_a_layer_that_does_not_run_is_named(
    bench: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are timed, and the first mode's are in the CSV before the second's are."""

    def refuse(*args: object, **options: object) -> None:
        raise ValueError("no such kernel")

    monkeypatch.setattr(bench.layers.sdpa, "sdpa", refuse)
    path, written = tmp_path / "layers.csv", []
    write = bench.layers.write
    monkeypatch.setattr(bench.layers, "write", lambda out, rows: written.append(len(rows)) or write(out, rows))
    assert bench.layers.main(["--device", "cpu", "--rounds", "2", "--out", str(path)]) == 0
    assert "not measured: sdpa.sdpa: no such kernel" in capsys.readouterr().out
    assert "sdpa.varlen_attn" in path.read_text() and "sdpa.sdpa" not in path.read_text()
    assert len(written) == 2 and written[1] == 2 * written[0]
