"""Virtual environments with other torch versions, for the tests marked `venv`.

To make one takes a minute of one core and of the network. So what such a test needs may be begun in the background when
the tests have been collected, and be ready when its turn comes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest

CPU_ONLY = "2.13.0+cpu"  # any would do

# As they were when the tests were collected: meanwhile tests change both.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
FOLDER = Path.cwd()

_one_at_a_time = ThreadPoolExecutor(1)  # each takes gigabytes of disk
_begun: dict[tuple[Any, ...], Future[Any]] = {}
_running: set[subprocess.Popen[str]] = set()


def begin(job: Callable[..., Any], *arguments: Any) -> None:
    """Let the job run in the background, once; `result` has what it returns."""
    key = (job, *arguments)
    if key not in _begun:
        _begun[key] = _one_at_a_time.submit(job, *arguments)


def result(job: Callable[..., Any], *arguments: Any) -> Any:
    """What the job returns, or its exception: a skip or a failure as well. It need not have been begun."""
    begin(job, *arguments)
    return _begun[(job, *arguments)].result()


def end() -> None:
    """Give up what was begun and nobody waits for, as after `pytest -x`."""
    _one_at_a_time.shutdown(wait=False, cancel_futures=True)
    for process in list(_running):
        process.kill()


def run(command: Sequence[str | Path], cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    words, env = [str(word) for word in command], {**ENVIRONMENT, **environment}
    pipe = subprocess.PIPE
    with subprocess.Popen(words, cwd=cwd or FOLDER, env=env, stdout=pipe, stderr=pipe, text=True) as process:
        _running.add(process)
        out, err = process.communicate()
        _running.discard(process)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


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
