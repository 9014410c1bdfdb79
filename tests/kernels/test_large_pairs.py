"""The portable forward above 512 columns of out: two CTAs share a row tile, and exchange messages in the workspace."""

from __future__ import annotations

import math

import pytest
import torch
from bad_offsets import BAD_OFFSETS
from cases import CUDA_DTYPES, Case, plan
from numerics import assert_matches, nan_in_new_memory, same_bits
from packed import EMPTY, UNEVEN, Packed, assert_packed_matches, make_forward, pack

import flash_cute
from flash_cute.report import built_instances

HALF, BF16 = CUDA_DTYPES
CUDA = pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.cuda)])
DTYPES = pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
MESSAGE = 64 * 128 * 2 + 2 * 64 * 4  # bytes: P of a key tile, and two numbers per row


@pytest.fixture(autouse=True)
def built() -> None:
    if ("sm80", "fwd", 1024, 1024) not in built_instances():
        pytest.skip("this build has no sm80 kernels for large head dims")


@CUDA
@DTYPES
@pytest.mark.parametrize("len_k", [1, 127, 128, 129, 256, 257, 500, 1025])
def test_odd_and_even_numbers_of_key_tiles(device: str, len_k: int, dtype: torch.dtype, rng: torch.Generator) -> None:
    """Of an odd number one CTA has a turn less; with the mask row tiles of a call have none, one and more."""
    for causal in (False, True):
        for head_dim, head_dim_v in ((1024, 1024), (72, 584)):
            q, k, v = Case(head_dim, 400, len_k, causal, dtype, 1, 4, 2, head_dim_v).inputs(device, rng)
            with nan_in_new_memory(q):
                given = flash_cute.fwd(q, k, v, causal, backend="sm80")
            assert_matches(*given, q, k, v, causal)


@CUDA
@pytest.mark.parametrize("causal", [False, True, "top_left"])
@pytest.mark.parametrize("window", [(0, 0), (30, 10), (200, 0), (None, 64)], ids=str)
def test_windows(device: str, window: tuple[int | None, int], causal: bool | str, rng: torch.Generator) -> None:
    """Ranges of key tiles that begin anywhere, of which some are empty."""
    case = Case(1000, 333, 700, causal, HALF, 2, 4, 1, window=window)
    inputs = case.inputs(device, rng)
    assert_matches(*flash_cute.fwd(*inputs, causal, window=window, backend="sm80"), *inputs, causal, window=window)


@CUDA
@DTYPES
def test_maxima_of_either_cta(device: str, dtype: torch.dtype, rng: torch.Generator) -> None:
    """The CTAs' key tiles have scores of different sizes: each in turn takes the other's maxima, and rescales its P."""
    q, k, v = Case(1024, 200, 1280, False, dtype, 1, 2, 2).inputs(device, rng)
    for sizes in ((1, 6), (6, 1), (1, 2, 3, 4, 5, 6, 7, 8, 9, 10), (10, 1, 9, 2, 8, 3, 7, 4, 6, 5)):
        factors = torch.tensor(sizes, dtype=dtype, device=device).repeat(10 // len(sizes)).repeat_interleave(128)
        some_k = k * factors[:, None]
        given = flash_cute.fwd(q, some_k, v, backend="sm80")
        assert_matches(*given, q, some_k, v)


@CUDA
@pytest.mark.parametrize("heads", [1, 37, 150])
def test_calls_in_a_row(device: str, heads: int, rng: torch.Generator) -> None:
    """One call's tickets and messages lie where the next call's do; with few row tiles, and with many per pair."""
    small, large = (Case(1024, length, 300, True, BF16, 1, heads, 1).inputs(device, rng) for length in (100, 500))
    expected = [flash_cute.fwd(*inputs, True, backend="sm80") for inputs in (small, large)]
    for inputs, given in zip((small, large), expected, strict=True):
        assert_matches(*given, *inputs, True)
    results = [flash_cute.fwd(*(small, large)[number % 2], True, backend="sm80") for number in range(60)]
    assert all(same_bits(result, expected[number % 2]) for number, result in enumerate(results))


@CUDA
def test_graph_replays(device: str, rng: torch.Generator) -> None:
    """A graph zeroes the tickets and flags of each replay; its memory is overwritten in between."""
    inputs = Case(1024, 700, 900, True, BF16, 1, 20, 4).inputs(device, rng)
    expected = flash_cute.fwd(*inputs, True, backend="sm80")
    assert_matches(*expected, *inputs, True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        given = [flash_cute.fwd(*inputs, True, backend="sm80") for _ in range(3)]
    for _ in range(5):
        for tensors in given:
            for x in tensors:
                x.fill_(float("nan"))
        graph.replay()
        assert all(same_bits(tensors, expected) for tensors in given)


@CUDA
def test_streams_at_once(device: str, rng: torch.Generator) -> None:
    """Grids of several calls share the GPU: a CTA's partner may start late, and all end."""
    inputs = [Case(1024, 64 * tiles, 600, False, BF16, 1, 3, 1).inputs(device, rng) for tiles in (1, 7, 25, 60)]
    expected = [flash_cute.fwd(*x, backend="sm80") for x in inputs]
    for x, given in zip(inputs, expected, strict=True):
        assert_matches(*given, *x)
    streams = [torch.cuda.Stream(priority=-(number % 2)) for number in range(8)]
    torch.cuda.synchronize()
    results = []
    for number in range(64):
        with torch.cuda.stream(streams[number % len(streams)]):
            results.append(flash_cute.fwd(*inputs[number % len(inputs)], backend="sm80"))
    torch.cuda.synchronize()
    assert all(same_bits(result, expected[number % len(inputs)]) for number, result in enumerate(results))


@CUDA
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [UNEVEN, EMPTY, UNEVEN * 9, ((1, 300),) * 100], ids=["few", "none", "many", "rows"])
def test_packed(device: str, lengths: tuple[tuple[int, int], ...], causal: bool, rng: torch.Generator) -> None:
    packed = pack(lengths, device, rng, head_dim=600, around=3)
    with nan_in_new_memory(packed.q):
        given = make_forward("sm80")(packed, causal)
    assert_packed_matches(*given, packed, causal)


@CUDA
@pytest.mark.parametrize("name", BAD_OFFSETS)
def test_bad_offsets_are_clamped(device: str, name: str, rng: torch.Generator) -> None:
    """The call ends, and every row is written; NaN lies around the tensors."""
    for rows, copies in ((20, 1), (2000, 1), (2000, 200)):
        offsets = torch.tensor(BAD_OFFSETS[name] * copies, dtype=torch.int64)
        scaled = (offsets * (rows // 20)).clamp(-(2**31), 2**31 - 1).to(device, torch.int32)
        inputs = []
        for heads in (4, 2, 2):
            surrounded = torch.full((rows + 300, heads, 520), math.nan, dtype=HALF, device=device)
            inputs.append(surrounded[150:-150].copy_(torch.randn(rows, heads, 520, generator=rng)))
        packed = Packed(inputs[0], inputs[1], inputs[2], scaled, scaled)
        out, lse = make_forward("sm80")(packed, True)
        assert_packed_matches(out, lse, packed, True)


@pytest.mark.parametrize("capability", [80, 86, 90, 120])
def test_plan(capability: int) -> None:
    """The workspace: the ticket, flags and four messages per pair; none where CTAs have no partners."""
    for heads in (1, 2, 500):
        q = torch.empty(1, heads, 300, 1024, dtype=HALF)
        made = plan(q, q, q, capability=capability, backend="sm80")
        assert (made["kernel"], made["column_parts"], made["tiles"]) == ("fwd_streamed_pair_kernel", 2, 5 * heads)
        pairs, rest = divmod(made["workspace_bytes"] - 128, 4 * MESSAGE + 2 * 128)
        assert rest == 0 and pairs <= 5 * heads and (heads == 500 or pairs == 5 * heads)
        assert pairs < 200
        assert any("sends P to the other one" in reason for reason in made["reasons"])
        assert not any("draws" in reason for reason in made["reasons"])
        explanation = flash_cute.explain(q, q, q, capability=capability, backend="sm80")
        assert "flash_cute::sm80::forward::streamed::fwd_streamed_pair_kernel" in str(explanation)
        compiled = explanation.data["compiled"]
        assert compiled is None or compiled["spill_stores"] == compiled["spill_loads"] == 0
    q, k, v = (torch.empty(1, 2, 300, head_dim, dtype=HALF) for head_dim in (1024, 1024, 512))
    alone = plan(q, k, v, capability=capability, backend="sm80")
    assert (alone["kernel"], alone["column_parts"], alone["workspace_bytes"]) == ("fwd_streamed_kernel", 1, 0)
