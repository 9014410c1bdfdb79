"""The operators on meta and fake tensors: what a call would return, and what it would raise.

The checks stand once, in csrc/api/checks.h, and read real tensors. So the tensors of a fake call are checked by
stand-ins on the meta device, of the sizes that the fakes have; a symbolic size counts as its hint, which adds no guard.
"""

from typing import Any

import torch
from torch import Tensor

from ._torch import without_modes


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: str,
    window_left: int | None,
    window_right: int | None,
    scale: float | None,
    backend: str,
    deterministic: bool | None = None,
) -> tuple[Tensor, Tensor]:
    _check(torch.ops.flash_cute.check_fwd.default, (q, k, v), (causal, window_left, window_right, scale, backend))
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=lse_dtype)


def bwd(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None, *options: object
) -> tuple[Tensor, Tensor, Tensor]:
    _check(torch.ops.flash_cute.check_bwd.default, (dout, q, k, v, out, lse, dlse), options)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _check(check: Any, tensors: tuple[Tensor | None, ...], options: tuple[object, ...]) -> None:
    if without_modes is None:
        return
    sizes = [None if x is None else [_hint(size) for size in x.shape] for x in tensors]
    # A size without a hint comes from data. What it is compared with stands at the same dim of another tensor: neither
    # is checked, the call itself does it.
    for dim in range(4):
        if any(x is not None and len(x) > dim and x[dim] is None for x in sizes):
            for x in sizes:
                if x is not None and len(x) > dim:
                    x[dim] = 1
    devices = " ".join("none" if x is None else str(x.device) for x in tensors)
    with without_modes():
        stand_ins = [
            None if x is None else torch.empty(size, dtype=x.dtype, layout=x.layout, device="meta")
            for x, size in zip(tensors, sizes, strict=True)
        ]
        check(*stand_ins, *(_hint(x) for x in options), devices)


def _hint(value: Any) -> Any:
    """`value`, or what a symbolic number was in the example that is traced; None where nobody knows."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return getattr(value.node, "hint", None)
    return value
