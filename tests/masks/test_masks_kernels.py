"""The kernels that read a mask by intervals: every head dim, lists longer than a warp looks at, sorted row tiles,
graphs, and bits of masks that say what a band says."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from cases import CUDA_DTYPES, Forward, dtype_name, score
from masks import KINDS, draw_mask, inputs, of_columns
from numerics import assert_matches, nan_in_new_memory, same_bits

import flash_cute
from flash_cute import Mask

pytestmark = [pytest.mark.kernel, pytest.mark.cuda]

DEVICES = pytest.mark.parametrize("device", ["cuda"])
DTYPES = pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=dtype_name)
# Of q and k, and of v.
HEAD_DIMS = ((32, 32), (64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256), (72, 72))


def checked(fwd: Forward, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, **options: Any) -> Any:
    causal = options.pop("causal", False)
    with nan_in_new_memory(q):
        out, lse = fwd(q, k, v, causal, mask=mask, **options)
    assert_matches(out, lse, q, k, v, causal, mask=mask, **options)
    return out, lse


@DEVICES
@DTYPES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_every_head_dim(
    device: str,
    head_dims: tuple[int, int],
    kind: str,
    dtype: torch.dtype,
    fwd: Forward,
    rng: torch.Generator,
    seed: int,
) -> None:
    pick = random.Random(seed)
    q, k, v = inputs(device, rng, (2, 4, 2), (613, 741), head_dims, dtype)
    mask = draw_mask(pick, rng, (pick.choice((1, 2)), pick.choice((1, 2)), 741), 613, kind).to(device)
    checked(fwd, q, k, v, mask, causal=pick.choice((False, True, "top_left")))


@DEVICES
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_head_dim_320(device: str, softcap: float | None, rng: torch.Generator, fwd: Forward, seed: int) -> None:
    q, k, v = inputs(device, rng, (1, 4, 2), (413, 541), (320, 320))
    mask = draw_mask(random.Random(seed), rng, (1, 2, 541), 413, "two").to(device)
    checked(fwd, q, k, v, mask, causal=True, softcap=softcap)


@DEVICES
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("alibi", [False, True])
def test_modified_scores(
    device: str, head_dims: tuple[int, int], alibi: bool, fwd: Forward, rng: torch.Generator, seed: int
) -> None:
    q, k, v = inputs(device, rng, (1, 4, 2), (613, 741), head_dims)
    mask = draw_mask(random.Random(seed), rng, (1, 2, 741), 613, "random").to(device)
    options: dict[str, Any] = {"alibi_slopes": torch.rand(4, generator=rng).to(device)} if alibi else {"softcap": 3.0}
    checked(fwd, q, k, v, mask, causal=True, **options)


@DEVICES
@pytest.mark.parametrize("head_dims", ((64, 64), (128, 128), (256, 256)), ids=str)
def test_more_key_tiles_than_a_warp_looks_at(
    device: str, head_dims: tuple[int, int], fwd: Forward, rng: torch.Generator
) -> None:
    """1,024 key tiles are 131,072 keys of 128. Most are hidden; what is seen is in all parts of the lists."""
    keys, rows = 150_000, 200
    q, k, v = inputs(device, rng, (1, 1, 1), (rows, keys), head_dims)
    seen = torch.rand(keys // 500, generator=rng).repeat_interleave(500) < 0.1
    seen[0] = seen[-1] = True
    first = torch.randint(0, rows, (keys,), generator=rng)
    checked(fwd, q, k, v, of_columns(first, torch.where(seen, first + 70, 0), device))


@DEVICES
@pytest.mark.parametrize("heads", [(1, 40, 40), (2, 24, 8)], ids=str)
@pytest.mark.parametrize("per_head", [False, True])
def test_more_row_tiles_than_multiprocessors(
    device: str, heads: tuple[int, int, int], per_head: bool, fwd: Forward, rng: torch.Generator
) -> None:
    """They are sorted by the key tiles that they visit, and drawn: documents of random lengths, with hidden rows."""
    rows = 1500
    batch, _, heads_kv = heads
    q, k, v = inputs(device, rng, heads, (rows, rows), (128, 128))
    shape = (batch, heads_kv) if per_head else (1, 1)
    document = (torch.rand((*shape, rows), generator=rng) < 0.01).cumsum(-1).sort(-1).values
    first = torch.searchsorted(document, document)
    limit = torch.where(document % 3 == 0, 0, torch.searchsorted(document, document, right=True))
    mask = Mask(*(x.to(device, torch.int32) for x in (first, limit)))
    once = checked(fwd, q, k, v, mask, causal=True)
    for _ in range(3):
        assert same_bits(fwd(q, k, v, True, mask=mask), once)


@DEVICES
def test_the_bits_of_the_kernel_without_a_mask(device: str, backend: str | None, rng: torch.Generator) -> None:
    """Of a causal call: with a mask that shows all, and where the mask alone says it. The tiles are the same."""
    if torch.cuda.get_device_capability() != (9, 0) or backend == "sm80":
        pytest.skip("the tile can be chosen on sm90 alone")
    rows = 1000
    q, k, v = inputs(device, rng, (1, 30, 30), (rows, rows), (128, 128))
    without = torch.ops.flash_cute._fwd(q, k, v, *score(True), "sm90:rows192")
    row = torch.arange(rows)
    for causal, first in ((True, torch.zeros_like(row)), (False, row)):
        mask = of_columns(first, torch.full_like(row, rows), device)
        assert same_bits(flash_cute.fwd(q, k, v, causal, mask=mask, backend="sm90"), without)


@DEVICES
def test_rows_that_see_nothing_or_infinity(device: str, backend: str | None, rng: torch.Generator) -> None:
    """A row all of whose scores are -inf has NaN, as softmax has it; one that sees no key has 0."""
    rows = 300
    q, k, v = inputs(device, rng, (1, 2, 1), (rows, rows))
    q = q.abs() + 1
    k[:, :, 100:] = -torch.inf  # of which no row below 120 sees one
    row = torch.arange(rows)
    limit = torch.where(row < 100, 60, torch.where(row < 200, 250, 0))
    first = torch.where(row < 100, 0, 120)
    out, lse = flash_cute.fwd(q, k, v, mask=of_columns(first, limit, device), backend=backend)
    assert out[:, :, :60].isfinite().all() and lse[:, :, :60].isfinite().all()
    assert (out[:, :, 60:120] == 0).all() and (out[:, :, 250:] == 0).all()
    assert out[:, :, 120:250].isnan().all()
    assert (lse[:, :, 60:] == -torch.inf).all()


@DEVICES
def test_a_graph_whose_mask_changes(device: str, fwd: Forward, rng: torch.Generator, seed: int) -> None:
    pick = random.Random(seed)
    q, k, v = inputs(device, rng, (2, 4, 2), (500, 700), (128, 128))
    mask = draw_mask(pick, rng, (2, 1, 700), 500, "two").to(device)
    fwd(q, k, v, True, mask=mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fwd(q, k, v, True, mask=mask)
    for kind in ("two", "diagonal", "two"):
        other = draw_mask(pick, rng, (2, 1, 700), 500, kind).to(device)
        for kept, new in zip(mask.tensors, other.tensors, strict=True):
            assert (kept is None) == (new is None)
            if kept is not None and new is not None:
                kept.copy_(new)
        graph.replay()
        assert_matches(out, lse, q, k, v, True, mask=mask)


@DEVICES
@pytest.mark.parametrize("lengths", [(1, 1), (1, 300), (300, 1), (64, 80), (65, 81), (192, 80), (193, 0)], ids=str)
def test_edges(device: str, lengths: tuple[int, int], fwd: Forward, rng: torch.Generator, seed: int) -> None:
    q, k, v = inputs(device, rng, (2, 2, 1), lengths, (128, 128))
    for kind in ("extreme", "wide", "random"):
        mask = draw_mask(random.Random(seed), rng, (1, 1, lengths[1]), lengths[0], kind).to(device)
        checked(fwd, q, k, v, mask)
