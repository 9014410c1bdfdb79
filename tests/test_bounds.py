"""Nothing is written but out and lse: the memory round them keeps its bytes."""

from __future__ import annotations

import os

import pytest
import torch
from cases import INSTANCE_HEAD_DIMS, Case, Causal

import flash_cute

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.cuda,
    pytest.mark.skipif(
        os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "0") == "1",
        reason="without the caching allocator the outputs have no neighbours to watch",
    ),
]

SENTINEL = 0xA5
MIB = 1 << 20


class _Memory:
    """Device memory by address, for torch.as_tensor."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("len_q", "len_k"), [(1, 1), (65, 77), (113, 203), (129, 31)])
@pytest.mark.parametrize("head_dim", [8, *INSTANCE_HEAD_DIMS])
def test_memory_round_the_outputs(
    device: str,
    head_dim: int,
    len_q: int,
    len_k: int,
    causal: Causal,
    backend: str | None,
    rng: torch.Generator,
) -> None:
    """Outputs of less than 1 MiB come from a 2 MiB segment of a memory pool that is all sentinel."""
    q, k, v = Case(head_dim, len_q, len_k, batch=1).inputs(device, rng)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        whole = [torch.full((MIB,), SENTINEL, dtype=torch.uint8, device=device) for _ in range(2)]
        start = min(x.data_ptr() for x in whole)
        assert {x.data_ptr() for x in whole} == {start, start + MIB}, "expected one 2 MiB segment"
        del whole
        before = torch.full((4096,), SENTINEL, dtype=torch.uint8, device=device)
        out, lse = flash_cute.fwd(q, k, v, causal, backend=backend)
    segment = torch.as_tensor(_Memory(start, 2 * MIB), device=device).clone()
    for name, x in (("out", out), ("lse", lse)):
        first = x.data_ptr() - start
        assert 0 <= first < 2 * MIB, f"{name} is not in the watched segment"
        segment[first : first + x.untyped_storage().nbytes()] = SENTINEL
    written = (segment != SENTINEL).nonzero().flatten()
    assert written.numel() == 0, f"{written.numel()} bytes from {written[:4].tolist()} on changed"
    del before, out, lse
