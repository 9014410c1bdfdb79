"""The picture of a packed batch's schedule: which CTA draws which row tile of which sequence, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .drawing import Picture, legend, matplotlib, new_figure, whole_numbers
from .kernels import Kernel, PackedProblem

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["packed_picture"]

SEQUENTIAL = "cividis"
MOST_TILES = 20_000  # of a picture that somebody can read


def packed_picture(kernel: Kernel, problem: PackedProblem, sms: int = 8) -> Picture:
    """Above, the tiles in the order of their tickets, with their key tiles; below, which CTA computes them, and when.

    The tiles are drawn here whatever their number; where they are few per multiprocessor, the plan has them dealt,
    without tickets (docs/sm90_forward.md).

    Args:
        kernel: a forward of sm90 whose tile packed batches have.
        problem: the lengths and heads.
        sms: multiprocessors.

    Raises:
        ValueError: no kernel of packed batches has that tile, or there are too many tiles to be drawn.
    """
    if not kernel.has_packed:
        raise ValueError(f"{kernel}: packed batches are drawn of sm90's forward, and of the tiles that they have")
    tiles = problem.heads_q * sum(-(-length // kernel.block_m) for length in problem.lengths)
    if tiles > MOST_TILES:
        raise ValueError(f"lengths: expected at most {MOST_TILES} tiles in a picture, got {tiles}")
    columns = {name: column.tolist() for name, column in kernel.packed_schedule(problem, sms).items()}
    work = sum(finish - start for start, finish in zip(columns["start"], columns["finish"], strict=True))
    length = max(columns["finish"], default=0)
    rows = max(1, sms // kernel.ctas_per_tile)
    data = {
        "kernel": str(kernel),
        "lengths": list(problem.lengths),
        "heads": problem.heads_q,
        "sms": rows,
        "length": length,
        "balance": round(work / (rows * length), 4) if length else 1.0,
        **{name: columns[name] for name in ("ticket", "sequence", "m_block", "begin", "end", "cta", "start", "finish")},
    }
    kind = "fp8_" if kernel.is_float8 else ""
    return Picture(f"{kernel.arch}_{kind}d{kernel.head_dim}_packed", "the schedule of a packed batch", data, _draw)


def _draw(data: dict[str, Any]) -> Figure:
    heights = (2.2, 0.9 + 0.2 * data["sms"])
    figure, axes = new_figure(9, sum(heights) + 0.6, 2, 1, height_ratios=heights)
    order, ctas = axes[:, 0]
    colours = _colours(data["lengths"])
    tiles = list(
        zip(*(data[name] for name in ("ticket", "sequence", "begin", "end", "cta", "start", "finish")), strict=True)
    )
    order.bar(
        [ticket for ticket, *_ in tiles],
        [end - begin for _, _, begin, end, *_ in tiles],
        width=1.0,
        color=[colours[sequence] for _, sequence, *_ in tiles],
    )
    order.set_xlim(-0.5, max(data["ticket"], default=0) + 0.5)
    order.set_xlabel("ticket: the row tiles of all sequences and heads in the order in which they are drawn")
    order.set_ylabel("key tiles")
    for _, sequence, _, _, cta, start, finish in tiles:
        ctas.barh(cta, finish - start, left=start, height=0.9, color=colours[sequence], edgecolor="white", lw=0.4)
    ctas.axvline(data["length"] * data["balance"], color="black", linewidth=1, linestyle="--")
    ctas.set_ylim(data["sms"] - 0.5, -0.5)
    whole_numbers(ctas.yaxis)
    ctas.set_xlim(0, max(1, data["length"]))
    ctas.set_ylabel("CTA")
    ctas.set_xlabel("time, in key tiles; the dashed line is a perfect balance")
    share = f"{data['balance']:.0%} of the CTAs' time is work"
    order.set_title(f"{data['kernel']}, {len(data['lengths'])} sequences, {data['heads']} heads: {share}", fontsize=9)
    by_length = sorted(set(zip(data["lengths"], colours, strict=True)), reverse=True)
    named = {f"{length}": colour for length, colour in by_length}
    figure.legend(handles=legend(named), title="sequence of", loc="outside right center", fontsize=7)
    return figure


def _colours(lengths: list[int]) -> list[Any]:
    """Of each sequence: by its rank among the lengths, so that equal ones look alike and the longest is the darkest."""
    ranks = sorted(set(lengths), reverse=True)
    scale = matplotlib().colormaps[SEQUENTIAL]
    return [matplotlib().colors.to_hex(scale(ranks.index(length) / max(1, len(ranks) - 1))) for length in lengths]
