"""Autograd of the operators.

In eager mode `attention` runs in an `autograd.Function` round the operators without autograd, which costs less than
`register_autograd` on `flash_cute::fwd`. The latter serves whoever calls that operator itself, torch.compile above all.
torch.func's transforms want a Function of another form. All share one backward, of which there is no derivative:
differentiating it raises.
"""

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


class Attention(torch.autograd.Function):
    """Differentiable `out`, or `(out, lse)`. An output less is 1 us less."""

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
        ctx.options = (causal, window_left, window_right, softcap), (scale, deterministic, backend)
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return *_backward(ctx, *grads), None


# Takes what `forward` takes after ctx.
differentiable = direct_apply(Attention)


class TransformedAttention(torch.autograd.Function):
    """Differentiable `(out, lse)` in the form that torch.func.grad and its like can use; an eager call is slower."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        output: tuple[Tensor, Tensor] = _ops.fwd_without_autograd(*inputs[:11])
        return output

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _setup_context(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return _backward(ctx, *grads)

    @staticmethod
    def vmap(*args: Any) -> NoReturn:
        _ops.refuse_vmap()


class Backward(torch.autograd.Function):
    """`Backward.apply` of what `flash_cute::bwd` takes, for a graph that would differentiate its results."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        gradients: tuple[Tensor, Tensor, Tensor, Tensor] = _ops.bwd_without_autograd(*inputs)
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


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, causal, window_left, window_right, softcap, sinks, alibi_slopes, scale, backend, deterministic = inputs
    if ctx.needs_input_grad[8]:
        raise ValueError(NO_SLOPE_GRADIENT)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    ctx.save_for_backward(q, k, v, *output, sinks, alibi_slopes)
    ctx.set_materialize_grads(False)
    ctx.options = (causal, window_left, window_right, softcap), (scale, deterministic, backend)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """The gradients of what flows into out and into the LSE; each is None where nothing does."""
    if dout is None and dlse is None:
        return (None,) * 12
    q, k, v, out, lse, sinks, alibi_slopes = ctx.saved_tensors
    if dout is None:
        dout = torch.zeros_like(out)
    # With create_graph=True the backward is recorded too, so that differentiating it raises.
    bwd = Backward.apply if torch.is_grad_enabled() else _ops.bwd_without_autograd
    mask, rest = ctx.options
    dq, dk, dv, dsinks = bwd(dout, q, k, v, out, lse, dlse, *mask, sinks, alibi_slopes, *rest)
    return dq, dk, dv, None, None, None, None, None if sinks is None else dsinks, None, None, None, None


def refuse_slope_gradient(alibi_slopes: Tensor) -> None:
    """Raise where a gradient of the slopes is asked for, of which there is none."""
    if torch.is_grad_enabled() and alibi_slopes.requires_grad:
        raise ValueError(NO_SLOPE_GRADIENT)


def refuse_tangents(*tensors: Tensor | None) -> None:
    """Raise where a tensor carries a forward-mode tangent, which would be lost without a word."""
    if any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise NotImplementedError("flash_cute has no forward-mode derivative: it takes no dual tensors.")


torch.library.register_autograd("flash_cute::fwd", _backward, setup_context=_setup_context, lib=_ops.library)
torch.library.register_autograd("flash_cute::bwd", Backward.backward, lib=_ops.library)
for _name in ("_fwd", "_bwd"):
    # Without a kernel of its own, PyTorch's fallback would let backward() pass with a warning and no gradients.
    _ops.library.impl(_name, torch.library.fallthrough_kernel, "Autograd")
