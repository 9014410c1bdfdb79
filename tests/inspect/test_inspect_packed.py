"""The schedule of a packed batch, as the kernel's own scheduler makes it on the host."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("pybind11", reason="the extra inspect is not installed")
pytest.importorskip("matplotlib", reason="the extra inspect is not installed")

from flash_cute import inspect
from flash_cute.inspect import __main__ as command
from flash_cute.inspect import packed
from flash_cute.inspect.kernels import Kernel, PackedProblem, Problem

DOCUMENTS = (3000, 100, 0, 700, 1, 1100, 260, 64, 65)


def tall(among: tuple[Kernel, ...]) -> Kernel:
    return inspect.find(among, 64, "sm90", "rows256")  # 256 rows, 64 keys


def alone(problem: PackedProblem, length: int) -> Problem:
    return Problem(1, problem.heads_q, problem.heads_kv, length, length, 64, problem.causal, problem.window)


@pytest.mark.parametrize("sms", [1, 7, 132])
@pytest.mark.parametrize(
    "problem",
    [
        PackedProblem(DOCUMENTS, 4, 2, "bottom_right"),
        PackedProblem(DOCUMENTS, 4, 2),
        PackedProblem(DOCUMENTS, 2, 2, "none", (200, 50)),
        PackedProblem(DOCUMENTS, 2, 1, "top_left", (127, None)),
        PackedProblem((0, 0), 2, 1),
    ],
    ids=["causal", "full", "window", "left", "empty"],
)
def test_each_tile_is_drawn_once(problem: PackedProblem, sms: int, kernels: tuple[Kernel, ...]) -> None:
    """Every row tile of every sequence and head, with the key tiles that some row of it sees."""
    kernel = tall(kernels)
    found = kernel.packed_schedule(problem, sms)
    drawn = Counter(zip(*(found[name].tolist() for name in ("sequence", "head", "m_block")), strict=True))
    expected = {
        (sequence, head, m_block)
        for sequence, length in enumerate(problem.lengths)
        for head in range(problem.heads_q)
        for m_block in range(-(-length // kernel.block_m))
    }
    assert set(drawn) == expected and set(drawn.values()) <= {1}
    assert found["ticket"].tolist() == list(range(len(expected)))
    names = ("sequence", "m_block", "begin", "whole_begin", "whole_end", "end")
    for sequence, m_block, begin, whole_begin, whole_end, end in zip(*(found[x].tolist() for x in names), strict=True):
        first, limit = alone(problem, problem.lengths[sequence]).seen()
        rows = slice(m_block * kernel.block_m, (m_block + 1) * kernel.block_m)
        first, limit = first[rows], limit[rows]
        assert (begin, end) == (first.min() // kernel.block_n, -(-limit.max() // kernel.block_n))
        for tile in range(whole_begin, whole_end):
            assert first.max() <= tile * kernel.block_n and (tile + 1) * kernel.block_n <= limit.min()


@pytest.mark.parametrize("sms", [3, 16])
def test_a_cta_computes_its_tiles_one_after_the_other(sms: int, kernels: tuple[Kernel, ...]) -> None:
    found = tall(kernels).packed_schedule(PackedProblem(DOCUMENTS, 4, 2, "bottom_right"), sms)
    for cta in range(sms):
        of_cta = found["cta"] == cta
        start, finish, ticket = (found[name][of_cta] for name in ("start", "finish", "ticket"))
        assert ticket[0] == cta and (start[1:] == finish[:-1]).all() and start[0] == 0
        assert (finish - start == found["end"][of_cta] - found["begin"][of_cta] + 1).all()


def test_long_sequences_come_first(kernels: tuple[Kernel, ...]) -> None:
    """Those longer than half of the longest, then those longer than a quarter; within a sequence the longest tiles."""
    generator = random.Random(5)
    problem = PackedProblem(tuple(generator.randrange(2000) for _ in range(100)), 2, 1, "bottom_right")
    found = tall(kernels).packed_schedule(problem, 8)
    longest = max(problem.lengths)
    keys = [problem.lengths[sequence] for sequence in found["sequence"].tolist()]
    passes = [0 if n > longest >> 1 else 1 if n > longest >> 2 else 2 for n in keys]
    assert passes == sorted(passes) and set(passes) == {0, 1, 2}
    for sequence in set(found["sequence"].tolist()):
        blocks = found["m_block"][found["sequence"] == sequence].tolist()
        assert blocks == sorted(blocks, reverse=True)


def test_more_sequences_than_are_looked_through_for_the_longest(kernels: tuple[Kernel, ...]) -> None:
    generator = random.Random(6)
    problem = PackedProblem(tuple(generator.randrange(600) for _ in range(1100)), 1, 1, "bottom_right")
    found = tall(kernels).packed_schedule(problem, 4)
    sequences = found["sequence"].tolist()
    assert sequences == sorted(sequences) and len(sequences) == sum(-(-n // 256) for n in problem.lengths)


def test_picture(kernels: tuple[Kernel, ...], tmp_path: Path) -> None:
    picture = packed.packed_picture(tall(kernels), PackedProblem((700, 100, 100), 2, 1, "bottom_right"), 2)
    assert picture.data["ticket"] == list(range(10)) and picture.data["sequence"][:6] == [0] * 6
    # 700 rows are three tiles of 256, with 11, 8 and 4 key tiles of 64; 100 rows are one with 2
    tiles = [11, 11, 8, 8, 4, 4, 2, 2, 2, 2]
    assert [end - begin for begin, end in zip(picture.data["begin"], picture.data["end"], strict=True)] == tiles
    work = sum(tiles) + len(tiles)
    assert picture.data["balance"] == pytest.approx(work / (2 * picture.data["length"]), abs=1e-4)
    svg = picture.save(tmp_path, ("svg",))[0].read_text()
    assert ">700<" in svg and ">100<" in svg and "3 sequences, 2 heads" in svg


def test_command(kernels: tuple[Kernel, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "draw",
        "packed",
        "--arch",
        "sm90",
        "--head-dim",
        "64",
        "--packed",
        "300,0,100",
        "--causal",
        "--window",
    ]
    assert command.main([*arguments, "64", "-1", "--format", "svg", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "sm90_d64_packed.svg").exists()
    for more, sentence in (
        (["--entry", "rows64"], "packed batches are drawn of sm90's forward, and of the tiles that they have"),
        (["--packed", "100000000"], "expected at most 20000 tiles in a picture"),
        (["--window", "-1", "-1", "--heads", "1", "--packed", "0"], None),
    ):
        assert command.main([*arguments, "64", "-1", *more, "--out", str(tmp_path)]) == (2 if sentence else 0)
        assert (sentence or "") in capsys.readouterr().err
    assert command.main(["draw", "packed", "--arch", "sm80", "--head-dim", "64", "--out", str(tmp_path)]) == 2


def test_wrong_problems_are_refused() -> None:
    with pytest.raises(ValueError, match="lengths: expected numbers of at least 0"):
        PackedProblem((), 1, 1)
    with pytest.raises(ValueError, match="heads_kv: expected a divisor of heads_q 3, got 2"):
        PackedProblem((10,), 3, 2)
    with pytest.raises(ValueError, match="window: expected numbers"):
        PackedProblem((10,), 2, 2, window=(-1, 0))
