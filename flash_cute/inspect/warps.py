"""The picture of a CTA's results: which warp computes which part of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .drawing import COLOURS, Picture, cells, legend, new_figure
from .kernels import Kernel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["warp_picture"]

# What a result of an MMA is, and what its rows and columns are.
RESULTS = {"S": ("S = Q K^T, the scores of a key tile", "row", "key"), "O": ("O += P V", "row", "column of V")}


def warp_picture(kernel: Kernel) -> Picture:
    """Of S and of O, the warp that has each block of 16 rows and 8 columns in its registers: the result of one MMA.

    Raises:
        ValueError: the kernel is no forward of sm80.
    """
    if kernel.arch != "sm80" or not kernel.is_forward:
        raise ValueError(f"{kernel}: the warps' parts are drawn of sm80's forwards")
    details = kernel.details()
    rows, columns = details.facts["mma.m"], details.facts["mma.n"]
    panels = []
    for name, (title, *axes) in RESULTS.items():
        coords = details.arrays[f"{name}.mma.coord"]
        row, column = coords.reshape(2, -1, coords.shape[-1], order="F")
        warp = np.broadcast_to(np.arange(row.shape[1]) // 32, row.shape)
        grid = np.empty((row.max() // rows + 1, column.max() // columns + 1), int)
        grid[row // rows, column // columns] = warp
        panels.append({"title": title, "axes": axes, "warps": grid.tolist()})
    data = {"kernel": str(kernel), "block": [rows, columns], "panels": panels}
    return Picture(f"{kernel.arch}_d{kernel.head_dim}_warps", "which warp has what", data, _draw)


def _draw(data: dict[str, Any]) -> Figure:
    panels, (rows, columns) = data["panels"], data["block"]
    heights = [0.8 + 0.25 * len(panel["warps"]) for panel in panels]
    figure, axes = new_figure(9, sum(heights) + 0.4, len(panels), 1, height_ratios=heights)
    for ax, panel in zip(axes[:, 0], panels, strict=True):
        grid = panel["warps"]
        few = len(grid[0]) <= 32
        cells(
            ax,
            [[COLOURS[warp % len(COLOURS)] for warp in line] for line in grid],
            [[str(warp) for warp in line] for line in grid] if few else [],
            8,
        )
        step = max(1, len(grid[0]) // 16)
        ax.set_xticks(range(0, len(grid[0]), step), [columns * i for i in range(0, len(grid[0]), step)])
        ax.set_yticks(range(len(grid)), [rows * i for i in range(len(grid))])
        ax.set_title(panel["title"], fontsize=9)
        ax.set_ylabel(panel["axes"][0])
        ax.set_xlabel(panel["axes"][1])
    warps = 1 + max(warp for panel in panels for line in panel["warps"] for warp in line)
    named = {f"warp {warp}": COLOURS[warp % len(COLOURS)] for warp in range(warps)}
    figure.legend(handles=legend(named), loc="outside right center", fontsize=7)
    figure.suptitle(f"one cell: the {rows} x {columns} results of one MMA ({data['kernel']})", fontsize=9)
    return figure
