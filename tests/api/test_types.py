"""An argument of a wrong type gets our sentence, from every public function; what means the same is taken."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from bad_calls import RAW_ERRORS, Call, good_backward_call, good_call, operator_call
from numerics import same_bits

import flash_cute

MASKS = "False or 'none', True or 'bottom_right', or 'top_left'"
NO_WINDOW = "None or (left, right), each None (no limit) or a number of keys of at least 0"


def _calls(call: Call, causal: Any = False, **options: Any) -> dict[str, Callable[[], Any]]:
    """Every public function on the same arguments."""
    q, k, v = (call[x] for x in "qkv")
    backward = good_backward_call("cpu")
    return {
        "attention": lambda: flash_cute.attention(q, k, v, causal, **options),
        "fwd": lambda: flash_cute.fwd(q, k, v, causal, **options),
        "explain": lambda: flash_cute.explain(q, k, v, causal, **options),
        "bwd": lambda: flash_cute.bwd(backward["dout"], q, k, v, backward["out"], backward["lse"], causal, **options),
    }


@pytest.mark.parametrize("function", ["attention", "fwd", "explain", "bwd"])
@pytest.mark.parametrize("causal", [None, 1, 0, 1.5, "", "left", "Top_Left", [True], torch.tensor(True)], ids=repr)
def test_causal_that_is_no_mask(function: str, causal: Any) -> None:
    with pytest.raises(ValueError, match=rf"^flash_cute: causal: expected {re.escape(MASKS)}, got "):
        _calls(good_call("cpu"), causal)[function]()


@pytest.mark.parametrize("function", ["attention", "fwd", "explain", "bwd"])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize(
    "value, name", [(None, "None"), (3.0, "float"), ([[1.0]], "list"), ("q", "str"), (range(3), "range")]
)
def test_not_a_tensor(
    which: str, value: Any, name: str, requires_grad: bool, function: str, capfd: pytest.CaptureFixture[str]
) -> None:
    call = good_call("cpu")
    for x in "qkv":
        call[x].requires_grad_(requires_grad)
    call[which] = value
    expected = rf"^flash_cute: {which}: expected a torch.Tensor, got {name}$"
    if which != "q" and isinstance(value, float) and not (requires_grad and function != "explain"):
        expected = rf"^flash_cute: {which}: expected "  # PyTorch makes a tensor of a number
    with pytest.raises(ValueError, match=expected):
        _calls(call)[function]()
    assert capfd.readouterr() == ("", ""), "an error printed something"


@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("operator", ["fwd", "_fwd", "fwd_plan"])
def test_operators_say_none(operator: str, which: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RAW_ERRORS, match=rf"^flash_cute: {which}: expected a torch.Tensor, got None"):
        operator_call(operator, {**good_call("cpu"), which: None})
    assert capfd.readouterr() == ("", ""), "an error printed something"


def test_numpy() -> None:
    """Arrays are refused by name, NumPy's bools and numbers count as Python's."""
    np = pytest.importorskip("numpy")
    call = good_call("cpu")
    for which in "qkv":
        for function in _calls({**call, which: call[which].numpy()}).values():
            with pytest.raises(ValueError, match=rf"^flash_cute: {which}: expected a torch.Tensor, got numpy.ndarray$"):
                function()
    for name in ("scale", "softcap"):
        for function in _calls(call, **{name: np.ones(2)}).values():
            with pytest.raises(ValueError, match=rf"^flash_cute: {name}: expected None or a number, got numpy"):
                function()
    for given, meant in ((np.True_, True), (np.False_, False)):
        for name in ("attention", "fwd", "explain", "bwd"):
            results = [_calls(call, x, scale=scale)[name]() for x, scale in ((given, np.float64(0.5)), (meant, 0.5))]
            results = [x.data if name == "explain" else x for x in results]
            results = [[x] if isinstance(x, torch.Tensor) else x for x in results]
            assert results[0] == results[1] if name == "explain" else same_bits(*map(tuple, results))


@pytest.mark.parametrize(
    "option, value, expected",
    [
        ("scale", "1", "None or a number, got '1'"),
        ("scale", 1j, "None or a number, got 1j"),
        ("scale", [0.5], "None or a number, got list"),
        ("scale", torch.ones(2), "None or a number, got torch.Tensor"),
        *(
            (name, given, f"None or a number, got {shown}")
            for name in ("scale", "softcap")
            for given, shown in (
                (True, "True"),
                (False, "False"),
                (np.True_, "numpy.bool"),
                (np.array(True), "numpy.ndarray"),
                (torch.tensor(True), "torch.Tensor"),
            )
        ),
        *(  # as one on a GPU: its value is not here
            (
                name,
                torch.tensor(0.5, device="meta"),
                "None or a number that is on the CPU, got a tensor on meta, whose value a call does not wait for",
            )
            for name in ("scale", "softcap")
        ),
        ("softcap", "1", "None or a number, got '1'"),
        ("softcap", [0.5], "None or a number, got list"),
        ("sinks", 1.5, "a torch.Tensor, got float"),
        ("sinks", [0.5] * 4, "a torch.Tensor, got list"),
        ("alibi_slopes", 1.5, "a torch.Tensor, got float"),
        ("alibi_slopes", [0.5] * 4, "a torch.Tensor, got list"),
        *(
            (
                "window",
                given,
                f"None or (left, right), each None (no limit) or a number of keys of at least 0, got {shown}",
            )
            for given, shown in (
                (5, "5"),
                ("ab", "'ab'"),
                ((1,), "(1,)"),
                ([1, 2, 3], "[1, 2, 3]"),
                ((1.5, 0), "(1.5, 0)"),
                ((True, 0), "(True, 0)"),
                ((None, "0"), "(None, '0')"),
                ({1: 2, 3: 4}, "dict"),
                (torch.tensor([1, 2]), "torch.Tensor"),
            )
        ),
        *(
            ("window", given, f"None (no limit) or numbers below 2^63, got {shown}")
            for given, shown in (
                ((2**70, 0), f"({2**70}, 0)"),
                ((None, 2**63), f"(None, {2**63})"),
                ((10**400, 3), "(a number of 1329 bits, 3)"),
            )
        ),
        ("scale", 10**400, "None or a number, got a number of 1329 bits"),
        ("softcap", -(10**400), "None or a number, got a number of 1329 bits"),
        ("backend", 90, "None or a backend's name, got 90"),
        ("backend", np.array("auto"), "None or a backend's name, got numpy.ndarray"),
        ("backend", np.array(["auto", "cpu"]), "None or a backend's name, got numpy.ndarray"),
        ("backend", "", "'auto', 'cpu', 'sm80' or 'sm90', got ''"),
        ("deterministic", "no", "None, False or True, got 'no'"),
        ("deterministic", 1, "None, False or True, got 1"),
    ],
)
@pytest.mark.parametrize("function", ["attention", "fwd", "bwd", "explain"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_option_of_a_wrong_type(function: str, option: str, value: Any, expected: str, requires_grad: bool) -> None:
    call = good_call("cpu")
    call["q"].requires_grad_(requires_grad)
    with pytest.raises(ValueError, match=rf"^flash_cute: {option}: expected {re.escape(expected)}$"):
        _calls(call, **{option: value})[function]()


@pytest.mark.parametrize(
    "value, shown", [("no", "'no'"), (1, "1"), (None, "None"), (torch.tensor(True), "torch.Tensor")]
)
def test_what_is_no_flag(value: Any, shown: str) -> None:
    """What Python would take for true or false."""
    q, k, v = (good_call("cpu")[x] for x in "qkv")
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    offsets = [torch.tensor([0, x.shape[0]], dtype=torch.int32) for x in packed[:2]]
    for requires_grad in (False, True):
        q.requires_grad_(requires_grad)
        with pytest.raises(ValueError, match=rf"^flash_cute: return_lse: expected False or True, got {shown}$"):
            flash_cute.attention(q, k, v, return_lse=value)
        with pytest.raises(ValueError, match=rf"^flash_cute: return_lse: expected False or True, got {shown}$"):
            flash_cute.varlen_attention(*packed, *offsets, return_lse=value)
    with pytest.raises(ValueError, match=rf"^flash_cute: backward: expected False or True, got {shown}$"):
        flash_cute.explain(q, k, v, backward=value)


@pytest.mark.parametrize("layout", ["jagged", "strided", "sparse"])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_nested_and_sparse(layout: str, requires_grad: bool) -> None:
    parts = [torch.zeros(length, 2, 16) for length in (3, 5)]
    if layout == "sparse":
        x = torch.zeros(2, 2, 3, 16).to_sparse()
    else:
        x = torch.nested.nested_tensor(parts, layout=getattr(torch, layout)).transpose(1, 2)
    x = x.detach().requires_grad_(requires_grad)
    for function in _calls({"q": x, "k": x, "v": x}).values():
        with pytest.raises(ValueError, match=r"^flash_cute: q: expected a strided tensor, got a sparse or nested one"):
            function()


@pytest.mark.parametrize("value, shown", [("90", "'90'"), (9.0, "9.0"), ([90], "list"), (True, "True")])
def test_capability_that_is_no_number(value: Any, shown: str) -> None:
    q, k, v = (good_call("cpu")[x] for x in "qkv")
    with pytest.raises(ValueError, match=rf"^flash_cute: capability: expected None or .*, got {re.escape(shown)}$"):
        flash_cute.explain(q, k, v, capability=value)


@pytest.mark.parametrize("value, shown", [("no", "'no'"), (1, "1")])
def test_explain_of_a_backward_reads_deterministic(value: Any, shown: str) -> None:
    q, k, v = (good_call("cpu")[x] for x in "qkv")
    with pytest.raises(ValueError, match=rf"^flash_cute: deterministic: expected None, False or True, got {shown}$"):
        flash_cute.explain(q, k, v, backward=True, deterministic=value)


@pytest.mark.parametrize("value", [2**63, -(2**70)])
def test_capability_beyond_64_bits(value: int) -> None:
    q, k, v = (good_call("cpu")[x] for x in "qkv")
    with pytest.raises(ValueError, match=rf"^flash_cute: capability: expected None or .*, got {value}$"):
        flash_cute.explain(q, k, v, capability=value)


@pytest.mark.parametrize("which", ["q", "k", "v", "sinks"])
def test_quantized(which: str) -> None:
    call = {**good_call("cpu"), "sinks": torch.zeros(4)}
    call[which] = torch.quantize_per_tensor(call[which].float(), 0.1, 0, torch.quint8)
    for function in _calls(call, sinks=call["sinks"]).values():
        with pytest.raises(ValueError, match=rf"^flash_cute: {which}: expected .*got (torch\.quint8|another dtype)$"):
            function()


def test_quantized_gradient() -> None:
    call = good_backward_call("cpu")
    call["dout"] = torch.quantize_per_tensor(call["dout"].float(), 0.1, 0, torch.qint8)
    sentence = r"^flash_cute: dout: expected a tensor without quantization, got torch.qint8$"
    with pytest.raises(ValueError, match=sentence):
        flash_cute.bwd(*(call[x] for x in ("dout", "q", "k", "v", "out", "lse")))
