"""Random problems: shapes, strides, heads, mask, scale and dtype all at once."""

from __future__ import annotations

import random

import pytest
import torch
from cases import CAUSAL, CPU_DTYPES, CUDA_DTYPES, Backward, Case, Forward
from layouts import DISTINCT_LAYOUTS, LAYOUTS
from numerics import assert_gradients_match, assert_matches

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize("number", range(48))
def test_exact(device: str, number: int, seed: int, fwd: Forward, bwd: Backward, rng: torch.Generator) -> None:
    pick = random.Random(seed)
    heads_kv = pick.randint(1, 4)
    case = Case(
        head_dim=pick.choice((pick.randint(1, 256), 8 * pick.randint(1, 32))),
        len_q=pick.choice((1, pick.randint(1, 70), pick.randint(1, 500))),
        len_k=pick.choice((pick.randint(1, 70), pick.randint(1, 900))),
        causal=pick.choice(CAUSAL),
        dtype=pick.choice(CPU_DTYPES if device == "cpu" else CUDA_DTYPES),
        batch=pick.randint(1, 4),
        heads_q=heads_kv * pick.randint(1, 4),
        heads_kv=heads_kv,
    )
    layouts = [pick.choice(LAYOUTS) for _ in range(3)]
    scale = pick.choice((None, pick.uniform(0.01, 0.5)))
    deterministic = pick.choice((False, True))
    print(case, *layouts, scale)
    q, k, v = (layout.make(x) for layout, x in zip(layouts, case.inputs(device, rng), strict=True))
    assert_matches(*fwd(q, k, v, case.causal, scale=scale), q, k, v, case.causal, scale)

    if case.len_k == 1:
        return  # dP - delta is 0 then, exactly so in the unfused computation; its noise adds up over rows and heads
    layouts = [pick.choice(DISTINCT_LAYOUTS) for _ in range(4)]
    scale = pick.choice((None, pick.uniform(0.1, 2) / case.head_dim**0.5))  # no larger, for the same reason
    print("backward", *layouts, scale, deterministic)
    dout = torch.randn(q.shape, generator=rng).to(device, q.dtype)
    q, k, v, dout = (layout.make(x) for layout, x in zip(layouts, (*case.inputs(device, rng), dout), strict=True))
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    dlse = torch.randn(q.shape[:3], generator=rng).to(device, wide)
    if pick.choice((False, True)):
        dlse = None
    given = bwd(dout, q, k, v, case.causal, scale=scale, dlse=dlse, deterministic=deterministic)
    assert_gradients_match(given, dout, q, k, v, case.causal, scale, dlse)
