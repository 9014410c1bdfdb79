"""The schedule of attention over caches, as the kernels' own search for work makes it on the host."""

from __future__ import annotations

import itertools
import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pybind11", reason="the extra inspect is not installed")
pytest.importorskip("matplotlib", reason="the extra inspect is not installed")

from flash_cute.inspect import __main__ as command
from flash_cute.inspect import build, caches
from flash_cute.inspect.caches import CacheKernel, CacheProblem, Piece, Schedule

MIXED = ((1, 6000), (1, 900), (0, 50), (1, -1), (4, 3000), (64, 700), (1, 0), (3, 2), (40, 129))
PROBLEMS = {
    "causal": CacheProblem(MIXED, 8, 2),
    "full": CacheProblem(MIXED, 4, 1, "none"),
    "window": CacheProblem(MIXED, 8, 2, "bottom_right", (500, None)),
    "left": CacheProblem(MIXED, 2, 2, "top_left"),
    "many heads": CacheProblem(MIXED, 128, 1),
    "nothing": CacheProblem(((0, 100), (0, -1)), 2, 1),
    "long": CacheProblem(((2, 300), (700, 2000), (511, 600), (0, 3), (512, 100), (1, 40)), 32, 4),
}
SMS = (1, 7, 66)


@pytest.fixture(scope="module")
def kernels() -> tuple[CacheKernel, ...]:
    return caches.cache_kernels()


def test_kernels_are_those_of_the_sources(kernels: tuple[CacheKernel, ...]) -> None:
    families = json.loads((build.default_csrc() / "families.json").read_text())
    pairs = {(arch, folder): dims for arch, of in families.items() for folder, dims in of.items() if "decode" in folder}
    pairs = {key: dims for key, dims in pairs.items() if key[1] not in caches.NOT_DRAWN}
    expected = {
        (arch, folder, *(dims if isinstance(dims, list) else (dims, dims)))
        for (arch, folder), of_family in pairs.items()
        for dims in of_family
    }
    assert {(k.arch, k.folder, k.head_dim, k.head_dim_v) for k in kernels} == expected


def seen_keys(problem: CacheProblem, sequence: int, row: int) -> range:
    """The keys that a row sees, by the contract."""
    rows, keys = problem.sequences[sequence]
    keys = max(0, keys)
    position = row if problem.causal == "top_left" else row + keys - rows
    left, right = problem.window
    right = 0 if problem.causal != "none" else right
    begin = 0 if left is None else max(0, position - left)
    return range(begin, keys if right is None else max(begin, min(keys, position + right + 1)))


def by_unit(found: Schedule) -> dict[tuple[int, int, int], list[Piece]]:
    """Of each head, sequence and row tile, its pieces in the order of their numbers."""
    units: dict[tuple[int, int, int], list[Piece]] = defaultdict(list)
    for piece in found.pieces:
        units[piece.head_kv, piece.sequence, piece.row_tile].append(piece)
    return {unit: sorted(pieces, key=lambda piece: piece.number) for unit, pieces in units.items()}


@pytest.mark.parametrize("sms", SMS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_each_key_is_computed_once(name: str, sms: int, kernels: tuple[CacheKernel, ...]) -> None:
    """The pieces of a unit are all there, in order, and have the key tiles that its rows see, each once."""
    problem = PROBLEMS[name]
    for kernel in kernels:
        found = kernel.schedule(problem, sms)
        units = by_unit(found)
        group, tile_keys = problem.heads_q // found.heads_kv, found.shape["block_n"]
        rows_of: dict[tuple[int, int], int] = defaultdict(int)
        for (head, sequence, _), pieces in sorted(units.items()):
            first = pieces[0]
            assert first.first_row == rows_of[head, sequence]
            rows_of[head, sequence] += first.rows
            assert [piece.number for piece in pieces] == list(range(first.pieces))
            rows = range(first.first_row // group, (first.first_row + first.rows - 1) // group + 1)
            seen = [keys for row in rows if (keys := seen_keys(problem, sequence, row))]
            tiles = [tile for piece in pieces for tile in range(piece.begin, piece.end)]
            begin, end = (min(x.start for x in seen), max(x.stop for x in seen)) if seen else (0, 0)
            assert tiles == list(range(begin // tile_keys, -(-end // tile_keys))), kernel
        expected = {
            (head, b): rows * group
            for head in range(found.heads_kv)
            for b, (rows, _) in enumerate(problem.sequences)
            if rows and not 0 < found.long_rows <= rows
        }
        assert dict(rows_of) == expected
        has_another = (
            kernel.folder == "decode/split_keys" and kernel.arch == "sm90" and kernel.head_dim in (64, 128, 256)
        )
        assert found.long_rows == (512 if name == "long" and has_another else 0)


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_is_stored_is_what_is_folded(name: str, kernels: tuple[CacheKernel, ...]) -> None:
    """The second kernel folds exactly the parts that the first one stores, from the first piece to the last, and reads
    them where they are. Parts of a launch lie beside each other in the workspace."""
    for kernel, sms in itertools.product(kernels, SMS):
        found = kernel.schedule(PROBLEMS[name], sms)
        units = by_unit(found)
        merged = set()
        for merge in found.merges:
            unit = merge.head_kv, merge.sequence, merge.row_tile
            merged.add(unit)
            pieces = units[unit]
            bundles = [piece.bundle for piece in pieces]  # one whose range is shorter than a piece may have none
            assert bundles == sorted(bundles) and (bundles[0], bundles[-1]) == (merge.first_bundle, merge.last_bundle)
            assert merge.first_bundle < merge.bundle <= merge.last_bundle
            assert [part[0] for part in merge.parts] + [len(pieces)] == [0, *(part[1] for part in merge.parts)]
            for number, (begin, end, place) in enumerate(merge.parts):
                assert all(piece.place == place for piece in pieces[begin:end])
                assert all(piece.by_itself == (number > 0) for piece in pieces[begin:end])
        for unit, pieces in units.items():
            is_split = len({piece.bundle for piece in pieces}) > 1
            assert is_split == (unit in merged)
            assert is_split or all(piece.place == -1 and not piece.by_itself for piece in pieces)
        stored = {(p.place, p.part_rows) for p in found.pieces if p.place >= 0}
        kept = sorted((place, place + rows // (found.part_columns - 2) * found.part_columns) for place, rows in stored)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(kept))
        assert not kept or 4 * kept[-1][1] <= found.workspace_bytes


def test_the_workspace_of_a_short_cache(kernels: tuple[CacheKernel, ...]) -> None:
    """It has room for the pieces of the longest sequence that there may be, and no more than the rule has."""
    for kernel in kernels:
        short, longer, longest = (
            kernel.schedule(CacheProblem(((70, keys), (1, keys)), 1, 1), 8).workspace_bytes
            for keys in (200, 2000, 100_000)
        )
        assert short <= longer <= longest and short < longest
        assert longest == kernel.schedule(CacheProblem(((70, 200_000),), 1, 1), 8).workspace_bytes


def cut(found: Schedule, sequence: int) -> list[tuple[int, ...]]:
    """The pieces of a sequence, without who computes them."""
    return sorted(
        (p.head_kv, p.row_tile, p.first_row, p.rows, p.pieces, p.number, p.begin, p.end)
        for p in found.pieces
        if p.sequence == sequence
    )


def test_pieces_depend_on_a_sequence_alone(kernels: tuple[CacheKernel, ...]) -> None:
    """Not on its neighbours, its place, or the multiprocessors: so its bits do not either."""
    pick = random.Random(3)
    problem = PROBLEMS["causal"]
    for kernel in kernels:
        alone = {b: cut(kernel.schedule(CacheProblem((sequence,), 8, 2), 5), 0) for b, sequence in enumerate(MIXED)}
        for sms in (1, 20, 132):
            found = kernel.schedule(problem, sms)
            assert all(cut(found, b) == alone[b] for b in alone)
        order = [pick.randrange(len(MIXED)) for _ in range(40)]  # more than the lanes of a warp
        found = kernel.schedule(CacheProblem(tuple(MIXED[b] for b in order), 8, 2), 12)
        assert all(cut(found, place) == alone[b] for place, b in enumerate(order))


def test_ctas_have_equal_work(kernels: tuple[CacheKernel, ...]) -> None:
    """To a piece: long sequences, of which the ranges are far longer than pieces."""
    for kernel in kernels:
        found = kernel.schedule(CacheProblem(((1, 40_000), (1, 9_000), (1, 23_456)), 4, 1), 8)
        work = [0] * found.bundles
        longest = 0
        for piece in found.pieces:
            work[piece.bundle] += piece.end - piece.begin
            longest = max(longest, piece.end - piece.begin)
        rounded = sum(work) // len(work) // 30 + 1 if kernel.folder == "decode/latent" else 1
        # Those of rounded ranges give what is too much to all but the last.
        assert max(work) <= -(-sum(work) // len(work)) + longest + rounded, (kernel, work)


def test_one_cta_at_a_time(kernels: tuple[CacheKernel, ...]) -> None:
    """A CTA computes its pieces one after the other, in the order of sequences, row tiles and pieces."""
    found = caches.cache_kernel(kernels, 128, "sm90").schedule(PROBLEMS["causal"], 20)
    ends: dict[tuple[int, int], int] = {}
    places: dict[tuple[int, int], tuple[int, ...]] = {}
    for piece, (start, end) in zip(found.pieces, found.times(), strict=True):
        cta, place = (piece.bundle, piece.head_kv), (piece.sequence, piece.row_tile, piece.number)
        assert start == ends.get(cta, 0) and end - start == max(1, piece.end - piece.begin)
        assert places.get(cta, (-1,)) < place
        ends[cta], places[cta] = end, place


def test_rows_of_a_tile_follow_the_chip(kernels: tuple[CacheKernel, ...]) -> None:
    """Large head dims: chips with little shared memory have row tiles of 16 rows."""
    kernel = caches.cache_kernel(kernels, 576, "sm80")
    chunk = CacheProblem(((200, 300),), 1, 1)
    rows = {capability: kernel.schedule(chunk, 8, capability).pieces[0].rows for capability in (80, 86)}
    assert rows == {80: 64, 86: 16}


def test_latent_heads_are_shared(kernels: tuple[CacheKernel, ...]) -> None:
    found = caches.cache_kernel(kernels, 576, "sm90").schedule(CacheProblem(((1, 5000),), 128, 1), 20)
    assert (found.heads_kv, found.bundles) == (2, 10)
    assert {piece.head_kv for piece in found.pieces} == {0, 1}


def test_picture(kernels: tuple[CacheKernel, ...], tmp_path: Path) -> None:
    problem = CacheProblem(((1, 2000), (5, 128), (1, -1)), 2, 1)
    picture = caches.cache_picture(caches.cache_kernel(kernels, 128, "sm90"), problem, 3)
    # 32 key tiles in pieces of four, two key tiles in one, and a row of nothing: 35 tiles, in ranges of 12, 12 and 11
    assert [piece[:5] for piece in picture.data["pieces"]] == [
        *([0, 0, 0, 0, n] for n in range(3)),
        *([1, 0, 0, 0, n] for n in range(3, 6)),
        *([2, 0, 0, 0, n] for n in range(6, 8)),
        [2, 0, 1, 0, 0],
        [2, 0, 2, 0, 0],
    ]
    kinds = [piece[-1] for piece in picture.data["pieces"]]
    assert kinds == ["fold"] * 3 + ["piece"] * 5 + ["result"] * 2
    parts = [[0, 3, 0], *([n, n + 1, 1] for n in (3, 4, 5)), *([n, n + 1, 2] for n in (6, 7))]
    assert picture.data["merges"] == [[0, 0, parts]]
    assert picture.data["length"] == 12 and picture.data["balance"] == pytest.approx(35 / 36, abs=1e-4)
    svg = picture.save(tmp_path, ("svg",))[0].read_text()
    assert ">0: 1 x 2000<" in svg and "3 sequences, 2 heads over 1 KV heads" in svg


def test_command(kernels: tuple[CacheKernel, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = ["draw", "schedule", "--format", "svg", "--out", str(tmp_path)]
    asked: list[tuple[list[str], str]] = [
        (["--arch", "sm90", "--caches", "1:6000,4:300,70:700,1:-1"], "sm90_caches_d128_schedule.svg"),
        (["--arch", "sm90", "--caches", "1:600", "--head-dim", "576", "--heads", "16", "--heads-kv", "1"],
         "sm90_caches_d576_schedule.svg"),
        (["--caches", "0:10", "--head-dim", "64", "--window", "100", "-1"], "sm80_caches_d64_schedule.svg"),
    ]  # fmt: skip
    for arguments, name in asked:
        assert command.main([*draw, *arguments]) == 0
        assert (tmp_path / name).exists()
    wrong: list[tuple[list[str], str]] = [
        (["--caches", "1:600", "--head-dim", "40"], "no kernel over caches sm80 d40; there are sm80 decode/split_keys"),
        (["--caches", "1:600", "--family", "decode/latent"], "no kernel over caches sm80 decode/latent d128"),
        (
            ["--caches", "800:8000", "--heads", "64", "--heads-kv", "1", "--sms", "2"],
            "at most 20000 pieces in a picture",
        ),
        (["--caches", "1:600", "--heads", "3", "--heads-kv", "2"], "heads_kv: expected a divisor of heads_q 3, got 2"),
    ]
    for arguments, sentence in wrong:
        assert command.main([*draw, *arguments]) == 2
        assert sentence in capsys.readouterr().err
    assert command.main(["draw", "mask", "--caches", "1:600"]) == 2
    assert "--caches: expected draw schedule, got draw mask" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["", "7", "1:x", "1:2:3", "-1:5", "1:600,"])
def test_wrong_sequences_are_said(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["draw", "schedule", f"--caches={given}"])
    assert "expected rows:keys of each sequence" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"sequences": ()}, "sequences: expected rows of at least 0"),
        ({"sequences": ((-1, 5),)}, "sequences: expected rows of at least 0"),
        ({"heads_kv": 3}, "heads_kv: expected a divisor of heads_q 4, got 3"),
        ({"window": (-1, 0)}, "window: expected numbers"),
        ({"causal": "left"}, "causal: expected one of"),
    ],
)
def test_wrong_problems_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        CacheProblem(**{"sequences": ((1, 5),), "heads_q": 4, "heads_kv": 2, **options})
