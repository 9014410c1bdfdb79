"""Calls in which nothing but the forward's kernel takes part, for flash_cute/integrations: when, by which operators.

Such a call (eager, of plain tensors, without gradients, transforms, modes and casts) needs none of what
`flash_cute.attention` looks at. The integrations give it to an operator that takes their arguments as they are
(csrc/api/ops_layers.cpp). Every other call, and every call that such an operator refuses, goes the general way, which
knows what to do with it and words the errors.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from ._torch import HAS_DUAL_LEVEL, autocast_is_enabled, dispatch_modes, functorch_is_active, jit_is_tracing

Forward = Callable[..., tuple[Tensor, Tensor]]  # the kernel of `flash_cute::_fwd` for a device, or its fake


def is_plain(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a call with these tensors is an eager forward and nothing else."""
    return (
        not is_dynamo_compiling()  # the first, for what follows is not to be traced
        and type(q) is Tensor
        and type(k) is Tensor
        and type(v) is Tensor
        and not (is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
        and HAS_DUAL_LEVEL
        and forward_ad._current_level < 0
        and not autocast_is_enabled()
        and not functorch_is_active()
        and not dispatch_modes()
        and not jit_is_tracing()
    )


def make_sdpa(forward: Forward) -> Callable[..., Tensor]:
    """`flash_cute::_sdpa` by a forward; what the library's refuses is refused here."""

    def sdpa(
        query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None, enable_gqa: bool
    ) -> Tensor:
        if not query.dim() == key.dim() == value.dim() == 4:
            raise ValueError("flash_cute: query, key, value: expected 4 dims")
        if 0 in (*query.shape, *key.shape, *value.shape):
            raise ValueError("flash_cute: query, key, value: expected no dim of size 0")
        if key.shape[1] not in (1, query.shape[1]) and not enable_gqa:
            raise ValueError("flash_cute: enable_gqa: expected True")
        causal = "top_left" if is_causal else "none"
        return forward(query, key, value, causal, None, None, None, None, None, scale, "auto")[0]

    return sdpa


def make_rows_fwd(forward: Forward) -> Callable[..., tuple[Tensor, Tensor]]:
    """`flash_cute::_rows_fwd` by a forward; what the library's refuses is refused here."""

    def rows_fwd(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows_first: bool,
        is_causal: bool,
        window_left: int | None,
        window_right: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        scale: float | None,
    ) -> tuple[Tensor, Tensor]:
        if rows_first:
            if not q.dim() == k.dim() == v.dim() == 4:
                raise ValueError("flash_cute: q, k, v: expected 4 dims")
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        causal = "bottom_right" if is_causal else "none"
        score: tuple[Any, ...] = (softcap, sinks, None, scale)
        out, lse = forward(q, k, v, causal, window_left, window_right, *score, "auto")
        return out.transpose(1, 2), lse

    return rows_fwd
