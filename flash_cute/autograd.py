"""Autograd of the operators: of dense calls and of packed ones, which differ in the arguments of their lengths alone.

In eager mode `attention` runs in an `autograd.Function` round the operators without autograd, which costs less than
`register_autograd` on `flash_cute::fwd`. The latter serves whoever calls that operator itself, torch.compile above all.
torch.func's transforms want a Function of another form. All share one backward, of which there is no derivative:
differentiating it raises.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _ops
from ._torch import direct_apply

NO_DOUBLE_BACKWARD = (
    "flash_cute's backward cannot be differentiated: there is no double backward. Where gradients of gradients are "
    "needed, torch.nn.functional.scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH) has them."
)

NO_SLOPE_GRADIENT = "flash_cute: alibi_slopes: expected a tensor that does not require grad, got one that does"


@dataclass
class Calls:
    """One kind of call: its operators, and the ways to call them with autograd.

    A forward takes q, k and v, the lengths (none where the call is dense), the seven arguments of mask and score
    (causal, window_left, window_right, softcap, sinks, alibi_slopes, scale), backend and deterministic. A backward
    takes dout, q, k, v, out, lse, dlse, the lengths, mask and score, deterministic and backend.
    """

    name: str  # what the operators' names begin with
    length_names: tuple[str, ...]
    fwd: Callable[..., Any]
    fwd_without_autograd: Callable[..., Any]  # takes no `deterministic`
    bwd: Callable[..., Any]
    bwd_without_autograd: Callable[..., Any]
    differentiable: Callable[..., Any]  # fwd's arguments, return_lse -> out, or (out, lse); an output less is 1 us less
    transformed: Callable[..., Any]  # fwd's arguments -> (out, lse), under torch.func's transforms; slower
    differentiable_bwd: Callable[..., Any]  # bwd's, for a graph that would differentiate its results


def _make_calls(name: str, length_names: tuple[str, ...]) -> Calls:
    """The calls of the operators `{name}fwd` and `{name}bwd`, whose autograd is registered here."""
    arguments = _Arguments(
        tensors=tuple(3 + i for i, x in enumerate(length_names) if not x.startswith("max_")),
        sinks=3 + len(length_names) + 4,
    )

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Tensor | tuple[Tensor, Tensor]:  # type: ignore[override]
            out, lse = calls.fwd_without_autograd(*inputs[:-2])
            _save(arguments, ctx, inputs[:-1], out, lse)
            return (out, lse) if inputs[-1] else out

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            return *_backward(arguments, calls, ctx, *grads), None

    class TransformedAttention(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
            output: tuple[Tensor, Tensor] = calls.fwd_without_autograd(*inputs[:-1])
            return output

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
            _setup_context(arguments, ctx, inputs, output)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            return _backward(arguments, calls, ctx, *grads)

        @staticmethod
        def vmap(*args: Any) -> NoReturn:
            _ops.refuse_vmap()

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            gradients: tuple[Tensor, Tensor, Tensor, Tensor] = calls.bwd_without_autograd(*inputs)
            return gradients

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> NoReturn:
            raise NotImplementedError(NO_DOUBLE_BACKWARD)

        @staticmethod
        def vmap(*args: Any) -> NoReturn:
            _ops.refuse_vmap()

    setup_context, backward = TransformedAttention.setup_context, TransformedAttention.backward
    torch.library.register_autograd(f"flash_cute::{name}fwd", backward, setup_context=setup_context, lib=_ops.library)
    torch.library.register_autograd(f"flash_cute::{name}bwd", Backward.backward, lib=_ops.library)
    for twin in (f"_{name}fwd", f"_{name}bwd"):
        # Without a kernel of its own, PyTorch's fallback would let backward() pass with a warning and no gradients.
        _ops.library.impl(twin, torch.library.fallthrough_kernel, "Autograd")
    calls = Calls(
        name,
        length_names,
        fwd=getattr(_ops, f"{name}fwd"),
        fwd_without_autograd=getattr(_ops, f"{name}fwd_without_autograd"),
        bwd=getattr(_ops, f"{name}bwd"),
        bwd_without_autograd=getattr(_ops, f"{name}bwd_without_autograd"),
        differentiable=direct_apply(Attention),
        transformed=TransformedAttention.apply,
        differentiable_bwd=Backward.apply,
    )
    return calls


@dataclass(frozen=True)
class _Arguments:
    """Where a forward of one kind has ..."""

    tensors: tuple[int, ...]  # lengths that are tensors, or None
    sinks: int  # followed by alibi_slopes

    @property
    def saved(self) -> tuple[int, ...]:
        return (*self.tensors, self.sinks, self.sinks + 1)


def _save(arguments: _Arguments, ctx: Any, inputs: tuple[Any, ...], out: Tensor, lse: Tensor) -> None:
    saved, rest = arguments.saved, list(inputs)
    ctx.save_for_backward(*inputs[:3], out, lse, *[inputs[i] for i in saved])
    for i in (0, 1, 2, *saved):
        rest[i] = None
    ctx.set_materialize_grads(False)
    ctx.rest = rest


def _setup_context(arguments: _Arguments, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    if ctx.needs_input_grad[arguments.sinks + 1]:
        raise ValueError(NO_SLOPE_GRADIENT)
    if inputs[-1] is None:
        inputs = (*inputs[:-1], torch.are_deterministic_algorithms_enabled())
    _save(arguments, ctx, inputs, *output)


def _backward(
    arguments: _Arguments, calls: Calls, ctx: Any, dout: Tensor | None, dlse: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """The gradients of what flows into out and into the LSE; each is None where nothing does."""
    inputs = list(ctx.rest)
    gradients: list[Tensor | None] = [None] * len(inputs)
    if dout is None and dlse is None:
        return tuple(gradients)
    q, k, v, out, lse, *given = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    for i, x in zip(arguments.saved, given, strict=True):
        inputs[i] = x
    *call, backend, deterministic = inputs[3:]
    # With create_graph=True the backward is recorded too, so that differentiating it raises.
    bwd = calls.differentiable_bwd if torch.is_grad_enabled() else calls.bwd_without_autograd
    *gradients[:3], dsinks = bwd(dout, q, k, v, out, lse, dlse, *call, deterministic, backend)
    if inputs[arguments.sinks] is not None:
        gradients[arguments.sinks] = dsinks
    return tuple(gradients)


def refuse_slope_gradient(alibi_slopes: Tensor) -> None:
    """Raise where a gradient of the slopes is asked for, of which there is none."""
    if torch.is_grad_enabled() and alibi_slopes.requires_grad:
        raise ValueError(NO_SLOPE_GRADIENT)


def refuse_tangents(*tensors: Tensor | None) -> None:
    """Raise where a tensor carries a forward-mode tangent, which would be lost without a word."""
    if any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise NotImplementedError("flash_cute has no forward-mode derivative: it takes no dual tensors.")


DENSE = _make_calls("", ())
VARLEN = _make_calls(
    "varlen_", ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "max_seqlen_q", "max_seqlen_k")
)
