"""Sinks: exp(sink) more in a row's denominator, and nothing more in its LSE; they have a gradient."""

from __future__ import annotations

import pytest
import torch
from cases import CAUSAL, CUDA_DTYPES, Backward, Case, Causal, Forward, mask_name, score
from checks import assert_exact, inputs_and_options, on_each_device
from numerics import assert_gradients_match, assert_matches, same_bits

import flash_cute

SINGLE, DOUBLE = torch.float32, torch.float64
CASES = [
    *(
        Case(64, len_q, len_k, causal, SINGLE, heads_q=4, sinks=SINGLE)
        for len_q, len_k in ((1, 1), (1, 200), (65, 129), (129, 65), (300, 300))
        for causal in CAUSAL
    ),
    *(
        Case(head_dim, 113, 203, True, dtype, sinks=sinks)
        for head_dim in (32, 128, 256)
        for dtype in (torch.float16, torch.bfloat16)
        for sinks in (dtype, SINGLE)
    ),
    Case(128, 203, 113, "top_left", DOUBLE, sinks=DOUBLE),
    Case(128, 113, 203, dtype=DOUBLE, sinks=SINGLE),
    Case(64, 300, 300, True, dtype=SINGLE, heads_q=8, window=(127, 0), sinks=SINGLE),
]


@pytest.mark.kernel
@pytest.mark.parametrize(("device", "case"), on_each_device(CASES))
@pytest.mark.parametrize("dlse", [False, True])
def test_exact(
    device: str, case: Case, dlse: bool, backend: str | None, fwd: Forward, bwd: Backward, rng: torch.Generator
) -> None:
    assert_exact(case, device, fwd, bwd, rng, dlse=dlse, backend=backend)


@pytest.mark.kernel
@pytest.mark.parametrize("causal", CAUSAL, ids=mask_name)
def test_the_lse_is_without_them(
    device: str, causal: Causal, backend: str | None, fwd: Forward, bwd: Backward, rng: torch.Generator
) -> None:
    """To the bit; and sinks of -inf are none, whose gradient is 0."""
    inputs, options = inputs_and_options(Case(64, 65, 129, causal, heads_q=4, sinks=SINGLE), device, rng)
    out, lse = fwd(*inputs, causal)
    assert same_bits((lse,), fwd(*inputs, causal, **options)[1:])
    none = torch.full_like(options["sinks"], -torch.inf)
    assert same_bits((out, lse), fwd(*inputs, causal, sinks=none))
    *gradients, dsinks = bwd(inputs[0], *inputs, causal, sinks=none, deterministic=True)
    assert same_bits(tuple(gradients), bwd(inputs[0], *inputs, causal, deterministic=True))
    assert (dsinks == 0).all()


@pytest.mark.kernel
@pytest.mark.parametrize("head_dim", [32, 128, 256])
def test_a_gradient_of_the_lse_costs_no_accuracy(
    device: str, head_dim: int, bwd: Backward, rng: torch.Generator
) -> None:
    """With one, kernels of float16 read a scaled dO: by powers of two, which round nothing."""
    dtype = torch.float16 if device.startswith("cuda") else SINGLE
    (q, k, v), options = inputs_and_options(Case(head_dim, 300, 300, True, dtype, heads_q=4, sinks=SINGLE), device, rng)
    options["sinks"] += 3
    dout = torch.randn(q.shape, generator=rng).to(q)
    truth = flash_cute.reference.gradients(dout, q, k, v, True, sinks=options["sinks"])

    def errors(**dlse: torch.Tensor) -> torch.Tensor:
        given = bwd(dout, q, k, v, True, **options, **dlse)
        pairs = zip(given[:3], truth, strict=False)
        return torch.stack([(one.double() - true_one).square().mean().sqrt() for one, true_one in pairs])

    none = torch.zeros(q.shape[:3], dtype=SINGLE, device=device)
    assert (errors(dlse=none) <= 1.02 * errors() + 1e-9).all()


@pytest.mark.kernel
@pytest.mark.parametrize("sink", [18.0, 60.0, 100.0, 200.0, 5000.0])
@pytest.mark.parametrize("head_dim, head_dim_v", [(64, 64), (192, 128)])
@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
def test_far_above_the_scores(
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    head_dim_v: int,
    sink: float,
    backend: str | None,
    fwd: Forward,
    bwd: Backward,
    rng: torch.Generator,
) -> None:
    """The keys have next to no weight, and the gradient that comes through the LSE is what it is without sinks."""
    case = Case(head_dim, 65, 129, True, dtype if device == "cuda" else SINGLE, head_dim_v=head_dim_v)
    (q, k, v), _ = inputs_and_options(case, device, rng)
    sinks = torch.full((2,), sink, device=device)
    out, lse = fwd(q, k, v, True, sinks=sinks)
    assert_matches(out, lse, q, k, v, True, sinks=sinks)
    dout, dlse = case.flow(device, rng)
    for flow in (dout, torch.zeros_like(dout)):
        gradients = bwd(flow, q, k, v, True, sinks=sinks, dlse=dlse)
        assert_gradients_match(gradients, flow, q, k, v, True, sinks=sinks, dlse=dlse)


@pytest.mark.kernel
def test_rows_that_see_no_key(
    device: str, backend: str | None, fwd: Forward, bwd: Backward, rng: torch.Generator
) -> None:
    """They give the sinks no gradient either, whatever flows into them (on a GPU: whatever is finite)."""
    (q, k, v), options = inputs_and_options(Case(64, 129, 65, True, sinks=SINGLE), device, rng)
    dout = torch.randn(q.shape, generator=rng).to(q)
    first = bwd(dout, q, k, v, True, deterministic=True, **options)
    dout[:, :, :64] = torch.inf if device == "cpu" else 6e4
    assert same_bits(first, bwd(dout, q, k, v, True, deterministic=True, **options))
    out, lse = fwd(q, k[:, :, :0], v[:, :, :0], **options)
    assert (out == 0).all() and (lse == -torch.inf).all()
    gradients = bwd(q, q, k[:, :, :0], v[:, :, :0], **options)
    assert all((x == 0).all() for x in gradients) and gradients[3].shape == (2,)


def test_all_scores_minus_infinity(rng: torch.Generator) -> None:
    """A row that sees keys without any weight: all of its weight is the sink's."""
    q, k, v = Case(64, 65, 77, dtype=SINGLE).inputs("cpu", rng)
    k[..., 0] = -torch.inf
    out, lse = flash_cute.fwd(q.abs() + 0.1, k, v, sinks=torch.tensor([0.0, -torch.inf]))
    assert (lse == -torch.inf).all()
    assert (out[:, 0] == 0).all() and out[:, 1].isnan().all()


@pytest.mark.kernel
def test_parts_of_the_keys(device: str, backend: str | None, fwd: Forward, rng: torch.Generator) -> None:
    """Parts are merged by their LSE without sinks, which are applied once, at the end."""
    (q, k, v), options = inputs_and_options(Case(64, 65, 129, sinks=SINGLE), device, rng)
    parts = [fwd(q, k[:, :, x], v[:, :, x]) for x in (slice(0, 40), slice(40, 129))]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    out = sum(x.float() * (y - lse).exp().unsqueeze(-1) for x, y in parts)
    out = out * torch.sigmoid(lse - options["sinks"][:, None]).unsqueeze(-1)
    whole, whole_lse = fwd(q, k, v, **options)
    torch.testing.assert_close(out, whole.float(), rtol=0, atol=2e-3)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("causal", CAUSAL, ids=mask_name)
@pytest.mark.parametrize("dlse", [False, True])
def test_gradcheck(causal: Causal, dlse: bool, rng: torch.Generator) -> None:
    case = Case(6, 5, 7, causal, DOUBLE, heads_q=4, sinks=DOUBLE)
    leaves = [x.requires_grad_() for x in (*case.inputs("cpu", rng), case.options("cpu", rng)["sinks"])]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return flash_cute.fwd(q, k, v, causal, sinks=sinks)[: 1 + dlse]

    assert torch.autograd.gradcheck(attend, leaves)


def test_sinks_alone_require_grad(device: str, rng: torch.Generator) -> None:
    inputs, options = inputs_and_options(Case(16, 9, 13, True, heads_q=4, sinks=torch.float16), device, rng)
    sinks = options["sinks"].requires_grad_()
    out, lse = flash_cute.fwd(*inputs, True, sinks=sinks)
    (given,) = torch.autograd.grad(out, sinks, torch.ones_like(out), retain_graph=True)
    assert given.dtype == torch.float16
    tensors = (torch.ones_like(out), *inputs, out, lse)
    assert same_bits((given,), flash_cute.bwd(*[x.detach() for x in tensors], True, sinks=sinks.detach())[3:])
    (given,) = torch.autograd.grad(lse, sinks, torch.ones_like(lse))
    assert (given == 0).all(), "the LSE depends on the sinks"


def test_what_comes_back(device: str, rng: torch.Generator) -> None:
    """dsinks is a fourth result where sinks are given; the operator always has four."""
    inputs, options = inputs_and_options(Case(16, 9, 13, heads_q=4, sinks=SINGLE), device, rng)
    out, lse = flash_cute.fwd(*inputs)
    assert len(flash_cute.bwd(out, *inputs, out, lse)) == 3
    assert len(flash_cute.bwd(out, *inputs, out, lse, **options)) == 4
    dsinks = torch.ops.flash_cute.bwd(out, *inputs, out, lse, None, *score(), False, "auto")[3]
    assert (dsinks.shape, dsinks.dtype, dsinks.device) == ((0,), torch.float32, out.device)


def test_autocast(rng: torch.Generator) -> None:
    """q, k, v and sinks of 16 bits take autocast's dtype; float32 sinks stay, and their gradient is float32."""
    case = Case(16, 9, 13, heads_q=4, dtype=SINGLE, sinks=SINGLE)
    inputs, sinks = case.inputs("cpu", rng), case.options("cpu", rng)["sinks"].requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_cute.attention(*inputs, sinks=sinks)
        halves = flash_cute.attention(*(x.half() for x in inputs), sinks=sinks.detach().half())
    assert out.dtype == halves.dtype == torch.bfloat16
    (given,) = torch.autograd.grad(out.sum(), sinks)
    assert given.dtype == SINGLE
    narrow = [x.bfloat16() for x in inputs]
    assert same_bits((out,), (flash_cute.attention(*narrow, sinks=sinks),))
