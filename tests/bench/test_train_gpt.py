"""The training example: it learns, agrees with SDPA, writes what it says, and fails when a gradient is wrong."""

from __future__ import annotations

import csv
import importlib.util
import itertools
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from repository import ROOT
from torch import Tensor

pytest.importorskip("tqdm", reason="the extra examples is not installed")
pytest.importorskip("matplotlib", reason="the extra examples is not installed")

FILE = ROOT / "examples/train_gpt.py"

# Nats between the losses of one step. The text is of the documents and of this Python, so that each commit draws other
# runs. Of 54 runs under two torches, one seed's were at most 0.004 apart, and those of two seeds at least 0.49.
SAME_SEED, OTHER_SEED = 0.02, 0.15


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_gpt", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_gpt"] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    train, kept = module.train, {}

    def train_once(config, attention: str, seed: int, text: Tensor, *rest: bool, form: str = "windows"):
        """SDPA's runs, to which several tests compare, once each: the seed is the run."""
        if attention != "sdpa":
            return train(config, attention, seed, text, *rest, form=form)
        key = config, seed, text.device, form
        if key not in kept:
            kept[key] = train(config, attention, seed, text, *rest, form=form)
        return kept[key]

    module.train = train_once
    return module


def small(example: ModuleType, out: Path, head_dim: int, *more: str, device: str = "cpu") -> int:
    return example.main(["--small", "--device", device, "--head-dim", str(head_dim), "--out", str(out), *more])


def columns(path: Path) -> tuple[str, dict[str, list[float]]]:
    """The first line of a CSV, which is a remark, and its columns."""
    with path.open() as file:
        remark = file.readline()
        rows = list(csv.DictReader(file))
    return remark, {name: [float(row[name]) for row in rows] for name in rows[0]}


def furthest(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_learns_and_agrees(example, tmp_path, capsys, head_dim):
    status = small(example, tmp_path, head_dim)
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert printed.count("tokens/s") == 3 and "noise band" in printed

    remark, curves = columns(tmp_path / f"training-d{head_dim}.csv")
    assert remark.startswith(f"# head dim {head_dim}: ") and f"torch {torch.__version__}" in remark
    assert curves.pop("step") == list(range(60))
    ours, same_seed, other_seed = curves.values()
    assert [name.split()[0] for name in curves] == ["flash_cute", "sdpa", "sdpa"]
    assert [name.split()[-1] for name in curves] == ["1", "1", "2"]
    assert furthest(ours, same_seed) < SAME_SEED
    assert furthest(ours, other_seed) > OTHER_SEED
    assert (tmp_path / f"training-d{head_dim}.png").read_bytes().startswith(b"\x89PNG")


def test_packed_documents(example, tmp_path, capsys):
    """Packed with flash_cute as padded with SDPA: the same documents, the same losses."""
    status = small(example, tmp_path, 64, "--packed")
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert printed.count("tokens/s") == 5 and "% of the positions are padding" in printed

    _, curves = columns(tmp_path / "training-packed-d64.csv")
    assert curves.pop("step") == list(range(60))
    packed, same_seed, other_seed, padded = curves.values()
    assert [" ".join(name.split()[-3:]) for name in curves] == [
        *("packed seed 1", "padded seed 1", "padded seed 2", "padded seed 1")
    ]
    for curve in (same_seed, padded):
        assert furthest(packed, curve) < SAME_SEED
    assert furthest(packed, other_seed) > OTHER_SEED


def test_a_document_that_sees_another_is_noticed(example, tmp_path, capsys, monkeypatch):
    def crossing(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        return example.flash_cute_attention(q, k, v)

    monkeypatch.setattr(example, "packed_attention", crossing)
    assert small(example, tmp_path, 64, "--packed") == 1
    assert "NOT AS IT MUST BE" in capsys.readouterr().out


def test_packed_and_padded_batches_are_the_same_documents(example):
    config = example.replace(example.small(64), steps=3)
    text = torch.frombuffer(bytearray(example.read_text()[:100_000]), dtype=torch.uint8)
    starts, lengths = example.find_documents(config, text)
    assert ((lengths >= 1) & (lengths <= config.context)).all()
    assert (starts[1:] > starts[:-1] + lengths[:-1]).all()
    packed, padded = (example.draw_documents(config, 1, text, packed=form) for form in (True, False))
    for step in range(3):
        one, other = packed(step), padded(step)
        real = other.targets != example.NO_TARGET
        assert one.count == int(real.sum()) == one.tokens.numel() < other.tokens.numel()
        for name in ("tokens", "targets"):
            assert torch.equal(getattr(one, name)[0], getattr(other, name)[real])
        assert torch.equal(one.positions, other.positions.expand_as(real)[real])
        ends = one.cu_seqlens.tolist()
        assert (ends[0], ends[-1]) == (0, one.count) and one.longest == max(b - a for a, b in itertools.pairwise(ends))
        assert (one.positions[ends[:-1]] == 0).all()
        for start, end in itertools.pairwise(ends):
            assert config.separator not in bytes(one.tokens[0, start:end].tolist())


def scaled_gradient(x: Tensor, factor: float) -> Tensor:
    y = x.view_as(x)
    y.register_hook(lambda gradient: gradient * factor)
    return y


# The smoothed curves of these two are at least 0.14 and 0.05 nats apart, whatever text and seed are; 0.005 is allowed.
# AdamW hardly sees a factor of a weight's whole gradient: with 3.0 for v they are 0.019 apart at least.
@pytest.mark.parametrize(("head_dim", "name", "factor"), [(64, "v", 10.0), (128, "q", -1.0)])
def test_a_wrong_gradient_is_noticed(example, tmp_path, capsys, monkeypatch, head_dim, name, factor):
    right = example.flash_cute_attention

    def wrong(**tensors: Tensor) -> Tensor:
        return right(**{**tensors, name: scaled_gradient(tensors[name], factor)})

    monkeypatch.setitem(example.ATTENTION, "flash_cute", lambda q, k, v: wrong(q=q, k=k, v=v))
    assert small(example, tmp_path, head_dim) == 1
    assert "NOT AS IT MUST BE" in capsys.readouterr().out


def test_one_run_alone(example, tmp_path, capsys):
    assert small(example, tmp_path, 64, "--attention", "sdpa", "--seed", "7") == 0
    _, curves = columns(tmp_path / "training-d64.csv")
    assert [name.split()[0] for name in curves] == ["step", "sdpa"] and list(curves)[1].endswith("seed 7")


def test_a_few_steps(example, tmp_path, capsys):
    """Fewer than the warm-up has: too few to learn, and enough to see that it runs."""
    assert small(example, tmp_path, 64, "--steps", "3") == 1
    assert len(columns(tmp_path / "training-d64.csv")[1]["step"]) == 3


@pytest.mark.cuda
@pytest.mark.parametrize("head_dim", [64, 128])
def test_learns_on_the_gpu(example, tmp_path, capsys, head_dim):
    assert small(example, tmp_path, head_dim, "--attention", "flash_cute", device="cuda") == 0


@pytest.mark.cuda
def test_packed_documents_on_the_gpu(example, tmp_path):
    assert small(example, tmp_path, 64, "--packed", "--attention", "flash_cute", device="cuda") == 0


def test_the_seed_is_the_run(example):
    config = example.replace(example.small(64), steps=5)
    text = torch.randint(256, (1000,), dtype=torch.uint8)
    one, same, other = (example.train(config, "flash_cute", seed, text, False).losses for seed in (1, 1, 2))
    assert one == same != other


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_full_size(example, head_dim):
    config = example.full_size(head_dim)
    with torch.device("meta"):
        model = example.GPT(config, example.flash_cute_attention)
    assert sum(weight.numel() for weight in model.parameters()) >= 10e6
    assert config.context >= 1024 and config.heads > config.kv_heads > 1 and config.heads % config.kv_heads == 0


def test_rotary_positions_are_relative(example):
    """A dot product of rotated vectors depends on the distance of their positions alone; lengths stay."""
    model = example.GPT(example.small(64), example.sdpa_attention)
    q, k = (torch.randn(64).expand(1, 1, 64, 64) for _ in range(2))
    turned_q, turned_k = (example.rotate(x, model.cos, model.sin)[0, 0] for x in (q, k))
    scores = turned_q @ turned_k.T
    torch.testing.assert_close(scores[1:, 1:], scores[:-1, :-1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(turned_q.norm(dim=-1), q[0, 0].norm(dim=-1))
    assert (scores[0] - scores[0, 0]).abs().max() > 0.1


def test_text(example):
    text = example.read_text()
    assert text.startswith(b"# flash_cute\n")
    assert Path(csv.__file__).read_bytes() in text
    assert Path(torch.__file__).read_bytes() not in text
    assert len(text) > 5e6


def test_smooth(example):
    config = example.replace(example.small(64), warm_up=2, smoothing=3)
    assert example.smooth([9.0, 9.0, 1.0, 2.0, 3.0, 7.0], config) == [2.0, 4.0]
    assert example.smooth([9.0, 9.0, 1.0, 2.0], config) == [1.5]
    assert example.smooth([9.0], config) == [9.0]


@pytest.mark.parametrize(
    ("start", "end", "offset", "wrong_at", "good"),
    [
        (5.5, 1.0, 0.0, range(0), True),
        (5.5, 1.0, 0.019, range(200), True),
        (5.5, 1.0, 0.021, range(200), False),
        (5.5, 1.0, 0.021, range(100, 147), True),  # the running mean spans a few steps more
        (5.5, 1.0, 0.021, range(100, 150), False),
        (5.5, 1.0, 1.0, range(40), True),  # within the warm-up
        (5.5, 1.0, math.nan, range(199, 200), False),
        (5.5, 1.0, math.inf, range(100, 101), False),
        (5.5, 4.1, 0.0, range(0), False),  # does not fall enough
    ],
)
def test_check(example, capsys, start, end, offset, wrong_at, good):
    config = example.replace(example.full_size(64), steps=200)
    curve = [start] + [end] * 199
    ours = [loss + offset * (step in wrong_at) for step, loss in enumerate(curve)]
    ours[0] = start
    runs = [example.Run(name, losses, 1.0) for name, losses in (("ours", ours), ("a", curve), ("b", curve))]
    assert example.check(runs, config) is good
