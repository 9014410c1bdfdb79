"""What takes minutes, and not of the core that runs the tests: begun when they have been collected, ready when needed.

A test module whose tests wait for such a thing has a function `begin(item)`, which is called with each of its tests
that will run. Under xdist nothing is begun, since only one of the workers would have the test: it runs such modules
first, while the other worker has the rest.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

# As they were when the tests were collected: meanwhile tests change both.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
FOLDER = Path.cwd()

_one_at_a_time = ThreadPoolExecutor(1)  # there is one other core, and a torch takes gigabytes of disk
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
