"""A softcap's scores near and far from the cap, which the sm90 forward computes in different ways."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from cases import Case, Forward, Inputs
from checks import on_each_device
from numerics import assert_matches
from repository import ROOT

HEADER = ROOT / "csrc/contract/softcap.h"
SHAPES = [
    *(
        Case(head_dim, 333, 777, dtype=dtype)
        for head_dim in (32, 64, 96, 128)
        for dtype in (torch.float16, torch.bfloat16)
    ),
    *(Case(head_dim, 300, 500, True, torch.bfloat16, heads_q=4) for head_dim in (64, 128, 256)),
    Case(128, 500, 200, True, torch.bfloat16),  # rows that see no key
    Case(64, 400, 1500, dtype=torch.bfloat16, heads_q=8, window=(70, 9)),  # a head per warpgroup
    Case(192, 130, 300, dtype=torch.bfloat16, head_dim_v=128),
    Case(128, 192, 9000, dtype=torch.float16, batch=1),  # tiles split by keys
]
ON_CPU = [  # which has one way for all scores
    Case(64, 33, 77, dtype=torch.float32),
    Case(128, 150, 60, True, torch.bfloat16),
    Case(64, 100, 300, dtype=torch.float64, heads_q=8, window=(70, 9)),
]


def spread(inputs: Inputs, factor: float) -> Inputs:
    q, k, v = inputs
    return q * factor, k, v


def with_sign(inputs: Inputs, sign: int) -> Inputs:
    """All scores of one sign, large ones and small ones in every row."""
    q, k, v = inputs
    sizes = torch.arange(k.shape[2], device=k.device) * 29 % 97 / 97
    return q.abs() * 0.5, sign * k.abs() * sizes.to(k.dtype)[:, None], v


@pytest.mark.kernel
@pytest.mark.parametrize("factor", [0.02, 1.0, 5.0, 40.0])
@pytest.mark.parametrize("cap", [2.0, 15.0, 30.0, 50.0])
@pytest.mark.parametrize(("device", "case"), on_each_device(ON_CPU, SHAPES))
def test_near_and_far_from_the_cap(
    device: str, case: Case, cap: float, factor: float, backend: str | None, fwd: Forward, rng: torch.Generator
) -> None:
    inputs = spread(case.inputs(device, rng), factor)
    options: dict[str, Any] = {"softcap": cap, "window": case.window}
    assert_matches(*fwd(*inputs, case.causal, **options), *inputs, case.causal, **options)


@pytest.mark.kernel
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("cap", [5.0, 50.0])
@pytest.mark.parametrize(("device", "case"), on_each_device(ON_CPU, SHAPES))
def test_scores_of_one_sign(
    device: str, case: Case, cap: float, sign: int, backend: str | None, fwd: Forward, rng: torch.Generator
) -> None:
    inputs = with_sign(case.inputs(device, rng), sign)
    options: dict[str, Any] = {"softcap": cap, "window": case.window}
    assert_matches(*fwd(*inputs, case.causal, **options), *inputs, case.causal, **options)


@pytest.mark.kernel
@pytest.mark.parametrize("score", [-8.0, 8.0, 7.96875, 8.0625, -0.0])  # of a cap of 16: the limit, and beside it
@pytest.mark.parametrize(("device", "case"), on_each_device([Case(d, 200, 400) for d in (64, 128)]))
def test_scores_at_the_polynomials_limit(
    device: str, case: Case, score: float, backend: str | None, fwd: Forward, rng: torch.Generator
) -> None:
    """Exactly: one column of q and k alone is not 0. Every other key's score is 0."""
    q, k, v = case.inputs(device, rng)
    q.zero_()[..., 0], k.zero_()[:, :, ::2, 0] = 1, score
    options: dict[str, Any] = {"softcap": 16.0, "scale": 1.0}
    assert_matches(*fwd(q, k, v, **options), q, k, v, **options)


@pytest.mark.kernel
@pytest.mark.parametrize(("device", "case"), on_each_device([Case(d, 100, 700) for d in (64, 128, 256)]))
def test_a_large_score_after_small_ones(
    device: str, case: Case, backend: str | None, fwd: Forward, rng: torch.Generator
) -> None:
    """Key tiles are computed from the last to the first: the maximum grows from tile to tile, from below -cap / 2."""
    q, k, v = case.inputs(device, rng)
    q, k = q.abs() * 0.2 + 0.5, k.sign().abs() * torch.linspace(3, -3, 700, device=device)[:, None]
    for cap in (20.0, 50.0):
        assert_matches(*fwd(q, k.to(q), v, softcap=cap), q, k.to(q), v, softcap=cap)


@pytest.mark.kernel
@pytest.mark.parametrize(("device", "case"), on_each_device([Case(d, 150, 600) for d in (64, 128, 256)]))
def test_infinities_and_nan(device: str, case: Case, backend: str | None, fwd: Forward, rng: torch.Generator) -> None:
    """An infinite score is capped; NaN reaches the rows that see it, and no other row."""
    q, k, v = case.inputs(device, rng)
    q[..., 0] += torch.where(q[..., 0] < 0, -1, 1)  # not near 0: what is infinite is past any cap also at 6e4
    k[:, 0, 5, 0], k[:, 1, 590, 3] = math.inf, math.nan
    finite = k.nan_to_num(nan=0.0, posinf=6e4)
    out, lse = fwd(q, k, v, softcap=50.0)
    want, want_lse = fwd(q, finite, v, softcap=50.0)
    torch.testing.assert_close(out[:, 0], want[:, 0], rtol=0, atol=2e-3)
    torch.testing.assert_close(lse[:, 0], want_lse[:, 0], rtol=0, atol=2e-3)
    assert out[:, 1].isnan().all() and lse[:, 1].isnan().all()
    out, lse = fwd(q, k, v, True, softcap=50.0)
    blind = torch.arange(150, device=device) + 450 < 590
    assert out[:, 1, blind].isfinite().all() and lse[:, 1, blind].isfinite().all() and out[:, 1, ~blind].isnan().all()


def test_floor() -> None:
    """What softcap.h says of the error of terms below the polynomial's limit, evaluated."""
    if not HEADER.exists():
        pytest.skip("the sources are not beside the tests")
    numbers = re.search(r"kC\[\] = \{(.*?)\}", HEADER.read_text())
    assert numbers is not None
    c = [float(x) for x in numbers[1].split(",")]
    y = torch.linspace(0.5, 12, 200_001, dtype=torch.float64)
    tanh, polynomial = y.tanh(), y * (c[0] + c[1] * y**2 + c[2] * y**4)
    assert (polynomial.diff() > 0).all() and (polynomial[1:] > tanh[1:] * (1 - 2.3e-5)).all()
    for cap_log2 in (0.1, 3.0, 27.9, 28.0, 43.3, 72.1, 145.0, 145.1, 600.0):
        error = (torch.exp2(-cap_log2 * tanh) - torch.exp2(-cap_log2 * polynomial)).max()
        assert error.log2() <= -0.462 * cap_log2 - (9 if 28 <= cap_log2 <= 145 else 0)
