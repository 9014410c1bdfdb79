"""What is differentiable and what is not: through which results, by which ways, and what a second derivative says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Case, Inputs, score
from numerics import same_bits
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import flash_cute
from flash_cute import autograd


@pytest.fixture
def inputs(device: str, rng: torch.Generator) -> Inputs:
    return Case(16, 5, 7, heads_q=4).inputs(device, rng)


@pytest.fixture
def leaves(inputs: Inputs) -> Inputs:
    q, k, v = (x.requires_grad_() for x in inputs)
    return q, k, v


def _operator(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return torch.ops.flash_cute.fwd(q, k, v, *score("bottom_right"), "auto")


def _function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return flash_cute.fwd(q, k, v, True)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return flash_cute.attention(q, k, v, True, return_lse=True)


WAYS = (_operator, _function, _attention)


def _gradients(call: Callable[..., Any], leaves: Inputs) -> tuple[torch.Tensor, ...]:
    out, lse = call(*leaves)
    return torch.autograd.grad((out * out).sum() + (lse * lse).sum(), leaves)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_has_the_gradients_of_bwd(leaves: Inputs, way: Callable[..., Any]) -> None:
    q, k, v = leaves
    with torch.no_grad():
        out, lse = flash_cute.fwd(q, k, v, True)
        expected = flash_cute.bwd(2 * out, q, k, v, out, lse, True, dlse=2 * lse, deterministic=True)
    torch.use_deterministic_algorithms(True)
    try:
        assert same_bits(_gradients(way, leaves), expected)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
@pytest.mark.parametrize("result", [0, 1], ids=["out", "lse"])
def test_one_input_and_one_result(inputs: Inputs, which: int, result: int, way: Callable[..., Any]) -> None:
    inputs[which].requires_grad_()
    given = way(*inputs)[result]
    assert given.requires_grad
    given.sum().backward()
    gradient = inputs[which].grad
    assert gradient is not None
    assert gradient.isfinite().all()
    assert bool((gradient == 0).all()) == (which == 2 and result == 1), "v has no influence on the LSE, all others have"
    assert all(x.grad is None for x in inputs if x is not inputs[which])


def test_gradient_of_a_non_leaf(inputs: Inputs) -> None:
    weight = torch.ones((), device=inputs[0].device, requires_grad=True)
    flash_cute.attention(inputs[0] * weight.half(), inputs[1], inputs[2]).sum().backward()
    assert weight.grad is not None and weight.grad.isfinite()


def test_a_graph_may_be_kept(leaves: Inputs) -> None:
    out, _ = _deterministic(*leaves)
    once = torch.autograd.grad(out.float().sum(), leaves, retain_graph=True)
    assert same_bits(torch.autograd.grad(out.float().sum(), leaves), once)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out.float().sum(), leaves)


def test_attention_returns_the_lse_when_asked(inputs: Inputs) -> None:
    out, lse = flash_cute.fwd(*inputs, True)
    assert same_bits((flash_cute.attention(*inputs, True),), (out,))
    assert same_bits(flash_cute.attention(*inputs, True, return_lse=True), (out, lse))
    inputs[0].requires_grad_()
    assert same_bits((flash_cute.attention(*inputs, True),), (out,))
    assert same_bits(flash_cute.attention(*inputs, True, return_lse=True), (out, lse))


@pytest.mark.parametrize("way", [*WAYS, lambda *x: (flash_cute.attention(*x, True), None)])
def test_no_gradient_of_the_lse_is_made_up(
    leaves: Inputs, way: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[torch.Tensor | None] = []
    right = autograd.DENSE.bwd_without_autograd

    def watch(*args: Any) -> Any:
        given.append(args[6])
        return right(*args)

    monkeypatch.setattr(autograd.DENSE, "bwd_without_autograd", watch)
    way(*leaves)[0].sum().backward()
    assert given == [None]


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


@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
def test_an_input_changed_in_between_is_noticed(leaves: Inputs, which: int) -> None:
    copies = [x * 1 for x in leaves]
    out = flash_cute.attention(*copies)
    copies[which].mul_(2)
    with pytest.raises(RuntimeError, match="inplace"):
        out.sum().backward()


def test_a_result_changed_in_between_is_noticed(leaves: Inputs) -> None:
    out, _ = flash_cute.fwd(*leaves)
    out.mul_(2)
    with pytest.raises(RuntimeError, match="inplace"):
        out.sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(leaves: Inputs, use_reentrant: bool) -> None:
    def block(*x: torch.Tensor) -> Any:
        return flash_cute.fwd(2 * x[0], *x[1:], True, deterministic=True)

    expected = _gradients(block, leaves)
    out, lse = checkpoint(block, *leaves, use_reentrant=use_reentrant)
    ((out * out).sum() + (lse * lse).sum()).backward()
    assert same_bits(tuple(x.grad for x in leaves), expected)


def _double(leaves: Inputs, way: Callable[..., Any]) -> None:
    out, lse = way(*leaves)
    (dq,) = torch.autograd.grad(out.float().sum() + lse.sum(), leaves[0], create_graph=True)
    dq.sum().backward()


@pytest.mark.parametrize("way", WAYS)
def test_double_backward_raises(leaves: Inputs, way: Callable[..., Any]) -> None:
    with pytest.raises(NotImplementedError, match="double backward"):
        _double(leaves, way)
    assert all(x.grad is None for x in leaves)


@pytest.mark.parametrize("operator", [False, True], ids=["function", "operator"])
@pytest.mark.parametrize("which", range(7), ids=["dout", "q", "k", "v", "out", "lse", "dlse"])
def test_derivative_of_bwd_raises(inputs: Inputs, which: int, operator: bool) -> None:
    out, lse = flash_cute.fwd(*inputs)
    tensors = [torch.ones_like(out), *inputs, out, lse, torch.ones_like(lse)]
    tensors[which].requires_grad_()
    *six, dlse = tensors
    if operator:
        gradients = torch.ops.flash_cute.bwd(*tensors, *score("none"), False, "auto")
    else:
        gradients = flash_cute.bwd(*six, dlse=dlse)
    with pytest.raises(NotImplementedError, match="double backward"):
        gradients[2].sum().backward()


def test_derivative_is_raised_only_when_asked_for(leaves: Inputs) -> None:
    """create_graph for another part of a model's graph is no error."""
    gradients = torch.autograd.grad(flash_cute.attention(*leaves).float().sum(), leaves, create_graph=True)
    assert all(x.requires_grad for x in gradients)


def test_saved_tensors_may_be_elsewhere(leaves: Inputs) -> None:
    expected = _gradients(_deterministic, leaves)
    with torch.autograd.graph.save_on_cpu():
        assert same_bits(_gradients(_deterministic, leaves), expected)


def test_nothing_keeps_a_tensor(inputs: Inputs) -> None:
    """Not the operators, which own what is on PyTorch's stack, nor a graph that is gone."""
    out, lse = flash_cute.fwd(*inputs)
    tensors = [torch.ones_like(out), *inputs, out, lse, torch.ones_like(lse)]
    users = [x._use_count() for x in tensors]
    *six, dlse = tensors
    flash_cute.bwd(*six, dlse=dlse)
    flash_cute.bwd(*six)
    with pytest.raises(ValueError):
        flash_cute.bwd(*six, dlse=dlse, scale=-1.0)
    q = inputs[0].detach().requires_grad_()
    flash_cute.attention(q, *inputs[1:]).sum().backward()
    assert [x._use_count() for x in tensors] == users


@pytest.mark.parametrize("way", [_function, _attention])
def test_autocast_casts_as_sdpa_does(device: str, way: Callable[..., Any], rng: torch.Generator) -> None:
    q, k, v = (x.requires_grad_() for x in Case(16, 5, 7, dtype=torch.float32, heads_q=4).inputs(device, rng))
    with torch.autocast(device, torch.bfloat16):
        out, lse = way(q, k.half(), v)
        assert flash_cute.explain(q, k.half(), v).data["dtype"] == "bfloat16"
        with torch.autocast(device, enabled=False), pytest.raises(ValueError, match=r"q's dtype|CUDA"):
            way(q, k.half(), v)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert same_bits((out, lse), way(q.bfloat16(), k.half().bfloat16(), v.bfloat16()))
    out.float().sum().backward()
    assert all(x.grad is not None and x.grad.dtype == torch.float32 for x in (q, k, v))


def test_autocast_leaves_float64(rng: torch.Generator) -> None:
    q, k, v = Case(16, 5, 7, dtype=torch.float64).inputs("cpu", rng)
    with torch.autocast("cpu", torch.bfloat16):
        assert flash_cute.attention(q, k, v).dtype == torch.float64


def _deterministic(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
    return flash_cute.fwd(q, k, v, True, deterministic=True)


def test_torch_func(inputs: Inputs) -> None:
    def loss(*x: torch.Tensor) -> torch.Tensor:
        out, lse = flash_cute.fwd(*x, True, deterministic=True)
        return (out * out).sum() + (lse * lse).sum()

    given = torch.func.grad(loss, argnums=(0, 1, 2))(*inputs)
    leaves = [x.detach().requires_grad_() for x in inputs]
    assert same_bits(given, torch.autograd.grad(loss(*leaves), leaves))
    results, pull = torch.func.vjp(_deterministic, *inputs)
    assert same_bits(pull((2 * results[0], 2 * results[1])), given)
    with pytest.raises(NotImplementedError, match="double backward"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q, *inputs[1:]).sum())(inputs[0])
    with pytest.raises((RuntimeError, NotImplementedError), match="vmap"):
        torch.func.jacrev(_deterministic)(*inputs)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(_deterministic, inputs, inputs)


@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_a_number_has_no_gradient(name: str, inputs: Inputs) -> None:
    """A tensor stands for its number, and is refused where a gradient of it would be lost without a word."""
    q, k, v = inputs
    number = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    out, lse = flash_cute.fwd(q, k, v, True, **{name: 0.7})
    with torch.no_grad():
        assert same_bits(flash_cute.fwd(q, k, v, True, **{name: number}), (out, lse))
    assert same_bits(flash_cute.fwd(q, k, v, True, **{name: number.detach()}), (out, lse))
    leaf = q.detach().clone().requires_grad_()
    packed = [x[0].transpose(0, 1) for x in inputs]
    offsets = [torch.tensor([0, x.shape[0]], dtype=torch.int32, device=x.device) for x in packed[:2]]
    calls: list[Callable[[Any], Any]] = [
        lambda value: flash_cute.attention(q, k, v, **{name: value}),
        lambda value: flash_cute.attention(leaf, k, v, **{name: value}),
        lambda value: flash_cute.bwd(out, q, k, v, out, lse, True, **{name: value}),
        lambda value: flash_cute.varlen_attention(*packed, *offsets, **{name: value}),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=rf"^flash_cute: {name}: expected a number that does not require grad"):
            call(number)
        with pytest.raises(ValueError, match=rf"^flash_cute: {name}: expected a number that does not require grad"):
            torch.func.grad(lambda value: call(value)[0].sum())(number.detach())  # noqa: B023
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
            call(forward_ad.make_dual(number.detach(), torch.ones_like(number)))


def test_forward_mode_is_refused(inputs: Inputs) -> None:
    q, k, v = inputs
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            flash_cute.attention(dual, k, v)
        out, lse = flash_cute.fwd(q, k, v)
        with pytest.raises(NotImplementedError, match="forward-mode"):
            flash_cute.bwd(dual, q, k, v, out, lse)


@pytest.mark.parametrize("asked", [None, False, True])
@pytest.mark.parametrize("mode", [False, True])
@pytest.mark.parametrize("way", ["function", "operator", "bwd"])
def test_deterministic_is_what_torch_says_when_called(
    leaves: Inputs, asked: bool | None, mode: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[bool] = []
    right = autograd.DENSE.bwd_without_autograd

    def watch(*args: Any) -> Any:
        given.append(args[-2])
        return right(*args)

    monkeypatch.setattr(autograd.DENSE, "bwd_without_autograd", watch)
    torch.use_deterministic_algorithms(mode)
    try:
        if way == "bwd":
            with torch.no_grad():
                flash_cute.bwd(leaves[0], *leaves, *flash_cute.fwd(*leaves), deterministic=asked)
        elif way == "operator":
            out, _ = torch.ops.flash_cute.fwd(*leaves, *score("none"), "auto", asked)
        else:
            out = flash_cute.attention(*leaves, deterministic=asked)
    finally:
        torch.use_deterministic_algorithms(False)
    if way != "bwd":
        out.sum().backward()
    assert given == [mode if asked is None else asked]
