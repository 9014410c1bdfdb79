"""torch.vmap is refused with a sentence: the operator takes batches as it is."""

from __future__ import annotations

import pytest
import torch
from cases import Case, score
from numerics import same_bits

import flash_cute


@pytest.mark.filterwarnings("error")
def test_refused(device: str, rng: torch.Generator) -> None:
    q, k, v = (x.expand(3, *x.shape) for x in Case(16, 5, 7).inputs(device, rng))
    with pytest.raises((RuntimeError, NotImplementedError), match="vmap"):
        torch.vmap(flash_cute.fwd)(q, k, v)


@pytest.mark.filterwarnings("error")
def test_gradient_refused(device: str, rng: torch.Generator) -> None:
    q, k, v = Case(16, 5, 7).inputs(device, rng)
    with pytest.raises((RuntimeError, NotImplementedError), match="vmap"):
        torch.func.vmap(torch.func.grad(lambda x: flash_cute.attention(x, k, v).sum()))(q.expand(3, *q.shape))


def test_batched_gradients_are_each_ones(device: str, rng: torch.Generator) -> None:
    """autograd's own batching calls the backward once for each."""
    q, k, v = Case(16, 5, 7).inputs(device, rng)
    out = flash_cute.attention(q.requires_grad_(), k, v, deterministic=True)
    flow = torch.randn(3, *out.shape, generator=rng).to(out)
    (given,) = torch.autograd.grad(out, q, flow, is_grads_batched=True, retain_graph=True)
    for x, one in zip(given, flow, strict=True):
        assert same_bits((x,), torch.autograd.grad(out, q, one, retain_graph=True))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("operator", ["fwd", "_fwd"])
def test_operator_refused(device: str, operator: str, rng: torch.Generator) -> None:
    q, k, v = (x.expand(3, *x.shape) for x in Case(16, 5, 7).inputs(device, rng))
    call = getattr(torch.ops.flash_cute, operator)
    with pytest.raises((RuntimeError, NotImplementedError), match="vmap"):
        torch.vmap(lambda *x: call(*x, *score("none"), "auto"))(q, k, v)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("operator", ["bwd", "_bwd"])
def test_backward_refused(device: str, operator: str, rng: torch.Generator) -> None:
    q, k, v = (x.expand(3, *x.shape) for x in Case(16, 5, 5).inputs(device, rng))
    call = getattr(torch.ops.flash_cute, operator)
    options = (None, *score("none"), False, "auto")
    with pytest.raises((RuntimeError, NotImplementedError), match="vmap"):
        torch.vmap(lambda q, k, v: call(q, q, k, v, q, q[..., 0].float(), *options))(q, k, v)
