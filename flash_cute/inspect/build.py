"""Builds, on first use, the C++ module that instantiates csrc/'s kernel traits on the host.

One source a (kernel folder, head dim), compiled by ninja with the host's C++ compiler: no nvcc, no GPU. The
module is kept in a cache folder under a name that is a hash of everything that it was made from.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from .. import report

__all__ = ["ARCHS", "HEAD_DIMS", "InspectError", "build_module", "default_csrc", "default_head_dims"]

MODULE = Path(__file__).parent / "module"
ARCHS = ("sm80", "sm90")
HEAD_DIMS = (32, 64, 96, 128, 192, 256)  # where the library has no kernels to tell: build_tools/config.py's
MIN_GXX = 11
# Layouts are read from types: there is nothing for an optimizer to do.
CXX_FLAGS = ("-O0", "-g0", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-w")


class InspectError(RuntimeError):
    """A sentence that says what `flash_cute.inspect` lacks, and how to get it."""


@dataclass(frozen=True)
class Tools:
    cxx: str
    ninja: str
    includes: tuple[Path, ...]  # as system headers
    versions: tuple[str, ...]  # what the module depends on beside its sources


def default_csrc() -> Path:
    """The headers: in a wheel beside this package, in a checkout at its root."""
    for folder in (MODULE.parents[1] / "csrc", MODULE.parents[2] / "csrc"):
        if (folder / "params.h").exists():
            return folder
    raise InspectError("csrc/'s headers were not found beside the package; reinstall flash_cute.")


def default_head_dims() -> tuple[int, ...]:
    """Those of the kernels in this library."""
    names = [entry["file"] for entry in report.load()["kernels"]]
    found = {int(match[1]) for name in names if (match := re.search(r"_d(\d+)_", name))}
    return tuple(sorted(found)) or HEAD_DIMS


def cache_folder() -> Path:
    named = os.environ.get("FLASH_CUTE_INSPECT_CACHE")
    if named:
        return Path(named)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "flash_cute" / "inspect"


def build_module(csrc: Path, archs: tuple[str, ...], head_dims: tuple[int, ...]) -> ModuleType:
    """The module for these kernels, compiled unless it was before."""
    archs = tuple(arch for arch in archs if (csrc / arch / "fwd_traits.cuh").exists())
    if not archs:
        raise InspectError(f"{csrc} holds none of the kernel folders {', '.join(ARCHS)}.")
    tools = find_tools()
    sources = _sources(archs, head_dims)
    folder = cache_folder() / _digest(csrc, archs, tools, sources)
    library = folder / "_traits.so"
    if not library.exists():
        _compile(folder, csrc, tools, sources)
    # A name of its own: pybind11 keeps one module a name.
    spec = importlib.util.spec_from_file_location(f"flash_cute_inspect_{folder.name}._traits", library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _sources(archs: tuple[str, ...], head_dims: tuple[int, ...]) -> dict[str, str]:
    """The generated files: one a kernel folder and head dim, and one that calls them all."""
    files = {}
    names = []
    for arch in archs:
        for head_dim in head_dims:
            name = f"add_{arch}_d{head_dim}"
            names.append(name)
            files[f"{name}.cpp"] = (
                f'#include "host.h"\n#include "{arch}.h"\n'
                f"void {name}(Registry& registry) {{ inspect::{arch}::add<{head_dim}>(registry); }}\n"
            )
    declarations = "".join(f"void {name}(Registry&);\n" for name in names)
    calls = "".join(f"  {name}(registry);\n" for name in names)
    files["add_all.cpp"] = f'#include "registry.h"\n{declarations}void add_all(Registry& registry) {{\n{calls}}}\n'
    return files


def _digest(csrc: Path, archs: tuple[str, ...], tools: Tools, sources: dict[str, str]) -> str:
    digest = hashlib.sha256()
    folders = [csrc, csrc / "core", *(csrc / arch for arch in archs), MODULE]
    for folder in folders:
        for path in sorted(folder.iterdir()):
            if path.suffix in (".h", ".cuh", ".cpp"):
                digest.update(f"{folder.name}/{path.name}\0".encode() + path.read_bytes() + b"\0")
    for name, text in sources.items():
        digest.update(f"{name}\0{text}\0".encode())
    digest.update("\0".join((*tools.versions, *CXX_FLAGS, sys.version, sysconfig.get_platform())).encode())
    return digest.hexdigest()[:24]


def _compile(folder: Path, csrc: Path, tools: Tools, sources: dict[str, str]) -> None:
    """In a folder of its own, renamed when complete: two processes may do this at once."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="building-", dir=folder.parent))
    try:
        for name, text in sources.items():
            (work / name).write_text(text)
        (work / "build.ninja").write_text(_ninja_file(csrc, tools, list(sources)))
        done = subprocess.run([tools.ninja, "-C", str(work)], capture_output=True, text=True, check=False)
        if done.returncode:
            errors = [line for line in done.stdout.splitlines() if "error" in line][:5]
            log = "\n".join(errors or (done.stdout + done.stderr).splitlines()[-20:])
            raise InspectError(f"compiling the traits of {csrc} with {tools.cxx} failed:\n{log}")
        for path in [*work.glob("*.o"), *work.glob("*.gch")]:
            path.unlink()
        try:
            work.rename(folder)
        except OSError:
            if not (folder / "_traits.so").exists():  # nor did another process make it
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _ninja_file(csrc: Path, tools: Tools, sources: list[str]) -> str:
    includes = [f'"-I{folder}"' for folder in (csrc.resolve(), MODULE)]
    includes += [f'-isystem "{folder}"' for folder in tools.includes]
    lines = [
        f"cxx = {tools.cxx}",
        f"flags = {' '.join([*CXX_FLAGS, *includes])}",
        "rule header",  # CuTe's headers, parsed once for all sources
        "  command = $cxx $flags -x c++-header $in -o $out",
        "rule cxx",
        "  command = $cxx -I. $flags -c $in -o $out",
        "rule link",
        "  command = $cxx -shared $in -o $out",
    ]
    header = MODULE / "host.h"
    lines.append(f"build host.h.gch: header {_escaped(header)}")
    objects = []
    for source in [*(str(name) for name in sources), str(MODULE / "module.cpp")]:
        out = f"{Path(source).stem}.o"
        objects.append(out)
        lines.append(f"build {out}: cxx {_escaped(source)} | host.h.gch")
    lines.append(f"build _traits.so: link {' '.join(objects)}")
    return "\n".join(lines) + "\n"


def _escaped(path: Path | str) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


# --- What it is built with --------------------------------------------------------------------------------


@functools.cache
def find_tools() -> Tools:
    cxx, cxx_version = _find_cxx()
    missing = []
    cutlass = _find_cutlass()
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
            f"flash_cute.inspect needs {', '.join(missing)}: pip install 'flash_cute[inspect]'"
            " (or set CUTLASS_DIR and CUDA_HOME to a checkout and a toolkit that have them)."
        )
    import pybind11

    includes = (cutlass, *cuda, Path(pybind11.get_include()), Path(sysconfig.get_paths()["include"]))
    texts = [str(path) for path in includes]
    texts += [(cutlass / "cutlass/version.h").read_text(), (cuda[0] / "cuda_runtime_api.h").read_text()]
    return Tools(cxx, _find_ninja(), includes, (cxx, cxx_version, pybind11.__version__, *texts))


def _find_cxx() -> tuple[str, str]:
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
        raise InspectError("ninja was not found: pip install 'flash_cute[inspect]'.")
    return path


def _find_cutlass() -> Path | None:
    named = os.environ.get("CUTLASS_DIR")
    folders = [Path(named) / "include"] if named else []
    folders += [MODULE.parents[2] / "third_party/cutlass/include"]
    folders += [place / "source/include" for place in _package_folders("cutlass_library")]
    return next((folder for folder in folders if (folder / "cute/tensor.hpp").exists()), None)


def _find_cuda() -> tuple[Path, ...] | None:
    """Include folders with the runtime's, the compiler's (crt) and libcu++'s headers."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    folders = [Path(home) / "include" for home in homes if home]
    folders += [home / "include" for place in _package_folders("nvidia") for home in sorted(place.glob("cu*"))]
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
    return [Path(place) for place in spec.submodule_search_locations or []] if spec else []
