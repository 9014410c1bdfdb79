"""The operators on meta and fake tensors: what a call would return, and what it would raise.

The checks stand once, in csrc/api/checks.h, and read real tensors. So the tensors of a fake call are checked by
stand-ins on the meta device, of the sizes that the fakes have; a symbolic size counts as its hint, which adds no guard.
"""

from typing import Any

import torch
from torch import Tensor

from ._layout import empty_out
from ._torch import without_modes


def fwd(
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
    deterministic: bool | None = None,
) -> tuple[Tensor, Tensor]:
    options = (causal, window_left, window_right, softcap, sinks, alibi_slopes, scale, backend)
    _check(torch.ops.flash_cute.check_fwd.default, q, k, v, *options)
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return empty_out(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=lse_dtype)


def bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    causal: str,
    window_left: int | None,
    window_right: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    *options: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mask = (causal, window_left, window_right)
    _check(torch.ops.flash_cute.check_bwd.default, dout, q, k, v, out, lse, dlse, *mask, softcap, sinks, *options)
    dsinks = q.new_empty(0, dtype=torch.float32) if sinks is None else torch.empty_like(sinks)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dsinks


def _check(check: Any, *arguments: Any) -> None:
    if without_modes is None:
        return
    tensors = [x for x in arguments if isinstance(x, Tensor)]
    # A tensor of one dim has a number per head, which is dim 1 of the others.
    sizes = [[1] * (2 - x.dim()) + [_hint(size) for size in x.shape] for x in tensors]
    # A size without a hint comes from data. What it is compared with stands at the same dim of another tensor: neither
    # is checked, the call itself does it.
    for dim in range(4):
        if any(len(x) > dim and x[dim] is None for x in sizes):
            for x in sizes:
                if len(x) > dim:
                    x[dim] = 1
    devices = " ".join(str(x.device) for x in tensors)
    with without_modes():
        stand_ins = iter(
            [
                torch.empty(size[len(size) - x.dim() :], dtype=x.dtype, layout=x.layout, device="meta")
                for x, size in zip(tensors, sizes, strict=True)
            ]
        )
        check(*(next(stand_ins) if isinstance(x, Tensor) else _hint(x) for x in arguments), devices)


def _hint(value: Any) -> Any:
    """`value`, or what a symbolic number was in the example that is traced; None where nobody knows."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return getattr(value.node, "hint", None)
    return value
