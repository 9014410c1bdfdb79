"""Masks at head dims above 256: on any GPU the portable kernels read them, above 512 by two CTAs per tile."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from cases import dtype_name
from masks import KINDS, draw_mask, inputs
from numerics import assert_gradients_match, assert_matches, nan_in_new_memory, same_bits

import flash_cute
from flash_cute import Mask

pytestmark = pytest.mark.cuda

# Of q and k, and of v: a part of out's columns each, two, and one of two; the last ones are the largest.
HEAD_DIMS = ((320, 320), (512, 512), (576, 512), (512, 640), (1024, 1024))
LENGTHS = (213, 341)
BACKENDS = pytest.mark.parametrize("backend", ["auto", "sm80"])


def small_inputs(rng: torch.Generator, head_dims: tuple[int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    return [x * 0.5 for x in inputs("cuda", rng, (2, 4, 2), LENGTHS, head_dims, dtype)]


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_forward_and_backward(
    head_dims: tuple[int, int], kind: str, dtype: torch.dtype, backend: str, rng: torch.Generator, seed: int
) -> None:
    pick = random.Random(seed)
    q, k, v = small_inputs(rng, head_dims, dtype)
    shape = (pick.choice((1, 2)), pick.choice((1, 2)), LENGTHS[1])
    options: dict[str, Any] = {"causal": pick.choice((False, True, "top_left"))}
    options["mask"] = draw_mask(pick, rng, shape, LENGTHS[0], kind).to("cuda")
    if pick.random() < 0.3:
        options["softcap"] = 3.0
    with nan_in_new_memory(q):
        out, lse = flash_cute.fwd(q, k, v, backend=backend, **options)
    assert_matches(out, lse, q, k, v, **options)
    dout = torch.randn(out.shape, generator=rng).to("cuda", dtype)
    with nan_in_new_memory(q):
        gradients = flash_cute.bwd(dout, q, k, v, out, lse, backend=backend, **options)
    assert_gradients_match(gradients, dout, q, k, v, **options)


@pytest.mark.parametrize("head_dim", [512, 1024])
def test_equal_runs(head_dim: int, rng: torch.Generator) -> None:
    q, k, v = small_inputs(rng, (head_dim, head_dim), torch.float16)
    mask = draw_mask(random.Random(3), rng, (1, 2, LENGTHS[1]), LENGTHS[0], "two").to("cuda")
    once = flash_cute.fwd(q, k, v, mask=mask)
    dout = torch.randn_like(once[0])
    gradients = flash_cute.bwd(dout, q, k, v, *once, mask=mask)
    for _ in range(10):
        assert same_bits(flash_cute.fwd(q, k, v, mask=mask), once)
        assert same_bits(flash_cute.bwd(dout, q, k, v, *once, mask=mask), gradients)


@pytest.mark.parametrize("head_dim", [512, 1024])
def test_what_nobody_sees(head_dim: int, rng: torch.Generator) -> None:
    q, k, v = (x.requires_grad_() for x in small_inputs(rng, (head_dim, head_dim), torch.float16))
    rows = torch.zeros(1, 1, LENGTHS[1], dtype=torch.int32, device="cuda")
    limit = torch.where(torch.arange(LENGTHS[1], device="cuda") < 200, 100, 0).to(torch.int32)
    out, lse = flash_cute.attention(q, k, v, mask=Mask(rows, limit.expand_as(rows)), return_lse=True)
    out.float().square().sum().backward()
    assert (out[:, :, 100:] == 0).all() and (lse[:, :, 100:] == -torch.inf).all() and (out[:, :, :100] != 0).any()
    assert (q.grad[:, :, 100:] == 0).all() and (k.grad[:, :, 200:] == 0).all() and (v.grad[:, :, 200:] == 0).all()
