"""The library loads on systems older than the one that built it; where it does not, the ImportError says why.

What it needs of a system is in its own file, so that no old system is needed to see it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType

import pytest
import torch
from repository import ROOT
from wheels import pack

from flash_cute import _built, report

LIBRARY = report.PATH.parent / _built.LIBRARY
OLDEST = f"manylinux_2_28_{platform.machine()}"

needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this system's libc is not glibc")


@pytest.fixture(scope="module")
def manylinux() -> ModuleType:
    """build_tools/manylinux.py, without the checkout and its flash_cute/ on sys.path."""
    pytest.importorskip("setuptools")
    folder = ROOT / "build_tools"
    spec = importlib.util.spec_from_file_location(
        "build_tools", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    sys.modules["build_tools"] = importlib.util.module_from_spec(spec)
    return importlib.import_module("build_tools.manylinux")


@pytest.fixture
def changed(tmp_path: Path) -> Callable[[str, str], Path]:
    """A copy of the library in which one name is another of the same length."""

    def make(old: str, new: str) -> Path:
        data = LIBRARY.read_bytes()
        old_bytes, new_bytes = (b"\0" + name.encode() + b"\0" for name in (old, new))
        assert len(old_bytes) == len(new_bytes) and old_bytes in data
        path = tmp_path / _built.LIBRARY
        path.write_bytes(data.replace(old_bytes, new_bytes))
        return path

    return make


# ------------------------------------------------------------------------------------------- what it needs


@needs_glibc
def test_library_needs_no_newer_system(manylinux: ModuleType) -> None:
    needs = manylinux.versions_needed(LIBRARY)
    assert manylinux.platform_tag(f"linux_{platform.machine()}", [LIBRARY]) == OLDEST, sorted(needs)


@needs_glibc
@pytest.mark.skipif(shutil.which("nm") is None, reason="nm (binutils) is not installed")
def test_torch_gives_nothing_but_its_c_interface() -> None:
    """Of libstdc++, whose versions are the other test's, torch's libraries export parts that other torches need not."""
    answer = subprocess.run(["nm", "-D", LIBRARY], capture_output=True, text=True, check=True).stdout
    weak = re.findall(r"^\s+w (\S+)$", answer, re.MULTILINE)
    allocator = [name for name in weak if "empty_strided" in name]  # csrc/api/allocate.h does without it, too
    assert len(allocator) <= 1
    undefined = [name for name in re.findall(r"^\s+[Uw] (\S+)$", answer, re.MULTILINE) if name not in allocator]
    without_version = [name for name in undefined if "@" not in name]
    assert any(name.startswith("aoti_torch_") for name in without_version)
    allowed = re.compile(r"aoti_torch_|torch_|_ITM_|__gmon_start__")
    assert not [name for name in without_version if not allowed.match(name)]


@needs_glibc
@pytest.mark.parametrize(
    ("old", "new", "tag"),
    [
        ("GLIBC_2.14", "GLIBC_2.27", "manylinux_2_28"),
        ("GLIBC_2.14", "GLIBC_2.35", "manylinux_2_35"),
        ("GLIBCXX_3.4.21", "GLIBCXX_3.4.25", "manylinux_2_31"),
        ("GLIBCXX_3.4.21", "GLIBCXX_3.4.32", "manylinux_2_39"),
        ("GLIBCXX_3.4.21", "GLIBCXX_3.4.99", "linux"),
        ("CXXABI_1.3.9", "CXXABI_1.4.0", "linux"),
        ("GLIBC_2.14", "GLIBC_PRIV", "linux"),
    ],
)
def test_tag_is_what_the_library_needs(
    manylinux: ModuleType, changed: Callable[[str, str], Path], old: str, new: str, tag: str
) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("the names that are changed are those of x86_64")
    path = changed(old, new)
    assert new in manylinux.versions_needed(path)
    assert manylinux.platform_tag("linux_x86_64", [LIBRARY, path]) == f"{tag}_x86_64"


def test_other_tags_stay(manylinux: ModuleType, tmp_path: Path) -> None:
    assert manylinux.platform_tag("linux_x86_64", []) == "linux_x86_64"
    assert manylinux.platform_tag("manylinux_2_99_x86_64", [LIBRARY]) == "manylinux_2_99_x86_64"
    (tmp_path / "a.so").write_bytes(b"no ELF")
    with pytest.raises(manylinux.BuildError, match="is not a 64-bit little-endian ELF file"):
        manylinux.platform_tag("linux_x86_64", [tmp_path / "a.so"])


@needs_glibc
def test_stubs_name_what_every_glibc_has(manylinux: ModuleType) -> None:
    """A symbol that no glibc has in that version would be an error when the library is loaded."""
    if platform.machine() != "x86_64":
        pytest.skip("the versions are those of x86_64")
    find = ctypes.CDLL(None).dlvsym
    find.restype, find.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)
    for library, versions in manylinux.MOVED.items():
        handle = ctypes.CDLL(library)._handle
        for version, symbols in versions.items():
            missing = [name for name in symbols if not find(handle, name.encode(), f"GLIBC_{version}".encode())]
            assert not missing, (library, version)
    assert not find(ctypes.CDLL("libc.so.6")._handle, b"dlopen", b"GLIBC_2.99")


@needs_glibc
def test_wheel_passes_auditwheel(tmp_path: Path) -> None:
    pytest.importorskip("auditwheel")
    tags = re.findall("^Tag: (.*)$", distribution("flash_cute").read_text("WHEEL") or "", re.MULTILINE)
    wheel = pack(tmp_path)
    assert tags == [f"cp310-abi3-{OLDEST}"]
    command = [sys.executable, "-m", "auditwheel", "show", "--json", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    # By its symbols; by its libraries no wheel beside torch is any: torch's are the only ones that it lacks.
    assert int(seen["sym_tag"].split("_")[2]) <= 28, seen["versioned_symbols"]
    assert all(re.match(r"lib(torch|torch_cpu|c10)\.so$", name) for name in seen["external_libs"])
    assert not seen["unsupported_isa"]


# ------------------------------------------------------------------------------------------ what the error says


def refusal(path: Path) -> str:
    with pytest.raises(ImportError) as caught:
        _built.load(path)
    return str(caught.value)


@needs_glibc
@pytest.mark.parametrize(
    ("old", "new", "needed"),
    [
        ("GLIBC_2.14", "GLIBC_2.97", "glibc 2.97"),
        ("GLIBCXX_3.4.21", "GLIBCXX_3.4.99", "a libstdc++ with GLIBCXX_3.4.99"),
    ],
)
def test_newer_system_is_named(changed: Callable[[str, str], Path], old: str, new: str, needed: str) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("the names that are changed are those of x86_64")
    message = refusal(changed(old, new))
    here = " ".join(platform.libc_ver())
    assert f"built for newer systems, with {needed} or later, and this one has {here};" in message
    assert f"version `{new}' not found" in message
    assert torch.__version__ not in message


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("aoti_torch_empty_strided", "aoti_torch_empty_stripes"),
        ("libtorch_cpu.so", "libtorch_gpu.so"),
    ],
)
def test_missing_part_of_torch_is_named(changed: Callable[[str, str], Path], old: str, new: str) -> None:
    message = refusal(changed(old, new))
    assert f"does not load under torch {torch.__version__}: flash_cute needs torch >= 2.10 on Linux" in message
    assert new in message and "glibc" not in message


def test_broken_file_has_the_loaders_words_alone(tmp_path: Path) -> None:
    folder = tmp_path / "libtorch_env"  # the path does not speak of torch
    folder.mkdir()
    path = folder / _built.LIBRARY
    path.write_bytes(LIBRARY.read_bytes()[:40])
    message = refusal(path)
    assert message.startswith("flash_cute's compiled library does not load. The loader said: ")
    assert "file too short" in message
    assert "torch >=" not in message and "glibc" not in message


def test_import_says_it(tmp_path: Path) -> None:
    """The whole package, with a library that is no library."""
    package = tmp_path / "flash_cute"
    package.mkdir()
    for entry in LIBRARY.parent.iterdir():
        if entry.name != _built.LIBRARY:
            (package / entry.name).symlink_to(entry)
    (package / _built.LIBRARY).write_bytes(b"no library at all, but long enough to have had a header of ELF" * 9)
    done = subprocess.run([sys.executable, "-c", "import flash_cute"], cwd=tmp_path, capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("ImportError: flash_cute's compiled library does not load. The loader said: ")
    assert "invalid ELF header" in last
