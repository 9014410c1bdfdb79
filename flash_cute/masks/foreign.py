"""Masks from what other projects have: FlashMask's rows, MagiAttention's slices, matrices of booleans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import mask as _mask
from .._refusals import shown
from .intervals import NO_LIMIT, check_count, check_integers, make, merge

# MagiAttention's AttnMaskType: its number is its place.
SLICE_TYPES = ("full", "causal", "inv_causal", "bi_causal")

# Numbers that `from_slices` works on at once: 32 MB.
_AT_ONCE = 1 << 22


def from_flashmask(startend_row_indices: Tensor, causal: bool) -> _mask.Mask:
    """PaddlePaddle's `flashmask_attention(q, k, v, startend_row_indices, causal=causal)`.

    Pass the same `causal` to the attention with it.

    Args:
        startend_row_indices: `(B or 1, Hkv or 1, N, 1, 2 or 4)`, int32 or int64: which rows of a key's column are
            hidden. Causal: `[start]` those from start on; `[start, end]` those from start to end. Not causal:
            `[start, end]` those from start on (below the diagonal), and those before end (above it);
            `[start, end, start, end]` those from each start to its end. Of four numbers the device is waited for,
            since a key may then be left with three intervals, which a mask has not.
        causal: as PaddlePaddle has it.

    Returns:
        A mask of one or two intervals, for N rows and N keys.

    Raises:
        ValueError: another dtype or shape; a key that is left with three intervals.

    Example:
        >>> starts = torch.tensor([3, 3, 3, 6, 6, 6]).view(1, 1, 6, 1)  # two documents
        >>> print(Mask.from_flashmask(starts, causal=True).draw(6, causal=True))
        #.....
        ##....
        ###...
        ...#..
        ...##.
        ...###
    """
    given = check_integers("startend_row_indices", startend_row_indices, ("(B or 1, Hkv or 1, N, numbers)",))
    if not isinstance(causal, bool):
        raise ValueError(f"flash_cute: causal: expected False or True, got {shown(causal)}")
    expected = (1, 2) if causal else (2, 4)
    if given.shape[3] not in expected:
        raise ValueError(
            f"flash_cute: startend_row_indices: expected {expected[0]} or {expected[1]} numbers for a key where causal "
            f"is {causal}, got {tuple(given.shape)}"
        )
    numbers = given.unbind(-1)
    none, all_rows = torch.zeros_like(numbers[0]), torch.full_like(numbers[0], NO_LIMIT)
    if len(numbers) == 1:
        return make(none, numbers[0])
    if len(numbers) == 2:
        start, end = numbers
        return make(none, start, end, all_rows) if causal else make(end, start)
    length = torch.full_like(none, given.shape[2])
    edges = [tuple(x.clamp(0, given.shape[2]) for x in pair) for pair in (numbers[:2], numbers[2:])]
    # What is hidden, in order, empty ones last; and what is between.
    hidden = [(start.where(start < end, length), end.where(start < end, length)) for start, end in edges]
    swap = hidden[1][0] < hidden[0][0]
    one, other = (tuple(torch.where(swap, y, x) for x, y in zip(*pair, strict=True)) for pair in (hidden, hidden[::-1]))
    visible = ((none, one[0]), (one[1], other[0]), (torch.maximum(one[1], other[1]), length))
    firsts, limits = (torch.stack([interval[side] for interval in visible], -1) for side in (0, 1))
    return _checked("startend_row_indices", [merge(firsts, limits)], None)


def from_slices(
    q_ranges: Tensor | Sequence[Sequence[int]],
    k_ranges: Tensor | Sequence[Sequence[int]],
    types: Tensor | Sequence[int | str] | None = None,
    *,
    length: int,
    device: Any = None,
) -> _mask.Mask:
    """MagiAttention's slices: a row sees a key if one of the slices lets it.

    Pass `causal=False` with it. Tensors on the device are waited for, since a key may have more than two intervals,
    which a mask has not. Of slices that overlap the union counts.

    Args:
        q_ranges, k_ranges: `(n, 2)`, int32 or int64, or as many pairs: the rows and the keys of each slice, from the
            first to the second number.
        types: `(n,)`, int32 or int64, or as many numbers or names: what a slice of R rows and C keys shows its row r of
            its keys c. 0 `"full"`: all; 1 `"causal"`: c <= r + C - R; 2 `"inv_causal"`: c >= r; 3 `"bi_causal"`: both.
            `None`: all are full.
        length: Nk.
        device: with lists: where the mask is to be.

    Returns:
        A mask of one or two intervals, for any number of rows and Nk keys.

    Raises:
        ValueError: another dtype or shape; a type that is none; a key with more than two intervals.

    Example:
        >>> print(Mask.from_slices([[0, 2], [2, 4]], [[0, 2], [0, 4]], ["causal", "full"], length=4).draw(4))
        #...
        ##..
        ####
        ####
    """
    of_rows, of_keys = (_ranges(name, x) for name, x in (("q_ranges", q_ranges), ("k_ranges", k_ranges)))
    if of_rows.shape != of_keys.shape:
        raise ValueError(
            f"flash_cute: k_ranges: expected as many as q_ranges, {of_rows.shape[0]}, got {of_keys.shape[0]}"
        )
    count, length = of_rows.shape[0], check_count("length", length)
    kinds = _kinds(types, count).to(of_rows.device)
    if count == 0 or length == 0:
        nothing = torch.zeros(length, dtype=torch.int32, device=of_rows.device if device is None else device)
        return make(nothing, nothing)
    (row, row_end), (key, key_end) = of_rows.unbind(1), of_keys.to(of_rows.device).unbind(1)
    ahead = (key_end - key) - (row_end - row)  # C - R
    unions = []
    for columns in torch.arange(length, device=of_rows.device).split(max(1, _AT_ONCE // max(1, count))):
        column = columns.unsqueeze(1) - key  # (columns, n)
        inside = (column >= 0) & (columns.unsqueeze(1) < key_end)
        first = torch.where(kinds % 2 == 1, row + (column - ahead).clamp(min=0), row)
        limit = torch.where(kinds >= 2, torch.minimum(row + column + 1, row_end), row_end)
        unions.append(merge(first.where(inside, 0), limit.where(inside, 0)))
    return _checked("k_ranges", unions, device)


def from_dense(dense: Tensor, heads_kv: int | None = None) -> _mask.Mask:
    """A matrix of booleans, exactly; or a refusal that says which key has a third interval of rows.

    Pass `causal=False` with it: the matrix has what there is of causality. The device is waited for.
    `Mask.from_matrix` takes any matrix, and nothing waits.

    Args:
        dense: bool `(Nq, Nk)`, `(B or 1, Nq, Nk)` or `(B or 1, heads or 1, Nq, Nk)`: True where the row sees the key.
        heads_kv: where dense has query heads: Hkv. The query heads of a key head must then have one mask. `None`: the
            heads are key heads.

    Returns:
        A mask of one interval, or of two where a key needs them, for Nq rows and Nk keys.

    Raises:
        ValueError: another dtype or shape; a key with three intervals; query heads of a key head that differ.

    Example:
        >>> dense = torch.ones(6, 6).tril().bool() & (torch.arange(6) != 2)
        >>> torch.equal(Mask.from_dense(dense).dense(6)[0, 0], dense)
        True
    """
    if not isinstance(dense, Tensor):
        raise ValueError(f"flash_cute: dense: expected a torch.Tensor, got {shown(dense)}")
    if dense.dtype != torch.bool:
        raise ValueError(f"flash_cute: dense: expected bool, got {str(dense.dtype).removeprefix('torch.')}")
    if dense.dim() not in (2, 3, 4):
        raise ValueError(
            "flash_cute: dense: expected the shape (Nq, Nk), (B or 1, Nq, Nk) or (B or 1, heads or 1, Nq, Nk), got "
            f"{tuple(dense.shape)}"
        )
    if dense.dim() < 4:
        dense = dense[None, None] if dense.dim() == 2 else dense.unsqueeze(1)
    if heads_kv is not None:
        dense = of_key_heads("dense", dense, check_count("heads_kv", heads_kv, 1))
    columns = max(1, _AT_ONCE // max(1, dense.shape[:3].numel()))
    return _checked("dense", [_of_columns(part) for part in dense.split(columns, 3)], None)


def _of_columns(dense: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """As `merge`, of a matrix (B, H, Nq, some keys)."""
    rows = dense.shape[2]
    # Rows on which an interval begins, and on which one has ended: (B, H, Nq + 1, keys).
    padded = torch.nn.functional.pad(dense, (0, 0, 1, 1))
    begins, ends = padded[:, :, 1:] & ~padded[:, :, :-1], padded[:, :, :-1] & ~padded[:, :, 1:]
    numbers = begins.sum(2)
    index = torch.arange(rows + 1, dtype=torch.int32, device=dense.device).unsqueeze(1)
    found = []
    for edges in (begins, ends):
        first = index.where(edges, NO_LIMIT).amin(2)
        last = index.where(edges, -1).amax(2)
        found.append((first.where(numbers > 0, 0), last.where(numbers > 1, 0)))
    return numbers, [(found[0][0], found[1][0]), (found[0][1], found[1][1])]


def of_key_heads(name: str, dense: Tensor, heads_kv: int) -> Tensor:
    """A matrix (B or 1, heads or 1, Nq, Nk) as one of key heads; it waits where the heads are query's."""
    heads = dense.shape[1]
    if heads in (1, heads_kv):
        return dense
    if heads % heads_kv:
        raise ValueError(f"flash_cute: {name}: expected a number of heads that {heads_kv} divides, got {heads}")
    groups = dense.unflatten(1, (heads_kv, -1))
    if not torch.equal(groups, groups[:, :, :1].expand_as(groups)):
        raise ValueError(
            f"flash_cute: {name}: expected one mask for the {heads // heads_kv} query heads of a key head, got masks "
            "that differ"
        )
    return groups[:, :, 0]


def _ranges(name: str, given: Any) -> Tensor:
    if not isinstance(given, Tensor):
        given = torch.tensor([[check_count(name, x) for x in pair] for pair in given], dtype=torch.long).view(-1, 2)
    given = check_integers(name, given, ("(n, 2)",))
    if given.shape[1] != 2:
        raise ValueError(f"flash_cute: {name}: expected the shape (n, 2), got {tuple(given.shape)}")
    return given.long()


def _kinds(types: Any, count: int) -> Tensor:
    if types is None:
        return torch.zeros(count, dtype=torch.long)
    if not isinstance(types, Tensor):
        numbers = [SLICE_TYPES.index(x) if x in SLICE_TYPES else x for x in types]
        types = torch.tensor([check_count("types", x) for x in numbers], dtype=torch.long)
    types = check_integers("types", types, ("(n,)",))
    if types.shape[0] != count:
        raise ValueError(f"flash_cute: types: expected one for each of the {count} slices, got {types.shape[0]}")
    if count and not bool(((types >= 0) & (types < len(SLICE_TYPES))).all()):
        raise ValueError(f"flash_cute: types: expected 0 to 3, or of {', '.join(SLICE_TYPES)}, got others")
    return types.long()


def _checked(name: str, parts: list[tuple[Tensor, list[tuple[Tensor, Tensor]]]], device: Any) -> _mask.Mask:
    """The mask of `merge`'s results for parts of the columns, if no column has more than two intervals."""
    numbers = torch.cat([x for x, _ in parts], -1)
    most = int(numbers.max()) if numbers.numel() else 0
    if most > 2:
        *outer, column = (numbers > 2).nonzero()[0].tolist()
        where = f" of batch item {outer[0]}, head {outer[1]}" if len(outer) == 2 else ""
        raise ValueError(
            f"flash_cute: {name}: expected at most two intervals of rows for each key, got {most}: key {column}{where} "
            f"has {int(numbers[tuple([*outer, column])])}; Mask.from_matrix takes any matrix of booleans"
        )
    tensors = [torch.cat([found[which][side] for _, found in parts], -1) for which in (0, 1) for side in (0, 1)]
    mask = make(*(tensors if most == 2 else tensors[:2]))
    return mask if device is None else mask.to(device)
