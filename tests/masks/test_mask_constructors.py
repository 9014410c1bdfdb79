"""Each constructor of `flash_cute.Mask` against what its documentation says, pair by pair; and what it refuses.

Past 400 lines by a few: a test for each constructor, which share `matrix` and `assert_is`.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flash_cute
from flash_cute import Mask

Sees = Callable[[int, int], bool]  # row, key


def matrix(rows: int, keys: int, sees: Sees) -> torch.Tensor:
    return torch.tensor([[sees(i, j) for j in range(keys)] for i in range(rows)], dtype=torch.bool).view(rows, keys)


def assert_is(mask: Mask, rows: int, expected: torch.Tensor, causal: bool | str = False) -> None:
    """`expected`: (Nq, Nk), (B, Nq, Nk) or (B, H, Nq, Nk)."""
    assert all(x is None or x.dtype == torch.int32 for x in mask.tensors)
    given = mask.dense(rows, causal)
    if expected.dim() < 4:
        expected = expected[None, None] if expected.dim() == 2 else expected.unsqueeze(1)
    assert torch.equal(given, expected.expand_as(given)), f"\n{mask.draw(rows, causal)}"
    assert given.shape[:2] == expected.shape[:2] or expected.shape[0] == 1


@pytest.fixture
def pick(seed: int) -> random.Random:
    return random.Random(seed)


def cut(pick: random.Random, length: int) -> list[int]:
    """Numbers of tokens, some 0, that add up to a length."""
    places = sorted(pick.choices(range(length + 1), k=pick.randint(0, 6)))
    return [b - a for a, b in itertools.pairwise([0, *places, length])]


@pytest.mark.parametrize("causal", [False, True])
def test_documents(causal: bool, pick: random.Random, device: str) -> None:
    lengths = [cut(pick, 40) for _ in range(3)]
    ids = torch.tensor([[n for n, x in enumerate(one) for _ in range(x)] for one in lengths], device=device)
    ids[0, 7:9] = -1
    given = ids.tolist()

    def sees(b: int) -> Sees:
        runs = [0]
        for one, other in itertools.pairwise(given[b]):
            runs.append(runs[-1] + (one != other))
        return lambda i, j: runs[i] == runs[j] and given[b][j] >= 0 and (j <= i or not causal)

    expected = torch.stack([matrix(40, 40, sees(b)) for b in range(3)]).to(device)
    assert_is(Mask.documents(ids.int()), 40, expected, causal)
    assert_is(Mask.documents(ids[1]), 40, expected[1], causal)


def test_documents_by_offsets(pick: random.Random, device: str) -> None:
    lengths = cut(pick, 30)
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0) + 3
    of_token = [-1] * 3 + [n for n, x in enumerate(lengths) for _ in range(x)] + [-1] * 4
    expected = matrix(37, 37, lambda i, j: of_token[i] == of_token[j] >= 0).to(device)
    assert_is(Mask.documents(cu_seqlens=offsets.int(), length=37), 37, expected)
    assert_is(Mask.documents(cu_seqlens=offsets, length=37), 37, expected)
    wild = Mask.documents(cu_seqlens=torch.tensor([-5, 9, 4, 99], device=device), length=12)
    assert_is(wild, 12, matrix(12, 12, lambda i, j: (i < 9) == (j < 9)).to(device))
    assert not Mask.documents(cu_seqlens=torch.tensor([0], device=device), length=5).dense(5).any()


def test_padding(rng: torch.Generator, device: str) -> None:
    keys = (torch.rand(3, 17, generator=rng) < 0.6).to(device)
    assert_is(Mask.padding(keys), 5, keys.unsqueeze(1).expand(3, 5, 17))
    assert_is(Mask.padding(keys[0]), 5, keys[0].expand(5, 17))
    numbers = torch.tensor([0, 5, 99], device=device)
    expected = torch.arange(17, device=device) < numbers.unsqueeze(1)
    assert_is(Mask.padding(numbers.int(), 17), 4, expected.unsqueeze(1).expand(3, 4, 17))


@pytest.mark.parametrize("left", [None, 0, 2])
def test_chunks(left: int | None, pick: random.Random, device: str) -> None:
    size, length = pick.randint(1, 9), pick.randint(1, 40)
    expected = matrix(length, length, lambda i, j: 0 <= i // size - j // size <= (left if left is not None else length))
    assert_is(Mask.chunks(size, length, left=left, device=device), length, expected.to(device))
    if left is None:
        ids = torch.arange(length, device=device) // size
        assert_is(Mask.chunks(ids), length, expected.to(device))
        assert_is(Mask.chunks(ids.expand(2, -1).int()), length, expected.to(device))


@pytest.mark.parametrize("left", [None, 0, 5])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 8])
def test_context_parallel(count: int, left: int | None, pick: random.Random, device: str) -> None:
    rows, keys = pick.randint(20, 40), pick.randint(1, 60)
    ends = sorted(pick.choices(range(rows + 1), k=2 * count))
    pieces = [(a, b, pick.randint(0, keys)) for a, b in zip(ends[::2], ends[1::2], strict=True)]

    def sees(i: int, j: int) -> bool:
        positions = [position + i - begin for begin, end, position in pieces if begin <= i < end]
        return any(j <= at and (left is None or at - j <= left) for at in positions)

    mask = Mask.context_parallel(pieces, keys, left=left, device=device)
    assert count > 2 or mask.matrix is None
    if mask.matrix is not None:
        rows = mask.matrix.shape[2]
    assert torch.equal(mask.dense(rows)[0, 0], matrix(rows, keys, sees).to(device))


def test_pieces_that_continue_each_other(device: str) -> None:
    mask = Mask.context_parallel([(0, 3, 4), (3, 5, 7), (5, 5, 0), (6, 9, 20)], 30, device=device)
    assert mask.matrix is None
    assert torch.equal(mask.dense(9), Mask.context_parallel([(0, 5, 4), (6, 9, 20)], 30, device=device).dense(9))


@pytest.mark.parametrize(
    "rows, said",
    [
        ([(0, 4, 0), (3, 5, 0)], "ascend and do not overlap"),
        ([(4, 2, 0)], "ascend and do not overlap"),
        ([(0, 1)], "pieces (begin, end, position)"),
        ([(n, n + 1, 0) for n in range(9)], "at most 8 pieces, got 9"),
        ([(0, 1, -1)], "at least 0, got -1"),
    ],
)
def test_pieces_that_are_refused(rows: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        Mask.context_parallel(rows, 10)


def test_prefix_lm(device: str) -> None:
    def expected(prefix: int) -> torch.Tensor:
        return matrix(20, 20, lambda i, j: j < prefix or j <= i).to(device)

    assert_is(Mask.prefix_lm(7, 20, device=device), 20, expected(7))
    prefixes = (0, 1, 12, 20, 33)
    mask = Mask.prefix_lm(torch.tensor(prefixes, dtype=torch.int32, device=device), 20)
    assert_is(mask, 20, torch.stack([expected(x) for x in prefixes]))
    assert_is(mask.rows_from(15), 5, torch.stack([expected(x)[15:] for x in prefixes]))


@pytest.mark.parametrize("left", [None, 0, 3])
def test_images(left: int | None, pick: random.Random, device: str) -> None:
    """As Gemma 3's layers: causal or sliding text, or an image that both tokens are of."""
    lengths = cut(pick, 40)
    numbers = [n if n % 2 else -1 for n, x in enumerate(lengths) for _ in range(x)]  # images and text in turn
    spans = [(sum(lengths[:n]), sum(lengths[: n + 1])) for n in range(len(lengths)) if n % 2]

    def sees(i: int, j: int) -> bool:
        return (j <= i and (left is None or i - j <= left)) or (numbers[i] == numbers[j] >= 0)

    expected = matrix(40, 40, sees).to(device)
    ids = torch.tensor(numbers, device=device)
    assert_is(Mask.images(ids, left=left), 40, expected)
    assert_is(Mask.images(torch.stack((ids, ids)).int(), left=left), 40, expected)
    begin, end = (torch.tensor([x[side] for x in spans], dtype=torch.long, device=device) for side in (0, 1))
    assert_is(Mask.images(begin=begin, end=end, length=40, left=left), 40, expected)


@pytest.mark.parametrize("window", [(None, None), (3, 0), (0, 2), (4, None), (None, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_global_tokens(window: Any, causal: bool, device: str) -> None:
    left, right = (99 if side is None else side for side in window)

    def expected(count: int) -> torch.Tensor:
        return matrix(
            20, 20, lambda i, j: (i - left <= j <= i + right or i < count or j < count) and (j <= i or not causal)
        ).to(device)

    assert_is(Mask.global_tokens(3, 20, window, device=device), 20, expected(3), causal)
    counts = torch.tensor([0, 2, 30], device=device)
    assert_is(Mask.global_tokens(counts, 20, window), 20, torch.stack([expected(x) for x in (0, 2, 30)]), causal)


def test_shared_prefix(pick: random.Random, device: str) -> None:
    def expected(prefix: int, answers: list[int], length: int) -> torch.Tensor:
        of_token = [0] * prefix + [n for n, x in enumerate(answers, 1) for _ in range(x)]
        of_token += [-1] * (length - len(of_token))

        def sees(i: int, j: int) -> bool:
            return j <= i and min(of_token[i], of_token[j]) >= 0 and of_token[j] in (0, of_token[i])

        return matrix(length, length, sees).to(device)

    answers = cut(pick, 20)
    assert_is(Mask.shared_prefix(5, answers, device=device), 25, expected(5, answers, 25), True)
    lengths = torch.tensor(answers, device=device)
    assert_is(Mask.shared_prefix(5, lengths, 30), 30, expected(5, answers, 30), True)
    other = [[3, 0, 4], [1, 1, 1]]
    mask = Mask.shared_prefix(torch.tensor([2, 6], device=device), torch.tensor(other, device=device).int(), 12)
    assert_is(mask, 12, torch.stack([expected(2, other[0], 12), expected(6, other[1], 12)]), True)
    if device == "cpu":
        assert Mask.shared_prefix(torch.tensor([2, 6]), torch.tensor(other)).first_row.shape == (2, 1, 9)


@pytest.mark.parametrize("tokens", [1, 3])
def test_tree(tokens: int, pick: random.Random, device: str) -> None:
    """`tokens`: of each node."""
    parents = [-1] + [pick.randrange(max(0, n - 3), n) for n in range(1, 12)]
    order: list[int] = []

    def visit(node: int) -> None:
        order.append(node)
        for child in range(len(parents)):
            if parents[child] == node:
                visit(child)

    visit(0)

    def ancestors(node: int) -> set[int]:
        return set() if node < 0 else {node, *ancestors(parents[node])}

    place = {node: n for n, node in enumerate(order)}
    tin = [place[order[row // tokens]] * tokens for row in range(12 * tokens)]
    size = {node: sum(node in ancestors(other) for other in range(12)) for node in range(12)}
    tout = [first + size[order[row // tokens]] * tokens for row, first in enumerate(tin)]
    expected = matrix(
        12 * tokens, 12 * tokens, lambda i, j: j <= i and order[j // tokens] in ancestors(order[i // tokens])
    )
    mask = Mask.tree(torch.tensor(tin, device=device), torch.tensor(tout, device=device).int())
    assert_is(mask, 12 * tokens, expected.to(device), True)
    if tokens == 1:
        assert_is(mask, 12, expected.to(device))


@pytest.mark.parametrize(("causal", "numbers"), [(True, 1), (True, 2), (False, 2), (False, 4)])
def test_from_flashmask(causal: bool, numbers: int, rng: torch.Generator, device: str) -> None:
    length = 15
    given = torch.randint(0, length + 1, (2, 3, length, numbers), generator=rng)
    if numbers == 4:  # so that two intervals are left: nothing above the second start, or nothing below the first end
        given[..., 1] = torch.where(given[..., 0] % 2 == 0, length, given[..., 1])
        given[..., 2] = torch.where(given[..., 0] % 2 == 0, given[..., 2], 0)

    def expected(b: int, h: int) -> torch.Tensor:
        def sees(i: int, j: int) -> bool:
            row = given[b, h, j].tolist()
            if causal:
                return j <= i and not row[0] <= i < (row[1] if numbers == 2 else length)
            if numbers == 2:
                return row[1] <= i < row[0]
            return not (row[0] <= i < row[1] or row[2] <= i < row[3])

        return matrix(length, length, sees)

    whole = torch.stack([torch.stack([expected(b, h) for h in range(3)]) for b in range(2)]).to(device)
    assert_is(Mask.from_flashmask(given.int().to(device), causal), length, whole, causal)


def test_from_flashmask_with_three_intervals() -> None:
    given = torch.tensor([8, 8, 0, 0]).repeat(1, 1, 8, 1)
    given[0, 0, 5] = torch.tensor([6, 7, 2, 4])
    sentence = "startend_row_indices: expected at most two intervals of rows for each key, got 3: key 5 of batch item 0"
    with pytest.raises(ValueError, match=sentence):
        Mask.from_flashmask(given, False)


def slice_sees(q: list[int], k: list[int], kind: int) -> Sees:
    rows, keys = q[1] - q[0], k[1] - k[0]

    def sees(i: int, j: int) -> bool:
        r, c = i - q[0], j - k[0]
        if not (0 <= r < rows and 0 <= c < keys):
            return False
        return not (kind % 2 and c > r + keys - rows) and not (kind >= 2 and c < r)

    return sees


@pytest.mark.parametrize("as_tensors", [False, True])
def test_from_slices(as_tensors: bool, pick: random.Random, device: str) -> None:
    done = 0
    while done < 12:
        count = pick.randint(0, 5)
        q, k = ([sorted(pick.choices(range(21), k=2)) for _ in range(count)] for _ in range(2))
        kinds = [pick.randrange(4) for _ in range(count)]
        parts = [slice_sees(*one) for one in zip(q, k, kinds, strict=True)]
        expected = matrix(20, 20, lambda i, j: any(sees(i, j) for sees in parts))  # noqa: B023
        padded = torch.nn.functional.pad(expected, (0, 0, 1, 0)).int()
        most = int((padded.diff(dim=0) == 1).sum(0).max())
        given: Any = (q, k, [flash_cute.masks.foreign.SLICE_TYPES[x] for x in kinds])
        if as_tensors:
            shapes = ((q, (2,)), (k, (2,)), (kinds, ()))
            given = (torch.tensor(x, dtype=torch.long, device=device).view(-1, *tail) for x, tail in shapes)
        if most > 2:
            with pytest.raises(ValueError, match=rf"k_ranges: expected at most two intervals .*, got {most}: key \d+ "):
                Mask.from_slices(*given, length=20)
            continue
        assert_is(Mask.from_slices(*given, length=20, device=device), 20, expected.to(device))
        done += 1


def test_slices_of_the_documentation() -> None:
    """A full, a causal, an inverse causal and a bidirectional causal slice of four rows and six keys."""
    drawn = [Mask.from_slices([[0, 4]], [[0, 6]], [kind], length=6).draw(4).split() for kind in range(4)]
    assert drawn[0] == ["######"] * 4
    assert drawn[1] == ["###...", "####..", "#####.", "######"]
    assert drawn[2] == ["######", ".#####", "..####", "...###"]
    assert drawn[3] == ["###...", ".###..", "..###.", "...###"]


def test_from_dense(rng: torch.Generator, device: str) -> None:
    for shape in ((9, 13), (2, 9, 13), (2, 3, 9, 13), (0, 4), (4, 0), (1, 5)):
        first, limit = (torch.randint(-2, 12, (2, *shape[:-2], 1, shape[-1]), generator=rng) for _ in range(2))
        rows = torch.arange(shape[-2]).unsqueeze(-1)
        dense = ((rows >= first[0]) & (rows < limit[0]) | (rows >= first[1]) & (rows < limit[1])).to(device)
        assert dense.shape == shape
        assert_is(Mask.from_dense(dense), shape[-2], dense)
    causal = torch.ones(8, 8, dtype=torch.bool, device=device).tril()
    assert Mask.from_dense(causal).intervals == 1
    grouped = torch.rand(1, 2, 2, 6, generator=rng).lt(0.5).to(device)
    assert_is(Mask.from_dense(grouped.repeat_interleave(3, 1), heads_kv=2), 2, grouped)


def test_from_dense_with_three_intervals() -> None:
    dense = torch.zeros(2, 3, 7, 4, dtype=torch.bool)
    dense[1, 2, ::2, 3] = True
    sentence = "dense: expected at most two intervals of rows for each key, got 4: key 3 of batch item 1, head 2 has 4"
    with pytest.raises(ValueError, match=sentence):
        Mask.from_dense(dense)
    with pytest.raises(
        ValueError, match="dense: expected one mask for the 3 query heads of a key head, got masks that"
    ):
        Mask.from_dense(dense, heads_kv=1)


IDS = torch.zeros(4, dtype=torch.long)
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "no documents": (Mask.documents, "ids: expected either ids or cu_seqlens, got neither"),
    "both documents": (lambda: Mask.documents(IDS, cu_seqlens=IDS, length=3), "ids: .* got both"),
    "ids and length": (lambda: Mask.documents(IDS, length=4), "length: expected None beside ids"),
    "float ids": (lambda: Mask.documents(IDS.float()), "ids: expected int32 or int64, got float32"),
    "ids of three dims": (lambda: Mask.documents(IDS[None, None]), r"ids: expected the shape \(N,\) or \(B, N\), got"),
    "ids of a list": (lambda: Mask.documents([0, 1]), "ids: expected a torch.Tensor, got list"),
    "offsets without length": (lambda: Mask.documents(cu_seqlens=IDS), "length: expected a number .*, got None"),
    "a tensor for length": (
        lambda: Mask.prefix_lm(3, IDS[0]),
        "length: .*, got torch.Tensor, whose value is not waited for",
    ),
    "a negative prefix": (lambda: Mask.prefix_lm(-1, 4), "prefix: expected a number of at least 0, got -1"),
    "a chunk of none": (lambda: Mask.chunks(0, 4), "chunks: expected a number of at least 1, got 0"),
    "left of chunks": (lambda: Mask.chunks(IDS, left=1), "left: expected None beside a tensor of chunks"),
    "padding of floats": (lambda: Mask.padding(torch.ones(2, 4)), "keys: expected int32 or int64, got float32"),
    "padding of three dims": (lambda: Mask.padding(torch.ones(1, 2, 4).bool()), r"keys: expected the shape \(Nk,\)"),
    "images by nothing": (Mask.images, "ids: expected either ids, or begin and end"),
    "images that do not end": (lambda: Mask.images(begin=IDS, length=4), "ids: expected either ids, or begin and end"),
    "other ends": (lambda: Mask.images(begin=IDS, end=IDS[:2], length=4), r"end: expected begin's shape \(4,\)"),
    "a window of one": (lambda: Mask.global_tokens(1, 4, (3,)), "window: expected None or"),
    "trees that differ": (lambda: Mask.tree(IDS, IDS[:2]), r"tout: expected tin's shape \(4,\), got \(2,\)"),
    "flashmask of three": (
        lambda: Mask.from_flashmask(torch.zeros(1, 1, 4, 3, dtype=torch.int32), True),
        "startend_row_indices: expected 1 or 2 numbers for a key where causal is True",
    ),
    "flashmask of one": (
        lambda: Mask.from_flashmask(torch.zeros(1, 1, 4, 1, dtype=torch.int32), False),
        "startend_row_indices: expected 2 or 4 numbers for a key where causal is False",
    ),
    "flashmask's causal": (lambda: Mask.from_flashmask(torch.zeros(1, 1, 4, 1).int(), 1), "causal: expected False or"),
    "other slices": (lambda: Mask.from_slices([[0, 1]], [], length=4), "k_ranges: expected as many as q_ranges, 1"),
    "a fifth type": (lambda: Mask.from_slices([[0, 1]], [[0, 1]], [4], length=4), "types: expected 0 to 3, or of full"),
    "an unknown type": (lambda: Mask.from_slices([[0, 1]], [[0, 1]], ["x"], length=4), "types: expected .*, got 'x'"),
    "types too few": (lambda: Mask.from_slices([[0, 1]], [[0, 1]], [], length=4), "types: expected one for each of"),
    "a matrix of floats": (lambda: Mask.from_dense(torch.ones(3, 3)), "dense: expected bool, got float32"),
    "a matrix of one dim": (lambda: Mask.from_dense(torch.ones(3).bool()), r"dense: expected the shape \(Nq, Nk\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused(name: str) -> None:
    call, sentence = BAD[name]
    with pytest.raises(ValueError, match=f"^flash_cute: {sentence}") as caught:
        call()
    assert re.match(r"flash_cute: \w+: expected .*, got ", str(caught.value))


@pytest.mark.cuda
def test_no_constructor_waits() -> None:
    """PyTorch raises where an operation waits for the device; from_dense, from_slices and FlashMask's four do."""
    ids = torch.arange(64, device="cuda") // 10
    numbers = torch.tensor([3, 4], device="cuda")
    rows = torch.full((1, 1, 64, 2), 64, dtype=torch.int32, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        Mask.documents(ids)
        Mask.documents(cu_seqlens=ids[:9], length=64)
        Mask.padding(numbers, 64)
        Mask.padding(ids < 3)
        Mask.chunks(4, 64, left=1, device="cuda")
        Mask.chunks(ids)
        Mask.prefix_lm(numbers, 64)
        Mask.images(ids, left=5)
        Mask.images(begin=numbers, end=numbers + 1, length=64)
        Mask.global_tokens(numbers, 64, (3, 3))
        Mask.shared_prefix(numbers, torch.stack((numbers, numbers)), 64)
        Mask.tree(ids, ids + 10).rows_from(3)
        Mask.from_flashmask(rows, True)
        Mask.from_flashmask(rows, False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
