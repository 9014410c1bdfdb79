"""The schedule of attention over caches: which CTA computes which pieces of which sequence, when, and what is merged.

The plan is the library's, and a warp of every CTA runs the kernels' own search for its work on the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import build
from .drawing import COLOURS, GREY, Picture, legend, matplotlib, new_figure, whole_numbers
from .kernels import NO_LIMIT, Problem

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "CacheKernel",
    "CacheProblem",
    "Merge",
    "Piece",
    "Schedule",
    "cache_kernel",
    "cache_kernels",
    "cache_picture",
]

CAPABILITY = {"sm80": 80, "sm90": 90}  # of the plan
MOST_PIECES = 20_000  # of a picture that somebody can read
NOT_DRAWN = ("decode/key_chunks",)  # families of which a CTA has row tiles, or chunks of one length


@dataclass(frozen=True)
class CacheProblem:
    """One call of `attention_with_kvcache` with `cu_seqlens_q`."""

    sequences: tuple[tuple[int, int], ...]
    """Of each the rows of q, and the keys that it has, new ones among them; below 0: there is no sequence."""
    heads_q: int
    heads_kv: int
    causal: str = "bottom_right"
    window: tuple[int | None, int | None] = (None, None)

    def __post_init__(self) -> None:
        if not self.sequences or min(rows for rows, _ in self.sequences) < 0:
            raise ValueError(f"sequences: expected rows of at least 0, and keys, got {self.sequences}")
        Problem(1, self.heads_q, self.heads_kv, 1, 1, 0, self.causal, self.window)  # checks the rest

    def as_dict(self) -> dict[str, Any]:
        left, right = (NO_LIMIT if side is None else side for side in self.window)
        return {
            "cu_q": [0, *itertools.accumulate(rows for rows, _ in self.sequences)],
            "keys": [keys for _, keys in self.sequences],
            "heads_q": self.heads_q,
            "heads_kv": self.heads_kv,
            "window_left": left,
            "window_right": right if self.causal == "none" else 0,
            "bottom_right": int(self.causal != "top_left"),
        }


@dataclass(frozen=True)
class Piece:
    """Some key tiles of a row tile of a sequence and a KV head, which have a softmax of their own."""

    bundle: int  # of CTAs, one for each KV head
    head_kv: int
    sequence: int
    row_tile: int
    first_row: int  # of the packed rows of the sequence
    rows: int
    pieces: int  # of the row tile
    number: int  # among these
    begin: int  # the key tiles that a row sees: [begin, end)
    end: int
    by_itself: bool  # its part is stored by itself, else folded with the pieces before it
    place: int  # of the part in the workspace, in floats; -1: it stays in its CTA, which writes the result
    part_rows: int  # of the part, each of `Schedule.part_columns` floats


@dataclass(frozen=True)
class Merge:
    """What a CTA of the second kernel finds where the range of `bundle` begins: a row tile that several CTAs have."""

    bundle: int
    head_kv: int
    sequence: int
    row_tile: int
    first_bundle: int
    last_bundle: int
    parts: tuple[tuple[int, int, int], ...]  # the pieces [begin, end) of each and its place, in the order of the fold


@dataclass(frozen=True)
class Schedule:
    """Of one call on one GPU; of a call of latent attention the KV heads may be shares of one."""

    shape: dict[str, int]
    bundles: int
    heads_kv: int
    part_columns: int
    workspace_bytes: int
    long_rows: int  # sequences of so many rows have no pieces here, but row tiles in another kernel; 0: none has
    pieces: tuple[Piece, ...]
    merges: tuple[Merge, ...]

    def times(self) -> list[tuple[int, int]]:
        """When each piece begins and ends, if a key tile takes a unit of time, and a piece without one a unit too."""
        free = dict.fromkeys(itertools.product(range(self.bundles), range(self.heads_kv)), 0)
        found = []
        for piece in self.pieces:
            cta = piece.bundle, piece.head_kv
            start, free[cta] = free[cta], free[cta] + max(1, piece.end - piece.begin)
            found.append((start, free[cta]))
        return found


@dataclass(frozen=True)
class CacheKernel:
    """A kernel of attention over caches."""

    arch: str
    folder: str  # of csrc/<arch>/
    head_dim: int
    head_dim_v: int
    index: int
    csrc: Path

    def __str__(self) -> str:
        of_v = "" if self.head_dim_v == self.head_dim else f"/{self.head_dim_v}"
        return f"{self.arch} {self.folder} d{self.head_dim}{of_v}"

    def schedule(self, problem: CacheProblem, sms: int, capability: int | None = None) -> Schedule:
        """The pieces in the order in which each CTA computes them, and the merges.

        Args:
            sms: multiprocessors.
            capability: of the chip, on which the rows of a tile for large head dims depend; default 80 or 90.
        """
        if sms < 1:
            raise ValueError(f"sms: expected at least 1 multiprocessor, got {sms}")
        [module] = build.build_modules(self.csrc, [build.CACHES])
        found = module.schedule(self.index, problem.as_dict(), capability or CAPABILITY[self.arch], sms)
        return Schedule(**found | {"pieces": _pieces(found["pieces"]), "merges": _merges(found["merges"])})


def _pieces(rows: list[list[int]]) -> tuple[Piece, ...]:
    values: list[list[Any]] = [[*row[:10], bool(row[10]), *row[11:]] for row in rows]
    return tuple(Piece(*fields) for fields in values)


def _merges(rows: list[list[int]]) -> tuple[Merge, ...]:
    values: list[list[Any]] = [[*row[:6], tuple(zip(row[6::3], row[7::3], row[8::3], strict=True))] for row in rows]
    return tuple(Merge(*fields) for fields in values)


def cache_kernels(csrc: Path | str | None = None) -> tuple[CacheKernel, ...]:
    """Every kernel of attention over caches. The first call compiles for about 20 s of one core."""
    folder = Path(csrc) if csrc is not None else build.default_csrc()
    [module] = build.build_modules(folder, [build.CACHES])
    values: list[tuple[Any, ...]] = [(*entry, index, folder) for index, entry in enumerate(module.kernels())]
    return tuple(CacheKernel(*fields) for fields in values)


def cache_kernel(among: Sequence[CacheKernel], head_dim: int, arch: str, folder: str | None = None) -> CacheKernel:
    """That of a head dim of q and k, of the first family unless `folder` says which."""
    for kernel in among:
        if (kernel.arch, kernel.head_dim) == (arch, head_dim) and folder in (None, kernel.folder):
            return kernel
    known = ", ".join(str(kernel) for kernel in among if kernel.arch == arch)
    raise ValueError(f"no kernel over caches {arch} {folder or ''} d{head_dim}; there are {known}".replace("  ", " "))


def cache_picture(kernel: CacheKernel, problem: CacheProblem, sms: int = 8) -> Picture:
    """Above, which CTA computes which pieces of which sequence, and when; below, what the second kernel folds.

    Raises:
        ValueError: there are too many pieces to be drawn.
    """
    found = kernel.schedule(problem, sms)
    if len(found.pieces) > MOST_PIECES:
        raise ValueError(f"sequences: expected at most {MOST_PIECES} pieces in a picture, got {len(found.pieces)}")
    times = found.times()
    length = max((end for _, end in times), default=0)
    ctas = found.bundles * found.heads_kv
    work = sum(end - start for start, end in times)
    data = {
        "kernel": str(kernel),
        "sequences": [list(sequence) for sequence in problem.sequences],
        "heads": [problem.heads_q, problem.heads_kv],
        "mask": [problem.causal, *problem.window],
        "sms": sms,
        "bundles": found.bundles,
        "heads_kv": found.heads_kv,
        "long_rows": found.long_rows,
        "balance": round(work / (ctas * length), 4) if length else 1.0,
        "length": length,
        "pieces": [
            [p.bundle, p.head_kv, p.sequence, p.row_tile, p.number, *time, _kind(p)]
            for p, time in zip(found.pieces, times, strict=True)
        ],
        "merges": _folds(found),
    }
    return Picture(f"{kernel.arch}_caches_d{kernel.head_dim}_schedule", "the schedule of a mixed batch", data, _draw)


def _kind(piece: Piece) -> str:
    """Where a piece goes: into a result, into a fold that is stored, or into a part of its own."""
    return "result" if piece.place < 0 else "piece" if piece.by_itself else "fold"


def _folds(found: Schedule) -> list[list[Any]]:
    """Of the first KV head, what is merged: sequence, row tile, and of each part its pieces [begin, end) and bundle."""
    bundle_of = {(p.sequence, p.row_tile, p.number): p.bundle for p in found.pieces if p.head_kv == 0}
    folds: dict[tuple[int, int], list[list[int]]] = {}
    for merge in found.merges:
        if merge.head_kv == 0:
            sequence, tile = merge.sequence, merge.row_tile
            folds[sequence, tile] = [[begin, end, bundle_of[sequence, tile, begin]] for begin, end, _ in merge.parts]
    return [[sequence, row_tile, parts] for (sequence, row_tile), parts in folds.items()]


def _draw(data: dict[str, Any]) -> Figure:
    ctas, merges = data["bundles"] * data["heads_kv"], data["merges"]
    heights = (0.9 + 0.2 * ctas, 0.9 + 0.2 * max(1, len(merges)))
    figure, axes = new_figure(9, sum(heights) + 0.6, 2, 1, height_ratios=heights)
    _draw_ctas(axes[0][0], data)
    _draw_merges(axes[1][0], data)
    heads_q, heads_kv = data["heads"]
    figure.suptitle(
        f"{data['kernel']}: {len(data['sequences'])} sequences, {heads_q} heads over {heads_kv} KV heads, on"
        f" {data['sms']} multiprocessors; {data['balance']:.0%} of the CTAs' time is work",
        fontsize=9,
    )
    of_others = {True: " (another kernel's)", False: ""}
    names = {
        f"{number}: {rows} x {keys}{of_others[0 < data['long_rows'] <= rows]}": _colour(number)
        for number, (rows, keys) in enumerate(data["sequences"])
        if rows
    }
    kinds = {"result": "to the result", "fold": "to a fold in the workspace", "piece": "to the workspace by itself"}
    patch = matplotlib().patches.Patch
    handles = legend(names) + [patch(label=label, **_style(GREY, kind)) for kind, label in kinds.items()]
    figure.legend(handles=handles, title="sequence: rows x keys", loc="outside right center", fontsize=7)
    return figure


def _colour(sequence: int) -> str:
    return COLOURS[sequence % len(COLOURS)]


def _style(colour: str, kind: str) -> dict[str, Any]:
    """What leaves its CTA has a black edge, and is pale where it is by itself. (Hatches take a megabyte.)"""
    red, green, blue = matplotlib().colors.to_rgb(colour)
    pale = [(1 + x) / 2 for x in (red, green, blue)]
    edge = "white" if kind == "result" else "black"
    return {"facecolor": pale if kind == "piece" else colour, "edgecolor": edge, "lw": 0.4}


def _draw_ctas(ax: Axes, data: dict[str, Any]) -> None:
    for bundle, head, sequence, _, _, start, end, kind in data["pieces"]:
        ax.barh(
            bundle * data["heads_kv"] + head,
            end - start,
            left=start,
            height=0.9,
            **_style(_colour(sequence), kind),
        )
    ctas = max(1, data["bundles"] * data["heads_kv"])
    ax.set_ylim(ctas - 0.5, -0.5)
    step = -(-ctas // 32)
    named = [divmod(cta, max(1, data["heads_kv"])) for cta in range(0, ctas, step)]
    ax.set_yticks(range(0, ctas, step), [f"{bundle}, {head}" for bundle, head in named], fontsize=7)
    ax.set_xlim(0, max(1, data["length"]))
    ax.axvline(data["length"] * data["balance"], color="black", linewidth=1, linestyle="--")
    ax.set_ylabel("CTA: bundle, KV head")
    ax.set_xlabel("time, in key tiles; a bar is a piece; the dashed line is a perfect balance")


def _draw_merges(ax: Axes, data: dict[str, Any]) -> None:
    merges = data["merges"]
    most = 1
    for line, (sequence, _, parts) in enumerate(merges):
        for begin, end, _ in parts:
            most = max(most, end)
            style = _style(_colour(sequence), "fold" if begin == 0 else "piece")
            ax.barh(line, end - begin, left=begin, height=0.9, **style)
        for bundle, of_bundle in itertools.groupby(parts, lambda part: part[2]):
            several = list(of_bundle)
            middle = (several[0][0] + several[-1][1]) / 2
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
            ax.text(middle, line, bundle, ha="center", va="center_baseline", fontsize=7, bbox=box)
    ax.set_ylim(max(1, len(merges)) - 0.5, -0.5)
    ax.set_yticks(range(len(merges)), [f"{sequence}, {row_tile}" for sequence, row_tile, _ in merges], fontsize=7)
    whole_numbers(ax.xaxis)
    ax.set_xlim(0, most)
    ax.set_ylabel("sequence, row tile")
    ax.set_xlabel("pieces, as the second kernel folds them, from left to right, with their bundles; of each KV head")
