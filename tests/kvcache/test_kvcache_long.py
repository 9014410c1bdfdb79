"""Sequences of many rows over caches, as a prefill has them: on Hopper a kernel of their own, sm90/decode/long_rows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from caches import FLOAT8, alone, check, make, with_multiprocessors
from numerics import same_bits

import flash_cute
from flash_cute import report

FAMILY = "sm90::decode::long_rows"
LEAST = {32: 512, 16: 961, 8: 1921, 4: 4033}  # rows, by the number of query heads: LongRows in csrc/contract/decode.h


def _heads(device: str) -> dict[str, int]:
    """On the CPU there is one path, and few heads are faster."""
    return {"heads_q": 32, "heads_kv": 8} if device != "cpu" else {"heads_q": 2, "heads_kv": 1}


def _rows(device: str, *numbers: int) -> tuple[int, ...]:
    return numbers if device != "cpu" else tuple(n // 20 for n in numbers)


@pytest.mark.sanitizer
@pytest.mark.kernel
@pytest.mark.parametrize("page", [None, 1, 4, 16, 48, 64, 80, 256])
@pytest.mark.parametrize("ragged", [False, True], ids=["equal", "ragged"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_pages(
    device: str, head_dim: int, ragged: bool, page: int | None, backend: str | None, rng: torch.Generator
) -> None:
    """Beside decoding and sequences of no key, with an append before."""
    lengths = _rows(device, 900, 0, 300, 2000)
    rows: Any = _rows(device, 700, 512, 20, 600) if ragged else _rows(device, 513)[0]
    case = make(rng, device, lengths, rows, page=page, head_dim=head_dim, appends=True, **_heads(device))
    check(case, backend)


@pytest.mark.sanitizer
@pytest.mark.kernel
@pytest.mark.parametrize("head_dim", [256, 40, 104, 232])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page", [16, 1])
def test_head_dims(
    device: str, page: int, head_dim: int, dtype: torch.dtype, backend: str | None, rng: torch.Generator
) -> None:
    lengths, rows = _rows(device, 700, 100), _rows(device, 530, 600)
    check(make(rng, device, lengths, rows, page=page, head_dim=head_dim, dtype=dtype, **_heads(device)), backend)


@pytest.mark.kernel
@pytest.mark.parametrize(
    "options",
    [
        {"window": (100, 0)},
        {"window": (700, 30), "causal": False},
        {"causal": False},
        {"causal": "top_left"},
        {"scale": 0.3},
        {"softcap": 5.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("page", [None, 16, 3])
def test_options(
    device: str, options: dict[str, Any], page: int | None, backend: str | None, rng: torch.Generator
) -> None:
    """Windows read only what they see: what is left of them is of no page."""
    lengths, rows = _rows(device, 2100, 400, 0), _rows(device, 600, 700, 520)
    case = make(rng, device, lengths, rows, page=page, head_dim=128, **_heads(device), **options)
    sinks = torch.randn(case.q.shape[-2], generator=rng).to(device)
    case = case.replace(options={**case.options, "sinks": sinks})
    check(case, backend)
    left = options.get("window", (None, None))[0]
    if page is None or left is None:
        return
    assert case.page_table is not None and case.cache_seqlens is not None
    expected, hidden = case.run(backend), case.clone()
    table = case.page_table.clone()
    for b, count in enumerate(rows):  # the first row of a sequence sees the lowest key
        table[b, : max(0, int(case.cache_seqlens[b]) - count - left) // page] = 10**6
    assert same_bits(hidden.replace(page_table=table).run(backend), expected)


@pytest.mark.kernel
@pytest.mark.parametrize("storage", ["halves", "buffer", "view", "gaps"])
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page", [64, 20])
def test_layouts(
    device: str, page: int, storage: str, kv_layout: str, backend: str | None, rng: torch.Generator
) -> None:
    lengths, rows = _rows(device, 800, 300), _rows(device, 600, 550)
    options: dict[str, Any] = {"storage": storage, "kv_layout": kv_layout}
    check(make(rng, device, lengths, rows, page=page, head_dim=128, **options, **_heads(device)), backend)


@pytest.mark.sanitizer
@pytest.mark.kernel
@pytest.mark.parametrize("options", [{}, {"window": (333, 0)}], ids=str)
@pytest.mark.parametrize("cache_dtypes", [None, FLOAT8], ids=["16 bits", "float8"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_bits_of_any_page(
    device: str,
    head_dim: int,
    cache_dtypes: tuple[torch.dtype, torch.dtype] | None,
    options: dict[str, Any],
    backend: str | None,
    rng: torch.Generator,
) -> None:
    """The same keys in pages of other sizes, whose rows are copied or loaded by TMA, some at numbers of no page."""
    lengths, rows = _rows(device, 2100, 700, 0, 90), _rows(device, 800, 513, 520, 600)
    stored: dict[str, Any] = {} if cache_dtypes is None else {"cache_dtypes": cache_dtypes, "descales": "heads"}
    case = make(rng, device, lengths, rows, page=48, head_dim=head_dim, **stored, **options, **_heads(device))
    assert case.page_table is not None
    case.page_table[0, 1] = 10**6  # whose keys count as 0
    expected = check(case, backend)
    for page in (24, 16, 12, 3, 1):
        parts = 48 // page
        table = (case.page_table[:, :, None] * parts + torch.arange(parts, device=device)).flatten(1).int()
        k_cache, v_cache = (x.reshape(-1, page, *x.shape[2:]) for x in (case.k_cache, case.v_cache))
        other = case.replace(k_cache=k_cache, v_cache=v_cache, page_table=table)
        assert same_bits(other.run(backend), expected), f"pages of {page}"


@pytest.mark.kernel
@pytest.mark.parametrize("page", [None, 1, 4, 16, 48, 64, 80, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_float8(
    device: str,
    head_dim: int,
    dtype: torch.dtype,
    page: int | None,
    backend: str | None,
    rng: torch.Generator,
    seed: int,
) -> None:
    pick = random.Random(seed)
    lengths, rows = _rows(device, 900, 0, 300, 2000), _rows(device, 700, 512, 20, 600)
    window = pick.choice((None, (pick.randint(0, 300), 0), (700, 30)))
    options: dict[str, Any] = {} if window is None else {"window": window, "causal": window[1] == 0}
    options |= {"dtype": dtype, "cache_dtypes": pick.choices(FLOAT8, k=2), "descales": "heads", "appends": True}
    check(make(rng, device, lengths, rows, page=page, head_dim=head_dim, **options, **_heads(device)), backend)


@pytest.mark.kernel
@pytest.mark.parametrize("dtypes", [(x, y) for x in FLOAT8 for y in FLOAT8], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_the_bits_of_a_cache_of_16_bits(
    device: str, head_dim: int, dtypes: tuple[torch.dtype, torch.dtype], backend: str | None, rng: torch.Generator
) -> None:
    """float16 holds the values of either type, so that a cache of them gives the same bits."""
    lengths, rows = _rows(device, 900, 100, 2000), _rows(device, 700, 530, 600)
    options: dict[str, Any] = {"dtype": torch.float16, "cache_dtypes": dtypes, "head_dim": head_dim}
    case = make(rng, device, lengths, rows, page=16, **options, **_heads(device))
    wide = case.replace(k_cache=case.k_cache.half(), v_cache=case.v_cache.half())
    served = backend if case.served_by(backend or "auto") else None  # both by the same kernels
    assert same_bits(case.run(served), wide.run(served))


@pytest.mark.kernel
@pytest.mark.parametrize("number", range(4))
def test_random_batches(device: str, number: int, backend: str | None, rng: torch.Generator, seed: int) -> None:
    """Long sequences among short ones: right, and each with the bits that it has alone, over a contiguous cache; and on
    a smaller chip."""
    pick = random.Random(seed)
    heads_q = pick.choice((32, 16, 8)) if device != "cpu" else 2
    least = LEAST.get(heads_q, 40)
    rows = [pick.choice((0, 1, pick.randint(1, 60), least - 1, least, least + pick.randint(0, 300))) for _ in range(5)]
    lengths = [pick.choice((-1, 0, pick.randint(1, 70), pick.randint(1, 4 * least))) for _ in rows]
    options = {"heads_q": heads_q, "heads_kv": pick.choice((1, 2)), "head_dim": pick.choice((64, 128))}
    options |= pick.choice(({}, {"window": (pick.randint(0, 500), 0)}, {"causal": False}))
    options |= pick.choice(({}, {"cache_dtypes": pick.choices(FLOAT8, k=2), "descales": "heads"}))
    case = make(rng, device, lengths, rows, page=pick.choice((1, 16, 64, None)), appends=True, **options)
    results = case.clone().run(backend)
    check(case.clone(), backend)
    for b in range(len(rows)):
        single = alone(case, b)
        part = single.of_sequence(0, *single.run(backend))[1:]
        assert same_bits(case.of_sequence(b, *results)[1:], part), f"sequence {b}"
    if device != "cpu":
        assert same_bits(case.clone().run(with_multiprocessors(backend, 20)), results)


@pytest.mark.cuda
def test_a_graph_whose_lengths_change(rng: torch.Generator) -> None:
    """A sequence is long in one replay, and short in another."""
    case = make(rng, "cuda", (900, 40, 3000), (600, 30, 550), page=16, head_dim=128, heads_q=32, heads_kv=8)
    assert case.cu_seqlens_q is not None and case.cache_seqlens is not None
    case.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flash_cute.attention_with_kvcache(
            case.q, case.k_cache, case.v_cache, return_lse=True, **case.arguments()
        )
    replays = (((100, 700, 380), (900, 30, 2000)), ((0, 1180, 0), (5, 40, 60)), ((600, 30, 550), (7, 1, -1)))
    for rows, lengths in replays:
        case.cu_seqlens_q.copy_(torch.tensor([0, *rows]).cumsum(0))
        case.cache_seqlens.copy_(torch.tensor(lengths))
        graph.replay()
        assert same_bits((out, lse), case.run()), rows


def _shape(rows: int | Sequence[int], **more: Any) -> flash_cute.Explanation:
    """Of head dim 128, 32 and 8 heads, over pages of 16, on a Hopper chip."""
    count = rows if isinstance(rows, int) else sum(rows)
    batch = (2,) if isinstance(rows, int) else ()
    heads = more.pop("heads", 32)
    q = torch.empty(*batch, count, heads, more.pop("head_dim", 128), dtype=torch.half)
    cache = torch.empty(100, 16, 8, q.shape[-1], dtype=more.pop("cache_dtype", torch.half))
    offsets = None if isinstance(rows, int) else torch.tensor([0, *rows], dtype=torch.int32).cumsum(0).int()
    table, lengths = torch.zeros(2, 100, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    options = {"page_table": table, "cache_seqlens": lengths, "cu_seqlens_q": offsets, "causal": True, **more}
    return flash_cute.explain(q, cache, cache, capability=90, **options)


@pytest.mark.skipif(not report.load()["kernels"], reason="this build has no CUDA kernels")
def test_which_sequences_are_long() -> None:
    for heads, least in LEAST.items():
        if heads % 8 == 0:
            assert _shape(least, heads=heads).data["family"] == FAMILY
            assert _shape(least - 1, heads=heads).data["family"] == "sm90::decode::split_keys"
    assert _shape(600).data["kernel"] == "long_rows_kernel" and _shape(600).data["workspace_bytes"] == 0
    ragged = _shape((600, 1))
    assert ragged.data["family"] == "sm90::decode::split_keys"
    said = "Sequences of 512 rows and more are computed as a forward computes them"
    assert said in str(ragged) and said in str(_shape(600)) and said not in str(_shape((300, 200)))
    float8 = _shape(600, cache_dtype=torch.float8_e4m3fn)
    assert (float8.data["family"], float8.data["smem_bytes"]) == (FAMILY, 222_208)
    for more in ({"softcap": 5.0}, {"head_dim": 192}, {"backend": "sm80"}):
        assert _shape(600, **more).data["family"] != FAMILY, more
