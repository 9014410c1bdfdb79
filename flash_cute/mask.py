"""`Mask`: which rows see a key, as one interval of rows per key, or two, and as matrices of booleans."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from ._call_options import MaskTensors
from ._refusals import Window, mask_name, window_sides
from .masks import foreign, matrices, models, parallel, sequences, trees
from .masks.checks import check_tensors
from .masks.picture import draw

__all__ = ["Mask"]


@dataclass(frozen=True, eq=False)
class Mask:
    """Which rows of q see which keys, where a band (`causal`, `window`) cannot say it.

    Row i sees key j if the band of the call lets it, and `first_row[..., j] <= i < row_limit[..., j]` or
    `first_row_2[..., j] <= i < row_limit_2[..., j]`, and `matrix[..., i, j]` and `blocks[..., i // 64, j // 64]` where
    there are any. The row is its index in the call, counted from 0 whatever `causal` is; of packed sequences it is the
    row of the packed tensor, and a row sees no key of another sequence in any case.

    A call takes it as `attention(q, k, v, causal, mask=mask)`: the GPU kernels leave out what no row sees, and of
    intervals no (Nq, Nk) matrix is ever in memory. `Mask.documents`, `Mask.prefix_lm` and their kin make the masks of
    models, `Mask.from_matrix` and `Mask.from_blocks` those that intervals cannot say.

    Args:
        first_row, row_limit: int32 `(B or 1, Hkv or 1, Nk)`, on q's device, of any strides (`expand` will do); of
            packed sequences `(1, Hkv or 1, Tk)`. Any values: rows before 0 and from Nq on do not exist, an interval
            whose limit is not above its first row is empty. A key with empty intervals is hidden from every row: its
            dk and dv are 0. A row that sees no key has out 0, LSE -inf and gradients 0.
        first_row_2, row_limit_2: the same of a second interval; `None`: there is none. Two intervals may overlap.
        matrix: bool `(B or 1, Hkv or 1, Nq or 1, Nk or 1)`, on the same device, of any strides; `None`: all is True.
            Of packed sequences `(1, Hkv or 1, Tq or 1, Tk or 1)`.
        blocks: bool `(B or 1, Hkv or 1, ceil(Nq / 64), ceil(Nk / 64))`, of 64 rows by 64 keys each; `None`: all is
            True. Of packed sequences the blocks are those of the packed tensors.

    With a matrix or blocks a call's workspace holds a bit for each row, key, and batch item and head of the mask: Nq *
    Nk / 8 bytes for each of these.

    The values are read on the device when the call runs: nothing waits for them, and a CUDA graph may be replayed after
    they have changed. A mask has no gradient.

    Raises:
        ValueError: a tensor of another dtype or shape, or on another device than the first one.

    Example:
        >>> rows = torch.arange(4, dtype=torch.int32).view(1, 1, 4)
        >>> mask = Mask(rows, torch.full_like(rows, 4))  # causal, said by a mask
        >>> mask.dense(4)[0, 0].int().tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
        >>> q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
        >>> expected = flash_cute.attention(q, k, v, causal=True)
        >>> torch.allclose(flash_cute.attention(q, k, v, mask=mask), expected, atol=1e-6)
        True
    """

    first_row: Tensor
    row_limit: Tensor
    first_row_2: Tensor | None = None
    row_limit_2: Tensor | None = None
    matrix: Tensor | None = None
    blocks: Tensor | None = None

    documents = staticmethod(sequences.documents)
    padding = staticmethod(sequences.padding)
    chunks = staticmethod(sequences.chunks)
    prefix_lm = staticmethod(models.prefix_lm)
    images = staticmethod(models.images)
    global_tokens = staticmethod(models.global_tokens)
    shared_prefix = staticmethod(trees.shared_prefix)
    tree = staticmethod(trees.tree)
    context_parallel = staticmethod(parallel.context_parallel)
    from_flashmask = staticmethod(foreign.from_flashmask)
    from_slices = staticmethod(foreign.from_slices)
    from_dense = staticmethod(foreign.from_dense)
    from_matrix = staticmethod(matrices.from_matrix)
    from_blocks = staticmethod(matrices.from_blocks)
    with_matrix = matrices.with_matrix
    with_blocks = matrices.with_blocks

    def __post_init__(self) -> None:
        check_tensors(self.tensors)

    @property
    def tensors(self) -> MaskTensors:
        """`(first_row, row_limit, first_row_2, row_limit_2, matrix, blocks)`, as the operators take them."""
        intervals = (self.first_row, self.row_limit, self.first_row_2, self.row_limit_2)
        return MaskTensors(*intervals, self.matrix, self.blocks)

    @property
    def intervals(self) -> int:
        """How many intervals a key has: 1 or 2."""
        return 1 if self.first_row_2 is None else 2

    def to(self, device: torch.device | str) -> Mask:
        """The mask on another device."""
        return Mask(*(None if x is None else x.to(device) for x in self.tensors))  # type: ignore[arg-type]

    def rows_from(self, first: int) -> Mask:
        """The mask of a call whose row 0 is this mask's row `first`: of the later rows of a sequence.

        Args:
            first: a number of rows, as in `Nk - Nq` where q has only the last Nq rows of the Nk that the mask is for.
                With blocks a multiple of 64.

        Example:
            >>> mask = Mask.prefix_lm(torch.tensor([3]), 6)
            >>> torch.equal(mask.rows_from(4).dense(2), mask.dense(6)[:, :, 4:])
            True
        """
        intervals = (None if x is None else _minus(x, first) for x in self.tensors[:4])
        tensors: Any = (*intervals, *matrices.rows_from(self.matrix, self.blocks, first))
        return Mask(*tensors)

    def dense(self, len_q: int, causal: bool | str = False, window: Window | None = None) -> Tensor:
        """What the mask says, as a matrix: for a look at it, and for tests.

        Args:
            len_q: the rows of q.
            causal, window: a call's, which the mask is ANDed with; by default they hide nothing.

        Returns:
            bool `(B or 1, Hkv or 1, Nq, Nk)`, on the mask's device: True where the row sees the key.

        Example:
            >>> Mask.documents(torch.tensor([0, 0, 1])).dense(3)[0, 0].int().tolist()
            [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
        """
        rows = torch.arange(len_q, device=self.first_row.device).unsqueeze(-1)  # (Nq, 1)
        seen = (rows >= self.first_row[..., None, :]) & (rows < self.row_limit[..., None, :])
        if self.first_row_2 is not None and self.row_limit_2 is not None:
            seen = seen | (rows >= self.first_row_2[..., None, :]) & (rows < self.row_limit_2[..., None, :])
        if self.matrix is not None:
            seen = seen & matrices.of_rows(self.matrix, len_q)
        if self.blocks is not None:
            seen = seen & matrices.of_blocks(self.blocks, len_q, self.first_row.shape[2])
        name, (left, right) = mask_name(causal), (None, None) if window is None else window_sides(window)
        len_k = self.first_row.shape[2]
        position = rows if name == "top_left" else rows + (len_k - len_q)
        ahead = torch.arange(len_k, device=rows.device) - position  # (Nq, Nk)
        right = right if name == "none" else 0
        if right is not None:
            seen = seen & (ahead <= right)
        return seen if left is None else seen & (ahead >= -left)

    def draw(
        self,
        len_q: int,
        causal: bool | str = False,
        window: Window | None = None,
        *,
        batch: int = 0,
        head: int = 0,
        width: int = 64,
    ) -> str:
        """A picture of the mask in characters: `#` where rows see all of the keys, `+` some, `.` none.

        Args:
            len_q, causal, window: as in `dense`. It waits for the device.
            batch, head: of which item and which KV head.
            width: the most characters in a line. Where there are more keys, or more rows than twice as many, a
                character stands for several of both.

        Example:
            >>> print(Mask.shared_prefix(2, torch.tensor([2, 3])).draw(7, causal=True))
            #......
            ##.....
            ###....
            ####...
            ##..#..
            ##..##.
            ##..###
        """
        parts = (
            None if x is None else x[batch if x.shape[0] > 1 else 0, head if x.shape[1] > 1 else 0].cpu()[None, None]
            for x in self.tensors
        )
        return draw(Mask(*parts).dense(len_q, causal, window)[0, 0], width)  # type: ignore[arg-type]


def _minus(x: Tensor, number: int) -> Tensor:
    """In 64 bits, and clamped to 32."""
    limits = torch.iinfo(torch.int32)
    return (x.long() - number).clamp(limits.min, limits.max).int()


def _flatten(mask: Mask) -> tuple[list[Any], None]:
    return list(mask.tensors), None


def _flatten_with_keys(mask: Mask) -> tuple[list[Any], None]:
    return [(_pytree.GetAttrKey(name), x) for name, x in zip(MaskTensors._fields, mask.tensors, strict=True)], None


def _unflatten(tensors: Iterable[Any], context: None) -> Mask:
    """Without the checks: what a transform puts in the tensors' place need not be one."""
    mask = object.__new__(Mask)
    for name, x in zip(MaskTensors._fields, tensors, strict=True):
        object.__setattr__(mask, name, x)
    return mask


# A mask may be an input of torch.export's programs, and of what else walks through containers.
_pytree.register_pytree_node(
    Mask,
    _flatten,
    _unflatten,
    serialized_type_name="flash_cute.Mask",
    flatten_with_keys_fn=_flatten_with_keys,
)
# So that such a program's file, which has its example inputs, is read as weights.
torch.serialization.add_safe_globals([Mask])
