"""What the site of docs/ needs beside its pages; mkdocs.yml names this module as a hook, `Examples` as an extension.

Pages link to one another, to figures and to sources by relative paths, as all of them lie in the repository. In the
site the pages of `PAGES` and the figures of bench/results/ are there too, and links are changed to where these are. A
source, which the site does not have, is named by its path.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "bench/README.md")
FIGURES = ("bench/results/**/*.png", "bench/results/**/*.csv")

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)")

log = logging.getLogger("mkdocs.hooks")


def on_files(files: Any, config: Any) -> Any:
    """Adds what the site has from outside of docs/."""
    from mkdocs.structure.files import File

    for path in (*map(ROOT.joinpath, PAGES), *(path for pattern in FIGURES for path in sorted(ROOT.glob(pattern)))):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The page with links that hold in the site."""
    here = page.file.src_uri
    there = {file.src_uri for file in files}
    return LINK.sub(lambda match: _link(match, here, there), markdown)


def _link(match: re.Match[str], page: str, files: set[str]) -> str:
    """One link of the page `page`, where `files` are those of the site; both as paths from the site's root."""
    mark, label, target, anchor = match.groups()
    source = page if page in PAGES else f"docs/{page}"
    path = os.path.normpath(os.path.join(os.path.dirname(source), target))
    if not (ROOT / path).exists():
        log.warning("%s: no such file: %s", source, target)
        return match[0]
    name = path.removeprefix("docs/") if path.startswith("docs/") else path
    if name in files:
        link = os.path.relpath(name, os.path.dirname(page) or ".")
        return f"{mark}[{label}]({link}{anchor or ''})"
    return f"`{path}`" if path.endswith(label.strip("`")) else f"{label} (`{path}`)"


class Examples(griffe.Extension):
    """Docstrings have an example under `Example:`; griffe takes only what is under `Examples:` for Python's prompt."""

    def on_instance(self, *, obj: Any, **others: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
