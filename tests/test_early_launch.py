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
    "drawn by pairs": (100, 100, 600, 600, 512, True),
}


def make_call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, backend: str | None, packed: bool
) -> Callable[[], Results]:
    """A forward; `packed`: the rows are those of two sequences."""
    if not packed:
        return lambda: flash_cute.fwd(q, k, v, causal, backend=backend)
    cu_seqlens = torch.tensor([0, q.shape[2] // 3, q.shape[2]], dtype=torch.int32, device=q.device)
    rows_q, rows_k, rows_v = (x[0].transpose(0, 1) for x in (q, k, v))  # (rows, heads, head dim)
    return lambda: flash_cute.varlen_fwd(rows_q, rows_k, rows_v, cu_seqlens, cu_seqlens, causal, backend=backend)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_between_other_kernels(
    shape: tuple[int, int, int, int, int, bool], packed: bool, backend: str | None, rng: torch.Generator
) -> None:
    """In a stream and in a graph: k and v are written right before each call, and overwritten right after."""
    heads_q, heads_kv, len_q, len_k, head_dim, causal = shape
    if packed and not causal:
        pytest.skip("packed sequences are not split")
    q, k, v = (
        torch.randn(1, heads, length, head_dim, generator=rng).to("cuda", torch.float16)
        for heads, length in ((heads_q, len_q), (heads_kv, len_k), (heads_kv, len_k))
    )
    made = plan(q, k, v, causal, backend=backend)
    if made["backend"] == "sm90":
        assert made["workspace_bytes"] > 0  # which is zeroed
    keys, values = torch.empty_like(k), torch.empty_like(v)
    call = make_call(q, keys, values, causal, backend, packed)
    expected = []
    for turn in (0, 1):
        keys.copy_(k.roll(turn, 2))
        values.copy_(v.roll(turn, 2))
        torch.cuda.synchronize()
        expected.append(call())
        torch.cuda.synchronize()

    def calls() -> list[Results]:
        results = []
        for turn in range(8):
            keys.copy_(k.roll(turn % 2, 2))
            values.copy_(v.roll(turn % 2, 2))
            results.append(call())
            keys.fill_(torch.nan)
            values.fill_(torch.nan)
        return results

    results = calls()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = calls()
    for _ in range(3):
        for result in replayed:
            result[0].fill_(torch.nan)
        graph.replay()
    for turn, (one, other) in enumerate(zip(results, replayed, strict=True)):
        assert same_bits(one, expected[turn % 2]) and same_bits(other, expected[turn % 2])
