"""The `attn_mask` of `scaled_dot_product_attention` as a `flash_cute.Mask`, or why it cannot be one.

Padding, a mask that is the same for all rows of query, is one interval of rows per key, all of them or none, whatever
it holds. Any other boolean mask is a matrix, which the call reads. So nothing is waited for. What only values tell is
looked at where they may be: whether a float mask is one of 0 and -inf, and whether the query heads of a key head have
one mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._torch import functorch_is_active, is_fake, jit_is_tracing
from ..mask import Mask
from ..masks.intervals import NO_LIMIT
from ..masks.matrices import everything


def read_mask(
    attn_mask: Any,
    query: Tensor,
    scores: tuple[int, ...],
    batch: tuple[int, ...],
    heads: tuple[int, int],
    lengths: tuple[int, int],
) -> Mask | str:
    """The mask of `(B or 1, Hkv or 1, ...)`; or the reason that PyTorch must serve the call.

    `scores`: the leading dims of query's and key's product, to which PyTorch adds a mask in place. `batch`: those of
    the call but for its heads, which are one dim in flash_cute's. `heads`, `lengths`: of query and of key.
    """
    if not isinstance(attn_mask, Tensor) or attn_mask.is_nested or attn_mask.layout != torch.strided:
        return "attn_mask: expected a strided tensor, got another"
    if attn_mask.device != query.device:
        return f"attn_mask: expected query's device {query.device}, got {attn_mask.device}"
    if attn_mask.dim() < 2:
        return f"attn_mask: expected at least 2 dims, got the shape {tuple(attn_mask.shape)}"
    leading = attn_mask.shape[:-2][::-1]
    if len(leading) > len(scores) or any(n not in (1, m) for n, m in zip(leading, scores[::-1], strict=False)):
        return f"attn_mask: expected leading dims of query and key, {tuple(scores)}, got {tuple(attn_mask.shape)}"
    rows, keys = lengths
    if attn_mask.shape[-2] not in (1, rows) or attn_mask.shape[-1] not in (1, keys):
        return f"attn_mask: expected 1 or {rows} rows and 1 or {keys} keys, got {tuple(attn_mask.shape)}"
    mask = attn_mask if attn_mask.dim() > 2 else attn_mask.unsqueeze(0)  # (..., heads, rows, keys)
    for dim in range(mask.dim()):
        if mask.shape[dim] > 1 and mask.stride(dim) == 0:  # one for all, expanded
            mask = mask.narrow(dim, 0, 1)
    of_key_heads = _of_key_heads(mask, *heads)
    if isinstance(of_key_heads, str):
        return of_key_heads
    seen = _as_bool(of_key_heads)
    if isinstance(seen, str):
        return seen
    if seen.shape[-2] != 1:
        return Mask(*everything(keys, seen.device), matrix=_with_one_batch(seen, batch))
    limit = _with_one_batch(seen.to(torch.int32).mul_(NO_LIMIT), batch).squeeze(-2).expand(-1, -1, keys)
    return Mask(limit.new_zeros(()).expand(1, 1, keys), limit)


def _with_one_batch(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    """(..., heads, rows, keys) as (B or 1, heads, rows, keys), a view where that is possible."""
    if any(size != 1 for size in x.shape[:-3]):
        x = x.expand(*batch, *x.shape[-3:])
    return x.reshape(-1, *x.shape[-3:])


def _of_key_heads(mask: Tensor, heads: int, heads_kv: int) -> Tensor | str:
    """The mask (..., Hkv or 1, rows, keys)."""
    given = mask.shape[-3]
    if given in (1, heads_kv):
        return mask
    refusal = f"attn_mask: expected one mask for all heads, or one for each of {heads_kv} key heads, got {given}"
    if given != heads or heads % heads_kv or not _may_be_looked_at(mask):
        return refusal
    groups = mask.unflatten(-3, (heads_kv, heads // heads_kv))
    first = groups.narrow(-3, 0, 1)
    return first.squeeze(-3) if bool((groups == first).all()) else refusal


def _as_bool(mask: Tensor) -> Tensor | str:
    """Where a boolean mask is True, or a float one 0 and else -inf."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point() or mask.requires_grad or not _may_be_looked_at(mask):
        return f"attn_mask: expected bool, got {str(mask.dtype).removeprefix('torch.')}, which may be a bias"
    seen = mask == 0
    if bool((seen | (mask == -torch.inf)).all()):
        return seen
    return "attn_mask: expected bool, or 0 and -inf, got a bias"


def _may_be_looked_at(x: Tensor) -> bool:
    """Whether values may be read here, which waits for the device."""
    if x.is_meta or is_fake(x) or functorch_is_active() or jit_is_tracing() or torch.compiler.is_compiling():
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())
