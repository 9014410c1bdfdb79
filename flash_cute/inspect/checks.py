"""What must hold of every kernel's layouts. Each check returns sentences that say what is wrong; none is good.

Past 400 lines, and one file: each check is short, and `CHECKS` at the end is the list of them all.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from . import float8, large
from .banks import DESCRIPTOR_SWIZZLES, accesses, conflicts, descriptor_addresses, element_addresses
from .kernels import Details, IntArray, Kernel, Problem, band_module

__all__ = [
    "CHECKS",
    "bank_conflicts",
    "coverage",
    "data_flow",
    "mask_and_schedule",
    "mask_definition",
    "shared_memory",
]


def bank_conflicts(kernel: Kernel) -> list[str]:
    """No access to shared memory takes more passes than its bytes need."""
    return list(_recorded_conflicts(large.SameRecords(kernel)) if kernel.is_recorded else _conflicts(kernel))


@functools.cache
def _recorded_conflicts(records: large.SameRecords) -> tuple[str, ...]:
    return tuple(_conflicts(records.kernel))


def _conflicts(kernel: Kernel) -> list[str]:
    found = []
    try:
        for access in accesses(kernel):
            extra = conflicts(access.addresses, access.width)
            if extra.any():
                found.append(
                    f"{access.name} ({access.instruction}): {int((extra > 0).sum())} of {len(extra)} instructions"
                    f" conflict, {int(extra.max())} more passes at worst"
                )
    except ValueError as error:
        found.append(str(error))
    return found


# --- Coverage ---------------------------------------------------------------------------------------------


def coverage(kernel: Kernel) -> list[str]:
    """Each element of each tile is moved once by its copy, and held once by its MMA, or by each warp that needs it."""
    if kernel.is_recorded:
        return []  # it is part of its data flow
    details = kernel.details()
    shapes = _shapes(kernel, details)
    threads = kernel.facts["threads"] if kernel.arch == "sm80" else 128  # of a warpgroup
    found = []
    for name, array in details.arrays.items():
        operand, _, kind = name.partition(".")
        if kind.endswith(".coord"):
            if array.shape[-1] not in (threads, 1):
                found.append(f"{name}: for {array.shape[-1]} threads, and there are {threads}")
            times = 1 if kind.startswith(("gmem", "sts")) else _holders(kernel, operand)
            found += _covered(name, array, shapes[operand], times)
        elif kind.endswith(".register"):
            registers = np.sort(array.ravel())
            if not (registers == np.arange(array.size)).all():
                found.append(f"{name}: registers are not 0 to {array.size - 1}, each once")
        elif kind in ("smem", "rows"):
            found += _distinct_offsets(details, name)
    return found


def _shapes(kernel: Kernel, details: Details) -> dict[str, tuple[int, int]]:
    """The tile of each operand and result. V transposed may have columns of ones behind its own in float8."""
    block_n, head_dim = kernel.block_n, kernel.head_dim
    if not kernel.is_forward:
        rows = kernel.facts.get("score_rows", 0)
        return {
            "K": (block_n, head_dim),
            "Kt": (head_dim, block_n),
            "Q": (rows, head_dim),
            "Qt": (head_dim, rows),
            "S": (block_n, rows),
            "dS": (kernel.block_m, block_n),
            "dSt": (block_n, rows),
            "dK": (block_n, head_dim),
            "dQ": (kernel.block_m, head_dim),
        }
    rows = kernel.block_m if kernel.arch == "sm80" else kernel.facts["warpgroup_rows"]
    scores = dict.fromkeys(("S", "P", "SharedP"), (rows, block_n))
    if kernel.is_large:  # units of Q, K and V, and a warpgroup's columns of O
        tile = kernel.tile
        units = {"Q": (rows, tile["unit_columns"]), "K": (block_n, tile["unit_columns"])}
        return units | scores | {"V": (tile["unit_columns_of_v"], tile["unit_keys"]), "O": (rows, tile["columns_of_o"])}
    columns = details.arrays["V.smem"].shape[0] if kernel.is_float8 else head_dim
    return {"K": (block_n, head_dim), "V": (columns, block_n), **dict.fromkeys("QO", (rows, head_dim)), **scores}


def _holders(kernel: Kernel, operand: str) -> int:
    """By how many threads an element is held. A product's A operand is for the warps side by side along its columns,
    its B operand for those along its rows; a result is shared out among all."""
    if kernel.arch != "sm80":
        return 1
    if kernel.is_forward:
        return kernel.warps if operand in "KV" else 1
    along = {
        **dict.fromkeys(("K", "Q"), kernel.tile["score_warps"]),
        **dict.fromkeys(("dSt", "Qt"), kernel.tile["key_warps"]),
        **dict.fromkeys(("dS", "Kt"), kernel.tile["row_warps"]),
    }
    if operand not in along:
        return 1
    return along[operand] if operand in ("Q", "Qt", "Kt") else kernel.warps // along[operand]


def _covered(name: str, array: IntArray, shape: tuple[int, int], times: int) -> list[str]:
    """No thread has an element twice, so that those that have it are of different warps."""
    rows, columns = array.reshape(2, -1, array.shape[-1])
    if (array < 0).any() or rows.max() >= shape[0] or columns.max() >= shape[1]:
        return [f"{name}: reaches outside its tile of {shape[0]} x {shape[1]}"]
    offsets = rows * shape[1] + columns
    count = np.bincount(offsets.ravel(), minlength=shape[0] * shape[1])
    warps = max(1, array.shape[-1] // 32)
    warp = np.broadcast_to(np.arange(array.shape[-1]) // 32, offsets.shape)
    of_warps = np.unique(offsets.astype(np.int64) * warps + warp).size
    if (count == times).all() and of_warps == offsets.size:
        return []
    missed, more = int((count < times).sum()), int((count > times).sum())
    return [f"{name}: {missed} elements of {count.size} are missed and {more} covered more than {times}x"]


def _distinct_offsets(details: Details, name: str) -> list[str]:
    offsets = details.arrays[name]
    size = details.buffer(name.partition(".")[0]).bytes // details.facts["element_bytes"]
    distinct = np.unique(offsets).size
    if distinct != offsets.size or offsets.min() < 0 or offsets.max() >= size:
        return [
            f"{name}: {offsets.size} elements have {distinct} offsets, {offsets.min()} to {offsets.max()},"
            f" in a buffer of {size}"
        ]
    return []


# --- Data flow --------------------------------------------------------------------------------------------


def data_flow(kernel: Kernel) -> list[str]:
    """What each instruction brings is what the next expects, element by element.

    ldmatrix is modelled as the PTX manual describes it; so are a TMA box's swizzle and a WGMMA descriptor's. S's
    registers, read as P (or dS^T), must be P's elements; on sm80, where results go through shared memory, they must
    reach the addresses of their elements.
    """
    if kernel.is_recorded:
        return large.data_flow(kernel)
    details = kernel.details()
    if kernel.arch == "sm80":
        found = []
        for name in sorted(name.split(".")[0] for name in details.arrays if name.endswith(".ldsm.coord")):
            found += _ldmatrix_feeds_mma(details, name)
        if kernel.is_forward:
            found += _is_scores(details, "P") + _same_memory(details, "V.rows", "V.smem")
            found += _stored_where_it_belongs(details, "O.sts", "O")
        else:
            if "dSt.ldsm.coord" not in details.arrays:
                found += _is_scores(details, "dSt")
            for name, transposed in (("K", "Kt"), ("Q", "Qt"), ("dS", "dSt")):
                found += _same_memory(details, f"{name}.smem", f"{transposed}.smem")
            found += _stored_where_it_belongs(details, "dSt.sts", "S")
            found += _stored_where_it_belongs(details, "dK.sts", "dK")
        return found
    if not kernel.is_forward:
        return []
    found = _float8_scores(details) if kernel.is_float8 else _is_scores(details, "P")
    for name in "QKV":
        found += _box_is_layout(details, "LoadedV" if kernel.is_float8 and name == "V" else name)
        found += _descriptor_feeds_mma(details, name)
    if "SharedP.smem" in details.arrays:
        found += _stmatrix_stores_scores(details) + _descriptor_feeds_mma(details, "SharedP")
    return found


def _wanted(details: Details, name: str) -> IntArray:
    """(2, register, thread): which element the MMA takes each register for."""
    coords = details.arrays[f"{name}.mma.coord"]
    coords = coords.reshape(2, -1, coords.shape[-1], order="F")
    registers = details.arrays[f"{name}.mma.register"].ravel(order="F")
    wanted = np.empty_like(coords)
    wanted[:, registers] = coords
    return wanted


def _is_scores(details: Details, name: str) -> list[str]:
    if (_wanted(details, name) == _wanted(details, "S")).all():
        return []
    return [f"{name}: a thread's scores are not the elements that the second product takes its registers for"]


def _float8_scores(details: Details) -> list[str]:
    """The same of P as the numerators are converted to it: its keys have the order of V transposed."""
    try:
        keys = float8.keys_of_positions(details)
    except ValueError as error:
        return [str(error)]
    scores, (row, position) = _wanted(details, "S"), _wanted(details, "P")
    held = np.empty_like(scores)
    held[:, details.arrays["P.mma.numerator"]] = scores[:, details.arrays["S.mma.rowcol"]]
    if (held == np.stack([row, keys[position]])).all():
        return []
    return ["P: a thread's scores are not of the keys that V transposed has where the second product takes them"]


def _matrix_lanes(count: int, transposed: int) -> tuple[IntArray, IntArray]:
    """For each lane and each of its 2 * `count` values: the lane whose row it is in, and the index there."""
    lane, value = np.meshgrid(np.arange(32), np.arange(2 * count), indexing="ij")
    outer, inner = lane // 4, 2 * (lane % 4) + value % 2
    row, column = (inner, outer) if transposed else (outer, inner)
    return value // 2 * 8 + row, column


def _ldmatrix_feeds_mma(details: Details, name: str) -> list[str]:
    matrices, transposed = details.facts[f"{name}.ldsm.matrices"], details.facts[f"{name}.ldsm.transposed"]
    addresses = element_addresses(details, f"{name}.smem")
    element_at = {int(address): index for index, address in enumerate(addresses.ravel())}
    coords = details.arrays[f"{name}.ldsm.coord"]
    rows, columns = coords[:, 0].reshape(2, -1, coords.shape[-1], order="F")
    begin = addresses[rows, columns]  # (instruction, thread)
    begin = begin.reshape(begin.shape[0], -1, 32)
    from_lane, index = _matrix_lanes(matrices, transposed)
    read = begin[:, :, from_lane] + 2 * index  # (instruction, warp, lane, value)
    try:
        index = np.vectorize(element_at.__getitem__, otypes=[np.int64])(read)
    except KeyError:
        return [f"{name}: ldmatrix reads outside its tile"]
    got = np.stack(np.divmod(index, addresses.shape[1]))  # (2, instruction, warp, lane, value)
    got = got.transpose(0, 4, 1, 2, 3).reshape(2, -1, coords.shape[-1], order="C")
    registers = details.arrays[f"{name}.ldsm.register"]
    registers = registers.reshape(2 * matrices, -1, order="F").ravel()
    brought = np.empty_like(got)
    brought[:, registers] = got
    if (brought == _wanted(details, name)).all():
        return []
    return [f"{name}: ldmatrix does not bring what the MMA takes its registers for"]


def _stmatrix_stores_scores(details: Details) -> list[str]:
    """Each register of P goes to the address of its element: stmatrix is ldmatrix the other way round."""
    coords = details.arrays["SharedP.sts.coord"]
    rows, columns = coords.reshape(2, 8, -1, coords.shape[-1], order="F")  # (element of the lane's row, call, thread)
    rows, columns = (part.transpose(1, 2, 0).reshape(-1, coords.shape[-1] // 32, 32, 8) for part in (rows, columns))
    lane, index = _matrix_lanes(4, 0)  # (lane, value)
    stored = np.stack([part[:, :, lane, index] for part in (rows, columns)])  # (2, call, warp, lane, value)
    stored = stored.transpose(0, 4, 1, 2, 3).reshape(2, -1, coords.shape[-1])
    registers = details.arrays["SharedP.sts.register"].reshape(8, -1, order="F").ravel()
    put = np.empty_like(stored)
    put[:, registers] = stored
    if (put == _wanted(details, "S")).all():
        return []
    return ["SharedP: stmatrix stores a register at another element's address"]


def _same_memory(details: Details, name: str, transposed: str) -> list[str]:
    if (details.arrays[name].swapaxes(0, 1) == details.arrays[transposed]).all():
        return []
    return [f"{name.split('.')[0]}: read by the MMA at other addresses than it is loaded to"]


def _stored_where_it_belongs(details: Details, name: str, held: str) -> list[str]:
    coords = details.arrays[f"{name}.coord"]
    coords = coords.reshape(2, -1, coords.shape[-1], order="F")
    stored = np.empty_like(coords)
    stored[:, details.arrays[f"{name}.register"].ravel(order="F")] = coords
    return (
        [] if (stored == _wanted(details, held)).all() else [f"{name}: stores a register at another element's address"]
    )


def _box_is_layout(details: Details, name: str) -> list[str]:
    """A TMA box is `box.columns` columns of all rows; within 1024 bytes it permutes 16-byte pieces by the row."""
    columns = details.facts["box.columns"]
    offsets = details.arrays[f"{name}.smem"]
    if name == "V":
        offsets = offsets.swapaxes(0, 1)
    rows, head_dim = offsets.shape[:2]
    row, column = np.arange(rows)[:, None], np.arange(head_dim)[None, :]
    size = details.facts["element_bytes"]
    linear = size * (column // columns * rows * columns + row * columns + column % columns)
    bits = {128: 3, 64: 2, 32: 1}[size * columns]
    stage_bytes = size * rows * head_dim
    for stage in range(offsets.shape[2] if offsets.ndim == 3 else 1):
        at = linear + stage * stage_bytes
        at = at ^ (((at >> 7) & ((1 << bits) - 1)) << 4)
        here = offsets[:, :, stage] if offsets.ndim == 3 else offsets
        if (size * here != at).any():
            return [f"{name}: a TMA box of {columns} columns does not put elements where the layout has them"]
    return []


def _descriptor_feeds_mma(details: Details, name: str) -> list[str]:
    if details.facts[f"{name}.descriptor.swizzle"] not in DESCRIPTOR_SWIZZLES:
        return [f"{name}: its descriptor has no swizzle"]
    coords = details.arrays[f"{name}.mma.coord"][..., 0]  # (2, value, step of rows, step of columns)
    coords = coords.reshape(*coords.shape[:2], -1, order="F")  # (2, value, step)
    offsets = details.arrays[f"{name}.smem"]
    for stage in range(offsets.shape[2] if offsets.ndim == 3 else 1):
        addresses = element_addresses(details, f"{name}.smem", stage)
        led_to = descriptor_addresses(details, name, stage)
        for step in range(coords.shape[2]):
            row, column = coords[:, :, step]
            local_row, local_column = coords[:, :, 0]
            if (led_to[step, local_row, local_column] != addresses[row, column]).any():
                return [f"{name}: the descriptor of step {step} leads to other elements than the layout has there"]
    return []


# --- Mask, schedule, memory -------------------------------------------------------------------------------

# Lengths about the tiles' edges; heads that do and do not share keys; masks that limit one side, both or none.
LENGTHS = ((2, 4, 2, 300, 300), (1, 3, 1, 65, 700), (1, 2, 2, 513, 190), (3, 2, 1, 1, 1), (1, 2, 2, 129, 0))
MASKS: tuple[tuple[str, tuple[int | None, int | None]], ...] = (
    ("none", (None, None)),
    ("top_left", (None, None)),
    ("bottom_right", (None, None)),
    ("bottom_right", (70, None)),
    ("none", (100, 33)),
    ("none", (None, 9)),
    ("none", (0, None)),
)
PROBLEMS = tuple(Problem(*lengths, 0, causal, window) for lengths in LENGTHS for causal, window in MASKS)
# On these the mask's own code runs, for every thread, on the tiles at the edges of what the first and last rows see.
MASKED = (
    Problem(1, 1, 1, 300, 300, 0, "none", (100, 33)),
    Problem(1, 1, 1, 65, 700, 0, "bottom_right", (70, None)),
    Problem(1, 1, 1, 513, 190, 0, "top_left"),
)
# Batch, heads and lengths of which some heads at a time have a part of L2: the schedule has groups of them, the last
# one larger for every head dim.
GROUPED = (17, 12, 4, 1024, 1024)
# A few tiles of many keys, which several CTAs share, and whole waves with some such tiles.
SPLIT = tuple(
    Problem(1, 3, 1, len_q, len_k, 0, causal)
    for causal in ("none", "bottom_right", "top_left")
    for len_q, len_k in ((200, 5000), (1000, 4000), (64, 20000))
)


def mask_and_schedule(kernel: Kernel) -> list[str]:
    """Every tile of rows is computed once; its range of key tiles holds every score that is seen, and the part that
    goes unmasked holds no other; where the mask is applied, it hides exactly what is not seen."""
    found: list[str] = []
    if kernel.is_forward:
        grouped = [Problem(*GROUPED, kernel.head_dim, causal) for causal in ("none", "top_left")]
        for sms in (1, 7, 132) if kernel.arch == "sm90" or kernel.ctas_per_tile > 1 else (1,):
            # Drawing them takes a second, and their groups do not depend on the number of multiprocessors.
            for problem in (*PROBLEMS, *SPLIT, *(() if kernel.is_large and sms > 1 else grouped)):
                found += _schedule(kernel, problem, sms)
    return sorted({*found, *_masks(kernel)})


def _schedule(kernel: Kernel, problem: Problem, sms: int) -> list[str]:
    tiles = kernel.schedule(problem, sms)
    m_blocks = -(-problem.len_q // kernel.block_m)
    wanted = set(itertools.product(range(m_blocks), range(problem.heads_q), range(problem.batch)))
    got = list(zip(*(tiles[name].tolist() for name in ("m_block", "head", "batch")), strict=True))
    where = f"schedule of {problem} on {sms} multiprocessors"
    found = _ranges(kernel, problem, tiles, where)
    if "parts" in tiles:
        wrong = _wrong_parts(got, tiles)
        if wrong:
            return [*found, f"{where}: {wrong} tiles are not put together from all their keys"]
        got = [tile for tile, parts in zip(got, tiles["parts"].tolist(), strict=True) if parts >= 0]
    if len(got) != len(set(got)):
        return [*found, f"{where}: {len(got) - len(set(got))} tiles come more than once"]
    if set(got) != wanted:
        return [*found, f"{where}: {len(wanted - set(got))} tiles are missing"]
    return found


def _wrong_parts(tiles_of: list[tuple[int, int, int]], tiles: dict[str, IntArray]) -> int:
    """How many tiles are not what they should be: begun by one CTA; their key tiles each in one visit; the parts that
    the CTA merges those of the CTAs before it in launch order, which have nothing else to do first."""
    names = ("key_begin", "key_end", "parts", "cta", "round", "begin", "end")
    visits: dict[tuple[int, int, int], list[list[int]]] = {}
    for tile, *visit in zip(tiles_of, *(tiles[name].tolist() for name in names), strict=True):
        visits.setdefault(tile, []).append(visit)
    wrong = 0
    for (begin, end, parts, cta, _, first, last), *others in map(sorted, visits.values()):
        good = begin == first and parts == len(others)
        for number, (other_begin, other_end, other_parts, other_cta, turn, *_) in enumerate(others, start=1):
            good &= other_parts == -1 and other_cta == cta - number and turn == 0
            good &= other_begin == end or other_begin == other_end  # a part of keys that its rows do not see is empty
            end = max(end, other_end) if other_end > other_begin else end
        wrong += not (good and end == last)
    return wrong


def _ranges(kernel: Kernel, problem: Problem, tiles: dict[str, IntArray], where: str) -> list[str]:
    """The ranges of key tiles hold what the rows see, and those that are not masked nothing else."""
    first, limit = problem.seen()
    block_m, block_n = kernel.block_m, kernel.block_n
    found = []
    columns = (tiles[name].tolist() for name in ("m_block", "begin", "whole_begin", "whole_end", "end"))
    for m_block, begin, whole_begin, whole_end, end in set(zip(*columns, strict=True)):
        if not 0 <= m_block * block_m < problem.len_q:
            continue  # a tile that should not be there, which the schedule's own check says
        rows = slice(m_block * block_m, (m_block + 1) * block_m)
        seen = limit[rows] > first[rows]
        if not begin <= whole_begin <= whole_end <= end:
            found.append(f"{where}, row tile {m_block}: the ends of its range are out of order")
        if seen.any() and (begin * block_n > first[rows][seen].min() or end * block_n < limit[rows][seen].max()):
            found.append(f"{where}, row tile {m_block}: scores outside its range are seen")
        if seen.any() and (
            (begin + 1) * block_n <= first[rows][seen].min() or (end - 1) * block_n >= limit[rows].max()
        ):
            found.append(f"{where}, row tile {m_block}: its range's first or last tile is seen by no row")
        whole = whole_begin < whole_end
        if whole and (first[rows].max() > whole_begin * block_n or limit[rows].min() < whole_end * block_n):
            found.append(f"{where}, row tile {m_block}: a tile that needs the mask goes without")
    return found


def _edge_tiles(kernel: Kernel, problem: Problem) -> Iterator[tuple[int, int]]:
    """The tiles in which the bands of the first and the last row tile begin and end."""
    first, limit = problem.seen()
    for m_block in {0, (problem.len_q - 1) // kernel.block_m}:
        rows = slice(m_block * kernel.block_m, (m_block + 1) * kernel.block_m)
        edges = {first[rows].min(), first[rows].max(), limit[rows].min() - 1, limit[rows].max() - 1}
        tiles = {int(edge) // kernel.block_n for edge in edges}
        yield from ((m_block, tile) for tile in sorted(tiles) if 0 <= tile * kernel.block_n < problem.len_k)


def _masks(kernel: Kernel) -> list[str]:
    """Once for all kernels that share the code: it depends on the product's tile, and not on the head dim."""
    return list(_masks_of_tile(_SameMask(kernel)))


class _SameMask:
    """A kernel that equals those which mask with the same code."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        # The module tells apart the headers that the kernels are of.
        csrc = kernel.module.__name__.split("_sm")[0]
        facts = tuple(kernel.facts.get(name) for name in ("block_m", "block_n", "threads", "score_rows", "pieces"))
        warps = kernel.tile.get("score_warps")
        transposed = not kernel.is_forward and kernel.entry != "queries"
        self.key = (csrc, kernel.arch, transposed, facts, warps)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameMask) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@functools.cache
def _masks_of_tile(same: _SameMask) -> tuple[str, ...]:
    return tuple(sentence for problem in MASKED for sentence in _mask(same.kernel, problem))


def _mask(kernel: Kernel, problem: Problem) -> list[str]:
    found = []
    first, limit = problem.seen()
    for m_block, n_block in _edge_tiles(kernel, problem):
        held, hidden = kernel.masked(problem, m_block, n_block)
        rows = slice(m_block * kernel.block_m, (m_block + 1) * kernel.block_m)
        column = n_block * kernel.block_n + np.arange(kernel.block_n)
        if (held != 1).any():
            found.append(f"mask of {problem}: a score is held by no thread or by several")
        seen = (first[rows, None] <= column) & (column < limit[rows, None])
        if (hidden[: len(seen)] == seen).any():
            found.append(f"mask of {problem}, tile ({m_block}, {n_block}): hides other scores than it should")
    return found


def mask_definition(csrc: Path | str | None = None, *, seed: int = 0, cases: int = 200) -> list[str]:
    """csrc/core/mask.cuh agrees with the definition of a band: what a row sees, which tiles are visited and masked in
    both directions, and which bits of a thread's scores are kept. Of no kernel; not one of CHECKS."""
    module = band_module(csrc)
    found = [*module.tile_range_findings(seed, cases), *module.keep_range_findings()]
    for problem in PROBLEMS:
        columns = np.array(module.columns(problem.len_q, problem.len_k, problem.band.lower, problem.band.upper))
        first, limit = problem.seen()
        sees = columns[:, 0] < columns[:, 1]
        wanted = first < limit
        if (sees != wanted).any() or (columns[sees] != np.stack([first, limit], -1)[sees]).any():
            found.append(f"mask of {problem}: rows do not see what the mask is defined to show them")
    return found


def shared_memory(kernel: Kernel) -> list[str]:
    """The plan is what the kernel lays out, its parts do not overlap, and it fits the chip."""
    facts = kernel.facts
    found = []
    for name in ("block_m", "block_n", "threads", "stages", "smem_bytes"):
        # The plan tells the larger of the two kernels of the backward above head dim 128.
        less = name == "smem_bytes" and kernel.folder == "backward/dq_in_registers" and facts[name] < kernel.shape[name]
        if kernel.shape[name] != facts[name] and not less:
            found.append(f"{name}: the plan says {kernel.shape[name]}, the traits {facts[name]}")
    if facts["smem_bytes"] > facts["smem_limit"]:
        found.append(f"{facts['smem_bytes']} bytes of shared memory, and the chip has {facts['smem_limit']}")
    buffers = sorted(kernel.details().buffers, key=lambda buffer: buffer.offset)
    for buffer, after in itertools.pairwise(buffers):
        if buffer.offset + buffer.bytes > after.offset:
            found.append(f"{buffer.name} overlaps {after.name}")
    if buffers[-1].offset + buffers[-1].bytes > facts["smem_bytes"]:
        found.append(f"{buffers[-1].name} ends past the shared memory that is asked for")
    return found


CHECKS = {
    "bank conflicts": bank_conflicts,
    "coverage": coverage,
    "data flow": data_flow,
    "mask and schedule": mask_and_schedule,
    "shared memory": shared_memory,
}
