"""Pictures of layouts, partitions, schedules and budgets: each is data computed from the traits, and its drawing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import tables
from .banks import accesses, conflicts, place_addresses
from .build import InspectError
from .kernels import Kernel, Problem
from .schedule import timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Picture", "bank_picture", "budget_picture", "gantt_picture", "mask_picture", "thread_value_picture"]

# Paul Tol's "light": told apart by the colour-blind, and black text stands out on each.
COLOURS = ("#77AADD", "#EE8866", "#EEDD88", "#FFAABB", "#99DDFF", "#44BB99", "#BBCC33", "#AAAA00")
GREY = "#DDDDDD"
SEQUENTIAL = "cividis"
CHUNK = 16  # bytes


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
        matplotlib = _matplotlib()
        folder.mkdir(parents=True, exist_ok=True)
        saved = []
        with matplotlib.rc_context({"svg.hashsalt": self.name, "svg.fonttype": "none", "font.size": 9}):
            figure = self.draw(self.data)
            for suffix in formats:
                path = folder / f"{self.name}.{suffix}"
                metadata = {"Date": None} if suffix == "svg" else {}
                figure.savefig(path, dpi=120, metadata=metadata, bbox_inches="tight")
                saved.append(path)
        return saved


def _matplotlib() -> Any:
    try:
        import matplotlib
        import matplotlib.figure
    except ImportError:
        raise InspectError("pictures need matplotlib: pip install 'flash_cute[inspect]'.") from None
    return matplotlib


def _figure(width: float, height: float, rows: int = 1, columns: int = 1, **kwargs: Any) -> tuple[Figure, Any]:
    figure = _matplotlib().figure.Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **kwargs)


def _cells(ax: Axes, colours: Sequence[Sequence[str]], texts: Sequence[Sequence[str]], size: float = 6.5) -> None:
    """A grid of coloured cells with text, the first row on top."""
    colors = _matplotlib().colors
    image = np.array([[colors.to_rgb(colour) for colour in row] for row in colours])
    ax.imshow(image, interpolation="nearest", aspect="auto")
    rows, columns = image.shape[:2]
    ax.set_xticks(np.arange(-0.5, columns), minor=True)
    ax.set_yticks(np.arange(-0.5, rows), minor=True)
    ax.grid(which="minor", color="white", linewidth=0.8)
    ax.tick_params(which="minor", length=0)
    for row, line in enumerate(texts):
        for column, text in enumerate(line):
            if text:
                ax.text(column, row, text, ha="center", va="center", fontsize=size)


# --- Banks --------------------------------------------------------------------------------------------------


def bank_picture(kernel: Kernel, operand: str = "K", access: str = "registers", rows: int = 16) -> Picture:
    """The first rows of a tile in shared memory, coloured by bank, with the lanes of one access, without and with the
    swizzle.

    Args:
        operand: "Q", "K", "V" or "O".
        access: a word of the access's name (`banks.accesses`): "registers", "into", "shared" or "global".
    """
    details = kernel.details()
    found = [a for a in accesses(kernel) if a.name.startswith(operand) and access in a.name]
    if not found:
        names = ", ".join(sorted({a.name for a in accesses(kernel)}))
        raise ValueError(f"{kernel} has no access {operand!r} {access!r}; it has {names}")
    smem = "V.rows" if operand == "V" and "V.rows" in details.arrays else f"{operand}.smem"
    addresses = place_addresses(details, smem)
    if smem == "V.smem":
        addresses = addresses.T
    bits, base, shift = details.swizzles["Q.smem" if operand == "O" else smem]
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
        labels = [[_lanes_in(lanes, int(place)) for place in row] for row in chunks]
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
    name = f"{kernel.arch}_d{kernel.head_dim}_banks_{operand.lower()}_{word}"
    return Picture(name, f"{data['access']}: {data['instruction']}", data, _draw_banks)


def _unswizzle(addresses: Any, bits: int, base: int, shift: int, size: int) -> Any:
    """A swizzle is its own inverse."""
    places = addresses // size
    return (places ^ ((places & (((1 << bits) - 1) << (base + shift))) >> shift)) * size + addresses % size


def _lanes_in(lanes: Any, place: int) -> str:
    inside = np.flatnonzero((lanes >= place) & (lanes < place + CHUNK))
    if inside.size == 0:
        return ""
    return str(inside[0]) if inside.size == 1 else f"{inside[0]}-{inside[-1]}"


def _draw_banks(data: dict[str, Any]) -> Figure:
    rows = len(data["panels"][0]["bank"])
    figure, axes = _figure(9, 0.2 * rows + 1.5, 1, 2)
    for ax, panel in zip(axes[0], data["panels"], strict=True):
        _cells(ax, [[COLOURS[bank] for bank in row] for row in panel["bank"]], panel["lanes"], 7)
        passes = "1 pass" if panel["passes"] == 1 else f"{panel['passes']} passes"
        ax.set_title(f"{panel['title']}: {passes} for {panel['group']} lanes")
        ax.set_xlabel("16-byte piece of the row")
        ax.set_ylabel("row of the tile")
    handles = [_matplotlib().patches.Patch(color=COLOURS[i], label=f"{4 * i}-{4 * i + 3}") for i in range(8)]
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


def thread_value_picture(kernel: Kernel, partitions: Sequence[str] | None = None) -> Picture:
    """Which thread holds which element of a tile's corner, and as which of its values.

    Args:
        partitions: names in `Details.arrays` without ".coord", such as "S.mma" or "K.gmem"; default every MMA operand
            that registers hold. Of an MMA one instruction's tile is drawn (of a WGMMA its corner); of a copy, whose
            pieces are 16 bytes, 16 rows of 64 elements.
    """
    details = kernel.details()
    if partitions is None:
        threads = {name: details.arrays[name].shape[-1] for name in details.arrays if name.endswith(".mma.coord")}
        partitions = [f"{name}.mma" for name in "QKSPVO" if threads[f"{name}.mma.coord"] > 1]
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
        panels.append({"name": name, "title": TITLES.get(name) or TITLES[name.split(".")[0]], "held": grid})
    data = {"kernel": str(kernel), "panels": panels}
    suffix = "mma" if partitions[0].endswith(".mma") else "copy"
    return Picture(f"{kernel.arch}_d{kernel.head_dim}_threads_{suffix}", "who holds what", data, _draw_threads)


def _draw_threads(data: dict[str, Any]) -> Figure:
    panels = data["panels"]
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = _figure(4 * columns, 3.4 * rows, rows, columns)
    for ax in axes.flat[len(panels) :]:
        ax.axis("off")
    for ax, panel in zip(axes.flat, panels, strict=False):
        held = panel["held"]
        colours = [[COLOURS[int(cell.split(":")[0]) // 4 % 8] if cell else "white" for cell in row] for row in held]
        _cells(ax, colours, held, 5 if ":" in held[0][0] else 7)
        ax.set_title(panel["title"], fontsize=9)
    what = "thread:value of each element" if ":" in panels[0]["held"][0][0] else "the thread of each 16-byte piece"
    figure.suptitle(f"{what}; a colour is a quad of threads ({data['kernel']})", fontsize=9)
    return figure


# --- Mask and schedule ----------------------------------------------------------------------------------------


def mask_picture(kernel: Kernel, len_q: int = 768, len_k: int = 1024, causal: str = "bottom_right") -> Picture:
    """Which tiles of scores are visited whole, which with the mask, and which not at all."""
    problem = Problem(1, 1, 1, len_q, len_k, kernel.head_dim, causal if kernel.mask == "causal" else "none")
    tiles = kernel.schedule(problem, 1)
    order = {int(m): i for i, m in enumerate(tiles["m_block"])}
    ranges = {
        int(m): (int(unmasked), int(end))
        for m, unmasked, end in zip(tiles["m_block"], tiles["unmasked"], tiles["end"], strict=True)
    }
    grid = []
    for m_block in sorted(ranges):
        unmasked, end = ranges[m_block]
        grid.append([2 if n < unmasked else 1 if n < end else 0 for n in range(-(-len_k // kernel.block_n))])
    data = {
        "kernel": str(kernel),
        "tiles": grid,
        "order": [order[m] for m in sorted(ranges)],
        "limits": np.clip(kernel.column_limits(problem), 0, None).tolist(),
        "block": [kernel.block_m, kernel.block_n],
        "lengths": [len_q, len_k],
    }
    return Picture(f"{kernel.arch}_d{kernel.head_dim}_mask_{kernel.mask}", "the mask", data, _draw_mask)


def _draw_mask(data: dict[str, Any]) -> Figure:
    figure, axes = _figure(7, 4)
    ax = axes[0][0]
    names = {0: ("not visited", GREY), 1: ("with the mask", COLOURS[2]), 2: ("whole", COLOURS[0])}
    _cells(ax, [[names[kind][1] for kind in row] for row in data["tiles"]], [])
    block_m, block_n = data["block"]
    rows = np.arange(data["lengths"][0])
    ax.plot(np.array(data["limits"]) / block_n - 0.5, rows / block_m - 0.5, color="black", linewidth=1)
    ax.set_yticks(range(len(data["tiles"])), [f"rows {m * block_m}.., turn {t}" for m, t in enumerate(data["order"])])
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.set_xlabel(f"key tile of {block_n}; they are visited from right to left")
    handles = [_matplotlib().patches.Patch(color=colour, label=name) for name, colour in names.values()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8)
    ax.set_title(
        f"{data['lengths'][0]} queries, {data['lengths'][1]} keys; the line is what a row sees ({data['kernel']})"
    )
    return figure


def gantt_picture(kernels: Sequence[Kernel], problem: Problem, sms: int = 8) -> Picture:
    """Which slot of which multiprocessor works on which tile, and when: one panel a kernel."""
    panels = []
    for kernel in kernels:
        causal = problem.causal if kernel.mask == "causal" else "none"
        asked = Problem(**{**problem.__dict__, "causal": causal, "head_dim": kernel.head_dim})
        line = timeline(kernel, asked, sms)
        panels.append(
            {
                "kernel": str(kernel),
                "slots": line.slots,
                "length": line.length,
                "balance": round(line.balance, 4),
                "runs": [[run.slot, run.start, run.end, run.m_block, run.head] for run in line.runs],
            }
        )
    data = {"problem": problem.__dict__, "sms": sms, "panels": panels}
    first = kernels[0]
    return Picture(f"{first.arch}_d{first.head_dim}_schedule", "the schedule", data, _draw_gantt)


def _draw_gantt(data: dict[str, Any]) -> Figure:
    panels = data["panels"]
    figure, axes = _figure(9, 0.6 + sum(1.0 + 0.11 * p["slots"] for p in panels), len(panels), 1)
    colors = _matplotlib().colormaps[SEQUENTIAL]
    for ax, panel in zip(axes[:, 0], panels, strict=True):
        blocks = 1 + max(run[3] for run in panel["runs"])
        for slot, start, end, m_block, _ in panel["runs"]:
            ax.barh(
                slot, end - start, left=start, color=colors(m_block / max(1, blocks - 1)), edgecolor="white", lw=0.4
            )
        ax.axvline(panel["length"] * panel["balance"], color="black", linewidth=1, linestyle="--")
        ax.set_ylim(panel["slots"] - 0.5, -0.5)
        ax.yaxis.get_major_locator().set_params(integer=True)
        ax.set_xlim(0, panel["length"])
        ax.set_ylabel("CTA slot")
        ax.set_title(f"{panel['kernel']}: {panel['balance']:.0%} of the slots' time is work", fontsize=9)
    axes[-1][0].set_xlabel("time, in key tiles; the dashed line is a perfect balance")
    bar = _matplotlib().cm.ScalarMappable(_matplotlib().colors.Normalize(0, blocks - 1), colors)
    figure.colorbar(bar, ax=axes[:, 0].tolist(), label="row tile")
    p = data["problem"]
    figure.suptitle(
        f"batch {p['batch']}, {p['heads_q']} heads, {p['len_q']} queries, {p['len_k']} keys on {data['sms']}"
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
    bars = []
    for kernel in kernels:
        held = tables.registers_held(kernel)
        limit = kernel.facts.get("consumer_registers") or kernel.facts["register_limit"]
        compiled = tables.compiled_kernel(kernel, capability) if capability else None
        used = limit if kernel.arch == "sm90" or compiled is None else compiled["registers"]
        held["the rest"] = max(0, used - sum(held.values()))
        bars.append(
            {
                "label": f"{kernel.head_dim}",
                "smem": {buffer.name: buffer.bytes for buffer in kernel.details().buffers},
                "smem_limit": kernel.facts["smem_limit"],
                "ctas": kernel.shape["ctas_per_sm"],
                "registers": held,
                "register_limit": limit,
            }
        )
    arch, config = kernel.arch, kernel.config
    data = {"arch": arch, "config": config, "mask": kernel.mask, "bars": bars}
    return Picture(f"{arch}_budget_{config.lower()}_{kernel.mask}", "budgets", data, _draw_budget)


def _draw_budget(data: dict[str, Any]) -> Figure:
    figure, axes = _figure(9, 3.4, 1, 2)
    bars = data["bars"]
    labels = [bar["label"] for bar in bars]
    for ax, key, scale in ((axes[0][0], "smem", 1024), (axes[0][1], "registers", 1)):
        names = list(dict.fromkeys(name for bar in bars for name in bar[key]))
        bottom = np.zeros(len(bars))
        for i, name in enumerate(names):
            height = np.array([bar[key].get(name, 0) / scale for bar in bars])
            colour = GREY if name == "the rest" else COLOURS[i]
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
    axes[0][0].set_title("shared memory, KB a CTA (x CTAs an SM); line: the most a CTA may have", fontsize=8)
    axes[0][1].set_title("registers a thread; line: the most it may have", fontsize=8)
    figure.suptitle(f"{data['arch']}, {data['config']}, {data['mask']} mask", fontsize=9)
    return figure
