"""What `flash_cute.Mask` refuses of its tensors: dtypes, shapes and devices that do not go together."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._call_options import MaskTensors
from .._refusals import shown

BLOCK = 64  # rows and keys of a block

_DIMS = {
    **dict.fromkeys(MaskTensors._fields[:4], "3 dims (B or 1, Hkv or 1, Nk)"),
    "matrix": "4 dims (B or 1, Hkv or 1, Nq or 1, Nk or 1)",
    "blocks": "4 dims (B or 1, Hkv or 1, ceil(Nq / 64), ceil(Nk / 64))",
}


def check_tensors(tensors: MaskTensors) -> None:
    if (tensors.first_row_2 is None) != (tensors.row_limit_2 is None):
        missing = "first_row_2" if tensors.first_row_2 is None else "row_limit_2"
        raise ValueError(f"flash_cute: mask.{missing}: expected a tensor beside the interval's other one, got None")
    sizes: dict[str, Any] = {}
    for name, x in tensors._asdict().items():
        if x is not None or name in ("first_row", "row_limit"):
            _check(name, x, sizes)
    if tensors.matrix is not None:
        _check_keys("matrix", tensors.matrix, sizes["keys"])
    if tensors.blocks is not None:
        _check_blocks(tensors.blocks, tensors.matrix, sizes["keys"])


def count_blocks(length: int) -> int:
    """How many blocks so many rows or keys have."""
    return -(-length // BLOCK)


def _check(name: str, x: Any, sizes: dict[str, Any]) -> None:
    """`sizes`: what the tensors before had, which this one must fit."""
    where = f"flash_cute: mask.{name}"
    if not isinstance(x, Tensor):
        raise ValueError(f"{where}: expected a torch.Tensor, got {shown(x)}")
    dims = _DIMS[name]
    dtype = torch.int32 if dims.startswith("3") else torch.bool
    if x.dtype != dtype:
        expected, got = (str(one).removeprefix("torch.") for one in (dtype, x.dtype))
        raise ValueError(f"{where}: expected {expected}, got {got}")
    if x.dim() != int(dims[0]):
        raise ValueError(f"{where}: expected {dims}, got {tuple(x.shape)}")
    if x.device != sizes.setdefault("device", x.device):
        raise ValueError(f"{where}: expected mask.first_row's device {sizes['device']}, got {x.device}")
    if x.dim() == 3 and x.shape[2] != sizes.setdefault("keys", x.shape[2]):
        raise ValueError(f"{where}: expected as many keys as mask.first_row, {sizes['keys']}, got {tuple(x.shape)}")
    for dim, what in enumerate(("batch items", "heads")):
        if x.shape[dim] == 1:
            continue
        if x.shape[dim] != sizes.setdefault(what, x.shape[dim]):
            raise ValueError(f"{where}: expected 1 or {sizes[what]} {what}, got {tuple(x.shape)}")


def _check_keys(name: str, x: Tensor, keys: int) -> None:
    if x.shape[3] not in (1, keys):
        raise ValueError(
            f"flash_cute: mask.{name}: expected 1 column or mask.first_row's {keys} keys, got {tuple(x.shape)}"
        )


def _check_blocks(blocks: Tensor, matrix: Tensor | None, keys: int) -> None:
    if blocks.shape[3] != count_blocks(keys):
        raise ValueError(
            f"flash_cute: mask.blocks: expected {count_blocks(keys)} blocks of 64 for mask.first_row's {keys} keys, "
            f"got {tuple(blocks.shape)}"
        )
    if matrix is not None and matrix.shape[2] != 1 and blocks.shape[2] != count_blocks(matrix.shape[2]):
        raise ValueError(
            f"flash_cute: mask.blocks: expected {count_blocks(matrix.shape[2])} blocks of 64 for mask.matrix's "
            f"{matrix.shape[2]} rows, got {tuple(blocks.shape)}"
        )
