"""The kernels of every sm80 table that read a mask by intervals, on the GPU that there is."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
import torch
from cases import CUDA_DTYPES, INSTANCE_HEAD_DIMS, Case, Forward, score
from layouts import surrounded
from masks import draw_mask
from numerics import assert_gradients_match, assert_matches, nan_in_new_memory, same_bits

from flash_cute import Mask
from flash_cute.report import built_architectures

pytestmark = pytest.mark.kernel

CHIPS = {"a100": 163 << 10, "99kb": 99 << 10, "h100": 227 << 10}  # of csrc/sm80/common/chip.h
PLAIN_HEAD_DIMS = (32, 64, 128)  # of has_plain_masked_kernel in csrc/sm80/backward/dq_in_memory/tile.h
DTYPES = pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
SCORES = pytest.mark.parametrize("softcap", [None, 20.0], ids=["plain", "modified"])
KINDS = ("random", "documents", "hidden", "two")


def _skip_unbuilt() -> None:
    if "sm80" not in built_architectures():
        pytest.skip("this build has no sm80 kernels")


def _call(
    head_dim: int, dtype: torch.dtype, softcap: float | None, rng: torch.Generator, seed: int
) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """q, k and v, and the options of a call, of which a seed draws the mask's kind and shape."""
    _skip_unbuilt()
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the tiles of all tables fit in an H100's shared memory, and perhaps not in this GPU's")
    q, k, v = Case(head_dim, 413, 603, False, dtype, 2, 4, 2).inputs("cuda", rng)
    pick = random.Random(seed)
    shape = (pick.choice((1, 2)), pick.choice((1, 2)), k.shape[2])
    options = {"mask": draw_mask(pick, rng, shape, q.shape[2], pick.choice(KINDS)).to("cuda"), "softcap": softcap}
    if softcap is not None:
        options["alibi_slopes"] = torch.rand(q.shape[1], generator=rng).to("cuda") / 8
    return (q, k, v), options


def _arguments(options: dict[str, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Of the operators: the mask's, and those of band and score."""
    others = {name: x for name, x in options.items() if name != "mask"}
    return options["mask"].tensors, score(True, **others)


@pytest.mark.cuda
@SCORES
@DTYPES
@pytest.mark.parametrize("head_dim", INSTANCE_HEAD_DIMS)
@pytest.mark.parametrize("chip", CHIPS)
def test_forward(
    chip: str, head_dim: int, dtype: torch.dtype, softcap: float | None, rng: torch.Generator, seed: int
) -> None:
    (q, k, v), options = _call(head_dim, dtype, softcap, rng, seed)
    mask, others = _arguments(options)
    around = [surrounded(x) for x in (q, k, v)]
    with nan_in_new_memory(q):
        out, lse = torch.ops.flash_cute._masked_fwd(*around, *mask, *others, f"sm80:{chip}")
    assert_matches(out, lse, q, k, v, True, **options)


@pytest.mark.cuda
@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
@SCORES
@DTYPES
@pytest.mark.parametrize("head_dim", INSTANCE_HEAD_DIMS)
@pytest.mark.parametrize("chip", CHIPS)
def test_backward(
    chip: str,
    head_dim: int,
    dtype: torch.dtype,
    softcap: float | None,
    deterministic: bool,
    rng: torch.Generator,
    seed: int,
) -> None:
    (q, k, v), options = _call(head_dim, dtype, softcap, rng, seed)
    mask, others = _arguments(options)
    out, lse = torch.ops.flash_cute._masked_fwd(q, k, v, *mask, *others, f"sm80:{chip}")
    dout = torch.randn(q.shape, generator=rng).to(q)
    dlse = torch.randn(q.shape[:3], generator=rng).to(lse)

    def gradients() -> Any:
        with nan_in_new_memory(q):
            given = (dout, q, k, v, out, lse, dlse, *mask, *others, deterministic, f"sm80:{chip}")
            return torch.ops.flash_cute._masked_bwd(*given)[:3]  # behind them dsinks, of sinks that there are none of

    given = gradients()
    assert_gradients_match(given, dout, q, k, v, True, dlse=dlse, **options)
    if deterministic:
        assert same_bits(gradients(), given)


@SCORES
@pytest.mark.parametrize("head_dim", INSTANCE_HEAD_DIMS)
@pytest.mark.parametrize("chip", CHIPS)
def test_the_plan(chip: str, head_dim: int, softcap: float | None) -> None:
    """The tiles fit the chip, and only the backward's plain kernels have one of their own."""
    _skip_unbuilt()
    q = torch.empty(1, 1, 200, head_dim, dtype=torch.float16)
    rows = torch.zeros(1, 1, 200, dtype=torch.int32)
    call = (q, q, q, rows, rows, *(None,) * 4, *score(True, softcap=softcap), f"sm80:{chip}")
    forward = json.loads(torch.ops.flash_cute.masked_fwd_plan(*call, 80))
    backward = json.loads(torch.ops.flash_cute.masked_bwd_plan(*call, False, 80))
    for made in (forward, backward):
        assert made["variant"] == ("masked" if softcap is None else "masked modified")
        assert made["smem_bytes"] <= CHIPS[chip]
        assert made["ctas_per_sm"] * (made["smem_bytes"] + 1024) <= CHIPS[chip] + 1024
    assert backward["kernel"] == "bwd_masked_kernel"
    plain = softcap is None and head_dim in PLAIN_HEAD_DIMS and chip != "99kb"
    assert ("on any chip" in backward["reasons"][1]) == (not plain)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_minus_infinity_is_not_hidden(device: str, head_dim: int, fwd: Forward, rng: torch.Generator) -> None:
    """A row whose scores are all -inf has NaN, as softmax has it; one that sees no key 0. The LSE of both is -inf."""
    q, k, v = Case(head_dim, 150, 300, dtype=torch.bfloat16).inputs(device, rng)
    k[..., 0] = k[..., 0].abs() + 1
    infinite, blind = 3, 70
    q[:, :, infinite] = 0
    q[:, :, infinite, 0] = -math.inf
    rows = torch.arange(300, dtype=torch.int32, device=device).view(1, 1, -1)
    mask = Mask(rows % 2, torch.full_like(rows, blind), torch.full_like(rows, blind + 1), torch.full_like(rows, 150))
    out, lse = fwd(q, k, v, mask=mask)
    assert bool(out[:, :, infinite].isnan().all()) and bool((lse[:, :, infinite] == -math.inf).all())
    assert bool((out[:, :, blind] == 0).all()) and bool((lse[:, :, blind] == -math.inf).all())
    others = [row for row in range(150) if row not in (infinite, blind)]
    assert bool(out[:, :, others].isfinite().all()) and bool(lse[:, :, others].isfinite().all())
