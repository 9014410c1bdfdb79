"""Packed sequences and the rest of PyTorch: autograd in all its forms, torch.compile, CUDA graphs, FLOPs, explain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CAUSAL, Causal, mask_name
from numerics import same_bits
from packed import Packed, assert_packed_gradients, assert_packed_matches, flow, offsets, pack, served
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import flash_cute
from flash_cute import autograd

LENGTHS = ((5, 9), (17, 17), (0, 3), (7, 2))
CUDA = pytest.param("cuda", marks=pytest.mark.cuda)
# All of opcheck's but test_aot_dispatch_dynamic, which runs the backward where an input requires grad; bwd has none.
FORWARD_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


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
    with served():
        return torch.ops.flash_cute.varlen_fwd(*packed.call, *lengths, *mask, "auto", True)


def _function(packed: Packed, causal: Causal = True, **score: Any) -> Any:
    with served():
        return flash_cute.varlen_fwd(*packed.call, causal, deterministic=True, **packed.used, **score)


def _attention(packed: Packed, causal: Causal = True, **score: Any) -> Any:
    with served():
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


def _compiled_in_one_graph(function: Callable[..., Any]) -> tuple[Callable[..., Any], CompileCounterWithBackend]:
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, backend=counter, fullgraph=True, dynamic=True), counter


@pytest.mark.parametrize("causal", CAUSAL, ids=mask_name)
@pytest.mark.parametrize("with_used", [False, True])
def test_one_graph_for_all_lengths(device: str, causal: Causal, with_used: bool, rng: torch.Generator) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *lengths: torch.Tensor) -> Any:
        used = dict(zip(("seqused_q", "seqused_k"), lengths[2:], strict=False))
        return _loss(flash_cute.varlen_fwd(2 * q, k, v, *lengths[:2], causal, deterministic=True, **used))

    compiled, counter = _compiled_in_one_graph(attend)
    for lengths in (LENGTHS, ((33, 65), (2, 1), (7, 7)), ((1, 9),) * 6, ((40, 3), (3, 40))):
        packed = pack(lengths, device, rng, head_dim=16, around=2, heads_q=12)  # no number of sequences
        leaves = [x.requires_grad_() for x in packed.tensors]
        extra = list(packed.call[3:])
        if with_used:
            extra += [torch.full((len(lengths),), 5, dtype=torch.int32, device=device)] * 2
        with served():
            expected = torch.autograd.grad(attend(*leaves, *extra), leaves)
            given = torch.autograd.grad(compiled(*leaves, *extra), leaves)
        assert same_bits(given, expected)
    assert counter.frame_count == 1, "other lengths were compiled again"


def test_hints_that_change_are_one_graph(device: str, rng: torch.Generator) -> None:
    compiled, counter = _compiled_in_one_graph(
        lambda packed, longest: flash_cute.varlen_attention(*packed, True, max_seqlen_q=longest, max_seqlen_k=longest)
    )
    for lengths in (LENGTHS, ((33, 65), (2, 1), (7, 7)), ((40, 3), (3, 40))):
        packed = pack(lengths, device, rng, head_dim=16)
        with served():
            given = compiled(packed.call, max(map(max, lengths)))
            assert same_bits((given,), (flash_cute.varlen_attention(*packed.call, True),))
    assert counter.frame_count == 1, "other lengths were compiled again"


def test_sinks_in_a_graph(device: str, rng: torch.Generator) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, of: torch.Tensor) -> Any:
        return _loss(flash_cute.varlen_fwd(q, k, v, of, of, True, sinks=sinks, window=(5, 0), deterministic=True))

    packed = pack(((9, 9), (30, 30)), device, rng, head_dim=16)
    leaves = [*(x.requires_grad_() for x in packed.tensors), torch.ones(4, device=device, requires_grad=True)]
    compiled, _ = _compiled_in_one_graph(attend)
    with served():
        expected = torch.autograd.grad(attend(*leaves, packed.cu_seqlens_q), leaves)
        given = torch.autograd.grad(compiled(*leaves, packed.cu_seqlens_q), leaves)
    assert same_bits(given, expected)


def test_totals_that_depend_on_data(device: str, rng: torch.Generator) -> None:
    """As where padding is taken out inside the graph: the number of rows has no hint."""

    def attend(x: torch.Tensor, keep: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        rows = x[keep.nonzero().squeeze(-1)]
        out: torch.Tensor = flash_cute.varlen_attention(rows, rows, rows, of, of, True)
        return out

    x = torch.randn(40, 2, 16, generator=rng).to(device, torch.float16 if device == "cuda" else torch.float32)
    keep = torch.rand(40, generator=rng) < 0.6
    of = offsets((3, 0, int(keep.sum()) - 3), device)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), served():
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
        assert same_bits((compiled(x, keep.to(device), of),), (attend(x, keep.to(device), of),))
        with pytest.raises(Exception, match="cu_seqlens_q: expected int32, got int64"):
            compiled(x, keep.to(device), of.long())


def test_export(rng: torch.Generator) -> None:
    class Attention(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
            return flash_cute.varlen_fwd(q, k, v, a, b, True)

    rows, keys, ends = (torch.export.Dim(name) for name in ("rows", "keys", "ends"))
    sizes = ({0: rows}, {0: keys}, {0: keys}, {0: ends}, {0: ends})
    example = pack(LENGTHS, "cpu", rng, head_dim=16).call
    program = torch.export.export(Attention(), example, dynamic_shapes=sizes).module()
    for lengths in (LENGTHS, ((33, 65), (2, 1)), ((3, 40),) * 5):
        packed = pack(lengths, "cpu", rng, head_dim=16)
        assert same_bits(program(*packed.call), Attention()(*packed.call))


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


@pytest.mark.parametrize("operator", ["varlen_fwd", "_varlen_fwd"])
def test_opcheck(packed: Packed, operator: str) -> None:
    used = torch.tensor([1, 20, 3, 0], dtype=torch.int32, device=packed.q.device)
    call = getattr(torch.ops.flash_cute, operator).default
    score = (None, 3, 0.5, None, None, None)  # right side, softcap, sinks, slopes, scale
    for lengths in ((None, None, None, None), (used, used, 17, 17)):
        with served():
            torch.library.opcheck(call, (*packed.call, *lengths, "none", None, None, None, None, None, None, "auto"))
    with served():
        sinks, slopes = torch.ones(4, device=packed.q.device), torch.ones(4, 4, device=packed.q.device)
        rest = ("bottom_right", 5, *score[1:3], sinks, slopes, None)
        torch.library.opcheck(call, (*packed.call, None, used, None, None, *rest, "auto"))


def test_opcheck_requires_grad(leaves: Packed) -> None:
    sinks = torch.ones(4, device=leaves.q.device, requires_grad=True)
    for given in (None, sinks):
        mask = ("bottom_right", None, None, None, given, None, None)
        with served():
            call = (*leaves.call, None, None, None, None, *mask, "auto", True)
            torch.library.opcheck(torch.ops.flash_cute.varlen_fwd.default, call)


@pytest.mark.parametrize("operator", ["varlen_bwd", "_varlen_bwd"])
@pytest.mark.parametrize("head_dim_v", [16, 24])
def test_opcheck_backward(device: str, head_dim_v: int, operator: str, rng: torch.Generator) -> None:
    packed = pack(LENGTHS, device, rng, head_dim=16, head_dim_v=head_dim_v)
    call = getattr(torch.ops.flash_cute, operator).default
    out, lse = _function(packed)
    dout = torch.ones_like(out)
    sinks = torch.ones(4, device=device)
    for dlse, given in ((None, None), (torch.ones_like(lse), sinks)):
        tensors = (dout, *packed.tensors, out, lse, dlse, *packed.call[3:], None, None, None, None)
        rest = ("bottom_right", None, None, None, given, None, None, True, "auto")
        torch.library.opcheck(call, (*tensors, *rest))
    if operator == "varlen_bwd":
        tensors = (dout.requires_grad_(), *tensors[1:])
        torch.library.opcheck(call, (*tensors, *rest), test_utils=FORWARD_CHECKS)


@pytest.mark.parametrize("head_dim_v", [16, 24, 8])
@pytest.mark.parametrize("form", ["contiguous", "qkv", "head_major", "expanded"])
def test_fakes_have_the_layout_of_the_results(form: str, head_dim_v: int, rng: torch.Generator) -> None:
    q, k, v = pack(LENGTHS, "cpu", rng, dtype=torch.half, head_dim=16, head_dim_v=head_dim_v).tensors
    if form == "qkv":
        q = torch.randn(29, 3, 4, 16).half()[:, 1]
    elif form == "head_major":
        q = torch.randn(4, 29, 16).half().transpose(0, 1)
    elif form == "expanded":
        q = torch.randn(29, 1, 16).half().expand(29, 4, 16)
    of_q, of_k = (offsets(side) for side in zip(*LENGTHS, strict=True))
    real = flash_cute.varlen_fwd(q, k, v, of_q, of_k)
    real += flash_cute.varlen_bwd(real[0], q, k, v, *real, of_q, of_k)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") for x in (q, k, v, of_q, of_k)]
        fake = flash_cute.varlen_fwd(*fakes)
        fake += flash_cute.varlen_bwd(fake[0], *fakes[:3], *fake, *fakes[3:])
    for x, y in zip(real, fake, strict=True):
        assert (x.shape, x.stride(), x.dtype, y.device.type) == (y.shape, y.stride(), y.dtype, "cuda")


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
    with served():
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
        with served():
            out, lse = flash_cute.varlen_fwd(*leaves.call, True, backend=backend)
            torch.autograd.grad((out, lse), leaves.tensors, (out.detach(), lse.detach()))

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
