"""A second build of the same sources compiles nothing, whatever pip, a checkout or a copy did to the time stamps."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import background
import pytest
import venvs
from repository import ROOT

# ------------------------------------------------------------------ build_tools/compiler.py, before a small compiler

# The object is the source's text; the depfile names what was read, links resolved, as g++ may do.
PROGRAM = r"""
import os, sys
words = sys.argv[1:]
if "-c" not in words:
    sys.exit(print("version 1"))
source, out, depfile = (words[words.index(flag) + 1] for flag in ("-c", "-o", "-MF"))
headers = [os.path.realpath(word[2:]) for word in words if word.startswith("-i")]
with open("commands", "a") as commands:
    print(" ".join(words), file=commands)
text = open(source).read()
print("ptxas info    : for the log\na warning")
open(out, "w").write(text)
open(depfile, "w").write(f"{out}: {source} " + " ".join("\\\n " + header for header in headers) + "\n")
sys.exit("error" in text)
"""


class Checkout:
    """A folder with compiler.py, a source, a header of its own, and one of a package behind a link."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in ("build_tools", "build/links"):
            (root / folder).mkdir(parents=True)
        shutil.copy2(ROOT / "build_tools/compiler.py", root / "build_tools")
        for name, text in (("cc.py", PROGRAM), ("ours.h", "a"), ("sm80_a.cu", "kernel")):
            (root / name).write_text(text)
        self.install("environment-1", "b")

    def install(self, name: str, text: str) -> None:
        """Puts the package into a new folder, as pip does for each build, and drops the last one."""
        link, package = self.root / "build/links/torch", self.root.parent / name
        if link.exists():
            shutil.rmtree(link.resolve())
            link.unlink()
        package.mkdir()
        (package / "theirs.h").write_text(text)
        link.symlink_to(package)

    def compile(self, *flags: str, version: str = "1") -> subprocess.CompletedProcess[str]:
        root = self.root
        compiler = [sys.executable, f"{root}/cc.py", f"-i{root}/ours.h", f"-i{root}/build/links/torch/theirs.h", *flags]
        files = ["-c", f"{root}/sm80_a.cu", "-o", f"{root}/a.o"]
        command = [sys.executable, f"{root}/build_tools/compiler.py", version, *compiler, *files]
        return subprocess.run(command, cwd=root, capture_output=True, text=True)

    @property
    def commands(self) -> list[str]:
        """What the compiler was asked to compile, so far."""
        return (self.root / "commands").read_text().splitlines()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    made = Checkout(tmp_path / "checkout")
    first = made.compile("--only=sm80:-for80", "--only=sm90:-for90")
    assert first.returncode == 0, first.stderr
    assert first.stdout == "a warning\n"
    assert len(made.commands) == 1
    return made


def _same(checkout: Checkout, **options: str) -> int:
    """How often the compiler has run after the same command was given again."""
    assert checkout.compile("--only=sm80:-for80", "--only=sm90:-for90", **options).returncode == 0
    return len(checkout.commands)


def test_each_folder_has_its_flags(checkout: Checkout) -> None:
    assert " -for80 " in checkout.commands[0] and "for90" not in checkout.commands[0]


def test_log_has_what_the_report_needs(checkout: Checkout) -> None:
    log = json.loads((checkout.root / "a.o.json").read_text())
    assert log["seconds"] >= 0 and 0 < log["gib"] < 1 and "ptxas info" in log["output"]
    assert sorted(log["files"]) == ["build/links/torch/theirs.h", "ours.h", "sm80_a.cu"]
    assert str(checkout.root) not in json.dumps(log["key"])


def test_new_time_stamps_compile_nothing(checkout: Checkout) -> None:
    for path in checkout.root.rglob("*"):
        os.utime(path)
    assert _same(checkout) == 1


def test_new_environment_compiles_nothing(checkout: Checkout) -> None:
    checkout.install("environment-2", "b")
    assert _same(checkout) == 1


def test_copied_checkout_compiles_nothing(checkout: Checkout, tmp_path: Path) -> None:
    copy = Checkout.__new__(Checkout)
    copy.root = tmp_path / "copy"
    shutil.copytree(checkout.root, copy.root, symlinks=True, copy_function=shutil.copyfile)
    assert _same(copy) == 1


def test_another_target_flag_of_another_folder_compiles_nothing(checkout: Checkout) -> None:
    assert checkout.compile("--only=sm80:-for80", "--only=sm90:-other").returncode == 0
    assert len(checkout.commands) == 1


def test_with_and_without_ninjas_depfile_is_the_same(checkout: Checkout) -> None:
    """BuildExtension asks nvcc for one only if torch has CUDA, and g++ for one without system headers."""
    asked = ("-MMD", "-MF", f"{checkout.root}/a.o.d", "--only=sm80:-for80")
    assert checkout.compile(*asked).returncode == 0
    assert len(checkout.commands) == 1


def test_a_question_is_passed_on(checkout: Checkout) -> None:
    root = checkout.root
    command = [sys.executable, f"{root}/build_tools/compiler.py", "1", sys.executable, f"{root}/cc.py", "-dumpversion"]
    assert subprocess.run(command, cwd=root, capture_output=True, text=True).stdout == "version 1\n"


@pytest.mark.parametrize("change", ["source", "header", "package", "header gone", "flag", "compiler", "object gone"])
def test_a_change_compiles(checkout: Checkout, change: str) -> None:
    root, version = checkout.root, "1"
    if change == "source":
        (root / "sm80_a.cu").write_text("another kernel")
    elif change == "header":
        (root / "ours.h").write_text("c")
    elif change == "package":
        checkout.install("environment-2", "c")
    elif change == "header gone":
        log = root / "a.o.json"
        log.write_text(log.read_text().replace("ours.h", "gone.h"))
    elif change == "compiler":
        version = "2"
    elif change == "object gone":
        (root / "a.o").unlink()
    if change == "flag":
        assert checkout.compile("--only=sm80:-another").returncode == 0
        assert len(checkout.commands) == 2
    else:
        assert _same(checkout, version=version) == 2
        assert _same(checkout, version=version) == 2


def test_a_failure_is_passed_on_and_tried_again(checkout: Checkout) -> None:
    (checkout.root / "sm80_a.cu").write_text("error")
    for count in (2, 3):
        assert checkout.compile().returncode == 1
        assert len(checkout.commands) == count
    assert not (checkout.root / "a.o.json").exists()


# ------------------------------------------------------------------------------------------- pip, and the real ones


def build_twice() -> tuple[str, str]:
    """What the second build of a copy of this checkout printed, and what its commands were without the copy's path.

    In a folder that is gone afterwards: pip makes a folder with compilers and headers for each build, and drops it;
    here each file is new, too.
    """
    with tempfile.TemporaryDirectory(prefix="flash_cute_") as name:
        tree = Path(name) / "tree"
        left_out = shutil.ignore_patterns(
            ".git", ".*_cache", "__pycache__", "*.egg-info", "*.so", "*.whl", "lib.*", "bin"
        )
        # With the objects of an earlier build, where there are any: a checkout whose build folder was kept.
        shutil.copytree(ROOT, tree, ignore=left_out, symlinks=True)
        _build(tree)
        first = _times(tree)
        assert any(path.name.startswith("sm90_") for path in first)
        for path in tree.rglob("*.*"):
            if path.suffix in (".h", ".cuh", ".cpp", ".cu"):
                path.touch()
        output = _build(tree)
        assert _times(tree) == first
        commands = [(tree / "build/obj/build.ninja").read_text()]
        commands += [line for line in output.splitlines() if "g++ -shared" in line]
        assert len(commands) == 2
        wheels = [path.name for path in (tree.parent / "wheels").glob("flash_cute-*.whl")]
        assert wheels and all("-cp310-abi3-manylinux_2_28_" in name for name in wheels), wheels
        return output, "\n".join(commands).replace(str(tree), "")


def begin(item: pytest.Function) -> None:
    """See `background`."""
    if item.function is test_second_isolated_build_compiles_nothing:
        background.begin(build_twice)


@pytest.mark.venv
def test_second_isolated_build_compiles_nothing() -> None:
    output, commands = background.result(build_twice)
    assert re.search(r"flash_cute: compiled 0 of \d+ files", output), output[-3000:]
    assert tempfile.gettempdir() not in commands


def _build(tree: Path) -> str:
    """Builds a wheel of one architecture and head dim, with the smallest torch: it is installed for each build."""
    constraint = tree.parent / "constraint.txt"
    constraint.write_text(f"torch=={venvs.CPU_ONLY}\n")
    done = background.run(
        [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "-w", tree.parent / "wheels", "."],
        cwd=tree,
        PIP_CONSTRAINT=str(constraint),
        PIP_BUILD_CONSTRAINT=str(constraint),  # pip 25.3 and later
        FLASH_CUTE_ARCHS="sm90",
        FLASH_CUTE_HEAD_DIMS="32",
    )
    if re.search("No matching distribution found for torch|Cannot install torch", done.stdout + done.stderr):
        venvs.cannot(f"pip cannot install torch {venvs.CPU_ONLY}")
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return done.stdout + done.stderr


def _times(tree: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in (tree / "build/obj").rglob("*.o")}
