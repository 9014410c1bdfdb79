"""How an output is laid out in memory: the operators' fakes and the CPU path agree with csrc/api/tensor.h."""

import torch
from torch import Tensor


def empty_out(q: Tensor, head_dim_v: int) -> Tensor:
    """An uninitialised out, `(B, Hq, Nq, head_dim_v)` or packed `(Tq, Hq, head_dim_v)`, laid out like `empty_like(q)`.

    With a head dim of its own it is packed, its dims in that order in memory: `out_strides` in csrc/api/tensor.h.
    """
    if head_dim_v == q.shape[-1]:
        return torch.empty_like(q)
    like = torch.empty_like(q, device="meta")
    order = sorted(range(q.dim()), key=like.stride, reverse=True)
    return torch.empty_permuted((*q.shape[:-1], head_dim_v), order, dtype=q.dtype, device=q.device)
