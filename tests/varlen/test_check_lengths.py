"""`FLASH_CUTE_CHECK=1`: offsets and lengths of packed calls that make no sense raise, whatever calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flash_cute
from flash_cute import _check_lengths

ROWS, KEYS = 10, 30
GOOD: dict[str, list[int]] = {"cu_seqlens_q": [0, 3, 10], "cu_seqlens_k": [0, 20, 30]}
WRONG: dict[str, tuple[dict[str, list[int]], str]] = {
    "swapped": (
        {"cu_seqlens_q": GOOD["cu_seqlens_k"], "cu_seqlens_k": GOOD["cu_seqlens_q"]},
        "cu_seqlens_q: expected offsets from 0 to q's 10 rows, got 20 at index 1; cu_seqlens_q would fit k and "
        "cu_seqlens_k q: are they swapped?",
    ),
    "descending": (
        {"cu_seqlens_q": [0, 7, 3]},
        "cu_seqlens_q: expected offsets that do not descend, got 3 at index 2 after 7",
    ),
    "past the end": (
        {"cu_seqlens_k": [0, 20, 31]},
        "cu_seqlens_k: expected offsets from 0 to k's 30 rows, got 31 at index 2",
    ),
    "negative": (
        {"cu_seqlens_q": [-1, 3, 10]},
        "cu_seqlens_q: expected offsets from 0 to q's 10 rows, got -1 at index 0",
    ),
    "more used": (
        {"seqused_k": [20, 11]},
        "seqused_k: expected numbers from 0 to the sequence's 10 rows, got 11 at index 1",
    ),
    "fewer than none": (
        {"seqused_q": [-1, 2]},
        "seqused_q: expected numbers from 0 to the sequence's 3 rows, got -1 at index 0",
    ),
}


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_check_lengths, "ENABLED", True)


def _tensors(device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dtype = torch.float32 if device == "cpu" else torch.float16
    q, k, v = (torch.randn(n, 2, 16, device=device, dtype=dtype) for n in (ROWS, KEYS, KEYS))
    return q, k, v


def _lengths(given: dict[str, list[int]], device: str = "cpu") -> dict[str, torch.Tensor]:
    return {name: torch.tensor(x, dtype=torch.int32, device=device) for name, x in {**GOOD, **given}.items()}


@pytest.mark.filterwarnings("ignore:flash_cute. FLASH_CUTE_CHECK")
@pytest.mark.parametrize("name", WRONG)
def test_wrong(name: str, device: str, checked: None) -> None:
    """Every function of packed sequences says so, the backward too."""
    given, sentence = WRONG[name]
    q, k, v = _tensors(device)
    good, lengths = _lengths({}, device), _lengths(given, device)
    out, lse = flash_cute.varlen_fwd(q, k, v, **good)
    calls: list[Callable[[], Any]] = [
        lambda: flash_cute.varlen_attention(q, k, v, **lengths),
        lambda: flash_cute.varlen_fwd(q, k, v, **lengths),
        lambda: flash_cute.varlen_bwd(out, q, k, v, out, lse, **lengths),
    ]
    for call in calls:
        with pytest.raises(ValueError) as raised:
            call()
        assert str(raised.value) == f"flash_cute: {sentence}"


@pytest.mark.filterwarnings("ignore:flash_cute. FLASH_CUTE_CHECK")
def test_good(checked: None, device: str) -> None:
    """What makes sense is computed: gaps, empty sequences, used lengths. What is no offset is refused as ever."""
    q, k, v = _tensors(device)
    for given in (
        {},
        {"cu_seqlens_q": [2, 2, 9], "cu_seqlens_k": [5, 5, 5]},
        {"seqused_q": [0, 7], "seqused_k": [20, 0]},
        {"cu_seqlens_q": [0], "cu_seqlens_k": [0]},
    ):
        lengths = _lengths(given, device)
        given_out = flash_cute.varlen_attention(q, k, v, **lengths)
        expected, _ = flash_cute.reference.varlen_attention(q, k, v, **lengths)
        torch.testing.assert_close(given_out.double(), expected, atol=2e-3 if device == "cuda" else 1e-5, rtol=1e-3)
    with pytest.raises(ValueError, match="cu_seqlens_q: expected"):
        flash_cute.varlen_attention(q, k, v, **{**_lengths({}, device), "cu_seqlens_q": torch.zeros(3, device=device)})


@pytest.mark.filterwarnings("ignore:flash_cute. FLASH_CUTE_CHECK")
def test_graphs_are_not_checked(checked: None) -> None:
    """Nothing can be read while they are traced."""
    torch.compiler.reset()
    q, k, v = _tensors()
    lengths = _lengths(WRONG["descending"][0])
    compiled = torch.compile(flash_cute.varlen_attention, fullgraph=True, backend="eager")
    assert compiled(q, k, v, **lengths).shape == q.shape


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.filterwarnings("ignore:flash_cute. FLASH_CUTE_CHECK")
def test_captures_are_not_checked(checked: None, device: str) -> None:
    q, k, v = _tensors(device)
    lengths = _lengths({}, device)
    expected = flash_cute.varlen_attention(q, k, v, **lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_cute.varlen_attention(q, k, v, **lengths)
    graph.replay()
    torch.testing.assert_close(out, expected)


ENVIRONMENT = """
import warnings
import torch
import flash_cute
from flash_cute.integrations import _aten, sdpa
from flash_cute.integrations.flash_attn import flash_attn_varlen_func

x = torch.randn(10, 2, 16)
bad = torch.tensor([0, 11], dtype=torch.int32)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for call in (
        lambda: flash_cute.varlen_attention(x, x, x, bad, bad),
        lambda: flash_attn_varlen_func(x, x, x, bad, bad, 10, 10),
        lambda: sdpa.varlen_attn(x, x, x, bad, bad, 10, 10),
        lambda: _aten.make_override(
            "_flash_attention_forward", _aten.flash_forward, lambda *args: "PyTorch's", False, frozenset
        )("keys", x, x, x, bad, bad, 10, 10, 0.0, False, False),
    ):
        try:
            print(call() is None)
        except ValueError as error:
            print(error)
print(len({str(w.message) for w in caught if "waits for the GPU" in str(w.message)}))
"""


@pytest.mark.parametrize("value", ["1", "0"])
def test_the_environment(value: str, python: Callable[..., str]) -> None:
    """It is for the integrations too, and a warning says what it costs; without it offsets are clamped."""
    sentence = "flash_cute: cu_seqlens_q: expected offsets from 0 to q's 10 rows, got 11 at index 1"
    lines = python(ENVIRONMENT, FLASH_CUTE_CHECK=value).splitlines()
    assert lines == ([sentence] * 4 + ["1"] if value == "1" else ["False"] * 4 + ["0"])
