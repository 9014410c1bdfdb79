"""Packed sequences under torch.compile and torch.export, and what opcheck says of their operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CAUSAL, Causal, mask_name
from checks import OPCHECKS
from numerics import same_bits
from packed import Packed, offsets, pack
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_cute

LENGTHS = ((5, 9), (17, 17), (0, 3), (7, 2))


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


@pytest.fixture
def packed(device: str, rng: torch.Generator) -> Packed:
    return pack(LENGTHS, device, rng, head_dim=16)


def _loss(results: Any) -> torch.Tensor:
    out, lse = results
    return (out * out).sum() + lse.exp().sum()


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
        given = compiled(packed.call, max(map(max, lengths)))
        assert same_bits((given,), (flash_cute.varlen_attention(*packed.call, True),))
    assert counter.frame_count == 1, "other lengths were compiled again"


def test_sinks_in_a_graph(device: str, rng: torch.Generator) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, of: torch.Tensor) -> Any:
        return _loss(flash_cute.varlen_fwd(q, k, v, of, of, True, sinks=sinks, window=(5, 0), deterministic=True))

    packed = pack(((9, 9), (30, 30)), device, rng, head_dim=16)
    leaves = [*(x.requires_grad_() for x in packed.tensors), torch.ones(4, device=device, requires_grad=True)]
    compiled, _ = _compiled_in_one_graph(attend)
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
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
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


@pytest.mark.parametrize("operator", ["varlen_fwd", "_varlen_fwd"])
def test_opcheck(packed: Packed, operator: str) -> None:
    used = torch.tensor([1, 20, 3, 0], dtype=torch.int32, device=packed.q.device)
    call = getattr(torch.ops.flash_cute, operator).default
    score = (None, 3, 0.5, None, None, None)  # right side, softcap, sinks, slopes, scale
    for lengths in ((None, None, None, None), (used, used, 17, 17)):
        torch.library.opcheck(call, (*packed.call, *lengths, "none", None, None, None, None, None, None, "auto"))
    sinks, slopes = torch.ones(4, device=packed.q.device), torch.ones(4, 4, device=packed.q.device)
    rest = ("bottom_right", 5, *score[1:3], sinks, slopes, None)
    torch.library.opcheck(call, (*packed.call, None, used, None, None, *rest, "auto"))


def test_opcheck_requires_grad(packed: Packed) -> None:
    leaves = packed.replace(**{x: getattr(packed, x).requires_grad_() for x in ("q", "k", "v")})
    sinks = torch.ones(4, device=leaves.q.device, requires_grad=True)
    for given in (None, sinks):
        mask = ("bottom_right", None, None, None, given, None, None)
        call = (*leaves.call, None, None, None, None, *mask, "auto", True)
        torch.library.opcheck(torch.ops.flash_cute.varlen_fwd.default, call)


@pytest.mark.parametrize("operator", ["varlen_bwd", "_varlen_bwd"])
@pytest.mark.parametrize("head_dim_v", [16, 24])
def test_opcheck_backward(device: str, head_dim_v: int, operator: str, rng: torch.Generator) -> None:
    packed = pack(LENGTHS, device, rng, head_dim=16, head_dim_v=head_dim_v)
    call = getattr(torch.ops.flash_cute, operator).default
    out, lse = flash_cute.varlen_fwd(*packed.call, True)
    dout = torch.ones_like(out)
    sinks = torch.ones(4, device=device)
    for dlse, given in ((None, None), (torch.ones_like(lse), sinks)):
        tensors = (dout, *packed.tensors, out, lse, dlse, *packed.call[3:], None, None, None, None)
        rest = ("bottom_right", None, None, None, given, None, None, True, "auto")
        torch.library.opcheck(call, (*tensors, *rest))
    if operator == "varlen_bwd":
        tensors = (dout.requires_grad_(), *tensors[1:])
        torch.library.opcheck(call, (*tensors, *rest), test_utils=OPCHECKS)


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
