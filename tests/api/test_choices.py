"""Which kernel the plan chooses on Hopper: that of the least predicted time; which calls it leaves to sm90."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import CUDA_DTYPES, Case, Causal
from numerics import assert_gradients_match, assert_matches

import flash_cute
from flash_cute.report import built_architectures

needs_both = pytest.mark.skipif(
    built_architectures() != {"sm80", "sm90"}, reason="this build has not the kernels of both architectures"
)


def explained(
    shape: tuple[int, int, int, int, int], head_dim: int, causal: Causal = True, head_dim_v: int = 0, **options: Any
) -> dict[str, Any]:
    """The plan on a Hopper GPU with 132 multiprocessors; `shape`: batch, query heads, KV heads, rows, keys."""
    batch, heads_q, heads_kv, len_q, len_k = shape
    q = torch.empty(batch, heads_q, len_q, head_dim, dtype=torch.bfloat16, device="meta")
    k = torch.empty(batch, heads_kv, len_k, head_dim, dtype=torch.bfloat16, device="meta")
    v = torch.empty(batch, heads_kv, len_k, head_dim_v or head_dim, dtype=torch.bfloat16, device="meta")
    return flash_cute.explain(q, k, v, causal, capability=90, **options).data


TINY, LARGE = (4, 8, 4, 17, 17), (2, 16, 4, 4096, 4096)


@needs_both
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("head_dim", [32, 40, 64, 96, 128, 192, 256])
def test_small_calls_go_to_sm80_and_large_ones_to_sm90(head_dim: int, backward: bool) -> None:
    for shape, backend in ((TINY, "sm80"), (LARGE, "sm90")):
        for causal in (False, True):
            given = explained(shape, head_dim, causal, backward=backward)
            assert given["backend"] == backend
            assert f"Backend {backend} is the faster one for this call" in given["reasons"][0]
            for asked in ("sm80", "sm90"):
                forced = explained(shape, head_dim, causal, backward=backward, backend=asked)
                assert forced["backend"] == asked and "was asked for" in forced["reasons"][0]
        assert explained(shape, head_dim, backward=backward, backend=backend)["kernel"] == given["kernel"]


@needs_both
@pytest.mark.parametrize(
    "options",
    [{"softcap": 5.0}, {"head_dim_v": 32}, {"backward": True, "deterministic": True}],
    ids=["softcap", "head dim of v", "deterministic"],
)
def test_calls_without_a_prediction_for_sm80_stay_on_sm90(options: dict[str, Any]) -> None:
    given = explained(TINY, 64, **options)
    assert given["backend"] == "sm90"
    assert given["reasons"][0] == "Backend sm90 is the one for compute capability 9.0."


@needs_both
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_packed_calls(backward: bool) -> None:
    """The lengths are on the device: the totals and the number of sequences decide, and hints."""

    def backend(rows: int, sequences: int) -> str:
        q = torch.empty(rows, 4, 64, dtype=torch.float16, device="meta")
        offsets = torch.empty(sequences + 1, dtype=torch.int32, device="meta")
        options: dict[str, Any] = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "backward": backward}
        return flash_cute.explain(q, q, q, True, capability=90, **options).data["backend"]

    assert (backend(60, 3), backend(20000, 3), backend(20000, 200)) == ("sm80", "sm90", "sm90")


@needs_both
@pytest.mark.parametrize("head_dim", [64, 128])
def test_packed_calls_of_equal_lengths(head_dim: int) -> None:
    """Where the hints say that all sequences are equally long, the tile is that of a dense batch."""

    def tile(sequences: int, length: int, longest: int | None) -> tuple[int, int]:
        q = torch.empty(sequences * length, 16, head_dim, dtype=torch.bfloat16, device="meta")
        offsets = torch.empty(sequences + 1, dtype=torch.int32, device="meta")
        hints = {"max_seqlen_q": longest, "max_seqlen_k": longest}
        given = flash_cute.explain(
            q, q, q, True, capability=90, backend="sm90", cu_seqlens_q=offsets, cu_seqlens_k=offsets, **hints
        ).data
        return given["block_m"], given["block_n"]

    for sequences, length in ((16, 1024), (128, 128)):
        dense = explained((sequences, 16, 16, length, length), head_dim, backend="sm90")
        assert tile(sequences, length, length) == (dense["block_m"], dense["block_n"])
    # Without hints the longest is taken to have twice the mean, and most tiles to be full.
    assert tile(16, 1024, None) == tile(16, 1024, 2048) == tile(1, 16384, None)
    if head_dim == 128:  # 1024 rows are eight tiles of 128, and not six of 192
        assert tile(16, 1024, None) == (192, 80) and tile(16, 1024, 1024) == (128, 128)


@needs_both
def test_tiles_of_sm90() -> None:
    """Rows that fill no tile of 192, few rows beside many keys, and the wait that each head dim is faster with."""

    def tile(*arguments: Any, **options: Any) -> tuple[int, bool]:
        given = explained(*arguments, **options, backend="sm90")
        return given["block_m"], given["tile"].endswith("late")

    assert tile((4, 32, 32, 128, 128), 128) == (128, False)
    assert tile((4, 32, 32, 128, 128), 96) == (128, True)
    assert tile((1, 8, 8, 64, 4096), 128, False)[0] == 64
    assert tile((8, 32, 8, 1024, 1024), 64)[0] == 256
    assert [tile(LARGE, head_dim) for head_dim in (96, 128, 192)] == [(192, True), (192, True), (128, False)]


@needs_both
def test_the_choice_is_of_the_shape_alone() -> None:
    """Dtype, strides and where the tensors are have no part in it."""
    expected = explained(TINY, 64)
    batch, heads_q, heads_kv, len_q, len_k = TINY
    for dtype in CUDA_DTYPES:
        q = torch.randn(batch, len_q, heads_q, 64).to(dtype).transpose(1, 2)
        k = torch.randn(batch, len_k, heads_kv, 64).to(dtype).transpose(1, 2)
        given = flash_cute.explain(q, k, k, True, capability=90).data
        assert (given["backend"], given["entry"]) == (expected["backend"], expected["entry"])


@needs_both
def test_empty_calls_have_a_plan() -> None:
    for shape in ((0, 4, 2, 5, 5), (2, 4, 2, 0, 5), (2, 4, 2, 5, 0), (2, 0, 0, 5, 5)):
        for backward in (False, True):
            assert explained(shape, 64, backward=backward)["reasons"]
    none = torch.empty(1, dtype=torch.int32, device="meta")
    options: dict[str, Any]
    for rows in (0, 5):  # of no sequence, with hints that are the totals
        q = torch.empty(rows, 4, 64, dtype=torch.float16, device="meta")
        options = {"cu_seqlens_q": none, "cu_seqlens_k": none, "max_seqlen_q": rows, "max_seqlen_k": rows}
        for backward in (False, True):
            assert flash_cute.explain(q, q, q, True, capability=90, backward=backward, **options).data["reasons"]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, "bottom_right"], ids=["full", "causal"])
@pytest.mark.parametrize("len_q, len_k", [(1, 1), (17, 17), (33, 129), (128, 128), (300, 300), (64, 4096)])
@pytest.mark.parametrize("head_dim", [32, 64, 100, 128, 192, 256])
def test_what_the_plan_chooses_is_right(
    head_dim: int, len_q: int, len_k: int, causal: Causal, dtype: torch.dtype, rng: torch.Generator
) -> None:
    """The kernel tests force a backend on Hopper; here the two directions may have different ones."""
    case = Case(head_dim, len_q, len_k, causal, dtype, heads_q=4, heads_kv=2)
    q, k, v = case.inputs("cuda", rng)
    dout, _ = case.flow("cuda", rng)
    out, lse = flash_cute.fwd(q, k, v, causal)
    assert_matches(out, lse, q, k, v, causal)
    assert_gradients_match(flash_cute.bwd(dout, q, k, v, out, lse, causal), dout, q, k, v, causal)


@pytest.mark.cuda
def test_a_captured_small_call(rng: torch.Generator) -> None:
    """What the plan gives to sm80 on Hopper is captured and replayed, with its backward."""
    case = Case(64, 33, 65, True, torch.bfloat16)
    q, k, v = case.inputs("cuda", rng)
    dout, _ = case.flow("cuda", rng)

    def step() -> tuple[torch.Tensor, ...]:
        out, lse = flash_cute.fwd(q, k, v, True)
        return out, lse, *flash_cute.bwd(dout, q, k, v, out, lse, True)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse, *gradients = step()
    for x, fresh in zip((q, k, v), case.inputs("cuda", rng), strict=True):
        x.copy_(fresh)
    graph.replay()
    assert_matches(out, lse, q, k, v, True)
    assert_gradients_match(tuple(gradients), dout, q, k, v, True)
