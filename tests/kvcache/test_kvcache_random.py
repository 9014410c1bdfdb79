"""Random calls over caches against float64: everything at once.

FLASH_CUTE_TEST_CACHES is how many are drawn; 10,000 take half an hour of a GPU.
"""

from __future__ import annotations

import os
import random
import time
from typing import Any

import pytest
import torch
from caches import FLOAT8, STORAGES, Cached, check, make
from cases import CAUSAL, CPU_DTYPES, CUDA_DTYPES

pytestmark = pytest.mark.kernel

ASKED = os.environ.get("FLASH_CUTE_TEST_CACHES")
DRAWS = {"cpu": 150, "cuda": 600}
SECONDS = {"cpu": 15, "cuda": 120}  # of what is not asked for
LONGEST = {"cpu": 300, "cuda": 5000}
HEAD_DIMS = ((64, 64), (128, 128), (96, 96), (256, 256), (192, 128), (576, 512), (32, 64), (512, 512), (80, 80))


def draw(pick: random.Random, rng: torch.Generator, device: str) -> tuple[dict[str, Any], Cached]:
    """The arguments of `make`, and the call."""
    count = pick.randint(1, 5)
    longest = LONGEST[device]
    lengths = [pick.choice((-1, 0, pick.randint(1, 64), pick.randint(1, longest))) for _ in range(count)]
    ragged = pick.random() < 0.4
    rows: Any = (
        [pick.choice((0, 1, pick.randint(1, 40))) for _ in range(count)]
        if ragged
        else pick.choice((1, 1, 2, 4, 16, 40))
    )
    heads_kv, group = pick.choice((1, 2, 3)), pick.choice((1, 4, 8, 16))
    head_dim, head_dim_v = pick.choice(HEAD_DIMS)
    dtype = pick.choice(CPU_DTYPES if device == "cpu" else CUDA_DTYPES)
    options: dict[str, Any] = {
        "page": pick.choice((None, 1, 4, 16, 16, 48, 64, 256, 512)),
        "appends": pick.random() < 0.5,
        "new_keys": pick.choice((None, 0, 1, 9)),
        "heads_q": heads_kv * group,
        "heads_kv": heads_kv,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "dtype": dtype,
        "kv_layout": pick.choice(("NHD", "HND")),
        "storage": pick.choice(STORAGES if head_dim >= head_dim_v else STORAGES[:-2]),
        "room": pick.choice((0, 1, 100)),
        "shared": pick.random() < 0.3,
        "causal": pick.choice((True, True, *CAUSAL)),
        "window": pick.choice((None, None, (pick.randint(0, 100), 0), (pick.randint(0, 1000), pick.randint(0, 9)))),
        "softcap": pick.choice((None, None, 8.0)),
        "scale": pick.choice((None, pick.uniform(0.03, 0.2))),
    }
    if pick.random() < 0.3:
        own = options["storage"] == "plain" or options["storage"] == "gaps"
        options["cache_dtypes"] = (pick.choice(FLOAT8),) * 2 if not own else pick.choices(FLOAT8, k=2)
        options["descales"] = pick.choice(("none", "number", "heads"))
    if pick.random() < 0.3:
        options["sinks"] = torch.randn(heads_kv * group, generator=rng).to(device)
    if pick.random() < 0.2:
        shape = (heads_kv * group,) if pick.random() < 0.5 else (count, heads_kv * group)
        options["alibi_slopes"] = torch.rand(shape, generator=rng).to(device)
    case = make(rng, device, lengths, rows, **options)
    return {"lengths": lengths, "rows": rows, **options}, case


def test_random_calls(device: str, backend: str | None, rng: torch.Generator, seed: int) -> None:
    pick, start = random.Random(seed), time.monotonic()
    draws, seconds = (int(ASKED), float("inf")) if ASKED else (DRAWS[device], SECONDS[device])
    done, bad = 0, []
    while done < draws and time.monotonic() - start < seconds:
        arguments, case = draw(pick, rng, device)
        try:
            check(case, backend)
        except AssertionError as error:
            bad.append(f"{done}: {str(error).splitlines()[0]} in {arguments}")
        done += 1
    print(f"{done} calls in {time.monotonic() - start:.0f} s, {len(bad)} bad")
    assert not bad, "\n".join(bad[:20])
    assert done >= min(draws, 40)
