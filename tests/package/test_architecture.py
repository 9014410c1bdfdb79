"""The folders of csrc/: which may include which. A circle, or an arrow that points up, would tie them together."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flash_cute.inspect.build import default_csrc

CSRC = default_csrc()
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
