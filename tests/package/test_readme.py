"""What the documentation says can be done as it is written: its examples run, its links lead somewhere."""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from repository import ROOT

import flash_cute
from flash_cute import report

PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "bench/README.md", ROOT / "tests/README.md"})

ADOPTING = ("pytorch", "flash_attn", "flash_attention_3")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_files(page: Path) -> None:
    text = page.read_text()
    links = {page.parent / link for link in re.findall(r"\]\((?!https?:)([^)#]+)", text)}
    scripts = {ROOT / script for script in re.findall(r"^    python ([\w/]+\.py)", text, re.MULTILINE)}
    assert not [str(target) for target in links | scripts if not target.exists()]


def test_every_page_is_in_the_site() -> None:
    pages = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    in_docs = {page.relative_to(ROOT / "docs").as_posix() for page in ROOT.glob("docs/**/*.md")}
    assert in_docs <= set(pages)
    assert not [page for page in pages if page not in in_docs and not (ROOT / page).exists()]


@pytest.mark.skipif(not (ROOT / ".ci/run").exists(), reason="not in a checkout")
def test_ci_runs_the_commands_of_the_first_lines() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## Test")[2]
    commands = re.search(r"\n\n((?:    .+\n)+)", section)[1].split("\n    ")
    assert len(commands) == 3
    assert [command.strip() for command in commands if command.strip() not in (ROOT / ".ci/run").read_text()] == []


PAGES_WITH_EXAMPLES = (
    "README.md",
    "docs/start.md",
    "docs/masks.md",
    "docs/kvcache.md",
    *(f"docs/adopting/{x}.md" for x in ADOPTING),
)


@pytest.mark.parametrize("page", PAGES_WITH_EXAMPLES)
def test_examples(page: str, python: Callable[..., str]) -> None:
    """They run, and print the shapes that their comments say; a plan for a GPU needs a build with kernels."""
    examples = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    if not report.load()["kernels"]:
        examples = [example for example in examples if "capability" not in example]
    printed = python("\n".join(examples))
    said = re.findall(r"print\(.*# (\(.*)", "\n".join(examples))
    shapes = [shape.strip(",") for comment in said for shape in re.findall(r"\(([\d, ]+)\)", comment)]
    found = iter(re.findall(r"torch\.Size\(\[([\d, ]+)\]\)", printed))
    assert all(any(shape == one for one in found) for shape in shapes), printed
    assert sum("explain(" in example for example in examples) <= printed.count("backend")


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
    text = (ROOT / "docs/api.md").read_text()
    assert not [name for name in flash_cute.__all__ if f"`{name}" not in text and name[0] != "_"]
