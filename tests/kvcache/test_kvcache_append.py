"""New keys are appended to their caches and nowhere else, to the bit; float8 caches get the nearest values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from caches import FLOAT8, STORAGES, Cached, check, cloned, make
from cases import CUDA_DTYPES
from numerics import same_bits

import flash_cute

pytestmark = pytest.mark.kernel

LENGTHS = (70, -1, 0, 1, 130, 64)


@pytest.mark.sanitizer
@pytest.mark.parametrize("page", [None, 1, 16, 48])
@pytest.mark.parametrize("rows", [1, 3, (1, 5, 2, 0, 40, 1)], ids=str)
def test_append_and_attend(device: str, page: int | None, rows: Any, backend: str | None, rng: torch.Generator) -> None:
    """The new rows see the new keys; a sequence of length 0 begins, one of -1 gets nothing."""
    out, _ = check(make(rng, device, LENGTHS, rows, page=page, appends=True), backend)
    of_none, of_new = (out[1], out[2]) if isinstance(rows, int) else (out[1:6], out[6:8])
    assert (of_none == 0).all() and (of_new != 0).any()


@pytest.mark.parametrize("new_keys", [0, 2, 17])
def test_other_numbers_of_keys_than_rows(device: str, new_keys: int, backend: str | None, rng: torch.Generator) -> None:
    check(make(rng, device, LENGTHS, 5, page=16, appends=True, new_keys=new_keys), backend)


def _append(case: Cached) -> None:
    flash_cute.append_kvcache(case.k_cache, case.v_cache, case.k, case.v, cu_seqlens=case.cu_seqlens_q, **case.places)


def _expected(case: Cached) -> tuple[torch.Tensor, ...]:
    """The caches after the append, by the oracle; `case` keeps its own."""
    k_cache, v_cache = cloned(case.k_cache, case.v_cache)
    flash_cute.reference.append_kvcache(k_cache, v_cache, case.k, case.v, cu_seqlens=case.cu_seqlens_q, **case.places)
    return k_cache, v_cache


@pytest.mark.parametrize("rows", [3, (4, 0, 9, 1)], ids=str)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("storage", STORAGES)
def test_append_alone(device: str, storage: str, kv_layout: str, rows: Any, rng: torch.Generator) -> None:
    for page in (None, 4):
        shapes = {"head_dim": 64, "head_dim_v": 32, "kv_layout": kv_layout, "storage": storage}
        case = make(rng, device, (33, -1, 0, 7), rows, page=page, appends=True, **shapes)
        expected = _expected(case)
        _append(case)
        assert same_bits((case.k_cache, case.v_cache), expected)


@pytest.mark.parametrize("page", [None, 4])
@pytest.mark.parametrize("rows", [6, (6, 2, 6, 6)], ids=str)
def test_what_has_no_room_is_dropped(
    device: str, rows: Any, page: int | None, backend: str | None, rng: torch.Generator
) -> None:
    """Past the capacity, of sequences that are longer than it, too; and in pages that do not exist."""
    case = make(rng, device, (3, 40, 8, 0), rows, page=page, appends=True, room=0)
    # Capacity 46, of pages of 4 48.
    case.cache_seqlens[0] = 45  # type: ignore[index]
    case.cache_seqlens[2] = 1000  # type: ignore[index]
    if case.page_table is not None:
        case.page_table[0] = case.page_table[0, 0]
        case.page_table[3, 0] = 10**6
    case.k_cache.nan_to_num_(), case.v_cache.nan_to_num_()  # keys that the changed lengths reveal
    check(case, backend)


@pytest.mark.parametrize("of", CUDA_DTYPES, ids=str)
@pytest.mark.parametrize("dtypes", [(x, y) for x in FLOAT8 for y in FLOAT8], ids=str)
@pytest.mark.parametrize("descales", ["none", "number", "heads"])
def test_append_to_float8(
    device: str, descales: str, dtypes: tuple[torch.dtype, torch.dtype], of: torch.dtype, rng: torch.Generator
) -> None:
    """The nearest of x / descale, ties to even; what is too large saturates, NaN stays."""
    case = make(rng, device, (9, -1, 0), 7, page=4, appends=True, dtype=of, cache_dtypes=dtypes, descales=descales)
    assert case.k is not None and case.v is not None
    case.k[0, 0], case.v[2, 1] = 1e4, -6e4
    case.k[0, 1, 0, 0], case.v[0, 1, 0, 0] = float("nan"), float("inf")
    case.k[2] *= 2.0**-8  # among the small numbers, which are evenly spaced
    expected = _expected(case)
    _append(case)
    assert same_bits((case.k_cache, case.v_cache), expected)


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_every_number_of_16_bits(device: str, dtype: torch.dtype) -> None:
    """Each float16 becomes what the oracle says."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device).view(torch.float16)
    k = numbers.view(1, 1024, 1, 64)
    lengths = torch.zeros(1, dtype=torch.int32, device=device)
    for descale in (None, torch.tensor(0.37, device=device)):
        k_cache, v_cache = (torch.zeros((1, 1024, 1, 64), device=device).to(dtype) for _ in range(2))
        options = {"cache_seqlens": lengths, "descale_k": descale, "descale_v": None}
        flash_cute.append_kvcache(k_cache, v_cache, k, k, **options)
        most = torch.finfo(dtype).max
        for cache, factor in ((k_cache, descale), (v_cache, None)):
            values = (k.float() if factor is None else k.float() / factor).clamp(-most, most)
            expected = values.to(dtype)
            assert torch.equal(cache.float().isnan(), values.isnan())
            assert torch.equal(cache.float().nan_to_num(), expected.float().nan_to_num())


def test_shared_pages_keep_what_they_have(device: str, backend: str | None, rng: torch.Generator) -> None:
    """Sequences that share their first pages append to pages of their own."""
    check(make(rng, device, (64, 40, 33), 2, page=16, appends=True, shared=True), backend)


def test_steps_of_decoding(device: str, backend: str | None, rng: torch.Generator) -> None:
    """Lengths that grow on the device, step by step, from nothing."""
    steps = 9
    case = make(rng, device, (steps, steps, steps), 1, page=4, room=4)
    case.cache_seqlens.copy_(torch.tensor([0, 3, -1]))  # type: ignore[union-attr]
    shape = (3, 1, *case.k_cache.shape[2:])
    for _ in range(steps - 3):
        k, v = (torch.randn(shape, generator=rng).to(case.q) for _ in range(2))
        check(case.replace(k=k, v=v), backend)
        case.cache_seqlens.add_((case.cache_seqlens >= 0).int())  # type: ignore[union-attr]


def test_a_call_that_is_refused_appends_nothing(device: str, rng: torch.Generator) -> None:
    case = make(rng, device, (9, 4), 1, page=4, appends=True)
    before = cloned(case.k_cache, case.v_cache)
    with pytest.raises(ValueError, match="softcap: expected None or a finite number above 0, got -1"):
        case.run(softcap=-1.0)
    with pytest.raises(ValueError, match="out: expected the shape"):
        case.run(out=case.q[:1])
    assert same_bits((case.k_cache, case.v_cache), before)
