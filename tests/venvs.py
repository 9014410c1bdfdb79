"""Virtual environments with other torch versions, for the tests marked `venv`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
from background import run

CPU_ONLY = "2.13.0+cpu"  # any would do


def pip(python: Path | str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs this environment's pip on another's interpreter, so that a venv needs no pip of its own."""
    return run([sys.executable, "-m", "pip", "--python", python, *words])


def make(folder: Path, version: str) -> Path:
    """A venv with this torch; its interpreter."""
    made = run([sys.executable, "-m", "venv", "--without-pip", folder])
    assert made.returncode == 0, made.stderr
    python = folder / "bin/python"
    # Compiling torch's Python files would take half as long again as installing it.
    got = pip(python, "install", "--no-compile", f"torch=={version}", "numpy")
    if got.returncode:
        cannot(f"pip cannot install torch {version}: {got.stderr.strip().splitlines()[-1]}")
    return python


def cannot(why: str) -> NoReturn:
    """Skips where there is no index to install from; in CI that is a failure."""
    if os.environ.get("FLASH_CUTE_REQUIRE_VENVS"):
        pytest.fail(why)
    pytest.skip(why)
