"""What the modules of the inspector are built with: a C++ compiler, ninja, and the headers of CuTe and CUDA."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

__all__ = ["InspectError", "Tools", "find_cutlass", "find_cxx", "find_tools"]

PACKAGE = Path(__file__).resolve().parents[1]
MIN_GXX = 11


class InspectError(RuntimeError):
    """A sentence that says what `flash_cute.inspect` lacks, and how to get it."""


@dataclass(frozen=True)
class Tools:
    cxx: str
    ninja: str
    is_gxx: bool
    includes: tuple[Path, ...]  # as system headers
    versions: tuple[str, ...]  # what the modules depend on beside their sources


@functools.cache
def find_tools() -> Tools:
    cxx, cxx_version = find_cxx()
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


def find_cxx() -> tuple[str, str]:
    named = os.environ.get("CXX", "g++")
    path = shutil.which(named)
    if path is None:
        raise InspectError(
            f"flash_cute.inspect compiles the kernels' traits, and there is no C++ compiler: {named!r} is not on"
            " PATH; install g++ (Debian: apt install g++) or set CXX."
        )
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    number = subprocess.run([path, "-dumpversion"], capture_output=True, text=True, check=False).stdout
    major = int(number.split(".")[0]) if number[:1].isdigit() else 0
    if "clang" not in version and major < MIN_GXX:
        raise InspectError(f"{path} is version {number.strip()}, and C++20 needs g++ {MIN_GXX} or later; set CXX.")
    return path, version


def _find_ninja() -> str:
    for folder in _package_folders("ninja"):
        for candidate in (folder / "data/bin/ninja", folder.parents[3] / "bin/ninja"):
            if candidate.exists():
                return str(candidate)
    path = shutil.which("ninja")
    if path is None:
        raise InspectError("ninja was not found: pip install ninja.")
    return path


def find_cutlass() -> Path | None:
    named = os.environ.get("CUTLASS_DIR")
    folders = [Path(named) / "include"] if named else []
    folders += [PACKAGE.parent / "third_party/cutlass/include"]
    folders += [folder / "source/include" for folder in _package_folders("cutlass_library")]
    return next((folder for folder in folders if (folder / "cute/tensor.hpp").exists()), None)


def _find_cuda() -> tuple[Path, ...] | None:
    """Include folders with the runtime's, the compiler's (crt) and libcu++'s headers."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    folders = [Path(home) / "include" for home in homes if home]
    folders += [home / "include" for folder in _package_folders("nvidia") for home in sorted(folder.glob("cu*"))]
    folders += [Path("/usr/local/cuda/include")]
    for folder in folders:
        if not ((folder / "cuda_runtime_api.h").exists() and (folder / "crt/host_defines.h").exists()):
            continue
        for cccl in (folder / "cccl", folder):
            if (cccl / "cuda/std/utility").exists():
                return (folder, cccl)
    return None


def _package_folders(name: str) -> list[Path]:
    """A package's folders, without importing it."""
    spec = importlib.util.find_spec(name)
    return [Path(folder) for folder in spec.submodule_search_locations or []] if spec else []
