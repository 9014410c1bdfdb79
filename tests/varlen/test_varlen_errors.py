"""What packed calls refuse: in the voice of the others, in every form of the call, before anything is read."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from packed import offsets, pack
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_cute
from flash_cute import report

# What the raw operators raise: torch 2.15 makes a RuntimeError of the ValueError that C++ throws.
RAW_ERRORS = (ValueError, RuntimeError)
Call = dict[str, Any]
FORWARDS = ("varlen_fwd", "_varlen_fwd", "varlen_fwd_plan", "check_varlen_fwd")
BACKWARDS = ("varlen_bwd", "_varlen_bwd", "check_varlen_bwd")
SCORE = ("window_left", "window_right", "softcap", "sinks", "alibi_slopes", "scale")


def _call() -> Call:
    """A good call: q (12, 4, 16), k and v (15, 2, 16), three sequences, float16."""
    packed = pack(((5, 7), (0, 3), (7, 5)), "cpu", torch.Generator().manual_seed(0), dtype=torch.float16, head_dim=16)
    lengths = {"cu_seqlens_q": packed.cu_seqlens_q, "cu_seqlens_k": packed.cu_seqlens_k}
    used = {"seqused_q": None, "seqused_k": None, "max_seqlen_q": None, "max_seqlen_k": None}
    tensors = dict(zip("qkv", packed.tensors, strict=True))
    return {**tensors, **lengths, **used, "causal": "none", **dict.fromkeys(SCORE), "backend": "auto"}


def _backward_call(changes: Call) -> Call:
    call = {**_call(), **changes}
    q, v = call["q"], call["v"]
    rows = {x: torch.zeros(q.shape[:2]).T.contiguous() if q.dim() == 3 else torch.zeros(4, 12) for x in ("lse", "dlse")}
    out = torch.zeros((*q.shape[:-1], v.shape[-1]) if q.dim() and v.dim() else (12, 4, 16)).to(q.dtype)
    backend = call.pop("backend")
    before = {"dout": out, **{x: call.pop(x) for x in "qkv"}, "out": out, **rows}
    return {**before, **call, "deterministic": False, "backend": backend} | {
        x: y for x, y in changes.items() if x in ("dout", "out", "lse", "dlse")
    }


def _operator(name: str, changes: Call) -> Any:
    call = _backward_call(changes) if "bwd" in name and "plan" not in name else {**_call(), **changes}
    extra = {"varlen_fwd_plan": (0,), "varlen_bwd_plan": (False, 0)}.get(name, ())
    return getattr(torch.ops.flash_cute, name)(*call.values(), *extra)


def _python(changes: Call) -> Any:
    call = {**_call(), **changes}
    causal = False if call["causal"] == "none" else call["causal"]
    positional = [call.pop(x) for x in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k")]
    left, right = call.pop("window_left"), call.pop("window_right")
    call |= {"window": None if left is None and right is None else (left, right), "causal": causal}
    call["backend"] = None if call["backend"] == "auto" else call["backend"]
    return flash_cute.varlen_fwd(*positional, **call)


def _said(call: Callable[[], Any]) -> str:
    with pytest.raises(RAW_ERRORS) as caught:
        call()
    return str(caught.value).splitlines()[0]


def _int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


GOOD = offsets((5, 0, 7))
# Name: what to replace in the good call, and what is said.
BAD: dict[str, tuple[Call, str]] = {
    "q_rank": (
        {"q": torch.zeros(1, 4, 12, 16).half()},
        "q: expected 3 dims (rows, heads, head_dim), got 4: (1, 4, 12, 16)",
    ),
    "k_rank": ({"k": torch.zeros(15, 16).half()}, "k: expected 3 dims (rows, heads, head_dim), got 2: (15, 16)"),
    "v_rank": ({"v": torch.zeros(()).half()}, "v: expected 3 dims (rows, heads, head_dim), got 0: ()"),
    "q_dtype": (
        {x: torch.zeros(12, 4, 16, dtype=torch.int32) for x in "qkv"},
        "q: expected float16, bfloat16, float32 or float64, got int32",
    ),
    "k_dtype": ({"k": torch.zeros(15, 2, 16)}, "k: expected q's dtype float16, got float32"),
    "k_head_dim": ({"k": torch.zeros(15, 2, 24).half()}, "k: expected q's head dim 16, got 24"),
    "head_dim_0": (
        {"q": torch.zeros(12, 4, 0).half(), "k": torch.zeros(15, 2, 0).half()},
        "q: expected a head dim of at least 1, got (12, 4, 0)",
    ),
    "v_head_dim_0": ({"v": torch.zeros(15, 2, 0).half()}, "v: expected a head dim of at least 1, got (15, 2, 0)"),
    "v_length": ({"v": torch.zeros(16, 2, 16).half()}, "v: expected k's length 15, got 16"),
    "v_heads": ({"v": torch.zeros(15, 1, 16).half()}, "v: expected as many heads as k, 2, got 1"),
    "heads": (
        {x: torch.zeros(15, 3, 16).half() for x in "kv"},
        "q: expected a number of heads that is a multiple of k's 3, got 4",
    ),
    "cu_q_dtype": ({"cu_seqlens_q": GOOD.long()}, "cu_seqlens_q: expected int32, got int64"),
    "cu_k_dtype": ({"cu_seqlens_k": GOOD.float()}, "cu_seqlens_k: expected int32, got float32"),
    "cu_q_rank": ({"cu_seqlens_q": GOOD[None]}, "cu_seqlens_q: expected the shape (sequences + 1,), got (1, 4)"),
    "cu_k_rank": ({"cu_seqlens_k": GOOD[0]}, "cu_seqlens_k: expected the shape (sequences + 1,), got ()"),
    "cu_q_empty": ({"cu_seqlens_q": GOOD[:0]}, "cu_seqlens_q: expected the shape (sequences + 1,), got (0,)"),
    "cu_q_strided": (
        {"cu_seqlens_q": GOOD.repeat_interleave(2)[::2]},
        "cu_seqlens_q: expected a contiguous tensor, got a stride of 2",
    ),
    "cu_k_size": ({"cu_seqlens_k": GOOD[:3]}, "cu_seqlens_k: expected as many offsets as cu_seqlens_q, 4, got 3"),
    "used_q_dtype": ({"seqused_q": _int32(1, 2, 3).long()}, "seqused_q: expected int32, got int64"),
    "used_k_size": (
        {"seqused_k": _int32(1, 2, 3, 4)},
        "seqused_k: expected the shape (3,), a number per sequence, got (4,)",
    ),
    "used_q_rank": (
        {"seqused_q": _int32(1, 2, 3)[None]},
        "seqused_q: expected the shape (3,), a number per sequence, got (1, 3)",
    ),
    "used_k_strided": (
        {"seqused_k": _int32(1, 2, 3, 4, 5)[::2]},
        "seqused_k: expected a contiguous tensor, got a stride of 2",
    ),
    "max_q": ({"max_seqlen_q": -1}, "max_seqlen_q: expected None or a number of at least 0, got -1"),
    "max_k": ({"max_seqlen_k": -7}, "max_seqlen_k: expected None or a number of at least 0, got -7"),
    "causal": ({"causal": "foo"}, "causal: expected False or 'none', True or 'bottom_right', or 'top_left', got 'foo'"),
    "scale": ({"scale": -1.0}, "scale: expected a finite number above 0, got -1"),
    "window": ({"window_left": -3}, "window_left: expected None (no limit) or a number of at least 0, got -3"),
    "softcap": ({"softcap": 0.0}, "softcap: expected None or a finite number above 0, got 0"),
    "sinks": (
        {"sinks": torch.zeros(2)},
        "sinks: expected the shape (4,), a number per query head, got (2,)",
    ),
    "slopes": (
        {"alibi_slopes": torch.zeros(2, 4)},
        "alibi_slopes: expected the shape (4,) or (3, 4), a slope per query head, got (2, 4)",
    ),
    "backend": ({"backend": "fast"}, "backend: expected 'auto', 'cpu', 'sm80' or 'sm90', got 'fast'"),
    "backend_sm90": ({"backend": "sm90"}, "backend: expected 'auto' or 'cpu' for CPU tensors, got 'sm90'"),
}
# The same of the backward's own arguments.
BAD_BACKWARD: dict[str, tuple[Call, str]] = {
    "dout_shape": ({"dout": torch.zeros(12, 4, 8).half()}, "dout: expected the shape (12, 4, 16), got (12, 4, 8)"),
    "dout_as_dense": (
        {"dout": torch.zeros(1, 4, 12, 16).half()},
        "dout: expected the shape (12, 4, 16), got (1, 4, 12, 16)",
    ),
    "dout_dtype": ({"dout": torch.zeros(12, 4, 16)}, "dout: expected q's dtype float16, got float32"),
    "out_rank": ({"out": torch.zeros(48, 16).half()}, "out: expected the shape (12, 4, 16), got (48, 16)"),
    "lse_order": ({"lse": torch.zeros(12, 4)}, "lse: expected the shape (4, 12), got (12, 4)"),
    "lse_rank": ({"lse": torch.zeros(1, 4, 12)}, "lse: expected the shape (4, 12), got (1, 4, 12)"),
    "lse_dtype": ({"lse": torch.zeros(4, 12).half()}, "lse: expected float32 for float16 inputs, got float16"),
    "dlse_shape": ({"dlse": torch.zeros(4, 11)}, "dlse: expected the shape (4, 12), got (4, 11)"),
}


def test_the_good_call() -> None:
    for operator in (*FORWARDS, *BACKWARDS, "varlen_bwd_plan"):
        _operator(operator, {})
    out, lse = _python({})
    assert out.isfinite().all() and lse.isfinite().any()


@pytest.mark.parametrize("name", BAD)
def test_refused(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    changes, sentence = BAD[name]
    with pytest.raises(ValueError, match="^" + re.escape(f"flash_cute: {sentence}")):
        _python(changes)
    assert capfd.readouterr() == ("", ""), "an error printed something"
    said = {_said(lambda operator=operator: _operator(operator, changes)) for operator in FORWARDS + BACKWARDS}
    assert said == {f"flash_cute: {sentence}"}


@pytest.mark.parametrize("name", BAD_BACKWARD)
def test_refused_backward(name: str) -> None:
    changes, sentence = BAD_BACKWARD[name]
    assert {_said(lambda x=x: _operator(x, changes)) for x in BACKWARDS} == {f"flash_cute: {sentence}"}
    call = _backward_call(changes)
    positional = [call[x] for x in ("dout", "q", "k", "v", "out", "lse", "cu_seqlens_q", "cu_seqlens_k")]
    with pytest.raises(ValueError, match="^" + re.escape(f"flash_cute: {sentence}")):
        flash_cute.varlen_bwd(*positional, dlse=call["dlse"])


def _moved(changes: Call, device: str) -> Call:
    """Tensors of the device, whose strides are kept, for all of a call."""
    return {
        name: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device) if torch.is_tensor(x) else x
        for name, x in changes.items()
    }


@pytest.mark.parametrize("name", [*BAD, *BAD_BACKWARD])
def test_fakes_refuse_in_the_same_words(name: str) -> None:
    """But for a backend, which is not one for the CPU then."""
    changes, sentence = (BAD | BAD_BACKWARD)[name]
    operators = ("varlen_bwd",) if name in BAD_BACKWARD else ("varlen_fwd", "_varlen_fwd", "varlen_bwd", "_varlen_bwd")
    for operator in operators:
        backward = "bwd" in operator
        call = _backward_call(changes) if backward else {**_call(), **changes}
        function = getattr(torch.ops.flash_cute, operator)
        if name != "backend_sm90":
            meta = _moved(call, "meta")
            assert _said(lambda f=function, c=meta: f(*c.values())) == f"flash_cute: {sentence}"
        with FakeTensorMode():
            fake = _moved(call, "cpu")
            assert _said(lambda f=function, c=fake: f(*c.values())) == f"flash_cute: {sentence}"


@pytest.mark.parametrize("which", ["k", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "sinks"])
def test_devices_mixed(which: str) -> None:
    """Offsets on the host beside tensors on a GPU, above all; with fakes, so that no GPU is needed."""
    with FakeTensorMode():
        call = _call() | {"seqused_q": _int32(1, 2, 3), "seqused_k": _int32(1, 2, 3), "sinks": torch.zeros(4)}
        on_cuda = _moved(call, "cuda")
        on_cuda[which] = call[which]
        said = _said(lambda: torch.ops.flash_cute.varlen_fwd(*on_cuda.values()))
    assert said == f"flash_cute: {which}: expected q's device cuda:0, got cpu"


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k", "seqused_q", "max_seqlen_k", "q"])
@pytest.mark.parametrize("given", ["text", [0, 5, 12], 1.5], ids=str)
def test_types(name: str, given: Any) -> None:
    if name == "max_seqlen_k" and given == [0, 5, 12]:
        given = torch.zeros(3)
    with pytest.raises(ValueError, match=rf"^flash_cute: {name}: expected (None or a number of rows|a torch.Tensor)"):
        _python({name: given})


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
@pytest.mark.parametrize("given", [2**63, -(2**70)])
def test_hints_beyond_64_bits(name: str, given: int) -> None:
    with pytest.raises(ValueError, match=rf"^flash_cute: {name}: expected None or a number of rows, got {given}$"):
        _python({name: given})


@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
@pytest.mark.parametrize("given", [True, False, torch.tensor(True), torch.tensor(5), torch.tensor(5, device="meta")])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_hints_that_are_no_numbers(name: str, given: Any, requires_grad: bool) -> None:
    """A tensor is not read, wherever it is: on a GPU that would wait."""
    why = "torch.Tensor, whose value a call does not wait for" if isinstance(given, torch.Tensor) else given
    q = torch.zeros(12, 4, 8, requires_grad=requires_grad)
    call = {"cu_seqlens_q": GOOD, "cu_seqlens_k": GOOD, name: given}
    backward = (q.detach(), q, q, q, q.detach(), torch.zeros(4, 12))
    calls: tuple[Callable[[], Any], ...] = (
        lambda: flash_cute.varlen_attention(q, q, q, **call),
        lambda: flash_cute.varlen_fwd(q, q, q, **call),
        lambda: flash_cute.varlen_bwd(*backward, **call),
        lambda: flash_cute.explain(q, q, q, **call),
    )
    for function in calls:
        with pytest.raises(ValueError, match=rf"^flash_cute: {name}: expected None or a number of rows, got {why}$"):
            function()


def test_sparse_offsets() -> None:
    with pytest.raises(ValueError, match=r"^flash_cute: cu_seqlens_q: expected a strided tensor, got a sparse"):
        _python({"cu_seqlens_q": GOOD.to_sparse()})


def test_explain_refuses_as_the_call_does() -> None:
    for name in ("q_rank", "cu_q_dtype", "cu_k_size", "used_k_size", "max_q"):
        changes, sentence = BAD[name]
        call = {**_call(), **changes}
        names = ("q", "k", "v", *(x for x in call if "seq" in x))
        for backward in (False, True):
            with pytest.raises(ValueError, match="^" + re.escape(f"flash_cute: {sentence}")):
                flash_cute.explain(**{x: call[x] for x in names}, backward=backward)


def test_one_side_of_offsets_alone() -> None:
    call = _call()
    with pytest.raises(ValueError, match=r"^flash_cute: cu_seqlens_k: expected a torch.Tensor, got None"):
        flash_cute.explain(call["q"], call["k"], call["v"], cu_seqlens_q=call["cu_seqlens_q"])


@pytest.mark.skipif(not report.load()["kernels"], reason="this build has no CUDA kernels")
@pytest.mark.parametrize("backward", [False, True])
def test_a_plan_for_a_gpu(backward: bool) -> None:
    call = _call()
    names = ("q", "k", "v", *(x for x in call if "seq" in x))
    given = {x: call[x] for x in names} | {"capability": 90, "backward": backward}
    given |= {x: given[x].half() for x in "qkv"}
    assert flash_cute.explain(**given, backend="sm90").data["backend"] == "sm90"
    assert flash_cute.explain(**{**given, "capability": 80}).data["backend"] == "sm80"
    with pytest.raises(ValueError, match="cu_seqlens_q: expected int32, got int64"):
        flash_cute.explain(**{**given, "cu_seqlens_q": GOOD.long()})


@pytest.mark.cuda
def test_nothing_waits_for_the_device_in_a_check() -> None:
    def on_the_gpu(arguments: dict[str, Any]) -> dict[str, Any]:
        return {x: y.cuda() if torch.is_tensor(y) else y for x, y in arguments.items()}

    call = on_the_gpu(_call())
    # The backend is good there, and what was strided is not any more.
    good = ("backend_sm90", "cu_q_strided", "used_k_strided")
    bad_on_a_gpu = [changes for name, (changes, _) in BAD.items() if name not in good]
    bad_calls = [call | on_the_gpu(changes) for changes in bad_on_a_gpu]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.ops.flash_cute.check_varlen_fwd(*call.values())
        for bad in bad_calls:
            with pytest.raises(RAW_ERRORS):
                torch.ops.flash_cute.check_varlen_fwd(*bad.values())
    finally:
        torch.cuda.set_sync_debug_mode("default")
