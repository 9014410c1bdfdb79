"""The backward's kernels that read a mask by intervals: every head dim, row and key tiles that nobody sees, lists of
many words, and the order of sums."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from cases import CUDA_DTYPES, Backward, dtype_name
from masks import KINDS, draw_mask, of_columns
from masks import inputs as inputs_of_forward
from numerics import assert_gradients_match, same_bits

from flash_cute import Mask

pytestmark = [pytest.mark.kernel, pytest.mark.cuda]

DEVICES = pytest.mark.parametrize("device", ["cuda"])
DTYPES = pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=dtype_name)
DETERMINISTIC = pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
# Of q and k, and of v.
HEAD_DIMS = ((32, 32), (64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256), (72, 40))


def inputs(
    device: str,
    rng: torch.Generator,
    heads: tuple[int, int, int],
    lengths: tuple[int, int],
    head_dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype = torch.float16,
) -> list[torch.Tensor]:
    """dout, and q, k and v as in forwards."""
    dout = torch.randn((*heads[:2], lengths[0], head_dims[1]), generator=rng).to(device, dtype)
    return [dout, *inputs_of_forward(device, rng, heads, lengths, head_dims, dtype)]


@DEVICES
@DTYPES
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_every_head_dim(
    device: str,
    head_dims: tuple[int, int],
    kind: str,
    dtype: torch.dtype,
    bwd: Backward,
    rng: torch.Generator,
    seed: int,
) -> None:
    pick = random.Random(seed)
    given = inputs(device, rng, (2, 4, 2), (613, 741), head_dims, dtype)
    mask = draw_mask(pick, rng, (pick.choice((1, 2)), pick.choice((1, 2)), 741), 613, kind).to(device)
    options: dict[str, Any] = {"causal": pick.choice((False, True, "top_left")), "mask": mask}
    if pick.random() < 0.5:
        options["dlse"] = torch.randn((2, 4, 613), generator=rng).to(device)
    assert_gradients_match(bwd(*given, deterministic=pick.random() < 0.5, **options), *given, **options)


@DEVICES
@pytest.mark.parametrize("score", ["softcap", "alibi", "both"])
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_modified_scores(
    device: str, head_dims: tuple[int, int], score: str, bwd: Backward, rng: torch.Generator, seed: int
) -> None:
    given = inputs(device, rng, (1, 4, 2), (613, 741), head_dims)
    options: dict[str, Any] = {"mask": draw_mask(random.Random(seed), rng, (1, 2, 741), 613, "random").to(device)}
    if score != "alibi":
        options["softcap"] = 3.0
    if score != "softcap":
        options["alibi_slopes"] = torch.rand(4, generator=rng).to(device)
    assert_gradients_match(bwd(*given, True, **options), *given, True, **options)


@DEVICES
@DETERMINISTIC
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_tiles_that_see_nothing(
    device: str, head_dims: tuple[int, int], deterministic: bool, bwd: Backward, rng: torch.Generator
) -> None:
    """Whole row tiles and whole key tiles, at the ends and between; their gradients are 0 and not what memory held."""
    rows, keys = 1100, 1300
    given = inputs(device, rng, (1, 4, 2), (rows, keys), head_dims)
    column = torch.arange(keys)
    first = torch.where(column < 700, 300, 640)
    limit = torch.where((column < 270) | (column >= 1100) | ((column >= 500) & (column < 800)), 0, first + 200)
    mask = of_columns(first, limit, device)
    dq, dk, dv, *_ = bwd(*given, mask=mask, deterministic=deterministic)
    assert_gradients_match((dq, dk, dv), *given, mask=mask)
    for blind in (dq[:, :, :300], dq[:, :, 500:640], dq[:, :, 840:], dk[:, :, :270], dv[:, :, 500:800]):
        assert bool((blind == 0).all())


@DEVICES
@DETERMINISTIC
@pytest.mark.parametrize("lengths", [(150_000, 200), (200, 150_000)], ids=str)
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (256, 256)], ids=str)
def test_lists_of_many_words(
    device: str,
    head_dims: tuple[int, int],
    lengths: tuple[int, int],
    deterministic: bool,
    bwd: Backward,
    rng: torch.Generator,
) -> None:
    """1,172 tiles of 128 rows or keys, most of which nothing is seen of."""
    rows, keys = lengths
    given = inputs(device, rng, (1, 2, 1), lengths, head_dims)
    if rows > keys:
        first = torch.randint(0, rows, (keys,), generator=rng)
        mask = of_columns(first, first + 1000, device)
    else:
        seen = torch.rand(keys // 500, generator=rng).repeat_interleave(500) < 0.1
        seen[0] = seen[-1] = True
        first = torch.randint(0, rows, (keys,), generator=rng)
        mask = of_columns(first, torch.where(seen, first + 70, 0), device)
    assert_gradients_match(bwd(*given, mask=mask, deterministic=deterministic), *given, mask=mask)


@DEVICES
@pytest.mark.parametrize("head_dims", [(64, 64), (96, 96), (128, 128), (192, 192)], ids=str)
def test_deterministic_sums(device: str, head_dims: tuple[int, int], bwd: Backward, rng: torch.Generator) -> None:
    """Of more key tiles than multiprocessors, whose ranks among a row tile's visitors differ: global keys, documents of
    random lengths, and keys that nobody sees."""
    length = 4200
    given = inputs(device, rng, (2, 8, 4), (length, length), head_dims, torch.bfloat16)
    document = (torch.rand((2, 4, length), generator=rng) < 0.004).cumsum(-1)
    first = torch.searchsorted(document, document)
    limit = torch.searchsorted(document, document, right=True)
    everywhere = torch.rand(first.shape, generator=rng) < 0.01
    hidden = (torch.rand((2, 4, length // 100), generator=rng) < 0.3).repeat_interleave(100, -1)
    first, limit = torch.where(everywhere, 0, first), torch.where(everywhere, length, limit)
    mask = Mask(*(x.to(device, torch.int32) for x in (first, torch.where(hidden, 0, limit))))
    once = bwd(*given, True, mask=mask, deterministic=True)
    # The oracle of all heads would take 20 GB.
    heads = (2, 2, 1, 1)
    of_one = [x[:1, :n] for x, n in zip(given, heads, strict=True)]
    mask_of_one = Mask(*(None if x is None else x[:1, :1] for x in mask.tensors))
    gradients = tuple(x[:1, :n] for x, n in zip(once, heads[1:], strict=False))
    assert_gradients_match(gradients, *of_one, True, mask=mask_of_one)
    for _ in range(20):
        assert same_bits(bwd(*given, True, mask=mask, deterministic=True), once)


@DEVICES
def test_contents_may_change_in_a_graph(device: str, bwd: Backward, rng: torch.Generator) -> None:
    """A replay reads the mask's tensors again."""
    given = inputs(device, rng, (1, 4, 2), (700, 900), (128, 128))
    masks = [draw_mask(random.Random(n), rng, (1, 2, 900), 700, "documents").to(device) for n in range(3)]
    mask = Mask(*(x if x is None else x.clone() for x in masks[0].tensors))
    # The numbers of tensors may differ: of one interval and of two.
    same = [other for other in masks if [x is None for x in other.tensors] == [x is None for x in mask.tensors]]
    bwd(*given, mask=mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients = bwd(*given, mask=mask)
    for other in same:
        for x, y in zip(mask.tensors, other.tensors, strict=True):
            if x is not None and y is not None:
                x.copy_(y)
        graph.replay()
        assert_gradients_match(gradients, *given, mask=mask)
