"""What the documentation says can be done as it is written: its example runs, its links lead somewhere."""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import flash_cute
from flash_cute import report

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted({ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_files(page: Path) -> None:
    text = page.read_text()
    links = {page.parent / link for link in re.findall(r"\]\((?!https?:)([^)#]+)", text)}
    scripts = {ROOT / script for script in re.findall(r"^    python ([\w/]+\.py)", text, re.MULTILINE)}
    assert not [str(target) for target in links | scripts if not target.exists()]


def test_every_page_is_listed() -> None:
    listed = (ROOT / "docs/README.md").read_text()
    assert not [page.name for page in ROOT.glob("docs/*.md") if page.name != "README.md" and page.name not in listed]


@pytest.mark.skipif(not (ROOT / ".ci/run").exists(), reason="not in a checkout")
def test_ci_runs_the_commands_of_the_first_lines() -> None:
    section = (ROOT / "README.md").read_text().partition("## Install and run")[2]
    commands = re.search(r"\n\n((?:    .+\n)+)", section)[1].split("\n    ")
    assert len(commands) == 3
    assert [command.strip() for command in commands if command.strip() not in (ROOT / ".ci/run").read_text()] == []


EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
PRINTED = (
    "torch.Size([2, 32, 1024, 128]) torch.Size([2, 32, 1024])",
    "torch.Size([8])\ntorch.Size([2, 8, 256, 128])",
    "torch.Size([1000, 8, 64]) torch.Size([680, 8, 64])",
    "torch.Size([2, 8, 512, 64]) torch.Size([2, 2, 512, 64])",
)


@pytest.mark.parametrize(
    ("example", "shapes"), [*zip(EXAMPLES, PRINTED, strict=True)], ids=("forward", "options", "packed", "training")
)
def test_example(example: str, shapes: str, python: Callable[..., str]) -> None:
    printed = python(example)
    assert shapes in printed
    assert "backend" in printed


FUNCTIONS = [x for x in map(flash_cute.__dict__.get, flash_cute.__all__) if inspect.isfunction(x)]
FUNCTIONS += [flash_cute.reference.attention, flash_cute.reference.gradients]
FUNCTIONS += [flash_cute.reference.varlen_attention, flash_cute.reference.varlen_gradients]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda x: f"{x.__module__}.{x.__name__}")
def test_docstring(function: Callable[..., object]) -> None:
    """What its example says is what comes out; a plan for a GPU needs a build with kernels."""
    (test,) = doctest.DocTestFinder(recurse=False).find(function, globs={**function.__globals__, "torch": torch})
    if "capability" in str([example.source for example in test.examples]) and not report.load()["kernels"]:
        pytest.skip("this build has no CUDA kernels")
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0


def test_every_public_name_is_listed() -> None:
    text = (ROOT / "README.md").read_text()
    assert not [name for name in flash_cute.__all__ if f"`{name}" not in text and name[0] != "_"]
