"""Names a call that does not end: a kernel that hangs blocks its process, and nothing else would say which it was."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

import pytest

SECONDS = 120  # on a busy machine a call takes one


@contextlib.contextmanager
def named_if_stuck(call: object, config: pytest.Config, seconds: float = SECONDS) -> Iterator[None]:
    """What runs in this block ends within so many seconds, or `call` is printed and the process ends."""
    done = threading.Event()
    watch = threading.Thread(target=_watch, args=(done, call, config, seconds), daemon=True)
    watch.start()
    try:
        yield
    finally:
        done.set()
        watch.join()


def _watch(done: threading.Event, call: object, config: pytest.Config, seconds: float) -> None:
    if done.wait(seconds):
        return
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.suspend_global_capture(in_=True)
    print(f"\nflash_cute: after {seconds} s this call has not ended: {call}", file=sys.stderr, flush=True)
    os._exit(70)  # Python cannot end a thread that waits for a GPU
