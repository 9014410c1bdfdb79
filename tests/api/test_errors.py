"""A call that cannot be served says which argument, what was expected and what was given; nothing else happens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bad_calls import (
    BAD,
    BAD_BACKWARD,
    CUDA,
    OPERATORS,
    RAW_ERRORS,
    applied,
    assert_says,
    converted,
    good_backward_call,
    good_call,
    operator_call,
    options_of,
    public_backward,
    public_call,
)
from cases import plan, score

import flash_cute
from flash_cute import autograd


@pytest.mark.parametrize("name", BAD)
def test_function(device: str, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    changes, words = BAD[name]
    call = applied(good_call(device), changes)
    capfd.readouterr()
    with pytest.raises(ValueError) as caught:
        public_call(call)
    assert capfd.readouterr() == ("", ""), "an error printed something"
    assert_says(caught.value, words)
    out, _ = public_call(good_call(device))
    assert out.isfinite().all()


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("name", BAD)
def test_operator(device: str, operator: str, name: str) -> None:
    changes, words = BAD[name]
    with pytest.raises(RAW_ERRORS) as caught:
        operator_call(operator, applied(good_call(device), changes))
    assert_says(caught.value, words)


@pytest.mark.parametrize("name", BAD_BACKWARD)
def test_backward(device: str, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    changes, words = BAD_BACKWARD[name]
    call = applied(good_backward_call(device), changes)
    capfd.readouterr()
    with pytest.raises(ValueError) as caught:
        public_backward(call)
    assert capfd.readouterr() == ("", ""), "an error printed something"
    assert_says(caught.value, words)
    for operator in ("bwd", "_bwd"):
        with pytest.raises(RAW_ERRORS) as raw:
            getattr(torch.ops.flash_cute, operator)(*call.values())
        assert str(raw.value).splitlines()[0] == str(caught.value).splitlines()[0]
    assert all(x.isfinite().all() for x in public_backward(good_backward_call(device)))


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
        public_backward(applied(good_backward_call(device), changes))
    assert_says(caught.value, words)


def test_float64_wants_a_float64_lse() -> None:
    wide = {x: converted(x, torch.float64) for x in ("dout", "q", "k", "v", "out")}
    with pytest.raises(ValueError, match=r"lse: expected float64 for float64 inputs, got float32"):
        public_backward(applied(good_backward_call("cpu"), wide))
    both = {x: converted(x, torch.float64) for x in ("lse", "dlse")}
    public_backward(applied(good_backward_call("cpu"), {**wide, **both}))


@pytest.mark.parametrize("which", ["dout", "out", "lse", "dlse"])
@pytest.mark.parametrize("device", [CUDA])
def test_backward_devices_mixed(device: str, which: str) -> None:
    call = good_backward_call(device)
    call[which] = call[which].cpu()
    with pytest.raises(ValueError) as caught:
        public_backward(call)
    assert_says(caught.value, (rf"\b{which}\b", "cuda:0", "cpu"))


@pytest.mark.parametrize("name", BAD)
def test_explain(device: str, name: str) -> None:
    changes, words = BAD[name]
    call = applied(good_call(device), changes)
    causal = False if call["causal"] == "none" else call["causal"]
    for backward in (False, True):
        with pytest.raises(ValueError) as caught:
            flash_cute.explain(call["q"], call["k"], call["v"], causal, backward=backward, **options_of(call))
        assert_says(caught.value, words)


def test_sentences_are_the_same_everywhere(device: str) -> None:
    """The checks stand once: the function, its operators and the plan say the same."""
    for changes, _ in BAD.values():
        said = set()
        for operator in OPERATORS:
            with pytest.raises(RAW_ERRORS) as caught:
                operator_call(operator, applied(good_call(device), changes))
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
    call = applied(good_call(device), {x: converted(x, dtype) for x in "qkv"})
    with pytest.raises(ValueError) as caught:
        public_call(call)
    assert_says(caught.value, (r"\bq\b", "float16", "bfloat16", str(dtype)[6:], "CUDA"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_plan_for_a_gpu_holds_cudas_rules(dtype: torch.dtype) -> None:
    call = applied(good_call("cpu"), {x: converted(x, dtype) for x in "qkv"})
    with pytest.raises(RAW_ERRORS) as caught:
        plan(call["q"], call["k"], call["v"], capability=80)
    assert_says(caught.value, (r"\bq\b", "float16", str(dtype)[6:]))


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
    assert_says(caught.value, ("q", "head dim", "1024", "1032"))


def test_backward_of_a_head_dim_above_1024_for_a_gpu() -> None:
    q = torch.zeros(1, 1, 4, 1032, dtype=torch.float16)
    with pytest.raises(RAW_ERRORS) as caught:
        torch.ops.flash_cute.bwd_plan(q, q, q, *score("none"), "auto", False, 80)
    assert_says(caught.value, ("q", "head dim", "1024", "1032"))


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
    assert_says(caught.value, (rf"{major}\.?{minor}", r"8\.?0"))


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("device", [CUDA])
def test_devices_mixed(device: str, which: str) -> None:
    for here, there in ((device, "cpu"), ("cpu", device)):
        call = good_call(here)
        call[which] = call[which].to(there)
        with pytest.raises(ValueError) as caught:
            public_call(call)
        assert_says(caught.value, (rf"\b{which}\b|\bq\b|\bk\b", "cuda:0", "cpu"))


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_two_gpus_mixed(device: str) -> None:
    call = good_call(device)
    call["k"] = call["k"].to("cuda:1")
    with pytest.raises(ValueError, match=r"\bk\b.*cuda:0.*cuda:1"):
        public_call(call)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("name", BAD)
def test_nothing_is_allocated_or_launched(device: str, name: str) -> None:
    changes, _ = BAD[name]
    call = applied(good_call(device), changes)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with pytest.raises(ValueError):
        public_call(call)
    for operator in ("fwd", "_fwd"):
        with pytest.raises(RAW_ERRORS):
            getattr(torch.ops.flash_cute, operator)(*call.values())
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    torch.cuda.synchronize()


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("name", BAD_BACKWARD)
def test_nothing_is_allocated_or_launched_backward(device: str, name: str) -> None:
    changes, _ = BAD_BACKWARD[name]
    call = applied(good_backward_call(device), changes)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with pytest.raises(ValueError):
        public_backward(call)
    for operator in ("bwd", "_bwd"):
        with pytest.raises(RAW_ERRORS):
            getattr(torch.ops.flash_cute, operator)(*call.values())
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    torch.cuda.synchronize()
