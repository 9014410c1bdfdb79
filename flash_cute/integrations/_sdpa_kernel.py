"""What `enable()` puts in the place of `scaled_dot_product_attention`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd import forward_ad

from .. import _left, _ops
from .._layers import is_unserved
from .._torch import HAS_DUAL_LEVEL, dispatch_modes, flash_sdp_is_enabled, functorch_is_active, jit_is_tracing
from ._sdpa_call import attempt, has_sizes, refuse_malformed
from ._tally import tally, this_thread

ENTRY = "scaled_dot_product_attention"
DISABLED = "backend: expected PyTorch's flash backend to be enabled, got it disabled"
_count_entry = tally.counter(ENTRY)


def make_kernel(
    strict: bool,
    before_passing_on: Callable[[], None],
    find_left: Callable[[], frozenset[int | None]],
    quantize: str | None = None,
) -> Any:
    """`scaled_dot_product_attention` for PyTorch's dispatcher.

    `before_passing_on` is called where PyTorch's operators are traced or overridden, and so choose a backend by
    themselves. `find_left` is asked at the first call: the indices of the devices whose calls are left to PyTorch.
    """
    composite = torch.ops.aten.scaled_dot_product_attention.default.decompose
    served = (Tensor, torch.nn.Parameter)
    left: frozenset[int | None] | None = None

    def kernel(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        nonlocal left
        call = (query, key, value, attn_mask, dropout_p, is_causal)
        if (
            this_thread.passing_on
            or type(query) not in served
            or type(key) not in served
            or type(value) not in served
            or dispatch_modes()
            or functorch_is_active()
            or jit_is_tracing()
        ):  # these know PyTorch's operators, not ours
            before_passing_on()
            if not jit_is_tracing() and has_sizes(query, key, value):
                refuse_malformed(query, key, value, attn_mask, dropout_p, enable_gqa)
            return composite(*call, scale=scale, enable_gqa=enable_gqa)
        if left is None:
            left = find_left()
        is_left = query.device.index in left if left else False
        enabled, refusal = not is_left and flash_sdp_is_enabled(), None
        if (  # an eager forward and nothing else; the dispatcher has served autocast before it calls this
            enabled
            and quantize is None
            and attn_mask is None
            and dropout_p == 0
            and query.dim() == 4
            and not (is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad))
            and HAS_DUAL_LEVEL
            and forward_ad._current_level < 0
        ):
            try:
                alone = _ops.sdpa(query, key, value, is_causal, scale, enable_gqa)
            except Exception as error:
                if not is_unserved(error):
                    raise
                refusal = error.with_traceback(None)
            else:
                _count_entry()
                return alone
        if enabled:
            out = attempt(*call, scale, enable_gqa, refusal, quantize)
            if not isinstance(out, str):
                _count_entry()
                return out
        else:
            if has_sizes(query, key, value):
                refuse_malformed(query, key, value, attn_mask, dropout_p, enable_gqa)
            out = _left.REASON if is_left else DISABLED
        tally.pass_on(out)
        if strict and out is not DISABLED:
            raise ValueError(f"flash_cute: {out}")
        if is_left:
            before_passing_on()
        this_thread.passing_on = True
        try:
            return composite(*call, scale=scale, enable_gqa=enable_gqa)
        finally:
            this_thread.passing_on = False

    return kernel
