"""Of sm90's float8 forward: how V is transposed in shared memory, and the order that its keys get."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .drawing import COLOURS, Picture, cells, new_figure
from .kernels import Details, IntArray, Kernel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["CORNER", "keys_of_positions", "transposed", "transposition_picture"]

CORNER = 16  # keys and columns of a picture: the order of keys repeats after so many


def transposed(details: Details) -> IntArray:
    """(2, column, position): the key and column of what V transposed has in each place, of V as it is loaded.

    Of stage 0; ldmatrix.x4.trans and stmatrix.x4 are modelled as the PTX manual describes them. -1 where nothing is
    stored. The columns of ones behind those of V are left out.

    Raises:
        ValueError: a byte is read or stored outside of the tile, or where the ones are.
    """
    loaded, stored = details.arrays["LoadedV.smem"][:, :, 0], details.arrays["V.smem"][:, :, 0]
    stored, ones = np.split(stored, [loaded.shape[1]])
    came_from = np.full(stored.size + ones.size, -1, np.int64)
    came_from[_stored_bytes(details)] = _loaded_bytes(details)
    if (came_from[ones] >= 0).any():
        raise ValueError("V: the transposition overwrites the columns of ones")
    element_at = np.full((2, loaded.size), -1, np.int64)
    element_at[:, loaded.ravel()] = np.indices(loaded.shape).reshape(2, -1)
    offsets = came_from[stored]
    return np.where(offsets < 0, -1, element_at[:, offsets])


def _loaded_bytes(details: Details) -> IntArray:
    """(instruction, lane, 16) -> the offset of each byte that a lane stores, where it was loaded from."""
    begin = details.arrays["LoadedV.ldsm.address"]
    lane, matrix, value = np.meshgrid(np.arange(32), np.arange(4), np.arange(4), indexing="ij")
    # A word has two neighbouring bytes each of two rows.
    row = 8 * matrix + 2 * (lane % 4) + value // 2
    offsets = begin[:, row] + 2 * (lane // 4) + value % 2  # (instruction, lane, matrix, value)
    offsets = offsets.reshape(*begin.shape, 16)
    return _inside(np.take_along_axis(offsets, details.arrays["V.sts.byte"].transpose(1, 2, 0), 2), details)


def _stored_bytes(details: Details) -> IntArray:
    """(instruction, lane, 16) -> the offset at which each byte of a lane's four words is stored."""
    begin = details.arrays["V.sts.address"]
    lane, matrix, byte = np.meshgrid(np.arange(32), np.arange(4), np.arange(4), indexing="ij")
    offsets = begin[:, 8 * matrix + lane // 4] + 4 * (lane % 4) + byte
    return _inside(offsets.reshape(*begin.shape, 16), details)


def _inside(offsets: IntArray, details: Details) -> IntArray:
    if offsets.min() < 0 or offsets.max() >= details.arrays["V.smem"][:, :, 0].size:
        raise ValueError("V: the transposition reaches outside its tile")
    return offsets


def keys_of_positions(details: Details) -> IntArray:
    """(BLK_N) -> the key at each place of a row of V transposed.

    Raises:
        ValueError: it is another one in another column, or V is not transposed.
    """
    keys, columns = transposed(details)
    if (keys != keys[:1]).any() or (columns != np.arange(len(columns))[:, None]).any():
        raise ValueError("V: what is stored is not V transposed")
    if (np.sort(keys[0]) != np.arange(len(keys[0]))).any():
        raise ValueError("V: a key is stored twice")
    order: IntArray = keys[0]
    return order


def transposition_picture(kernel: Kernel) -> Picture:
    """A corner of V as it is loaded, and of V transposed: the lane that moves each element, and as which of its bytes.

    Raises:
        ValueError: the kernel does not transpose V.
    """
    if not kernel.is_float8:
        raise ValueError(f"{kernel} does not transpose V: that is drawn of float8 kernels")
    details = kernel.details()
    before = [[""] * CORNER for _ in range(CORNER)]
    after = [[""] * CORNER for _ in range(CORNER)]
    places = [details.arrays[name][:CORNER, :CORNER, 0] for name in ("LoadedV.smem", "V.smem")]
    loaded, stored, number = _loaded_bytes(details), _stored_bytes(details), details.arrays["V.sts.byte"]
    for corner, place, offsets in ((before, places[0], loaded), (after, places[1], stored)):
        for row in range(CORNER):
            for column in range(CORNER):
                ((instruction, lane, byte),) = np.argwhere(offsets == place[row, column])
                corner[row][column] = f"{lane}:{number[byte, instruction, lane]}"
    data = {
        "kernel": str(kernel),
        "before": before,
        "after": after,
        "keys": keys_of_positions(details)[:CORNER].tolist(),
    }
    return Picture(f"sm90_fp8_d{kernel.head_dim}_transposition", "V is transposed", data, _draw)


def _draw(data: dict[str, Any]) -> Figure:
    figure, axes = new_figure(9, 7.4, 2, 1)
    panels = (
        ("V as it is loaded, and the lane:byte that ldmatrix.trans moves each element to", "before", "head dim", "key"),
        ("V transposed, as stmatrix stores it after the byte permutation", "after", "key", "head dim"),
    )
    for ax, (title, name, column_axis, row_axis) in zip(axes[:, 0], panels, strict=True):
        held = data[name]
        cells(ax, [[COLOURS[int(cell.split(":")[0]) // 4 % 8] for cell in row] for row in held], held, 8)
        ax.set_title(title, fontsize=10)
        ax.set_xlabel(column_axis)
        ax.set_ylabel(row_axis)
    axes[1][0].set_xticks(range(CORNER), data["keys"])
    figure.suptitle(f"a colour is a quad of lanes ({data['kernel']})", fontsize=10)
    return figure
