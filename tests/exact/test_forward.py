"""out and lse are exact, over every compiled instance, mask, dtype and the lengths around tile edges."""

from __future__ import annotations

import pytest
import torch
from cases import (
    CPU_DTYPES,
    CUDA_DTYPES,
    EDGE_LENGTHS,
    INSTANCE_HEAD_DIMS,
    LENGTHS,
    LONG_LENGTHS,
    SANITIZER_CASES,
    TINY_LENGTHS,
    Case,
    Forward,
    cross,
    params,
    sampled_dtypes,
)
from numerics import assert_matches

import flash_cute

pytestmark = pytest.mark.kernel

CPU = [
    *cross((64,), TINY_LENGTHS + EDGE_LENGTHS, CPU_DTYPES),
    *sampled_dtypes((32, 128), EDGE_LENGTHS + LONG_LENGTHS, CPU_DTYPES[2:]),
]
CUDA = sorted({*cross(INSTANCE_HEAD_DIMS, LENGTHS, CUDA_DTYPES), *SANITIZER_CASES}, key=str)


@pytest.mark.parametrize(("device", "case"), params(cpu=CPU, cuda=CUDA))
def test_exact(device: str, case: Case, fwd: Forward, rng: torch.Generator) -> None:
    q, k, v = case.inputs(device, rng)
    assert_matches(*fwd(q, k, v, case.causal), q, k, v, case.causal)


def test_float64_stays_float64(rng: torch.Generator) -> None:
    q, k, v = Case(64, 113, 203, dtype=torch.float64).inputs("cpu", rng)
    for causal in (False, True, "top_left"):
        out, lse = flash_cute.fwd(q, k, v, causal)
        expected_out, expected_lse = flash_cute.reference.attention(q, k, v, causal)
        torch.testing.assert_close(out, expected_out, rtol=0, atol=1e-12)
        torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-12)


def test_inputs_are_not_changed(device: str, fwd: Forward, rng: torch.Generator) -> None:
    inputs = Case(64, 113, 203).inputs(device, rng)
    before = [x.clone() for x in inputs]
    fwd(*inputs, True)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))
