"""`FLASH_CUTE_CHECK=1`: the offsets and lengths of packed calls are read and checked, for which the host waits.

Without it nobody reads them but the kernels, which clamp what makes no sense: swapped offsets give a result then, of
other sequences than was meant.
"""

import os
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ._torch import functorch_is_active, is_fake, jit_is_tracing

ENABLED = os.environ.get("FLASH_CUTE_CHECK", "") not in ("", "0")
WARNING = "flash_cute: FLASH_CUTE_CHECK: each packed call reads its offsets, for which the host waits for the GPU"


class LengthError(ValueError):
    """Offsets or lengths that make no sense."""


def check_lengths(q: Tensor, k: Tensor, lengths: tuple[Any, ...]) -> None:
    """Raise for offsets that descend or leave their tensors, and for used lengths beyond their sequences.

    `lengths`: cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k and more. What is not an int32 vector is the operator's
    to refuse. Nothing is checked where nothing can be read: while a graph is traced or captured.
    """
    tensors = [x for x in (q, k, *lengths[:4]) if x is not None]
    if is_compiling() or functorch_is_active() or jit_is_tracing():
        return
    if not all(isinstance(x, Tensor) and not is_fake(x) and x.device.type in ("cpu", "cuda") for x in tensors):
        return
    if any(x.dtype != torch.int32 or x.dim() != 1 for x in tensors[2:]) or not q.dim() == k.dim() == 3:
        return
    if any(x.is_cuda for x in tensors) and torch.cuda.is_current_stream_capturing():
        return
    warnings.warn(WARNING, stacklevel=3)
    offsets_q, offsets_k = lengths[0].tolist(), lengths[1].tolist()
    used_q, used_k = (None if x is None else x.tolist() for x in lengths[2:4])
    rows, keys = q.shape[0], k.shape[0]
    swapped = ""
    if _fit(offsets_q, keys) and _fit(offsets_k, rows):
        swapped = "; cu_seqlens_q would fit k and cu_seqlens_k q: are they swapped?"
    _check("q", offsets_q, used_q, rows, swapped)
    _check("k", offsets_k, used_k, keys, swapped)


def _fit(offsets: list[int], total: int) -> bool:
    return all(0 <= offset <= total for offset in offsets)


def _check(name: str, offsets: list[int], used: list[int] | None, total: int, swapped: str) -> None:
    for i, offset in enumerate(offsets):
        if not 0 <= offset <= total:
            raise LengthError(
                f"flash_cute: cu_seqlens_{name}: expected offsets from 0 to {name}'s {total} rows, got {offset} at "
                f"index {i}{swapped}"
            )
        if i and offset < offsets[i - 1]:
            raise LengthError(
                f"flash_cute: cu_seqlens_{name}: expected offsets that do not descend, got {offset} at index {i} after "
                f"{offsets[i - 1]}"
            )
    for i, count in enumerate(used or ()):
        length = offsets[i + 1] - offsets[i] if i + 1 < len(offsets) else 0
        if not 0 <= count <= length:
            raise LengthError(
                f"flash_cute: seqused_{name}: expected numbers from 0 to the sequence's {length} rows, got {count} at "
                f"index {i}"
            )
