"""Softcap: scores are softcap * tanh(score / softcap), in out, the LSE and every gradient."""

from __future__ import annotations

import math

import pytest
import torch
from cases import CAUSAL, Backward, Case, Causal, Forward, mask_name
from checks import assert_exact, inputs_and_options, on_each_device
from numerics import assert_gradients_match, assert_matches, same_bits

import flash_cute

CASES = [
    *(
        Case(64, len_q, len_k, causal, torch.float32, heads_q=4, softcap=softcap)
        for len_q, len_k in ((1, 1), (1, 200), (65, 129), (129, 65), (300, 300))
        for causal in CAUSAL
        for softcap in (0.5, 20.0)
    ),
    *(
        Case(head_dim, 113, 203, True, dtype, softcap=2.0)
        for head_dim in (32, 128, 256)
        for dtype in (torch.float16, torch.bfloat16)
    ),
    # Of a backward's rows with these scores, the log-sum-exp bounds all; some; none.
    *(
        Case(head_dim, 300, 300, True, torch.float32, softcap=softcap, slopes=slopes)
        for head_dim in (64, 128, 256)
        for softcap, slopes in ((50.0, None), (12.0, None), (50.0, "head"))
    ),
    Case(128, 203, 113, "top_left", torch.float64, softcap=1.0),
    Case(256, 70, 90, dtype=torch.float32, window=(20, 5), softcap=3.0),
]


@pytest.mark.kernel
@pytest.mark.parametrize(("device", "case"), on_each_device(CASES))
@pytest.mark.parametrize("dlse", [False, True])
def test_exact(
    device: str, case: Case, dlse: bool, backend: str | None, fwd: Forward, bwd: Backward, rng: torch.Generator
) -> None:
    assert_exact(case, device, fwd, bwd, rng, dlse=dlse, backend=backend)


@pytest.mark.kernel
@pytest.mark.parametrize("head_dim", [32, 64, 128, 192, 256])
@pytest.mark.parametrize("slopes", [None, "head"])
def test_rows_near_and_far_from_the_cap(
    device: str,
    head_dim: int,
    slopes: str | None,
    backend: str | None,
    fwd: Forward,
    bwd: Backward,
    rng: torch.Generator,
) -> None:
    """Kernels choose how to compute tanh by the scores of a tile or a warp: tiles of either kind and of both."""
    case = Case(head_dim, 449, 321, False, torch.bfloat16, heads_q=4, softcap=40.0, slopes=slopes)
    (q, k, v), options = inputs_and_options(case, device, rng)
    factors = torch.ones(449, 1)
    factors[64:128] = 4
    factors[128:256] = 16
    factors[256:] = 2.0 ** torch.randint(-3, 5, (193, 1), generator=rng)
    q *= factors.to(q)
    out, lse = fwd(q, k, v, **options)
    assert_matches(out, lse, q, k, v, **options)
    dout, _ = case.flow(device, rng)
    assert_gradients_match(bwd(dout, q, k, v, **options), dout, q, k, v, **options)


@pytest.mark.kernel
def test_nothing_is_above_the_cap(device: str, backend: str | None, fwd: Forward, rng: torch.Generator) -> None:
    """Scores of hundreds, which tanh takes to its ends: a row whose scores are alike is the mean of v."""
    (q, k, v), options = inputs_and_options(Case(64, 65, 129, softcap=0.25), device, rng)
    out, lse = fwd(30 * q, k, v, **options)
    assert ((lse - math.log(129)).abs() <= 0.25 + 1e-4).all()
    out, lse = fwd(30 * q, torch.ones_like(k), v, **options)
    torch.testing.assert_close(out.float(), v.float().mean(2, keepdim=True).expand_as(out), rtol=0, atol=2e-3)


@pytest.mark.kernel
def test_far_above_the_scores_it_changes_nothing(
    device: str, backend: str | None, fwd: Forward, rng: torch.Generator
) -> None:
    (q, k, v), options = inputs_and_options(Case(64, 65, 129, softcap=1e4), device, rng)
    for given, plain in zip(fwd(q, k, v, **options), fwd(q, k, v), strict=True):
        torch.testing.assert_close(given, plain, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("causal", CAUSAL, ids=mask_name)
def test_gradcheck(causal: Causal, rng: torch.Generator) -> None:
    q, k, v = Case(6, 5, 7, dtype=torch.float64, heads_q=4).inputs("cpu", rng)
    leaves = [x.requires_grad_() for x in (3 * q, k, v)]
    assert torch.autograd.gradcheck(lambda *x: flash_cute.fwd(*x, causal, softcap=1.5), leaves)


def test_saturated_scores_have_no_gradient(rng: torch.Generator) -> None:
    """1 - tanh^2 is 0 in float32 where a score is 20 caps away, and q and k get nothing."""
    q, k, v = (x.abs() + 1 for x in Case(64, 9, 11, dtype=torch.float32).inputs("cpu", rng))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    dq, dk, dv = torch.autograd.grad(flash_cute.attention(*leaves, scale=1.0, softcap=0.5).square().sum(), leaves)
    assert (dq == 0).all() and (dk == 0).all() and (dv != 0).all()


def test_an_int_is_a_number(rng: torch.Generator) -> None:
    q, k, v = Case(16, 9, 11).inputs("cpu", rng)
    assert same_bits(flash_cute.fwd(q, k, v, softcap=2), flash_cute.fwd(q, k, v, softcap=2.0))
