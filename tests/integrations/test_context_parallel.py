"""PyTorch's context parallelism calls the aten flash operators for its parts: what comes out of it with flash_cute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

# Two processes that fork from one script, each with its half of the rows; what they find is printed by the first.
SCRIPT = """
import torch, torch.distributed as dist, torch.multiprocessing as mp, torch.nn.functional as F
from flash_cute.integrations import _aten, sdpa

def run(rank, store, device):
    torch.set_num_threads(1)
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
        backend = "nccl"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard, set_rotate_method
    mesh = init_device_mesh(device, (2,))
    served = "aten::_scaled_dot_product_flash_attention"
    if device == "cuda":
        dtype, head_dim, allowed = torch.bfloat16, 64, 2e-2
        sdpa.enable(strict=True)
        def attention(q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)  # which context_parallel has replaced
    else:
        # PyTorch has no CPU kernels of these operators: there they get ours, as on CUDA.
        dtype, head_dim, allowed = torch.float32, 16, 1e-5
        library = torch.library.Library("aten", "IMPL")
        for name in ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"):
            kernel = _aten.make_override(name, _aten.OPERATORS[name], None, True, frozenset)
            library.impl(name, kernel, "CPU", with_keyset=True)
        def attention(*tensors):
            whole = [DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in tensors]
            return torch.ops.aten._scaled_dot_product_flash_attention(*whole, 0.0, True)[0].to_local()

    torch.manual_seed(5)
    q, k, v, dout = (torch.randn(2, 4, 128, head_dim).to(device, dtype) for _ in range(4))
    wide = [x.float().clone().requires_grad_() for x in (q, k, v)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(*wide, is_causal=True)
    expected = [expected.detach(), *torch.autograd.grad(expected, wide, dout.float())]
    for method in ("allgather", "alltoall"):
        set_rotate_method(method)
        sdpa.report(reset=True)
        tensors = [x.clone() for x in (q, k, v, dout)]
        with context_parallel(mesh, buffers=tensors, buffer_seq_dims=[2] * 4, no_restore_buffers=set(tensors)):
            assert tensors[0].shape[2] == 64
            leaves = [x.clone().requires_grad_() for x in tensors[:3]]
            with torch.enable_grad():
                out = attention(*leaves)
                parts = [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]
        counted = sdpa.report().data
        assert counted["served"] == {served: 2} and counted["passed_on"] == {}, counted
        given = context_parallel_unshard(mesh, [x.contiguous() for x in parts], [2] * 4)
        for name, x, y in zip(("out", "dq", "dk", "dv"), given, expected, strict=True):
            error = ((x.float() - y).abs().max() / y.abs().max()).item()
            assert error <= allowed, (method, name, error)
        if rank == 0:
            print(method, "ok")
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.start_processes(run, (STORE, DEVICE), nprocs=2, start_method="fork")
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
def test_two_processes(device: str, tmp_path: Path, python: Callable[..., str]) -> None:
    """Causal, rows dealt in head and tail pieces: parts of keys and of rows, merged by their LSE, and their gradients.

    On GPUs PyTorch's own function is called, within its context, after `enable()`. It takes two: NCCL wants one per
    process, and gloo crashes on CUDA tensors there.
    """
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("one GPU: NCCL wants one per process")
    pytest.importorskip("torch.distributed.tensor.experimental._attention")
    script = SCRIPT.replace("STORE", repr(str(tmp_path / "store"))).replace("DEVICE", repr(device))
    assert python(script, timeout=300).splitlines() == ["allgather ok", "alltoall ok"]
