"""What no row may see is not read: unused rows and pages, entries of tables past the end and left of the window."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from caches import GARBAGE, Cached, alone, check, cloned, make, problems
from numerics import same_bits

import flash_cute

pytestmark = pytest.mark.kernel


def _poison(x: torch.Tensor, value: float) -> None:
    """`value` where there is NaN."""
    x.copy_(x.to(torch.float32).nan_to_num(nan=value, posinf=math.inf, neginf=-math.inf))


@pytest.mark.parametrize("rows", [2, (3, 1, 20)], ids=str)
@pytest.mark.parametrize("page", [None, 1, 16])
def test_unused_memory(device: str, page: int | None, rows: Any, backend: str | None, rng: torch.Generator) -> None:
    """`make` fills it with NaN; other fillings give the same bits."""
    case = make(rng, device, (50, 7, 33), rows, page=page)
    expected = check(case, backend)
    for value in (0.0, math.inf, -math.inf, 6e4):
        other = case.clone()
        _poison(other.k_cache, value)
        _poison(other.v_cache, value)
        assert same_bits(other.run(backend), expected)


def _entries_in_use(case: Cached, first: list[int]) -> torch.Tensor:
    """(B, max_pages) bool: those of keys from `first` to the sequence's last."""
    assert case.page_table is not None and case.cache_seqlens is not None
    page = case.k_cache.shape[1]
    starts = torch.arange(case.page_table.shape[1]) * page
    of_first, length = torch.tensor(first)[:, None], case.cache_seqlens.cpu()[:, None]
    return (starts + page > of_first) & (starts < length)


@pytest.mark.parametrize("garbage", [*GARBAGE, 0])
@pytest.mark.parametrize("rows", [1, 4], ids=str)
def test_entries_that_nothing_reads(
    device: str, rows: int, garbage: int, backend: str | None, rng: torch.Generator
) -> None:
    """Past the end and left of the window; 0 names a page, which is full of NaN."""
    lengths, left = (100, 33, 0, 64), 20
    case = make(rng, device, lengths, rows, page=8, window=(left, 0))
    expected = check(case, backend)
    used = _entries_in_use(case, [max(0, n - rows - left) for n in lengths]).to(device)
    k_cache, v_cache = (torch.cat((torch.full_like(x[:1], math.nan), x)) for x in (case.k_cache, case.v_cache))
    table = torch.where(used, case.page_table + 1, garbage).int()  # type: ignore[operator]
    assert same_bits(case.replace(k_cache=k_cache, v_cache=v_cache, page_table=table).run(backend), expected)


@pytest.mark.parametrize("entry", GARBAGE)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page", [16, 5, 1])
def test_entries_of_no_page(
    device: str, page: int, kv_layout: str, entry: int, backend: str | None, rng: torch.Generator
) -> None:
    """Keys and values there count as 0; nothing faults."""
    case = make(rng, device, (50, 20), (2, 9), page=page, kv_layout=kv_layout)
    assert case.page_table is not None
    case.page_table[0, 1] = case.page_table[1, 1] = entry
    expected = case.clone()
    zeros = [torch.zeros_like(x[:1]) for x in (case.k_cache, case.v_cache)]
    expected.k_cache, expected.v_cache = (
        torch.cat((x, y)) for x, y in zip((case.k_cache, case.v_cache), zeros, strict=True)
    )
    expected.page_table = torch.where(case.page_table == entry, case.k_cache.shape[0], case.page_table)
    assert same_bits(check(case, backend), expected.run(backend))


def test_a_cache_without_pages(device: str, backend: str | None, rng: torch.Generator) -> None:
    case = make(rng, device, (20, 0), 1, page=16)
    empty = case.replace(k_cache=case.k_cache[:0], v_cache=case.v_cache[:0])
    out, lse = empty.run(backend)
    assert (out == 0).all()
    torch.testing.assert_close(lse[0], torch.full_like(lse[0], math.log(20)))
    assert not problems(empty, out, lse)


@pytest.mark.parametrize("lengths", [(2**31 - 1, 50, -(2**31)), (51, 1000, -7)], ids=str)
def test_lengths_of_any_value(device: str, lengths: tuple[int, ...], backend: str | None, rng: torch.Generator) -> None:
    """They count up to the capacity, and below 0 as none; with new keys, too."""
    for appends in (False, True):
        case = make(rng, device, (48, 48, 48), 2, page=16, appends=appends, room=0 if appends else 2)
        case.k_cache.nan_to_num_(), case.v_cache.nan_to_num_()
        case.page_table.clamp_(0, case.k_cache.shape[0] - 1)  # type: ignore[union-attr]
        case.cache_seqlens.copy_(torch.tensor(lengths))  # type: ignore[union-attr]
        check(case, backend)


def test_offsets_of_any_value(device: str, backend: str | None, rng: torch.Generator) -> None:
    """As those of packed sequences: clamped, and counted as ascending. Rows before the first are in no sequence."""
    case = make(rng, device, (20, 30, 40), (4, 4, 4), page=16)
    for offsets in ([2, 5, 5, 9], [0, 9, 3, 12], [-5, 3, 100, 7], [12, 12, 12, 12]):
        check(case.replace(cu_seqlens_q=torch.tensor(offsets, dtype=torch.int32, device=device)), backend)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_visible_nan_stays_in_its_sequence(
    device: str, value: float, backend: str | None, rng: torch.Generator
) -> None:
    case = make(rng, device, (50, 20), 2, page=16)
    expected = case.run(backend)
    other = case.clone()
    other.v_cache[int(case.page_table[0, 2]), 1, 0, 3] = value  # type: ignore[index]
    out, lse = other.run(backend)
    assert same_bits((out[1], lse[1]), (expected[0][1], expected[1][1]))
    assert not out[0, :, :2, 3].isfinite().any() and out[0, :, 2:].isfinite().all()


def test_the_inputs_stay(device: str, backend: str | None, rng: torch.Generator) -> None:
    case = make(rng, device, (50, 20), (2, 9), page=16)
    given = (case.q, case.cache_seqlens, case.page_table, case.cu_seqlens_q)
    before = [x.clone() for x in given], cloned(case.k_cache, case.v_cache)
    case.run(backend)
    assert same_bits(given, tuple(before[0]))  # type: ignore[arg-type]
    assert same_bits((case.k_cache, case.v_cache), before[1])


@pytest.mark.cuda
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("page", [16, 15])
def test_pages_past_2_31_elements(device: str, page: int, backend: str | None, rng: torch.Generator) -> None:
    """The last page of a cache whose pages are 2^31 elements apart."""
    heads, head_dim = 1, 64
    case = make(rng, device, (30,), 1, page=page, heads_q=2, heads_kv=heads, head_dim=head_dim)
    wide = torch.empty(2**32 + page * head_dim, dtype=case.q.dtype, device=device)
    far = wide.as_strided((3, page, heads, head_dim), (2**31, head_dim, head_dim, 1))
    table = torch.tensor([[2, 1]], dtype=torch.int32, device=device)
    alike = alone(case, 0)
    for i, number in enumerate((2, 1)):
        far[number] = alike.k_cache[0].new_zeros(page, heads, head_dim)
        rows = alike.k_cache[0, page * i : page * (i + 1)]
        far[number, : rows.shape[0]] = rows
    changed = case.replace(k_cache=far, v_cache=far, page_table=table)
    check(changed, backend)


def test_large_strides_of_tables(device: str, backend: str | None, rng: torch.Generator) -> None:
    """A table is a part of a wider one, as engines keep it."""
    case = make(rng, device, (50, 20, 33), 2, page=16)
    expected = case.run(backend)
    assert case.page_table is not None
    wide = torch.full((3, 1000), -1, dtype=torch.int32, device=device)
    wide[:, 7 : 7 + case.page_table.shape[1]] = case.page_table
    for table in (wide[:, 7:], wide[:, 7 : 7 + case.page_table.shape[1]]):
        assert same_bits(case.replace(page_table=table).run(backend), expected)
    assert flash_cute.kvcache_workspace_bytes(case.q, case.k_cache, case.v_cache, **case.places) >= 0
