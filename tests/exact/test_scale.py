"""scale multiplies q.k; the default is 1/sqrt(D)."""

from __future__ import annotations

import math

import pytest
import torch
from cases import CAUSAL, Case, Causal, Forward, mask_name
from numerics import assert_matches, same_bits

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize("causal", CAUSAL, ids=mask_name)
@pytest.mark.parametrize("scale", [1e-18, 1e-3, 0.1, 0.5, 1.0, 3.0])
def test_exact(device: str, scale: float, causal: Causal, fwd: Forward, rng: torch.Generator) -> None:
    q, k, v = Case(64, 113, 203, dtype=torch.bfloat16).inputs(device, rng)
    assert_matches(*fwd(q, k, v, causal, scale=scale), q, k, v, causal, scale)


@pytest.mark.parametrize("head_dim", [8, 64, 80, 128, 256])
def test_default(device: str, head_dim: int, fwd: Forward, rng: torch.Generator) -> None:
    q, k, v = Case(head_dim, 65, 77).inputs(device, rng)
    assert same_bits(fwd(q, k, v), fwd(q, k, v, scale=1 / math.sqrt(head_dim)))


def test_scale_changes_the_result(device: str, fwd: Forward, rng: torch.Generator) -> None:
    q, k, v = Case(64, 65, 77).inputs(device, rng)
    assert not same_bits(fwd(q, k, v), fwd(q, k, v, scale=0.1251))


def test_integer_scale_is_a_number(device: str, fwd: Forward, rng: torch.Generator) -> None:
    q, k, v = Case(64, 65, 77).inputs(device, rng)
    assert same_bits(fwd(q, k, v, scale=1), fwd(q, k, v, scale=1.0))
