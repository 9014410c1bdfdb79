"""Other ways to look at a call: FLOP counts, selective checkpointing, torch.fx and torch.jit traces, hidden names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import Case, Inputs, score
from numerics import same_bits
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import flash_cute


@pytest.fixture
def leaves(device: str, rng: torch.Generator) -> Inputs:
    q, k, v = (x.requires_grad_() for x in Case(16, 5, 7, heads_q=4).inputs(device, rng))
    return q, k, v


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = flash_cute.attention(2 * q, k, v, True, deterministic=True)
    return out


def _gradients(call: Callable[..., torch.Tensor], leaves: Inputs) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(call(*leaves).float().square().sum(), leaves)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads_kv", [4, 1])
def test_flops_are_those_of_sdpa(device: str, heads_kv: int, causal: bool, rng: torch.Generator) -> None:
    """PyTorch counts the whole product whatever the mask, and five products backward."""
    inputs = Case(16, 5, 7, heads_q=4, heads_kv=heads_kv).inputs(device, rng)
    leaves = [x.requires_grad_() for x in inputs]
    with FlopCounterMode(display=False) as counted:
        out = flash_cute.attention(*leaves, causal)
        forward = counted.get_total_flops()
        out.sum().backward()
    shapes = [(2, 4, 5, 16), (2, 4, 7, 16), (2, 4, 7, 16)]  # PyTorch's formula knows no grouped heads
    aten = torch.ops.aten
    sdpa = flop_registry[aten._scaled_dot_product_flash_attention].__wrapped__(*shapes)
    sdpa_backward = flop_registry[aten._scaled_dot_product_flash_attention_backward].__wrapped__(shapes[0], *shapes)
    assert forward == sdpa == 4 * 2 * 4 * 5 * 7 * 16
    assert counted.get_total_flops() - forward == sdpa_backward == 5 * forward // 2


def test_flops_of_the_operators(device: str, rng: torch.Generator) -> None:
    q, k, v = Case(16, 5, 7).inputs(device, rng)
    with FlopCounterMode(display=False) as counted:
        out, lse = flash_cute.fwd(q, k, v)
        flash_cute.bwd(out, q, k, v, out, lse)
        torch.ops.flash_cute.bwd(out, q, k, v, out, lse, None, *score("none"), False, "auto")
    assert counted.get_total_flops() == 4 * 2 * 2 * 5 * 7 * 16 * 6


@pytest.mark.parametrize("call", ["attention", "operator"])
@pytest.mark.parametrize("saved", [False, True])
def test_selective_checkpointing(leaves: Inputs, saved: bool, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that saves the public operator's results spares the second forward, in eager mode too."""
    ran = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran.append(func) if "flash_cute" in str(func) else None
            return func(*args, **(kwargs or {}))

    def block(*x: torch.Tensor) -> torch.Tensor:
        if call == "attention":
            return _attend(*x)
        options = (*score("bottom_right"), "auto", True)
        return torch.ops.flash_cute.fwd(2 * x[0], *x[1:], *options)[0]

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        save = saved and operator is torch.ops.flash_cute.fwd.default
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    expected = _gradients(block, leaves)
    with Watch():
        out = checkpoint(block, *leaves, use_reentrant=False, context_fn=contexts)
        given = torch.autograd.grad(out.float().square().sum(), leaves)
    assert same_bits(given, expected)
    forwards = [x for x in ran if x in (torch.ops.flash_cute.fwd.default, torch.ops.flash_cute._fwd.default)]
    assert len(forwards) == (1 if saved else 2)


@pytest.mark.parametrize("grad_mode", [False, True])
def test_symbolic_trace(leaves: Inputs, grad_mode: bool) -> None:
    """As for scaled_dot_product_attention: one node, whose gradients are there when it runs."""
    with torch.set_grad_enabled(grad_mode):
        traced = torch.fx.symbolic_trace(_attend)
        of_lse = torch.fx.symbolic_trace(lambda q, k, v: flash_cute.fwd(q, k, v, "top_left", scale=0.3)[1])
    targets = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert flash_cute.attention in targets
    assert same_bits(_gradients(traced, leaves), _gradients(_attend, leaves))
    assert same_bits((of_lse(*leaves),), (flash_cute.fwd(*leaves, "top_left", scale=0.3)[1],))


def _backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Any:
    return flash_cute.bwd(out, q, k, v, out, lse, dlse=lse, deterministic=True)


def test_symbolic_trace_of_the_backward(leaves: Inputs) -> None:
    q, k, v = (x.detach() for x in leaves)
    out, lse = flash_cute.fwd(q, k, v)
    traced = torch.fx.symbolic_trace(_backward)
    assert flash_cute.bwd in [node.target for node in traced.graph.nodes]
    assert same_bits(traced(q, k, v, out, lse), _backward(q, k, v, out, lse))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("deterministic", [None, True])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_jit_trace(leaves: Inputs, requires_grad: bool, deterministic: bool | None) -> None:
    """Traced with inputs of either kind, the graph has gradients where its inputs require them."""

    def attend(*x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = flash_cute.attention(*x, True, deterministic=deterministic)
        return out

    example = tuple(x.detach().requires_grad_(requires_grad) for x in leaves)
    traced = torch.jit.trace(attend, example)
    torch.use_deterministic_algorithms(True)
    try:
        assert same_bits(_gradients(traced, leaves), _gradients(attend, leaves))
    finally:
        torch.use_deterministic_algorithms(False)
    assert same_bits((traced(*example),), (attend(*example),))


def test_a_device_context_changes_nothing(leaves: Inputs) -> None:
    """torch.device as a context is a TorchFunctionMode."""
    with torch.device("cpu"):
        assert same_bits(_gradients(_attend, leaves), _gradients(_attend, leaves))


HIDE = """
import sys, types, torch, torch.autograd.forward_ad, torch.utils._python_dispatch
HIDDEN = {
    "torch._C": ("_are_functorch_transforms_active", "_is_any_autocast_enabled", "_len_torch_dispatch_stack",
                 "_is_tracing"),
    "torch.utils._python_dispatch": ("_disable_current_modes",),
    "torch.autograd.forward_ad": ("_current_level",),
}

class Hiding(types.ModuleType):
    def __init__(self, module, names):
        super().__init__(module.__name__)
        self.__dict__.update(_module=module, _names=names)
    def __getattr__(self, name):
        if name in self._names:
            raise AttributeError(name)
        return getattr(self._module, name)

for name in HIDDEN:
    assert all(hasattr(sys.modules[name], x) for x in HIDDEN[name]), "a name is gone: nothing is tested"
real = {name: sys.modules[name] for name in HIDDEN}
sys.modules.update({name: Hiding(real[name], names) for name, names in HIDDEN.items()})
forward_ad, torch.autograd.forward_ad = torch.autograd.forward_ad, sys.modules["torch.autograd.forward_ad"]
import flash_cute, flash_cute._torch as ours
sys.modules.update(real)
torch.autograd.forward_ad = forward_ad
assert ours.functorch_is_active() and ours.dispatch_modes() and not ours.jit_is_tracing() and not ours.HAS_DUAL_LEVEL
assert ours.without_modes is None
"""

USE = """
q, k, v = (torch.randn(1, 2, 9, 16, requires_grad=True) for _ in range(3))
def attend(*x): return flash_cute.attention(*x, True)
def reference(*x): return torch.nn.functional.scaled_dot_product_attention(*x, is_causal=True)
for f in (attend, torch.compile(attend, backend="eager", fullgraph=True)):
    given, expected = (torch.autograd.grad(g(q, k, v).square().sum(), (q, k, v)) for g in (f, reference))
    torch.testing.assert_close(given, expected)
given, expected = (torch.func.grad(lambda x: g(x, k, v).square().sum())(q) for g in (attend, reference))
torch.testing.assert_close(given, expected)
with torch.autocast("cpu", torch.bfloat16):
    assert attend(q, k, v).dtype == torch.bfloat16
with torch.no_grad():
    torch.testing.assert_close(attend(q, k, v), reference(q, k, v))
from torch.autograd import forward_ad
with forward_ad.dual_level():
    try:
        attend(forward_ad.make_dual(q.detach(), k.detach()), k, v)
    except NotImplementedError as error:
        assert "forward-mode" in str(error)
    else:
        raise AssertionError("a tangent was lost")
meta = torch.empty(2, 2, 3, 4, device="meta")
assert attend(meta, meta, meta).shape == meta.shape
print("served")
"""


def test_private_names_of_torch_may_go(python: Callable[..., str]) -> None:
    """What is not public in PyTorch has a stand-in: the import and every way of calling still work."""
    assert "served" in python(HIDE + USE)


def test_import_is_lean(python: Callable[..., str]) -> None:
    """Registering with DTensor and FlopCounterMode waits until a program imports them."""
    script = """
import sys, torch
before = set(sys.modules)
import flash_cute
heavy = {"torch.distributed.tensor", "torch.utils.flop_counter"}
print(sorted(heavy & (set(sys.modules) - before)))
finders = len(sys.meta_path)
import torch.utils.flop_counter as counter
assert torch.ops.flash_cute._bwd in counter.flop_registry
assert len(sys.meta_path) == finders - 1
import importlib
importlib.reload(counter)
print(type(counter.__loader__).__name__, type(counter.__spec__.loader).__name__)
"""
    assert python(script).split("\n")[:2] == ["[]", "SourceFileLoader SourceFileLoader"]
