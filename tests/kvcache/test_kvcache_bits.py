"""The bits of a sequence are its own: they depend on its rows, keys and options, and on nothing else of the call."""

from __future__ import annotations

import os
import random
import time
from typing import Any

import pytest
import torch
from caches import FLOAT8, Cached, alone, make, with_multiprocessors
from numerics import same_bits
from random_caches import KERNELS, draw

import flash_cute

pytestmark = pytest.mark.kernel

# Of the random calls that also tests/kvcache/test_kvcache_random.py draws.
ASKED = os.environ.get("FLASH_CUTE_TEST_CACHES")
DRAWS = {"cpu": 40, "cuda": 200}
SECONDS = {"cpu": 8, "cuda": 60}  # of what is not asked for
SMALLER = (1, 20, 66, 131)  # multiprocessors of simulated chips

OPTIONS: tuple[dict[str, Any], ...] = ({}, {"window": (40, 0)}, {"softcap": 5.0}, {"causal": False})


def _part(case: Cached, b: int, results: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return case.of_sequence(b, *results)[1:]


def _by_itself(case: Cached, b: int, backend: str | None) -> tuple[torch.Tensor, ...]:
    """Sequence b as a batch of one, over a contiguous cache: (out, lse), as `of_sequence` gives them."""
    single = alone(case, b)
    return _part(single, 0, single.run(backend))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("rows", [1, 5, (1, 17, 2, 0, 40, 1)], ids=str)
def test_beside_neighbours(
    device: str, rows: Any, options: dict[str, Any], backend: str | None, rng: torch.Generator
) -> None:
    lengths = (70, -1, 200, 1, 130, 64) if device == "cpu" else (70, -1, 9000, 1, 2100, 640)
    case = make(rng, device, lengths, rows, page=16, appends=True, **options)
    parts = [_by_itself(case, b, backend) for b in range(len(lengths))]
    results = case.run(backend)
    for b, part in enumerate(parts):
        assert same_bits(_part(case, b, results), part), f"sequence {b}"


@pytest.mark.parametrize("rows", [1, (3, 1, 2, 20)], ids=str)
def test_pages_and_strides(device: str, rows: Any, backend: str | None, rng: torch.Generator) -> None:
    """Pages of any size, layout, storage and order, tables of any width, and none."""
    lengths = (70, 0, 129, 33) if device == "cpu" else (700, 0, 5000, 33)
    case = make(rng, device, lengths, rows, window=(1000, 0))
    expected = case.run(backend)
    pick = random.Random(int(torch.randint(2**31, (1,), generator=rng)))
    for page in (1, 4, 16, 48, 64, 512):
        for storage in ("plain", "halves", "gaps"):
            options = {"page": page, "storage": storage, "room": pick.randint(0, 200)}
            other = make(rng, device, lengths, rows, kv_layout=pick.choice(("NHD", "HND")), **options)
            _copy_keys(case, other)
            assert same_bits(other.replace(q=case.q, options=case.options).run(backend), expected), options


@pytest.mark.parametrize("head_dims", [(48, 48), (64, 64), (128, 128), (144, 144), (192, 192), (192, 128)], ids=str)
@pytest.mark.parametrize("rows", [1, (3, 1, 530, 20)], ids=str)
def test_pages_of_float8(
    device: str, rows: Any, head_dims: tuple[int, int], backend: str | None, rng: torch.Generator
) -> None:
    """Of rows of 64 bytes, too, which TMA cannot write where a page has an odd number of keys."""
    if device == "cpu" and rows != 1:
        rows = (3, 1, 30, 20)
    lengths = (70, 0, 129, 33) if device == "cpu" else (700, 0, 3000, 33)
    pick = random.Random(int(torch.randint(2**31, (1,), generator=rng)))
    heads = {"heads_q": 32, "heads_kv": 2} if device != "cpu" else {}
    for page in (1, 3, 17, 36, 80):
        case = make(
            rng, device, lengths, rows, page=page, head_dim=head_dims[0], head_dim_v=head_dims[1], appends=True,
            cache_dtypes=tuple(pick.choices(FLOAT8, k=2)), descales="heads", storage=pick.choice(("plain", "gaps")),
            kv_layout=pick.choice(("NHD", "HND")), **heads,
        )  # fmt: skip
        parts = [_by_itself(case, b, backend) for b in range(len(lengths))]
        results = case.run(backend)
        for b, part in enumerate(parts):
            assert same_bits(_part(case, b, results), part), f"pages of {page}, sequence {b}"


def _copy_keys(case: Cached, other: Cached) -> None:
    """The keys of a contiguous cache into one of pages."""
    assert case.cache_seqlens is not None
    places = {"cache_seqlens": torch.zeros_like(case.cache_seqlens), "page_table": other.page_table}
    longest = int(case.cache_seqlens.max())
    k, v = (x[:, :longest] for x in (case.k_cache, case.v_cache))  # what is behind a sequence's end is NaN in both
    table = other.page_table
    assert table is not None
    entries = other.k_cache.shape[0]
    page = other.k_cache.shape[1 if other.kv_layout == "NHD" else 2]
    used = torch.arange(table.shape[1], device=table.device) * page < case.cache_seqlens[:, None]
    places["page_table"] = torch.where(used, table, entries)
    flash_cute.append_kvcache(other.k_cache, other.v_cache, k, v, kv_layout=other.kv_layout, **places)


def test_order_and_size_of_the_batch(device: str, backend: str | None, rng: torch.Generator) -> None:
    """Permuted, repeated and cut batches, each of equal and of ragged rows."""
    lengths = (70, 64, 129, 0) if device == "cpu" else (3000, 64, 129, 0)
    case = make(rng, device, lengths, 1, page=16)
    expected = case.run(backend)
    assert case.cache_seqlens is not None and case.page_table is not None
    for order in ([3, 1, 0, 2], [2], [0, 0, 1, 2, 2, 2, 3, 0], [1, 2] * 40):
        few = case.replace(q=case.q[order], cache_seqlens=case.cache_seqlens[order], page_table=case.page_table[order])
        out, lse = few.run(backend)
        assert same_bits((out, lse), (expected[0][order], expected[1][order]))
        offsets = torch.arange(len(order) + 1, dtype=torch.int32, device=device)
        packed = few.replace(q=few.q[:, 0], cu_seqlens_q=offsets)
        assert same_bits(packed.run(backend), (out[:, 0], lse[:, :, 0].T))


def test_the_same_call_again(device: str, backend: str | None, rng: torch.Generator) -> None:
    lengths = (70, 64, 129) if device == "cpu" else (9000, 64, 4097)
    case = make(rng, device, lengths, (1, 30, 4), page=16)
    expected = case.run(backend)
    assert all(same_bits(case.run(backend), expected) for _ in range(2 if device == "cpu" else 50))


@pytest.mark.parametrize("number", range(4))
def test_random_batches(device: str, number: int, backend: str | None, rng: torch.Generator, seed: int) -> None:
    pick = random.Random(seed)
    longest = 200 if device == "cpu" else 5000
    count = pick.randint(2, 12)
    lengths = [pick.choice((-1, 0, pick.randint(1, 70), pick.randint(1, longest))) for _ in range(count)]
    rows = [pick.choice((0, 1, 1, 4, pick.randint(1, 60))) for _ in range(count)]
    case = make(rng, device, lengths, rows, page=pick.choice((1, 16, 64, None)), appends=pick.random() < 0.5)
    parts = [_by_itself(case, b, backend) for b in range(count)]
    results = case.run(backend)
    assert all(same_bits(_part(case, b, results), part) for b, part in enumerate(parts))


def _smaller_chips() -> list[int]:
    there_are = torch.cuda.get_device_properties(0).multi_processor_count
    return [count for count in SMALLER if count < there_are]


@pytest.mark.cuda
@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rows", [1, 4, (1, 7, 2, 90, 0, 1)], ids=str)
def test_multiprocessors(device: str, rows: Any, kernel: str, backend: str | None, rng: torch.Generator) -> None:
    """A plan for fewer of them deals the same pieces to fewer CTAs."""
    case = make(rng, device, (9000, 64, 2100, 640, 5, -1), rows, page=16, **KERNELS[kernel])
    expected = case.run(backend)
    for count in _smaller_chips():
        assert same_bits(case.run(with_multiprocessors(backend, count)), expected), f"{count} multiprocessors"


def test_random_calls(device: str, backend: str | None, rng: torch.Generator, seed: int) -> None:
    """Everything at once: each sequence gives the bits that it gives alone, over a contiguous cache; and on a smaller
    chip all of them."""
    pick, start = random.Random(seed), time.monotonic()
    draws, seconds = (int(ASKED), float("inf")) if ASKED else (DRAWS[device], SECONDS[device])
    done, bad = 0, []
    while done < draws and time.monotonic() - start < seconds:
        arguments, case = draw(pick, rng, device)
        case = case.replace(options={**case.options, "batch_invariant": True})
        if case.q.is_cuda and case.refused_on_cuda():
            continue
        parts = [_by_itself(case, b, backend) for b in range(len(case.rows()))]
        results = case.run(backend)
        bad += [
            f"{done}: sequence {b} in {arguments}"
            for b, part in enumerate(parts)
            if not same_bits(_part(case, b, results), part)
        ]
        if device == "cuda":
            count = pick.choice(_smaller_chips())
            if not same_bits(case.run(with_multiprocessors(backend, count)), results):
                bad.append(f"{done}: {count} multiprocessors in {arguments}")
        done += 1
    print(f"{done} calls in {time.monotonic() - start:.0f} s, {len(bad)} bad")
    assert not bad, "\n".join(bad[:20])
    assert done >= min(draws, 10)
