"""Random calls over caches against float64: everything at once.

FLASH_CUTE_TEST_CACHES is how many are drawn; 10,000 take half an hour of a GPU.
"""

from __future__ import annotations

import os
import random
import time

import pytest
import torch
from caches import check
from random_caches import draw

pytestmark = pytest.mark.kernel

ASKED = os.environ.get("FLASH_CUTE_TEST_CACHES")
DRAWS = {"cpu": 150, "cuda": 600}
SECONDS = {"cpu": 15, "cuda": 120}  # of what is not asked for


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
