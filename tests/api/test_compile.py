"""The operator is a good citizen of torch.compile: opcheck, fakes, one full graph with dynamic shapes."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CAUSAL, Case, Causal, mask_name, score
from checks import OPCHECKS
from layouts import LAYOUTS
from numerics import assert_matches, same_bits
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_cute

SOME_LAYOUTS = [x for x in LAYOUTS if x.name in ("contiguous", "bnhd", "surrounded", "strided_columns")]


def _can_compile() -> bool:
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return shutil.which("g++") is not None and headers.exists()


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def _arguments(
    device: str, rng: torch.Generator, causal: Causal, layout: Any = LAYOUTS[0], head_dim: int = 64
) -> tuple[Any, ...]:
    case = Case(head_dim, 33, 65, heads_q=4)
    q, k, v = (layout.make(x) for x in case.inputs(device, rng))
    return q, k, v, *score(causal), "auto"


@pytest.mark.parametrize("operator", ["fwd", "_fwd"])
@pytest.mark.parametrize("layout", SOME_LAYOUTS, ids=str)
def test_opcheck(device: str, layout: Any, operator: str, rng: torch.Generator) -> None:
    call = getattr(torch.ops.flash_cute, operator).default
    torch.library.opcheck(call, _arguments(device, rng, True, layout))


@pytest.mark.parametrize("head_dim", [33, 256])
def test_opcheck_head_dims(device: str, head_dim: int, rng: torch.Generator) -> None:
    call = torch.ops.flash_cute.fwd.default
    torch.library.opcheck(call, _arguments(device, rng, False, head_dim=head_dim))


@pytest.mark.parametrize("layout", SOME_LAYOUTS, ids=str)
def test_opcheck_requires_grad(device: str, layout: Any, rng: torch.Generator) -> None:
    q, k, v, *rest = _arguments(device, rng, "top_left", layout)
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(torch.ops.flash_cute.fwd.default, (*inputs, *rest, True))


@pytest.mark.parametrize("operator", ["bwd", "_bwd"])
@pytest.mark.parametrize("layout", SOME_LAYOUTS, ids=str)
def test_opcheck_backward(device: str, layout: Any, operator: str, rng: torch.Generator) -> None:
    q, k, v, *mask, backend = _arguments(device, rng, True, layout)
    out, lse = flash_cute.fwd(q, k, v, True)
    call = getattr(torch.ops.flash_cute, operator).default
    dout = torch.ones_like(out)
    for dlse in (None, torch.ones_like(lse)):
        torch.library.opcheck(call, (dout, q, k, v, out, lse, dlse, *mask, True, backend))
    if operator == "bwd":
        dout.requires_grad_()
        options = (*mask, True, backend)
        torch.library.opcheck(call, (dout, q, k, v, out, lse, None, *options), test_utils=OPCHECKS)


def test_opcheck_empty(device: str) -> None:
    q = torch.zeros(1, 2, 5, 64, dtype=torch.float16, device=device)
    k = torch.zeros(1, 2, 0, 64, dtype=torch.float16, device=device)
    torch.library.opcheck(torch.ops.flash_cute.fwd.default, (q, k, k, *score("none"), "auto"))


@pytest.mark.parametrize("causal", CAUSAL, ids=mask_name)
def test_one_graph_for_all_lengths(device: str, causal: Causal, rng: torch.Generator) -> None:
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True, dynamic=True)
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = flash_cute.fwd(2 * q, k, v, causal)
        return out + 1, lse - 1

    for len_q, len_k in ((17, 33), (64, 130), (100, 77), (5, 6)):
        q, k, v = Case(64, len_q, len_k, heads_q=6).inputs(device, rng)
        expected_out, expected_lse = flash_cute.fwd(2 * q, k, v, causal)
        out, lse = attend(q, k, v)
        assert same_bits((out, lse), (expected_out + 1, expected_lse - 1))
    assert counter.frame_count == 1, "a new length was compiled again"


@pytest.mark.parametrize("return_lse", [False, True], ids=["out", "lse"])
@pytest.mark.parametrize("causal", CAUSAL, ids=mask_name)
def test_one_graph_for_all_lengths_with_gradients(
    device: str, causal: Causal, return_lse: bool, rng: torch.Generator
) -> None:
    counter = CompileCounterWithBackend("aot_eager")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        given = flash_cute.attention(2 * q, k, v, causal, return_lse=return_lse, deterministic=True)
        if return_lse:
            out, lse = given
            return (out * out).sum() + lse.exp().sum()
        return (given * given).sum()

    compiled = torch.compile(attend, backend=counter, fullgraph=True, dynamic=True)
    for len_q, len_k in ((17, 33), (64, 130), (100, 77), (5, 6)):
        leaves = [x.requires_grad_() for x in Case(64, len_q, len_k, heads_q=6).inputs(device, rng)]
        expected = torch.autograd.grad(attend(*leaves), leaves)
        given = torch.autograd.grad(compiled(*leaves), leaves)
        assert same_bits(given, expected)
    assert counter.frame_count == 1, "a new length was compiled again"


@pytest.mark.parametrize("mode", [False, True])
def test_deterministic_is_what_torch_says_in_a_graph(mode: bool, rng: torch.Generator) -> None:
    inputs = [x.requires_grad_() for x in Case(64, 17, 33).inputs("cpu", rng)]
    seen = []

    def backend(module: torch.fx.GraphModule, example: Any) -> Any:
        seen.extend(n.args[-1] for n in module.graph.nodes if "flash_cute" in str(n.target))
        return module

    torch.use_deterministic_algorithms(mode)
    try:
        torch.compile(flash_cute.attention, backend=backend, fullgraph=True)(*inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [mode]


def test_double_backward_of_a_graph_raises(device: str, rng: torch.Generator) -> None:
    leaves = [x.requires_grad_() for x in Case(64, 17, 33).inputs(device, rng)]
    out = torch.compile(flash_cute.attention, backend="aot_eager", fullgraph=True)(*leaves)
    with pytest.raises((RuntimeError, NotImplementedError), match="double backward"):
        (dq,) = torch.autograd.grad(out.float().sum(), leaves[0], create_graph=True)
        dq.float().sum().backward()


def test_autocast_in_a_graph(device: str, rng: torch.Generator) -> None:
    leaves = [x.requires_grad_() for x in Case(64, 17, 33, dtype=torch.float32).inputs(device, rng)]
    compiled = torch.compile(flash_cute.attention, backend="aot_eager", fullgraph=True)
    with torch.autocast(device, torch.bfloat16):
        outs = [attend(*leaves, deterministic=True) for attend in (compiled, flash_cute.attention)]
    assert outs[0].dtype == torch.bfloat16
    assert same_bits(*(torch.autograd.grad(out.float().square().sum(), leaves) for out in outs))


def test_checkpoint_in_a_graph(device: str, rng: torch.Generator) -> None:
    def block(*x: torch.Tensor) -> torch.Tensor:
        return flash_cute.attention(2 * x[0], *x[1:], True, deterministic=True)

    def attend(*x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(block, *x, use_reentrant=False)  # fullgraph has no other

    leaves = [x.requires_grad_() for x in Case(64, 65, 77).inputs(device, rng)]
    expected = torch.autograd.grad(block(*leaves).float().square().sum(), leaves)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    assert same_bits(torch.autograd.grad(compiled(*leaves).float().square().sum(), leaves), expected)


def test_gradients_of_a_strided_graph_input(device: str, rng: torch.Generator) -> None:
    """The fakes say how the gradients are laid out; a graph that relies on it is right."""
    layout = next(x for x in LAYOUTS if x.name == "bnhd")
    leaves = [layout.make(x).detach().requires_grad_() for x in Case(64, 65, 77).inputs(device, rng)]
    compiled = torch.compile(flash_cute.attention, backend="aot_eager", fullgraph=True)
    given = torch.autograd.grad(compiled(*leaves, deterministic=True).float().square().sum(), leaves)
    expected = torch.autograd.grad(flash_cute.attention(*leaves, deterministic=True).float().square().sum(), leaves)
    assert same_bits(given, expected)
    assert [x.stride() for x in given] == [x.stride() for x in leaves]


@pytest.mark.skipif(not _can_compile(), reason="inductor needs a C++ compiler and Python's headers")
def test_inductor(device: str, rng: torch.Generator) -> None:
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("a minute of C++ compilation, which machines without a GPU test")

    def attend(x: torch.Tensor) -> torch.Tensor:
        q, k, v = x.unflatten(-1, (3, 4, 32)).transpose(1, 3).unbind(2)
        out, lse = flash_cute.fwd(q, k, v, causal=True, scale=0.2)
        return torch.relu(out.transpose(1, 2).flatten(2)) * lse.exp().sum()

    x = torch.randn(2, 65, 384, generator=rng).to(device, torch.bfloat16)
    compiled = torch.compile(attend, fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(x), attend(x), rtol=0.05, atol=0.05)
    x.requires_grad_()
    given, expected = (torch.autograd.grad(f(x).sum(), x)[0] for f in (compiled, attend))
    torch.testing.assert_close(given, expected, rtol=0.05, atol=0.05 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", SOME_LAYOUTS, ids=str)
def test_fake_of_a_gpu_needs_no_gpu(layout: Any, dtype: torch.dtype) -> None:
    real = layout.make(torch.zeros(2, 4, 33, 40, dtype=dtype))
    with FakeTensorMode():
        q = torch.empty_strided(real.shape, real.stride(), dtype=dtype, device="cuda")
        k = torch.empty(2, 2, 65, 40, dtype=dtype, device="cuda")
        out, lse = flash_cute.fwd(q, k, k, True)
    assert (out.shape, out.dtype, out.device.type) == (q.shape, dtype, "cuda")
    assert out.stride() == torch.empty_like(real).stride()
    assert (lse.shape, lse.dtype, lse.device.type) == ((2, 4, 33), torch.float32, "cuda")
    assert lse.is_contiguous()


def test_meta() -> None:
    q = torch.empty(2, 4, 33, 64, device="meta", dtype=torch.float16)
    k = torch.empty(2, 2, 65, 64, device="meta", dtype=torch.float16)
    out, lse = flash_cute.fwd(q, k, k)
    assert (out.shape, lse.shape, out.device.type) == ((2, 4, 33, 64), (2, 4, 33), "meta")
    q.requires_grad_()
    flash_cute.attention(q, k, k).sum().backward()
    assert q.grad is not None
    assert (q.grad.shape, q.grad.device.type) == (q.shape, "meta")


def test_make_fx_traces_one_operator(device: str, rng: torch.Generator) -> None:
    q, k, v = Case(64, 33, 65).inputs(device, rng)
    traced = torch.fx.experimental.proxy_tensor.make_fx(lambda *x: flash_cute.fwd(*x, True), tracing_mode="symbolic")(
        q, k, v
    )
    calls = [node for node in traced.graph.nodes if "flash_cute" in str(node.target)]
    assert len(calls) == 1, traced.graph
    assert_matches(*traced(q, k, v), q, k, v, True)
