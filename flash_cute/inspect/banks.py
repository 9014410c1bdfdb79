"""Shared memory's 32 banks of 4 bytes: which access patterns a kernel has, and what they cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from . import large
from .conflicts import conflicts
from .kernels import Details, IntArray, Kernel

__all__ = ["Access", "accesses", "chunk_addresses", "conflicts", "descriptor_addresses", "element_addresses"]

LIKE = {"O.smem": "Q.smem", "dK.smem": "K.smem"}  # results take the buffers and the layouts of operands


@dataclass(frozen=True)
class Access:
    """One kind of access of a kernel: every instruction of every warp."""

    name: str
    instruction: str
    addresses: IntArray  # (instructions, lanes): bytes from the start of the CTA's shared memory
    width: int  # bytes per lane


def element_addresses(details: Details, smem: str, stage: int = 0) -> IntArray:
    """(row, column) -> byte address of an element of tensor `smem`, such as "K.smem"."""
    name = smem.partition(".")[0]
    offsets = details.arrays[LIKE.get(smem, smem)]
    if offsets.ndim == 3:
        offsets = offsets[:, :, stage]
    addresses: IntArray = details.buffer(name).offset + offsets * details.facts["element_bytes"]
    return addresses


def accesses(kernel: Kernel) -> Iterator[Access]:
    """Every access of the kernel to shared memory by lanes of a warp, or by a WGMMA; none of sm90's backward."""
    details = kernel.details()
    if kernel.is_recorded:
        yield from (Access(*access) for access in large.accesses(details))
    elif kernel.arch == "sm80":
        yield from _sm80_accesses(details) if kernel.is_forward else _sm80_bwd_accesses(details)
    elif kernel.is_forward:
        yield from _sm90_accesses(details)


def _stages(details: Details, smem: str) -> range:
    offsets = details.arrays[smem]
    return range(offsets.shape[2] if offsets.ndim == 3 else 1)


def _by_warp(first: IntArray, lanes: int = 32) -> IntArray:
    """(instruction, thread) -> (instruction of a warp, lane)"""
    return first.reshape(first.shape[0], -1, 32)[:, :, :lanes].reshape(-1, lanes)


def _sm80_accesses(details: Details) -> Iterator[Access]:
    for name, coord, smem in (("Q", "Q", "Q.smem"), ("K", "K", "K.smem"), ("V", "K", "V.rows")):
        yield from _loads(details, name, coord, smem)
    for name in "QKV":
        yield from _matrix_reads(details, name)
    yield from _results(details, "O", "O.smem")


def _sm80_bwd_accesses(details: Details) -> Iterator[Access]:
    """V's are as K's, dO's as Q's, dV's as dK's, and P^T's, where it is in shared memory, as dS^T's."""
    for name in "KQ":
        yield from _loads(details, name, name, f"{name}.smem")
    for name in ("K", "Q", "Qt", "dS", "Kt", "dSt"):
        if f"{name}.ldsm.coord" in details.arrays:
            yield from _matrix_reads(details, name)
    width = details.facts["dSt.sts.bytes"]
    first = chunk_addresses(details, "dSt.sts.coord", "dSt.smem", width)
    yield Access("dSt to shared memory", f"st.shared.b{8 * width}", _by_warp(first), width)
    yield from _results(details, "dK", "dK.smem")


def _loads(details: Details, name: str, coord: str, smem: str) -> Iterator[Access]:
    width = details.facts["gmem.bytes"]
    for stage in _stages(details, smem):
        first = chunk_addresses(details, f"{coord}.gmem.coord", smem, width, stage)
        yield Access(f"{name} into stage {stage}", f"cp.async {width} bytes", _by_warp(first), width)


def _matrix_reads(details: Details, name: str) -> Iterator[Access]:
    matrices, turned = details.facts[f"{name}.ldsm.matrices"], details.facts[f"{name}.ldsm.transposed"]
    instruction = f"ldmatrix.x{matrices}" + (".trans" if turned else "")
    for stage in _stages(details, f"{name}.smem"):
        first = chunk_addresses(details, f"{name}.ldsm.coord", f"{name}.smem", 16, stage)
        yield Access(f"{name} of stage {stage} to registers", instruction, _by_warp(first, 8 * matrices), 16)


def _results(details: Details, name: str, smem: str) -> Iterator[Access]:
    """A result's way out, through shared memory."""
    width = details.facts[f"{name}.sts.bytes"]
    first = chunk_addresses(details, f"{name}.sts.coord", smem, width)
    yield Access(f"{name} to shared memory", f"st.shared.b{8 * width}", _by_warp(first), width)
    width = details.facts["gmem.bytes"]
    first = chunk_addresses(details, f"{name}.gmem.coord", smem, width)
    yield Access(f"{name} to global memory", f"ld.shared.b{8 * width}", _by_warp(first), width)


def _sm90_accesses(details: Details) -> Iterator[Access]:
    size = details.facts["element_bytes"]
    if "LoadedV.smem" in details.arrays:
        yield from _transposition(details)
    for name in ("Q", "K", "V", "SharedP"):
        if f"{name}.smem" not in details.arrays:
            continue
        for stage in _stages(details, f"{name}.smem"):
            rows = descriptor_addresses(details, name, stage)  # (step, row, column) of one atom
            if name == "V" and size == 2:  # MN-major: rows of 16 bytes run along the head dim
                rows = rows.swapaxes(1, 2)
            steps, m, k = rows.shape
            cores = rows.reshape(steps, m // 8, 8, k * size // 16, 16 // size)[..., 0]  # (step, core row, row, column)
            cores = cores.transpose(0, 1, 3, 2).reshape(-1, 8)
            yield Access(f"{name} of stage {stage} to the tensor cores", "wgmma core matrix", cores, 16)
    if "SharedP.sts.coord" in details.arrays:
        first = chunk_addresses(details, "SharedP.sts.coord", "SharedP.smem", 16)
        yield Access("SharedP to shared memory", "stmatrix.x4", _by_warp(first), 16)


def _transposition(details: Details) -> Iterator[Access]:
    """V of a float8 kernel, by the transposing warps."""
    for name, array, what, instruction in (
        ("LoadedV", "LoadedV.ldsm.address", "to registers", "ldmatrix.x4.trans"),
        ("V", "V.sts.address", "to shared memory", "stmatrix.x4"),
    ):
        stages = details.arrays[f"{name}.smem"].shape[2]
        buffer = details.buffer(name)
        for stage in range(stages):
            begin = buffer.offset + buffer.bytes // stages * stage
            yield Access(f"{name} of stage {stage} {what}", instruction, begin + details.arrays[array], 16)


def chunk_addresses(details: Details, coord: str, smem: str, width: int, stage: int = 0) -> IntArray:
    """(instruction, thread) -> where each lane's access begins; its elements must lie one after another."""
    array = details.arrays[coord]
    rows, columns = array.reshape(2, width // details.facts["element_bytes"], -1, array.shape[-1], order="F")
    addresses = element_addresses(details, smem, stage)[rows, columns]
    steps = np.arange(addresses.shape[0])[:, None, None] * details.facts["element_bytes"]
    if not (addresses == addresses[:1] + steps).all() or (addresses[0] % width).any():
        raise ValueError(f"{coord}: a lane's {width} bytes are not one aligned piece of {smem}")
    begin: IntArray = addresses[0]
    return begin


# The hardware's numbers of a descriptor's swizzle -> bytes of a row, and address bits that are permuted.
DESCRIPTOR_SWIZZLES = {1: (128, 3), 2: (64, 2), 3: (32, 1)}


def descriptor_addresses(details: Details, name: str, stage: int = 0) -> IntArray:
    """(step, row, column) -> the byte address that a WGMMA's descriptor of operand `name` leads to.

    Row and column count within the atom's operand; a step is an atom along the rows, for each of those along the
    columns. K-major: 8 rows of a swizzle's width, the next 8 `stride` bytes on. MN-major: the width along the rows, the
    next `leading` bytes on; 8 columns, the next `stride` on.
    """
    facts = details.facts
    steps = details.arrays[f"{name}.descriptor"]
    steps = steps[0]  # (step of rows, step of columns[, stage])
    steps = (steps[:, :, stage] if steps.ndim == 3 else steps).ravel(order="F")
    coords = details.arrays[f"{name}.mma.coord"][:, :, 0, 0, 0]
    rows, columns = int(coords[0].max()) + 1, int(coords[1].max()) + 1
    row, column = np.arange(rows)[:, None], np.arange(columns)[None, :]
    width, bits = DESCRIPTOR_SWIZZLES[facts[f"{name}.descriptor.swizzle"]]
    leading, stride = facts[f"{name}.descriptor.leading"], facts[f"{name}.descriptor.stride"]
    size = facts["element_bytes"]
    if name == "V" and size == 2:  # float8 takes V, too, along the keys
        elements = width // 2
        inside = row % elements * 2 + row // elements * leading + column % 8 * width + column // 8 * stride
    else:
        inside = row % 8 * width + row // 8 * stride + column * size
    linear = facts[f"{name}.descriptor.start"] + 16 * steps[:, None, None] + inside
    addresses: IntArray = linear ^ (((linear >> 7) & ((1 << bits) - 1)) << 4)
    return addresses
