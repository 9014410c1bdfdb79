"""How an output is laid out in memory: the operators' fakes and the CPU path agree with csrc/api/tensor.h."""

from typing import Any

import torch
from torch import Tensor


def empty_out(q: Tensor, head_dim_v: int, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised out, `(B, Hq, Nq, head_dim_v)` or packed `(Tq, Hq, head_dim_v)`, laid out like `empty_like(q)`.

    `dtype`: `None` is q's. With a head dim of its own it is packed, its dims in that order in memory: `out_strides` in
    csrc/api/tensor.h. The stride of a dim of size 1 has no meaning, and a fake tensor may have another: such a last dim
    is the innermost one, any other such dim an outer one.
    """
    if head_dim_v == q.shape[-1]:
        return torch.empty_like(q, dtype=dtype)
    like = torch.empty_like(q, device="meta")
    last = q.dim() - 1

    def place(dim: int) -> tuple[bool, Any]:
        if _is_one(q.shape[dim]):
            return dim != last, 0
        return False, like.stride(dim)

    order = sorted(range(q.dim()), key=place, reverse=True)
    return torch.empty_permuted((*q.shape[:-1], head_dim_v), order, dtype=dtype or q.dtype, device=q.device)


def empty_quantized(x: Tensor, dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor of another dtype, laid out like `empty_like(x)` if x's rows are contiguous, else so."""
    if x.stride(-1) == 1:
        return torch.empty_like(x, dtype=dtype)
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def _is_one(size: Any) -> bool:
    """A symbolic size, which torch.compile takes to be another one, is not asked: that would be a guard."""
    return isinstance(size, int) and size == 1
