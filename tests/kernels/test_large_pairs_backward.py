"""The portable backward above 512 columns: two CTAs share a tile of a gradient, and exchange W in the workspace."""

from __future__ import annotations

import math

import pytest
import torch
from bad_offsets import BAD_OFFSETS
from cases import CUDA_DTYPES, Case, backward_plan
from numerics import assert_gradients_match, nan_in_new_memory, same_bits
from packed import EMPTY, UNEVEN, Packed, Results, assert_packed_gradients, make_backward, pack
from packed import flow as packed_flow

import flash_cute
from flash_cute.report import built_instances

HALF, BF16 = CUDA_DTYPES
CUDA = pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.cuda)])
DTYPES = pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
MESSAGE = 64 * 128 * 2 + 16  # bytes: W of a tile, and the number of a unit of work
# Gradients with two parts of columns: all of them, dK and dQ with dV in one, and dV alone.
HEAD_DIMS = ((1024, 1024), (576, 512), (72, 584))


@pytest.fixture(autouse=True)
def built() -> None:
    if ("sm80", "bwd", 1024, 1024) not in built_instances():
        pytest.skip("this build has no sm80 kernels for large head dims")


def forward(case: Case, device: str, rng: torch.Generator) -> tuple[torch.Tensor, ...]:
    """dout, q, k, v, out, lse."""
    q, k, v = case.inputs(device, rng)
    out, lse = flash_cute.fwd(q, k, v, case.causal, window=case.window, backend="sm80")
    return case.flow(device, rng)[0], q, k, v, out, lse


def backward(case: Case, tensors: tuple[torch.Tensor, ...]) -> Results:
    return flash_cute.bwd(*tensors, case.causal, window=case.window, backend="sm80")


def check(case: Case, device: str, rng: torch.Generator) -> None:
    tensors = forward(case, device, rng)
    with nan_in_new_memory(tensors[1]):
        given = backward(case, tensors)
    assert_gradients_match(given, *tensors[:4], case.causal, window=case.window)
    assert same_bits(backward(case, tensors), given)


@CUDA
@DTYPES
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("length", [1, 127, 128, 129, 256, 257, 500, 1025])
def test_odd_and_even_numbers_of_tiles(
    device: str, length: int, head_dims: tuple[int, int], dtype: torch.dtype, rng: torch.Generator
) -> None:
    """Of an odd number one CTA has a turn less; with the mask tiles of a call have none, one and more."""
    head_dim, head_dim_v = head_dims
    for causal in (False, True):
        check(Case(head_dim, length, 400, causal, dtype, 1, 3, 1, head_dim_v), device, rng)
        check(Case(head_dim, 400, length, causal, dtype, 1, 2, 2, head_dim_v), device, rng)


@CUDA
@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("window", [(0, 0), (30, 10), (200, 0), (None, 64)], ids=str)
def test_windows(device: str, window: tuple[int | None, int], causal: bool | str, rng: torch.Generator) -> None:
    """Ranges of tiles that begin anywhere, of which some are empty."""
    check(Case(1000, 333, 700, causal, HALF, 2, 4, 1, window=window), device, rng)
    check(Case(1000, 700, 333, causal, HALF, 2, 4, 1, window=window), device, rng)


@CUDA
@pytest.mark.parametrize("heads", [1, 37, 150])
def test_calls_in_a_row(device: str, heads: int, rng: torch.Generator) -> None:
    """One call's tickets and messages lie where the next call's do; with few tiles, and with many per pair."""
    cases = [Case(1024, length, 300, True, BF16, 1, heads, 1) for length in (100, 500)]
    tensors = [forward(case, device, rng) for case in cases]
    expected = [backward(case, x) for case, x in zip(cases, tensors, strict=True)]
    for case, given, x in zip(cases, expected, tensors, strict=True):
        assert_gradients_match(given, *x[:4], case.causal)
    results = [backward(cases[number % 2], tensors[number % 2]) for number in range(60)]
    assert all(same_bits(result, expected[number % 2]) for number, result in enumerate(results))


@CUDA
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
def test_graph_replays(device: str, head_dims: tuple[int, int], rng: torch.Generator) -> None:
    """A graph zeroes the tickets and flags of each replay; its memory is overwritten in between."""
    case = Case(head_dims[0], 700, 900, True, BF16, 1, 20, 4, head_dims[1])
    tensors = forward(case, device, rng)
    expected = backward(case, tensors)
    assert_gradients_match(expected, *tensors[:4], True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        given = [backward(case, tensors) for _ in range(3)]
    for _ in range(5):
        for gradients in given:
            for x in gradients:
                x.fill_(float("nan"))
        graph.replay()
        assert all(same_bits(gradients, expected) for gradients in given)


@CUDA
def test_streams_at_once(device: str, rng: torch.Generator) -> None:
    """Grids of several calls share the GPU: a CTA's partner may start late, and all end."""
    cases = [Case(1024, 64 * tiles, 600, False, BF16, 1, 3, 1) for tiles in (1, 7, 25, 60)]
    tensors = [forward(case, device, rng) for case in cases]
    expected = [backward(case, x) for case, x in zip(cases, tensors, strict=True)]
    for given, x in zip(expected, tensors, strict=True):
        assert_gradients_match(given, *x[:4])
    streams = [torch.cuda.Stream(priority=-(number % 2)) for number in range(8)]
    torch.cuda.synchronize()
    results = []
    for number in range(64):
        with torch.cuda.stream(streams[number % len(streams)]):
            results.append(backward(cases[number % len(cases)], tensors[number % len(cases)]))
    torch.cuda.synchronize()
    assert all(same_bits(result, expected[number % len(cases)]) for number, result in enumerate(results))


@CUDA
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("lengths", [UNEVEN, EMPTY, UNEVEN * 9, ((1, 300),) * 100], ids=["few", "none", "many", "rows"])
def test_packed(
    device: str,
    lengths: tuple[tuple[int, int], ...],
    head_dims: tuple[int, int],
    causal: bool,
    rng: torch.Generator,
) -> None:
    """The tiles that there are, of at most so many: pairs end when they have drawn all of them."""
    packed = pack(lengths, device, rng, head_dim=head_dims[0], head_dim_v=head_dims[1], around=3)
    dout, _ = packed_flow(packed, rng)
    given = make_backward("sm80")(dout, packed, causal)
    assert_packed_gradients(given, dout, packed, causal)


@CUDA
@pytest.mark.parametrize("name", BAD_OFFSETS)
def test_bad_offsets_end(device: str, name: str, rng: torch.Generator) -> None:
    """The call ends, and the gradients are right."""
    for rows, copies in ((20, 1), (2000, 1), (2000, 200)):
        numbers = torch.tensor(BAD_OFFSETS[name] * copies, dtype=torch.int64)
        scaled = (numbers * (rows // 20)).clamp(-(2**31), 2**31 - 1).to(device, torch.int32)
        q, k, v = (torch.randn(rows, heads, 520, generator=rng).to(device, HALF) for heads in (4, 2, 2))
        packed = Packed(q, k, v, scaled, scaled)
        dout = torch.randn(q.shape, generator=rng).to(q)
        assert_packed_gradients(make_backward("sm80")(dout, packed, True), dout, packed, True)


@pytest.mark.parametrize("capability", [80, 86, 90, 120])
def test_plan(capability: int) -> None:
    """The workspace: per pair flags of both kernels and four messages, and none where CTAs have no partners."""
    for heads, (head_dim, head_dim_v) in ((1, (1024, 1024)), (2, (576, 512)), (2, (64, 584)), (500, (1024, 1024))):
        q, k, v = (torch.empty(1, heads, 300, x, dtype=HALF) for x in (head_dim, head_dim, head_dim_v))
        made = backward_plan(q, k, v, capability=capability, backend="sm80")
        assert (made["kernel"], made["tiles"]) == ("bwd_keys_pair_kernel", 5 * heads)
        q, k, v = (torch.empty(1, heads, 300, 512, dtype=HALF) for _ in range(3))
        alone = backward_plan(q, k, v, capability=capability, backend="sm80")
        assert alone["kernel"] == "bwd_keys_kernel"
        pairs, rest = divmod(made["workspace_bytes"] - alone["workspace_bytes"] - 2 * 128, 4 * MESSAGE + 2 * 2 * 128)
        # Pairs take tiles of dK and of dV; of a gradient with one part of columns, two at a time.
        units = sum(5 * heads if x > 512 else math.ceil(5 * heads / 2) for x in (head_dim, head_dim_v))
        assert rest == 0 and (pairs == units if heads < 500 else pairs < 200)
        assert any("computes P or dS of every second tile" in reason for reason in made["reasons"])
        queries = "bwd_queries_pair_kernel" if head_dim > 512 else "bwd_queries_kernel"
        assert any(queries + "," in reason for reason in made["reasons"])
        assert not any("every second tile" in reason for reason in alone["reasons"])
