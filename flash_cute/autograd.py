"""Autograd of the operators: of dense calls and of packed ones, which differ in the arguments of their lengths alone.

In eager mode `attention` runs in an `autograd.Function` round the operators without autograd, which costs less than
`register_autograd` on `flash_cute::fwd`. The latter serves whoever calls that operator itself, torch.compile above all.
torch.func's transforms want a Function of another form. All share one backward, of which there is no derivative:
differentiating it raises.
"""

from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _ops
from ._call_options import CallOptions, Lengths, MaskTensors
from ._torch import direct_apply

NO_DOUBLE_BACKWARD = (
    "flash_cute's backward cannot be differentiated: there is no double backward. Where gradients of gradients are "
    "needed, torch.nn.functional.scaled_dot_product_attention under sdpa_kernel(SDPBackend.MATH) has them."
)

NO_SLOPE_GRADIENT = "flash_cute: alibi_slopes: expected a tensor that does not require grad, got one that does"


@dataclass
class Calls:
    """One kind of call: its operators, and the ways to call them with autograd.

    A forward takes q, k and v, the lengths (none where the call is dense), the values of a CallOptions, backend and
    deterministic. A backward takes dout, q, k, v, out, lse, dlse, the lengths, the options, deterministic and backend.
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
    arguments = _Arguments(length_names)
    get_tensors, get_others = itemgetter(*arguments.tensors), itemgetter(*arguments.others)
    fwd_without_autograd = getattr(_ops, f"{name}fwd_without_autograd")

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Tensor | tuple[Tensor, Tensor]:  # type: ignore[override]
            out, lse = fwd_without_autograd(*inputs[:-2])
            ctx.save_for_backward(*inputs[:3], out, lse, *get_tensors(inputs))
            ctx.set_materialize_grads(False)
            ctx.others = get_others(inputs)
            return (out, lse) if inputs[-1] else out

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            return *_backward(arguments, calls, ctx, *grads), None

    class TransformedAttention(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
            output: tuple[Tensor, Tensor] = fwd_without_autograd(*inputs[:-1])
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
        fwd_without_autograd=fwd_without_autograd,
        bwd=getattr(_ops, f"{name}bwd"),
        bwd_without_autograd=getattr(_ops, f"{name}bwd_without_autograd"),
        differentiable=direct_apply(Attention),
        transformed=TransformedAttention.apply,
        differentiable_bwd=Backward.apply,
    )
    return calls


class _Arguments:
    """Where a forward of one kind has what: its arguments after q, k and v, up to `deterministic`."""

    def __init__(self, length_names: tuple[str, ...]) -> None:
        options = 3 + len(length_names)
        self.sinks = options + CallOptions._fields.index("sinks")  # followed by alibi_slopes
        self.count = options + len(CallOptions._fields) + 2
        lengths = tuple(3 + i for i, x in enumerate(length_names) if not x.startswith("max_"))
        self.tensors = (*lengths, self.sinks, self.sinks + 1)  # or None
        self.others = tuple(i for i in range(3, self.count) if i not in self.tensors)


def _setup_context(arguments: _Arguments, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    if ctx.needs_input_grad[arguments.sinks + 1]:
        raise ValueError(NO_SLOPE_GRADIENT)
    if inputs[-1] is None:
        inputs = (*inputs[:-1], torch.are_deterministic_algorithms_enabled())
    ctx.save_for_backward(*inputs[:3], *output, *(inputs[i] for i in arguments.tensors))
    ctx.set_materialize_grads(False)
    ctx.others = tuple(inputs[i] for i in arguments.others)


def _backward(
    arguments: _Arguments, calls: Calls, ctx: Any, dout: Tensor | None, dlse: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """The gradients of what flows into out and into the LSE; each is None where nothing does."""
    gradients: list[Tensor | None] = [None] * arguments.count
    if dout is None and dlse is None:
        return tuple(gradients)
    q, k, v, out, lse, *given = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    inputs: list[Any] = [None] * arguments.count
    for i, x in zip((*arguments.tensors, *arguments.others), (*given, *ctx.others), strict=True):
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


def refuse_tangents(*given: object) -> None:
    """Raise where a tensor carries a forward-mode tangent, which would be lost without a word."""
    if any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in given):
        raise NotImplementedError("flash_cute has no forward-mode derivative: it takes no dual tensors.")


class DenseAttention(torch.autograd.Function):
    """`differentiable` of dense calls with its arguments by name: 1.7 us less than the one that serves every kind."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: str,
        window_left: int | None,
        window_right: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        alibi_slopes: Tensor | None,
        scale: float | None,
        backend: str,
        deterministic: bool,
        return_lse: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        out, lse = _ops.fwd_without_autograd(
            q, k, v, causal, window_left, window_right, softcap, sinks, alibi_slopes, scale, backend
        )
        ctx.save_for_backward(q, k, v, out, lse, sinks, alibi_slopes)
        ctx.set_materialize_grads(False)
        ctx.others = (causal, window_left, window_right, softcap, scale, backend, deterministic)
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return *_backward(_DENSE_ARGUMENTS, DENSE, ctx, *grads), None


_DENSE_ARGUMENTS = _Arguments(())
DENSE = _make_calls("", ())
DENSE.differentiable = direct_apply(DenseAttention)
VARLEN = _make_calls("varlen_", Lengths._fields)
# Of calls with a mask, named as the caller knows its tensors.
MASK_NAMES = tuple(f"mask.{name}" for name in MaskTensors._fields)
MASKED = _make_calls("masked_", MASK_NAMES)
MASKED_VARLEN = _make_calls("masked_varlen_", (*MASK_NAMES, *Lengths._fields))
