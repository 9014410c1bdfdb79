"""Key tiles of the last wave, whose rows several multiprocessors share."""

from __future__ import annotations

import math

import pytest
import torch
from cases import Backward, Case, backward_head_dims, backward_plan
from layouts import surrounded
from numerics import assert_gradients_match, bits

import flash_cute

pytestmark = pytest.mark.kernel

CUDA_ONLY = [pytest.param("cuda", marks=pytest.mark.cuda)]
# Batch, query heads, key heads, rows, keys. On 132 multiprocessors ranges have part of a tile and begin another.
SMALL, LARGE = (1, 58, 58, 2048, 1536), (1, 57, 57, 2048, 1536)
GROUPED, ODD = (1, 134, 67, 2040, 1020), (2, 68, 34, 2000, 1001)
SHAPES = {32: (SMALL, GROUPED), 64: (SMALL, ODD), 96: (LARGE, ODD), 128: (LARGE, GROUPED)}


def case_of(shape: tuple[int, ...], head_dim: int, dtype: torch.dtype = torch.bfloat16) -> Case:
    batch, heads_q, heads_kv, len_q, len_k = shape
    return Case(head_dim, len_q, len_k, False, dtype, batch, heads_q, heads_kv)


def assert_is_split(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: str | None) -> None:
    """The shapes are there for sm90 to split them, on 132 multiprocessors; sm80 splits nothing."""
    made = backward_plan(q, k, v, backend=backend)
    of_an_h100 = torch.cuda.get_device_properties(q.device).multi_processor_count == 132
    if made["backend"] != "sm90" or of_an_h100:
        assert (made["split_tiles"] > 0) == (made["backend"] == "sm90")


@pytest.mark.parametrize("device", CUDA_ONLY)
@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("head_dim", SHAPES)
def test_exact(
    device: str, head_dim: int, number: int, bwd: Backward, backend: str | None, rng: torch.Generator
) -> None:
    dtype = (torch.bfloat16, torch.float16)[(number + head_dim // 32) % 2]
    q, k, v = case_of(SHAPES[head_dim][number], head_dim, dtype).inputs(device, rng)
    assert_is_split(q, k, v, backend)
    dout = torch.randn(q.shape, generator=rng).to(q)
    dlse = torch.randn(q.shape[:3], generator=rng).to(device)
    given = bwd(surrounded(dout), surrounded(q), surrounded(k), surrounded(v), dlse=dlse)
    assert_gradients_match(given, dout, q, k, v, dlse=dlse)


@pytest.mark.parametrize("device", CUDA_ONLY)
def test_exact_with_two_head_dims(device: str, bwd: Backward, backend: str | None, rng: torch.Generator) -> None:
    case = Case(192, 2048, 1536, False, torch.bfloat16, 1, 57, 57, head_dim_v=128)
    q, k, v = case.inputs(device, rng)
    assert_is_split(q, k, v, backend)
    dout = torch.randn(*q.shape[:3], 128, generator=rng).to(q)
    assert_gradients_match(bwd(dout, q, k, v), dout, q, k, v)


@pytest.mark.parametrize("device", CUDA_ONLY)
def test_a_nan_stays_in_its_head(device: str, bwd: Backward, backend: str | None, rng: torch.Generator) -> None:
    """Of the first heads, in whose place the parts go, and of the last, which are split."""
    q, k, v = case_of(SMALL, 64).inputs(device, rng)
    assert_is_split(q, k, v, backend)
    dout = torch.randn(q.shape, generator=rng).to(q)
    for head in (0, 57):
        poisoned = q.clone()
        poisoned[0, head, 1000] = math.nan
        for gradient in bwd(dout, poisoned, k, v):
            assert gradient[0, head].isnan().any()
            others = [other for other in range(58) if other != head]
            assert gradient[0, others].isfinite().all()


@pytest.mark.parametrize("device", CUDA_ONLY)
def test_graph_replays_and_streams(device: str, backend: str | None, rng: torch.Generator) -> None:
    """Each launch hands its parts over in its own workspace, whose counters are cleared each time."""
    problems = []
    for shape in (LARGE, GROUPED, ODD):
        q, k, v = case_of(shape, 128).inputs(device, rng)
        assert_is_split(q, k, v, backend)
        dout = torch.randn(q.shape, generator=rng).to(q)
        problems.append((dout, q, k, v, *flash_cute.fwd(q, k, v, backend=backend)))
    expected = [flash_cute.bwd(*inputs, backend=backend) for inputs in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    graphs = []
    for stream, inputs in zip(streams, problems, strict=True):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            results = flash_cute.bwd(*inputs, backend=backend)
        graphs.append((stream, graph, results))
    for _ in range(20):
        for stream, graph, _ in graphs:
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for (_, _, results), first in zip(graphs, expected, strict=True):
        for result, one in zip(results[1:], first[1:], strict=True):
            assert torch.equal(bits(result), bits(one))
        torch.testing.assert_close(results[0], first[0], rtol=0.02, atol=1e-4)


@pytest.mark.skipif(not backward_head_dims("sm90"), reason="this build has no sm90 backward")
@pytest.mark.parametrize(
    "shape, head_dim, split",
    [
        ((1, 16, 16, 16384, 16384), 128, 68),
        ((2, 32, 8, 8192, 8192), 128, 100),
        ((1, 32, 32, 16384, 16384), 64, 4),
        ((16, 16, 16, 1024, 1024), 128, 0),  # key tile 0 of a head would be among them
        ((4, 33, 33, 4096, 4096), 128, 0),  # whole waves
        ((1, 4, 4, 4096, 4096), 128, 0),  # less than a wave
        ((1, 16, 16, 16384, 16384), 256, 0),  # dQ is in registers
    ],
    ids=str,
)
def test_what_is_split(shape: tuple[int, ...], head_dim: int, split: int) -> None:
    batch, heads_q, heads_kv, len_q, len_k = shape
    q = torch.empty(batch, heads_q, len_q, head_dim, dtype=torch.bfloat16, device="meta")
    k = torch.empty(batch, heads_kv, len_k, head_dim, dtype=torch.bfloat16, device="meta")
    made = backward_plan(q, k, k, capability=90)
    assert made["split_tiles"] == split and 0 <= made["split_ctas"] <= 132
    assert any("split over" in sentence for sentence in made["reasons"]) == (split > 0)
    assert backward_plan(q, k, k, True, capability=90)["split_tiles"] == 0
    assert backward_plan(q, k, k, deterministic=True, capability=90)["split_tiles"] == 0
