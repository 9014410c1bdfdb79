"""Multi-head latent attention over caches: one KV head whose values are the first columns of its keys."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from caches import GARBAGE, Cached, alone, check, make, with_multiprocessors
from numerics import same_bits

import flash_cute
from flash_cute import report

FAMILY = "sm90::decode::latent"
HEAD_DIMS = {"head_dim": 576, "head_dim_v": 512}
LENGTHS = (300, -1, 0, 1, 65, 64, 63)


def _make(rng: torch.Generator, device: str, lengths: Any, rows: Any, heads: int, **more: Any) -> Cached:
    return make(rng, device, lengths, rows, **{"storage": "view", "heads_q": heads, "heads_kv": 1, **HEAD_DIMS, **more})


def _explained(case: Cached, **more: Any) -> flash_cute.Explanation:
    options = {"cu_seqlens_q": case.cu_seqlens_q, "causal": case.causal, **case.places, **case.options, **more}
    return flash_cute.explain(case.q, case.k_cache, case.v_cache, **options)


@pytest.mark.sanitizer
@pytest.mark.kernel
@pytest.mark.parametrize("page", [None, 1, 8, 16, 48, 64, 256])
@pytest.mark.parametrize("rows", [1, (1, 3, 2, 0, 2, 1, 1)], ids=str)
@pytest.mark.parametrize("heads", [16, 128])
def test_pages(device: str, heads: int, rows: Any, page: int | None, backend: str | None, rng: torch.Generator) -> None:
    lengths, heads = (LENGTHS, heads) if device != "cpu" else ((65, -1, 0, 1, 30, 7, 3), heads // 8)
    check(_make(rng, device, lengths, rows, heads, page=page, appends=True), backend)


@pytest.mark.kernel
@pytest.mark.parametrize("heads", [1, 20, 64, 96])
@pytest.mark.parametrize("rows", [1, 2, 3, 40])
def test_heads(device: str, heads: int, rows: int, backend: str | None, rng: torch.Generator) -> None:
    """Those that fill row tiles, and others."""
    dtype = torch.bfloat16 if device != "cpu" and rows % 2 else None
    check(_make(rng, device, (129, 64) if device != "cpu" else (45, 9), rows, heads, page=64, dtype=dtype), backend)


@pytest.mark.kernel
@pytest.mark.parametrize("head_dims", [(576, 512), (320, 256), (512, 512), (568, 264)], ids=str)
@pytest.mark.parametrize("page", [16, 3])
def test_head_dims(
    device: str, page: int, head_dims: tuple[int, int], backend: str | None, rng: torch.Generator
) -> None:
    shapes = {"head_dim": head_dims[0], "head_dim_v": head_dims[1]}
    check(_make(rng, device, (130, 33), (2, 1), 16, page=page, **shapes), backend)


@pytest.mark.kernel
@pytest.mark.parametrize(
    "options", [{"window": (40, 0)}, {"softcap": 5.0, "window": (70, None)}, {"causal": False}, {"scale": 0.3}], ids=str
)
@pytest.mark.parametrize("page", [64, 6])
def test_options(device: str, page: int, options: dict[str, Any], backend: str | None, rng: torch.Generator) -> None:
    case = _make(rng, device, (200, 33, -1), 2, 64 if device != "cpu" else 4, page=page, **options)
    sinks = torch.randn(case.q.shape[-2], generator=rng).to(device)
    slopes = torch.rand(case.q.shape[-2], generator=rng).to(device)
    check(case.replace(options={**case.options, "sinks": sinks, "alibi_slopes": slopes}), backend)


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("rows", "keys", "options"),
    [
        (142, 576, {}),
        ((70, 700), 1200, {"causal": "top_left"}),
        ((1200, 130), 1200, {"window": (30, 0)}),
        (900, 900, {"window": (0, 20), "causal": "top_left"}),
    ],
    ids=str,
)
def test_pieces_of_which_a_row_tile_sees_none(
    device: str, rows: Any, keys: int, options: dict[str, Any], backend: str | None, rng: torch.Generator
) -> None:
    """Of a prompt the first rows do not see the last pieces of its keys; with a window the last rows not the first."""
    check(_make(rng, device, (keys, keys // 3), rows, 16 if device != "cpu" else 2, page=16, **options), backend)


@pytest.mark.kernel
@pytest.mark.parametrize("page", [None, 64, 16, 24, 3, 1])
def test_bits_beside_neighbours(
    device: str, page: int | None, backend: str | None, rng: torch.Generator, seed: int
) -> None:
    """Each sequence gives the bits that it gives alone, over a contiguous cache: of one piece, and of several."""
    pick = random.Random(seed)
    longest = 60 if device == "cpu" else 9000
    lengths = [pick.choice((-1, 0, pick.randint(1, 70), pick.randint(1, longest), longest)) for _ in range(6)]
    rows = [pick.choice((0, 1, 1, 2, pick.randint(1, 5))) for _ in lengths]
    heads = pick.choice((16, 64, 128)) if device != "cpu" else 4
    case = _make(rng, device, lengths, rows, heads, page=page, appends=True)
    results = case.run(backend)
    for b in range(len(lengths)):
        single = alone(case, b)
        part = single.of_sequence(0, *single.run(backend))[1:]
        assert same_bits(case.of_sequence(b, *results)[1:], part), f"sequence {b}"


@pytest.mark.kernel
@pytest.mark.parametrize("page", [16, 5, 1])
@pytest.mark.parametrize("entry", GARBAGE)
def test_entries_of_no_page(device: str, page: int, entry: int, backend: str | None, rng: torch.Generator) -> None:
    """Keys there count as 0; nothing faults."""
    case = _make(rng, device, (150, 20), (2, 1), 16 if device != "cpu" else 2, page=page)
    assert case.page_table is not None
    case.page_table[0, 1] = case.page_table[1, 0] = entry
    expected = case.clone()
    expected.k_cache = torch.cat((case.k_cache, torch.zeros_like(case.k_cache[:1])))
    expected.v_cache = expected.k_cache[..., : case.v_cache.shape[-1]]
    expected.page_table = torch.where(case.page_table == entry, case.k_cache.shape[0], case.page_table)
    assert same_bits(check(case, backend), expected.run(backend))


@pytest.mark.kernel
@pytest.mark.parametrize("batch_invariant", [True, False], ids=["invariant", "dependent"])
def test_the_same_call_again(device: str, batch_invariant: bool, backend: str | None, rng: torch.Generator) -> None:
    lengths = (70, 64, 29) if device == "cpu" else (9000, 64, 4097)
    options = {"page": 64, "batch_invariant": batch_invariant}
    case = _make(rng, device, lengths, (1, 3, 2), 128 if device != "cpu" else 4, **options)
    expected = case.run(backend)
    assert all(same_bits(case.run(backend), expected) for _ in range(2 if device == "cpu" else 50))


@pytest.mark.kernel
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize(
    ("lengths", "rows", "options"),
    [
        ((8192,), 1, {}),  # all CTAs have parts of it
        ((9000, -1, 0, 1, 4096, 700), (1, 2, 3, 0, 2, 1), {}),
        ((100,) * 70, 1, {}),  # several of them in a range
        ((4096, 4097, 4095), 2, {"window": (1000, 0)}),
        ((1300, 64), (300, 170), {}),  # the first row tiles see fewer keys than the last
        ((1300, 900), (300, 1), {"causal": "top_left", "window": (200, 0)}),
    ],
    ids=str,
)
def test_batch_dependent(
    device: str,
    lengths: tuple[int, ...],
    rows: Any,
    options: dict[str, Any],
    heads: int,
    backend: str | None,
    rng: torch.Generator,
) -> None:
    """Cut where the ranges of keys end, results are as right, and no other after a call of another batch."""
    if device == "cpu":
        lengths, rows = tuple(n // 40 for n in lengths[:6]), rows if rows in (1, 2) else tuple(n // 9 for n in rows)
        heads //= 8
    case = _make(rng, device, lengths, rows, heads, page=16, batch_invariant=False, **options)
    check(case, backend)
    check(case, with_multiprocessors(backend, 5)) if device != "cpu" else None


@pytest.mark.kernel
def test_batch_dependent_means_nothing_elsewhere(device: str, backend: str | None, rng: torch.Generator) -> None:
    case = make(rng, device, (300, 17, 0, 90), (1, 3, 2, 30), page=16, head_dim=128, heads_q=8, heads_kv=2)
    dependent = case.replace(options={**case.options, "batch_invariant": False})
    assert same_bits(case.run(backend), dependent.run(backend))


def test_errors_of_batch_dependence(rng: torch.Generator) -> None:
    case = _make(rng, "cpu", (30, 7), 1, 4)
    for options, said in (
        ({"batch_invariant": None}, "batch_invariant: expected False or True, got None"),
        ({"batch_invariant": 0}, "batch_invariant: expected False or True, got 0"),
        (
            {"batch_invariant": False, "row_invariant": True},
            "batch_invariant: expected True beside row_invariant=True, got False",
        ),
        ({"batch_invariant": False, "backend": "sm91"}, "backend: .*'sm91"),
    ):
        for call in (flash_cute.attention_with_kvcache, flash_cute.kvcache_workspace_bytes):
            with pytest.raises(ValueError, match=f"^flash_cute: {said}"):
                call(case.q, case.k_cache, case.v_cache, **case.places, **options)  # type: ignore[operator]
        with pytest.raises(ValueError, match=f"^flash_cute: {said}"):
            _explained(case, **options)
    said = "batch_invariant: expected True of a call without caches, got False"
    x = torch.randn(1, 2, 3, 64)
    with pytest.raises(ValueError, match=f"^flash_cute: {said}"):
        flash_cute.explain(x, x, x, batch_invariant=False)


needs_kernels = pytest.mark.skipif(not report.load()["kernels"], reason="this build has no CUDA kernels")


@needs_kernels
@pytest.mark.parametrize(("heads", "groups"), [(16, 132), (128, 66)])
def test_who_serves_it(heads: int, groups: int, rng: torch.Generator) -> None:
    """Hopper's kernel where v is a view of k; else, and on other chips, the portable one."""
    case = _make(rng, "cpu", (900, 31), 1, heads, page=64, dtype=torch.half)
    explained = _explained(case, capability=90)
    data = explained.data
    assert (data["family"], data["block_m"], data["block_n"]) == (FAMILY, 64, 64)
    assert (data["kernel_head_dim"], data["kernel_head_dim_v"]) == (576, 512)
    text = " ".join(str(explained).split())
    assert "v_cache is a view of k_cache's first columns: keys and values are read once." in text
    assert f"dealt to {groups} {'groups of CTAs' if heads == 128 else 'CTAs'} of each KV head" in text
    assert "in pieces that depend on a sequence alone." in text
    dependent = _explained(case, capability=90, batch_invariant=False)
    assert dependent.data["family"] == FAMILY
    assert "in pieces that end where the ranges do: the bits depend on the batch." in " ".join(str(dependent).split())
    assert dependent.data["workspace_bytes"] < data["workspace_bytes"]
    others = {
        "other memory": case.replace(v_cache=case.v_cache.clone(memory_format=torch.preserve_format)),
        "other strides": case.replace(v_cache=case.v_cache.contiguous()),
        "other columns": case.replace(v_cache=case.k_cache[..., 64:]),
    }
    for name, other in others.items():
        assert _explained(other, capability=90).data["family"] == "sm80::decode::streamed", name
    assert _explained(case, capability=80).data["family"] == "sm80::decode::streamed"
    assert _explained(case, capability=90, backend="sm80").data["family"] == "sm80::decode::streamed"
