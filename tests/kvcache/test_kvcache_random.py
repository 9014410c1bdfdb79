"""Random calls over caches against float64: everything at once.

FLASH_CUTE_TEST_CACHES is how many are drawn; 10,000 take half an hour of a GPU.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from caches import check
from random_caches import draw
from stuck import named_if_stuck

pytestmark = pytest.mark.kernel

ASKED = os.environ.get("FLASH_CUTE_TEST_CACHES")
DRAWS = {"cpu": 150, "cuda": 600}
SECONDS = {"cpu": 15, "cuda": 120}  # of what is not asked for


def test_random_calls(
    device: str, backend: str | None, rng: torch.Generator, seed: int, request: pytest.FixtureRequest
) -> None:
    pick, start = random.Random(seed), time.monotonic()
    draws, seconds = (int(ASKED), float("inf")) if ASKED else (DRAWS[device], SECONDS[device])
    done, bad = 0, []
    while done < draws and time.monotonic() - start < seconds:
        arguments, case = draw(pick, rng, device)
        try:
            with named_if_stuck(arguments, request.config):
                check(case, backend)
        except AssertionError as error:
            bad.append(f"{done}: {str(error).splitlines()[0]} in {arguments}")
        done += 1
    print(f"{done} calls in {time.monotonic() - start:.0f} s, {len(bad)} bad")
    assert not bad, "\n".join(bad[:20])
    assert done >= min(draws, 40)


def test_a_call_that_does_not_end_is_named() -> None:
    script = """
import time, types
from stuck import named_if_stuck
config = types.SimpleNamespace(pluginmanager=types.SimpleNamespace(getplugin=lambda name: None))
with named_if_stuck("one that ends", config, 30):
    pass
with named_if_stuck({"page": 16}, config, 0.1):
    time.sleep(60)
"""
    helpers = str(Path(__file__).parents[1] / "helpers")
    path = os.pathsep.join([helpers, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 70
    assert "after 0.1 s this call has not ended: {'page': 16}" in done.stderr and "one that ends" not in done.stderr
