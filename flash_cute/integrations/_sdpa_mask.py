"""The `attn_mask` of `scaled_dot_product_attention` as a `flash_cute.Mask`, or why it cannot be one.

Served is padding: a mask that is the same for all rows of query. It is one interval of rows per key, all of them or
none, whatever it holds: nothing is waited for. A matrix is left to PyTorch, since only its values tell whether it is a
mask by intervals.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..mask import Mask
from ..masks.intervals import NO_LIMIT


def read_mask(attn_mask: Any, query: Tensor, batch: tuple[int, ...], heads_kv: int, keys: int) -> Mask | str:
    """The mask of `(B or 1, Hkv or 1, keys)`; or the reason that PyTorch must serve the call.

    `batch`: the leading dims of the call, which are one dim in flash_cute's.
    """
    if not isinstance(attn_mask, Tensor) or attn_mask.is_nested or attn_mask.layout != torch.strided:
        return "attn_mask: expected a strided tensor, got another"
    if attn_mask.device != query.device:
        return f"attn_mask: expected query's device {query.device}, got {attn_mask.device}"
    if attn_mask.dim() < 2:
        return f"attn_mask: expected at least 2 dims, got the shape {tuple(attn_mask.shape)}"
    if attn_mask.shape[-2] != 1 and attn_mask.stride(-2) != 0:
        return (
            "attn_mask: expected one row for all of query's, as padding has, got a matrix, whose values are not waited "
            "for; flash_cute.Mask.from_dense makes a mask of one"
        )
    row = attn_mask.select(-2, 0)  # (..., heads, keys)
    if row.dim() == 1:
        row = row.unsqueeze(0)
    if row.shape[-2] != 1 and row.stride(-2) == 0:
        row = row[..., :1, :]
    if row.shape[-2] not in (1, heads_kv):
        return (
            f"attn_mask: expected one mask for all heads, or one for each of {heads_kv} key heads, got {row.shape[-2]}"
        )
    outer = row.shape[:-2]
    if len(outer) > len(batch) or torch.broadcast_shapes(outer, batch) != torch.Size(batch):
        return f"attn_mask: expected leading dims of the call, {tuple(batch)}, got {tuple(outer)}"
    seen = _as_bool(row)
    if isinstance(seen, str):
        return seen
    limit = seen.to(torch.int32).mul_(NO_LIMIT)
    if any(size != 1 for size in outer):
        limit = limit.expand(*batch, *limit.shape[-2:])
    limit = limit.reshape(-1, *limit.shape[-2:]).expand(-1, -1, keys)
    return Mask(limit.new_zeros(()).expand(1, 1, keys), limit)


def _as_bool(row: Tensor) -> Tensor | str:
    """Where a boolean mask is True, or a float one 0 and else -inf; on a GPU no float one's values are waited for."""
    if row.dtype == torch.bool:
        return row
    if row.device.type != "cpu" or not row.is_floating_point() or row.requires_grad:
        return f"attn_mask: expected bool, got {str(row.dtype).removeprefix('torch.')}, which may be a bias"
    seen = row == 0
    if bool((seen | (row == -torch.inf)).all()):
        return seen
    return "attn_mask: expected bool, or 0 and -inf, got a bias"
