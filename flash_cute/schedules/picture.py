"""The schedules side by side: which warp has which scores, and what lies in shared memory, from the traits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..inspect.drawing import Picture, matplotlib
from ..inspect.kernels import Kernel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    pyplot = matplotlib()
    from matplotlib.figure import Figure

    schedules = data["schedules"]
    figure: Figure = Figure(figsize=(1.9 * len(schedules), 5.2), layout="constrained")
    axes = figure.subplots(2, len(schedules), squeeze=False, sharey="row", height_ratios=(3, 2))
    largest = max(one["smem_bytes"] for one in schedules) / 1024
    colors = pyplot.colormaps["tab10"]
    for scores, memory, one in zip(*axes, schedules, strict=True):
        warps = np.array(one["warps"])
        extent = (0, warps.shape[1] * CELL, warps.shape[0] * CELL, 0)
        scores.imshow(warps, cmap=colors, vmin=0, vmax=9, extent=extent, interpolation="nearest", aspect="equal")
        for warp in range(warps.max() + 1):
            middle = np.argwhere(warps == warp).mean(0) * CELL + CELL / 2
            scores.text(middle[1], middle[0], f"{warp}", ha="center", va="center", color="white", weight="bold")
        scores.set_title(one["name"], fontsize=9)
        scores.set_xlabel("keys")
        for name, offset, size in one["buffers"]:
            begin, height = offset / 1024, size / 1024
            memory.bar(0, height, bottom=begin, color=colors(7 if name.startswith("Q") else 9), edgecolor="black")
            if height > largest / 20:
                memory.text(0, begin + height / 2, name, ha="center", va="center", fontsize=8)
        memory.set_xticks([])
        memory.set_xlabel(f"{one['smem_bytes'] / 1024:.1f} KB")
    axes[0][0].set_ylabel("rows of a tile of S, by warp")
    axes[1][0].set_ylabel("shared memory (KB)")
    axes[1][0].set_ylim(0, largest * 1.05)
    return figure
