"""Every head dim works: multiples of 8 as they stand, all others padded once."""

from __future__ import annotations

import math

import pytest
import torch
from cases import (
    CPU_DTYPES,
    CUDA_DTYPES,
    NATIVE_HEAD_DIMS,
    PADDED_HEAD_DIMS,
    Case,
    Forward,
    params,
    plan,
    sampled_dtypes,
)
from numerics import assert_matches, same_bits

LENGTHS = ((113, 203),)
CPU_HEAD_DIMS = (1, 3, 8, 20, 33, 80, 100, 136, 255, 256, 320)
CPU = list(sampled_dtypes(CPU_HEAD_DIMS, LENGTHS, CPU_DTYPES))
CUDA = list(sampled_dtypes(NATIVE_HEAD_DIMS + PADDED_HEAD_DIMS, LENGTHS, CUDA_DTYPES))


@pytest.mark.kernel
@pytest.mark.parametrize(("device", "case"), params(cpu=CPU, cuda=CUDA))
def test_exact(device: str, case: Case, fwd: Forward, rng: torch.Generator) -> None:
    q, k, v = case.inputs(device, rng)
    assert_matches(*fwd(q, k, v, case.causal), q, k, v, case.causal)


@pytest.mark.kernel
@pytest.mark.sanitizer
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("head_dim", [8, 40, 72, 100, 104, 136, 200])
def test_between_the_instances(device: str, head_dim: int, fwd: Forward, rng: torch.Generator) -> None:
    q, k, v = Case(head_dim, 65, 129).inputs(device, rng)
    assert_matches(*fwd(q, k, v, True), q, k, v, True)


@pytest.mark.kernel
@pytest.mark.parametrize("head_dim", PADDED_HEAD_DIMS)
def test_padding_keeps_the_scale_of_the_given_head_dim(
    device: str, head_dim: int, fwd: Forward, rng: torch.Generator
) -> None:
    q, k, v = Case(head_dim, 17, 33).inputs(device, rng)
    assert same_bits(fwd(q, k, v), fwd(q, k, v, scale=1 / math.sqrt(head_dim)))


@pytest.mark.parametrize("head_dim", NATIVE_HEAD_DIMS)
def test_multiples_of_8_are_read_in_place(head_dim: int) -> None:
    q = torch.empty(1, 1, 16, head_dim, dtype=torch.float16)
    made = plan(q, q, q, capability=80)
    assert made["head_dim"] == head_dim
    assert made["kernel_head_dim"] >= head_dim
    assert set(made["copies"].values()) == {None}


@pytest.mark.parametrize("head_dim", PADDED_HEAD_DIMS)
def test_padding_is_said(head_dim: int) -> None:
    q = torch.empty(1, 1, 16, head_dim, dtype=torch.float16)
    made = plan(q, q, q, capability=80)
    assert made["head_dim"] == head_dim
    for name in ("q", "k", "v", "out"):
        assert made["copies"][name], f"the plan does not say that {name} is padded"
