"""Fixtures of the integrations' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flash_cute.integrations import sdpa


@pytest.fixture
def sdpa_counters() -> Iterator[None]:
    """What SDPA's integration counts begins at 0, and PyTorch is as it was afterwards."""
    sdpa.report(reset=True)
    yield
    sdpa.disable()
    sdpa.report(reset=True)
