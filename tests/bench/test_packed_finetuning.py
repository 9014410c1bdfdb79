"""The example that fine-tunes on packed sequences: a few steps of it."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

import pytest
from repository import ROOT

pytest.importorskip("transformers", minversion="5.4")
pytest.importorskip("accelerate", reason="Transformers' Trainer needs it")

FILE = ROOT / "examples/packed_finetuning.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("packed_finetuning", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_learns(example, device, tmp_path, capsys):
    arguments = ["--device", device, "--steps", "4", "--batch-size", "8", "--out", str(tmp_path)]
    status = example.main([*arguments, "--gradient-checkpointing"])
    printed = capsys.readouterr().out
    assert status == 0, printed
    before, after = map(float, re.search(r"loss (\S+) before, (\S+) after", printed).groups())
    assert after < before
    assert (tmp_path / "model.safetensors").exists()


def test_nothing_is_left_behind(example, tmp_path, monkeypatch, capsys):
    """Without --out no folder either."""
    monkeypatch.chdir(tmp_path)
    assert example.main(["--device", "cpu", "--steps", "2", "--batch-size", "4"]) == 0, capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_sequences_that_see_each_other_fail(example, monkeypatch, capsys):
    """The example's check is one: without positions that begin again, packed documents see each other."""
    import flash_cute.integrations.transformers as integration
    from flash_cute.integrations import _transformers_given

    monkeypatch.setattr(_transformers_given, "_read_positions", lambda positions: None)
    monkeypatch.setattr(integration, "mask", lambda **arguments: None)
    integration.register()
    model = example.load(None).eval()
    ids = [document["input_ids"] for document in example.documents(4, seed=1)]
    assert example.packing_error(model, ids) > 1e-3
    monkeypatch.undo()
    integration.register()
    assert example.packing_error(model, ids) < 1e-5
