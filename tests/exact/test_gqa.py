"""Grouped and multi-query attention: query head h reads key head h // (Hq // Hkv), and nothing is copied."""

from __future__ import annotations

import pytest
import torch
from cases import CAUSAL, HEADS, Case, Causal, Forward, mask_name, plan
from numerics import assert_matches

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize("causal", CAUSAL, ids=mask_name)
@pytest.mark.parametrize(("heads_q", "heads_kv"), HEADS)
@pytest.mark.parametrize("batch", [1, 3])
def test_exact(
    device: str,
    causal: Causal,
    heads_q: int,
    heads_kv: int,
    batch: int,
    fwd: Forward,
    rng: torch.Generator,
) -> None:
    case = Case(64, 77, 131, causal, torch.float16, batch, heads_q, heads_kv)
    q, k, v = case.inputs(device, rng)
    assert_matches(*fwd(q, k, v, causal), q, k, v, causal)


@pytest.mark.sanitizer
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.cuda)])
def test_small(device: str, fwd: Forward, rng: torch.Generator) -> None:
    q, k, v = Case(64, 65, 65, heads_q=6, heads_kv=2).inputs(device, rng)
    assert_matches(*fwd(q, k, v, True), q, k, v, True)


def test_each_head_tells_its_own(device: str, fwd: Forward) -> None:
    """Values that are constant a key head show which one each query head read."""
    q = torch.randn(2, 12, 65, 64, device=device).half()
    k = torch.randn(2, 3, 70, 64, device=device).half()
    v = torch.arange(6, device=device).view(2, 3, 1, 1).expand(2, 3, 70, 64).half()
    out, _ = fwd(q, k, v)
    expected = torch.arange(6, device=device).view(2, 3, 1, 1, 1).expand(2, 3, 4, 65, 64)
    torch.testing.assert_close(out.view(2, 3, 4, 65, 64).float(), expected.float(), rtol=2e-3, atol=0)


def test_plan_copies_nothing() -> None:
    q = torch.empty(1, 32, 128, 128, dtype=torch.bfloat16)
    k = torch.empty(1, 4, 128, 128, dtype=torch.bfloat16)
    assert set(plan(q, k, k, capability=80)["copies"].values()) == {None}
