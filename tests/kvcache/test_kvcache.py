"""Attention over caches against float64: lengths, pages, layouts, heads, head dims, masks and options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from caches import STORAGES, Cached, check, make
from cases import CAUSAL, CPU_DTYPES, CUDA_DTYPES, Causal
from checks import EVERY_FAMILY
from numerics import same_bits

import flash_cute

pytestmark = pytest.mark.kernel

LENGTHS = (70, -1, 0, 1, 130, 64)
PAGES = (None, 1, 4, 16, 48, 64, 512)


@pytest.mark.sanitizer
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("rows", [1, 3, (1, 5, 2, 0, 40, 1)], ids=str)
def test_pages(device: str, page: int | None, rows: Any, backend: str | None, rng: torch.Generator) -> None:
    out, lse = check(make(rng, device, LENGTHS, rows, page=page), backend)
    empty = slice(1, 3) if isinstance(rows, int) else slice(1, 8)  # rows of the sequences without keys
    assert (out[empty] == 0).all()
    assert ((lse[empty] if isinstance(rows, int) else lse[:, empty]) == -torch.inf).all()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("page", [None, 16])
def test_layouts(
    device: str, page: int | None, kv_layout: str, storage: str, backend: str | None, rng: torch.Generator
) -> None:
    shapes = {"head_dim": 64, "head_dim_v": 48, "kv_layout": kv_layout, "storage": storage}
    check(make(rng, device, (33, 100), 2, page=page, appends=True, **shapes), backend)


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (8, 1), (32, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 40])
def test_heads(device: str, heads: tuple[int, int], rows: int, backend: str | None, rng: torch.Generator) -> None:
    check(make(rng, device, (45, 129), rows, page=16, heads_q=heads[0], heads_kv=heads[1]), backend)


@pytest.mark.sanitizer
@pytest.mark.parametrize("rows", [1, (3, 0, 20)], ids=str)
@EVERY_FAMILY
def test_head_dims(device: str, head_dim: int, rows: Any, backend: str | None, rng: torch.Generator) -> None:
    check(make(rng, device, (300, 17, 64), rows, page=16, head_dim=head_dim), backend)


@pytest.mark.parametrize("head_dims", [(192, 128), (576, 512), (64, 256), (128, 64), (1024, 1024), (8, 16)], ids=str)
@pytest.mark.parametrize("page", [None, 64])
def test_head_dim_of_v(
    device: str, page: int | None, head_dims: tuple[int, int], backend: str | None, rng: torch.Generator
) -> None:
    """Multi-head latent attention, whose v is the first columns of k, among them."""
    storage = "view" if head_dims == (576, 512) else "plain"
    shapes = {"head_dim": head_dims[0], "head_dim_v": head_dims[1], "storage": storage, "heads_kv": 1}
    check(make(rng, device, (90, 31), 2, page=page, appends=True, **shapes), backend)


MASKS: tuple[tuple[Causal, Any], ...] = (
    *((causal, None) for causal in CAUSAL),
    (True, (20, None)),
    (True, (0, 0)),
    ("top_left", (3, None)),
    (False, (30, 2)),
    (False, (None, 1)),
    (False, (5, None)),
    (True, (10**6, 0)),
)


@pytest.mark.parametrize(("causal", "window"), MASKS, ids=str)
@pytest.mark.parametrize("rows", [1, 9, (40, 1, 200)], ids=str)
@pytest.mark.parametrize("page", [None, 16])
def test_masks(
    device: str, page: int | None, rows: Any, causal: Causal, window: Any, backend: str | None, rng: torch.Generator
) -> None:
    """With more rows than keys, too: rows that see no key are empty."""
    check(make(rng, device, (150, 33, 64), rows, page=page, causal=causal, window=window), backend)


def _options(name: str, case: Cached, rng: torch.Generator) -> dict[str, Any]:
    heads, sequences = case.q.shape[-2], case.cache_seqlens.numel()  # type: ignore[union-attr]
    made: dict[str, dict[str, Any]] = {
        "scale": {"scale": 0.3},
        "softcap": {"softcap": 5.0},
        "sinks": {"sinks": torch.randn(heads, generator=rng).to(case.q.device)},
        "sinks of q's dtype": {"sinks": torch.randn(heads, generator=rng).to(case.q)},
        "alibi": {"alibi_slopes": torch.rand(heads, generator=rng).to(case.q.device)},
        "alibi of sequences": {"alibi_slopes": torch.rand((sequences, heads), generator=rng).to(case.q.device)},
    }
    made["all"] = {**made["softcap"], **made["sinks"], **made["alibi"], "window": (40, 0)}
    return made[name]


@pytest.mark.parametrize(
    "name", ["scale", "softcap", "sinks", "sinks of q's dtype", "alibi", "alibi of sequences", "all"]
)
@pytest.mark.parametrize("rows", [2, (1, 30, 4)], ids=str)
def test_options(device: str, name: str, rows: Any, backend: str | None, rng: torch.Generator) -> None:
    case = make(rng, device, (100, 20, -1), rows, page=16)
    check(case.replace(options=_options(name, case, rng)), backend)


def test_dtypes(device: str, backend: str | None, rng: torch.Generator) -> None:
    for dtype in CPU_DTYPES if device == "cpu" else CUDA_DTYPES:
        out, lse = check(make(rng, device, (40, 0), (3, 1), page=4, dtype=dtype), backend)
        assert (out.dtype, lse.dtype) == (dtype, torch.float64 if dtype == torch.float64 else torch.float32)


def test_a_full_cache_needs_no_lengths(device: str, backend: str | None, rng: torch.Generator) -> None:
    for page in (None, 16):
        case = make(rng, device, (48, 48), 2, page=page, room=0)
        assert same_bits(check(case.replace(cache_seqlens=None), backend), case.run(backend))


@pytest.mark.parametrize("rows", [2, (2, 5, 0)], ids=str)
def test_out(device: str, rows: Any, backend: str | None, rng: torch.Generator) -> None:
    """`out` is written, in whatever strides, and returned; nothing else of its memory is."""
    case = make(rng, device, (30, 7, 100), rows, page=16)
    expected = case.run(backend)
    wide = torch.full((*expected[0].shape[:-1], 80), 7.0, dtype=case.q.dtype, device=device)
    out = wide[..., 8:72]
    given = case.run(backend, out=out)
    assert given[0] is out and same_bits((out, given[1]), expected)
    assert (wide[..., :8] == 7).all() and (wide[..., 72:] == 7).all()
    assert flash_cute.attention_with_kvcache(case.q, case.k_cache, case.v_cache, **case.arguments(), out=out) is out


def test_results_are_contiguous(device: str, backend: str | None, rng: torch.Generator) -> None:
    case = make(rng, device, (30, 7), 3)
    out, lse = case.replace(q=case.q.transpose(0, 2).contiguous().transpose(0, 2)).run(backend)
    assert out.is_contiguous() and lse.is_contiguous()


@pytest.mark.parametrize("sequences", [0, 2])
def test_empty_results(device: str, sequences: int, backend: str | None, rng: torch.Generator) -> None:
    heads = 0 if sequences else 4
    for rows in (1, 0, (0,) * sequences):
        case = make(rng, device, (9,) * sequences, rows, page=4, heads_q=heads, heads_kv=heads)
        out, lse = case.run(backend)
        assert out.numel() == lse.numel() == 0
        assert out.shape == (*case.q.shape[:-1], 64)


def test_strides_of_dims_of_size_1(device: str, backend: str | None, rng: torch.Generator) -> None:
    """They may be anything."""
    case = make(rng, device, (37,), 1, page=64, heads_kv=1, heads_q=2)
    expected = case.run(backend)
    only = int(case.page_table[0, 0])  # type: ignore[index]
    odd = [x[only].clone().as_strided((1, 64, 1, 64), (5, 64, 3, 1)) for x in (case.k_cache, case.v_cache)]
    first = torch.zeros_like(case.page_table)
    assert same_bits(case.replace(k_cache=odd[0], v_cache=odd[1], page_table=first).run(backend), expected)


def test_varlen_attention_with_pages(device: str, backend: str | None, rng: torch.Generator) -> None:
    """The names by which vLLM calls."""
    case = make(rng, device, (70, 0, 33), (1, 4, 20), page=16)
    tensors = (case.q, case.k_cache, case.v_cache, case.cu_seqlens_q, None)
    lengths = {"seqused_k": case.cache_seqlens, "page_table": case.page_table, "backend": backend}
    for causal in (True, False):
        expected = case.replace(causal=causal).run(backend)
        assert same_bits(flash_cute.varlen_fwd(*tensors, causal, max_seqlen_q=20, **lengths), expected)
        given = flash_cute.varlen_attention(*tensors, causal, max_seqlen_k=70, return_lse=True, **lengths)
        assert same_bits(given, expected)
        assert same_bits((flash_cute.varlen_attention(*tensors, causal, **lengths),), expected[:1])
