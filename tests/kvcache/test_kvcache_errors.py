"""What calls over caches refuse: in the voice of the others, in every form of the call, before anything is read."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bad_caches import (
    BAD,
    BAD_APPENDS,
    BAD_CACHES,
    E4M3,
    FLOAT8,
    ONE_PAGE,
    PACKED,
    Call,
    append_call,
    good_call,
    half,
    int32,
)
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_cute

# What the raw operators raise: torch 2.15 makes a RuntimeError of the ValueError that C++ throws.
RAW_ERRORS = (ValueError, RuntimeError)
FORWARDS = ("kvcache_fwd", "_kvcache_fwd", "kvcache_plan", "check_kvcache_fwd", "kvcache_fwd_out", "_kvcache_fwd_out")
APPENDS = ("kvcache_append", "_kvcache_append", "check_kvcache_append")


def _results(call: Call) -> tuple[torch.Tensor, ...]:
    q, v_cache = call["q"], call["v_cache"]
    head_dim = v_cache.shape[-1] if v_cache.dim() else 16
    rows = (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (1,)
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    shape = (*q.shape[:-1], head_dim) if q.dim() else (1,)
    return torch.zeros(shape, dtype=q.dtype, device=q.device), torch.zeros(rows, dtype=lse_dtype, device=q.device)


def _operator(name: str, changes: Call, results: tuple[torch.Tensor, ...] | None = None) -> Any:
    function = getattr(torch.ops.flash_cute, name)
    if "append" in name:
        return function(*append_call(changes).values())
    call = {**good_call(), **changes}
    extra: tuple[Any, ...] = (0,) if "plan" in name else ()
    if "out" in name:
        extra = _results(call) if results is None else results
    return function(*call.values(), *extra)


def _python(changes: Call, **more: Any) -> Any:
    call = {**good_call(), **changes}
    new_keys = call.pop("new_keys")
    left, right = call.pop("window_left"), call.pop("window_right")
    call |= {"window": None if left is None and right is None else (left, right)}
    call["backend"] = None if call["backend"] == "auto" else call["backend"]
    if new_keys:
        more |= dict.fromkeys("kv", half(3, 2, 2, 16))
    return flash_cute.attention_with_kvcache(**call, **more)


def _python_append(changes: Call) -> None:
    flash_cute.append_kvcache(**append_call(changes))


def _said(call: Callable[[], Any]) -> str:
    with pytest.raises(RAW_ERRORS) as caught:
        call()
    return str(caught.value).splitlines()[0]


def test_the_good_calls() -> None:
    for changes in ({}, PACKED, ONE_PAGE, FLOAT8, {"page_table": torch.zeros(3, 0, dtype=torch.int32)}):
        for operator in FORWARDS:
            _operator(operator, changes)
        out, lse = _python(changes, return_lse=True)
        assert out.isfinite().all() and not lse.isnan().any()
    for changes in ({}, ONE_PAGE, FLOAT8):
        for operator in APPENDS:
            _operator(operator, changes)
        _python_append(changes)


@pytest.mark.parametrize("name", [*BAD, *BAD_CACHES])
def test_refused(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    changes, sentence = (BAD | BAD_CACHES)[name]
    with pytest.raises(ValueError, match="^" + re.escape(f"flash_cute: {sentence}") + "$"):
        _python(changes)
    assert capfd.readouterr() == ("", ""), "an error printed something"
    said = {_said(lambda operator=operator: _operator(operator, changes)) for operator in FORWARDS}
    assert said == {f"flash_cute: {sentence}"}


@pytest.mark.parametrize("name", [*BAD_APPENDS, *BAD_CACHES])
def test_append_refused(name: str) -> None:
    changes, sentence = (BAD_APPENDS | BAD_CACHES)[name]
    with pytest.raises(ValueError, match="^" + re.escape(f"flash_cute: {sentence}") + "$"):
        _python_append(changes)
    assert {_said(lambda x=x: _operator(x, changes)) for x in APPENDS} == {f"flash_cute: {sentence}"}


BAD_RESULTS: dict[str, tuple[tuple[torch.Tensor, ...], str]] = {
    "shape": ((half(3, 2, 4, 8), torch.zeros(3, 4, 2)), "out: expected the shape (3, 2, 4, 16), got (3, 2, 4, 8)"),
    "rank": ((half(6, 4, 16), torch.zeros(3, 4, 2)), "out: expected the shape (3, 2, 4, 16), got (6, 4, 16)"),
    "dtype": ((torch.zeros(3, 2, 4, 16), torch.zeros(3, 4, 2)), "out: expected q's dtype float16, got float32"),
    "last_dim": (
        (half(3, 2, 16, 4).transpose(2, 3), torch.zeros(3, 4, 2)),
        "out: expected a contiguous last dim, got a stride of 4",
    ),
    "overlap": (
        (half(3, 1, 4, 16).expand(3, 2, 4, 16), torch.zeros(3, 4, 2)),
        "out: expected elements that do not overlap, got a stride of 0",
    ),
    "lse_shape": ((half(3, 2, 4, 16), torch.zeros(3, 2, 4)), "lse: expected the shape (3, 4, 2), got (3, 2, 4)"),
    "lse_dtype": (
        (half(3, 2, 4, 16), torch.zeros(3, 4, 2).half()),
        "lse: expected float32 for float16 inputs, got float16",
    ),
    "lse_strides": (
        (half(3, 2, 4, 16), torch.zeros(3, 2, 4).transpose(1, 2)),
        "lse: expected a contiguous tensor, got a stride of 4",
    ),
}


@pytest.mark.parametrize("name", BAD_RESULTS)
def test_results_refused(name: str) -> None:
    results, sentence = BAD_RESULTS[name]
    for operator in ("kvcache_fwd_out", "_kvcache_fwd_out"):
        assert _said(lambda x=operator: _operator(x, {}, results)) == f"flash_cute: {sentence}"
    if not name.startswith("lse"):
        with pytest.raises(ValueError, match="^" + re.escape(f"flash_cute: {sentence}")):
            _python({}, out=results[0])
    with FakeTensorMode():
        call, fakes = _moved(good_call(), "cpu"), _moved(dict(enumerate(results)), "cpu")  # type: ignore[arg-type]
        said = _said(lambda: torch.ops.flash_cute.kvcache_fwd_out(*call.values(), *fakes.values()))
    assert said == f"flash_cute: {sentence}"


def _moved(call: Call, device: str) -> Call:
    """Tensors of the device, whose strides are kept, for all of a call."""
    return {
        name: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device) if torch.is_tensor(x) else x
        for name, x in call.items()
    }


@pytest.mark.parametrize("name", [*BAD, *BAD_CACHES, *BAD_APPENDS])
def test_fakes_refuse_in_the_same_words(name: str) -> None:
    """But for a backend, which is not one for the CPU then."""
    changes, sentence = (BAD | BAD_CACHES | BAD_APPENDS)[name]
    operator = "kvcache_append" if name in BAD_APPENDS else "kvcache_fwd"
    call = append_call(changes) if name in BAD_APPENDS else {**good_call(), **changes}
    function = getattr(torch.ops.flash_cute, operator)
    if name != "backend_sm90":
        meta = _moved(call, "meta")
        assert _said(lambda: function(*meta.values())) == f"flash_cute: {sentence}"
    with FakeTensorMode():
        fake = _moved(call, "cpu")
        assert _said(lambda: function(*fake.values())) == f"flash_cute: {sentence}"


ON_CUDA: dict[str, tuple[Call, str]] = {
    "float32": (
        {x: torch.zeros(good_call()[x].shape) for x in ("q", "k_cache", "v_cache")},
        "q: expected float16 or bfloat16 on CUDA, got float32",
    ),
    "head_dim": (
        {"q": half(3, 2, 4, 20), "k_cache": half(8, 4, 2, 20)},
        "k_cache: expected a head dim that is a multiple of 8 on CUDA, where it is not copied, got 20",
    ),
    "head_dim_of_float8": (
        {"v_cache": torch.zeros(8, 4, 2, 24).to(E4M3), "k_cache": FLOAT8["k_cache"]},
        "v_cache: expected a head dim that is a multiple of 16 on CUDA, where it is not copied, got 24",
    ),
    "strides": (
        {"v_cache": half(8, 4, 2, 20)[..., :16]},
        "v_cache: expected strides that are multiples of 16 bytes on CUDA, where it is not copied, got one of 20 "
        "elements",
    ),
    "large": (
        {"q": half(3, 2, 4, 1032), "k_cache": half(8, 4, 2, 1032)},
        "q: expected a head dim of at most 1024 on CUDA, got 1032",
    ),
    "scale": ({"scale": 3e38}, "scale: expected a number from 1e-18 to 1e18 on CUDA, got 3e+38"),
    "backend": ({"backend": "cpu"}, "backend: expected 'auto', 'sm80' or 'sm90' for CUDA tensors, got 'cpu'"),
}


@pytest.mark.parametrize("name", ON_CUDA)
def test_fakes_of_a_gpu_hold_cudas_rules(name: str) -> None:
    changes, sentence = ON_CUDA[name]
    with FakeTensorMode():
        call = _moved({**good_call(), **changes}, "cuda")
        assert _said(lambda: torch.ops.flash_cute.kvcache_fwd(*call.values())) == f"flash_cute: {sentence}"


@pytest.mark.parametrize("which", ["k_cache", "v_cache", "cache_seqlens", "page_table", "cu_seqlens_q", "workspace"])
def test_devices_mixed(which: str) -> None:
    """Lengths on the host beside tensors on a GPU, above all; with fakes, so that no GPU is needed."""
    with FakeTensorMode():
        call = good_call() | PACKED | {"workspace": torch.zeros(9, dtype=torch.uint8)}
        on_cuda = _moved(call, "cuda")
        on_cuda[which] = _moved(call, "cpu")[which]
        said = _said(lambda: torch.ops.flash_cute.kvcache_fwd(*on_cuda.values()))
    assert said == f"flash_cute: {which}: expected q's device cuda:0, got cpu"


@pytest.mark.parametrize("name", ["q", "k_cache", "cache_seqlens", "page_table", "cu_seqlens_q", "out", "descale_k"])
@pytest.mark.parametrize("given", ["text", [0, 5, 12], 1.5], ids=str)
def test_types(name: str, given: Any) -> None:
    with pytest.raises(ValueError, match=rf"^flash_cute: {name}: expected a torch.Tensor, got "):
        _python({} if name == "out" else {name: given}, **({"out": given} if name == "out" else {}))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"kv_layout": 7}, "kv_layout: expected 'NHD' or 'HND', got 7"),
        ({"kv_layout": None}, "kv_layout: expected 'NHD' or 'HND', got None"),
        ({"causal": 1}, "causal: expected False or 'none', True or 'bottom_right', or 'top_left', got 1"),
        ({"return_lse": 1}, "return_lse: expected False or True, got 1"),
        ({"window": 5}, "window: expected None or (left, right), each None (no limit) or a number of keys of at"),
        ({"softcap": "x"}, "softcap: expected None or a number, got 'x'"),
        ({"scale": True}, "scale: expected None or a number, got True"),
        ({"backend": 9}, "backend: expected None or a backend's name, got 9"),
        ({"k": half(3, 2, 2, 16)}, "v: expected a torch.Tensor beside k, got None"),
        ({"v": half(3, 2, 2, 16)}, "k: expected a torch.Tensor beside v, got None"),
        ({"k": "x", "v": half(3, 2, 2, 16)}, "k: expected a torch.Tensor, got str"),
        ({"k": half(6), "v": half(3, 2, 2, 16)}, "k: expected 4 dims (batch, rows, heads, head_dim), got 1: (6,)"),
        ({"q": half(6), "out": half(3, 2, 4, 16)}, "q: expected 4 dims (batch, rows, heads, head_dim), got 1: (6,)"),
    ],
    ids=str,
)
def test_other_types(changes: Call, sentence: str) -> None:
    call = {name: good_call()[name] for name in ("q", "k_cache", "v_cache", "cache_seqlens", "page_table")}
    with pytest.raises(ValueError, match="^" + re.escape(f"flash_cute: {sentence}")):
        flash_cute.attention_with_kvcache(**{**call, **changes})


VARLEN: dict[str, tuple[Call, str]] = {
    "cu_seqlens_k": ({"cu_seqlens_k": int32(0, 1, 2, 3)}, "expected None beside a page_table, got torch.Tensor"),
    "seqused_q": ({"seqused_q": int32(1, 1, 1)}, "expected None beside a page_table, got torch.Tensor"),
    "seqused_k": ({"seqused_k": None}, "expected a torch.Tensor beside a page_table, got None"),
    "page_table": ({"page_table": [[1]]}, "expected a torch.Tensor beside a page_table, got list"),
    "cu_seqlens_q": ({"cu_seqlens_q": None}, "expected a torch.Tensor beside a page_table, got None"),
    "accumulate": ({"accumulate": "float16"}, "expected None beside a page_table, got 'float16'"),
    "descale_q": ({"descale_q": torch.ones(())}, "expected None beside a page_table, got torch.Tensor"),
    "out_dtype": ({"out_dtype": torch.float16}, "expected None beside a page_table, got torch.dtype"),
    "descale_out": ({"descale_out": torch.ones(())}, "expected None beside a page_table, got torch.Tensor"),
    "quantize": ({"quantize": "fp8"}, "expected None beside a page_table, got 'fp8'"),
    "deterministic": ({"deterministic": 1}, "expected None, False or True, got 1"),
    "max_seqlen_k": ({"max_seqlen_k": 1.5}, "expected None or a number of rows, got 1.5"),
}


@pytest.mark.parametrize("name", VARLEN)
def test_varlen_attention_with_pages(name: str) -> None:
    changes, sentence = VARLEN[name]
    call = good_call() | PACKED
    given = {"q": call["q"], "k": call["k_cache"], "v": call["v_cache"], "cu_seqlens_q": call["cu_seqlens_q"]}
    given |= {"cu_seqlens_k": None, "seqused_k": call["cache_seqlens"], "page_table": call["page_table"]}
    assert flash_cute.varlen_attention(**given).shape == (7, 4, 16)
    with pytest.raises(ValueError, match=f"^flash_cute: {name}: {re.escape(sentence)}"):
        flash_cute.varlen_attention(**given, **changes) if name not in given else flash_cute.varlen_attention(
            **{**given, **changes}
        )


def test_sparse_and_quantized() -> None:
    with pytest.raises(ValueError, match=r"^flash_cute: page_table: expected a strided tensor, got a sparse"):
        _python({"page_table": good_call()["page_table"].to_sparse()})
    with pytest.raises(ValueError, match=r"^flash_cute: k_cache: expected a strided tensor, got a sparse"):
        _python_append({"k_cache": half(8, 4, 2, 16).to_sparse()})


@pytest.mark.parametrize("name", ["q_packed", "k_dtype", "table_rows", "lengths_size", "descale_shape", "causal"])
def test_explain_and_workspace_refuse_as_the_call_does(name: str) -> None:
    changes, sentence = (BAD | BAD_CACHES)[name]
    call = {**good_call(), **changes}
    own = ("cu_seqlens_q", "cache_seqlens", "page_table", "kv_layout", "causal", "descale_k")
    options = {x: call[x] for x in own}
    for function in (flash_cute.explain, flash_cute.kvcache_workspace_bytes):
        with pytest.raises(ValueError, match="^" + re.escape(f"flash_cute: {sentence}")):
            function(call["q"], call["k_cache"], call["v_cache"], **options)


@pytest.mark.cuda
def test_nothing_waits_for_the_device_in_a_check() -> None:
    bad_calls = [_moved({**good_call(), **changes}, "cuda") for changes, _ in ON_CUDA.values()]
    good = _moved(good_call(), "cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.ops.flash_cute.check_kvcache_fwd(*good.values())
        for bad in bad_calls:
            with pytest.raises(RAW_ERRORS):
                torch.ops.flash_cute.check_kvcache_fwd(*bad.values())
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
@pytest.mark.parametrize("offset", [1, 4])
def test_misaligned_caches(offset: int) -> None:
    """Of rows that do not begin at 16-byte boundaries; on the GPU, where that matters."""
    call = {name: x.cuda() if torch.is_tensor(x) else x for name, x in good_call().items()}
    memory = torch.zeros(8 * 4 * 2 * 16 + 8, dtype=torch.float16, device="cuda")
    call["v_cache"] = memory[offset:][: 8 * 4 * 2 * 16].view(8, 4, 2, 16)
    said = _said(lambda: torch.ops.flash_cute.kvcache_fwd(*call.values()))
    assert said.startswith("flash_cute: v_cache: expected an address that is a multiple of 16 on CUDA")
