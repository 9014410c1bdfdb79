"""What intervals cannot say: masks of matrices of booleans and of lists of blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import mask as _mask
from .._refusals import shown
from .checks import BLOCK, count_blocks
from .intervals import NO_LIMIT, check_count


def from_matrix(seen: Tensor, length: int | None = None) -> _mask.Mask:
    """Any matrix of booleans. Nothing is waited for: the call reads it.

    Pass `causal=False` with it where the matrix has what there is of causality. On a GPU the call's workspace holds a
    bit for each element, of each batch item and head that the matrix has: Nq * Nk / 8 bytes for each of these.
    `Mask.from_dense` makes intervals of a matrix, which are less to read, where there are no more than two.

    Args:
        seen: bool `(Nq, Nk)`, `(B or 1, Nq, Nk)` or `(B or 1, Hkv or 1, Nq or 1, Nk or 1)`: True where the row sees the
            key. It is not copied, and may have any strides; what it holds when the call runs counts.
        length: Nk, where `seen` has one column for all keys. `None`: as many as it has columns.

    Returns:
        A mask for Nq rows (any number where `seen` has one row for all) and Nk keys.

    Raises:
        ValueError: another dtype or shape.

    Example:
        >>> seen = torch.arange(25).view(5, 5) % 3 > 0
        >>> print(Mask.from_matrix(seen).draw(5))
        .##.#
        #.##.
        ##.##
        .##.#
        #.##.
    """
    matrix = _of_four_dims("seen", seen, ("(Nq, Nk)", "(B or 1, Nq, Nk)", "(B or 1, Hkv or 1, Nq or 1, Nk or 1)"))
    keys = matrix.shape[3] if length is None else check_count("length", length)
    return _mask.Mask(*everything(keys, matrix.device), matrix=matrix)


def from_blocks(blocks: Tensor, length: int) -> _mask.Mask:
    """Blocks of 64 rows by 64 keys, each seen or not, as sparse attention has them. Nothing is waited for.

    Args:
        blocks: bool `(rows, keys)`, `(B or 1, rows, keys)` or `(B or 1, Hkv or 1, rows, keys)`, of ceil(Nq / 64) and
            ceil(Nk / 64) blocks: True where the block's rows see its keys. It is not copied; what it holds when the
            call runs counts.
        length: Nk.

    Returns:
        A mask for as many rows as the blocks have, up to 63 less, and Nk keys.

    Raises:
        ValueError: another dtype or shape.

    Example:
        >>> mask = Mask.from_blocks(torch.tensor([[True, False, True], [False, True, True]]), 192)
        >>> print(mask.draw(128, width=3))
        #.#
        .##
    """
    return _mask.Mask(*everything(check_count("length", length), _device(blocks)), blocks=_blocks(blocks))


def with_matrix(mask: _mask.Mask, seen: Tensor) -> _mask.Mask:
    """The mask, ANDed with a matrix of booleans.

    Args:
        seen: as in `Mask.from_matrix`, on the mask's device.

    Example:
        >>> mask = Mask.documents(torch.tensor([0, 0, 0, 1, 1])).with_matrix(torch.arange(25).view(5, 5) % 3 > 0)
        >>> print(mask.draw(5))
        .##..
        #.#..
        ##...
        ....#
        ...#.
    """
    matrix = _mask.Mask.from_matrix(seen, mask.first_row.shape[2]).matrix
    assert matrix is not None
    return _mask.Mask(*mask.tensors._replace(matrix=_both("seen", mask.matrix, matrix)))


def with_blocks(mask: _mask.Mask, blocks: Tensor) -> _mask.Mask:
    """The mask, ANDed with blocks of 64 rows by 64 keys.

    Args:
        blocks: as in `Mask.from_blocks`, on the mask's device.

    Example:
        >>> blocks = torch.tensor([[True, False, False], [True, True, False], [False, True, True]])
        >>> mask = Mask.documents(torch.arange(192) // 96).with_blocks(blocks)
        >>> print(mask.draw(192, causal=True, width=6))
        +.....
        #+....
        ##+...
        ...+..
        ...#+.
        ...##+
    """
    return _mask.Mask(*mask.tensors._replace(blocks=_both("blocks", mask.blocks, _blocks(blocks))))


def everything(length: int, device: Any) -> tuple[Tensor, Tensor]:
    """The interval of all rows for each of `length` keys, in the memory of one element."""
    first = torch.zeros((), dtype=torch.int32, device=device)
    return first.expand(1, 1, length), torch.full_like(first, NO_LIMIT).expand(1, 1, length)


def of_rows(matrix: Tensor, len_q: int) -> Tensor:
    """The matrix, if it is one of so many rows, or has one for all."""
    if matrix.shape[2] not in (1, len_q):
        raise ValueError(f"flash_cute: len_q: expected mask.matrix's {matrix.shape[2]} rows, got {len_q}")
    return matrix


def of_blocks(blocks: Tensor, len_q: int, len_k: int) -> Tensor:
    """The blocks' elements: (B or 1, Hkv or 1, Nq, Nk)."""
    if blocks.shape[2] != count_blocks(len_q):
        raise ValueError(
            f"flash_cute: len_q: expected a number of rows of mask.blocks' {blocks.shape[2]} blocks of 64, got {len_q}"
        )
    row, key = (torch.arange(length, device=blocks.device) // BLOCK for length in (len_q, len_k))
    return blocks.index_select(2, row).index_select(3, key)


def rows_from(matrix: Tensor | None, blocks: Tensor | None, first: int) -> tuple[Tensor | None, Tensor | None]:
    """Both of the later rows alone."""
    if matrix is not None and matrix.shape[2] != 1:
        matrix = matrix[:, :, check_count("first", first) :]
    if blocks is not None:
        if check_count("first", first) % BLOCK:
            raise ValueError(f"flash_cute: first: expected a multiple of 64 of a mask with blocks, got {first}")
        blocks = blocks[:, :, first // BLOCK :]
    return matrix, blocks


def _blocks(blocks: Any) -> Tensor:
    return _of_four_dims("blocks", blocks, ("(rows, keys)", "(B or 1, rows, keys)", "(B or 1, Hkv or 1, rows, keys)"))


def _device(x: Any) -> Any:
    return x.device if isinstance(x, Tensor) else None


def _of_four_dims(name: str, x: Any, shapes: tuple[str, str, str]) -> Tensor:
    """A bool tensor of one of the shapes, given in words, with a batch and heads."""
    if not isinstance(x, Tensor):
        raise ValueError(f"flash_cute: {name}: expected a torch.Tensor, got {shown(x)}")
    if x.dtype != torch.bool:
        raise ValueError(f"flash_cute: {name}: expected bool, got {str(x.dtype).removeprefix('torch.')}")
    if x.dim() not in (2, 3, 4):
        raise ValueError(
            f"flash_cute: {name}: expected the shape {', '.join(shapes[:2])} or {shapes[2]}, got {tuple(x.shape)}"
        )
    return x[None, None] if x.dim() == 2 else x.unsqueeze(1) if x.dim() == 3 else x


def _both(name: str, before: Tensor | None, x: Tensor) -> Tensor:
    if before is None:
        return x
    if any(one != other and 1 not in (one, other) for one, other in zip(before.shape, x.shape, strict=True)):
        raise ValueError(
            f"flash_cute: {name}: expected a shape that broadcasts with the mask's {tuple(before.shape)}, got "
            f"{tuple(x.shape)}"
        )
    return before & x
