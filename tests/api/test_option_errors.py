"""What is refused of a window, softcap, sinks, slopes and a head dim of v's own, beyond the table of test_errors.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bad_calls import (
    CUDA,
    RAW_ERRORS,
    applied,
    assert_says,
    good_backward_call,
    good_call,
    new,
    options_of,
    public_backward,
    public_call,
    resized,
)
from cases import score

import flash_cute
from flash_cute import report


def test_out_and_dout_have_the_head_dim_of_v() -> None:
    call = good_backward_call("cpu")
    call["v"] = call["v"].new_zeros(2, 2, 7, 24)
    like_out = call["q"].new_zeros(2, 4, 5, 24)
    for which in ("dout", "out"):
        sentence = rf"^flash_cute: {which}: expected the shape \(2, 4, 5, 24\), got \(2, 4, 5, 16\)"
        with pytest.raises(ValueError, match=sentence):
            public_backward({**call, "dout": like_out, "out": like_out, which: call["q"]})
    assert public_backward({**call, "dout": like_out, "out": like_out})[2].shape == (2, 2, 7, 24)


@pytest.mark.parametrize("which", ["sinks", "alibi_slopes"])
@pytest.mark.parametrize("device", [CUDA])
def test_options_on_another_device(device: str, which: str) -> None:
    call = good_call(device)
    call[which] = torch.zeros(4)
    with pytest.raises(ValueError) as caught:
        public_call(call)
    assert_says(caught.value, (which, "q's device cuda:0", "got cpu"))


@pytest.mark.parametrize("which", ["sinks", "alibi_slopes"])
def test_options_on_the_meta_device(which: str) -> None:
    call = {**good_call("cpu"), which: torch.zeros(4, device="meta")}
    with pytest.raises(RAW_ERRORS, match=rf"^flash_cute: {which}: expected q's device cpu, got meta"):
        torch.ops.flash_cute.check_fwd(*call.values())


OPTIONS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": new(4)},
    "alibi_slopes": {"alibi_slopes": new(4)},
    "head_dim_v": {"v": resized("v", 2, 2, 7, 24)},
}


@pytest.mark.skipif(not report.load()["kernels"], reason="this build has no CUDA kernels")
@pytest.mark.parametrize("name", OPTIONS)
def test_every_backend_serves_the_options(name: str) -> None:
    call = applied(good_call("cpu"), OPTIONS[name])
    for capability, backend in ((80, "sm80"), (86, "sm80"), (90, "sm80"), (90, "sm90")):
        options = {**options_of(call), "backend": backend if capability == 90 else None}
        for backward in (False, True):
            tensors = (call["q"], call["k"], call["v"])
            plan = flash_cute.explain(*tensors, **options, capability=capability, backward=backward)
            assert plan.data["backend"] == backend


@pytest.mark.skipif(not report.load()["kernels"], reason="this build has no CUDA kernels")
def test_sm80_pads_a_head_dim_of_v_in_the_backward() -> None:
    q, v = (torch.zeros(1, 1, 4, head_dim, dtype=torch.float16) for head_dim in (64, 36))
    copies = flash_cute.explain(q, q, v, capability=80, backward=True).data["copies"]
    assert {x for x, why in copies.items() if why} == {"v", "out", "dout", "dv"}
    assert copies["dv"] == "head dim 36 is padded to 64, that of the others"
    copies = flash_cute.explain(v, v, q, capability=80, backward=True).data["copies"]
    assert {x for x, why in copies.items() if why} == {"q", "k", "dq", "dk"}


@pytest.mark.parametrize("softcap", [1.01e7, 3e38, 1e39, 0.99e-18, 1e-39])
def test_softcap_that_kernels_do_not_take(softcap: float) -> None:
    q = torch.zeros(1, 1, 4, 64, dtype=torch.float16)
    sentence = "^flash_cute: softcap: expected (a number that float32 holds|None or a number from 1e-18 to 1e7 on CUDA)"
    with pytest.raises(RAW_ERRORS, match=sentence):
        torch.ops.flash_cute.fwd_plan(q, q, q, *score(softcap=softcap), "auto", 80)


def test_head_dim_of_v_above_1024_for_a_gpu() -> None:
    q, v = (torch.zeros(1, 1, 4, head_dim, dtype=torch.float16) for head_dim in (64, 1032))
    with pytest.raises(RAW_ERRORS, match=r"^flash_cute: v: expected a head dim of at most 1024 on CUDA, got 1032"):
        torch.ops.flash_cute.fwd_plan(q, q, v, *score(), "auto", 80)


@pytest.mark.parametrize("option", ["scale", "softcap"])
@pytest.mark.parametrize("value", [1e300, 3.5e38, 1e-39, 1e-300])
def test_factor_that_float32_does_not_hold(option: str, value: float) -> None:
    """The CPU computes in float32, too, but for float64 tensors."""
    for call, function in ((good_call("cpu"), public_call), (good_backward_call("cpu"), public_backward)):
        with pytest.raises(ValueError, match=rf"^flash_cute: {option}: expected a number that float32 holds, got "):
            function({**call, option: value})
    wide = {x: good_call("cpu")[x].double() for x in "qkv"}
    assert flash_cute.attention(**wide, **{option: value}).dtype == torch.float64


def test_most_sequences() -> None:
    """Some more would overflow 32 bits; seen by the fakes and by the operators."""
    q = torch.empty(4, 2, 64, dtype=torch.half, device="meta")
    for count, refused in ((10**9, False), (10**9 + 1, True), (2**31 - 3, True)):
        offsets = torch.empty(count + 1, dtype=torch.int32, device="meta")
        if not refused:
            assert flash_cute.varlen_attention(q, q, q, offsets, offsets).shape == q.shape
            continue
        sentence = rf"^flash_cute: cu_seqlens_q: expected at most 10\^9 sequences, got {count}$"
        with pytest.raises(ValueError, match=sentence):
            flash_cute.varlen_attention(q, q, q, offsets, offsets)
        with pytest.raises(ValueError, match=sentence):
            flash_cute.explain(q, q, q, cu_seqlens_q=offsets, cu_seqlens_k=offsets, capability=80)
