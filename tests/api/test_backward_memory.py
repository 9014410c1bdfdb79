"""What a backward takes in memory: its workspace, as the plan says, and what the forward keeps for it."""

from __future__ import annotations

import pytest
import torch
from cases import INSTANCE_HEAD_DIMS, Case, Causal, backward_plan

import flash_cute

pytestmark = pytest.mark.kernel

ON_CUDA = [pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("head_dim", [*INSTANCE_HEAD_DIMS, 40, 100])
def test_workspace(capability: int, head_dim: int) -> None:
    """At most fp32 dq in whole tiles of rows and of the kernel's head dim, two floats per row, and the semaphores: one
    per row tile and one per head. The deterministic mode of sm80 adds the ticket of each key tile."""
    q = torch.empty(2, 8, 1000, head_dim, dtype=torch.float16)
    k = torch.empty(2, 2, 3000, head_dim, dtype=torch.float16)
    default = backward_plan(q, k, k, True, capability=capability)
    heads = 2 * 8
    tiles = heads * -(-1000 // default["block_m"])
    rows = tiles * default["block_m"]
    assert default["workspace_bytes"] <= 4 * rows * (default["kernel_head_dim"] + 2) + 4 * (tiles + heads) + 4 * 128
    strict = backward_plan(q, k, k, True, deterministic=True, capability=capability)
    assert strict["block_n"] == default["block_n"]
    tickets = 2 * 2 * -(-3000 // default["block_n"]) if capability == 80 else 0
    assert 0 <= strict["workspace_bytes"] - default["workspace_bytes"] - 4 * tickets < 128


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("device", ON_CUDA)
def test_memory_of_a_call(device: str, causal: Causal, backend: str | None, rng: torch.Generator) -> None:
    """Beside the gradients a call takes its workspace, as the plan says, and nothing else."""
    q, k, v = Case(128, 2000, 3000, heads_q=8, heads_kv=2).inputs(device, rng)
    out, lse = flash_cute.fwd(q, k, v, causal, backend=backend)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients = flash_cute.bwd(q, q, k, v, out, lse, causal, backend=backend)
    peak = torch.cuda.max_memory_allocated() - before
    planned = backward_plan(q, k, v, causal, backend=backend)["workspace_bytes"]
    slack = 4 << 20  # of four blocks: one that is not worth splitting is up to 1 MiB larger than what was asked for
    assert peak <= planned + sum(x.numel() * 2 for x in gradients) + slack


@pytest.mark.parametrize("device", ON_CUDA)
def test_memory_kept_for_the_backward(device: str, backend: str | None, rng: torch.Generator) -> None:
    """out and lse, besides the inputs."""
    q, k, v = (x.requires_grad_() for x in Case(128, 2000, 3000, heads_q=8, heads_kv=2).inputs(device, rng))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = flash_cute.attention(q, k, v, True, backend=backend)
    kept = torch.cuda.memory_allocated() - before
    assert kept <= 2 * out.numel() + 4 * out.numel() // 128 + (2 << 20)  # blocks that are not split, as above
    out.sum().backward()
