"""Finds the schedules' library, compiles it on first use, and calls it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import _built
from .._toolchain import ToolchainError, find_csrc, find_cutlass, find_cxx
from . import _compile

try:
    import fcntl
except ImportError:  # no POSIX: two processes that build at once compile twice
    fcntl = None  # type: ignore[assignment]

GIB_PER_JOB = 4


class SchedulesError(ToolchainError):
    """A sentence that says what the schedules' library lacks, and how to get it."""


def names(head_dim: int | None = None) -> tuple[str, ...]:
    """The schedules, or those that serve a head dim.

    Example:
        >>> names(512)
        ('tiled_qkv',)
    """
    return tuple(name for name, most in _compile.MAX_HEAD_DIM.items() if head_dim is None or head_dim <= most)


def installed() -> Path | None:
    """The library that was compiled with FLASH_CUTE_SCHEDULES=1, beside the package's own."""
    path = _built.folder() / _compile.LIBRARY
    return path if path.exists() else None


def cache_folder() -> Path:
    """Where libraries compiled on first use are kept: $FLASH_CUTE_SCHEDULES_CACHE, else in the user's cache."""
    named = os.environ.get("FLASH_CUTE_SCHEDULES_CACHE")
    if named:
        return Path(named)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "flash_cute" / "schedules"


def compiled() -> Path | None:
    """The library if it is there already, installed or in the cache; nothing is compiled."""
    path = installed()
    if path is None:
        try:
            path = _cached(*_toolchain())
        except SchedulesError:
            return None
    return path if path.exists() else None


def library() -> Path:
    """The library, compiled now if it was not before: minutes, once, with a bar on stderr.

    Raises:
        SchedulesError: there is no compiler, a package is missing, or the sources do not compile.
    """
    path = compiled()
    if path is not None:
        return path
    csrc, tools, gencode = _toolchain()
    path = _cached(csrc, tools, gencode)
    with _locked(path.parent):
        if not path.exists():
            _compile_now(csrc, tools, gencode, path)
    return path


def report() -> list[dict[str, Any]]:
    """The compiler's account of the kernels, empty where they were not compiled yet.

    Keys: `schedule`, `head_dim`, `dtype`, `arch`, `registers`, `spill_stores`, `spill_loads` (bytes).
    """
    path = compiled()
    if path is None:
        return []
    kernels: list[dict[str, Any]] = json.loads((path.parent / _compile.REPORT).read_text())["kernels"]
    return kernels


def _cached(csrc: Path, tools: _compile.Toolchain, gencode: str) -> Path:
    return cache_folder() / _compile.digest(csrc, tools, gencode) / _compile.LIBRARY


def _toolchain() -> tuple[Path, _compile.Toolchain, str]:
    """The sources, what compiles them, and for which GPU: this machine's, else sm_80."""
    try:
        csrc = find_csrc()
        cxx, _ = find_cxx()
    except ToolchainError as error:
        raise SchedulesError(f"flash_cute.schedules compiles its kernels on first use: {error}") from None
    nvcc, cutlass = _compile.find_nvcc(), find_cutlass()
    cudart = nvcc and _compile.find_cudart(nvcc.parent.parent)
    if nvcc is None or cutlass is None or cudart is None:
        lacks = "CUDA compiler" if nvcc is None else "headers of CuTe"
        raise SchedulesError(
            f"flash_cute.schedules compiles its kernels on first use and found no {lacks}: "
            "pip install '.[schedules]' in a checkout of flash_cute (or set CUDA_HOME to a toolkit and CUTLASS_DIR to "
            "a CUTLASS checkout)."
        )
    if not (csrc / "studies/schedules/ops.cpp").exists():
        raise SchedulesError(f"{csrc} has no sources of the schedules; reinstall flash_cute.")
    include = nvcc.parent.parent / "include"
    includes = (cutlass, include, *(folder for folder in (include / "cccl",) if folder.exists()))
    tools = _compile.Toolchain(nvcc, cxx, cudart, includes, Path(torch.__file__).parent)
    return csrc.resolve(), tools, _gencode()


def _gencode() -> str:
    """One PTX, as the main library's sm80 kernels have it, and machine code for the GPU that is there."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (8, 0)
    if capability < (8, 0):
        raise SchedulesError(f"the schedules need a GPU of compute capability 8.0 or newer, and this is {capability}.")
    return f"arch=compute_80,code=sm_{capability[0]}{capability[1]}"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _jobs() -> int:
    """Compilers at once: the cores, fewer where memory is short."""
    named = os.environ.get("MAX_JOBS", "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if named.isdecimal() and int(named) > 0:
        return int(named)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") >> 30
    return max(1, min(cores, memory // GIB_PER_JOB))


def _compile_now(csrc: Path, tools: _compile.Toolchain, gencode: str, path: Path) -> None:
    from ..__main__ import Progress

    start, jobs = time.monotonic(), _jobs()
    files = len(_compile.instances())
    print(
        f"flash_cute.schedules: compiling {files} kernel files, once, with {jobs} jobs (about {files} core-minutes),"
        f" kept in {path.parent}",
        file=sys.stderr,
        flush=True,
    )
    progress = Progress("compiling", files + len(_compile.HOST_FILES))
    try:
        options = {"jobs": jobs, "on_done": lambda done, steps: progress()}
        _compile.build(csrc, tools, gencode, path.parent / "objects", path, **options)  # type: ignore[arg-type]
    except (_compile.CompileError, OSError, subprocess.SubprocessError) as error:
        raise SchedulesError(str(error)) from error
    finally:
        progress.close()
    print(f"flash_cute.schedules: compiled in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


@functools.cache
def _operator() -> Any:
    torch.ops.load_library(str(library()))
    return torch.ops.flash_cute_schedules.fwd.default


def fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool | str = False,
    *,
    schedule: str,
    window: tuple[int | None, int | None] = (None, None),
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention by the kernel of one schedule. A study: forward only, no autograd, never chosen by `flash_cute.fwd`.

    The first call compiles the kernels where they were not installed.

    Args:
        q: `(B, Hq, Nq, D)`, float16 or bfloat16, on a GPU.
        k: `(B, Hkv, Nk, D)`.
        v: `(B, Hkv, Nk, D)`.
        causal: as in `flash_cute.attention`.
        schedule: one of `names()`.
        window: keys that a row sees before and behind its position; None: all.
        scale: of the scores; default `1/sqrt(D)`.

    Returns:
        out `(B, Hq, Nq, D)`, laid out like q, and lse `(B, Hq, Nq)` in float32.

    Raises:
        ValueError: an argument is wrong; the message says which, what was expected and what was given.
        SchedulesError: the kernels cannot be compiled here.

    Example:
        >>> q = torch.randn(1, 8, 1024, 64, device="cuda", dtype=torch.float16)  # doctest: +SKIP
        >>> out, lse = fwd(q, q, q, True, schedule="split_kv")  # doctest: +SKIP
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or not x.is_cuda:
            given = x.device if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"flash_cute: {name}: expected a CUDA tensor, got {given}")
    if schedule not in names():
        raise ValueError(f"flash_cute: schedule: expected one of {', '.join(names())}, got {schedule!r}")
    if not isinstance(causal, bool | str):
        raise ValueError(f"flash_cute: causal: expected a bool or a string, got {causal!r}")
    mask = causal if isinstance(causal, str) else "bottom_right" if causal else "none"
    with torch.no_grad():
        result: tuple[Tensor, Tensor] = _operator()(q, k, v, mask, *window, scale, schedule)
    return result
