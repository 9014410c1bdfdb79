"""The schedules side by side: which warp has which scores, and what lies in shared memory, from the traits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..inspect.drawing import COLOURS, GREY, Picture, matplotlib
from ..inspect.kernels import Kernel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

__all__ = ["family_picture"]

CELL = 8  # rows and keys of a square: an MMA's result is 16 x 8, a quarter of it 8 x 8


def family_picture(kernels: Sequence[Kernel]) -> Picture:
    """Of kernels of one head dim: the warp of each 8 x 8 scores of a tile, and the CTA's buffers to one scale."""
    data = {"head_dim": kernels[0].head_dim, "schedules": [_describe(kernel) for kernel in kernels]}
    name = f"schedules_d{kernels[0].head_dim}"
    return Picture(name, f"The schedules at head dim {kernels[0].head_dim}", data, _draw)


def _describe(kernel: Kernel) -> dict[str, Any]:
    details = kernel.details()
    coords = details.arrays["S.mma.coord"]  # (2, value, rest.., thread)
    rows, columns = coords.reshape(2, -1, coords.shape[-1])
    warps = np.empty((kernel.block_m, kernel.block_n), int)
    warps[rows, columns] = np.arange(coords.shape[-1]) // 32
    return {
        "name": kernel.entry,
        "warps": warps[::CELL, ::CELL].tolist(),
        "buffers": [[item.name, item.offset, item.bytes] for item in details.buffers],
        "stages": kernel.facts["stages"],
        "smem_bytes": kernel.facts["smem_bytes"],
    }


def _draw(data: dict[str, Any]) -> Figure:
    matplotlib()
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    schedules = data["schedules"]
    figure: Figure = Figure(figsize=(1.9 * len(schedules), 5.2), layout="constrained")
    axes = figure.subplots(2, len(schedules), squeeze=False, sharey="row", height_ratios=(3, 2))
    largest = max(one["smem_bytes"] for one in schedules) / 1024
    for scores, memory, one in zip(*axes, schedules, strict=True):
        warps = np.array(one["warps"])
        extent = (0, warps.shape[1] * CELL, warps.shape[0] * CELL, 0)
        colours = {"cmap": ListedColormap(COLOURS), "vmin": 0, "vmax": len(COLOURS) - 1}
        scores.imshow(warps, **colours, extent=extent, interpolation="nearest", aspect="equal")
        for warp, row, column in _labels(warps):
            scores.text(column, row, f"{warp}", ha="center", va="center", weight="bold")
        scores.set_title(one["name"], fontsize=9)
        scores.set_xlabel("keys")
        _draw_buffers(memory, one["buffers"], largest)
        memory.set_xlabel(f"{one['smem_bytes'] / 1024:.1f} KB")
    axes[0][0].set_ylabel("rows of a tile of S, by warp")
    axes[1][0].set_ylabel("shared memory (KB)")
    axes[1][0].set_ylim(0, largest * 1.05)
    return figure


def _labels(warps: NDArray[Any]) -> Iterator[tuple[int, float, float]]:
    """A warp, row and column for the middle of each block of neighbouring rows that a warp has."""
    for warp in range(warps.max() + 1):
        rows, columns = np.nonzero(warps == warp)
        column = (columns.mean() + 0.5) * CELL
        for block in np.split(np.unique(rows), np.flatnonzero(np.diff(np.unique(rows)) > 1) + 1):
            yield warp, (block.mean() + 0.5) * CELL, column


def _draw_buffers(memory: Axes, buffers: Sequence[tuple[str, int, int]], largest: float) -> None:
    """Bars to scale; a buffer that holds the others, before or after them, stands beside them."""
    _, first_begin, first_size = buffers[0]
    beside = any(first_begin <= offset < first_begin + first_size for _, offset, _ in buffers[1:])
    for i, (name, offset, size) in enumerate(buffers):
        begin, height = offset / 1024, size / 1024
        middle = 0.0 if not beside else -0.25 if i == 0 else 0.25
        colour = GREY if name.startswith("Q") else COLOURS[4]
        memory.bar(middle, height, 0.5 if beside else 1.0, bottom=begin, color=colour, edgecolor="black")
        if height > largest / 20:
            memory.text(middle, begin + height / 2, name, ha="center", va="center", fontsize=8)
    memory.set_xlim(-0.6, 0.6)
    memory.set_xticks([])
