"""How pictures are drawn and saved: small SVG files that are the same for the same data."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .build import InspectError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "GREY", "Picture", "cells", "legend", "matplotlib", "new_figure", "whole_numbers"]

# Paul Tol's "light": told apart by the colour-blind, and black text stands out on each.
COLOURS = ("#77AADD", "#EE8866", "#EEDD88", "#FFAABB", "#99DDFF", "#44BB99", "#BBCC33", "#AAAA00")
GREY = "#DDDDDD"
FONT = "DejaVu Sans, Verdana, sans-serif"


@dataclass(frozen=True)
class Picture:
    """What is drawn, as plain data, and how."""

    name: str
    title: str
    data: dict[str, Any]
    draw: Callable[[dict[str, Any]], Figure]

    def digest(self) -> str:
        """Changes when the data does, and with nothing else."""
        return hashlib.sha256(json.dumps(self.data, sort_keys=True).encode()).hexdigest()[:16]

    def save(self, folder: Path, formats: Sequence[str] = ("svg", "png")) -> list[Path]:
        """Writes `folder`/`name`.<format> for each."""
        folder.mkdir(parents=True, exist_ok=True)
        saved = []
        with matplotlib().rc_context({"svg.hashsalt": self.name, "svg.fonttype": "none", "font.size": 9}):
            figure = self.draw(self.data)
            for suffix in formats:
                path = folder / f"{self.name}.{suffix}"
                metadata = {"Date": None} if suffix == "svg" else {}
                figure.savefig(path, dpi=120, metadata=metadata, bbox_inches="tight")
                if suffix == "svg":
                    path.write_text(_slim(path.read_text()))
                saved.append(path)
        return saved


def _slim(svg: str) -> str:
    """The same drawing in half of the bytes: the font named once, no comments, pixels to a hundredth."""
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    svg = re.sub(r' transform="rotate\(-0 [^)]*\)"', "", svg)
    svg = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), svg)
    svg = re.sub(r"\n\s*", "\n", svg)
    return re.sub(r"(<svg[^>]*>)", rf"\1\n<style>text{{font-family:{FONT}}}</style>", svg, count=1)


def matplotlib() -> Any:
    """The package, which only pictures need."""
    try:
        import matplotlib as package
        import matplotlib.figure
    except ImportError:
        raise InspectError("pictures need matplotlib: pip install matplotlib.") from None
    return package


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1, **kwargs: Any) -> tuple[Figure, Any]:
    """A figure in inches and its axes, (rows, columns)."""
    figure = matplotlib().figure.Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **kwargs)


def cells(ax: Axes, colours: Sequence[Sequence[str]], texts: Sequence[Sequence[str]], size: float = 6.5) -> None:
    """A grid of coloured cells with text, the first row on top."""
    colors = matplotlib().colors
    image = np.array([[colors.to_rgb(colour) for colour in row] for row in colours])
    ax.imshow(image, interpolation="nearest", aspect="auto")
    rows, columns = image.shape[:2]
    ax.set_xticks(np.arange(-0.5, columns), minor=True)
    ax.set_yticks(np.arange(-0.5, rows), minor=True)
    ax.grid(which="minor", color="white", linewidth=0.8)
    ax.tick_params(which="minor", length=0)
    whole_numbers(ax.xaxis)
    whole_numbers(ax.yaxis)
    for row, line in enumerate(texts):
        for column, text in enumerate(line):
            if text:
                ax.text(column, row, text, ha="center", va="center", fontsize=size)


def whole_numbers(axis: Axis) -> None:
    """Its ticks are integers."""
    axis.set_major_locator(matplotlib().ticker.MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))


def legend(names: dict[str, str]) -> list[Any]:
    """Handles for a legend: name -> colour."""
    return [matplotlib().patches.Patch(color=colour, label=name) for name, colour in names.items()]
