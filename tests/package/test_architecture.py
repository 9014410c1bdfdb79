"""The folders of csrc/: which may include which. A circle, or an arrow that points up, would tie them together.

And what no linter of C++ reads: how long lines are, and which files comments name.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from repository import ROOT

from flash_cute._toolchain import find_csrc

CSRC = find_csrc()
CPP = (".h", ".cuh", ".cpp", ".cu")
LONGEST_LINE = 120  # as pyproject.toml has it for Python
# Each may include from itself and from those before it. api/ knows the families by families.cpp and, for the names of
# tiles and chips that a caller may give, by their tile tables.
LAYERS = ("contract", "planning", "core", "quantize", "kvcache", "masks", "sm80", "sm90", "api", "studies")


def _includes() -> list[tuple[Path, Path]]:
    """The files of csrc/ that include one another, as paths in csrc/. Generated headers are left out."""
    found = []
    for path in sorted(CSRC.rglob("*")):
        if path.suffix not in (".h", ".cuh", ".cpp"):
            continue
        for name in re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE):
            targets = [target for folder in (path.parent, CSRC) if (target := (folder / name).resolve()).exists()]
            if targets:
                found.append((path.relative_to(CSRC), targets[0].relative_to(CSRC.resolve())))
    return found


def test_includes_point_down() -> None:
    seen = set()
    for source, target in _includes():
        layers = LAYERS.index(source.parts[0]), LAYERS.index(target.parts[0])
        assert layers[1] <= layers[0], f"{source} includes {target}"
        seen.add(source.parts[0])
    assert seen == set(LAYERS)


@pytest.mark.parametrize(("arch", "other"), [("sm80", "sm90"), ("sm90", "sm80")])
def test_architectures_do_not_know_each_other(arch: str, other: str) -> None:
    assert not [pair for pair in _includes() if (pair[0].parts[0], pair[1].parts[0]) == (arch, other)]


def test_folders_have_no_circle() -> None:
    below: dict[str, set[str]] = {}
    for source, target in _includes():
        if source.parent != target.parent:
            below.setdefault(str(source.parent), set()).add(str(target.parent))
    done: list[str] = []
    while left := sorted(set(below) - set(done)):
        free = [folder for folder in left if not (below[folder] & set(left))]
        assert free, f"folders that include one another: {left}"
        done += free


def test_device_code_does_not_plan() -> None:
    """Kernels are compiled without the planner's headers."""
    planning = [(source, target) for source, target in _includes() if target.parts[0] == "planning"]
    assert planning and all(source.suffix in (".h", ".cpp") for source, _ in planning)


def test_lines_fit() -> None:
    """A path in a comment grows with its folders' names."""
    files = [path for folder in ("csrc", "flash_cute", "tests") for path in _files(folder)]
    lines = [(path, *line) for path in files if path.suffix in CPP for line in enumerate(_lines(path), 1)]
    assert lines
    long = [f"{path.relative_to(ROOT)}:{number}" for path, number, line in lines if len(line) > LONGEST_LINE]
    assert not long, f"lines of more than {LONGEST_LINE} characters: {', '.join(long)}"


def test_files_that_comments_and_pages_name_exist() -> None:
    """By the end of their paths: `load.cuh` or `common/place.cuh` is enough."""
    tree = [path.relative_to(ROOT).as_posix() for folder in ("csrc", "flash_cute", "docs") for path in _files(folder)]
    ends = {"/".join(path.split("/")[first:]) for path in tree for first in range(path.count("/") + 1)}
    named = re.compile(r"(?<![\w/.<>-])(?:[\w-]+/)*[\w-]+\.cuh\b")
    seen = 0
    for path in (ROOT / name for name in tree if name.endswith((*CPP, ".py", ".md"))):
        for number, line in enumerate(_lines(path), 1):
            names = named.findall(line)
            seen += len(names)
            assert set(names) <= ends, f"{path.relative_to(ROOT)}:{number} names {', '.join(set(names) - ends)}"
    assert seen > 500


def _files(folder: str) -> list[Path]:
    return [path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()
