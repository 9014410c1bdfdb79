"""Random problems: shapes, strides, heads, mask, scale and dtype all at once."""

from __future__ import annotations

import random

import pytest
import torch
from cases import CAUSAL, CPU_DTYPES, CUDA_DTYPES, Case, Forward
from layouts import LAYOUTS
from numerics import assert_matches

pytestmark = pytest.mark.kernel


@pytest.mark.parametrize("number", range(48))
def test_exact(device: str, number: int, seed: int, fwd: Forward, rng: torch.Generator) -> None:
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
    print(case, *layouts, scale)
    q, k, v = (layout.make(x) for layout, x in zip(layouts, case.inputs(device, rng), strict=True))
    assert_matches(*fwd(q, k, v, case.causal, scale=scale), q, k, v, case.causal, scale)
