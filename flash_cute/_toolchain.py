"""What compiles csrc/ on a user's machine, on first use: its sources, a C++ compiler, and the headers of CuTe.

flash_cute.inspect compiles the kernels' traits, and flash_cute.schedules kernels; the library itself is built by
build_tools.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

__all__ = ["ToolchainError", "find_csrc", "find_cutlass", "find_cxx", "package_folders"]

PACKAGE = Path(__file__).resolve().parent
MIN_GXX = 11


class ToolchainError(RuntimeError):
    """A sentence that says what is missing, and how to get it."""


def find_csrc() -> Path:
    """The sources: in a wheel in this package, in a checkout beside it."""
    for folder in (PACKAGE / "csrc", PACKAGE.parent / "csrc"):
        if (folder / "contract/params.h").exists():
            return folder
    raise ToolchainError("csrc/'s headers were not found beside the package; reinstall flash_cute.")


def find_cxx() -> tuple[str, str]:
    """The C++ compiler, $CXX or g++, and what it says of its version."""
    named = os.environ.get("CXX", "g++")
    path = shutil.which(named)
    if path is None:
        raise ToolchainError(
            f"there is no C++ compiler: {named!r} is not on PATH; install g++ (Debian: apt install g++) or set CXX."
        )
    version = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    number = subprocess.run([path, "-dumpversion"], capture_output=True, text=True, check=False).stdout
    major = int(number.split(".")[0]) if number[:1].isdigit() else 0
    if "clang" not in version and major < MIN_GXX:
        raise ToolchainError(f"{path} is version {number.strip()}, and C++20 needs g++ {MIN_GXX} or later; set CXX.")
    return path, version


def find_cutlass() -> Path | None:
    """CuTe's headers: $CUTLASS_DIR's, the checkout's, or the nvidia-cutlass package's."""
    named = os.environ.get("CUTLASS_DIR")
    folders = [Path(named) / "include"] if named else []
    folders += [PACKAGE.parent / "third_party/cutlass/include"]
    folders += [folder / "source/include" for folder in package_folders("cutlass_library")]
    return next((folder for folder in folders if (folder / "cute/tensor.hpp").exists()), None)


def package_folders(name: str) -> list[Path]:
    """A package's folders, without importing it."""
    spec = importlib.util.find_spec(name)
    return [Path(folder) for folder in spec.submodule_search_locations or []] if spec else []
