"""Nothing is written but the results and the workspace: the memory round them keeps its bytes."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch
from cases import INSTANCE_HEAD_DIMS, Case, Causal, backward_plan

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


def _read(address: int, size: int) -> torch.Tensor:
    """Device memory by its address, whoever owns it."""
    torch.cuda.synchronize()
    host = torch.empty(size, dtype=torch.uint8)
    status = ctypes.CDLL("libcuda.so.1").cuMemcpyDtoH_v2(
        ctypes.c_void_p(host.data_ptr()), ctypes.c_uint64(address), ctypes.c_size_t(size)
    )
    assert status == 0, f"cuMemcpyDtoH: CUDA error {status}"
    return host


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
    segment = _read(start, 2 * MIB)
    for name, x in (("out", out), ("lse", lse)):
        first = x.data_ptr() - start
        assert 0 <= first < 2 * MIB, f"{name} is not in the watched segment"
        segment[first : first + x.untyped_storage().nbytes()] = SENTINEL
    written = (segment != SENTINEL).nonzero().flatten()
    assert written.numel() == 0, f"{written.numel()} bytes from {written[:4].tolist()} on changed"
    del before, out, lse


@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
@pytest.mark.parametrize(("len_q", "len_k"), [(1, 1), (65, 77), (113, 203), (129, 31)])
@pytest.mark.parametrize("head_dim", [8, *INSTANCE_HEAD_DIMS])
def test_memory_round_the_gradients(
    device: str,
    head_dim: int,
    len_q: int,
    len_k: int,
    deterministic: bool,
    causal: Causal,
    backend: str | None,
    rng: torch.Generator,
) -> None:
    """The workspace is free again after the call, and an allocation of its size gets its place."""
    q, k, v = Case(head_dim, len_q, len_k, batch=1).inputs(device, rng)
    out, lse = flash_cute.fwd(q, k, v, causal, backend=backend)
    plan = backward_plan(q, k, v, causal, deterministic=deterministic, backend=backend)
    workspace = plan["workspace_bytes"]
    if workspace + sum(x.numel() * 2 + 1024 for x in (q, k, v)) + 4096 > MIB:
        pytest.skip("does not fit the watched segment")
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        whole = [torch.full((MIB,), SENTINEL, dtype=torch.uint8, device=device) for _ in range(2)]
        start = min(x.data_ptr() for x in whole)
        assert {x.data_ptr() for x in whole} == {start, start + MIB}, "expected one 2 MiB segment"
        del whole
        before = torch.full((4096,), SENTINEL, dtype=torch.uint8, device=device)
        gradients = flash_cute.bwd(q, q, k, v, out, lse, causal, deterministic=deterministic, backend=backend)
        scratch = torch.empty(workspace, dtype=torch.uint8, device=device)
    segment = _read(start, 2 * MIB)
    for name, x in zip(("dq", "dk", "dv", "workspace"), (*gradients, scratch), strict=True):
        first = x.data_ptr() - start
        assert 0 <= first < 2 * MIB, f"{name} is not in the watched segment"
        segment[first : first + x.untyped_storage().nbytes()] = SENTINEL
    written = (segment != SENTINEL).nonzero().flatten()
    assert written.numel() == 0, f"{written.numel()} bytes from {written[:4].tolist()} on changed"
    del before, gradients, scratch
