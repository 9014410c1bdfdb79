"""What each planned kernel asks of a chip fits on it, with the occupancy that its plan claims."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import CUDA_DTYPES, INSTANCE_HEAD_DIMS, Causal, backward_plan, plan

HEAD_DIMS = (8, 40, *INSTANCE_HEAD_DIMS, 320, 512, 576, 1024)

# Compute capability: KB of shared memory a CTA may have, and an SM has (1 KB per CTA is the driver's).
SHARED_KB = {
    80: (163, 164),
    86: (99, 100),
    87: (163, 164),
    89: (99, 100),
    90: (227, 228),
    100: (227, 228),
    120: (99, 100),
}
REGISTERS = 65536  # per SM
THREADS = {80: 2048, 86: 1536, 87: 1536, 89: 1536, 90: 2048, 100: 2048, 120: 1536}  # per SM


@pytest.mark.parametrize("backend", ["auto", "sm80"])
@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("capability", SHARED_KB)
def test_fits(capability: int, head_dim: int, causal: Causal, dtype: torch.dtype, backend: str) -> None:
    q = torch.empty(1, 2, 1024, head_dim, dtype=dtype)
    made = plan(q, q, q, causal, backend=backend, capability=capability)
    _assert_fits(made, capability, head_dim)


@pytest.mark.parametrize("backend", ["auto", "sm80"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("capability", SHARED_KB)
def test_backward_fits(capability: int, head_dim: int, causal: Causal, backend: str) -> None:
    q = torch.empty(1, 2, 1024, head_dim, dtype=torch.float16)
    for options in ({}, {"softcap": 2.0}):
        made = backward_plan(q, q, q, causal, backend=backend, capability=capability, **options)
        _assert_fits(made, capability, head_dim)


def _assert_fits(made: dict[str, Any], capability: int, head_dim: int) -> None:
    a_cta, an_sm = (1024 * kb for kb in SHARED_KB[capability])
    ctas = made["ctas_per_sm"]
    assert made["kernel_head_dim"] >= head_dim
    assert ctas >= 1
    assert 0 < made["smem_bytes"] <= a_cta
    assert ctas * (made["smem_bytes"] + 1024) <= an_sm
    assert made["threads"] % 32 == 0
    assert made["threads"] <= 1024
    assert ctas * made["threads"] <= THREADS[capability]
    # 255 registers is the most a thread can have: the budget may not be below what a mainloop needs.
    assert REGISTERS // (ctas * made["threads"]) >= 64
    assert made["block_m"] % 16 == 0
    assert made["block_n"] % 8 == 0
    assert made["stages"] >= 1


def test_plan_is_a_function_of_the_shapes() -> None:
    q = torch.empty(2, 8, 1000, 128, dtype=torch.float16)
    other = torch.empty(2, 1000, 8, 128, dtype=torch.float16).transpose(1, 2)
    assert plan(q, q, q, True, capability=90) == plan(q, q, q, True, capability=90)
    assert plan(q, q, q, True, capability=90) == plan(other, other, other, True, capability=90)
