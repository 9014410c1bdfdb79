"""A kernel that starts while the one that zeroes its counters runs: it must see what was computed before both, and what
comes after must wait for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import plan
from numerics import same_bits

import flash_cute

pytestmark = [pytest.mark.kernel, pytest.mark.cuda]

Results = tuple[torch.Tensor, torch.Tensor]
# name: heads of q, heads of k, rows, keys, head dim, causal
SHAPES = {
    "split": (8, 8, 64, 8192, 64, False),
    "split waves": (140, 20, 64, 3000, 128, False),
    "drawn": (300, 300, 600, 600, 64, True),
    "drawn, head dim in chunks": (100, 100, 600, 600, 512, True),
    "drawn by pairs": (50, 50, 600, 600, 1024, True),
}


@pytest.fixture
def device() -> str:
    """What conftest's `backend` asks for: these tests make their tensors themselves."""
    return "cuda"


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_between_other_kernels(
    shape: tuple[int, int, int, int, int, bool], packed: bool, backend: str | None, rng: torch.Generator
) -> None:
    """In a stream and in a graph: all inputs are written right before each call, and overwritten right after."""
    heads_q, heads_kv, len_q, len_k, head_dim, causal = shape
    if packed and not causal:
        pytest.skip("packed sequences are not split")
    whole = [
        torch.randn(1, heads, length, head_dim, generator=rng).to("cuda", torch.float16)
        for heads, length in ((heads_q, len_q), (heads_kv, len_k), (heads_kv, len_k))
    ]
    inputs = [torch.empty_like(x) for x in whole]
    offsets = torch.tensor([0, len_q // 3, len_q], dtype=torch.int32, device="cuda")
    cu_seqlens = torch.empty_like(offsets)
    rows = [x[0].transpose(0, 1) for x in inputs]  # (rows, heads, head dim)
    zeroed = plan(*inputs, causal, backend=backend)["workspace_bytes"]
    if packed:
        explained = flash_cute.explain(*rows, True, backend=backend, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
        zeroed = explained.data["workspace_bytes"]
    if backend != "sm80" and torch.cuda.get_device_properties(0).multi_processor_count == 132:
        assert zeroed > 0

    def write(turn: int) -> None:
        for x, values in zip(inputs, whole, strict=True):
            x.copy_(values.roll(turn, 2))
        cu_seqlens.copy_(offsets)

    def call() -> Results:
        if packed:
            return flash_cute.varlen_fwd(*rows, cu_seqlens, cu_seqlens, True, backend=backend)
        return flash_cute.fwd(*inputs, causal, backend=backend)

    expected = []
    for turn in (0, 1):
        write(turn)
        torch.cuda.synchronize()
        expected.append(call())
        torch.cuda.synchronize()

    def calls() -> list[Results]:
        results = []
        for turn in range(8):
            write(turn % 2)
            results.append(call())
            for x in inputs:
                x.fill_(torch.nan)
            cu_seqlens.zero_()
        return results

    results = calls()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = calls()
    for _ in range(3):
        for result in replayed:
            for x in result:
                x.fill_(torch.nan)
        graph.replay()
    for turn, (one, other) in enumerate(zip(results, replayed, strict=True)):
        assert same_bits(one, expected[turn % 2]) and same_bits(other, expected[turn % 2])


def test_what_zeroes(backend: str | None) -> None:
    """In a graph a kernel, beside whose end the forward starts; outside of one a memset, which costs the host less."""
    if backend == "sm80" or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the sm80 kernels' dense calls zero nothing")
    q, k, v = (torch.randn(1, 8, length, 64, device="cuda", dtype=torch.float16) for length in (64, 8192, 8192))
    flash_cute.fwd(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        flash_cute.fwd(q, k, v)

    def ran(call: Callable[[], object]) -> list[str]:
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
            torch.cuda.synchronize()
        events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        return [event.name for event in sorted(events, key=lambda event: event.time_range.start)]

    streamed, replayed = ran(lambda: flash_cute.fwd(q, k, v)), ran(graph.replay)
    assert len(streamed) == len(replayed) == 2, (streamed, replayed)
    assert streamed[0].startswith("Memset") and "zero_kernel" in replayed[0]
    assert "fwd_kernel" in streamed[1] and "fwd_kernel" in replayed[1]
