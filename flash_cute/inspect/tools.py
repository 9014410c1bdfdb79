"""What the modules of the inspector are built with: a C++ compiler, ninja, and the headers of CuTe and CUDA."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from .._toolchain import ToolchainError, find_csrc, find_cutlass, find_cxx, package_folders

__all__ = ["InspectError", "Tools", "default_csrc", "find_tools"]


class InspectError(ToolchainError):
    """A sentence that says what `flash_cute.inspect` lacks, and how to get it."""


@dataclass(frozen=True)
class Tools:
    cxx: str
    ninja: str
    is_gxx: bool
    includes: tuple[Path, ...]  # as system headers
    versions: tuple[str, ...]  # what the modules depend on beside their sources


def default_csrc() -> Path:
    """The sources of this package."""
    try:
        return find_csrc()
    except ToolchainError as error:
        raise InspectError(str(error)) from None


@functools.cache
def find_tools() -> Tools:
    try:
        cxx, cxx_version = find_cxx()
    except ToolchainError as error:
        raise InspectError(f"flash_cute.inspect compiles the kernels' traits: {error}") from None
    missing = []
    cutlass = find_cutlass()
    if cutlass is None:
        missing.append("CuTe's headers (nvidia-cutlass)")
    cuda = _find_cuda()
    if cuda is None:
        missing.append("CUDA's headers (nvidia-cuda-runtime, nvidia-cuda-crt and nvidia-cuda-cccl)")
    for name in ("pybind11", "ninja", "numpy"):
        if importlib.util.find_spec(name) is None and not (name == "ninja" and shutil.which(name)):
            missing.append(name)
    if missing or cutlass is None or cuda is None:
        raise InspectError(
            f"flash_cute.inspect needs {', '.join(missing)}: pip install '.[inspect]' in a checkout of flash_cute"
            " (or set CUTLASS_DIR and CUDA_HOME to a checkout and a toolkit that have them)."
        )
    import pybind11

    includes = (cutlass, *cuda, Path(pybind11.get_include()), Path(sysconfig.get_paths()["include"]))
    texts = [str(path) for path in includes]
    texts += [(cutlass / "cutlass/version.h").read_text(), (cuda[0] / "cuda_runtime_api.h").read_text()]
    versions = (cxx, cxx_version, pybind11.__version__, *texts)
    return Tools(cxx, _find_ninja(), "clang" not in cxx_version, includes, versions)


def _find_ninja() -> str:
    for folder in package_folders("ninja"):
        for candidate in (folder / "data/bin/ninja", folder.parents[3] / "bin/ninja"):
            if candidate.exists():
                return str(candidate)
    path = shutil.which("ninja")
    if path is None:
        raise InspectError("ninja was not found: pip install ninja.")
    return path


def _find_cuda() -> tuple[Path, ...] | None:
    """Include folders with the runtime's, the compiler's (crt) and libcu++'s headers."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    folders = [Path(home) / "include" for home in homes if home]
    folders += [home / "include" for folder in package_folders("nvidia") for home in sorted(folder.glob("cu*"))]
    folders += [Path("/usr/local/cuda/include")]
    for folder in folders:
        if not ((folder / "cuda_runtime_api.h").exists() and (folder / "crt/host_defines.h").exists()):
            continue
        for cccl in (folder / "cccl", folder):
            if (cccl / "cuda/std/utility").exists():
                return (folder, cccl)
    return None
