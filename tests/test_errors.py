"""A call that cannot be served says which argument, what was expected and what was given; nothing else happens.

Past 400 lines, and one file: a quarter of it is the table of bad calls that most of the tests share.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Case, plan, score

import flash_cute
from flash_cute import autograd

# What the raw operators raise: torch 2.15 makes a RuntimeError of the ValueError that C++ throws.
RAW_ERRORS = (ValueError, RuntimeError)
CUDA = pytest.param("cuda", marks=pytest.mark.cuda)
Call = dict[str, Any]
# The arguments of an operator that stand between its tensors and `backend`.
PLAIN = dict.fromkeys(("window_left", "window_right", "softcap", "sinks", "alibi_slopes", "scale"))


def _call(device: str) -> Call:
    """A good call: q (2, 4, 5, 16), k and v (2, 2, 7, 16), float16."""
    q, k, v = Case(16, 5, 7, heads_q=4).inputs(device, torch.Generator().manual_seed(0))
    return {"q": q, "k": k, "v": v, "causal": "none", **PLAIN, "backend": "auto"}


def _resized(name: str, *shape: int) -> Callable[[Call], Any]:
    return lambda call: call[name].new_zeros(shape)


def _as(name: str, dtype: torch.dtype) -> Callable[[Call], Any]:
    return lambda call: call[name].to(dtype)


def _new(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[Call], Any]:
    """A tensor on q's device."""
    return lambda call: torch.zeros(shape, dtype=dtype, device=call["q"].device)


# Name: what to replace in the good call, and what the sentence must hold.
BAD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "q_rank": ({"q": _resized("q", 4, 5, 16)}, (r"\bq\b", "4", "3")),
    "k_rank": ({"k": _resized("k", 1, 2, 2, 7, 16)}, (r"\bk\b", "4", "5")),
    "v_rank": ({"v": _resized("v", 16)}, (r"\bv\b", "4", "1")),
    "q_scalar": ({"q": _resized("q")}, (r"\bq\b", "4", "0")),
    "all_int32": (
        {x: _as(x, torch.int32) for x in "qkv"},
        (r"\bq\b", "float16", "bfloat16", "int32"),
    ),
    "all_bool": ({x: _as(x, torch.bool) for x in "qkv"}, (r"\bq\b", "float16", "bool")),
    "all_complex": (
        {x: _as(x, torch.complex64) for x in "qkv"},
        (r"\bq\b", "float16", "complex64"),
    ),
    "all_float8": (
        {x: _as(x, torch.float8_e4m3fn) for x in "qkv"},
        (r"\bq\b", "float16", "float8_e4m3fn"),
    ),
    "k_dtype": ({"k": _as("k", torch.float32)}, (r"\bk\b", "float16", "float32")),
    "v_dtype": ({"v": _as("v", torch.bfloat16)}, (r"\bv\b", "float16", "bfloat16")),
    "k_batch": ({"k": _resized("k", 3, 2, 7, 16)}, (r"\bk\b", "batch", "2", "3")),
    "v_batch": ({"v": _resized("v", 1, 2, 7, 16)}, (r"\bv\b", "batch", "2", "1")),
    "k_head_dim": ({"k": _resized("k", 2, 2, 7, 24)}, (r"\bk\b", "head dim", "16", "24")),
    "v_head_dim_0": ({"v": _resized("v", 2, 2, 7, 0)}, (r"\bv\b", "head dim", "at least 1", r"\(2, 2, 7, 0\)")),
    "v_length": ({"v": _resized("v", 2, 2, 8, 16)}, (r"\bv\b", "length", "7", "8")),
    "v_heads": ({"v": _resized("v", 2, 4, 7, 16)}, (r"\bv\b", "heads", "2", "4")),
    "head_ratio": (
        {x: _resized(x, 2, 3, 7, 16) for x in "kv"},
        (r"\bq\b", "heads", "multiple", "3", "4"),
    ),
    "more_key_heads": ({x: _resized(x, 2, 8, 7, 16) for x in "kv"}, ("heads", "8", "4")),
    "no_key_heads": ({x: _resized(x, 2, 0, 7, 16) for x in "kv"}, ("heads", "0", "4")),
    "head_dim_0": (
        {"q": _resized("q", 2, 4, 5, 0), **{x: _resized(x, 2, 2, 7, 0) for x in "kv"}},
        (r"\bq\b", "head dim", "0"),
    ),
    "scale_nan": ({"scale": float("nan")}, ("scale", "finite", "nan")),
    "scale_inf": ({"scale": float("inf")}, ("scale", "finite", "inf")),
    "scale_minus_inf": ({"scale": float("-inf")}, ("scale", "finite", "-inf")),
    "scale_negative": ({"scale": -0.5}, ("scale", "-0.5")),
    "scale_zero": ({"scale": 0.0}, ("scale", "0")),
    "softcap_nan": ({"softcap": float("nan")}, ("softcap", "None or a finite number above 0", "nan")),
    "softcap_inf": ({"softcap": float("inf")}, ("softcap", "finite", "inf")),
    "softcap_negative": ({"softcap": -50.0}, ("softcap", "above 0", "-50")),
    "softcap_zero": ({"softcap": 0.0}, ("softcap", "above 0", "got 0")),
    "window_left_negative": (
        {"window_left": -1},
        ("window_left", r"None \(no limit\) or a number of at least 0", "-1"),
    ),
    "window_right_negative": ({"window_right": -1}, ("window_right", r"None \(no limit\)", "-1")),
    "sinks_dtype": ({"sinks": _new(4, dtype=torch.bfloat16)}, ("sinks", "float32 or q's dtype float16", "bfloat16")),
    "sinks_double": ({"sinks": _new(4, dtype=torch.float64)}, ("sinks", "float32 or q's dtype float16", "float64")),
    "sinks_length": ({"sinks": _new(2)}, ("sinks", r"\(4,\), a number per query head", r"got \(2,\)")),
    "sinks_rank": ({"sinks": _new(2, 4)}, ("sinks", r"\(4,\)", r"got \(2, 4\)")),
    "sinks_scalar": ({"sinks": _new()}, ("sinks", r"\(4,\)", r"got \(\)")),
    "slopes_dtype": ({"alibi_slopes": _new(4, dtype=torch.float16)}, ("alibi_slopes", "float32", "float16")),
    "slopes_length": (
        {"alibi_slopes": _new(2)},
        ("alibi_slopes", r"\(4,\) or \(2, 4\), a slope per query head", r"got \(2,\)"),
    ),
    "slopes_batch": ({"alibi_slopes": _new(1, 4)}, ("alibi_slopes", r"\(2, 4\)", r"got \(1, 4\)")),
    "slopes_heads": ({"alibi_slopes": _new(2, 2)}, ("alibi_slopes", r"\(2, 4\)", r"got \(2, 2\)")),
    "slopes_rank": ({"alibi_slopes": _new(2, 4, 1)}, ("alibi_slopes", r"\(2, 4\)", r"got \(2, 4, 1\)")),
    "causal": ({"causal": "diagonal"}, ("causal", "top_left", "bottom_right", "diagonal")),
    "causal_empty": ({"causal": ""}, ("causal", "top_left", "bottom_right")),
    "backend": ({"backend": "fast"}, ("backend", "sm80", "cpu", "fast")),
}

OPERATORS = ("fwd", "_fwd", "fwd_plan", "bwd", "_bwd", "bwd_plan")

# The same of the backward's own arguments, which are like q (2, 4, 5, 16) and its rows.
BAD_BACKWARD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "dout_rank": ({"dout": _resized("dout", 4, 5, 16)}, (r"\bdout\b", r"\(2, 4, 5, 16\)", r"\(4, 5, 16\)")),
    "dout_shape": ({"dout": _resized("dout", 2, 4, 5, 24)}, (r"\bdout\b", r"\(2, 4, 5, 16\)", r"\(2, 4, 5, 24\)")),
    "dout_dtype": ({"dout": _as("dout", torch.bfloat16)}, (r"\bdout\b", "float16", "bfloat16")),
    "out_shape": ({"out": _resized("out", 2, 4, 6, 16)}, (r"\bout\b", r"\(2, 4, 5, 16\)", r"\(2, 4, 6, 16\)")),
    "out_dtype": ({"out": _as("out", torch.float32)}, (r"\bout\b", "float16", "float32")),
    "lse_rank": ({"lse": _resized("lse", 2, 4, 5, 1)}, (r"\blse\b", r"\(2, 4, 5\)", r"\(2, 4, 5, 1\)")),
    "lse_shape": ({"lse": _resized("lse", 2, 5, 4)}, (r"\blse\b", r"\(2, 4, 5\)", r"\(2, 5, 4\)")),
    "lse_dtype": ({"lse": _as("lse", torch.float16)}, (r"\blse\b", "float32", "float16")),
    "dlse_shape": ({"dlse": _resized("dlse", 2, 4, 1)}, (r"\bdlse\b", r"\(2, 4, 5\)", r"\(2, 4, 1\)")),
    "dlse_dtype": ({"dlse": _as("dlse", torch.float64)}, (r"\bdlse\b", "float32", "float64")),
}


def _apply(call: Call, changes: dict[str, Any]) -> Call:
    made = {name: f(call) if callable(f) else f for name, f in changes.items()}
    return {**call, **made}


def _options(call: Call) -> dict[str, Any]:
    """The options of a call as the public functions take them."""
    sides = (call["window_left"], call["window_right"])
    names = ("softcap", "sinks", "alibi_slopes", "scale", "backend")
    return {"window": None if sides == (None, None) else sides, **{x: call[x] for x in names}}


def _python(call: Call) -> Any:
    causal = False if call["causal"] == "none" else call["causal"]
    return flash_cute.fwd(call["q"], call["k"], call["v"], causal, **_options(call))


def _backward_call(device: str) -> Call:
    """A good call of the backward of `_call`."""
    call = _call(device)
    rows = torch.zeros(2, 4, 5, device=device)
    like_q = torch.zeros_like(call["q"])
    tensors = {"dout": like_q, "q": call["q"], "k": call["k"], "v": call["v"], "out": like_q, "lse": rows, "dlse": rows}
    return {**tensors, "causal": "none", **PLAIN, "deterministic": False, "backend": "auto"}


def _python_backward(call: Call) -> Any:
    causal = False if call["causal"] == "none" else call["causal"]
    tensors = [call[x] for x in ("dout", "q", "k", "v", "out", "lse")]
    given = {x: call[x] for x in ("dlse", "deterministic")}
    return flash_cute.bwd(*tensors, causal, **given, **_options(call))


def _operator(name: str, call: Call) -> Any:
    """A call of an operator for what is wrong with q, k, v, mask, scale or backend."""
    if name in ("bwd", "_bwd"):
        call = {**_backward_call("cpu"), **call}
        for x in ("dout", "out"):
            call[x] = torch.zeros_like(call["q"])
        call["lse"] = call["q"].new_zeros(call["q"].shape[:3], dtype=torch.float32)
        call["dlse"] = None
    extra = {"fwd_plan": (0,), "bwd_plan": (False, 0)}.get(name, ())
    return getattr(torch.ops.flash_cute, name)(*call.values(), *extra)


def _assert_says(error: BaseException, words: tuple[str, ...]) -> None:
    sentence = str(error).splitlines()[0]
    missing = [word for word in words if not re.search(word, sentence)]
    assert not missing, f"{missing} not in: {sentence}"


@pytest.mark.parametrize("name", BAD)
def test_function(device: str, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    changes, words = BAD[name]
    call = _apply(_call(device), changes)
    capfd.readouterr()
    with pytest.raises(ValueError) as caught:
        _python(call)
    assert capfd.readouterr() == ("", ""), "an error printed something"
    _assert_says(caught.value, words)
    out, _ = _python(_call(device))
    assert out.isfinite().all()


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("name", BAD)
def test_operator(device: str, operator: str, name: str) -> None:
    changes, words = BAD[name]
    with pytest.raises(RAW_ERRORS) as caught:
        _operator(operator, _apply(_call(device), changes))
    _assert_says(caught.value, words)


@pytest.mark.parametrize("name", BAD_BACKWARD)
def test_backward(device: str, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    changes, words = BAD_BACKWARD[name]
    call = _apply(_backward_call(device), changes)
    capfd.readouterr()
    with pytest.raises(ValueError) as caught:
        _python_backward(call)
    assert capfd.readouterr() == ("", ""), "an error printed something"
    _assert_says(caught.value, words)
    for operator in ("bwd", "_bwd"):
        with pytest.raises(RAW_ERRORS) as raw:
            getattr(torch.ops.flash_cute, operator)(*call.values())
        assert str(raw.value).splitlines()[0] == str(caught.value).splitlines()[0]
    assert all(x.isfinite().all() for x in _python_backward(_backward_call(device)))


@pytest.mark.parametrize(
    "name",
    [
        *("q_rank", "all_int32", "scale_nan", "head_ratio", "causal", "backend"),
        *(x for x in BAD if x.startswith(("softcap", "window", "sinks", "slopes"))),
    ],
)
def test_backward_checks_what_the_forward_does(device: str, name: str) -> None:
    changes, words = BAD[name]
    with pytest.raises(ValueError) as caught:
        _python_backward(_apply(_backward_call(device), changes))
    _assert_says(caught.value, words)


def test_float64_wants_a_float64_lse() -> None:
    wide = {x: _as(x, torch.float64) for x in ("dout", "q", "k", "v", "out")}
    with pytest.raises(ValueError, match=r"lse: expected float64 for float64 inputs, got float32"):
        _python_backward(_apply(_backward_call("cpu"), wide))
    both = {x: _as(x, torch.float64) for x in ("lse", "dlse")}
    _python_backward(_apply(_backward_call("cpu"), {**wide, **both}))


@pytest.mark.parametrize("which", ["dout", "out", "lse", "dlse"])
@pytest.mark.parametrize("device", [CUDA])
def test_backward_devices_mixed(device: str, which: str) -> None:
    call = _backward_call(device)
    call[which] = call[which].cpu()
    with pytest.raises(ValueError) as caught:
        _python_backward(call)
    _assert_says(caught.value, (rf"\b{which}\b", "cuda:0", "cpu"))


@pytest.mark.parametrize("name", BAD)
def test_explain(device: str, name: str) -> None:
    changes, words = BAD[name]
    call = _apply(_call(device), changes)
    causal = False if call["causal"] == "none" else call["causal"]
    for backward in (False, True):
        with pytest.raises(ValueError) as caught:
            flash_cute.explain(call["q"], call["k"], call["v"], causal, backward=backward, **_options(call))
        _assert_says(caught.value, words)


def test_sentences_are_the_same_everywhere(device: str) -> None:
    """The checks stand once: the function, its operators and the plan say the same."""
    for changes, _ in BAD.values():
        said = set()
        for operator in OPERATORS:
            with pytest.raises(RAW_ERRORS) as caught:
                _operator(operator, _apply(_call(device), changes))
            said.add(str(caught.value).splitlines()[0])
        assert len(said) == 1, said


@pytest.mark.parametrize("requires_grad", [False, True])
def test_every_refusal_is_a_value_error(requires_grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the operator raises RuntimeError, as under torch 2.15; what failed later stays what it is."""
    dense = autograd.DENSE
    q = torch.zeros(1, 1, 4, 8, requires_grad=requires_grad)
    for sentence, expected in (
        ("flash_cute: q: expected 4 dims, got 3", ValueError),
        ("flash_cute: scale: expected a finite number above 0, got nan", ValueError),
        ("flash_cute: CUDA could not launch the kernel: cudaErrorX", RuntimeError),
        ("flash_cute: PyTorch could not allocate a tensor", RuntimeError),
        ("CUDA error: an illegal memory access", RuntimeError),
    ):

        def refuse(*args: Any, sentence: str = sentence) -> Any:
            raise RuntimeError(sentence)

        for operator in ("differentiable", "fwd_without_autograd"):
            monkeypatch.setattr(dense, operator, refuse)
        with pytest.raises(expected) as caught:
            flash_cute.fwd(q, q, q)
        assert str(caught.value) == sentence


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("device", [CUDA])
def test_wide_dtypes_on_cuda(device: str, dtype: torch.dtype) -> None:
    call = _apply(_call(device), {x: _as(x, dtype) for x in "qkv"})
    with pytest.raises(ValueError) as caught:
        _python(call)
    _assert_says(caught.value, (r"\bq\b", "float16", "bfloat16", str(dtype)[6:], "CUDA"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_plan_for_a_gpu_holds_cudas_rules(dtype: torch.dtype) -> None:
    call = _apply(_call("cpu"), {x: _as(x, dtype) for x in "qkv"})
    with pytest.raises(RAW_ERRORS) as caught:
        plan(call["q"], call["k"], call["v"], capability=80)
    _assert_says(caught.value, (r"\bq\b", "float16", str(dtype)[6:]))


@pytest.mark.parametrize("which", ["q", "k"])
def test_too_many_rows_for_a_gpu(which: str) -> None:
    """A tile further than the last row must not overflow 32 bits."""
    few, many = (torch.empty(1, 1, rows, 8, dtype=torch.half, device="meta") for rows in (4, 2**30 + 1))
    q, k = (many, few) if which == "q" else (few, many)
    with pytest.raises(RAW_ERRORS, match=rf"^flash_cute: {which}: expected at most 10\^9 rows on CUDA, got 1073741825"):
        torch.ops.flash_cute.fwd_plan(q, k, k, *score("none"), "auto", 80)


@pytest.mark.parametrize("scale", [1.01e18, 2.4e38, 1e39, 0.99e-18, 1e-39])
def test_scale_that_kernels_do_not_take(scale: float) -> None:
    q = torch.zeros(1, 1, 4, 64, dtype=torch.float16)
    sentence = r"^flash_cute: scale: expected a number (that float32 holds, got|from 1e-18 to 1e18 on CUDA, got)"
    with pytest.raises(RAW_ERRORS, match=sentence):
        torch.ops.flash_cute.fwd_plan(q, q, q, *score("none", scale=scale), "auto", 80)


def test_head_dim_above_1024_for_a_gpu() -> None:
    q = torch.zeros(1, 1, 4, 1032, dtype=torch.float16)
    with pytest.raises(RAW_ERRORS) as caught:
        plan(q, q, q, capability=80)
    _assert_says(caught.value, ("q", "head dim", "1024", "1032"))


def test_backward_of_a_head_dim_above_1024_for_a_gpu() -> None:
    q = torch.zeros(1, 1, 4, 1032, dtype=torch.float16)
    with pytest.raises(RAW_ERRORS) as caught:
        torch.ops.flash_cute.bwd_plan(q, q, q, *score("none"), "auto", False, 80)
    _assert_says(caught.value, ("q", "head dim", "1024", "1032"))


@pytest.mark.parametrize("device", [CUDA])
def test_head_dim_above_1024_on_cuda(device: str) -> None:
    q = torch.zeros(1, 1, 4, 1032, dtype=torch.float16, device=device)
    with pytest.raises(ValueError, match=r"1024.*1032"):
        flash_cute.fwd(q, q, q)
    with pytest.raises(ValueError, match=r"1024.*1032"):
        flash_cute.bwd(q, q, q, q, q, q[..., 0].float())


@pytest.mark.parametrize("capability", [50, 70, 75])
def test_gpu_too_old(capability: int) -> None:
    q = torch.zeros(1, 1, 4, 64, dtype=torch.float16)
    with pytest.raises(RAW_ERRORS) as caught:
        plan(q, q, q, capability=capability)
    major, minor = divmod(capability, 10)
    _assert_says(caught.value, (rf"{major}\.?{minor}", r"8\.?0"))


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("device", [CUDA])
def test_devices_mixed(device: str, which: str) -> None:
    for here, there in ((device, "cpu"), ("cpu", device)):
        call = _call(here)
        call[which] = call[which].to(there)
        with pytest.raises(ValueError) as caught:
            _python(call)
        _assert_says(caught.value, (rf"\b{which}\b|\bq\b|\bk\b", "cuda:0", "cpu"))


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_two_gpus_mixed(device: str) -> None:
    call = _call(device)
    call["k"] = call["k"].to("cuda:1")
    with pytest.raises(ValueError, match=r"\bk\b.*cuda:0.*cuda:1"):
        _python(call)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("name", BAD)
def test_nothing_is_allocated_or_launched(device: str, name: str) -> None:
    changes, _ = BAD[name]
    call = _apply(_call(device), changes)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with pytest.raises(ValueError):
        _python(call)
    for operator in ("fwd", "_fwd"):
        with pytest.raises(RAW_ERRORS):
            getattr(torch.ops.flash_cute, operator)(*call.values())
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    torch.cuda.synchronize()


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("name", BAD_BACKWARD)
def test_nothing_is_allocated_or_launched_backward(device: str, name: str) -> None:
    changes, _ = BAD_BACKWARD[name]
    call = _apply(_backward_call(device), changes)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with pytest.raises(ValueError):
        _python_backward(call)
    for operator in ("bwd", "_bwd"):
        with pytest.raises(RAW_ERRORS):
            getattr(torch.ops.flash_cute, operator)(*call.values())
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    torch.cuda.synchronize()
