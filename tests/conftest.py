r"""Options, marks and fixtures of the tests.

    pytest tests                         everything; CUDA cases are skipped where there is no GPU. On a Hopper GPU the
                                         kernel tests force sm90, since the plan would give small calls to sm80
    pytest tests --seed 17               with the inputs of the run whose header printed seed 17
    pytest tests -n 2 --dist loadfile --no-loadscope-reorder
                                         in two processes, as CI does
    pytest tests --emulated              with those of the emulated machine, see emulated/emulator.py
    pytest tests --backend sm80          only the kernel tests, on that backend
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --kernel-name kns=flash_cute \
        python -m pytest tests -m sanitizer --oracle cpu
                                         memcheck; with --tool synccheck, waits and arrivals at barriers
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["FLASH_CUTE_TEST_TILES"] = "1"  # before flash_cute is loaded: tests may force a tile, see test_tiles.py

import background
import numerics
import pytest
import torch
from cases import Backward, Causal, Forward

import flash_cute

HELPERS = Path(numerics.__file__).parent
MARKS = (
    "cuda: needs a GPU of compute capability 8.0 or newer",
    "kernel: tests a kernel, so it runs again for each backend forced with --backend",
    "sanitizer: small enough to run under compute-sanitizer",
    "emulated: compiles kernels for the emulated machine and runs them there; minutes, with --emulated alone",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("flash_cute")
    group.addoption("--seed", type=int, help="repeat the run that printed this seed")
    group.addoption("--emulated", action="store_true", help="run Hopper kernels on the emulated machine too: minutes")
    group.addoption("--backend", help="run only the CUDA kernel tests, and force this backend in them")
    group.addoption(
        "--oracle",
        choices=("device", "cpu"),
        default="device",
        help="where the float64 reference is computed: beside the inputs (default) or on the CPU",
    )


def pytest_configure(config: pytest.Config) -> None:
    for mark in MARKS:
        config.addinivalue_line("markers", mark)
    if config.option.seed is None:
        config.option.seed = random.SystemRandom().randrange(2**31)
    if config.option.oracle == "cpu":
        numerics.oracle_device = "cpu"
    # The problems are small: on a busy machine threads that wait for each other made the suite 20 times slower.
    torch.set_num_threads(1)


def pytest_report_header(config: pytest.Config) -> list[str]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    forced = f", backend {config.option.backend}" if config.option.backend else ""
    return [f"flash_cute: seed {config.option.seed}, torch {torch.__version__}, {gpu}{forced}"]


def _why_no_cuda() -> str | None:
    if not torch.cuda.is_available():
        return "there is no CUDA GPU"
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        return f"the GPU's compute capability is {capability[0]}.{capability[1]}, 8.0 is needed"
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # of xdist: what takes minutes is not begun early, so it comes first
        items.sort(key=lambda item: not _has_begin(item))
    if config.option.backend:
        kept = [i for i in items if i.get_closest_marker("kernel") and i.get_closest_marker("cuda")]
        config.hook.pytest_deselected(items=[i for i in items if i not in set(kept)])
        items[:] = kept
    if not config.option.emulated:
        for item in items:
            if item.get_closest_marker("emulated"):
                item.add_marker(pytest.mark.skip(reason="it takes minutes: pass --emulated"))
    reason = _why_no_cuda()
    if reason:
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begins what some of the tests will wait for, see background.py."""
    if session.config.option.collectonly or hasattr(session.config, "workerinput"):
        return
    for item in session.items:
        if _has_begin(item):
            item.module.begin(item)


def _has_begin(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and hasattr(item.module, "begin")


def pytest_sessionfinish() -> None:
    background.end()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> str:
    """Each device that a promise is tested on; a test may parametrize it itself."""
    return request.param


@pytest.fixture
def backend(request: pytest.FixtureRequest, device: str) -> str | None:
    """The backend that --backend forces on CUDA tensors, on a Hopper GPU else sm90; None where the plan may choose."""
    if not device.startswith("cuda"):
        return None
    return request.config.option.backend or ("sm90" if flash_cute.backends()["sm90"] else None)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """This test's own seed, from the run's and the test's name, so that it can be repeated alone."""
    return zlib.crc32(f"{request.config.option.seed} {request.node.name}".encode())


@pytest.fixture
def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def fwd(backend: str | None) -> Forward:
    """`flash_cute.fwd` on the backend under test, its outputs full of NaN before it runs."""

    def call(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: Causal = False, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with numerics.nan_in_new_memory(q):
            return flash_cute.fwd(q, k, v, causal, backend=backend, **options)

    return call


@pytest.fixture
def bwd(backend: str | None) -> Backward:
    """The gradients of an attention on the backend under test; outputs and workspace full of NaN before."""

    def call(
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: Causal = False,
        *,
        dlse: torch.Tensor | None = None,
        deterministic: bool = False,
        **options: Any,
    ) -> tuple[torch.Tensor, ...]:
        options["backend"] = backend
        with torch.no_grad(), numerics.nan_in_new_memory(q):
            out, lse = flash_cute.fwd(q, k, v, causal, **options)
            return flash_cute.bwd(dout, q, k, v, out, lse, causal, dlse=dlse, deterministic=deterministic, **options)

    return call


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., str]:
    """Runs a script in a process of its own; returns what it printed, fails if it failed."""
    package = Path(flash_cute.__file__).parents[1]

    def run(script: str, *, timeout: float = 120, **environment: str) -> str:
        path = [str(HELPERS), str(package), os.environ.get("PYTHONPATH", "")]
        env: dict[str, Any] = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            **environment,
        }
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=env,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    return run
