"""What calls over caches refuse: in the voice of the others, in every form of the call, before anything is read."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_cute

# What the raw operators raise: torch 2.15 makes a RuntimeError of the ValueError that C++ throws.
RAW_ERRORS = (ValueError, RuntimeError)
Call = dict[str, Any]
FORWARDS = ("kvcache_fwd", "_kvcache_fwd", "kvcache_plan", "check_kvcache_fwd", "kvcache_fwd_out", "_kvcache_fwd_out")
APPENDS = ("kvcache_append", "_kvcache_append", "check_kvcache_append")
SCORE = ("window_left", "window_right", "softcap", "sinks", "alibi_slopes", "scale")
E4M3 = torch.float8_e4m3fn


def _int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


def _call() -> Call:
    """A good call: q (3, 2, 4, 16), 8 pages of 4 keys and 2 heads, float16."""
    places = {"cache_seqlens": _int32(5, 0, -1), "page_table": torch.arange(9, dtype=torch.int32).view(3, 3) % 8}
    rest = {"cu_seqlens_q": None, "new_keys": 0, "kv_layout": "NHD", "causal": "bottom_right", **dict.fromkeys(SCORE)}
    tensors = {"q": _half(3, 2, 4, 16), "k_cache": _half(8, 4, 2, 16), "v_cache": _half(8, 4, 2, 16)}
    own = {"descale_k": None, "descale_v": None, "workspace": None, "backend": "auto"}
    return {**tensors, **places, **rest, **own}


def _append_call(changes: Call) -> Call:
    """The same of an append, of two new keys each."""
    call = _call()
    caches = {"k_cache": call["k_cache"], "v_cache": call["v_cache"], "k": _half(3, 2, 2, 16), "v": _half(3, 2, 2, 16)}
    places = {"cache_seqlens": call["cache_seqlens"], "page_table": call["page_table"], "cu_seqlens": None}
    good = {**caches, **places, "kv_layout": "NHD", "descale_k": None, "descale_v": None}
    return {**good, **{name: x for name, x in changes.items() if name in good}}


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
        return function(*_append_call(changes).values())
    call = {**_call(), **changes}
    extra: tuple[Any, ...] = (0,) if "plan" in name else ()
    if "out" in name:
        extra = _results(call) if results is None else results
    return function(*call.values(), *extra)


def _python(changes: Call, **more: Any) -> Any:
    call = {**_call(), **changes}
    new_keys = call.pop("new_keys")
    left, right = call.pop("window_left"), call.pop("window_right")
    call |= {"window": None if left is None and right is None else (left, right)}
    call["backend"] = None if call["backend"] == "auto" else call["backend"]
    if new_keys:
        more |= dict.fromkeys("kv", _half(3, 2, 2, 16))
    return flash_cute.attention_with_kvcache(**call, **more)


def _python_append(changes: Call) -> None:
    flash_cute.append_kvcache(**_append_call(changes))


def _said(call: Callable[[], Any]) -> str:
    with pytest.raises(RAW_ERRORS) as caught:
        call()
    return str(caught.value).splitlines()[0]


PACKED = {"q": _half(7, 4, 16), "cu_seqlens_q": _int32(0, 2, 2, 7)}
ONE_PAGE = {"page_table": None, "k_cache": _half(3, 9, 2, 16), "v_cache": _half(3, 9, 2, 16)}
FLOAT8 = {"k_cache": torch.zeros(8, 4, 2, 16).to(E4M3), "v_cache": torch.zeros(8, 4, 2, 16).to(E4M3)}

# Name: what to replace in the good call, and what is said of it; of attention and append, where both have the argument.
BAD_CACHES: dict[str, tuple[Call, str]] = {
    "k_rank": (
        {"k_cache": _half(8, 4, 16)},
        "k_cache: expected 4 dims (pages, page, heads, head_dim), got 3: (8, 4, 16)",
    ),
    "v_rank": (
        {**ONE_PAGE, "v_cache": _half(3, 9, 2, 16, 1)},
        "v_cache: expected 4 dims (batch, keys, heads, head_dim), got 5: (3, 9, 2, 16, 1)",
    ),
    "k_rank_hnd": (
        {"k_cache": _half(8), "kv_layout": "HND"},
        "k_cache: expected 4 dims (pages, heads, page, head_dim), got 1: (8,)",
    ),
    "layout": ({"kv_layout": "BSHD"}, "kv_layout: expected 'NHD' or 'HND', got 'BSHD'"),
    "v_dtype": ({"v_cache": _half(8, 4, 2, 16).float()}, "v_cache: expected k_cache's dtype float16, got float32"),
    "v_not_float8": (
        {**FLOAT8, "v_cache": _half(8, 4, 2, 16)},
        "v_cache: expected float8_e4m3fn or float8_e5m2, got float16",
    ),
    "v_heads": ({"v_cache": _half(8, 4, 1, 16)}, "v_cache: expected as many heads as k_cache, 2, got 1"),
    "v_pages": ({"v_cache": _half(7, 4, 2, 16)}, "v_cache: expected as many pages as k_cache, 8, got 7"),
    "v_sequences": (
        {**ONE_PAGE, "v_cache": _half(2, 9, 2, 16)},
        "v_cache: expected as many sequences as k_cache, 3, got 2",
    ),
    "v_page": ({"v_cache": _half(8, 5, 2, 16)}, "v_cache: expected pages of k_cache's 4 keys, got 5"),
    "v_keys": ({**ONE_PAGE, "v_cache": _half(3, 8, 2, 16)}, "v_cache: expected k_cache's 9 keys, got 8"),
    "v_head_dim_0": ({"v_cache": _half(8, 4, 2, 0)}, "v_cache: expected a head dim of at least 1, got (8, 4, 2, 0)"),
    "k_last_dim": (
        {"k_cache": _half(8, 4, 2, 32)[..., ::2]},
        "k_cache: expected a contiguous last dim, got a stride of 2",
    ),
    "page_0": (
        {"k_cache": _half(8, 0, 2, 16), "v_cache": _half(8, 0, 2, 16)},
        "k_cache: expected pages of at least 1 key, got 0",
    ),
    "table_dtype": ({"page_table": torch.zeros(3, 3).long()}, "page_table: expected int32, got int64"),
    "table_rank": (
        {"page_table": _int32(1, 2, 3)},
        "page_table: expected the shape (3, max_pages), a row per sequence, got (3,)",
    ),
    "table_rows": (
        {"page_table": _int32(*range(8)).view(2, 4)},
        "page_table: expected the shape (3, max_pages), a row per sequence, got (2, 4)",
    ),
    "table_columns": (
        {"page_table": _int32(*range(9)).view(3, 3).T},
        "page_table: expected contiguous columns, got a stride of 3",
    ),
    "lengths_dtype": ({"cache_seqlens": _int32(1, 2, 3).long()}, "cache_seqlens: expected int32, got int64"),
    "lengths_size": (
        {"cache_seqlens": _int32(1, 2)},
        "cache_seqlens: expected the shape (3,), a number per sequence, got (2,)",
    ),
    "lengths_strided": (
        {"cache_seqlens": _int32(1, 2, 3, 4, 5)[::2]},
        "cache_seqlens: expected a contiguous tensor, got a stride of 2",
    ),
    "descale_of_16_bits": (
        {"descale_k": torch.ones(())},
        "descale_k: expected None for a k_cache of float16, which is not float8, got a tensor",
    ),
    "descale_dtype": (
        {**FLOAT8, "descale_v": torch.ones(()).double()},
        "descale_v: expected float32, got float64",
    ),
    "descale_shape": (
        {**FLOAT8, "descale_k": torch.ones(3, 4)},
        "descale_k: expected one number or the shape (3, 2), got (3, 4)",
    ),
}
BAD: dict[str, tuple[Call, str]] = {
    "q_rank": (
        {"q": _half(3, 2, 4, 16, 1)},
        "q: expected 4 dims (batch, rows, heads, head_dim), got 5: (3, 2, 4, 16, 1)",
    ),
    "q_packed": ({"q": _half(7, 4, 16)}, "q: expected 4 dims (batch, rows, heads, head_dim), got 3: (7, 4, 16)"),
    "q_not_packed": (
        {"cu_seqlens_q": PACKED["cu_seqlens_q"]},
        "q: expected 3 dims (rows, heads, head_dim), got 4: (3, 2, 4, 16)",
    ),
    "q_dtype": ({"q": _half(3, 2, 4, 16).int()}, "q: expected float16, bfloat16, float32 or float64, got int32"),
    "q_float8": (
        {**FLOAT8, "q": torch.zeros(3, 2, 4, 16).to(E4M3)},
        "q: expected float16, bfloat16, float32 or float64, got float8_e4m3fn",
    ),
    "k_dtype": (
        {x: _half(8, 4, 2, 16).bfloat16() for x in ("k_cache", "v_cache")},
        "k_cache: expected q's dtype float16, float8_e4m3fn or float8_e5m2, got bfloat16",
    ),
    "k_head_dim": ({"k_cache": _half(8, 4, 2, 24)}, "k_cache: expected q's head dim 16, got 24"),
    "k_sequences": (
        {**ONE_PAGE, "q": _half(2, 2, 4, 16)},
        "k_cache: expected as many sequences as q has, 2, got 3",
    ),
    "k_packed_sequences": (
        {**ONE_PAGE, **PACKED, "cu_seqlens_q": _int32(0, 2, 7)},
        "k_cache: expected as many sequences as cu_seqlens_q has, 2, got 3",
    ),
    "heads": (
        {x: _half(8, 4, 3, 16) for x in ("k_cache", "v_cache")},
        "q: expected a number of heads that is a multiple of k_cache's 3, got 4",
    ),
    "offsets_dtype": (
        {**PACKED, "cu_seqlens_q": PACKED["cu_seqlens_q"].long()},
        "cu_seqlens_q: expected int32, got int64",
    ),
    "offsets_rank": (
        {**PACKED, "cu_seqlens_q": PACKED["cu_seqlens_q"][None]},
        "cu_seqlens_q: expected the shape (sequences + 1,), got (1, 4)",
    ),
    "offsets_empty": (
        {**PACKED, "cu_seqlens_q": _int32()},
        "cu_seqlens_q: expected the shape (sequences + 1,), got (0,)",
    ),
    "causal": ({"causal": "foo"}, "causal: expected False or 'none', True or 'bottom_right', or 'top_left', got 'foo'"),
    "scale": ({"scale": -1.0}, "scale: expected a finite number above 0, got -1"),
    "window": ({"window_left": -3}, "window_left: expected None (no limit) or a number of at least 0, got -3"),
    "softcap": ({"softcap": 0.0}, "softcap: expected None or a finite number above 0, got 0"),
    "sinks": ({"sinks": torch.zeros(2)}, "sinks: expected the shape (4,), a number per query head, got (2,)"),
    "slopes": (
        {"alibi_slopes": torch.zeros(2, 4)},
        "alibi_slopes: expected the shape (4,) or (3, 4), a slope per query head, got (2, 4)",
    ),
    "workspace_dtype": ({"workspace": torch.zeros(9)}, "workspace: expected uint8, got float32"),
    "workspace_rank": (
        {"workspace": torch.zeros(3, 3, dtype=torch.uint8)},
        "workspace: expected the shape (bytes,), got (3, 3)",
    ),
    "new_keys_without_lengths": (
        {"new_keys": 2, "cache_seqlens": None},
        "cache_seqlens: expected the lengths to which keys are appended, got None",
    ),
    "backend": ({"backend": "fast"}, "backend: expected 'auto', 'cpu', 'sm80' or 'sm90', got 'fast'"),
    "backend_sm90": ({"backend": "sm90"}, "backend: expected 'auto' or 'cpu' for CPU tensors, got 'sm90'"),
    "accumulate": (
        {"backend": "auto+float16"},
        "accumulate: expected 'float32' over a cache, got 'float16'",
    ),
}
BAD_APPENDS: dict[str, tuple[Call, str]] = {
    "k_new_rank": (
        {"k": _half(6, 2, 16)},
        "k: expected 4 dims (batch, rows, heads, head_dim), got 3: (6, 2, 16)",
    ),
    "v_new_packed": (
        {"k": _half(7, 2, 16), "cu_seqlens": _int32(0, 2, 2, 7)},
        "v: expected 3 dims (rows, heads, head_dim), got 4: (3, 2, 2, 16)",
    ),
    "k_new_dtype": ({"k": _half(3, 2, 2, 16).float()}, "k: expected k_cache's dtype float16, got float32"),
    "v_new_dtype": ({"v": _half(3, 2, 2, 16).float()}, "v: expected k's dtype float16, got float32"),
    "k_new_float8": (
        {**FLOAT8, "k": torch.zeros(3, 2, 2, 16).to(E4M3)},
        "k: expected float16, bfloat16, float32 or float64, got float8_e4m3fn",
    ),
    "caches_int": (
        {x: _half(8, 4, 2, 16).int() for x in ("k_cache", "v_cache")},
        "k_cache: expected float16, bfloat16, float32 or float64, got int32",
    ),
    "k_new_heads": ({"k": _half(3, 2, 4, 16)}, "k: expected as many heads as k_cache, 2, got 4"),
    "v_new_head_dim": ({"v": _half(3, 2, 2, 24)}, "v: expected v_cache's head dim 16, got 24"),
    "v_new_batch": ({"v": _half(2, 2, 2, 16)}, "v: expected k's batch size 3, got 2"),
    "v_new_length": ({"v": _half(3, 3, 2, 16)}, "v: expected k's length 2, got 3"),
    "no_lengths": (
        {"cache_seqlens": None},
        "cache_seqlens: expected the lengths to which keys are appended, got None",
    ),
    "new_offsets": (
        {"k": _half(7, 2, 16), "v": _half(7, 2, 16), "cu_seqlens": _int32(0, 7)},
        "page_table: expected the shape (1, max_pages), a row per sequence, got (3, 3)",
    ),
}


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
    if sentence.startswith("descale") and "k_cache" in changes:
        changes = changes | {"k": _half(3, 2, 2, 16), "v": _half(3, 2, 2, 16)}
    with pytest.raises(ValueError, match="^" + re.escape(f"flash_cute: {sentence}") + "$"):
        _python_append(changes)
    assert {_said(lambda x=x: _operator(x, changes)) for x in APPENDS} == {f"flash_cute: {sentence}"}


BAD_RESULTS: dict[str, tuple[tuple[torch.Tensor, ...], str]] = {
    "shape": ((_half(3, 2, 4, 8), torch.zeros(3, 4, 2)), "out: expected the shape (3, 2, 4, 16), got (3, 2, 4, 8)"),
    "rank": ((_half(6, 4, 16), torch.zeros(3, 4, 2)), "out: expected the shape (3, 2, 4, 16), got (6, 4, 16)"),
    "dtype": ((torch.zeros(3, 2, 4, 16), torch.zeros(3, 4, 2)), "out: expected q's dtype float16, got float32"),
    "last_dim": (
        (_half(3, 2, 16, 4).transpose(2, 3), torch.zeros(3, 4, 2)),
        "out: expected a contiguous last dim, got a stride of 4",
    ),
    "overlap": (
        (_half(3, 1, 4, 16).expand(3, 2, 4, 16), torch.zeros(3, 4, 2)),
        "out: expected elements that do not overlap, got a stride of 0",
    ),
    "lse_shape": ((_half(3, 2, 4, 16), torch.zeros(3, 2, 4)), "lse: expected the shape (3, 4, 2), got (3, 2, 4)"),
    "lse_dtype": (
        (_half(3, 2, 4, 16), torch.zeros(3, 4, 2).half()),
        "lse: expected float32 for float16 inputs, got float16",
    ),
    "lse_strides": (
        (_half(3, 2, 4, 16), torch.zeros(3, 2, 4).transpose(1, 2)),
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
        call, fakes = _moved(_call(), "cpu"), _moved(dict(enumerate(results)), "cpu")  # type: ignore[arg-type]
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
    call = _append_call(changes) if name in BAD_APPENDS else {**_call(), **changes}
    function = getattr(torch.ops.flash_cute, operator)
    if name != "backend_sm90":
        meta = _moved(call, "meta")
        assert _said(lambda: function(*meta.values())) == f"flash_cute: {sentence}"
    with FakeTensorMode():
        fake = _moved(call, "cpu")
        assert _said(lambda: function(*fake.values())) == f"flash_cute: {sentence}"


ON_CUDA: dict[str, tuple[Call, str]] = {
    "float32": (
        {x: torch.zeros(_call()[x].shape) for x in ("q", "k_cache", "v_cache")},
        "q: expected float16 or bfloat16 on CUDA, got float32",
    ),
    "head_dim": (
        {"q": _half(3, 2, 4, 20), "k_cache": _half(8, 4, 2, 20)},
        "k_cache: expected a head dim that is a multiple of 8 on CUDA, where it is not copied, got 20",
    ),
    "head_dim_of_float8": (
        {"v_cache": torch.zeros(8, 4, 2, 24).to(E4M3), "k_cache": FLOAT8["k_cache"]},
        "v_cache: expected a head dim that is a multiple of 16 on CUDA, where it is not copied, got 24",
    ),
    "strides": (
        {"v_cache": _half(8, 4, 2, 20)[..., :16]},
        "v_cache: expected strides that are multiples of 16 bytes on CUDA, where it is not copied, got one of 20 "
        "elements",
    ),
    "large": (
        {"q": _half(3, 2, 4, 1032), "k_cache": _half(8, 4, 2, 1032)},
        "q: expected a head dim of at most 1024 on CUDA, got 1032",
    ),
    "scale": ({"scale": 3e38}, "scale: expected a number from 1e-18 to 1e18 on CUDA, got 3e+38"),
    "backend": ({"backend": "cpu"}, "backend: expected 'auto', 'sm80' or 'sm90' for CUDA tensors, got 'cpu'"),
}


@pytest.mark.parametrize("name", ON_CUDA)
def test_fakes_of_a_gpu_hold_cudas_rules(name: str) -> None:
    changes, sentence = ON_CUDA[name]
    with FakeTensorMode():
        call = _moved({**_call(), **changes}, "cuda")
        assert _said(lambda: torch.ops.flash_cute.kvcache_fwd(*call.values())) == f"flash_cute: {sentence}"


@pytest.mark.parametrize("which", ["k_cache", "v_cache", "cache_seqlens", "page_table", "cu_seqlens_q", "workspace"])
def test_devices_mixed(which: str) -> None:
    """Lengths on the host beside tensors on a GPU, above all; with fakes, so that no GPU is needed."""
    with FakeTensorMode():
        call = _call() | PACKED | {"workspace": torch.zeros(9, dtype=torch.uint8)}
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
        ({"k": _half(3, 2, 2, 16)}, "v: expected a torch.Tensor beside k, got None"),
        ({"v": _half(3, 2, 2, 16)}, "k: expected a torch.Tensor beside v, got None"),
        ({"k": "x", "v": _half(3, 2, 2, 16)}, "k: expected a torch.Tensor, got str"),
    ],
    ids=str,
)
def test_other_types(changes: Call, sentence: str) -> None:
    call = {name: _call()[name] for name in ("q", "k_cache", "v_cache", "cache_seqlens", "page_table")}
    with pytest.raises(ValueError, match="^" + re.escape(f"flash_cute: {sentence}")):
        flash_cute.attention_with_kvcache(**{**call, **changes})


VARLEN: dict[str, tuple[Call, str]] = {
    "cu_seqlens_k": ({"cu_seqlens_k": _int32(0, 1, 2, 3)}, "expected None beside a page_table, got torch.Tensor"),
    "seqused_q": ({"seqused_q": _int32(1, 1, 1)}, "expected None beside a page_table, got torch.Tensor"),
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
    call = _call() | PACKED
    given = {"q": call["q"], "k": call["k_cache"], "v": call["v_cache"], "cu_seqlens_q": call["cu_seqlens_q"]}
    given |= {"cu_seqlens_k": None, "seqused_k": call["cache_seqlens"], "page_table": call["page_table"]}
    assert flash_cute.varlen_attention(**given).shape == (7, 4, 16)
    with pytest.raises(ValueError, match=f"^flash_cute: {name}: {re.escape(sentence)}"):
        flash_cute.varlen_attention(**given, **changes) if name not in given else flash_cute.varlen_attention(
            **{**given, **changes}
        )


def test_sparse_and_quantized() -> None:
    with pytest.raises(ValueError, match=r"^flash_cute: page_table: expected a strided tensor, got a sparse"):
        _python({"page_table": _call()["page_table"].to_sparse()})
    with pytest.raises(ValueError, match=r"^flash_cute: k_cache: expected a strided tensor, got a sparse"):
        _python_append({"k_cache": _half(8, 4, 2, 16).to_sparse()})


@pytest.mark.parametrize("name", ["q_packed", "k_dtype", "table_rows", "lengths_size", "descale_shape", "causal"])
def test_explain_and_workspace_refuse_as_the_call_does(name: str) -> None:
    changes, sentence = (BAD | BAD_CACHES)[name]
    call = {**_call(), **changes}
    own = ("cu_seqlens_q", "cache_seqlens", "page_table", "kv_layout", "causal", "descale_k")
    options = {x: call[x] for x in own}
    for function in (flash_cute.explain, flash_cute.kvcache_workspace_bytes):
        with pytest.raises(ValueError, match="^" + re.escape(f"flash_cute: {sentence}")):
            function(call["q"], call["k_cache"], call["v_cache"], **options)


@pytest.mark.cuda
def test_nothing_waits_for_the_device_in_a_check() -> None:
    def on_the_gpu(arguments: Call) -> Call:
        return {x: y.cuda() if torch.is_tensor(y) else y for x, y in arguments.items()}

    bad_calls = [on_the_gpu({**_call(), **changes}) for changes, _ in ON_CUDA.values()]
    good = on_the_gpu(_call())
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
    call = {name: x.cuda() if torch.is_tensor(x) else x for name, x in _call().items()}
    memory = torch.zeros(8 * 4 * 2 * 16 + 8, dtype=torch.float16, device="cuda")
    call["v_cache"] = memory[offset:][: 8 * 4 * 2 * 16].view(8, 4, 2, 16)
    said = _said(lambda: torch.ops.flash_cute.kvcache_fwd(*call.values()))
    assert said.startswith("flash_cute: v_cache: expected an address that is a multiple of 16 on CUDA")
