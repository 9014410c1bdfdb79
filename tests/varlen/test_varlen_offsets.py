"""Offsets and used lengths of any value: nothing outside of the tensors is touched, every row is written, and the work
is bounded by what good offsets of the same sizes may cost."""

from __future__ import annotations

import math
import time

import pytest
import torch
from bad_offsets import KINDS, bad_offsets
from packed import Packed, assert_packed_gradients, assert_packed_matches, flow, make_backward, make_forward

import flash_cute

pytestmark = pytest.mark.kernel

GUARD = 64  # rows of NaN before and behind every tensor


def guarded(shape: tuple[int, int, int], device: str, dtype: torch.dtype, rng: torch.Generator) -> torch.Tensor:
    rows, *others = shape
    around = torch.full((rows + 2 * GUARD, *others), math.nan, dtype=dtype, device=device)
    return around[GUARD : GUARD + rows].copy_(torch.randn(shape, generator=rng))


def random_call(kind: str, device: str, head_dim: int, sequences: int, rng: torch.Generator) -> Packed:
    dtype = torch.float16 if device == "cuda" else torch.float32
    rows, keys = (int(torch.randint(1, 400, (), generator=rng)) for _ in range(2))
    q, k, v = (guarded((n, heads, head_dim), device, dtype, rng) for n, heads in ((rows, 4), (keys, 2), (keys, 2)))
    of_q, of_k = (bad_offsets(kind, sequences, total, rng).to(device) for total in (rows, keys))
    used = [
        torch.randint(-5, 2 * total // sequences + 5, (sequences,), generator=rng).to(device, torch.int32)
        if torch.rand((), generator=rng) < 0.5
        else None
        for total in (rows, keys)
    ]
    return Packed(q, k, v, of_q, of_k, *used)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("device", "head_dim", "sequences"),
    [
        *(("cpu", 16, sequences) for sequences in (1, 5, 40)),
        *(
            pytest.param("cuda", head_dim, sequences, marks=pytest.mark.cuda)
            for head_dim in (64, 128, 256, 512)
            for sequences in (1, 5, 40, 300)
        ),
    ],
)
def test_any_offsets(
    device: str, head_dim: int, kind: str, sequences: int, backend: str | None, rng: torch.Generator
) -> None:
    packed = random_call(kind, device, head_dim, sequences, rng)
    causal = bool(torch.rand((), generator=rng) < 0.5)
    out, lse = make_forward(backend)(packed, causal)
    assert_packed_matches(out, lse, packed, causal)
    dout, _ = flow(packed, rng)
    for deterministic in (False, True):
        given = make_backward(backend)(dout, packed, causal, deterministic=deterministic)
        assert_packed_gradients(given, dout, packed, causal)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("head_dim", [64, 256, 512])
def test_the_time_is_bounded(device: str, head_dim: int, backend: str | None, rng: torch.Generator) -> None:
    """2,000 sequences over all of 8,192 rows take no longer than one of 8,192, forward and backward."""
    total, sequences = 8192, 2000
    q, k, v = (torch.randn(total, 4, head_dim, generator=rng).to(device, torch.float16) for _ in range(3))

    def seconds(offsets: torch.Tensor) -> float:
        of = offsets.to(device, torch.int32)
        best = math.inf
        for _ in range(15):  # other processes may use the GPU
            torch.cuda.synchronize()
            start = time.perf_counter()
            out, lse = flash_cute.varlen_fwd(q, k, v, of, of, backend=backend)
            flash_cute.varlen_bwd(q, q, k, v, out, lse, of, of, backend=backend)
            torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
        return best

    one = torch.full((sequences + 1,), total)
    one[0] = 0
    assert seconds(bad_offsets("overlapping", sequences, total, rng)) < 2 * seconds(one) + 2e-3
