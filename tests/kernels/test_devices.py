"""Tensors on another GPU than the current one; and the first call of a process may be there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cases import Backward, Case, Forward
from numerics import assert_gradients_match, assert_matches

import flash_cute

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU or none"),
]


@pytest.mark.parametrize("device", ["cuda:1"])
@pytest.mark.parametrize("head_dim", [64, 100, 256])
def test_cuda_1_while_cuda_0_is_current(device: str, head_dim: int, fwd: Forward, rng: torch.Generator) -> None:
    q, k, v = Case(head_dim, 113, 203, heads_q=4).inputs(device, rng)
    with torch.cuda.device(0):
        out, lse = fwd(q, k, v, True)
        assert torch.cuda.current_device() == 0
    assert out.device == torch.device(device)
    assert_matches(out, lse, q, k, v, True)


@pytest.mark.parametrize("device", ["cuda:1"])
def test_on_cuda_1s_current_stream(device: str, backend: str | None, rng: torch.Generator) -> None:
    late = Case(64, 113, 203).inputs(device, rng)
    inputs = tuple(torch.full_like(x, float("nan")) for x in late)
    torch.cuda.synchronize(1)
    stream = torch.cuda.Stream(device=1)
    with torch.cuda.stream(stream), torch.cuda.device(1):
        torch.cuda._sleep(200_000_000)
        for x, new in zip(inputs, late, strict=True):
            x.copy_(new)
        with torch.cuda.device(0):
            result = flash_cute.fwd(*inputs, True, backend=backend)
    stream.synchronize()
    assert_matches(*result, *late, True)


@pytest.mark.parametrize("device", ["cuda:1"])
@pytest.mark.parametrize("head_dim", [64, 100, 256])
def test_backward_on_cuda_1(device: str, head_dim: int, bwd: Backward, rng: torch.Generator) -> None:
    q, k, v = Case(head_dim, 113, 203, heads_q=4).inputs(device, rng)
    with torch.cuda.device(0):
        given = bwd(q, q, k, v, True, deterministic=True)
        assert torch.cuda.current_device() == 0
    assert_gradients_match(given, q, q, k, v, True)


FIRST_CALL = """
import torch
import flash_cute
from cases import Case
from numerics import assert_matches

q, k, v = Case(256, 113, 203).inputs("cuda:1", torch.Generator().manual_seed({seed}))
assert_matches(*flash_cute.fwd(q, k, v, True, backend={backend!r}), q, k, v, True)
q, k, v = (x.to("cuda:0") for x in (q, k, v))
assert_matches(*flash_cute.fwd(q, k, v, True, backend={backend!r}), q, k, v, True)
"""


@pytest.mark.parametrize("device", ["cuda:1"])
def test_first_call_on_cuda_1(device: str, backend: str | None, seed: int, python: Callable[..., str]) -> None:
    """What a kernel needs set once (its shared memory) is set on each device, not on the first alone."""
    python(FIRST_CALL.format(seed=seed, backend=backend))
