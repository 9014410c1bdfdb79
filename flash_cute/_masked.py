"""Calls with a mask: the public functions pass on what has a `mask`."""

from typing import Any

from torch import Tensor

from . import _call
from ._fp8_types import FLOAT8
from ._refusals import shown
from .autograd import MASKED, MASKED_VARLEN, Calls
from .mask import Mask


def calls_and_tensors(mask: Any, lengths: tuple[Any, ...]) -> tuple[Calls, tuple[Any, ...]]:
    """The kind of a masked call with these lengths (none: dense), and what it takes after q, k and v."""
    if not isinstance(mask, Mask):
        hint = " (Mask.from_matrix makes one of a matrix of booleans)" if isinstance(mask, Tensor) else ""
        raise ValueError(f"flash_cute: mask: expected None or a flash_cute.Mask, got {shown(mask)}{hint}")
    tensors = (mask.first_row, mask.row_limit, mask.first_row_2, mask.row_limit_2, mask.matrix, mask.blocks)
    return (MASKED_VARLEN, (*tensors, *lengths)) if lengths else (MASKED, tensors)


def attend(
    q: Tensor, k: Tensor, v: Tensor, lengths: tuple[Any, ...], mask: Any, fp8: tuple[Any, ...], *rest: Any
) -> Any:
    """`_call.attend` with a mask. `fp8`: the arguments of float8 tensors, which such a call does not have."""
    refuse_float8(q, fp8)
    calls, given = calls_and_tensors(mask, lengths)
    return _call.attend(calls, q, k, v, given, *rest)


def refuse_float8(q: Any, fp8: tuple[Any, ...]) -> None:
    if (isinstance(q, Tensor) and q.dtype in FLOAT8) or any(x is not None for x in fp8):
        raise ValueError("flash_cute: mask: expected None for float8 tensors, got a mask")
