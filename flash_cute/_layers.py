"""Calls in which nothing but the forward's kernel takes part, for flash_cute/integrations: when, by which operators.

Such a call (eager, of plain tensors, without gradients, transforms, modes and casts) needs none of what
`flash_cute.attention` looks at. The integrations give it to an operator that takes their arguments as they are
(csrc/api/ops_layers.cpp). Every other call, and every call that such an operator refuses, takes the general path, which
knows what to do with it and words the errors.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from ._check_lengths import ENABLED as CHECKS_LENGTHS
from ._refusals import is_refusal
from ._torch import HAS_DUAL_LEVEL, autocast_is_enabled, dispatch_modes, functorch_is_active, jit_is_tracing

Forward = Callable[..., tuple[Tensor, Tensor]]  # the kernel of `flash_cute::_fwd` for a device, or its fake
LENGTHS = 6  # arguments: FLASH_CUTE_LENGTHS in csrc/api/varlen_stack.h


def is_plain(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a call with these tensors is an eager forward and nothing else."""
    return (
        not is_dynamo_compiling()  # the first, for what follows is not to be traced
        and not CHECKS_LENGTHS  # which the general path does
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


def is_unserved(error: Exception) -> bool:
    """Whether a layers' operator did not take the arguments that it was given, and so has launched nothing.

    A check has refused them, PyTorch cannot make the operator's arguments of them, or the operator has no kernel for
    such tensors. The general path then serves the call or words the error. Whatever else an operator raises (no memory,
    an error of the device) is the call's own, and is not to be tried again.
    """
    if isinstance(error, ValueError | TypeError | NotImplementedError) or is_refusal(error):
        return True
    return type(error) is RuntimeError and str(error).startswith("flash_cute::")


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
        q: Tensor, k: Tensor | None, v: Tensor | None, num_heads_q: int | None, *score: Any
    ) -> tuple[Tensor, Tensor]:
        q, k, v = _unstack(q, k, v, num_heads_q)
        if not q.dim() == k.dim() == v.dim() == 4:
            raise ValueError("flash_cute: q, k, v: expected 4 dims")
        out, lse = forward(*(x.transpose(1, 2) for x in (q, k, v)), *_named(score), "auto")
        return out.transpose(1, 2), lse

    return rows_fwd


def make_heads_fwd(forward: Forward) -> Callable[..., Tensor]:
    """`flash_cute::_heads_fwd` by a forward."""

    def heads_fwd(q: Tensor, k: Tensor, v: Tensor, *score: Any) -> Tensor:
        return forward(q, k, v, *_of_model(score), "auto")[0].transpose(1, 2)

    return heads_fwd


def make_rows_varlen_fwd(forward: Forward) -> Callable[..., tuple[Tensor, Tensor]]:
    """`flash_cute::_rows_varlen_fwd` by a forward of packed sequences."""

    def rows_varlen_fwd(
        q: Tensor, k: Tensor | None, v: Tensor | None, num_heads_q: int | None, *lengths_and_score: Any
    ) -> tuple[Tensor, Tensor]:
        lengths, score = lengths_and_score[:LENGTHS], lengths_and_score[LENGTHS:]
        return forward(*_unstack(q, k, v, num_heads_q), *lengths, *_named(score), "auto")

    return rows_varlen_fwd


def make_heads_varlen_fwd(forward: Forward, by_heads: bool) -> Callable[..., Tensor]:
    """`flash_cute::_heads_varlen_fwd`, or `by_heads` `_cache_varlen_fwd`, by a forward of packed sequences."""

    def heads_varlen_fwd(q: Tensor, k: Tensor, v: Tensor, *lengths_and_score: Any) -> Tensor:
        if not q.dim() == k.dim() == v.dim() == 4:
            raise ValueError("flash_cute: q, k, v: expected 4 dims")
        lengths, score = lengths_and_score[:LENGTHS], lengths_and_score[LENGTHS:]
        batch, heads, length, _ = q.shape
        if by_heads:
            if length != 1 or not batch == k.shape[0] == v.shape[0]:
                raise ValueError("flash_cute: q: expected one row by heads, and k's and v's batch size")
            heads_kv = k.shape[1]
            if not heads_kv or heads_kv != v.shape[1] or heads % heads_kv:
                raise ValueError("flash_cute: k, v: expected a number of heads that divides q's")
            sequences = (heads // heads_kv, 1, 1)
            rows = [x.reshape(-1, n, x.shape[3]) for x, n in zip((q, k, v), sequences, strict=True)]
        else:
            rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
        out = forward(*rows, *lengths, *_of_model(score), "auto")[0]
        return out.view(batch, length, heads, out.shape[2])

    return heads_varlen_fwd


def _unstack(q: Tensor, k: Tensor | None, v: Tensor | None, num_heads_q: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, whichever of the forms in csrc/api/layer_views.h is given."""
    if k is not None and num_heads_q is not None:
        raise ValueError(f"flash_cute: num_heads_q: expected None beside k, got {num_heads_q}")
    if k is not None and v is not None:
        return q, k, v
    if v is not None:
        raise ValueError("flash_cute: k: expected a tensor beside v, got None")
    if num_heads_q is not None:
        heads = q.shape[-2] if q.dim() in (3, 4) else 0
        if not 0 < num_heads_q < heads or (heads - num_heads_q) % 2:
            raise ValueError(
                f"flash_cute: num_heads_q: expected Hq of the Hq + 2 * Hkv = {heads} heads of qkv, got {num_heads_q}"
            )
        heads_kv = (heads - num_heads_q) // 2
        views: tuple[Tensor, Tensor, Tensor] = q.split([num_heads_q, heads_kv, heads_kv], -2)
        return views
    name, stacked, count = ("qkv", q, 3) if k is None else ("kv", k, 2)
    if stacked.dim() not in (4, 5) or stacked.shape[-3] != count:
        raise ValueError(f"flash_cute: {name}: expected {count} stacked tensors in dim -3, got {tuple(stacked.shape)}")
    *first, k, v = stacked.unbind(-3)
    return (first[0] if first else q), k, v


def _named(score: tuple[Any, ...]) -> tuple[Any, ...]:
    """FLASH_CUTE_LAYER_SCORE as the other operators have mask and score."""
    is_causal, *others = score
    return "bottom_right" if is_causal else "none", *others


def _of_model(score: tuple[Any, ...]) -> tuple[Any, ...]:
    """FLASH_CUTE_MODEL_SCORE likewise."""
    is_causal, sliding_window, softcap, sinks, scale = score
    side = None if sliding_window is None else sliding_window - 1
    return "bottom_right" if is_causal else "none", side, side, softcap, sinks, None, scale
