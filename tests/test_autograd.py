"""There is no backward yet: results know that they need one, and asking for it raises."""

from __future__ import annotations

import pytest
import torch
from cases import Case, Inputs
from numerics import same_bits

import flash_cute


@pytest.fixture
def inputs(device: str, rng: torch.Generator) -> Inputs:
    return Case(16, 5, 7, heads_q=4).inputs(device, rng)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
@pytest.mark.parametrize("result", [0, 1], ids=["out", "lse"])
def test_backward_raises(inputs: Inputs, which: int, result: int) -> None:
    inputs[which].requires_grad_()
    given = flash_cute.fwd(*inputs, True)[result]
    assert given.requires_grad
    with pytest.raises((RuntimeError, NotImplementedError), match="backward"):
        given.sum().backward()
    assert inputs[which].grad is None


def test_backward_of_the_operator_raises(inputs: Inputs) -> None:
    inputs[0].requires_grad_()
    out, lse = torch.ops.flash_cute.fwd(*inputs, "none", None, "auto")
    with pytest.raises((RuntimeError, NotImplementedError), match="backward"):
        torch.autograd.grad(out.sum() + lse.sum(), inputs[0])


def test_gradient_of_a_non_leaf_raises(inputs: Inputs) -> None:
    weight = torch.ones((), device=inputs[0].device, requires_grad=True)
    out, _ = flash_cute.fwd(inputs[0] * weight.half(), inputs[1], inputs[2])
    with pytest.raises((RuntimeError, NotImplementedError), match="backward"):
        out.sum().backward()


def test_nothing_requires_grad_unless_asked(inputs: Inputs) -> None:
    for result in flash_cute.fwd(*inputs):
        assert not result.requires_grad
    inputs[0].requires_grad_()
    with torch.no_grad():
        assert not flash_cute.fwd(*inputs)[0].requires_grad
    with torch.inference_mode():
        assert not flash_cute.fwd(*inputs)[0].requires_grad


def test_grad_mode_does_not_change_the_result(inputs: Inputs) -> None:
    plain = flash_cute.fwd(*inputs, True)
    with torch.inference_mode():
        inference = flash_cute.fwd(*inputs, True)
    inputs[1].requires_grad_()
    assert same_bits(plain, inference)
    assert same_bits(plain, flash_cute.fwd(*inputs, True))


def test_inference_tensors_work(inputs: Inputs) -> None:
    with torch.inference_mode():
        made = [x.clone() for x in inputs]
    assert same_bits(flash_cute.fwd(*made), flash_cute.fwd(*inputs))
