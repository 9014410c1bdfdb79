"""The decoding example: SDPA's tokens, shared pages, and an exit status that notices when they differ."""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any

import pytest
import torch
from repository import ROOT

pytest.importorskip("tqdm", reason="the extra examples is not installed")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Of fewer and smaller heads, so that a run takes a second."""
    spec = importlib.util.spec_from_file_location("decode_loop", ROOT / "examples/decode_loop.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, value in {"HEADS": 8, "HEADS_KV": 2, "DIM": 32, "PAGE": 16}.items():
        monkeypatch.setattr(module, name, value)
    return module


def test_sdpas_tokens(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--small", "--device", "cpu"]) == 0
    printed, bars = capsys.readouterr()
    # Two pages of the beginning once, and two for what follows in each of three sequences.
    for expected in ("flash_cute: ", "SDPA: ", "8 pages of 16 tokens in place of 12", "27 of 27 tokens are the same"):
        assert expected in printed
    assert printed.count("tokens/s") == 2 and "8/8" in bars


@pytest.mark.parametrize("fault", ["one key too few", "pages of another"])
def test_a_fault_is_noticed(
    fault: str, example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = example.paged

    def wrong(caches: Any, table: torch.Tensor, i: int, q: Any, k: Any, v: Any, lengths: torch.Tensor) -> torch.Tensor:
        if fault == "one key too few":
            return right(caches, table, i, q, k, v, (lengths - 1).clamp(min=0))
        return right(caches, table.flip(0) if q.shape[1] == 1 else table, i, q, k, v, lengths)

    monkeypatch.setattr(example, "paged", wrong)
    assert example.main(["--small", "--device", "cpu"]) == 1
    assert "27 of 27" not in capsys.readouterr().out


@pytest.mark.cuda
def test_in_a_graph(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """In bfloat16 a token may differ from SDPA's, and those behind it; the first ones are the same."""
    with torch.device("cuda"), torch.inference_mode():
        assert example.compare(torch.bfloat16, 1, 3, 2 * example.PAGE, 20, 9) > 0.5
    assert capsys.readouterr().out.count("tokens/s") == 2
