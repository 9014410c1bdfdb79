"""From a clone's root, where the sources hide the installed package, the sources use the installed library."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
from repository import ROOT

import flash_cute

INSTALLED = [
    folder
    for dist in distributions(name="flash_cute")
    if (folder := Path(str(dist.locate_file("flash_cute")))) != ROOT / "flash_cute" and (folder / "_C.abi3.so").exists()
]
needs_installed = pytest.mark.skipif(not INSTALLED, reason="no library is installed beside this clone")

WHERE = "import flash_cute; print(flash_cute.__file__); print(len(flash_cute.report.load()['kernels']))"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The sources alone, without anything that was built."""
    shutil.copytree(ROOT / "flash_cute", tmp_path / "flash_cute", ignore=shutil.ignore_patterns("_C*", "*.json"))
    return tmp_path


@needs_installed
def test_main_job_in_the_clone() -> None:
    done = run(ROOT, "-m", "flash_cute", "--device", "cpu", "--N", "64", "--iters", "1", "--peers", "none")
    assert done.returncode == 0, done.stderr
    assert "within the bounds" in done.stdout


@needs_installed
def test_sources_with_the_installed_library_and_report(clone: Path) -> None:
    done = run(clone, "-c", WHERE)
    assert done.returncode == 0, done.stderr
    kernels = len(flash_cute.report.load()["kernels"])
    assert done.stdout.split() == [str(clone / "flash_cute/__init__.py"), str(kernels)]


@needs_installed
def test_another_version_is_refused(clone: Path) -> None:
    file = clone / "flash_cute/__init__.py"
    file.write_text(file.read_text().replace(flash_cute.__version__, "0.0.7"))
    done = run(clone, "-c", WHERE)
    assert done.returncode == 1
    assert f"is flash_cute 0.0.7 without a compiled library, and the installed one is {flash_cute.__version__}" in (
        done.stderr
    )


def test_no_library_anywhere(clone: Path) -> None:
    script = "import importlib.metadata; importlib.metadata.distributions = lambda **k: (); import flash_cute"
    done = run(clone, "-c", script)
    assert done.returncode == 1
    assert "is neither in" in done.stderr and "run `pip install .`" in done.stderr
