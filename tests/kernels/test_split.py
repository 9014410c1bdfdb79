"""Row tiles whose keys are split over several multiprocessors: few rows and many keys, and last waves."""

from __future__ import annotations

import math

import cases
import pytest
import torch
from cases import INSTANCE_HEAD_DIMS, Case, Causal, Forward, plan
from layouts import surrounded
from numerics import assert_matches, same_bits

import flash_cute
from flash_cute import report

pytestmark = pytest.mark.kernel

CUDA_ONLY = [pytest.param("cuda", marks=pytest.mark.cuda)]
# batch, query heads, key heads, rows, keys
SHAPES = (
    (1, 2, 1, 64, 4096),
    (2, 4, 2, 1, 3001),
    (1, 3, 3, 200, 5000),
    (1, 6, 1, 333, 7777),
    (1, 12, 3, 900, 4000),  # several warpgroups; with a mask, parts of keys that no row of theirs sees
    (1, 5, 1, 2500, 5500),
)
# With whole waves after the split tiles, on 132 multiprocessors; every tile of the table is in one of them.
WAVES = ((1, 140, 20, 64, 3000), (1, 140, 28, 190, 3000), (2, 74, 37, 256, 2500))


def case_of(shape: tuple[int, ...], head_dim: int, causal: Causal = False, dtype: torch.dtype = torch.float16) -> Case:
    batch, heads_q, heads_kv, len_q, len_k = shape
    return Case(head_dim, len_q, len_k, causal, dtype, batch, heads_q, heads_kv)


def assert_is_split(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: Causal, backend: str | None) -> None:
    """The shapes are there for sm90 to split them; sm80, which splits nothing, has to be right on them too."""
    made = plan(q, k, v, causal, backend=backend)
    assert (made["split_tiles"] > 0) == (made["backend"] == "sm90")


@pytest.mark.parametrize("device", CUDA_ONLY)
@pytest.mark.parametrize("dtype", cases.CUDA_DTYPES, ids=cases.dtype_name)
@pytest.mark.parametrize("causal", [False, "bottom_right"], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("head_dim", INSTANCE_HEAD_DIMS)
def test_every_kernel(
    device: str,
    head_dim: int,
    shape: tuple[int, ...],
    causal: Causal,
    dtype: torch.dtype,
    fwd: Forward,
    backend: str | None,
    rng: torch.Generator,
) -> None:
    q, k, v = case_of(shape, head_dim, causal, dtype).inputs(device, rng)
    assert_is_split(q, k, v, causal, backend)
    assert_matches(*fwd(surrounded(q), surrounded(k), surrounded(v), causal), q, k, v, causal)


@pytest.mark.parametrize("device", CUDA_ONLY)
@pytest.mark.parametrize("shape", WAVES, ids=str)
@pytest.mark.parametrize("head_dim", INSTANCE_HEAD_DIMS)
def test_last_waves(
    device: str, head_dim: int, shape: tuple[int, ...], fwd: Forward, backend: str | None, rng: torch.Generator
) -> None:
    q, k, v = case_of(shape, head_dim, dtype=torch.bfloat16).inputs(device, rng)
    if torch.cuda.get_device_properties(device).multi_processor_count == 132:
        assert_is_split(q, k, v, False, backend)
    assert_matches(*fwd(q, k, v), q, k, v)


@pytest.mark.parametrize("device", CUDA_ONLY)
@pytest.mark.parametrize("largest", [0, 1500, 2500, 4095])
def test_parts_of_unlike_size(
    device: str, largest: int, fwd: Forward, backend: str | None, rng: torch.Generator
) -> None:
    """The maximum lies in one part and the others' weights are next to nothing, or grow from part to part."""
    q, k, v = case_of(SHAPES[0], 64).inputs(device, rng)
    assert_is_split(q, k, v, False, backend)
    q = q.abs()
    k = k * torch.linspace(0.1, 1, 4096, device=device)[:, None].half()
    k[:, :, largest] = 3
    assert_matches(*fwd(q, k, v), q, k, v)


@pytest.mark.parametrize("device", CUDA_ONLY)
@pytest.mark.parametrize("begin, end", [(0, 1000), (1000, 3000), (3000, 4096)])
def test_parts_without_weight(
    device: str, begin: int, end: int, fwd: Forward, backend: str | None, rng: torch.Generator
) -> None:
    """Scores of -inf give a part no weight at all, and V's numbers there none either."""
    q, k, v = case_of(SHAPES[0], 64).inputs(device, rng)
    assert_is_split(q, k, v, False, backend)
    q = q.abs() + 0.1
    k[:, :, begin:end, 0] = -math.inf
    out, lse = fwd(q, k, v)
    true_out, true_lse = flash_cute.reference.attention(q, k, v)
    torch.testing.assert_close(out.double(), true_out, rtol=0.01, atol=0.002)
    torch.testing.assert_close(lse.double(), true_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", CUDA_ONLY)
@pytest.mark.parametrize("number", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("column", [0, 2000, 4095])
def test_nan_and_inf_of_a_part(
    device: str, column: int, number: float, fwd: Forward, backend: str | None, rng: torch.Generator
) -> None:
    q, k, v = case_of(SHAPES[0], 64).inputs(device, rng)
    assert_is_split(q, k, v, False, backend)
    v[:, :, column, 7] = number
    out, lse = fwd(q, k, v)
    assert (out[..., 7].isnan() if math.isnan(number) else out[..., 7].isinf()).all()
    assert out[..., :7].isfinite().all() and lse.isfinite().all()
    k[:, :, column, 3] = math.nan
    out, lse = fwd(q, k, v)
    assert out.isnan().all() and lse.isnan().all()


@pytest.mark.cuda
@pytest.mark.parametrize("device", ["cuda"])
def test_streams_at_once(device: str, backend: str | None, rng: torch.Generator) -> None:
    """Each launch hands its parts over in memory of its own."""
    problems = [case_of(shape, 64).inputs(device, rng) for shape in SHAPES]
    expected = [flash_cute.fwd(*inputs, backend=backend) for inputs in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    results: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in problems]
    for _ in range(50):
        for stream, inputs, kept in zip(streams, problems, results, strict=True):
            with torch.cuda.stream(stream):
                kept.append(flash_cute.fwd(*inputs, backend=backend))
    torch.cuda.synchronize()
    for kept, one in zip(results, expected, strict=True):
        assert all(same_bits(result, one) for result in kept)


@pytest.mark.cuda
@pytest.mark.parametrize("device", ["cuda"])
def test_graph_replays(device: str, backend: str | None, rng: torch.Generator) -> None:
    """The flags are cleared in each replay."""
    q, k, v = case_of(SHAPES[2], 128).inputs(device, rng)
    flash_cute.fwd(q, k, v, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flash_cute.fwd(q, k, v, backend=backend)
    for _ in range(3):
        for x in (q, k, v):
            x.copy_(torch.randn(x.shape, generator=rng))
        out.fill_(math.nan)
        graph.replay()
        assert_matches(out, lse, q, k, v)


@pytest.mark.sanitizer
@pytest.mark.parametrize("device", CUDA_ONLY)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_small(device: str, head_dim: int, fwd: Forward, rng: torch.Generator) -> None:
    q, k, v = case_of((1, 2, 1, 65, 2100), head_dim).inputs(device, rng)
    assert_matches(*fwd(surrounded(q), surrounded(k), surrounded(v)), q, k, v)


needs_sm90 = pytest.mark.skipif("sm90" not in report.built_architectures(), reason="this build has no sm90 kernels")


@needs_sm90
@pytest.mark.parametrize(
    "shape, causal, split",
    [
        ((1, 32, 8, 1, 65536), "bottom_right", True),
        ((4, 16, 16, 4096, 4096), False, True),
        ((1, 8, 8, 512, 512), False, False),  # too few keys
        ((4, 33, 33, 192, 8192), False, False),  # whole waves
        ((4, 16, 16, 4096, 4096), True, False),  # a triangle's tiles even out by themselves
        ((1, 4, 4, 256, 65536), "top_left", False),  # so do these: no row sees more than 256 keys
        ((2, 32, 32, 64, 32768), False, False),  # memory cannot bring K and V any faster
    ],
    ids=str,
)
def test_what_is_split(shape: tuple[int, ...], causal: Causal, split: bool) -> None:
    batch, heads_q, heads_kv, len_q, len_k = shape
    q = torch.empty(batch, heads_q, len_q, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(batch, heads_kv, len_k, 128, dtype=torch.bfloat16, device="meta")
    made = flash_cute.explain(q, k, k, causal, capability=90)
    assert (made.data["split_tiles"] > 0) == split
    assert any("split over" in sentence for sentence in made.data["reasons"]) == split
    if split:
        assert made.data["split_tiles"] == made.data["tiles"] % 132
        assert 0 < made.data["split_ctas"] <= 132
