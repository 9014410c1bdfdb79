"""Other projects' packages that tests run with: those that the `test` extra installs."""

from __future__ import annotations

import importlib.util

from venvs import cannot


def need(package: str) -> None:
    """Skips where it is not installed; in CI that is a failure."""
    if importlib.util.find_spec(package) is None:
        cannot(f"{package} is not installed")
