"""Pictures of layouts, partitions, schedules and budgets: each is data computed from the traits, and its drawing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from . import float8, tables
from .banks import LIKE, accesses, conflicts, element_addresses
from .drawing import COLOURS, GREY, Picture, cells, legend, matplotlib, new_figure, whole_numbers
from .kernels import Kernel, Problem
from .schedule import timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Picture", "bank_picture", "budget_picture", "gantt_picture", "mask_picture", "thread_value_picture"]

SEQUENTIAL = "cividis"
CHUNK = 16  # bytes
MOST_TILES = 20_000  # of a picture that somebody can read


# --- Banks --------------------------------------------------------------------------------------------------


TRANSPOSED = ("V.smem", "Kt.smem", "Qt.smem", "dS.smem")  # of what lies in memory row by row


def _prefix(kernel: Kernel) -> str:
    """Of a picture's name."""
    kind = "fp8_" if kernel.is_float8 else "" if kernel.is_forward else "bwd_"
    return f"{kernel.arch}_{kind}d{kernel.head_dim}"


def bank_picture(kernel: Kernel, operand: str = "K", access: str = "registers", rows: int = 16) -> Picture:
    """The first rows of a tile in shared memory, coloured by bank, with the lanes of one access, without and with the
    swizzle.

    Args:
        operand: "Q", "K", "V" or "O"; of a backward as `Details` names them.
        access: a word of the access's name (`banks.accesses`): "registers", "into", "shared" or "global".
    """
    if kernel.is_recorded:
        raise ValueError(f"{kernel} has no pictures of banks: it computes addresses, without layouts")
    details = kernel.details()
    found = [a for a in accesses(kernel) if a.name.split()[0] == operand and access in a.name]
    if not found:
        names = ", ".join(sorted({a.name for a in accesses(kernel)})) or "none here"
        raise ValueError(f"{kernel} has no access {operand!r} {access!r}; it has {names}")
    smem = "V.rows" if operand == "V" and "V.rows" in details.arrays else f"{operand}.smem"
    addresses = element_addresses(details, smem)
    if smem in TRANSPOSED and not kernel.is_float8:
        addresses = addresses.T
    bits, base, shift = details.swizzles[LIKE.get(smem, smem)]
    begin = details.buffer(operand).offset
    size = details.facts["element_bytes"]
    panels = []
    for swizzled in (False, True):
        chosen = found[0]
        lanes = chosen.addresses[0] - begin
        tile = addresses - begin
        if not swizzled:
            lanes, tile = (_unswizzle(part, bits, base, shift, size) for part in (lanes, tile))
        chunks = tile[:rows, :: CHUNK // size]
        chunks = chunks[:, : 128 // CHUNK if bits == 3 else 64 // CHUNK]
        labels = [[_lanes_in(lanes, int(begin)) for begin in row] for row in chunks]
        group = min(8, len(lanes)) if chosen.width == CHUNK else len(lanes)
        panels.append(
            {
                "title": "with the swizzle" if swizzled else "without",
                "bank": (chunks // CHUNK % 8).tolist(),
                "lanes": labels,
                "passes": int(conflicts(lanes[None, :group], chosen.width)[0]) + 1,
                "group": group,
            }
        )
    data = {"kernel": str(kernel), "access": found[0].name, "instruction": found[0].instruction, "panels": panels}
    word = found[0].instruction.split()[0].split(".")[0]
    name = f"{_prefix(kernel)}_banks_{operand.lower()}_{word}"
    return Picture(name, f"{data['access']}: {data['instruction']}", data, _draw_banks)


def _unswizzle(addresses: Any, bits: int, base: int, shift: int, size: int) -> Any:
    """A swizzle is its own inverse."""
    offsets = addresses // size
    return (offsets ^ ((offsets & (((1 << bits) - 1) << (base + shift))) >> shift)) * size + addresses % size


def _lanes_in(lanes: Any, begin: int) -> str:
    inside = np.flatnonzero((lanes >= begin) & (lanes < begin + CHUNK))
    if inside.size == 0:
        return ""
    return str(inside[0]) if inside.size == 1 else f"{inside[0]}-{inside[-1]}"


def _draw_banks(data: dict[str, Any]) -> Figure:
    rows = len(data["panels"][0]["bank"])
    figure, axes = new_figure(9, 0.2 * rows + 1.5, 1, 2)
    for ax, panel in zip(axes[0], data["panels"], strict=True):
        cells(ax, [[COLOURS[bank] for bank in row] for row in panel["bank"]], panel["lanes"], 7)
        passes = "1 pass" if panel["passes"] == 1 else f"{panel['passes']} passes"
        ax.set_title(f"{panel['title']}: {passes} for {panel['group']} lanes")
        ax.set_xlabel("16-byte piece of the row")
        ax.set_ylabel("row of the tile")
    handles = legend({f"{4 * i}-{4 * i + 3}": COLOURS[i] for i in range(8)})
    figure.legend(handles=handles, title="banks", loc="outside right center", fontsize=7)
    figure.suptitle(f"{data['access']}: one {data['instruction']}, its lanes by number ({data['kernel']})", fontsize=9)
    return figure


# --- Threads and values ---------------------------------------------------------------------------------------

TITLES = {
    "Q": "Q, first product's A",
    "K": "K, first product's B",
    "S": "S, first product's accumulator",
    "P": "P, second product's A",
    "V": "V, second product's B (head dim x key)",
    "O": "O, second product's accumulator",
    "Q.gmem": "Q, global to shared memory",
    "K.gmem": "K and V, global to shared memory",
    "O.gmem": "O, shared to global memory",
    "Q.ldsm": "Q, lanes' rows for ldmatrix",
    "K.ldsm": "K, lanes' rows for ldmatrix",
    "V.ldsm": "V, lanes' rows for ldmatrix",
}


AXES = {"Q": ("row", "head dim"), "K": ("key", "head dim"), "V": ("head dim", "key"), "S": ("row", "key")}
AXES |= {"P": AXES["S"], "O": AXES["Q"]}


def thread_value_picture(kernel: Kernel, partitions: Sequence[str] | None = None) -> Picture:
    """Which thread holds which element of a tile's corner, and as which of its values.

    Args:
        kernel: a forward.
        partitions: names in `Details.arrays` without ".coord", such as "S.mma" or "K.gmem"; default every MMA operand
            that registers hold. Of an MMA one instruction's tile is drawn (of a WGMMA its corner); of a copy, whose
            pieces are 16 bytes, 16 rows of 64 elements.
    """
    details = kernel.details()
    if partitions is None:
        threads = {name: details.arrays[name].shape[-1] for name in details.arrays if name.endswith(".mma.coord")}
        partitions = [f"{name}.mma" for name in "QKSPVO" if threads.get(f"{name}.mma.coord", 1) > 1]
    if not partitions or not kernel.is_forward:
        raise ValueError(f"{kernel} has no pictures of threads: they are drawn of forwards")
    m, n, k = (min(16, details.facts[f"mma.{axis}"]) for axis in "mnk")
    extents = {"Q": (m, k), "P": (m, k), "K": (n, k), "V": (n, k), "S": (m, n), "O": (m, n)}
    panels = []
    for name in partitions:
        piece = 1 if name.endswith(".mma") else 8
        height, width = extents[name[0]] if piece == 1 else (16, 64)
        coords = details.arrays[f"{name}.coord"]
        rows, columns = coords.reshape(2, -1, coords.shape[-1], order="F")[:, ::piece]
        held: dict[tuple[int, int], str] = {}
        for value, thread in zip(*np.nonzero((rows < height) & (columns < width)), strict=True):
            # B operands are held by every warp: the first is drawn.
            at = (int(rows[value, thread]), int(columns[value, thread]) // piece)
            held.setdefault(at, f"{thread}:{value}" if piece == 1 else str(thread))
        grid = [[held.get((row, column), "") for column in range(width // piece)] for row in range(height)]
        row_axis, column_axis = AXES["K" if name.endswith(".gmem") and name[0] == "V" else name[0]]
        if piece > 1:  # V's ldmatrix takes rows of keys
            column_axis = f"16-byte piece of the {column_axis}"
        title = TITLES.get(name) or TITLES[name.split(".")[0]]
        panel = {"name": name, "title": title, "axes": [row_axis, column_axis], "held": grid}
        if kernel.is_float8 and name[0] in "PV":
            panel["columns"] = float8.keys_of_positions(details)[:width].tolist()
        panels.append(panel)
    data = {"kernel": str(kernel), "panels": panels}
    suffix = "mma" if partitions[0].endswith(".mma") else "copy"
    return Picture(f"{_prefix(kernel)}_threads_{suffix}", "who holds what", data, _draw_threads)


def _draw_threads(data: dict[str, Any]) -> Figure:
    """Panels of wide cells one below the other, of narrow ones in pairs: the text of a cell is read without zooming."""
    panels = data["panels"]
    columns = 1 if ":" in panels[0]["held"][0][0] else min(2, len(panels))
    lines = [max(len(panel["held"]) for panel in panels[i : i + columns]) for i in range(0, len(panels), columns)]
    heights = [0.17 * line + 0.75 for line in lines]
    figure, axes = new_figure(9, sum(heights) + 0.4, len(lines), columns, height_ratios=heights)
    for ax in axes.flat[len(panels) :]:
        ax.axis("off")
    for ax, panel in zip(axes.flat, panels, strict=False):
        held = panel["held"]
        colours = [[COLOURS[int(cell.split(":")[0]) // 4 % 8] if cell else "white" for cell in row] for row in held]
        cells(ax, colours, held, 8)
        ax.set_title(panel["title"], fontsize=10)
        if "columns" in panel:
            ax.set_xticks(range(len(panel["columns"])), panel["columns"])
        ax.set_ylabel(panel["axes"][0])
        ax.set_xlabel(panel["axes"][1])
    what = "thread:value of each element" if columns == 1 else "the thread of each 16-byte piece"
    figure.suptitle(f"{what}; a colour is a quad of threads ({data['kernel']})", fontsize=10)
    return figure


# --- Mask and schedule ----------------------------------------------------------------------------------------


def mask_picture(kernel: Kernel, problem: Problem) -> Picture:
    """Which tiles of scores are visited whole, which with the mask, and which not at all, for one head."""
    problem = _drawable(kernel, problem, heads=1)
    tiles = kernel.schedule(problem)
    m_blocks = tiles["m_block"].tolist()
    columns = (tiles[name].tolist() for name in ("begin", "whole_begin", "whole_end", "end"))
    ranges = dict(zip(m_blocks, zip(*columns, strict=True), strict=True))
    key_tiles = -(-problem.len_k // kernel.block_n)
    grid = []
    for m_block in sorted(ranges):
        begin, whole_begin, whole_end, end = ranges[m_block]
        grid.append([(n >= begin) * (n < end) + (whole_begin <= n < whole_end) for n in range(key_tiles)])
    first, limit = problem.seen()
    data = {
        "kernel": str(kernel),
        "mask": problem.mask,
        "tiles": grid,
        "order": [m_blocks.index(m) for m in sorted(ranges)],
        "seen": [first.tolist(), limit.tolist()],
        "block": [kernel.block_m, kernel.block_n],
        "lengths": [problem.len_q, problem.len_k],
    }
    return Picture(f"{_prefix(kernel)}_mask_{problem.mask}", "the mask", data, _draw_mask)


def _drawable(kernel: Kernel, problem: Problem, heads: int | None = None) -> Problem:
    """The problem at the kernel's head dim, if its picture is one that can be drawn."""
    if not kernel.is_forward:
        raise ValueError(f"{kernel}: masks and schedules are drawn of forwards")
    if problem.len_k < 1:
        raise ValueError(f"len_k: expected at least 1, got {problem.len_k}")
    heads = heads or problem.batch * problem.heads_q
    row_tiles, key_tiles = -(-problem.len_q // kernel.block_m), -(-problem.len_k // kernel.block_n)
    if row_tiles * max(heads, key_tiles) > MOST_TILES:
        raise ValueError(f"lengths: expected at most {MOST_TILES} tiles in a picture, got {row_tiles} x {key_tiles}")
    problem = replace(problem, head_dim=kernel.head_dim)
    return replace(problem, batch=1, heads_q=1, heads_kv=1) if heads == 1 else problem


def _draw_mask(data: dict[str, Any]) -> Figure:
    rows = len(data["tiles"])
    figure, ((ax,),) = new_figure(8, 1.3 + min(12, max(1.5, 0.3 * rows)))
    names = {0: ("not visited", GREY), 1: ("with the mask", COLOURS[2]), 2: ("whole", COLOURS[0])}
    cells(ax, [[names[kind][1] for kind in row] for row in data["tiles"]], [])
    block_m, block_n = data["block"]
    row = np.arange(data["lengths"][0])
    for edge in data["seen"]:
        ax.plot(np.array(edge) / block_n - 0.5, row / block_m - 0.5, color="black", linewidth=1)
    step = -(-rows // 32)
    labels = [f"{m * block_m}.. (#{turn})" for m, turn in enumerate(data["order"])]
    ax.set_yticks(range(0, rows, step), labels[::step])
    ax.set_ylabel("query rows (# in launch order)")
    ax.set_xlabel(f"key tile of {block_n}; they are visited from right to left")
    figure.legend(handles=legend(dict(names.values())), loc="outside lower center", ncols=3, fontsize=8)
    len_q, len_k = data["lengths"]
    ax.set_title(f"{len_q} queries, {len_k} keys; a row sees what is between the lines ({data['kernel']})", fontsize=9)
    return figure


def gantt_picture(runs: Sequence[tuple[Kernel, Problem]], sms: int = 8) -> Picture:
    """Which slot of which multiprocessor works on which tile, and when: one panel per kernel and problem."""
    panels = []
    for kernel, problem in runs:
        line = timeline(kernel, _drawable(kernel, problem), sms)
        panels.append(
            {
                "kernel": str(kernel),
                "mask": problem.mask,
                "slots": line.slots,
                "length": line.length,
                "balance": round(line.balance, 4),
                "runs": [[run.slot, run.start, run.end, run.m_block, run.head] for run in line.runs],
                **({"ctas": kernel.ctas_per_tile} if kernel.ctas_per_tile > 1 else {}),
            }
        )
    kernel, problem = runs[-1]
    call = {name: getattr(problem, name) for name in ("batch", "heads_q", "len_q", "len_k")}
    data = {"problem": call, "sms": sms, "panels": panels}
    return Picture(f"{_prefix(kernel)}_schedule", "the schedule", data, _draw_gantt)


def _draw_gantt(data: dict[str, Any]) -> Figure:
    panels = data["panels"]
    heights = [0.9 + 0.16 * panel["slots"] for panel in panels]
    figure, axes = new_figure(9, 0.6 + sum(heights), len(panels), 1, height_ratios=heights)
    colors = matplotlib().colormaps[SEQUENTIAL]
    blocks = 1 + max(run[3] for panel in panels for run in panel["runs"])
    for ax, panel in zip(axes[:, 0], panels, strict=True):
        for slot, start, end, m_block, head in panel["runs"]:
            shade = m_block / max(1, blocks - 1)
            ax.barh(slot, end - start, left=start, height=0.9, color=colors(shade), edgecolor="white", lw=0.4)
            if end - start >= 0.015 * panel["length"]:  # else the number is wider than its bar
                dark = "black" if shade > 0.5 else "white"
                ax.text((start + end) / 2, slot, head, ha="center", va="center_baseline", fontsize=7, color=dark)
        ax.axvline(panel["length"] * panel["balance"], color="black", linewidth=1, linestyle="--")
        ax.set_ylim(panel["slots"] - 0.5, -0.5)
        whole_numbers(ax.yaxis)
        ax.set_xlim(0, max(1, panel["length"]))
        ax.set_ylabel("CTA slot" if panel.get("ctas", 1) == 1 else f"slot of {panel['ctas']} CTAs")
        share = f"{panel['balance']:.0%} of the slots' time is work"
        mask = "no mask" if panel["mask"] == "full" else f"{panel['mask']} mask"
        ax.set_title(f"{panel['kernel']}, {mask}: {share}", fontsize=9)
    axes[-1][0].set_xlabel("time, in key tiles; the dashed line is a perfect balance")
    bar = matplotlib().cm.ScalarMappable(matplotlib().colors.Normalize(0, blocks - 1), colors)
    colorbar = figure.colorbar(bar, ax=axes[:, 0].tolist(), label="row tile")
    whole_numbers(colorbar.ax.yaxis)
    p = data["problem"]
    figure.suptitle(
        f"batch {p['batch']}, {p['heads_q']} heads (numbers), {p['len_q']} queries, {p['len_k']} keys on {data['sms']}"
        " multiprocessors",
        fontsize=9,
    )
    return figure


# --- Budgets --------------------------------------------------------------------------------------------------


def budget_picture(kernels: Iterable[Kernel], capability: int | None) -> Picture:
    """Shared memory and registers of each kernel as stacked bars, against what there is.

    Args:
        capability: of the chip whose machine code's registers, by the compiler's report, are drawn; None: the bars
            end at what a thread may have.
    """
    chosen = tuple(kernels)
    if not chosen:
        raise ValueError("there is no kernel whose budget could be drawn")
    several = len({kernel.entry for kernel in chosen}) > 1
    bars = []
    for kernel in chosen:
        held = tables.registers_held(kernel)
        limit = kernel.facts.get("consumer_registers") or kernel.facts["register_limit"]
        compiled = tables.compiled_kernel(kernel, capability) if capability else None
        used = limit if kernel.arch == "sm90" or compiled is None else compiled["registers"]
        held["the rest"] = max(0, used - sum(held.values()))
        bars.append(
            {
                "label": f"{kernel.head_dim}" + (f"\n{kernel.entry}" if several and kernel.entry != "all" else ""),
                "smem": {buffer.name: buffer.bytes for buffer in kernel.details().buffers},
                "smem_limit": kernel.facts["smem_limit"],
                "ctas": kernel.shape["ctas_per_sm"],
                "registers": held,
                "register_limit": limit,
            }
        )
    direction = "fwd" if chosen[0].is_forward else "bwd"
    entry = "" if several else chosen[0].entry
    float8_or = "float8 " if chosen[0].is_float8 else ""
    title = f"{chosen[0].arch} {float8_or}{'forward' if direction == 'fwd' else 'backward'}"
    title += f", {entry}" if entry else ""
    large = "_large" if chosen[0].is_large else ""
    direction = "fp8" if chosen[0].is_float8 else direction
    name = f"{chosen[0].arch}_budget_{direction}{large}" + (f"_{entry}" if entry else "")
    return Picture(name, "budgets", {"title": title, "bars": bars}, _draw_budget)


def _draw_budget(data: dict[str, Any]) -> Figure:
    figure, axes = new_figure(9, 3.4, 1, 2)
    bars = data["bars"]
    labels = [bar["label"] for bar in bars]
    for ax, key, scale in ((axes[0][0], "smem", 1024), (axes[0][1], "registers", 1)):
        names = list(dict.fromkeys(name for bar in bars for name in bar[key]))
        bottom = np.zeros(len(bars))
        for i, name in enumerate(names):
            height = np.array([bar[key].get(name, 0) / scale for bar in bars])
            colour = GREY if name == "the rest" else COLOURS[i % len(COLOURS)]
            ax.bar(labels, height, bottom=bottom, label=name, color=colour, edgecolor="white")
            bottom += height
        limits = [(bar["smem_limit"] if key == "smem" else bar["register_limit"]) / scale for bar in bars]
        for x, limit in enumerate(limits):
            ax.plot([x - 0.4, x + 0.4], [limit, limit], color="black", linewidth=1.2)
        if key == "smem":
            for x, bar in enumerate(bars):
                ax.text(x, bottom[x] + 2, f"x {bar['ctas']}", ha="center", fontsize=7)
        ax.set_xlabel("head dim")
        ax.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    axes[0][0].set_title("shared memory, KB per CTA (x CTAs per SM); line: the most a CTA may have", fontsize=8)
    axes[0][1].set_title("registers per thread; line: the most it may have", fontsize=8)
    figure.suptitle(data["title"], fontsize=9)
    return figure
