"""The page on masks: its pictures are what `draw` gives, and the docstrings' examples are right."""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import flash_cute
from flash_cute import Mask

PAGE = Path(__file__).parents[2] / "docs/masks.md"
PICTURE = re.compile(r"<!-- picture: (.+?)(, causal)? -->\n\n```text\n(.*?)\n```", re.DOTALL)
CONSTRUCTORS = [x for name, x in inspect.getmembers(Mask, inspect.isfunction) if not name.startswith("_")]


@pytest.mark.skipif(not PAGE.exists(), reason="an installed package has no docs/")
def test_pictures() -> None:
    text = PAGE.read_text()
    pictures = PICTURE.findall(text)
    assert len(pictures) == text.count("<!-- picture:") == 14
    for source, causal, drawn in pictures:
        mask = eval(source, {"Mask": Mask, "torch": torch})
        length = mask.first_row.shape[2]
        width = length // 64 if mask.blocks is not None else length  # a character is a block, or a key
        rows = 7 if "context_parallel" in source else length  # a rank's
        assert mask.draw(rows, bool(causal), width=width) == drawn, source


@pytest.mark.skipif(not PAGE.exists(), reason="an installed package has no docs/")
def test_every_constructor_is_on_the_page() -> None:
    text = PAGE.read_text()
    for function in CONSTRUCTORS:
        assert f"Mask.{function.__name__}(" in text or f"mask.{function.__name__}(" in text or function is Mask.to


@pytest.mark.parametrize("given", [Mask, *CONSTRUCTORS], ids=lambda x: x.__name__)
def test_docstring(given: Callable[..., object]) -> None:
    names = {"Mask": Mask, "torch": torch, "flash_cute": flash_cute}
    (test,) = doctest.DocTestFinder(recurse=False).find(given, globs=names)
    assert test.examples or given is Mask.to
    assert doctest.DocTestRunner().run(test).failed == 0
