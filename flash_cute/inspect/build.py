"""Builds, on first use, the C++ modules that instantiate csrc/'s kernel traits on the host.

A unit for each (kernel, head dim), and one for the mask that they share; only those asked for are compiled, by ninja
with the host's C++ compiler: no nvcc, no GPU. Units of one kernel that are missing at once become one module, since
they have half of their types in common. Modules are kept in a cache folder under a name that is a hash of everything
that they were made from.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from .. import report
from .tools import InspectError, Tools, default_csrc, find_tools

try:
    import fcntl
except ImportError:  # no POSIX: two processes that build at once compile twice
    fcntl = None  # type: ignore[assignment]

__all__ = [
    "ARCHS",
    "BAND",
    "CACHES",
    "DIRECTIONS",
    "HEAD_DIMS",
    "InspectError",
    "Unit",
    "build_modules",
    "default_csrc",
    "default_head_dims",
    "units",
]

MODULE = Path(__file__).resolve().parent / "module"
ARCHS = ("sm80", "sm90")
DIRECTIONS = ("fwd", "bwd")
FOLDERS = {"fwd": "forward/", "bwd": "backward/"}  # of csrc/<arch>/, in which the families have theirs
LAYOUTS_OF_ANOTHER = ("forward/masked_rows", "forward/key_chunks")  # families with the layouts of forward/rows
# Where the library has no kernels to tell: those of build_tools/config.py.
HEAD_DIMS = (32, 64, 96, 128, 192, 256, 320, 512, 1024)
# Layouts are read from types: there is nothing for an optimizer to do. The parameters keep g++ from collecting its
# garbage again and again, an eighth of the time.
GXX_MEMORY = ("--param=ggc-min-expand=400", "--param=ggc-min-heapsize=1000000")
CXX_FLAGS = ("-O0", "-g0", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-w")
# Further flags of the modules that are asked for alone: band.cpp walks over millions of tiles, caches.cpp runs warps.
FLAGS_OF = {"band": ("-O1",), "caches": ("-O1",)}
# Seconds of one core that a unit takes, and the headers that all share. Every further unit of a module takes half.
SECONDS = {"forward/rows": 9, "backward/dq_in_memory": 9, "schedules": 16, "band": 9, "caches": 12, "headers": 12}
SECONDS_OF_OTHERS = 6
MOST_UNITS = 6  # of a module: its compiler takes 2 GB


@dataclass(frozen=True)
class Unit:
    """The kernels of one family, or the "schedules", at one head dim."""

    arch: str
    folder: str  # of csrc/<arch>/
    head_dim: int

    @property
    def header(self) -> str:
        """The name of its file in module/, and the namespace."""
        return f"{self.arch}_{self.folder}".replace("/", "_")

    @property
    def name(self) -> str:
        return f"{self.header}_d{self.head_dim}"


@dataclass(frozen=True)
class Group:
    """What is compiled into one module: units of one family."""

    units: tuple[Unit, ...]

    @property
    def name(self) -> str:
        return "_".join([self.units[0].name, *(f"d{unit.head_dim}" for unit in self.units[1:])])

    @property
    def source(self) -> str:
        header = self.units[0].header
        calls = " ".join(f"inspect::{header}::add<{unit.head_dim}>(registry);" for unit in self.units)
        return f'#include "host.h"\n#include "{header}.h"\nvoid add_all(Registry& registry) {{ {calls} }}\n'


BAND, CACHES = FLAGS_OF


def default_head_dims() -> tuple[int, ...]:
    """Those of the kernels in this library."""
    found = {head_dim for _, _, head_dim, _ in report.built_instances()}
    return tuple(sorted(found.intersection(HEAD_DIMS))) or HEAD_DIMS


def cache_folder() -> Path:
    named = os.environ.get("FLASH_CUTE_INSPECT_CACHE")
    if named:
        return Path(named)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "flash_cute" / "inspect"


def units(csrc: Path, archs: Sequence[str], directions: Sequence[str], head_dims: Sequence[int]) -> list[Unit]:
    """The units of these kernels; those that csrc does not have are left out."""
    families = json.loads((csrc / "families.json").read_text()) if (csrc / "families.json").exists() else {}
    archs = [arch for arch in archs if arch in families]
    if not archs:
        raise InspectError(f"{csrc} holds none of the kernel folders {', '.join(ARCHS)}.")
    for head_dim in head_dims:
        if head_dim not in HEAD_DIMS:
            raise InspectError(f"head dims: expected some of {', '.join(map(str, HEAD_DIMS))}, got {head_dim}.")
    return [
        Unit(arch, folder, head_dim)
        for direction in directions
        for arch in archs
        for head_dim in sorted(head_dims)
        for folder, of_folder in families[arch].items()
        if folder.startswith(FOLDERS[direction]) and head_dim in of_folder and folder not in LAYOUTS_OF_ANOTHER
    ]


def build_modules(csrc: Path, wanted: Sequence[Unit | str]) -> list[ModuleType]:
    """Each unit's module, compiled unless it was before. Those of FLAGS_OF are asked for alone: they have other files.

    A module may have the kernels of other head dims too.
    """
    tools = find_tools()
    files = [MODULE / f"{unit}.cpp" for unit in wanted if isinstance(unit, str)]
    if len(files) < len(wanted):
        files += [*MODULE.glob("*.h"), MODULE / "module.cpp"]
    folder = cache_folder() / _digest(csrc, tools, files)
    missing = [unit for unit in wanted if not _library(folder, unit).exists()]
    if missing:
        with _locked(folder):
            missing = [unit for unit in missing if not _library(folder, unit).exists()]  # another process's work
            if missing:
                _compile(folder, csrc, tools, missing)
    libraries = [_library(folder, unit).resolve() for unit in wanted]
    return [_load(library, f"{folder.name}_{library.stem}") for library in libraries]


def _name(unit: Unit | str) -> str:
    return unit if isinstance(unit, str) else unit.name


def _library(folder: Path, unit: Unit | str) -> Path:
    return folder / f"{_name(unit)}.so"


@functools.cache
def _load(library: Path, name: str) -> ModuleType:
    # pybind11 keeps one module per name.
    spec = importlib.util.spec_from_file_location(f"flash_cute_inspect_{name}._traits", library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _digest(csrc: Path, tools: Tools, files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    csrc = csrc.resolve()
    named = {path.relative_to(csrc if path.is_relative_to(csrc) else MODULE): path for path in _sources(csrc, files)}
    for name, path in sorted(named.items()):
        digest.update(f"{name}\0".encode() + path.read_bytes() + b"\0")
    flags = (*CXX_FLAGS, *sorted({*itertools.chain(*FLAGS_OF.values())}))  # the memory's change nothing in a module
    digest.update("\0".join((*tools.versions, *flags, sys.version, sysconfig.get_platform())).encode())
    return digest.hexdigest()[:24]


def _sources(csrc: Path, files: Sequence[Path]) -> set[Path]:
    """The modules' files, and those of csrc that they include: an edit of a main loop changes no trait."""
    found: set[Path] = set()
    left = [*files]
    while left:
        path = left.pop()
        if path in found:
            continue
        found.add(path)
        for name in re.findall(r'#include "([^"]+)"', path.read_text()):
            candidates = (folder / name for folder in (path.parent, csrc, MODULE))
            left += itertools.islice((file.resolve() for file in candidates if file.exists()), 1)
    return found


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The folder, for one process at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(folder: Path, csrc: Path, tools: Tools, missing: Sequence[Unit | str]) -> None:
    _announce(folder, missing)
    begin = time.monotonic()
    groups = _groups([unit for unit in missing if isinstance(unit, Unit)], _cores())
    for group in groups:
        (folder / f"{group.name}.cpp").write_text(group.source)
    alone = [unit for unit in missing if isinstance(unit, str)]
    (folder / "build.ninja").write_text(_ninja_file(csrc, tools, groups, alone))
    command = [tools.ninja, "-C", str(folder), f"-j{_cores()}"]  # each compiler takes 1 to 2 GB
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        if not list(folder.glob("*.so")):
            shutil.rmtree(folder, ignore_errors=True)
        errors = [line for line in done.stdout.splitlines() if "error" in line][:5]
        log = "\n".join(errors or (done.stdout + done.stderr).splitlines()[-20:])
        raise InspectError(f"compiling the traits of {csrc} with {tools.cxx} failed:\n{log}")
    for group in groups:
        for unit in group.units if len(group.units) > 1 else ():
            _link(_library(folder, unit), f"{group.name}.so")
    objects = [*folder.glob("*_d*.o"), *(folder / f"{name}.o" for name in alone)]
    for path in [*objects, *folder.glob("*.gch")]:  # 200 MB
        path.unlink(missing_ok=True)
    print(f"flash_cute.inspect: compiled in {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)


def _groups(missing: Sequence[Unit], cores: int) -> list[Group]:
    """As few modules as keep all cores busy: a unit that shares a module takes half of the time."""
    most = max(1, min(MOST_UNITS, len(missing) // max(1, cores)))
    groups = []
    for _, kinds in itertools.groupby(missing, lambda unit: (unit.arch, unit.folder)):
        alike = tuple(kinds)
        parts = -(-len(alike) // most)
        groups += [Group(alike[len(alike) * i // parts : len(alike) * (i + 1) // parts]) for i in range(parts)]
    return groups


def _link(path: Path, target: str) -> None:
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    part.symlink_to(target)
    part.replace(path)  # another process may look


def _announce(folder: Path, missing: Sequence[Unit | str]) -> None:
    """One line before minutes of silence."""
    cores = min(len(missing), _cores())
    kinds = [unit if isinstance(unit, str) else unit.folder for unit in missing]
    units = [unit for unit in missing if isinstance(unit, Unit)]
    further = len(units) - len(_groups(units, _cores()))
    seconds = (
        SECONDS["headers"]
        + (sum(SECONDS.get(kind, SECONDS_OF_OTHERS) for kind in kinds) - further * SECONDS_OF_OTHERS / 2) / cores
    )
    names = ", ".join(_name(unit) for unit in missing[:6]) + (", ..." if len(missing) > 6 else "")
    what = f"{len(missing)} unit{'s' if len(missing) > 1 else ''} of kernel types ({names})"
    print(
        f"flash_cute.inspect: compiling {what}, once: about {seconds:.0f} s on {cores} core{'s' if cores > 1 else ''},"
        f" kept in {folder}",
        file=sys.stderr,
        flush=True,
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _ninja_file(csrc: Path, tools: Tools, groups: Sequence[Group], alone: Sequence[str]) -> str:
    includes = [f'"-I{folder}"' for folder in (csrc.resolve(), MODULE)]
    includes += [f'-isystem "{folder}"' for folder in tools.includes]
    lines = [
        f"cxx = {tools.cxx}",
        f"flags = {' '.join([*CXX_FLAGS, *(GXX_MEMORY if tools.is_gxx else ()), *includes])}",
        "rule header",  # CuTe's headers, parsed once for all sources
        "  command = $cxx $flags -x c++-header $in -o $out",
        "rule cxx",
        "  command = $cxx -I. $flags -c $in -o $out",
        "rule alone",
        "  command = $cxx $flags $more -c $in -o $out",
        "rule link",
        "  command = $cxx -shared $in -o $out.part && mv $out.part $out",  # another process may look
        f"build host.h.gch: header {_escaped(MODULE / 'host.h')}",
        f"build module.o: cxx {_escaped(MODULE / 'module.cpp')}",
    ]
    for name in alone:
        lines.append(f"build {name}.o: alone {_escaped(MODULE / f'{name}.cpp')}")
        lines.append(f"  more = {' '.join(FLAGS_OF[name])}")
        lines.append(f"build {name}.so: link {name}.o")
    for group in groups:  # order-only: the parsed headers are not kept
        lines.append(f"build {group.name}.o: cxx {group.name}.cpp || host.h.gch")
        lines.append(f"build {group.name}.so: link {group.name}.o module.o")
    lines.append("default " + " ".join([*(f"{group.name}.so" for group in groups), *(f"{name}.so" for name in alone)]))
    return "\n".join(lines) + "\n"


def _escaped(path: Path | str) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")
