"""What the public functions of dense and of packed calls have in common: defaults, and the cheapest way to call."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, are_deterministic_algorithms_enabled, is_grad_enabled
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.overrides import handle_torch_function

from . import _ops
from ._refusals import (
    backend_with,
    check_deterministic,
    check_flag,
    check_number,
    mask_name,
    raise_refusal,
    refuse_gradient_of,
    window_sides,
)
from ._torch import HAS_DUAL_LEVEL, autocast_is_enabled, dispatch_modes, functorch_is_active, jit_is_tracing
from .autograd import Calls, refuse_slope_gradient, refuse_tangents


def record(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Let torch.fx's proxies, which stand for tensors, record a call. `arguments`: the function's `locals()`, all."""
    given = tuple(arguments.values())
    count = function.__code__.co_argcount
    options = dict(tuple(arguments.items())[count:])
    return handle_torch_function(function, given[:count], *given[:count], **options)


def attend(
    calls: Calls,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[Any, ...],
    causal: Any,
    scale: Any,
    window: Any,
    softcap: Any,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    return_lse: bool,
    deterministic: Any,
    backend: Any,
    accumulate: Any = None,
) -> Any:
    """A forward, differentiable: `out`, or `(out, lse)`. `lengths`: as `calls.length_names` has them."""
    try:
        if causal is False:
            causal = "none"
        elif causal is True:
            causal = "bottom_right"
        elif not isinstance(causal, str):
            causal = mask_name(causal)
        if return_lse is not False and return_lse is not True:
            return_lse = check_flag("return_lse", return_lse)
        left = right = None
        if window is not None:
            left, right = window_sides(window)
        if scale is not None and type(scale) is not float:
            check_number("scale", scale)
        if softcap is not None and type(softcap) is not float:
            check_number("softcap", softcap)
        if backend is None:
            backend = "auto"
        if accumulate is not None:
            backend = backend_with(backend, accumulate)
        if autocast_is_enabled():
            q, k, v, sinks = _ops.autocast(q, k, v, sinks)
        if alibi_slopes is not None:
            refuse_slope_gradient(alibi_slopes)
        if not HAS_DUAL_LEVEL or forward_ad._current_level >= 0:
            refuse_tangents(q, k, v, sinks, alibi_slopes, scale, softcap)
        if not (
            is_grad_enabled()
            and (q.requires_grad or k.requires_grad or v.requires_grad or (sinks is not None and sinks.requires_grad))
        ):
            if deterministic is not None and deterministic is not True and deterministic is not False:
                deterministic = check_deterministic(deterministic)
            if deterministic is not None and jit_is_tracing():  # the graph may be given what requires grad
                mask, score = (causal, left, right), (softcap, sinks, alibi_slopes, scale)
                both = calls.fwd(q, k, v, *lengths, *mask, *score, backend, deterministic)
            else:
                both = calls.fwd_without_autograd(
                    q, k, v, *lengths, causal, left, right, softcap, sinks, alibi_slopes, scale, backend
                )
            return both if return_lse else both[0]
        if accumulate is not None:
            refuse_gradient_of(accumulate)
        asked = deterministic
        if deterministic is None:
            deterministic = are_deterministic_algorithms_enabled()
        elif deterministic is not True and deterministic is not False:
            asked = deterministic = check_deterministic(deterministic)
        call = (q, k, v, *lengths, causal, left, right, softcap, sinks, alibi_slopes, scale, backend)
        if is_compiling():
            both = calls.fwd(*call, deterministic)
        elif functorch_is_active():
            both = calls.transformed(*call, deterministic)
        elif dispatch_modes():  # selective checkpointing, for one, looks for the operator that users know
            both = calls.fwd(*call, deterministic)
        elif jit_is_tracing():
            both = calls.fwd(*call, asked)
        else:
            return calls.differentiable(*call, deterministic, return_lse)
        return both if return_lse else both[0]
    except Exception as error:
        given = {"q": q, "k": k, "v": v, "sinks": sinks, "alibi_slopes": alibi_slopes}
        given |= dict(zip(calls.length_names, lengths, strict=True))
        raise_refusal(error, given, scale, window, softcap, backend)
        raise


def differentiate(
    calls: Calls,
    tensors: tuple[Tensor | None, ...],
    lengths: tuple[Any, ...],
    causal: Any,
    scale: Any,
    window: Any,
    softcap: Any,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    deterministic: Any,
    backend: Any,
) -> tuple[Tensor, ...]:
    """A backward: `(dq, dk, dv)`, with sinks `(dq, dk, dv, dsinks)`. `tensors`: dout, q, k, v, out, lse, dlse."""
    try:
        causal = mask_name(causal)
        left = right = None
        if window is not None:
            left, right = window_sides(window)
        check_number("scale", scale)
        check_number("softcap", softcap)
        if deterministic is None:
            deterministic = are_deterministic_algorithms_enabled()
        elif deterministic is not True and deterministic is not False:
            deterministic = check_deterministic(deterministic)
        if alibi_slopes is not None:
            refuse_slope_gradient(alibi_slopes)
        if not HAS_DUAL_LEVEL or forward_ad._current_level >= 0:
            refuse_tangents(*tensors, sinks, alibi_slopes, scale, softcap)
        operator = calls.bwd_without_autograd
        if is_grad_enabled() and any(x is not None and x.requires_grad for x in (*tensors, sinks)):
            operator = calls.bwd if is_compiling() else calls.differentiable_bwd
        score = (softcap, sinks, alibi_slopes, scale)
        gradients: tuple[Tensor, ...]
        asked = "auto" if backend is None else backend
        gradients = operator(*tensors, *lengths, causal, left, right, *score, deterministic, asked)
        return gradients if sinks is not None else gradients[:3]
    except Exception as error:
        names = ("dout", "q", "k", "v", "out", "lse", "dlse", "sinks", "alibi_slopes", *calls.length_names)
        given = dict(zip(names, (*tensors, sinks, alibi_slopes, *lengths), strict=True))
        raise_refusal(error, given, scale, window, softcap, backend)
        raise
