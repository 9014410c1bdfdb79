"""Virtual environments with other versions of torch and Python, for the tests marked `venv`."""

from __future__ import annotations

import os
import re
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


def pythons() -> list[Path]:
    """The interpreters of this machine from 3.10 on that have what torch imports, oldest first, one of each version."""
    folders = [Path(name) for name in os.environ.get("PATH", "").split(os.pathsep) if name]
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    folders += sorted(root.glob("versions/*/bin"))
    found = {sys.version_info[:2]: Path(sys.executable)}
    for path in (path for folder in folders for path in sorted(folder.glob("python3.*"))):
        named = re.fullmatch(r"python3\.(\d+)", path.name)
        version = (3, int(named[1])) if named else (0, 0)
        if version < (3, 10) or version in found:
            continue
        if run([path, "-c", "import ctypes, ssl, venv"]).returncode == 0:
            found[version] = path
    return [found[version] for version in sorted(found)]


def make(folder: Path, version: str, python: Path | str = sys.executable) -> Path:
    """A venv of this Python with this torch; its interpreter."""
    made = run([python, "-m", "venv", "--without-pip", folder])
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
