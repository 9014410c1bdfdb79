"""The aten operators of PyTorch's flash attention by flash_cute, called as the dispatcher and autograd call them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from numerics import assert_matches

from flash_cute import _left, reference
from flash_cute.integrations import _aten, sdpa


@pytest.fixture(autouse=True)
def counters() -> Iterator[None]:
    """From 0, before and after."""
    sdpa.report(reset=True)
    yield
    sdpa.report(reset=True)


@pytest.fixture
def x(rng: torch.Generator) -> torch.Tensor:
    return torch.randn(1, 2, 9, 8, generator=rng)


@pytest.mark.parametrize("name", _aten.OPERATORS)
def test_operators_have_atens_arguments(name: str) -> None:
    """Every argument of the schema by name, kind and default, since the dispatcher leaves out defaults.

    An older PyTorch lacks the last ones, which then have a default.
    """
    parameters = inspect.signature(_aten.OPERATORS[name]).parameters.values()
    schema = getattr(torch.ops.aten, name).default._schema.arguments
    given = [(p.name, p.kind == p.KEYWORD_ONLY, None if p.default is p.empty else (p.default,)) for p in parameters]
    expected = [(a.name, a.kwarg_only, (a.default_value,) if a.has_default_value() else None) for a in schema]
    assert given[: len(expected)] == expected
    assert all((keyword, default) == (True, (None,)) for _, keyword, default in given[len(expected) :])


def test_operators_of_sdpa(rng: torch.Generator) -> None:
    """Forward and backward as PyTorch's autograd calls them, on the CPU; the causal mask is bottom right."""
    leaves = [torch.randn(shape, generator=rng, requires_grad=True) for shape in ((2, 4, 9, 8), *((2, 2, 13, 8),) * 2)]
    q, k, v = (x.detach() for x in leaves)
    out, lse, none_q, none_k, len_q, len_k, seed, offset, debug = _aten.sdpa_forward(q, k, v, 0.0, True, scale=0.3)
    assert (none_q, none_k, len_q, len_k) == (None, None, 9, 13)
    assert (seed.dtype, seed.shape, offset.shape, debug.numel()) == (torch.uint64, (2,), (), 0)
    assert_matches(out, lse, q, k, v, True, scale=0.3)
    dout = torch.randn(out.shape, generator=rng)
    given = _aten.sdpa_backward(dout, q, k, v, out, lse, None, None, 9, 13, 0.0, True, seed, offset, scale=0.3)
    seen = torch.ones(9, 13).tril(4).bool()
    expected = F.scaled_dot_product_attention(*leaves, attn_mask=seen, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(given, torch.autograd.grad(expected, leaves, dout), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [(None, None), (-1, -1), (3, 1)])
def test_operators_of_flash_attention(window: tuple[int | None, int | None], rng: torch.Generator) -> None:
    """The (B, N, H, D) and the packed form of the same sequences: each other's results, and float64's."""
    q, k, v = (torch.randn(2, n, heads, 8, generator=rng) for n, heads in ((9, 4), (13, 2), (13, 2)))
    sides = {"window_size_left": window[0], "window_size_right": window[1], "scale": 0.3}
    out, lse, *state, _ = _aten.flash_forward(q, k, v, None, None, 9, 13, 0.0, False, False, **sides)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    ours = None if window[1] in (None, -1) else window
    assert_matches(out.transpose(1, 2), lse, *heads_first, scale=0.3, window=ours)
    dout = torch.randn(out.shape, generator=rng)
    gradients = _aten.flash_backward(dout, q, k, v, out, lse, None, None, 9, 13, 0.0, False, *state, **sides)

    offsets = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (9, 13)]
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    packed_out, packed_lse, *_ = _aten.flash_forward(*flat, *offsets, 9, 13, 0.0, False, False, **sides)
    torch.testing.assert_close(packed_out.view_as(out), out)
    torch.testing.assert_close(packed_lse.view(4, 2, 9).transpose(0, 1), lse)
    tensors = (dout.flatten(0, 1), *flat, packed_out, packed_lse)
    packed_gradients = _aten.flash_backward(*tensors, *offsets, 9, 13, 0.0, False, *state, **sides)
    for packed_one, one in zip(packed_gradients, gradients, strict=True):
        torch.testing.assert_close(packed_one.view_as(one), one)


def test_an_operator_that_refuses_calls_pytorchs(x: torch.Tensor) -> None:
    original: list[Any] = []

    def watch(*args: Any, **options: Any) -> str:
        original.append((args, options))
        return "PyTorch's"

    name = "_scaled_dot_product_flash_attention"
    kernel = _aten.make_override(name, _aten.sdpa_forward, watch, False, frozenset)
    assert kernel("keys", x, x, x)[0].shape == x.shape and original == []
    assert kernel("keys", x, x, x, 0.5, scale=0.3) == "PyTorch's"
    assert len(original[0][0]) == 5 and original[0][1] == {"scale": 0.3}
    assert sdpa.report().data == {
        "enabled": False,
        "served": {f"aten::{name}": 1},
        "passed_on": {"dropout_p: expected 0, got another": 1},
    }
    strict = _aten.make_override(name, _aten.sdpa_forward, watch, True, frozenset)
    with pytest.raises(ValueError, match="flash_cute: dropout_p: expected 0"):
        strict("keys", x, x, x, 0.5)
    with pytest.raises(ValueError, match="flash_cute: k: expected"):
        strict("keys", x, x[..., :4], x)

    def fail(*args: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal memory access"):  # which no other kernel may hide
        _aten.make_override(name, fail, watch, False, frozenset)("keys", x)


def test_operators_on_a_gpu_that_is_left_to_pytorch(x: torch.Tensor) -> None:
    """Forward and backward go to PyTorch's kernels, and forwards are counted."""
    name, made = "_scaled_dot_product_flash_attention", []
    for which in (name, f"{name}_backward"):
        for strict in (False, True):
            made.append(_aten.make_override(which, pytest.fail, lambda *args: "PyTorch's", strict, _on_cpu))
    forward, strict_forward, *backwards = made
    assert [kernel("keys", x, x, x) for kernel in (forward, *backwards)] == ["PyTorch's"] * 3
    with pytest.raises(ValueError, match=r"flash_cute: device: expected a GPU whose compute capability is not 10\.0"):
        strict_forward("keys", x, x, x)
    assert sdpa.report().data == {"enabled": False, "served": {}, "passed_on": {_left.REASON: 2}}


def _on_cpu() -> frozenset[int | None]:
    """The index of the tests' device, as that of a GPU that is left to PyTorch."""
    return frozenset({None})


@pytest.mark.parametrize("name", ["alibi_slopes", "seqused_k"])
def test_what_atens_backward_lacks(name: str, rng: torch.Generator) -> None:
    """It is not told of slopes and used lengths: a forward with them is served without gradients alone."""
    q, k, v = (torch.randn(9, 2, 8, generator=rng) for _ in range(3))
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
    value = {"alibi_slopes": torch.tensor([0.5, 0.25]), "seqused_k": torch.tensor([3, 5], dtype=torch.int32)}[name]
    call = (offsets, offsets, 5, 5, 0.0, True, False)
    out, lse, *_ = _aten.flash_forward(q, k, v, *call, **{name: value})
    expected, expected_lse = reference.varlen_attention(q, k, v, offsets, offsets, True, **{name: value})
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=f"flash_cute: {name}: expected None with gradients"):
        _aten.flash_forward(q.requires_grad_(), k, v, *call, **{name: value})


def test_an_override_in_the_dispatcher(x: torch.Tensor) -> None:
    """As on CUDA, with an operator that PyTorch has for the CPU: autograd above it, the original where it refuses."""
    name = "_scaled_dot_product_flash_attention_for_cpu"
    original = torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed

    def serve(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: Any = None,
    ) -> Any:
        if is_causal:
            raise ValueError("flash_cute: is_causal: expected False, got True")
        return reference.attention(q, k, v, is_causal, scale)

    leaf = x.double().requires_grad_()  # so that the tolerance of a gradient is not a matter of the inputs
    expected = [
        F.scaled_dot_product_attention(leaf, leaf, leaf, is_causal=is_causal, scale=0.3) for is_causal in (False, True)
    ]
    library = torch.library.Library("aten", "IMPL")
    library.impl(name, _aten.make_override(name, serve, original, False, frozenset), "CPU", with_keyset=True)
    given = [
        F.scaled_dot_product_attention(leaf, leaf, leaf, is_causal=is_causal, scale=0.3) for is_causal in (False, True)
    ]
    del library
    for out, right in zip(given, expected, strict=True):
        torch.testing.assert_close(out, right)
        torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), leaf)[0] for y in (out, right)))
    report = sdpa.report()
    assert report.served == {f"aten::{name}": 1}
    assert report.passed_on == {"is_causal: expected False, got True": 1}
    F.scaled_dot_product_attention(x, x, x)
    assert sdpa.report() == report
