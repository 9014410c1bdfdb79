"""Calls that cannot be served: what is wrong with each, what its sentence must hold, and the ways to make it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Case

import flash_cute

# What the raw operators raise: torch 2.15 makes a RuntimeError of the ValueError that C++ throws.
RAW_ERRORS = (ValueError, RuntimeError)
CUDA = pytest.param("cuda", marks=pytest.mark.cuda)
Call = dict[str, Any]
# The arguments of an operator that stand between its tensors and `backend`.
PLAIN = dict.fromkeys(("window_left", "window_right", "softcap", "sinks", "alibi_slopes", "scale"))


def good_call(device: str) -> Call:
    """A good call: q (2, 4, 5, 16), k and v (2, 2, 7, 16), float16."""
    q, k, v = Case(16, 5, 7, heads_q=4).inputs(device, torch.Generator().manual_seed(0))
    return {"q": q, "k": k, "v": v, "causal": "none", **PLAIN, "backend": "auto"}


def resized(name: str, *shape: int) -> Callable[[Call], Any]:
    return lambda call: call[name].new_zeros(shape)


def converted(name: str, dtype: torch.dtype) -> Callable[[Call], Any]:
    return lambda call: call[name].to(dtype)


def new(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[Call], Any]:
    """A tensor on q's device."""
    return lambda call: torch.zeros(shape, dtype=dtype, device=call["q"].device)


# Name: what to replace in the good call, and what the sentence must hold.
BAD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "q_rank": ({"q": resized("q", 4, 5, 16)}, (r"\bq\b", "4", "3")),
    "k_rank": ({"k": resized("k", 1, 2, 2, 7, 16)}, (r"\bk\b", "4", "5")),
    "v_rank": ({"v": resized("v", 16)}, (r"\bv\b", "4", "1")),
    "q_scalar": ({"q": resized("q")}, (r"\bq\b", "4", "0")),
    "all_int32": (
        {x: converted(x, torch.int32) for x in "qkv"},
        (r"\bq\b", "float16", "bfloat16", "int32"),
    ),
    "all_bool": ({x: converted(x, torch.bool) for x in "qkv"}, (r"\bq\b", "float16", "bool")),
    "all_complex": (
        {x: converted(x, torch.complex64) for x in "qkv"},
        (r"\bq\b", "float16", "complex64"),
    ),
    "k_dtype": ({"k": converted("k", torch.float32)}, (r"\bk\b", "float16", "float32")),
    "k_float8": ({"k": converted("k", torch.float8_e4m3fn)}, (r"\bk\b", "float16", "float8_e4m3fn")),
    "v_dtype": ({"v": converted("v", torch.bfloat16)}, (r"\bv\b", "float16", "bfloat16")),
    "k_batch": ({"k": resized("k", 3, 2, 7, 16)}, (r"\bk\b", "batch", "2", "3")),
    "v_batch": ({"v": resized("v", 1, 2, 7, 16)}, (r"\bv\b", "batch", "2", "1")),
    "k_head_dim": ({"k": resized("k", 2, 2, 7, 24)}, (r"\bk\b", "head dim", "16", "24")),
    "v_head_dim_0": ({"v": resized("v", 2, 2, 7, 0)}, (r"\bv\b", "head dim", "at least 1", r"\(2, 2, 7, 0\)")),
    "v_length": ({"v": resized("v", 2, 2, 8, 16)}, (r"\bv\b", "length", "7", "8")),
    "v_heads": ({"v": resized("v", 2, 4, 7, 16)}, (r"\bv\b", "heads", "2", "4")),
    "head_ratio": (
        {x: resized(x, 2, 3, 7, 16) for x in "kv"},
        (r"\bq\b", "heads", "multiple", "3", "4"),
    ),
    "more_key_heads": ({x: resized(x, 2, 8, 7, 16) for x in "kv"}, ("heads", "8", "4")),
    "no_key_heads": ({x: resized(x, 2, 0, 7, 16) for x in "kv"}, ("heads", "0", "4")),
    "head_dim_0": (
        {"q": resized("q", 2, 4, 5, 0), **{x: resized(x, 2, 2, 7, 0) for x in "kv"}},
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
    "sinks_dtype": ({"sinks": new(4, dtype=torch.bfloat16)}, ("sinks", "float32 or q's dtype float16", "bfloat16")),
    "sinks_double": ({"sinks": new(4, dtype=torch.float64)}, ("sinks", "float32 or q's dtype float16", "float64")),
    "sinks_length": ({"sinks": new(2)}, ("sinks", r"\(4,\), a number per query head", r"got \(2,\)")),
    "sinks_rank": ({"sinks": new(2, 4)}, ("sinks", r"\(4,\)", r"got \(2, 4\)")),
    "sinks_scalar": ({"sinks": new()}, ("sinks", r"\(4,\)", r"got \(\)")),
    "slopes_dtype": ({"alibi_slopes": new(4, dtype=torch.float16)}, ("alibi_slopes", "float32", "float16")),
    "slopes_length": (
        {"alibi_slopes": new(2)},
        ("alibi_slopes", r"\(4,\) or \(2, 4\), a slope per query head", r"got \(2,\)"),
    ),
    "slopes_batch": ({"alibi_slopes": new(1, 4)}, ("alibi_slopes", r"\(2, 4\)", r"got \(1, 4\)")),
    "slopes_heads": ({"alibi_slopes": new(2, 2)}, ("alibi_slopes", r"\(2, 4\)", r"got \(2, 2\)")),
    "slopes_rank": ({"alibi_slopes": new(2, 4, 1)}, ("alibi_slopes", r"\(2, 4\)", r"got \(2, 4, 1\)")),
    "causal": ({"causal": "diagonal"}, ("causal", "top_left", "bottom_right", "diagonal")),
    "causal_empty": ({"causal": ""}, ("causal", "top_left", "bottom_right")),
    "backend": ({"backend": "fast"}, ("backend", "sm80", "cpu", "fast")),
}

OPERATORS = ("fwd", "_fwd", "fwd_plan", "bwd", "_bwd", "bwd_plan")

# The same of the backward's own arguments, which are like q (2, 4, 5, 16) and its rows.
BAD_BACKWARD: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "dout_rank": ({"dout": resized("dout", 4, 5, 16)}, (r"\bdout\b", r"\(2, 4, 5, 16\)", r"\(4, 5, 16\)")),
    "dout_shape": ({"dout": resized("dout", 2, 4, 5, 24)}, (r"\bdout\b", r"\(2, 4, 5, 16\)", r"\(2, 4, 5, 24\)")),
    "dout_dtype": ({"dout": converted("dout", torch.bfloat16)}, (r"\bdout\b", "float16", "bfloat16")),
    "out_shape": ({"out": resized("out", 2, 4, 6, 16)}, (r"\bout\b", r"\(2, 4, 5, 16\)", r"\(2, 4, 6, 16\)")),
    "out_dtype": ({"out": converted("out", torch.float32)}, (r"\bout\b", "float16", "float32")),
    "lse_rank": ({"lse": resized("lse", 2, 4, 5, 1)}, (r"\blse\b", r"\(2, 4, 5\)", r"\(2, 4, 5, 1\)")),
    "lse_shape": ({"lse": resized("lse", 2, 5, 4)}, (r"\blse\b", r"\(2, 4, 5\)", r"\(2, 5, 4\)")),
    "lse_dtype": ({"lse": converted("lse", torch.float16)}, (r"\blse\b", "float32", "float16")),
    "dlse_shape": ({"dlse": resized("dlse", 2, 4, 1)}, (r"\bdlse\b", r"\(2, 4, 5\)", r"\(2, 4, 1\)")),
    "dlse_dtype": ({"dlse": converted("dlse", torch.float64)}, (r"\bdlse\b", "float32", "float64")),
}


def applied(call: Call, changes: dict[str, Any]) -> Call:
    made = {name: f(call) if callable(f) else f for name, f in changes.items()}
    return {**call, **made}


def options_of(call: Call) -> dict[str, Any]:
    """The options of a call as the public functions take them."""
    sides = (call["window_left"], call["window_right"])
    names = ("softcap", "sinks", "alibi_slopes", "scale", "backend")
    return {"window": None if sides == (None, None) else sides, **{x: call[x] for x in names}}


def public_call(call: Call) -> Any:
    causal = False if call["causal"] == "none" else call["causal"]
    return flash_cute.fwd(call["q"], call["k"], call["v"], causal, **options_of(call))


def good_backward_call(device: str) -> Call:
    """A good call of the backward of `good_call`."""
    call = good_call(device)
    rows = torch.zeros(2, 4, 5, device=device)
    like_q = torch.zeros_like(call["q"])
    tensors = {"dout": like_q, "q": call["q"], "k": call["k"], "v": call["v"], "out": like_q, "lse": rows, "dlse": rows}
    return {**tensors, "causal": "none", **PLAIN, "deterministic": False, "backend": "auto"}


def public_backward(call: Call) -> Any:
    causal = False if call["causal"] == "none" else call["causal"]
    tensors = [call[x] for x in ("dout", "q", "k", "v", "out", "lse")]
    given = {x: call[x] for x in ("dlse", "deterministic")}
    return flash_cute.bwd(*tensors, causal, **given, **options_of(call))


def operator_call(name: str, call: Call) -> Any:
    """A call of an operator for what is wrong with q, k, v, mask, scale or backend."""
    if name in ("bwd", "_bwd"):
        call = {**good_backward_call("cpu"), **call}
        for x in ("dout", "out"):
            call[x] = torch.zeros_like(call["q"])
        call["lse"] = call["q"].new_zeros(call["q"].shape[:3], dtype=torch.float32)
        call["dlse"] = None
    extra = {"fwd_plan": (0,), "bwd_plan": (False, 0)}.get(name, ())
    return getattr(torch.ops.flash_cute, name)(*call.values(), *extra)


def assert_says(error: BaseException, words: tuple[str, ...]) -> None:
    sentence = str(error).splitlines()[0]
    missing = [word for word in words if not re.search(word, sentence)]
    assert not missing, f"{missing} not in: {sentence}"
