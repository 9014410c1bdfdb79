"""The sm80 kernels for head dims above 256, which compute the addresses of shared memory themselves.

Their functions have run on the host and noted every access (module/sm80_large.h): the names are those of the forward,
Q (rows, columns), K (keys, columns), P (rows, keys), V (keys, columns) and O. `Details.arrays` has:

    X.copy (vectors, thread) -> address that cp.async fills
    X.copy.source -> the first of its 8 elements, in the data of two steps
    X.copy.next, X.copy.next.source: the same of the second step
    S.ldsm, O.ldsm (calls, thread) -> a lane's address; .transposed (1, calls)
    S.products, O.products (7, MMAs) -> accumulator, A's and B's registers: 4 * call + matrix
    P.store, O.store (calls, thread) -> address of 4 bytes; .registers: two of the thread's results
    O.read (calls, thread), O.rows (vector, row) -> where a vector of the result is read
    S.mma.coord, O.mma.coord as of other kernels
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np

from .conflicts import conflicts
from .kernels import Details, IntArray, Kernel

__all__ = ["SameRecords", "accesses", "data_flow", "step_smem_bytes"]

# What each kind of access of a product reads or writes: array, name, instruction, bytes per lane.
_ACCESSES = (
    ("Q.copy", "Q into a stage", "cp.async 16 bytes", 16),
    ("K.copy", "K into a stage", "cp.async 16 bytes", 16),
    ("V.copy", "V into a stage", "cp.async 16 bytes", 16),
    ("S.ldsm", "Q and K to registers", "ldmatrix.x4", 16),
    ("P.store", "P to shared memory", "st.shared.b32", 4),
    ("O.ldsm", "P and V to registers", "ldmatrix.x4, V's .trans", 16),
    ("O.store", "O to shared memory", "st.shared.b32", 4),
    ("O.read", "O to global memory", "ld.shared.b128", 16),
)


def accesses(details: Details) -> Iterator[tuple[str, str, IntArray, int]]:
    """Name, instruction, addresses (instructions, lanes) and bytes per lane of every access."""
    for array, name, instruction, width in _ACCESSES:
        addresses = details.arrays[array]
        yield name, instruction, addresses.reshape(addresses.shape[0], -1, 32).reshape(-1, 32), width


def data_flow(kernel: Kernel) -> list[str]:
    """Each product multiplies what it should, element by element: what the copies and stores put at an address, what
    ldmatrix (modelled as the PTX manual describes it) brings of it to a lane, and what the MMA makes of that."""
    return list(_flow(SameRecords(kernel)))


class SameRecords:
    """A kernel that equals those of which the same was recorded: neither the head dim nor the chip changes it."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.details = kernel.details()
        self.tile = (kernel.facts["tile_rows"], kernel.facts["other_rows"])
        arrays = sorted(self.details.arrays.items())
        self.key = (self.tile, tuple((name, array.shape, array.tobytes()) for name, array in arrays))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameRecords) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@functools.cache
def _flow(records: SameRecords) -> tuple[str, ...]:
    details, (rows, keys) = records.details, records.tile
    arrays = details.arrays
    steps = 2  # that are recorded
    left, right = (_copied(arrays[f"{name}.copy"], arrays[f"{name}.copy.source"], steps * 64) for name in "QK")
    chunk = {**left, **{address: (row, column) for address, (row, column) in right.items()}}
    columns = arrays["O.rows"].shape[0] * 8
    found = [
        f"{name}: the next step's copies are of other elements, or go elsewhere"
        for name, advance in (("Q", 64), ("K", 64), ("V", 16 * columns))
        if (arrays[f"{name}.copy.next"] != arrays[f"{name}.copy"]).any()
        or (arrays[f"{name}.copy.next.source"] != arrays[f"{name}.copy.source"] + advance).any()
    ]
    if len(chunk) != (rows + keys) * 64:
        found.append("Q and K: elements of a chunk overlap, or are missing")
    stored = _stored(arrays["P.store"], arrays["P.store.registers"], _held(arrays["S.mma.coord"]))
    values = _copied(arrays["V.copy"], arrays["V.copy.source"], columns)
    if len(stored) != rows * keys or sorted(stored.values()) != [(i, j) for i in range(rows) for j in range(keys)]:
        found.append("P: elements overlap, or are missing")
    if set(stored) & set(values):
        found.append("P and V overlap")
    found += _product(details, "S", left, right, steps=4, depth=0)
    found += _product(details, "O", stored, values, steps=keys // 16, depth=16)
    return (*found, *_result(details))


def step_smem_bytes(kernel: Kernel) -> int:
    """Bytes that one step of a CTA moves through shared memory, a conflict counting as 128. A step is a key tile of the
    forward, and of the backward a tile of the other side, where dS is computed."""
    moved = {
        name: addresses.size * width + 128 * int(conflicts(addresses, width).sum())
        for name, _, addresses, width in accesses(kernel.details())
    }
    chunks, steps = kernel.tile["chunks"], kernel.facts["other_rows"] // 16
    scores = moved["K into a stage"] + moved["Q and K to registers"]
    if not kernel.tile["left_resident"]:
        scores += moved["Q into a stage"]
    scores = chunks * scores // kernel.tile["parts"]  # of a pair of CTAs each computes every second tile of scores
    # Recorded are all steps of P and V's reads, of 4 blocks of rows and 8 of columns, and one step of V's copy.
    copied = kernel.tile["columns"] // 64
    multiplied = 5 if copied <= 5 else 8
    read = moved["P and V to registers"] * (4 + (multiplied + 1) // 2) // 8
    return scores + moved["P to shared memory"] + read + steps * moved["V into a stage"] * copied // 8


def _copied(addresses: IntArray, sources: IntArray, stride: int) -> dict[int, tuple[int, int]]:
    """Byte address -> (row, column) of the tile."""
    element = np.arange(8)
    where = (addresses[..., None] + 2 * element).ravel().tolist()
    what = (sources[..., None] + element).ravel().tolist()
    return {address: divmod(offset, stride) for address, offset in zip(where, what, strict=True)}


def _held(coords: IntArray) -> IntArray:
    """(2, register, thread) of an accumulator."""
    return coords.reshape(2, -1, coords.shape[-1], order="F")


def _stored(addresses: IntArray, registers: IntArray, held: IntArray) -> dict[int, tuple[int, int]]:
    """Byte address -> (row, column) of the result that is stored there."""
    thread = np.broadcast_to(np.arange(addresses.shape[1]), addresses.shape)
    there: dict[int, tuple[int, int]] = {}
    for half in range(2):
        row, column = held[:, registers >> (16 * half) & 0xFFFF, thread]
        pairs = zip(row.ravel().tolist(), column.ravel().tolist(), strict=True)
        there |= dict(zip((addresses + 2 * half).ravel().tolist(), pairs, strict=True))
    return there


def _brought(addresses: IntArray, transposed: IntArray) -> IntArray:
    """(calls, matrix, half, thread) -> the address of each 16-bit half of a register that ldmatrix.x4 fills."""
    calls, threads = addresses.shape
    rows = addresses.reshape(calls, -1, 4, 8)  # (call, warp, matrix, row)
    lane, half = np.arange(32), np.arange(2)[:, None]
    outer, inner = np.broadcast_to(lane // 4, (2, 32)), 2 * (lane % 4) + half
    plain, turned = rows[..., outer] + 2 * inner, rows[..., inner] + 2 * outer  # (call, warp, matrix, half, lane)
    brought = np.where(transposed.reshape(-1, 1, 1, 1, 1).astype(bool), turned, plain)
    return brought.transpose(0, 2, 3, 1, 4).reshape(calls, 4, 2, threads)


def _elements(addresses: IntArray, content: dict[int, tuple[int, int]]) -> IntArray:
    """(2, ...): the coordinates of what is at each address; -1 where nothing is."""
    pairs = [content.get(address, (-1, -1)) for address in addresses.ravel().tolist()]
    return np.array(pairs).T.reshape(2, *addresses.shape)


def _product(
    details: Details,
    name: str,
    of_a: dict[int, tuple[int, int]],
    of_b: dict[int, tuple[int, int]],
    steps: int,
    depth: int,
) -> list[str]:
    """Every accumulator gets the product of its row of A and its row of B: for S with B (column, k), for O (k, column).
    `depth`: how many k of the next B tile there are before each step, where B has that step's alone."""
    arrays = details.arrays
    brought = _brought(arrays[f"{name}.ldsm"], arrays[f"{name}.ldsm.transposed"])
    held = _held(arrays[f"{name}.mma.coord"])
    products = arrays[f"{name}.products"]
    per_step = products.shape[1] // steps
    depths: list[list[int]] = [[] for _ in range(held.shape[1])]  # the k of each sum
    for number, (accumulator, *registers) in enumerate(products.T.tolist()):
        a, b = (
            np.stack([brought[register // 4, register % 4] for register in part])  # (register, half, thread)
            for part in (registers[:4], registers[4:])
        )
        a_row, a_k = _elements(a, of_a).reshape(2, 2, 2, 2, -1, 8, 4)  # (k / 8, row / 8, half, warp, row, k / 2)
        b_column, b_k = _elements(b, of_b).reshape(2, 2, 2, -1, 8, 4)  # (k / 8, half, warp, column, k / 2)
        if depth:
            b_column, b_k = b_k, b_column + depth * (number // per_step)
        # Of the warp's 16 x 8 sums a thread has rows r and r + 8, columns 2q and 2q + 1.
        row, column = held[:, accumulator : accumulator + 4].reshape(2, 2, 2, -1, 8, 4)  # (row / 8, column, warp, r, q)
        good = (a_row == row[:, 0, :, :, :1][None, :, None]).all() and (a_row >= 0).all()
        good &= (b_column.reshape(4, -1, 8, 4) == _columns(column)).all()
        good &= (a_k[:, 0] == b_k).all() and (a_k == a_k[:, :1, :, :, :1]).all()
        if not good:
            return [f"{name}: MMA {number} multiplies other elements than those of its sums"]
        for of_sum in depths[accumulator : accumulator + 4]:
            of_sum += a_k[:, 0, :, 0, 0].ravel().tolist()
        if (a_k != a_k[:, :, :, :1]).any():
            return [f"{name}: MMA {number} multiplies other elements in one warp than in another"]
    every = list(range(16 * steps))
    return (
        []
        if all(sorted(of_sum) == every for of_sum in depths)
        else [f"{name}: a sum lacks products, or has them twice"]
    )


def _columns(column: IntArray) -> IntArray:
    """(1, warp, 8, 1): the column of each of B's 8 rows, from the threads that hold its sums."""
    of_pairs = column[0, :, :, 0]  # (column, warp, q)
    return of_pairs.transpose(1, 2, 0).reshape(1, -1, 8, 1)


def _result(details: Details) -> list[str]:
    """What leaves as row r, columns 8v to 8v + 7 is what was stored as such."""
    arrays = details.arrays
    stored = _stored(arrays["O.store"], arrays["O.store.registers"], _held(arrays["O.mma.coord"]))
    vectors, rows = arrays["O.rows"].shape
    read = arrays["O.rows"].T[:, :, None] + 2 * np.arange(8)  # (row, vector, element)
    row, column = _elements(read, stored).reshape(2, rows, 8 * vectors)
    if (row == np.arange(rows)[:, None]).all() and (column == np.arange(8 * vectors)).all():
        return []
    return ["O: leaves in another order than its elements'"]
