"""CUDA graphs: captured with one set of lengths and replayed with others, on several streams, equal to eager's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from caches import Cached, make
from numerics import same_bits
from random_caches import KERNELS

import flash_cute

pytestmark = [pytest.mark.kernel, pytest.mark.cuda]

# What is captured, then replayed; all of at most 5,000 keys. Captured at length 1, as an engine warms up.
STEPS = ((1, 1, 1, 1), (70, -1, 0, 4999), (129, 128, 127, 1), (-1, -1, -1, -1), (5000, 3, 64, 2049))


def _case(rng: torch.Generator, rows: Any, appends: bool, **options: Any) -> Cached:
    """4 sequences with room for 5,100 keys in pages of 16."""
    return make(rng, "cuda", (5050, 5050, 5050, 5050), rows, page=16, appends=appends, **options)


@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("rows", [1, 4, (1, 7, 2, 30)], ids=str)
@pytest.mark.parametrize("appends", [False, True])
@pytest.mark.parametrize("options", [{}, {"window": (200, 0)}], ids=str)
def test_replay_with_other_lengths(
    device: str, options: dict[str, Any], appends: bool, rows: Any, backend: str | None, rng: torch.Generator
) -> None:
    _replays_equal_eager(_case(rng, rows, appends, **options), backend, rng)


@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("rows", [2, (1, 7, 2, 30)], ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_replays_of_every_kernel(
    device: str, kernel: str, rows: Any, backend: str | None, rng: torch.Generator
) -> None:
    _replays_equal_eager(_case(rng, rows, True, **KERNELS[kernel]), backend, rng)


def _replays_equal_eager(case: Cached, backend: str | None, rng: torch.Generator) -> None:
    """One graph, of other lengths, tables and queries each time."""
    backend = backend if case.served_by(backend or "auto") else None
    assert case.cache_seqlens is not None and case.page_table is not None
    tables = [case.page_table, case.page_table.flip(0)]  # other pages, too
    lengths, table = case.cache_seqlens.clone(), case.page_table.clone()
    captured = case.replace(cache_seqlens=lengths, page_table=table)
    lengths.copy_(torch.tensor(STEPS[0]))
    graph = torch.cuda.CUDAGraph()
    arguments = {**captured.arguments(), "return_lse": True, "backend": backend}
    with torch.cuda.graph(graph):
        out, lse = flash_cute.attention_with_kvcache(captured.q, captured.k_cache, captured.v_cache, **arguments)
    for number, step in enumerate(STEPS):
        lengths.copy_(torch.tensor(step))
        table.copy_(tables[number % 2])
        captured.q.copy_(torch.randn(captured.q.shape, generator=rng))
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        eager = captured.clone()
        expected = eager.run(backend)
        graph.replay()
        assert same_bits((out, lse), expected), step
        assert same_bits((captured.k_cache, captured.v_cache), (eager.k_cache, eager.v_cache)), step


@pytest.mark.parametrize("device", ["cuda"])
def test_offsets_change_between_replays(device: str, backend: str | None, rng: torch.Generator) -> None:
    """Mixed batches of other rows each: their sum stays."""
    case = _case(rng, (10, 10, 10, 10), False)
    offsets = case.cu_seqlens_q
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flash_cute.attention_with_kvcache(
            case.q, case.k_cache, case.v_cache, **case.arguments(), return_lse=True, backend=backend
        )
    for bounds in ([0, 1, 2, 3, 40], [0, 40, 40, 40, 40], [0, 0, 13, 39, 40], [0, 2, 4, 6, 8]):
        offsets.copy_(torch.tensor(bounds))  # type: ignore[union-attr]
        graph.replay()
        assert same_bits((out, lse), case.run(backend)), bounds


@pytest.mark.parametrize("device", ["cuda"])
def test_graphs_on_two_streams_at_once(device: str, backend: str | None, rng: torch.Generator) -> None:
    """Each with a workspace of its own, of the size that is said."""
    case = _case(rng, 1, False)
    case.cache_seqlens.copy_(torch.tensor([5000, 4000, 100, 3000]))  # type: ignore[union-attr]
    expected = case.run(backend)
    names = ("cache_seqlens", "page_table", "kv_layout")
    size = flash_cute.kvcache_workspace_bytes(
        case.q, case.k_cache, case.v_cache, **{x: case.places[x] for x in names}, backend=backend
    )
    graphs = []
    for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
        workspace = torch.full((size,), 0xA5, dtype=torch.uint8, device=device)
        graph, results = torch.cuda.CUDAGraph(), torch.empty_like(case.q)
        arguments = {**case.arguments(), "out": results, "workspace": workspace, "backend": backend}
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(8):
                flash_cute.attention_with_kvcache(case.q, case.k_cache, case.v_cache, **arguments)
        graphs.append((stream, graph, results, workspace))
    for _ in range(20):
        torch.cuda.synchronize()
        for stream, graph, results, _ in graphs:
            with torch.cuda.stream(stream):
                results.fill_(float("nan"))
                graph.replay()
        torch.cuda.synchronize()
        assert all(same_bits((results,), expected[:1]) for _, _, results, _ in graphs)


@pytest.mark.parametrize("device", ["cuda"])
def test_nothing_waits_for_the_device(device: str, backend: str | None, rng: torch.Generator) -> None:
    cases = [make(rng, device, (70, 0, -1), rows, page=16, appends=True) for rows in (1, 4, (1, 30, 0))]
    for case in cases:
        case.clone().run(backend)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for case in cases:
            arguments = {**case.arguments(), "return_lse": True, "backend": backend}
            flash_cute.attention_with_kvcache(case.q, case.k_cache, case.v_cache, **arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("device", ["cuda"])
def test_a_workspace_that_is_too_small(device: str, backend: str | None, rng: torch.Generator) -> None:
    case = _case(rng, 1, False)
    names = ("cache_seqlens", "page_table", "kv_layout")
    size = flash_cute.kvcache_workspace_bytes(
        case.q, case.k_cache, case.v_cache, **{x: case.places[x] for x in names}, backend=backend
    )
    if size == 0:
        pytest.skip("this call takes no workspace")
    expected = case.run(backend)
    enough = torch.full((size,), 0x5A, dtype=torch.uint8, device=device)
    assert same_bits(case.run(backend, workspace=enough), expected)
    with pytest.raises(ValueError, match=rf"workspace: expected at least {size} bytes, got {size - 1}"):
        case.run(backend, workspace=enough[: size - 1])
