"""numpy may be absent: nothing of flash_cute needs it, and nobody's warning is a new user's first line."""

from __future__ import annotations

from collections.abc import Callable

import pytest

SCRIPT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "numpy":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
sys.stderr = sys.stdout
"""
CALLS = """
import flash_cute, torch
q, k, v = (torch.randn(1, 2, 40, 32, requires_grad=True) for _ in range(3))
flash_cute.attention(q, k, v, causal=True).sum().backward()
print(flash_cute.explain(q, k, v).data["backend"])
"""
COMMAND = """
import runpy
sys.argv[1:] = ["--device", "cpu", "--N", "40", "--D", "32", "--iters", "1", "--backward"]
runpy.run_module("flash_cute", run_name="__main__")
"""


@pytest.mark.parametrize("use", [CALLS, COMMAND], ids=["calls", "command"])
def test_without_numpy(use: str, python: Callable[..., str]) -> None:
    printed = python(SCRIPT + use)
    assert "cpu" in printed
    assert "warn" not in printed.lower() and "numpy" not in printed.lower()
