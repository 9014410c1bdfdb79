"""CUDA graph capture: as the first call of a process, replayed on new inputs, two graphs at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import INSTANCE_HEAD_DIMS, Case, Inputs
from numerics import assert_gradients_match, assert_matches, same_bits

import flash_cute

pytestmark = [pytest.mark.kernel, pytest.mark.cuda]

FIRST_CALL = """
import torch
import flash_cute
from cases import Case
from numerics import assert_gradients_match, assert_matches

rng = torch.Generator().manual_seed({seed})
graphs = []
for head_dim in {head_dims}:
    for causal in (False, True):
        q, k, v = Case(head_dim, 113, 203).inputs("cuda", rng)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, lse = flash_cute.fwd(q, k, v, causal, backend={backend!r})
        graphs.append((graph, out, lse, q, k, v, causal))
trained = []
for head_dim in {head_dims}:
    q, k, v = Case(head_dim, 113, 203, heads_q=4).inputs("cuda", rng)
    out, lse = flash_cute.fwd(q, k, v, True, backend={backend!r})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients = flash_cute.bwd(q, q, k, v, out, lse, True, deterministic=True, backend={backend!r})
    trained.append((graph, gradients, q, k, v, out, lse))
for graph, gradients, q, k, v, *_ in trained:
    for x in gradients:
        x.fill_(float("nan"))
    graph.replay()
    assert_gradients_match(gradients, q, q, k, v, True)
for graph, out, lse, q, k, v, causal in graphs:
    out.fill_(float("nan"))
    lse.fill_(float("nan"))
    graph.replay()
    assert_matches(out, lse, q, k, v, causal)
print("replayed", len(graphs))
"""


@pytest.mark.parametrize("device", ["cuda"])
def test_capture_as_the_first_call(device: str, backend: str | None, seed: int, python: Callable[..., str]) -> None:
    script = FIRST_CALL.format(seed=seed, head_dims=INSTANCE_HEAD_DIMS, backend=backend)
    assert f"replayed {2 * len(INSTANCE_HEAD_DIMS)}" in python(script)


class _Captured:
    """One call in a graph, with the inputs that it reads and the outputs that it writes."""

    def __init__(self, inputs: Inputs, backend: str | None) -> None:
        self.inputs = inputs
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out, self.lse = flash_cute.fwd(*inputs, True, backend=backend)


@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("head_dim", [33, 64, 128])
def test_replay_reads_new_inputs(device: str, head_dim: int, backend: str | None, rng: torch.Generator) -> None:
    case = Case(head_dim, 113, 203, heads_q=4)
    captured = _Captured(case.inputs(device, rng), backend)
    for _ in range(3):
        for x, new in zip(captured.inputs, case.inputs(device, rng), strict=True):
            x.copy_(new)
        captured.graph.replay()
        assert_matches(captured.out, captured.lse, *captured.inputs, True)


@pytest.mark.parametrize("device", ["cuda"])
def test_two_graphs_at_once(device: str, backend: str | None, rng: torch.Generator) -> None:
    both = [
        _Captured(Case(64, 300, 1000, batch=4).inputs(device, rng), backend),
        _Captured(Case(64, 300, 1000, batch=4).inputs(device, rng), backend),
    ]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    expected = [flash_cute.fwd(*x.inputs, True, backend=backend) for x in both]
    torch.cuda.synchronize()
    for _ in range(50):
        for captured, stream in zip(both, streams, strict=True):
            with torch.cuda.stream(stream):
                captured.out.fill_(float("nan"))
                captured.graph.replay()
        torch.cuda.synchronize()
        for captured, result in zip(both, expected, strict=True):
            assert same_bits((captured.out, captured.lse), result)


@pytest.mark.parametrize("device", ["cuda"])
def test_several_calls_in_one_graph(device: str, backend: str | None, rng: torch.Generator) -> None:
    q, k, v = Case(64, 130, 130).inputs(device, rng)
    expected = q
    for _ in range(4):
        expected, _ = flash_cute.fwd(expected, k, v, True, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = q
        for _ in range(4):
            out, _ = flash_cute.fwd(out, k, v, True, backend=backend)
    for _ in range(3):
        graph.replay()
    assert same_bits((out,), (expected,))


@pytest.mark.parametrize("device", ["cuda"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
@pytest.mark.parametrize("head_dim", [33, 64, 128])
def test_replay_of_a_training_step(
    device: str, head_dim: int, deterministic: bool, backend: str | None, rng: torch.Generator
) -> None:
    """Forward and backward in one graph, replayed on new inputs: the semaphores are zeroed in each replay."""
    case = Case(head_dim, 113, 203, heads_q=4)
    leaves = [x.requires_grad_() for x in case.inputs(device, rng)]
    dout = torch.randn(leaves[0].shape, generator=rng).to(leaves[0])

    def step() -> tuple[torch.Tensor, ...]:
        out = flash_cute.attention(*leaves, True, deterministic=deterministic, backend=backend)
        return torch.autograd.grad(out, leaves, dout)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dq, dk, dv = step()
    for _ in range(3):
        with torch.no_grad():
            for x, new in zip(leaves, case.inputs(device, rng), strict=True):
                x.copy_(new)
        graph.replay()
        q, k, v = leaves
        assert_gradients_match((dq, dk, dv), dout, q, k, v, True)
