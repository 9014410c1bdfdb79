"""flash_cute under flash-attn's names: the same signatures, layouts, defaults and results."""

from __future__ import annotations

import doctest
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from numerics import assert_gradients_match, assert_matches, same_bits
from packed import assert_packed_gradients, assert_packed_matches, pack

from flash_cute.integrations import flash_attn, flash_attn_interface

OPTIONS_2 = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
DESCALES = "q_descale=None, k_descale=None, v_descale=None"
OPTIONS_3 = (
    f"softmax_scale=None, causal=False, qv=None, {DESCALES}, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
    "num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False"
)
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
# flash-attn 2.8's documentation, and FlashAttention-3's.
SIGNATURES = {
    flash_attn: {
        "flash_attn_func": f"q, k, v, {OPTIONS_2}",
        "flash_attn_kvpacked_func": f"q, kv, {OPTIONS_2}",
        "flash_attn_qkvpacked_func": f"qkv, {OPTIONS_2}",
        "flash_attn_varlen_func": f"q, k, v, {LENGTHS}, {OPTIONS_2}, block_table=None",
        "flash_attn_varlen_kvpacked_func": f"q, kv, {LENGTHS}, {OPTIONS_2}",
        "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {OPTIONS_2}",
        "flash_attn_with_kvcache": (
            "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
            "cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
            "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
            "return_softmax_lse=False"
        ),
    },
    flash_attn_interface: {
        "flash_attn_func": f"q, k, v, {OPTIONS_3}",
        "flash_attn_qkvpacked_func": (
            f"qkv, softmax_scale=None, causal=False, {DESCALES}, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
            "deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False"
        ),
        "flash_attn_varlen_func": f"q, k, v, {LENGTHS}, seqused_q=None, seqused_k=None, {OPTIONS_3}",
        "flash_attn_with_kvcache": (
            "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, "
            "cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
            f"max_seqlen_q=None, rotary_seqlens=None, {DESCALES}, softmax_scale=None, causal=False, "
            "window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, "
            "num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False"
        ),
    },
}
MODULES = pytest.mark.parametrize("module", SIGNATURES, ids=lambda module: module.__name__.rpartition(".")[2])


def _dtype(device: str) -> torch.dtype:
    return torch.float16 if device == "cuda" else torch.float32


@MODULES
def test_signatures(module: Any) -> None:
    given = {}
    for name in module.__all__:
        if name.startswith("flash_attn_"):
            bare = [x.replace(annotation=x.empty) for x in inspect.signature(getattr(module, name)).parameters.values()]
            given[name] = str(inspect.Signature(bare))[1:-1]
    assert given == SIGNATURES[module]


@MODULES
def test_examples(module: Any) -> None:
    results = doctest.testmod(module, extraglobs={"torch": torch})
    assert (results.attempted > 6, results.failed) == (True, 0)


# Theirs, and ours beneath: (options of the call, causal, options of flash_cute.attention).
CALLS: dict[str, tuple[dict[str, Any], bool, dict[str, Any]]] = {
    "full": ({}, False, {}),
    "causal": ({"causal": True, "softmax_scale": 0.3}, True, {"scale": 0.3}),
    "window": ({"window_size": (5, 2)}, False, {"window": (5, 2)}),
    "left": ({"window_size": (7, -1), "softcap": 3.0}, False, {"window": (7, None), "softcap": 3.0}),
    "causal window": ({"causal": True, "window_size": (9, 4)}, True, {"window": (9, 4)}),
}


@MODULES
@pytest.mark.parametrize("name", CALLS)
def test_dense(module: Any, name: str, device: str, rng: torch.Generator) -> None:
    """out, LSE and gradients; 20 rows that see 33 keys tell a causal mask's alignment."""
    theirs, causal, ours = CALLS[name]
    shapes = ((2, 20, 4, 16), (2, 33, 2, 16), (2, 33, 2, 16))
    q, k, v = (torch.randn(shape, generator=rng).to(device, _dtype(device)).requires_grad_() for shape in shapes)
    heads_first = tuple(x.detach().transpose(1, 2) for x in (q, k, v))
    out, lse, *rest = module.flash_attn_func(q, k, v, **theirs, return_attn_probs=True)
    assert rest == ([None] if module is flash_attn else [])
    assert out.shape == q.shape and out.is_contiguous()
    assert_matches(out.detach().transpose(1, 2), lse.detach(), *heads_first, causal, **ours)
    dout = torch.randn(out.shape, generator=rng).to(out)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    heads_first_gradients = tuple(x.transpose(1, 2) for x in gradients)
    assert_gradients_match(heads_first_gradients, dout.transpose(1, 2), *heads_first, causal, **ours)
    assert same_bits((module.flash_attn_func(q, k, v, **theirs),), (out,))


def test_alibi(device: str, rng: torch.Generator) -> None:
    q, k, v = (torch.randn(2, n, 4, 16, generator=rng).to(device, _dtype(device)) for n in (20, 33, 33))
    slopes = torch.rand(2, 4, generator=rng).to(device)
    heads_first = tuple(x.transpose(1, 2) for x in (q, k, v))
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes, return_attn_probs=True)
    assert_matches(out.transpose(1, 2), lse, *heads_first, True, alibi_slopes=slopes)


@MODULES
@pytest.mark.parametrize("name", CALLS)
def test_packed_sequences(module: Any, name: str, device: str, rng: torch.Generator) -> None:
    theirs, causal, ours = CALLS[name]
    packed = pack(((5, 9), (17, 17), (0, 3), (7, 2)), device, rng, head_dim=16)
    for x in packed.tensors:
        x.requires_grad_()
    out, lse, *_ = module.flash_attn_varlen_func(*packed.call, 17, 17, **theirs, return_attn_probs=True)
    dout = torch.randn(out.shape, generator=rng).to(out)
    gradients = torch.autograd.grad(out, packed.tensors, dout)
    assert_packed_matches(out.detach(), lse.detach(), packed, causal, **ours)
    assert_packed_gradients(gradients, dout, packed, causal, **ours)


def test_used_lengths(device: str, rng: torch.Generator) -> None:
    """FlashAttention-3 takes them."""
    used = torch.tensor([3, 9, 0], dtype=torch.int32, device=device)
    packed = pack(((5, 9), (17, 17), (7, 2)), device, rng, head_dim=16).replace(seqused_q=used, seqused_k=used)
    call = (*packed.call, 17, 17, used, used)
    out, lse = flash_attn_interface.flash_attn_varlen_func(*call, causal=True, return_attn_probs=True)
    assert_packed_matches(out, lse, packed, True)


OPTIONS = {"causal": True, "window_size": (9, 0), "softcap": 3.0, "softmax_scale": 0.3}


def test_tensors_in_one(rng: torch.Generator) -> None:
    """Of all options the same, and the gradient of the one tensor is the three gradients."""
    options = {
        **OPTIONS,
        "alibi_slopes": torch.rand(4, generator=rng),
        "deterministic": True,
        "return_attn_probs": True,
    }
    qkv = torch.randn(2, 33, 3, 4, 16, generator=rng).requires_grad_()
    q, k, v = (x.detach().requires_grad_() for x in qkv.unbind(2))
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, **options)
    expected = torch.autograd.grad((out, lse), (q, k, v), (out.detach(), lse.detach()))
    packed_out, packed_lse, _ = flash_attn.flash_attn_qkvpacked_func(qkv, **options)
    assert same_bits((packed_out, packed_lse), (out, lse))
    (given,) = torch.autograd.grad((packed_out, packed_lse), qkv, (out.detach(), lse.detach()))
    assert same_bits((given,), (torch.stack(expected, 2),))
    assert same_bits(flash_attn.flash_attn_kvpacked_func(q, qkv[:, :, 1:], **options)[:2], (out, lse))


def test_packed_tensors_in_one(rng: torch.Generator) -> None:
    options = {
        **OPTIONS,
        "alibi_slopes": torch.rand(4, generator=rng),
        "deterministic": True,
        "return_attn_probs": True,
    }
    qkv = torch.randn(30, 3, 4, 16, generator=rng)
    offsets = torch.tensor([0, 11, 30], dtype=torch.int32)
    expected = flash_attn.flash_attn_varlen_func(*qkv.unbind(1), offsets, offsets, 19, 19, **options)[:2]
    assert same_bits(flash_attn.flash_attn_varlen_qkvpacked_func(qkv, offsets, 19, **options)[:2], expected)
    kv_call = (qkv[:, 0], qkv[:, 1:], offsets, offsets, 19, 19)
    assert same_bits(flash_attn.flash_attn_varlen_kvpacked_func(*kv_call, **options)[:2], expected)


def test_heads_in_one(rng: torch.Generator) -> None:
    """FlashAttention-3's two forms of qkv."""
    function = flash_attn_interface.flash_attn_qkvpacked_func
    qkv = torch.randn(2, 33, 4 + 2 + 2, 16, generator=rng)
    split = (qkv[:, :, :4], qkv[:, :, 4:6], qkv[:, :, 6:])
    given = function(qkv, num_heads_q=4, **OPTIONS, return_attn_probs=True)
    assert same_bits(given, flash_attn_interface.flash_attn_func(*split, **OPTIONS, return_attn_probs=True))
    stacked = torch.randn(2, 33, 3, 4, 16, generator=rng)
    expected = flash_attn_interface.flash_attn_func(*stacked.unbind(2), **OPTIONS)
    assert same_bits((function(stacked, **OPTIONS),), (expected,))
    for heads in (None, 0, 3, 8):
        with pytest.raises(ValueError, match=r"flash_cute: num_heads_q: expected Hq of the .* = 8 heads of qkv"):
            function(qkv, num_heads_q=heads)


X = torch.zeros(1, 4, 2, 8)
REFUSED: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], str]] = [
    (flash_attn.flash_attn_func, (X, X, X), {"dropout_p": 0.1}, "dropout_p: expected 0, since .* got 0.1"),
    (
        flash_attn.flash_attn_func,
        (X, X, X[0]),
        {},
        r"q, k, v: expected 4 dims each, .* got \(1, 4, 2, 8\), .*, \(4, 2, 8\)",
    ),
    (flash_attn.flash_attn_func, (X, None, X), {}, "k: expected a torch.Tensor, got None"),
    (flash_attn.flash_attn_func, (X, X, X), {"window_size": 5}, "window_size: expected .left, right., .* got 5"),
    (flash_attn.flash_attn_func, (X, X, X), {"softcap": -1.0}, "softcap: expected"),
    (flash_attn.flash_attn_func, (X, X, X), {"softmax_scale": 0.0}, "scale: expected"),
    (flash_attn.flash_attn_kvpacked_func, (X, X), {}, "kv: expected 2 stacked tensors in dim -3"),
    (flash_attn.flash_attn_qkvpacked_func, (X,), {}, "qkv: expected 3 stacked tensors in dim -3"),
    *(
        (flash_attn_interface.flash_attn_func, (X, X, X), {name: value}, f"{name}: expected .*, since .* got")
        for name, value in {
            "qv": X,
            "q_descale": X,
            "k_descale": X,
            "v_descale": X,
            "attention_chunk": 64,
            "sm_margin": 4,
        }.items()
    ),
]


@pytest.mark.parametrize(("function", "call", "options", "message"), REFUSED)
def test_refused(function: Callable[..., Any], call: tuple[Any, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"flash_cute: {message}"):
        function(*call, **options)


def test_hints_change_nothing(rng: torch.Generator) -> None:
    q, k, v = (torch.randn(1, 16, 2, 8, generator=rng) for _ in range(3))
    expected = flash_attn_interface.flash_attn_func(q, k, v)
    assert same_bits((flash_attn_interface.flash_attn_func(q, k, v, num_splits=4, pack_gqa=True),), (expected,))


def test_compiled(rng: torch.Generator) -> None:
    q, k, v = (torch.randn(1, 16, 2, 8, generator=rng).requires_grad_() for _ in range(3))
    compiled = torch.compile(flash_attn.flash_attn_func, fullgraph=True, backend="aot_eager")
    out, expected = (function(q, k, v, causal=True) for function in (compiled, flash_attn.flash_attn_func))
    torch.testing.assert_close(out, expected)
    given, right = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, expected))
    torch.testing.assert_close(given, right)


INSTALL = """
import sys
import flash_cute
assert not [name for name in sys.modules if name.startswith("flash_cute.integrations")]
from flash_cute.integrations.flash_attn import install, uninstall, flash_attn_func
before = {name for name in sys.modules if not name.startswith("flash_cute")}
install()
install()
import importlib.util
import flash_attn, flash_attn_interface
from flash_attn import flash_attn_varlen_func
from flash_attn.flash_attn_interface import flash_attn_func as other
import flash_cute.integrations.flash_attn_interface as version_3
assert flash_attn.flash_attn_func is flash_attn_func is other and flash_attn.__version__.startswith("2.8")
assert flash_attn_interface.flash_attn_func is version_3.flash_attn_func
assert importlib.util.find_spec("flash_attn") and not hasattr(flash_attn, "install")
uninstall()
left = {name for name in sys.modules if not name.startswith("flash_cute")} - before
assert left <= {"importlib.util"}, left
try:
    import flash_attn
except ModuleNotFoundError:
    print("gone")

from pathlib import Path
Path("flash_attn").mkdir()
Path("flash_attn/__init__.py").write_text("from . import part")
Path("flash_attn/part.py").write_text("")
importlib.invalidate_caches()
for _ in range(2):  # installed, then imported
    try:
        install()
    except ValueError as error:
        print(error)
    import flash_attn
    assert flash_attn.part
install(replace=True)
import flash_attn
assert flash_attn.flash_attn_func is flash_attn_func and "flash_attn.part" not in sys.modules
uninstall()
import flash_attn
assert flash_attn.part
"""


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="a real flash_attn is installed")
def test_install(python: Callable[..., str]) -> None:
    lines = python(INSTALL).splitlines()
    assert lines[0] == "gone"
    refusal = "flash_cute: replace: expected True, since another flash_attn is installed that install() would hide"
    assert [line.partition(", got")[0] for line in lines[1:]] == [refusal] * 2
