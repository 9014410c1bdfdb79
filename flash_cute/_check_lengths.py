"""`FLASH_CUTE_CHECK=1`: the offsets, lengths and page tables of calls are read and checked, for which the host waits.

Without it nobody reads them but the kernels, which clamp what makes no sense: swapped offsets give a result then, of
other sequences than was meant.
"""

import itertools
import os
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ._torch import functorch_is_active, is_fake, jit_is_tracing
from .band import seen_keys

ENABLED = os.environ.get("FLASH_CUTE_CHECK", "") not in ("", "0")
WARNING = "flash_cute: FLASH_CUTE_CHECK: each packed call reads its offsets, for which the host waits for the GPU"
WARNING_OF_CACHES = (
    "flash_cute: FLASH_CUTE_CHECK: each call over a cache reads its lengths and its table, for which the host waits "
    "for the GPU"
)


class LengthError(ValueError):
    """Offsets or lengths that make no sense."""


def check_lengths(q: Tensor, k: Tensor, lengths: tuple[Any, ...]) -> None:
    """Raise for offsets that descend or leave their tensors, and for used lengths beyond their sequences.

    `lengths`: cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k and more. What is not an int32 vector is the operator's
    to refuse. Nothing is checked where nothing can be read: while a graph is traced or captured.
    """
    tensors = [x for x in (q, k, *lengths[:4]) if x is not None]
    if not _can_be_read(tensors):
        return
    if any(x.dtype != torch.int32 or x.dim() != 1 for x in tensors[2:]) or not q.dim() == k.dim() == 3:
        return
    warnings.warn(WARNING, stacklevel=3)
    offsets_q, offsets_k = lengths[0].tolist(), lengths[1].tolist()
    used_q, used_k = (None if x is None else x.tolist() for x in lengths[2:4])
    rows, keys = q.shape[0], k.shape[0]
    swapped = ""
    if _fit(offsets_q, keys) and _fit(offsets_k, rows):
        swapped = "; cu_seqlens_q would fit k and cu_seqlens_k q: are they swapped?"
    _check("q", "cu_seqlens_q", offsets_q, used_q, rows, swapped)
    _check("k", "cu_seqlens_k", offsets_k, used_k, keys, swapped)


def _can_be_read(tensors: list[Any]) -> bool:
    if is_compiling() or functorch_is_active() or jit_is_tracing():
        return False
    if not all(isinstance(x, Tensor) and not is_fake(x) and x.device.type in ("cpu", "cuda") for x in tensors):
        return False
    return not (any(x.is_cuda for x in tensors) and torch.cuda.is_current_stream_capturing())


def check_cache(
    q: Tensor,
    k_cache: Tensor,
    cache_seqlens: Any,
    page_table: Any,
    cu_seqlens: Any,
    new_keys: int,
    kv_layout: Any,
    mask: tuple[str, int | None] | None,
) -> None:
    """Raise for keys past the end of a cache, and for entries in use of a page table that name no page.

    q: the rows `(B, N, H, D)`, or packed by `cu_seqlens`; of an append, where `mask` is None, the new keys. `mask`: the
    operators' `causal` and `window_left`. What has another shape or dtype is the operator's to refuse.
    """
    lengths = [x for x in (cache_seqlens, page_table, cu_seqlens) if x is not None]
    if not _can_be_read([q, k_cache, *lengths]):
        return
    dims = (1 if x is not page_table else 2 for x in lengths)
    if any(x.dtype != torch.int32 or x.dim() != dim for x, dim in zip(lengths, dims, strict=True)):
        return
    if k_cache.dim() != 4 or q.dim() != (4 if cu_seqlens is None else 3) or kv_layout not in ("NHD", "HND"):
        return
    warnings.warn(WARNING_OF_CACHES, stacklevel=3)
    rows = k_cache.shape[1 if kv_layout == "NHD" else 2]
    if cu_seqlens is None:
        counts = [q.shape[1]] * q.shape[0]
    else:
        offsets = cu_seqlens.tolist()
        name, argument = ("q", "cu_seqlens_q") if mask is not None else ("k", "cu_seqlens")
        _check(name, argument, offsets, None, q.shape[0], "")
        counts = [end - start for start, end in itertools.pairwise(offsets)]
    capacity = rows if page_table is None else rows * page_table.shape[1]
    before = [capacity] * len(counts) if cache_seqlens is None else cache_seqlens.tolist()
    table = None if page_table is None else page_table.tolist()
    if len(before) != len(counts) or (table is not None and len(table) != len(counts)):
        return
    for b, (length, count) in enumerate(zip(before, counts, strict=True)):
        if length < 0:
            continue
        new = count if new_keys < 0 else new_keys
        if length + new > capacity:
            raise LengthError(
                f"flash_cute: cache_seqlens: expected at most the {capacity} keys that a sequence may have, got "
                f"{length}{f' and {new} new ones' if new else ''} at index {b}"
            )
        seen = range(0) if mask is None else seen_keys(*mask, count, length + new)
        for keys in (seen, range(length, length + new)):
            if table is not None and len(keys):
                _check_entries(table[b], b, range(keys.start // rows, -(-keys.stop // rows)), k_cache.shape[0])


def _check_entries(row: list[int], b: int, entries: range, pages: int) -> None:
    for i in entries:
        if not 0 <= row[i] < pages:
            raise LengthError(
                f"flash_cute: page_table: expected numbers of pages from 0 to {pages - 1}, got {row[i]} at index ({b}, "
                f"{i}), which is in use"
            )


def _fit(offsets: list[int], total: int) -> bool:
    return all(0 <= offset <= total for offset in offsets)


def _check(name: str, argument: str, offsets: list[int], used: list[int] | None, total: int, swapped: str) -> None:
    for i, offset in enumerate(offsets):
        if not 0 <= offset <= total:
            raise LengthError(
                f"flash_cute: {argument}: expected offsets from 0 to {name}'s {total} rows, got {offset} at "
                f"index {i}{swapped}"
            )
        if i and offset < offsets[i - 1]:
            raise LengthError(
                f"flash_cute: {argument}: expected offsets that do not descend, got {offset} at index {i} after "
                f"{offsets[i - 1]}"
            )
    for i, count in enumerate(used or ()):
        length = offsets[i + 1] - offsets[i] if i + 1 < len(offsets) else 0
        if not 0 <= count <= length:
            raise LengthError(
                f"flash_cute: seqused_{name}: expected numbers from 0 to the sequence's {length} rows, got {count} at "
                f"index {i}"
            )
