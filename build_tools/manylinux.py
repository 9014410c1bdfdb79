"""Lets the library load on systems older than the one that builds it, and says truthfully on which.

A program that is linked against glibc needs the version that each symbol has there. glibc 2.34 moved libpthread, libdl
and librt into libc, which gave their symbols new versions: linked against any later glibc, every library that starts a
thread needs 2.34, whatever it calls. The CUDA runtime starts some. So the linker is shown stubs of the three old
libraries, with the versions that the symbols had before and still have in every glibc: `make_stubs`.

What is new in a release of libstdc++ is in csrc/api/libstdcxx.cpp, and `libstdcxx` names the libstdc++ to link.

`platform_tag` reads back what the library needs after all. A system that gives less is refused the wheel by pip.
"""

from __future__ import annotations

import platform
import re
import struct
import subprocess
from collections.abc import Iterable
from pathlib import Path

from .errors import BuildError

# The symbols that a CUDA runtime and libstdc++ may ask for, by library and version on x86_64.
_THREADS = """
pthread_attr_setstacksize pthread_condattr_setpshared
pthread_create pthread_detach pthread_getspecific pthread_join pthread_key_create pthread_key_delete pthread_kill
pthread_mutex_timedlock pthread_mutex_trylock pthread_mutexattr_destroy pthread_mutexattr_init
pthread_mutexattr_setpshared pthread_mutexattr_settype pthread_once pthread_rwlock_destroy pthread_rwlock_init
pthread_rwlock_rdlock pthread_rwlock_timedrdlock pthread_rwlock_timedwrlock pthread_rwlock_tryrdlock
pthread_rwlock_trywrlock pthread_rwlock_unlock pthread_rwlock_wrlock pthread_rwlockattr_destroy pthread_rwlockattr_init
pthread_rwlockattr_setpshared pthread_setspecific pthread_sigmask pthread_spin_destroy pthread_spin_init
pthread_spin_lock pthread_spin_trylock pthread_spin_unlock sem_close sem_destroy sem_getvalue sem_init sem_open sem_post
sem_timedwait sem_trywait sem_unlink sem_wait
"""
MOVED = {
    "libpthread.so.0": {"2.2.5": _THREADS.split()},
    "libdl.so.2": {"2.2.5": ["dladdr", "dlclose", "dlerror", "dlopen", "dlsym", "dlvsym"], "2.3.4": ["dlmopen"]},
    "librt.so.1": {"2.2.5": ["shm_open", "shm_unlink"]},
}
_FIRST_GLIBC = {"aarch64": "2.17"}  # architectures that are newer than these versions: the first glibc they had

# What the systems have that manylinux_2_N stands for, from that N on: the newest version of each kind.
_RELEASES = {
    28: {"GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)},
    31: {"GLIBCXX": (3, 4, 28), "CXXABI": (1, 3, 12), "GCC": (7, 0, 0)},
    34: {"GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13), "GCC": (7, 0, 0)},
    35: {"GLIBCXX": (3, 4, 30), "CXXABI": (1, 3, 13), "GCC": (12, 0, 0)},
    39: {"GLIBCXX": (3, 4, 33), "CXXABI": (1, 3, 15), "GCC": (14, 0, 0)},
}
_OLDEST = min(_RELEASES)  # torch's own wheels need no less
_RELATIVE_RELOCATIONS = "GLIBC_ABI_DT_RELR"  # not a symbol's version: the loader's, from 2.36 on


def make_stubs(folder: Path, cxx: str) -> list[str]:
    """Compiles the stubs; the linker's arguments, which stand before those of libc. Nothing but names is in a stub."""
    first = _FIRST_GLIBC.get(platform.machine())
    if platform.libc_ver()[0] != "glibc" or not (first or platform.machine() == "x86_64"):
        return ["-lrt", "-lpthread", "-ldl"]
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, versions in MOVED.items():
        source, script, stub = folder / f"{name}.c", folder / f"{name}.map", folder / name
        source.write_text("".join(f"void {symbol}(void) {{}}\n" for of in versions.values() for symbol in of))
        by_version: dict[str, list[str]] = {}
        for version, symbols in versions.items():
            by_version.setdefault(first or version, []).extend(symbols)
        script.write_text(
            "".join(f"GLIBC_{v} {{ global: {'; '.join(of)}; local: *; }};\n" for v, of in by_version.items())
        )
        flags = ["-x", "c", "-w", "-fno-builtin", "-fPIC", "-shared", "-nostdlib"]
        linker = [f"-Wl,-soname,{name}", f"-Wl,--version-script,{script}"]
        done = subprocess.run([cxx, *flags, str(source), *linker, "-o", str(stub)], capture_output=True, text=True)
        if done.returncode:
            raise BuildError(f"the stub of {name} could not be linked: {done.stderr.strip()}")
        made.append(str(stub))
    return made


def libstdcxx() -> str:
    """The linker's argument for the libstdc++ that torch runs with in this process, which stands before torch's.

    Before torch's, since torch exports parts of its own, which would be taken for what the library needs. And by its
    path: a compiler that finds no shared one takes the static one without a word, and with it this system's glibc.
    """
    loaded = re.search(r"/\S*/libstdc\+\+\.so\.6\S*$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    return loaded[0] if loaded else "-lstdc++"


def platform_tag(built_on: str, libraries: Iterable[Path]) -> str:
    """manylinux_2_N for the smallest N whose systems have all that the libraries need, else `built_on`, a linux tag."""
    needs = {version for path in libraries for version in versions_needed(path)}
    system, _, machine = built_on.partition("_")
    if system != "linux" or not any(version.startswith("GLIBC_") for version in needs):
        return built_on  # the user's own choice, a libc that is not glibc, or nothing is built yet
    try:
        minor = max(_OLDEST, *(_minor_glibc(version) for version in needs))
    except ValueError:
        return built_on
    return f"manylinux_2_{minor}_{machine}"


def _minor_glibc(version: str) -> int:
    """The N of the oldest manylinux_2_N with this version of a symbol; ValueError: there is none."""
    if version == _RELATIVE_RELOCATIONS:
        return 36
    kind, _, number = version.partition("_")
    parts = tuple(map(int, number.split(".")))  # of GLIBC_PRIVATE it is a ValueError too
    if kind == "GLIBC":
        return parts[1]
    return min(minor for minor, newest in _RELEASES.items() if parts <= newest.get(kind, ()))


def versions_needed(path: Path) -> set[str]:
    """The versions of symbols that an ELF file needs of other libraries, such as "GLIBC_2.17"."""
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise BuildError(f"{path} is not a 64-bit little-endian ELF file.")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    # Of each section: type, offset in the file, and the number of the section with its strings.
    sections = [struct.unpack_from("<4xI16xQ8xI", data, table + size * number) for number in range(count)]
    needed = set()
    for kind, offset, link in sections:
        if kind == 0x6FFFFFFE:  # SHT_GNU_verneed
            needed |= _names(data, offset, strings=sections[link][1])
    return needed


def _names(data: bytes, need: int, strings: int) -> set[str]:
    """Of each Elf64_Verneed, a library, the names that its Elf64_Vernaux have."""
    names = set()
    while True:
        version, following = struct.unpack_from("<8xII", data, need)
        version += need
        while True:
            name, next_version = struct.unpack_from("<8xII", data, version)
            start = strings + name
            names.add(data[start : data.index(b"\0", start)].decode())
            if not next_version:
                break
            version += next_version
        if not following:
            return names
        need += following
