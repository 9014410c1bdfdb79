"""The kernels that flash_cute.inspect describes: the library's, and those of sources with mistakes."""

from __future__ import annotations

from pathlib import Path

import background
import compiled
import pytest

from flash_cute import inspect
from flash_cute.inspect.kernels import Kernel


@pytest.fixture(scope="session")
def kernels() -> tuple[Kernel, ...]:
    background.result(compiled.modules)
    return inspect.kernels()


@pytest.fixture(scope="session")
def broken_csrc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled.copy_with_mistakes(tmp_path_factory.mktemp("csrc") / "csrc")


@pytest.fixture(scope="session")
def broken(broken_csrc: Path) -> tuple[Kernel, ...]:
    background.result(compiled.modules)
    return inspect.kernels(broken_csrc, archs=("sm80",), directions=("fwd",), head_dims=(64,))
