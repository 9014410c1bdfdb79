"""`FLASH_CUTE_CHECK=1`: entries of tables that are in use and name no page raise, and so do keys past the end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from caches import Cached, make
from numerics import same_bits

import flash_cute
from flash_cute import _check_lengths

pytestmark = pytest.mark.filterwarnings("ignore:flash_cute. FLASH_CUTE_CHECK")


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_check_lengths, "ENABLED", True)


def _case(device: str, rng: torch.Generator, rows: Any = 2, **options: Any) -> Cached:
    """3 sequences over pages of 4 keys, with room for 40."""
    return make(rng, device, (33, 9, -1), rows, page=4, appends=True, room=5, **options)


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("rows", [2, (2, 1, 0)], ids=str)
@pytest.mark.parametrize("options", [{}, {"window": (5, 0)}, {"causal": "top_left"}], ids=str)
def test_good_calls_pass(device: str, rows: Any, options: dict[str, Any], rng: torch.Generator) -> None:
    """Entries that nothing reads are full of garbage."""
    case = _case(device, rng, rows, **options)
    if "window" in options:
        case.page_table[0, :6] = 10**6  # type: ignore[index]
    expected = case.clone()
    results = case.run()
    assert results[0].isfinite().all()
    flash_cute.append_kvcache(
        expected.k_cache, expected.v_cache, expected.k, expected.v, cu_seqlens=case.cu_seqlens_q, **case.places
    )
    assert same_bits((case.k_cache, case.v_cache), (expected.k_cache, expected.v_cache))


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("rows", [2, (2, 1, 0)], ids=str)
@pytest.mark.parametrize("entry", [-1, 10**6])
def test_entries_in_use(device: str, entry: int, rows: Any, rng: torch.Generator) -> None:
    for place in ((0, 0), (0, 8), (1, 2)):
        case = _case(device, rng, rows)
        case.page_table[place] = entry  # type: ignore[index]
        pages = case.k_cache.shape[0]
        sentence = rf"page_table: expected numbers of pages from 0 to {pages - 1}, got {entry} at index \({place[0]}, "
        with pytest.raises(ValueError, match=f"^flash_cute: {sentence}{place[1]}\\), which is in use"):
            case.run()
    with pytest.raises(ValueError, match="page_table: expected numbers of pages"):
        flash_cute.append_kvcache(
            case.k_cache, case.v_cache, case.k, case.v, cu_seqlens=case.cu_seqlens_q, **case.places
        )


@pytest.mark.usefixtures("checked")
def test_left_of_a_window_new_keys_are_in_use(device: str, rng: torch.Generator) -> None:
    case = make(rng, device, (9,), 1, page=4, appends=True, new_keys=8, window=(1, 0))
    case.page_table[0, 2] = -1  # type: ignore[index]
    with pytest.raises(
        ValueError, match=r"page_table: expected numbers of pages from 0 to .*, got -1 at index \(0, 2\)"
    ):
        case.run()


@pytest.mark.usefixtures("checked")
def test_keys_past_the_end(device: str, rng: torch.Generator) -> None:
    case = _case(device, rng)
    case.cache_seqlens[1] = 39  # type: ignore[index]
    said = "cache_seqlens: expected at most the 40 keys that a sequence may have, got 39 and 2 new ones at index 1"
    with pytest.raises(ValueError, match=f"^flash_cute: {said}$"):
        case.run()
    case.cache_seqlens[1] = 41  # type: ignore[index]
    with pytest.raises(ValueError, match=r"may have, got 41 at index 1$"):
        case.replace(k=None, v=None).run()


@pytest.mark.usefixtures("checked")
def test_offsets(device: str, rng: torch.Generator) -> None:
    case = _case(device, rng, (2, 1, 0))
    case.cu_seqlens_q[1] = 9  # type: ignore[index]
    with pytest.raises(ValueError, match=r"^flash_cute: cu_seqlens_q: expected offsets from 0 to q's 3 rows, got 9"):
        case.run()
    with pytest.raises(ValueError, match=r"^flash_cute: cu_seqlens: expected offsets from 0 to k's 3 rows, got 9"):
        flash_cute.append_kvcache(
            case.k_cache, case.v_cache, case.k, case.v, cu_seqlens=case.cu_seqlens_q, **case.places
        )


@pytest.mark.usefixtures("checked")
def test_what_is_wrong_otherwise_is_the_operators_to_refuse(device: str, rng: torch.Generator) -> None:
    case = _case(device, rng)
    with pytest.raises(ValueError, match="page_table: expected int32, got int64"):
        case.replace(page_table=case.page_table.long()).run()  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="kv_layout: expected 'NHD' or 'HND', got 'NDH'"):
        case.replace(kv_layout="NDH").run()
    with pytest.raises(ValueError, match=r"cache_seqlens: expected the shape \(3,\)"):
        case.replace(cache_seqlens=case.cache_seqlens[:2]).run()  # type: ignore[index]
    assert torch.compile(case.run, backend="eager")()[0].isfinite().all()


def test_nothing_is_checked_unasked(device: str, rng: torch.Generator) -> None:
    case = _case(device, rng)
    case.page_table[0, 0] = -1  # type: ignore[index]
    assert case.run()[0].isfinite().all()
