"""bench/'s commands in this process: to start one takes seconds, for importing torch."""

from __future__ import annotations

import contextlib
import importlib
import io
import sys

from repository import ROOT


def run(name: str, *arguments: str, status: int = 0) -> str:
    """What `python bench/NAME.py ARGUMENTS` prints on stdout; it must return `status`."""
    path, printed = [*sys.path], io.StringIO()
    sys.path.append(str(ROOT))  # last: it must not hide the installed package
    try:
        main = importlib.import_module(f"bench.{name}").main
        with contextlib.redirect_stdout(printed):
            returned = main(list(arguments))
    finally:
        sys.path[:] = path
    assert returned == status, printed.getvalue()
    return printed.getvalue()
