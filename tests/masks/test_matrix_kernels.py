"""The kernels that read a mask's bits: every head dim, whole and empty tiles, modified scores, graphs."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from cases import CUDA_DTYPES, Backward, Forward, dtype_name
from masks import draw_mask, draw_matrix, inputs, with_squares
from numerics import assert_gradients_match, assert_matches

import flash_cute
from flash_cute import Mask

pytestmark = [pytest.mark.kernel, pytest.mark.cuda]

DEVICES = pytest.mark.parametrize("device", ["cuda"])
DTYPES = pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=dtype_name)
# Of q and k, and of v.
HEAD_DIMS = ((32, 32), (64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256), (72, 72))


def assert_right(
    fwd: Forward, bwd: Backward, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rng: torch.Generator, **options: Any
) -> None:
    deterministic = options.pop("deterministic", False)
    out, lse = fwd(q, k, v, **options)
    assert_matches(out, lse, q, k, v, **options)
    dout = torch.randn(out.shape, generator=rng).to(out)
    gradients = bwd(dout, q, k, v, deterministic=deterministic, **options)
    assert_gradients_match(gradients, dout, q, k, v, **options)


@DEVICES
@DTYPES
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_every_head_dim(
    device: str,
    head_dims: tuple[int, int],
    dtype: torch.dtype,
    fwd: Forward,
    bwd: Backward,
    rng: torch.Generator,
    seed: int,
) -> None:
    pick = random.Random(seed)
    q, k, v = inputs(device, rng, (2, 4, 2), (613, 741), head_dims, dtype)
    for _ in range(4):
        mask = draw_mask(pick, rng, (pick.choice((1, 2)), pick.choice((1, 2)), 741), 613, "wide").to(device)
        mask = with_squares(mask, pick, rng, (2, 2), 613)
        options = {"causal": pick.choice((False, True, "top_left")), "deterministic": pick.random() < 0.5}
        assert_right(fwd, bwd, q, k, v, rng, mask=mask, **options)


@DEVICES
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("alibi", [False, True])
def test_modified_scores(
    device: str,
    head_dims: tuple[int, int],
    alibi: bool,
    fwd: Forward,
    bwd: Backward,
    rng: torch.Generator,
    seed: int,
) -> None:
    q, k, v = inputs(device, rng, (1, 4, 2), (613, 741), head_dims)
    mask = Mask.from_matrix(draw_matrix(random.Random(seed), rng, (1, 2), (613, 741)).to(device), 741)
    options: dict[str, Any] = {"alibi_slopes": torch.rand(4, generator=rng).to(device)} if alibi else {"softcap": 3.0}
    assert_right(fwd, bwd, q, k, v, rng, causal=True, mask=mask, **options)


@DEVICES
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_whole_and_empty_tiles(
    device: str, head_dims: tuple[int, int], fwd: Forward, bwd: Backward, rng: torch.Generator
) -> None:
    """A tile of which one pair alone is hidden, or seen, at each of its corners; and N % 128 == 64."""
    rows, keys = 832, 960
    q, k, v = inputs(device, rng, (1, 2, 1), (rows, keys), head_dims)
    blocks = torch.rand(rows // 64, keys // 64, generator=rng) < 0.5
    seen = blocks.repeat_interleave(64, 0).repeat_interleave(64, 1)
    for row in (0, 63, 64, 127, 128, rows - 1):
        for key in (0, 63, 64, 255, 256, keys - 1):
            seen[row, key] = ~seen[row, key]
    assert_right(fwd, bwd, q, k, v, rng, mask=Mask.from_matrix(seen.to(device)))
    assert_right(fwd, bwd, q, k, v, rng, mask=Mask.from_blocks(blocks.to(device), keys))


@DEVICES
@DTYPES
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("score", ["plain", "softcap", "alibi"])
def test_blocks_of_few(
    device: str, head_dim: int, score: str, dtype: torch.dtype, backend: str | None, rng: torch.Generator
) -> None:
    """Warpgroups that see different key tiles, more of these than there are buffers, and row tiles that visit none."""
    rows, keys = 1000, 5000
    q, k, v = inputs(device, rng, (2, 4, 2), (rows, keys), (head_dim, head_dim), dtype)
    options: dict[str, Any] = {"softcap": 3.0} if score == "softcap" else {}
    if score == "alibi":
        options["alibi_slopes"] = torch.rand(4, generator=rng).to(device)
    for density in (0.02, 0.25, 0.9, 1.0):
        blocks = torch.rand(2, 2, -(-rows // 64), -(-keys // 64), generator=rng) < density
        blocks[0, :, 4:8] = False
        mask = Mask.from_blocks(blocks.to(device), keys)
        for causal in (False, True):
            out, lse = flash_cute.fwd(q, k, v, causal, mask=mask, backend=backend, **options)
            assert_matches(out, lse, q, k, v, causal, mask=mask, **options)


@DEVICES
@pytest.mark.parametrize("squares", ["matrix", "blocks"])
def test_a_graph_whose_mask_changes(device: str, squares: str, backend: str | None, rng: torch.Generator) -> None:
    """A replay reads the tensors again, of which the caller's own is one: nothing is copied when a mask is made."""
    q, k, v = inputs(device, rng, (2, 4, 2), (700, 700), (128, 128))
    dout = torch.randn(q.shape, generator=rng).to(q)
    shape = (2, 1, 700, 700) if squares == "matrix" else (2, 1, 11, 11)
    seen = torch.ones(shape, dtype=torch.bool, device=device)
    mask = Mask.from_matrix(seen) if squares == "matrix" else Mask.from_blocks(seen, 700)
    flash_cute.fwd(q, k, v, mask=mask, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flash_cute.fwd(q, k, v, mask=mask, backend=backend)
        gradients = flash_cute.bwd(dout, q, k, v, out, lse, mask=mask, deterministic=True, backend=backend)
    for density in (1.0, 0.5, 0.05, 0.0, 0.7):
        seen.copy_(torch.rand(shape, generator=rng) < density)
        for x in (out, lse, *gradients):
            x.fill_(torch.nan)
        graph.replay()
        assert_matches(out, lse, q, k, v, mask=mask)
        assert_gradients_match(gradients, dout, q, k, v, mask=mask)
