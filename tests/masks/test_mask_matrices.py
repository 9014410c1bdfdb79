"""`flash_cute.Mask` of matrices and of blocks: what they say pair by pair, what is refused, copies of them."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree

from flash_cute import Mask


def bools(*shape: int, rng: torch.Generator, density: float = 0.5) -> torch.Tensor:
    return torch.rand(shape, generator=rng) < density


def assert_says(mask: Mask, len_q: int, expected: torch.Tensor) -> None:
    """`expected`: broadcastable to (B or 1, Hkv or 1, Nq, Nk)."""
    given = mask.dense(len_q)
    assert given.dtype == torch.bool
    assert torch.equal(given, expected.to(given.device).expand_as(given))


@pytest.mark.parametrize(
    "shape", [(9, 13), (2, 9, 13), (2, 3, 9, 13), (1, 3, 1, 13), (0, 4), (4, 0), (2, 1, 9, 1)], ids=str
)
def test_from_matrix(shape: tuple[int, ...], device: str, rng: torch.Generator) -> None:
    """It is not copied, and says what the tensor holds when it is asked."""
    seen = bools(*shape, rng=rng).to(device)
    mask = Mask.from_matrix(seen)
    of_four_dims = seen if len(shape) == 4 else seen[(None,) * (3 - len(shape))].unsqueeze(-3)
    assert mask.matrix is not None and mask.matrix.data_ptr() == seen.data_ptr()
    rows = 9 if of_four_dims.shape[2] == 1 else of_four_dims.shape[2]
    assert_says(mask, rows, of_four_dims)
    assert mask.dense(rows).shape[:2] == of_four_dims.shape[:2]
    seen.logical_not_()
    assert_says(mask, rows, of_four_dims)
    for x in mask.tensors[:2]:
        assert x is not None and x.untyped_storage().nbytes() == 4


def test_one_column_for_all_keys(device: str, rng: torch.Generator) -> None:
    seen = bools(2, 1, 9, 1, rng=rng).to(device)
    mask = Mask.from_matrix(seen, 13)
    assert mask.dense(9).shape == (2, 1, 9, 13)
    assert_says(mask, 9, seen)
    assert_says(Mask.from_matrix(seen[:, :, :1], 13), 5, seen[:, :, :1])


@pytest.mark.parametrize("shape", [(3, 2), (2, 3, 2), (2, 3, 3, 2), (1, 3, 3, 2)], ids=str)
def test_from_blocks(shape: tuple[int, ...], device: str, rng: torch.Generator) -> None:
    blocks = bools(*shape, rng=rng).to(device)
    for len_q, len_k in ((192, 128), (129, 65)):
        mask = Mask.from_blocks(blocks, len_k)
        given = mask.dense(len_q)
        of_four_dims = blocks if len(shape) == 4 else blocks[(None,) * (3 - len(shape))].unsqueeze(-3)
        assert given.shape == (*of_four_dims.shape[:2], len_q, len_k)
        for row in range(3):
            for key in range(2):
                block = given[:, :, 64 * row : 64 * row + 64, 64 * key : 64 * key + 64]
                assert torch.equal(block, of_four_dims[:, :, row, key, None, None].expand_as(block))


def test_all_of_it(device: str, rng: torch.Generator) -> None:
    """Intervals, a matrix, another, blocks and a band: all must show a row the key."""
    ids = torch.arange(150, device=device) // 40
    first, second = bools(2, 1, 150, 150, rng=rng).to(device), bools(3, 150, 150, rng=rng)[None].to(device)
    blocks, more = bools(3, 3, rng=rng).to(device), bools(2, 1, 3, 3, rng=rng).to(device)
    mask = Mask.documents(ids).with_matrix(first).with_blocks(blocks).with_matrix(second).with_blocks(more)
    of_blocks = (blocks & more).repeat_interleave(64, -2).repeat_interleave(64, -1)[..., :150, :150]
    expected = (ids.unsqueeze(-1) == ids) & first & second & of_blocks
    assert_says(mask, 150, expected)
    assert mask.dense(150).shape == (2, 3, 150, 150)
    row = torch.arange(150, device=device)
    band = (row <= row.unsqueeze(-1)) & (row >= row.unsqueeze(-1) - 7)
    assert torch.equal(mask.dense(150, True, (7, 0)), expected & band)
    assert mask.draw(150, batch=1, head=2, width=150).split() == [
        "".join("#" if x else "." for x in line) for line in expected[1, 2].tolist()
    ]


def test_rows_from(rng: torch.Generator) -> None:
    seen = bools(2, 1, 150, 150, rng=rng)
    mask = Mask.documents(torch.arange(150) // 40).with_matrix(seen)
    assert torch.equal(mask.rows_from(37).dense(113), mask.dense(150)[:, :, 37:])
    one_row = Mask.from_matrix(seen[:, :, :1])
    assert torch.equal(one_row.rows_from(37).dense(113), one_row.dense(150)[:, :, 37:])
    blocks = mask.with_blocks(bools(3, 3, rng=rng))
    assert torch.equal(blocks.rows_from(64).dense(86), blocks.dense(150)[:, :, 64:])
    with pytest.raises(ValueError, match="first: expected a multiple of 64 of a mask with blocks, got 37"):
        blocks.rows_from(37)


def test_copies(rng: torch.Generator) -> None:
    mask = Mask.global_tokens(2, 70, (1, 1)).with_matrix(bools(70, 70, rng=rng)).with_blocks(bools(2, 2, rng=rng))
    file = io.BytesIO()
    torch.save(mask, file)
    file.seek(0)
    leaves, spec = _pytree.tree_flatten(mask)
    assert len(leaves) == 6
    others = [
        pickle.loads(pickle.dumps(mask)),
        copy.deepcopy(mask),
        mask.to("cpu"),
        torch.load(file, weights_only=True),
    ]
    for other in (*others, _pytree.tree_unflatten(leaves, spec)):
        assert torch.equal(other.dense(70), mask.dense(70))


MATRIX, BLOCKS = torch.ones(5, 7).bool(), torch.ones(1, 1).bool()
GOOD = Mask.from_matrix(MATRIX)
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "a list": (lambda: Mask.from_matrix([[True]]), "seen: expected a torch.Tensor, got list"),
    "numbers": (lambda: Mask.from_matrix(MATRIX.float()), "seen: expected bool, got float32"),
    "one dim": (
        lambda: Mask.from_matrix(MATRIX[0]),
        "seen: expected the shape (Nq, Nk), (B or 1, Nq, Nk) or (B or 1, Hkv or 1, Nq or 1, Nk or 1), got (7,)",
    ),
    "other keys": (
        lambda: Mask.from_matrix(MATRIX, 9),
        "mask.matrix: expected 1 column or mask.first_row's 9 keys, got (1, 1, 5, 7)",
    ),
    "blocks of numbers": (lambda: Mask.from_blocks(BLOCKS.int(), 7), "blocks: expected bool, got int32"),
    "blocks of a list": (lambda: Mask.from_blocks([[True]], 7), "blocks: expected a torch.Tensor, got list"),
    "no length": (lambda: Mask.from_blocks(BLOCKS, None), "length: expected a number of at least 0, got None"),
    "too few blocks": (
        lambda: Mask.from_blocks(BLOCKS, 65),
        "mask.blocks: expected 2 blocks of 64 for mask.first_row's 65 keys, got (1, 1, 1, 1)",
    ),
    "blocks of other rows": (
        lambda: GOOD.with_blocks(BLOCKS.expand(2, 1)),
        "mask.blocks: expected 1 blocks of 64 for mask.matrix's 5 rows, got (1, 1, 2, 1)",
    ),
    "another matrix": (
        lambda: GOOD.with_matrix(MATRIX[:4]),
        "seen: expected a shape that broadcasts with the mask's (1, 1, 5, 7), got (1, 1, 4, 7)",
    ),
    "other batches": (
        lambda: Mask.documents(torch.zeros(2, 7, dtype=torch.long)).with_matrix(MATRIX.expand(3, 5, 7)),
        "mask.matrix: expected 1 or 2 batch items, got (3, 1, 5, 7)",
    ),
    "meta": (
        lambda: GOOD.with_blocks(BLOCKS.to("meta")),
        "mask.blocks: expected mask.first_row's device cpu, got meta",
    ),
    "three dims": (
        lambda: Mask(*GOOD.tensors[:2], matrix=MATRIX[None]),  # type: ignore[arg-type]
        "mask.matrix: expected 4 dims (B or 1, Hkv or 1, Nq or 1, Nk or 1), got (1, 5, 7)",
    ),
    "dense of other rows": (lambda: GOOD.dense(6), "len_q: expected mask.matrix's 5 rows, got 6"),
    "dense of other blocks": (
        lambda: Mask.from_blocks(BLOCKS, 7).dense(65),
        "len_q: expected a number of rows of mask.blocks' 1 blocks of 64, got 65",
    ),
    "a row before the first": (lambda: GOOD.rows_from(-1), "first: expected a number of at least 0, got -1"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name: str) -> None:
    call, sentence = BAD[name]
    with pytest.raises(ValueError, match=f"^flash_cute: {re.escape(sentence)}$"):
        call()


def test_three_intervals_point_to_a_matrix() -> None:
    with pytest.raises(ValueError, match=r"key 0 .* has 3; Mask\.from_matrix takes any matrix of booleans$"):
        Mask.from_dense((torch.arange(5) % 2 == 0).view(5, 1))
