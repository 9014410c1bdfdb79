"""Attention of float8 tensors: the public functions pass on what has a float8 q, or an argument of such calls."""

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from . import _ops
from ._call_options import Fp8Options
from ._fp8_types import FLOAT8, NAMES
from ._refusals import (
    backend_with,
    check_deterministic,
    check_flag,
    check_number,
    mask_name,
    raise_refusal,
    window_sides,
)
from ._torch import HAS_DUAL_LEVEL, dispatch_modes, functorch_is_active, jit_is_tracing
from .autograd import VARLEN, refuse_tangents

NO_BACKWARD = "flash_cute's attention of float8 tensors has no backward"

DESCALES = ("descale_q", "descale_k", "descale_v", "descale_out")


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[Any, ...],
    fp8: tuple[Any, ...],
    causal: Any,
    scale: Any,
    window: Any,
    softcap: Any,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    return_lse: bool,
    deterministic: Any,
    backend: Any,
    accumulate: Any,
) -> Any:
    """`out`, or `(out, lse)`. `lengths`: of packed tensors, empty of dense ones; `fp8`: as `options` takes them."""
    try:
        own = options(q, *fp8)
        if causal is False:  # here, as in _call.py, what is usual is asked first
            causal = "none"
        elif causal is True:
            causal = "bottom_right"
        else:
            causal = mask_name(causal)
        if return_lse is not False and return_lse is not True:
            return_lse = check_flag("return_lse", return_lse)
        own = own._replace(exact_lse=return_lse)
        left, right = (None, None) if window is None else window_sides(window)
        if scale is not None:
            check_number("scale", scale)
        if softcap is not None:
            check_number("softcap", softcap)
        if deterministic is not None:  # of the backward, which there is not
            check_deterministic(deterministic)
        if backend is None:
            backend = "auto"
        if accumulate is not None:
            backend = backend_with(backend, accumulate)
        if torch.is_grad_enabled():
            refuse_gradients(q, k, v, sinks, alibi_slopes, *own[:4])
        if not HAS_DUAL_LEVEL or forward_ad._current_level >= 0:
            refuse_tangents(q, k, v, sinks, alibi_slopes, scale, softcap, *own)
        if is_compiling() or functorch_is_active() or dispatch_modes() or jit_is_tracing():
            operator = _ops.fp8_varlen_fwd if lengths else _ops.fp8_fwd  # the operator that users know
        else:
            operator = _ops.fp8_varlen_fwd_without_autograd if lengths else _ops.fp8_fwd_without_autograd
        both = operator(q, k, v, *own, *lengths, causal, left, right, softcap, sinks, alibi_slopes, scale, backend)
        return both if return_lse else both[0]
    except Exception as error:
        given = {"q": q, "k": k, "v": v, "sinks": sinks, "alibi_slopes": alibi_slopes}
        given |= dict(zip(VARLEN.length_names, lengths, strict=False))
        given |= dict(zip(DESCALES, (*fp8[:3], fp8[4]), strict=True))
        raise_refusal(error, given, scale, window, softcap, backend)
        raise


def options(q: Tensor, descale_q: Any, descale_k: Any, descale_v: Any, out_dtype: Any, descale_out: Any) -> Fp8Options:
    """The operators' own arguments of what the public functions take."""
    if q.dtype not in FLOAT8:
        named = {"descale_q": descale_q, "descale_k": descale_k, "descale_v": descale_v}
        named |= {"out_dtype": out_dtype, "descale_out": descale_out}
        name = next(x for x, y in named.items() if y is not None)
        raise ValueError(
            f"flash_cute: {name}: expected None for a q of {str(q.dtype).removeprefix('torch.')}: it is of float8 "
            "tensors (float8_e4m3fn or float8_e5m2)"
        )
    if out_dtype is None:
        return Fp8Options(descale_q, descale_k, descale_v, descale_out, "bfloat16", True)
    if not isinstance(out_dtype, torch.dtype) or out_dtype not in NAMES:
        raise ValueError(
            "flash_cute: out_dtype: expected None, torch.float16, bfloat16, float32, float8_e4m3fn or float8_e5m2, got "
            f"{out_dtype}"
        )
    return Fp8Options(descale_q, descale_k, descale_v, descale_out, NAMES[out_dtype], True)


def refuse_gradients(*given: Tensor | None) -> None:
    """Raise where a gradient is asked for, of which there is none: of q, k, v, sinks, slopes and descales."""
    for i, x in enumerate(given):
        if x is not None and x.requires_grad:
            name = ("q", "k", "v", "sinks", "alibi_slopes", *DESCALES)[i]
            raise NotImplementedError(
                f"{NO_BACKWARD}, and {name} requires grad; torch.no_grad() says that no gradient is needed."
            )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> NoReturn:
    raise NotImplementedError(f"{NO_BACKWARD}; torch.no_grad() says that no gradient is needed.")


def _backward(ctx: Any, *grads: Any) -> NoReturn:
    raise NotImplementedError(f"{NO_BACKWARD}.")


for _name in ("fp8_fwd", "fp8_varlen_fwd"):
    torch.library.register_autograd(f"flash_cute::{_name}", _backward, setup_context=_setup_context, lib=_ops.library)
    _ops.library.impl(f"_{_name}", torch.library.fallthrough_kernel, "Autograd")
