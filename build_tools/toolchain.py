"""Where the compilers and headers come from."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from .compiler import LINKS
from .config import ROOT
from .errors import BuildError

# Older compilers were never measured, and register counts, spills and wgmma serialisation are the
# compiler's doing; machine code for sm_120 needs 12.8 in any case.
MIN_NVCC = (13, 0)
MIN_GXX = 11  # C++20 as csrc/ uses it


@dataclass(frozen=True)
class CudaToolkit:
    home: Path
    version: str  # nvcc's, e.g. "13.0.88"

    @property
    def nvcc(self) -> Path:
        return self.home / "bin" / "nvcc"

    @property
    def cudart(self) -> Path:
        """The static runtime, through build/links/."""
        return LINKS / "cuda" / _cudart(self.home).relative_to(self.home)


def find_toolkit() -> CudaToolkit:
    """An installed toolkit that is recent enough, else the parts from PyPI."""
    refused = []
    for home in [*_installed_homes(), *_pypi_homes()]:
        problem = _problem(home)
        if problem is None:
            return CudaToolkit(home, _nvcc_version(home))
        refused.append(f"{home} {problem}")
    wanted = ".".join(map(str, MIN_NVCC))
    raise BuildError(
        f"no CUDA compiler of release {wanted} or later was found"
        + (f" ({'; '.join(refused)})" if refused else "")
        + ": install a toolkit and set CUDA_HOME, or install the nvidia-* packages that pyproject.toml"
        " names, or set FLASH_CUTE_NO_CUDA=1 to build without kernels."
    )


def find_cutlass() -> Path:
    """CuTe's include folder: $CUTLASS_DIR, else third_party/cutlass, else the nvidia-cutlass package."""
    named = os.environ.get("CUTLASS_DIR")
    if named:
        if not (Path(named) / "include/cute/tensor.hpp").exists():
            raise BuildError(f"CUTLASS_DIR={named} holds no include/cute/tensor.hpp.")
        return Path(named) / "include"
    folders = [ROOT / "third_party/cutlass/include"]
    folders += [place / "source/include" for place in _package_folders("cutlass_library")]
    for folder in folders:
        if (folder / "cute/tensor.hpp").exists():
            return folder
    raise BuildError(
        "CuTe's headers were not found: install the nvidia-cutlass package that pyproject.toml names,"
        " or set CUTLASS_DIR to a CUTLASS checkout."
    )


def find_cxx() -> str:
    """The host C++ compiler: $CXX, else g++."""
    cxx = os.environ.get("CXX", "g++")
    path = shutil.which(cxx)
    if path is None:
        raise BuildError(f"no C++ compiler: {cxx!r} is not on PATH; install g++ (Debian: apt install g++) or set CXX.")
    answer = _version(path)
    major = int(answer.split(".")[0]) if answer[:1].isdigit() else 0
    if "clang" not in Path(path).name and major < MIN_GXX:
        raise BuildError(f"{path} is version {answer or 'unknown'}, and C++20 needs g++ {MIN_GXX} or later; set CXX.")
    return path


def find_ninja() -> str:
    for folder in _package_folders("ninja"):
        for candidate in (folder / "data/bin/ninja", folder.parents[3] / "bin/ninja"):
            if candidate.exists():
                return str(candidate)
    path = shutil.which("ninja")
    if path is None:
        raise BuildError("ninja was not found: pip install ninja.")
    return path


def install_tools(cxx: str, ninja: str, toolkit: CudaToolkit | None, links: dict[str, Path]) -> dict[str, str]:
    """Makes build/links/, and build/bin/ with the compilers behind compiler.py; the environment that selects them.

    The names in a command are then the same in every build. PYTORCH_NVCC is torch.utils.cpp_extension's own variable.
    """
    bin_folder = ROOT / "build/bin"
    for folder in (LINKS, bin_folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    for name, target in links.items():
        (LINKS / name).symlink_to(target.absolute())
    (bin_folder / "ninja").symlink_to(Path(ninja).absolute())
    _write_program(bin_folder / Path(cxx).name, _version(cxx), cxx)
    environment = {"PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}", "CXX": Path(cxx).name}
    if toolkit:
        _write_program(bin_folder / "nvcc", toolkit.version, str(LINKS / "cuda/bin/nvcc"))
        environment["PYTORCH_NVCC"] = "nvcc"
    return environment


def _write_program(path: Path, version: str, compiler: str) -> None:
    words = [sys.executable, str(ROOT / "build_tools/compiler.py"), version, compiler]
    path.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    path.chmod(0o755)


def _version(cxx: str) -> str:
    return subprocess.run([cxx, "-dumpfullversion", "-dumpversion"], capture_output=True, text=True).stdout.strip()


def _package_folders(name: str) -> list[Path]:
    """A package's folders, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None:
        return []
    return [Path(place) for place in spec.submodule_search_locations or []]


def _installed_homes() -> list[Path]:
    named = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    on_path = shutil.which("nvcc")
    homes = [Path(home) for home in named if home]
    if on_path:
        homes.append(Path(on_path).resolve().parent.parent)
    seen: list[Path] = []
    for home in homes:
        if home not in seen and (home / "bin/nvcc").exists():
            seen.append(home)
    return seen


def _pypi_homes() -> list[Path]:
    return [nvcc.parent.parent for place in _package_folders("nvidia") for nvcc in sorted(place.glob("cu*/bin/nvcc"))]


def _problem(home: Path) -> str | None:
    version = _nvcc_version(home)
    if not version:
        return "has no nvcc that runs"
    if tuple(map(int, version.split(".")[:2])) < MIN_NVCC:
        return f"is release {version}"
    for part in ("include/cuda_runtime_api.h", "include/crt/host_defines.h", "nvvm/bin/cicc", "bin/ptxas"):
        if not (home / part).exists():
            return f"lacks {part}"
    if not _cudart(home).exists():
        return "lacks libcudart_static.a"
    return None


def _nvcc_version(home: Path) -> str:
    try:
        answer = subprocess.run([home / "bin/nvcc", "--version"], capture_output=True, text=True).stdout
    except OSError:
        return ""
    found = re.search(r"\bV(\d+\.\d+\.\d+)", answer)
    return found[1] if found else ""


def _cudart(home: Path) -> Path:
    folders = [home / "lib64", home / "lib", *sorted(home.glob("targets/*/lib"))]
    for folder in folders:
        if (folder / "libcudart_static.a").exists():
            return folder / "libcudart_static.a"
    return home / "lib64/libcudart_static.a"
