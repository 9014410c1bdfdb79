"""The operator is a good citizen of torch.compile: opcheck, fakes, one full graph with dynamic shapes."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CAUSAL, Case, Causal, mask_name
from layouts import LAYOUTS
from numerics import assert_matches, same_bits
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_cute

# All of opcheck's but test_aot_dispatch_dynamic, which runs the backward where an input requires grad: that must raise.
FORWARD_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
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
    return q, k, v, mask_name(causal), None, "auto"


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
    """With the checks that do not run the backward; that it raises is tested in test_autograd.py."""
    q, k, v, *rest = _arguments(device, rng, "top_left", layout)
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(torch.ops.flash_cute.fwd.default, (*inputs, *rest), test_utils=FORWARD_CHECKS)


def test_opcheck_empty(device: str) -> None:
    q = torch.zeros(1, 2, 5, 64, dtype=torch.float16, device=device)
    k = torch.zeros(1, 2, 0, 64, dtype=torch.float16, device=device)
    torch.library.opcheck(torch.ops.flash_cute.fwd.default, (q, k, k, "none", None, "auto"))


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
    assert counter.frame_count == 1, "a new length was compiled anew"


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("layout", SOME_LAYOUTS, ids=str)
def test_fake_of_a_gpu_needs_no_gpu(layout: Any, dtype: torch.dtype) -> None:
    real = layout.make(torch.zeros(2, 4, 33, 40, dtype=dtype))
    with FakeTensorMode():
        q = torch.empty_strided(real.shape, real.stride(), dtype=dtype, device="cuda")
        k = torch.empty(2, 2, 65, 40, dtype=dtype, device="cuda")
        out, lse = flash_cute.fwd(q, k, k, True)
    assert (out.shape, out.dtype, out.device.type) == (q.shape, dtype, "cuda")
    assert out.stride() == torch.empty_like(real).stride()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert (lse.shape, lse.dtype, lse.device.type) == ((2, 4, 33), wide, "cuda")
    assert lse.is_contiguous()


def test_meta() -> None:
    q = torch.empty(2, 4, 33, 64, device="meta", dtype=torch.float16)
    k = torch.empty(2, 2, 65, 64, device="meta", dtype=torch.float16)
    out, lse = flash_cute.fwd(q, k, k)
    assert (out.shape, lse.shape, out.device.type) == ((2, 4, 33, 64), (2, 4, 33), "meta")


def test_make_fx_traces_one_operator(device: str, rng: torch.Generator) -> None:
    q, k, v = Case(64, 33, 65).inputs(device, rng)
    traced = torch.fx.experimental.proxy_tensor.make_fx(lambda *x: flash_cute.fwd(*x, True), tracing_mode="symbolic")(
        q, k, v
    )
    calls = [node for node in traced.graph.nodes if "flash_cute" in str(node.target)]
    assert len(calls) == 1, traced.graph
    assert_matches(*traced(q, k, v), q, k, v, True)
