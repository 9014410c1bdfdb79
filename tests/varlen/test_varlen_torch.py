"""Packed sequences and the rest of PyTorch: autograd in all its forms, CUDA graphs, FLOPs, explain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Causal, mask_name
from numerics import same_bits
from packed import Packed, assert_packed_gradients, assert_packed_matches, flow, pack
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flash_cute
from flash_cute import autograd

LENGTHS = ((5, 9), (17, 17), (0, 3), (7, 2))
CUDA = pytest.param("cuda", marks=pytest.mark.cuda)


@pytest.fixture
def packed(device: str, rng: torch.Generator) -> Packed:
    return pack(LENGTHS, device, rng, head_dim=16)


@pytest.fixture
def leaves(packed: Packed) -> Packed:
    for x in packed.tensors:
        x.requires_grad_()
    return packed


def _operator(packed: Packed, causal: Causal = True, **score: Any) -> Any:
    score = {"softcap": None, "sinks": None, "alibi_slopes": None, **score}
    lengths = (*packed.used.values(), None, None)
    mask = (mask_name(causal), None, None, *score.values(), None)
    return torch.ops.flash_cute.varlen_fwd(*packed.call, *lengths, *mask, "auto", True)


def _function(packed: Packed, causal: Causal = True, **score: Any) -> Any:
    return flash_cute.varlen_fwd(*packed.call, causal, deterministic=True, **packed.used, **score)


def _attention(packed: Packed, causal: Causal = True, **score: Any) -> Any:
    options = {"return_lse": True, "deterministic": True, **packed.used, **score}
    return flash_cute.varlen_attention(*packed.call, causal, **options)


WAYS = (_operator, _function, _attention)


def _loss(results: Any) -> torch.Tensor:
    out, lse = results
    return (out * out).sum() + lse.exp().sum()


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_has_the_gradients_of_bwd(leaves: Packed, way: Callable[..., Any], with_sinks: bool) -> None:
    sinks = torch.ones(4, device=leaves.q.device, requires_grad=True) if with_sinks else None
    given = torch.autograd.grad(_loss(way(leaves, sinks=sinks)), [*leaves.tensors, *([sinks] if with_sinks else [])])
    with torch.no_grad():
        out, lse = _function(leaves, sinks=sinks)
        tensors = (2 * out, *leaves.tensors, out, lse, *leaves.call[3:])
        expected = flash_cute.varlen_bwd(*tensors, True, dlse=lse.exp(), sinks=sinks, deterministic=True)
    assert same_bits(given, expected)


def test_one_result_and_no_gradient_of_the_other(leaves: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    right = autograd.VARLEN.bwd_without_autograd

    def watch(*args: Any) -> Any:
        given.append(args[6])
        return right(*args)

    monkeypatch.setattr(autograd.VARLEN, "bwd_without_autograd", watch)
    _function(leaves)[0].sum().backward()
    flash_cute.varlen_attention(*leaves.call).sum().backward()
    assert given == [None, None]
    assert all(x.grad is not None and x.grad.isfinite().all() for x in leaves.tensors)


def test_nothing_requires_grad_unless_asked(packed: Packed) -> None:
    assert not any(x.requires_grad for x in _function(packed))
    packed.k.requires_grad_()
    plain = _function(packed)
    assert all(x.requires_grad for x in plain)
    with torch.no_grad():
        assert same_bits(plain, _function(packed))
    with torch.inference_mode():
        assert same_bits(plain, _function(packed))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(leaves: Packed, use_reentrant: bool) -> None:
    def block(*x: torch.Tensor) -> Any:
        return _function(leaves.replace(q=2 * x[0], k=x[1], v=x[2]))

    expected = torch.autograd.grad(_loss(block(*leaves.tensors)), leaves.tensors)
    _loss(checkpoint(block, *leaves.tensors, use_reentrant=use_reentrant)).backward()
    assert same_bits(tuple(x.grad for x in leaves.tensors), expected)


def test_autocast(device: str, rng: torch.Generator) -> None:
    packed = pack(LENGTHS, device, rng, head_dim=16, dtype=torch.float32)
    for x in packed.tensors:
        x.requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        out, lse = _function(packed)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    q, k, v = (x.bfloat16() for x in packed.tensors)
    assert same_bits((out, lse), _function(packed.replace(q=q, k=k, v=v)))
    out.float().sum().backward()
    assert all(x.grad is not None and x.grad.dtype == torch.float32 for x in packed.tensors)


def test_torch_func(packed: Packed) -> None:
    def loss(*x: torch.Tensor) -> torch.Tensor:
        return _loss(_function(packed.replace(q=x[0], k=x[1], v=x[2])))

    given = torch.func.grad(loss, argnums=(0, 1, 2))(*packed.tensors)
    leaves = [x.detach().requires_grad_() for x in packed.tensors]
    assert same_bits(given, torch.autograd.grad(loss(*leaves), leaves))
    with pytest.raises(NotImplementedError, match="double backward"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q, *packed.tensors[1:]).sum())(packed.q)
    with pytest.raises(NotImplementedError, match="vmap"):
        torch.func.vmap(loss)(*(x.expand(3, *x.shape) for x in packed.tensors))
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(loss, packed.tensors, packed.tensors)


@pytest.mark.parametrize("way", WAYS)
def test_double_backward_raises(leaves: Packed, way: Callable[..., Any]) -> None:
    (dq,) = torch.autograd.grad(_loss(way(leaves)), leaves.q, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        dq.sum().backward()


def test_derivative_of_bwd_raises(packed: Packed) -> None:
    out, lse = _function(packed)
    dout = torch.ones_like(out, requires_grad=True)
    gradients = flash_cute.varlen_bwd(dout, *packed.tensors, out, lse, *packed.call[3:], True)
    with pytest.raises(NotImplementedError, match="double backward"):
        gradients[0].sum().backward()


@pytest.mark.parametrize("way", WAYS)
def test_slopes_have_no_gradient(leaves: Packed, way: Callable[..., Any]) -> None:
    slopes = torch.ones(4, device=leaves.q.device, requires_grad=True)
    with pytest.raises(ValueError, match="alibi_slopes: expected a tensor that does not require grad"):
        way(leaves, alibi_slopes=slopes)
    with torch.no_grad():
        way(leaves, alibi_slopes=slopes)


def test_an_input_changed_in_between_is_noticed(leaves: Packed) -> None:
    """The offsets too: the backward reads them again."""
    for name in ("q", "cu_seqlens_q", "seqused_k"):
        used = torch.tensor([9, 9, 9, 9], dtype=torch.int32, device=leaves.q.device)
        call = leaves.replace(q=leaves.q * 1, cu_seqlens_q=leaves.cu_seqlens_q.clone(), seqused_k=used)
        out, _ = _function(call)
        getattr(call, name).mul_(1)
        with pytest.raises(RuntimeError, match="inplace"):
            out.sum().backward()


def test_nothing_keeps_a_tensor(packed: Packed) -> None:
    used = torch.tensor([1, 2, 3, 4], dtype=torch.int32, device=packed.q.device)
    call = packed.replace(seqused_q=used, seqused_k=used)
    out, lse = _function(call)
    tensors = [torch.ones_like(out), *call.tensors, out, lse, *call.call[3:], used]
    users = [x._use_count() for x in tensors]
    flash_cute.varlen_bwd(*tensors[:8], True, **call.used)
    with pytest.raises(ValueError):
        flash_cute.varlen_bwd(*tensors[:8], True, scale=-1.0, **call.used)
    q = packed.q.detach().requires_grad_()
    _function(call.replace(q=q))[0].sum().backward()
    assert [x._use_count() for x in tensors] == users


def test_traced_by_fx_and_jit(rng: torch.Generator) -> None:
    packed = pack(LENGTHS, "cpu", rng, head_dim=16)

    def attend(q: Any, k: Any, v: Any, of_q: Any, of_k: Any) -> Any:
        return flash_cute.varlen_attention(q, k, v, of_q, of_k, True, scale=0.3)

    expected = (attend(*packed.call),)
    assert same_bits((torch.fx.symbolic_trace(attend)(*packed.call),), expected)
    traced = torch.jit.trace(attend, packed.call, check_trace=False)
    assert same_bits((traced(*packed.call),), expected)
    q = packed.q.requires_grad_()
    traced(*packed.call).sum().backward()
    assert q.grad is not None and q.grad.any()


def test_flops(packed: Packed) -> None:
    """As many as the sequences alone have, by the operator or its backward."""
    used = torch.tensor([3, 20, 3, 7], dtype=torch.int32, device=packed.q.device)
    for call in (packed, packed.replace(seqused_q=used)):
        pairs = sum((row.stop - row.start) * (key.stop - key.start) for row, key in call.sequences())
        leaves = call.replace(**{x: getattr(call, x).detach().requires_grad_() for x in ("q", "k", "v")})
        with FlopCounterMode(display=False) as counter:
            out, _ = _function(leaves)
        assert counter.get_total_flops() == 4 * 4 * pairs * 16
        with FlopCounterMode(display=False) as counter:
            out.float().sum().backward()
        assert counter.get_total_flops() == 10 * 4 * pairs * 16


def test_flops_of_fakes() -> None:
    """Without lengths to read: the hints, or sequences of equal lengths."""
    with FakeTensorMode():
        x, of = torch.empty(60, 4, 16), torch.empty(4, dtype=torch.int32)
        for hints, pairs in (({}, 3 * 20 * 20), ({"max_seqlen_q": 50, "max_seqlen_k": 50}, 3 * 50 * 50)):
            with FlopCounterMode(display=False) as counter:
                flash_cute.varlen_attention(x, x, x, of, of, **hints)
            assert counter.get_total_flops() == 4 * 4 * pairs * 16


@pytest.mark.parametrize("backward", [False, True])
def test_explain(rng: torch.Generator, backward: bool) -> None:
    packed = pack(LENGTHS, "cpu", rng, head_dim=16)
    lengths = {"cu_seqlens_q": packed.cu_seqlens_q, "cu_seqlens_k": packed.cu_seqlens_k, "max_seqlen_k": 17}
    explanation = flash_cute.explain(*packed.tensors, True, **lengths, backward=backward)
    data = explanation.data
    assert (data["backend"], data["packed"], data["batch"], data["len_q"], data["len_k"]) == ("cpu", True, 4, 29, 31)
    assert (data["max_seqlen_q"], data["max_seqlen_k"], data["seqused_q"]) == (None, 17, False)
    assert "lengths are read when the call runs" in str(explanation)
    assert set(data["copies"]) >= {"q", "k", "v"}
    dense = (x.transpose(0, 1)[None] for x in packed.tensors)
    assert "packed" not in flash_cute.explain(*dense, backward=backward).data


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
def test_a_graph_is_replayed_with_other_lengths(
    device: str, deterministic: bool, backend: str | None, rng: torch.Generator
) -> None:
    """Forward and backward in one graph, captured first of all; the offsets change between replays."""
    total, sequences = 600, 7
    q, k, v = (torch.randn(total, heads, 64, generator=rng).to(device, torch.float16) for heads in (4, 2, 2))
    packed = Packed(q, k, v, *(torch.zeros(sequences + 1, dtype=torch.int32, device=device) for _ in range(2)))
    leaves = [x.requires_grad_() for x in packed.tensors]
    dout, _ = flow(packed, rng)

    def step() -> Any:
        out, lse = flash_cute.varlen_fwd(*packed.call, True, deterministic=deterministic, backend=backend)
        return out, lse, torch.autograd.grad(out, leaves, dout)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse, gradients = step()
    for ends in (
        (100, 200, 300, 400, 500, 550, 600),
        (600,) * 7,
        (0, 1, 2, 3, 4, 5, 599),
        (7, 7, 300, 301, 302, 303, 303),
    ):
        of = torch.tensor([0, *ends], dtype=torch.int32, device=device)
        with torch.no_grad():
            packed.cu_seqlens_q.copy_(of)
            packed.cu_seqlens_k.copy_(of)
            for x in (out, lse, *gradients):
                x.fill_(float("nan"))
        graph.replay()
        assert_packed_matches(out.detach(), lse.detach(), packed, True)
        assert_packed_gradients(gradients, dout, packed, True)


@pytest.mark.parametrize("device", [CUDA])
def test_nothing_waits_for_the_device(leaves: Packed, device: str, backend: str | None) -> None:
    def step() -> None:
        out, lse = flash_cute.varlen_fwd(*leaves.call, True, backend=backend)
        torch.autograd.grad((out, lse), leaves.tensors, (out.detach(), lse.detach()))

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
