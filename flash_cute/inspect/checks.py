"""What must hold of every kernel's layouts. Each check returns sentences that say what is wrong; none is good."""

from __future__ import annotations

import itertools

import numpy as np

from .banks import DESCRIPTOR_SWIZZLES, accesses, conflicts, descriptor_addresses, place_addresses
from .kernels import Details, IntArray, Kernel, Problem

__all__ = ["CHECKS", "bank_conflicts", "coverage", "data_flow", "mask_and_schedule", "shared_memory"]


def bank_conflicts(kernel: Kernel) -> list[str]:
    """No access to shared memory takes more passes than its bytes need."""
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
    """Each element of each tile is moved once by its copy, and is held once by its MMA."""
    details = kernel.details()
    block_n, head_dim = kernel.block_n, kernel.head_dim
    rows = kernel.block_m if kernel.arch == "sm80" else kernel.facts["warpgroup_rows"]
    shapes = {
        "Q": (rows, head_dim),
        "K": (block_n, head_dim),
        "V": (head_dim, block_n),
        "S": (rows, block_n),
        "P": (rows, block_n),
        "O": (rows, head_dim),
    }
    threads = kernel.facts["threads"] if kernel.arch == "sm80" else 128  # of a warpgroup
    found = []
    for name, array in details.arrays.items():
        operand, _, kind = name.partition(".")
        if kind.endswith(".coord"):
            if array.shape[-1] not in (threads, 1):
                found.append(f"{name}: for {array.shape[-1]} threads, and there are {threads}")
            # The B operands, K and V, are for every warp; the rest is shared out among all threads.
            each_warp = kernel.arch == "sm80" and operand in "KV" and not kind.startswith("gmem")
            found += _covered_once(name, array, shapes[operand], 32 if each_warp else array.shape[-1])
        elif kind.endswith(".register"):
            registers = np.sort(array.ravel())
            if not (registers == np.arange(array.size)).all():
                found.append(f"{name}: registers are not 0 to {array.size - 1}, each once")
        elif kind in ("smem", "rows"):
            found += _distinct_places(details, name)
    return found


def _covered_once(name: str, array: IntArray, shape: tuple[int, int], threads: int) -> list[str]:
    count = np.zeros((array.shape[-1] // threads, *shape), np.int32)
    rows, columns = array.reshape(2, -1, array.shape[-1])
    if (array < 0).any() or rows.max() >= shape[0] or columns.max() >= shape[1]:
        return [f"{name}: reaches outside its tile of {shape[0]} x {shape[1]}"]
    group = np.broadcast_to(np.arange(array.shape[-1]) // threads, rows.shape)
    np.add.at(count, (group, rows, columns), 1)
    if (count == 1).all():
        return []
    missed, twice = int((count == 0).sum()), int((count > 1).sum())
    return [f"{name}: {missed} elements of {count.size} are missed and {twice} covered more than once"]


def _distinct_places(details: Details, name: str) -> list[str]:
    places = details.arrays[name]
    size = details.buffer(name[0]).bytes // details.facts["element_bytes"]
    distinct = np.unique(places).size
    if distinct != places.size or places.min() < 0 or places.max() >= size:
        return [f"{name}: {places.size} elements have {distinct} places, {places.min()} to {places.max()} of {size}"]
    return []


# --- Data flow --------------------------------------------------------------------------------------------


def data_flow(kernel: Kernel) -> list[str]:
    """What each instruction brings is what the next expects, element by element.

    ldmatrix is played as the PTX manual describes it; so are a TMA box's swizzle and a WGMMA descriptor's. S's
    registers, read as P, must be P's elements; on sm80, where O goes through shared memory, O's must reach O's places.
    """
    details = kernel.details()
    found = _p_is_s(details)
    if kernel.arch == "sm80":
        for name in "QKV":
            found += _ldmatrix_feeds_mma(details, name)
        found += _same_memory(details)
        found += _stored_where_it_belongs(details, "O.sts")
    else:
        for name in "QKV":
            found += _box_is_layout(details, name)
            found += _descriptor_feeds_mma(details, name)
    return found


def _wanted(details: Details, name: str) -> IntArray:
    """(2, register, thread): which element the MMA takes each register for."""
    coords = details.arrays[f"{name}.mma.coord"]
    coords = coords.reshape(2, -1, coords.shape[-1], order="F")
    registers = details.arrays[f"{name}.mma.register"].ravel(order="F")
    wanted = np.empty_like(coords)
    wanted[:, registers] = coords
    return wanted


def _p_is_s(details: Details) -> list[str]:
    if (_wanted(details, "P") == _wanted(details, "S")).all():
        return []
    return ["P: a thread's scores are not the elements that the second product takes its registers for"]


def _matrix_lanes(count: int, transposed: int) -> tuple[IntArray, IntArray]:
    """For each lane and each of its 2 * `count` values: the lane whose row it is in, and the place there."""
    lane, value = np.meshgrid(np.arange(32), np.arange(2 * count), indexing="ij")
    outer, inner = lane // 4, 2 * (lane % 4) + value % 2
    row, column = (inner, outer) if transposed else (outer, inner)
    return value // 2 * 8 + row, column


def _ldmatrix_feeds_mma(details: Details, name: str) -> list[str]:
    matrices, transposed = details.facts[f"{name}.ldsm.matrices"], details.facts[f"{name}.ldsm.transposed"]
    addresses = place_addresses(details, f"{name}.smem")
    element_at = {int(address): index for index, address in enumerate(addresses.ravel())}
    coords = details.arrays[f"{name}.ldsm.coord"]
    rows, columns = coords[:, 0].reshape(2, -1, coords.shape[-1], order="F")
    begin = addresses[rows, columns]  # (instruction, thread)
    begin = begin.reshape(begin.shape[0], -1, 32)
    from_lane, place = _matrix_lanes(matrices, transposed)
    read = begin[:, :, from_lane] + 2 * place  # (instruction, warp, lane, value)
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


def _same_memory(details: Details) -> list[str]:
    if (details.arrays["V.rows"].swapaxes(0, 1) == details.arrays["V.smem"]).all():
        return []
    return ["V: read by the MMA at other places than it is loaded to"]


def _stored_where_it_belongs(details: Details, name: str) -> list[str]:
    coords = details.arrays[f"{name}.coord"]
    coords = coords.reshape(2, -1, coords.shape[-1], order="F")
    stored = np.empty_like(coords)
    stored[:, details.arrays[f"{name}.register"].ravel(order="F")] = coords
    return [] if (stored == _wanted(details, "O")).all() else [f"{name}: stores a register at another element's place"]


def _box_is_layout(details: Details, name: str) -> list[str]:
    """A TMA box is `box.columns` columns of all rows; within 1024 bytes it permutes 16-byte pieces by the row."""
    columns = details.facts["box.columns"]
    places = details.arrays[f"{name}.smem"]
    if name == "V":
        places = places.swapaxes(0, 1)
    rows, head_dim = places.shape[:2]
    row, column = np.arange(rows)[:, None], np.arange(head_dim)[None, :]
    linear = 2 * (column // columns * rows * columns + row * columns + column % columns)
    bits = {128: 3, 64: 2, 32: 1}[2 * columns]
    stage_bytes = 2 * rows * head_dim
    for stage in range(places.shape[2] if places.ndim == 3 else 1):
        at = linear + stage * stage_bytes
        at = at ^ (((at >> 7) & ((1 << bits) - 1)) << 4)
        here = places[:, :, stage] if places.ndim == 3 else places
        if (2 * here != at).any():
            return [f"{name}: a TMA box of {columns} columns does not put elements where the layout has them"]
    return []


def _descriptor_feeds_mma(details: Details, name: str) -> list[str]:
    if details.facts[f"{name}.descriptor.swizzle"] not in DESCRIPTOR_SWIZZLES:
        return [f"{name}: its descriptor has no swizzle"]
    coords = details.arrays[f"{name}.mma.coord"]
    if coords.shape[2] != 1:
        return [f"{name}: {coords.shape[2]} atoms where the check knows one"]
    coords = coords[:, :, 0, :, 0]  # (2, value, step)
    places = details.arrays[f"{name}.smem"]
    for stage in range(places.shape[2] if places.ndim == 3 else 1):
        addresses = place_addresses(details, f"{name}.smem", stage)
        led_to = descriptor_addresses(details, name, stage)
        for step in range(coords.shape[2]):
            row, column = coords[:, :, step]
            local_row, local_column = coords[:, :, 0]
            if (led_to[step, local_row, local_column] != addresses[row, column]).any():
                return [f"{name}: the descriptor of step {step} leads to other elements than the layout has there"]
    return []


# --- Mask, schedule, memory -------------------------------------------------------------------------------

# Lengths about the tiles' edges; heads that do and do not share keys.
PROBLEMS = tuple(
    Problem(batch, heads_q, heads_kv, len_q, len_k, 0, causal)
    for batch, heads_q, heads_kv, len_q, len_k in (
        (2, 4, 2, 300, 300),
        (1, 3, 1, 65, 700),
        (1, 2, 2, 513, 190),
        (3, 2, 1, 1, 1),
        (1, 2, 2, 129, 0),
    )
    for causal in ("top_left", "bottom_right")
)
# On these the mask's own code runs, for every thread, on the tiles at both ends.
MASKED = PROBLEMS[:4]
# Batch, heads and lengths of which some heads at a time have a part of L2: the schedule has groups of them, the last
# one larger for every head dim.
GROUPED = (17, 12, 4, 1024, 1024)
# A few tiles of many keys, which several CTAs share, and whole waves with some such tiles.
SPLIT = tuple(
    Problem(1, 3, 1, len_q, len_k, 0, causal)
    for len_q, len_k, causal in ((200, 5000, "bottom_right"), (1000, 4000, "top_left"), (64, 20000, "top_left"))
)


def mask_and_schedule(kernel: Kernel) -> list[str]:
    """Every tile of rows is worked on once; its key range holds every score that is seen, and the part that goes
    unmasked holds no other; where the mask is applied, it hides exactly what is not seen."""
    found: list[str] = []
    for problem in PROBLEMS:
        if kernel.mask == "full" and problem.causal == "bottom_right":
            continue  # the same as top_left
        found += _schedules(kernel, problem) + _mask(kernel, problem, problem in MASKED)
    for problem in (Problem(*GROUPED, kernel.head_dim, "top_left"), *SPLIT):
        found += _schedules(kernel, problem)
    return sorted(set(found))


def _schedules(kernel: Kernel, problem: Problem) -> list[str]:
    grids = (1, 7, 132) if kernel.arch == "sm90" else (0,)
    return [finding for ctas in grids for finding in _schedule(kernel, problem, ctas)]


def _schedule(kernel: Kernel, problem: Problem, ctas: int) -> list[str]:
    tiles = kernel.schedule(problem, ctas)
    m_blocks = -(-problem.len_q // kernel.block_m)
    wanted = {
        (m, head, batch) for m in range(m_blocks) for head in range(problem.heads_q) for batch in range(problem.batch)
    }
    got = list(zip(*(tiles[name].tolist() for name in ("m_block", "head", "batch")), strict=True))
    if "parts" in tiles:
        wrong = _wrong_parts(got, tiles)
        if wrong:
            return [f"schedule of {problem} over {ctas} CTAs: {wrong} tiles are not put together from all their keys"]
        got = [tile for tile, parts in zip(got, tiles["parts"].tolist(), strict=True) if parts >= 0]
    if len(got) != len(set(got)):
        return [f"schedule of {problem} over {ctas} CTAs: {len(got) - len(set(got))} tiles come more than once"]
    if set(got) != wanted:
        return [f"schedule of {problem} over {ctas} CTAs: {len(wanted - set(got))} tiles are missing"]
    return []


def _wrong_parts(places: list[tuple[int, int, int]], tiles: dict[str, IntArray]) -> int:
    """How many tiles are not what they should be: begun by one CTA; their key tiles each in one visit; the parts that
    the CTA takes in those of the CTAs before it in launch order, which have nothing else to do first."""
    names = ("key_begin", "key_end", "parts", "cta", "round", "end")
    visits: dict[tuple[int, int, int], list[list[int]]] = {}
    for place, *visit in zip(places, *(tiles[name].tolist() for name in names), strict=True):
        visits.setdefault(place, []).append(visit)
    wrong = 0
    for (begin, end, parts, cta, _, last), *others in map(sorted, visits.values()):
        good = begin == 0 and parts == len(others)
        for number, (other_begin, other_end, other_parts, other_cta, turn, _) in enumerate(others, start=1):
            good &= other_parts == -1 and other_cta == cta - number and turn == 0
            good &= other_begin == end or other_begin == other_end  # a part of keys that its rows do not see is empty
            end = max(end, other_end) if other_end > other_begin else end
        wrong += not (good and end == last)
    return wrong


def _mask(kernel: Kernel, problem: Problem, applied: bool) -> list[str]:
    found = []
    block_m, block_n = kernel.block_m, kernel.block_n
    limits = np.clip(kernel.column_limits(problem), 0, None)
    expected = np.full(problem.len_q, problem.len_k)
    if kernel.mask == "causal":
        diagonal = problem.as_dict()["diagonal"]
        expected = np.clip(np.arange(problem.len_q) + diagonal + 1, 0, problem.len_k)
    if (limits != expected).any():
        found.append(f"mask of {problem}: rows do not see what the mask is defined to show them")
    tiles = kernel.schedule(problem, 1)
    ranges = {
        int(m): (int(unmasked), int(end))
        for m, unmasked, end in zip(tiles["m_block"], tiles["unmasked"], tiles["end"], strict=True)
        if 0 <= m * block_m < problem.len_q
    }
    for m_block, (unmasked, end) in ranges.items():
        seen = limits[m_block * block_m : (m_block + 1) * block_m]
        if seen.max() > end * block_n:
            found.append(f"key range of {problem}, row tile {m_block}: scores past its end are seen")
        if end > 0 and seen.max() <= (end - 1) * block_n:
            found.append(f"key range of {problem}, row tile {m_block}: its last tile is seen by no row")
        if seen.min() < unmasked * block_n:
            found.append(f"key range of {problem}, row tile {m_block}: a tile that needs the mask goes without")
    for m_block in {min(ranges), max(ranges)} if ranges and applied else ():
        unmasked, end = ranges[m_block]
        for n_block in {unmasked, end - 1} & set(range(end)):
            held, hidden = kernel.masked(problem, m_block, n_block)
            seen = limits[m_block * block_m : (m_block + 1) * block_m]
            column = n_block * block_n + np.arange(block_n)
            if (held != 1).any():
                found.append(f"mask of {problem}: a score is held by no thread or by several")
            if (hidden[: seen.size] != (column >= seen[:, None])).any():
                found.append(f"mask of {problem}, tile ({m_block}, {n_block}): hides other scores than it should")
    return found


def shared_memory(kernel: Kernel) -> list[str]:
    """The plan is what the kernel lays out, its parts do not overlap, and it fits the chip."""
    facts = kernel.facts
    found = []
    for name in ("block_m", "block_n", "threads", "stages", "smem_bytes"):
        if kernel.shape[name] != facts[name]:
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
