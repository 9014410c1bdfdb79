"""Random masks against float64: everything at once, dense and packed, forward and backward.

FLASH_CUTE_TEST_MASKS is how many of each are drawn; 10,000 take an hour of a GPU.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CPU_DTYPES, CUDA_DTYPES, Backward, Forward
from masks import KINDS, draw_mask, draw_options, with_gaps, with_squares
from numerics import gradient_mismatches, mismatches, visible
from packed import Packed, assert_packed_gradients, assert_packed_matches, make_backward, make_forward, offsets

import flash_cute
from flash_cute import Mask

pytestmark = pytest.mark.kernel

SQUARES = pytest.mark.parametrize("squares", [False, True], ids=["intervals", "matrices"])
ASKED = os.environ.get("FLASH_CUTE_TEST_MASKS")
DRAWS = {"cpu": 150, "cuda": 600}
SECONDS = {"cpu": 6, "cuda": 40}  # of what is not asked for
LONGEST = {"cpu": 90, "cuda": 1500}
HEAD_DIMS = {"cpu": ((16, 16), (40, 40), (24, 16)), "cuda": ((64, 64), (128, 128), (96, 96), (192, 128), (256, 256))}
NO_KERNEL = "reads a mask"


def repeated(device: str, seed: int, one: Callable[[random.Random], str | None]) -> None:
    """Calls `one` until as many calls are done, or seconds; it says what was wrong, or None."""
    pick, start = random.Random(seed), time.monotonic()
    draws, seconds = (int(ASKED), float("inf")) if ASKED else (DRAWS[device], SECONDS[device])
    done, unserved, bad = 0, 0, []
    while done + unserved < draws and time.monotonic() - start < seconds:
        try:
            found = one(pick)
        except ValueError as error:
            if NO_KERNEL not in str(error):
                raise
            unserved += 1
            continue
        done += 1
        if found is not None:
            bad.append(f"{done}: {found}")
    print(f"{done} calls in {time.monotonic() - start:.0f} s, {len(bad)} bad, {unserved} without a kernel")
    assert not bad, "\n".join(bad[:20])
    assert done > unserved


def shapes_of(mask: Mask) -> list[tuple[int, ...] | None]:
    return [None if x is None else tuple(x.shape) for x in mask.tensors]


def draw_lengths(pick: random.Random, longest: int) -> tuple[int, int]:
    """Rows and keys: around tile edges or anywhere, equal or not."""
    edges = (1, 63, 64, 65, 127, 128, 129, 191, 193)
    rows, keys = (pick.choice((pick.randint(1, longest), pick.choice(edges))) for _ in range(2))
    return rows, rows if pick.random() < 0.5 else keys


@SQUARES
def test_random_masks(
    device: str, squares: bool, fwd: Forward, bwd: Backward, backend: str | None, rng: torch.Generator, seed: int
) -> None:
    def one(pick: random.Random) -> str | None:
        batch, heads_kv, group = pick.choice((1, 2)), pick.choice((1, 2)), pick.choice((1, 2, 3))
        len_q, len_k = draw_lengths(pick, LONGEST[device])
        head_dim, head_dim_v = pick.choice(HEAD_DIMS[device])
        dtype = pick.choice(CPU_DTYPES if device == "cpu" else CUDA_DTYPES)
        heads_q = heads_kv * group
        q, k, v, dout = (
            torch.randn(shape, generator=rng).to(device, dtype)
            for shape in (
                (batch, heads_q, len_q, head_dim),
                (batch, heads_kv, len_k, head_dim),
                (batch, heads_kv, len_k, head_dim_v),
                (batch, heads_q, len_q, head_dim_v),
            )
        )
        options = draw_options(pick, rng, heads_q, dtype)
        kind = pick.choice(KINDS)
        shape = (pick.choice((1, batch)), pick.choice((1, heads_kv)), len_k)
        mask = draw_mask(pick, rng, shape, len_q, kind).to(device)
        if squares:
            mask = with_squares(mask, pick, rng, (batch, heads_kv), len_q)
        mask = with_gaps(mask, pick)
        said = f"{kind} {shapes_of(mask)} {q.shape} {k.shape} {dtype} {options}"
        options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        if pick.random() < 0.2:
            options["alibi_slopes"] = torch.rand(heads_q, generator=rng).to(device)
        causal = options.pop("causal")
        out, lse = fwd(q, k, v, causal, mask=mask, **options)
        found = mismatches(out, lse, q, k, v, causal, mask=mask, **options)
        if pick.random() < 0.3:
            options["dlse"] = torch.randn(lse.shape, generator=rng).to(lse)
        deterministic = pick.random() < 0.5
        gradients = bwd(dout, q, k, v, causal, mask=mask, deterministic=deterministic, **options)
        found += gradient_mismatches(gradients, dout, q, k, v, causal, mask=mask, **options)
        found += hidden_problems(mask, causal, options.get("window"), out, lse, gradients)
        return f"{found} in {said}" if found else None

    repeated(device, seed, one)


def hidden_problems(
    mask: Mask,
    causal: bool | str,
    window: Any,
    out: torch.Tensor,
    lse: torch.Tensor,
    gradients: tuple[torch.Tensor, ...],
) -> list[str]:
    """What blind rows and hidden keys have is exactly 0, and the LSE -inf."""
    (batch, heads, rows), (_, heads_kv, keys, _) = lse.shape, gradients[1].shape
    seen = mask.dense(rows) & visible(rows, keys, causal, lse.device, window)  # (B or 1, Hkv or 1, Nq, Nk)
    blind = ~seen.any(-1).expand(batch, heads_kv, rows).repeat_interleave(heads // heads_kv, 1)
    hidden = ~seen.any(-2).expand(batch, heads_kv, keys)
    found = [] if bool((lse[blind] == -torch.inf).all()) else ["the LSE of a blind row is not -inf"]
    for name, x, where in (("out", out, blind), ("dq", gradients[0], blind)):
        found += [] if bool((x[where] == 0).all()) else [f"{name} of a blind row is not 0"]
    for name, x in (("dk", gradients[1]), ("dv", gradients[2])):
        found += [] if bool((x[hidden] == 0).all()) else [f"{name} of a hidden key is not 0"]
    return found


@SQUARES
def test_random_packed_masks(device: str, squares: bool, backend: str | None, rng: torch.Generator, seed: int) -> None:
    def one(pick: random.Random) -> str | None:
        lengths = [draw_lengths(pick, LONGEST[device] // 2) for _ in range(pick.randint(1, 4))]
        lengths += [(pick.choice((0, 3)), 0)] * (pick.random() < 0.3)
        heads_kv, group = pick.choice((1, 2)), pick.choice((1, 2))
        head_dim, head_dim_v = pick.choice(HEAD_DIMS[device])
        dtype = pick.choice(CPU_DTYPES if device == "cpu" else CUDA_DTYPES)
        gap = pick.choice((0, 0, 5))  # rows and keys of no sequence, before the first
        rows, keys = (gap + sum(x[side] for x in lengths) for side in (0, 1))
        q, k, v = (
            torch.randn(shape, generator=rng).to(device, dtype)
            for shape in (
                (rows, heads_kv * group, head_dim),
                (keys, heads_kv, head_dim),
                (keys, heads_kv, head_dim_v),
            )
        )
        cu_q, cu_k = (offsets([x[side] for x in lengths], device, gap) for side in (0, 1))
        packed = Packed(q, k, v, cu_q, cu_k)
        options = draw_options(pick, rng, heads_kv * group, dtype)
        kind = pick.choice(KINDS)
        mask = draw_mask(pick, rng, (1, pick.choice((1, heads_kv)), keys), rows, kind).to(device)
        if squares:
            mask = with_squares(mask, pick, rng, (1, heads_kv), rows)
        said = f"{kind} {shapes_of(mask)} {lengths} gap {gap} heads {heads_kv} {group} {head_dim} {dtype} {options}"
        options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        causal = options.pop("causal")
        results = make_forward(backend)(packed, causal, mask=mask, **options)
        dout = torch.randn((rows, heads_kv * group, head_dim_v), generator=rng).to(device, dtype)
        gradients = make_backward(backend)(dout, packed, causal, mask=mask, **options)
        try:
            assert_packed_matches(*results, packed, causal, mask=mask, **options)
            assert_packed_gradients(gradients, dout, packed, causal, mask=mask, **options)
        except AssertionError as error:
            return f"{str(error).splitlines()[0]} in {said}"
        return None

    repeated(device, seed, one)


@pytest.mark.parametrize("causal", [False, True])
def test_what_blind_rows_and_hidden_keys_hold(
    device: str, backend: str | None, causal: bool, rng: torch.Generator
) -> None:
    """NaN in q of a row that sees nothing reaches no row; and no numbers of it, or of dout, reach a gradient."""
    q, k, v, dout = (torch.randn(1, 2, 130, 64, generator=rng).to(device, torch.float16) for _ in range(4))
    row = torch.arange(130, dtype=torch.int32, device=device)
    first, limit = torch.full_like(row, 40), torch.full_like(row, 90)  # all other rows are blind
    mask = Mask(first.view(1, 1, -1), limit.view(1, 1, -1))
    blind = (row < 40) | (row >= 90)
    with_nan = q.masked_fill(blind.unsqueeze(-1), torch.nan)
    results = []
    for one_q, one_dout in (
        (q, dout),
        (torch.where(blind.unsqueeze(-1), 50 - q, q), torch.where(blind.unsqueeze(-1), 9 - dout, dout)),
    ):
        out, lse = flash_cute.fwd(one_q, k, v, causal, mask=mask, backend=backend)
        gradients = flash_cute.bwd(one_dout, one_q, k, v, out, lse, causal, mask=mask, backend=backend)
        results.append((out, lse, *gradients))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(results[0], flash_cute.fwd(with_nan, k, v, causal, mask=mask, backend=backend), strict=False):
        assert torch.equal(one, other)
    assert (results[0][0][:, :, blind] == 0).all()
