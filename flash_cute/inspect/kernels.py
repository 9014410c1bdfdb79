"""Every kernel's traits as data: what csrc/ compiles, asked of the compiler."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from . import build

__all__ = ["Band", "Buffer", "Details", "Kernel", "PackedProblem", "Problem", "band_module", "find", "kernels"]

IntArray = npt.NDArray[Any]  # of integers

NO_LIMIT = 1 << 30  # csrc/contract/params.h's kNoLimit
CAUSAL = ("none", "top_left", "bottom_right")


@dataclass(frozen=True)
class Band:
    """Row i sees the columns j with `i + lower <= j <= i + upper`; -NO_LIMIT and NO_LIMIT where nothing limits them."""

    lower: int
    upper: int


@dataclass(frozen=True)
class Problem:
    """One call: what a schedule and a mask depend on."""

    batch: int
    heads_q: int
    heads_kv: int
    len_q: int
    len_k: int
    head_dim: int
    causal: str = "none"  # as in the operator: "none", "top_left" or "bottom_right"
    window: tuple[int | None, int | None] = (None, None)  # keys before and after a row's position

    def __post_init__(self) -> None:
        for name in ("batch", "heads_q", "heads_kv", "len_q"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.len_k < 0:
            raise ValueError(f"len_k: expected at least 0, got {self.len_k}")
        if self.heads_q % self.heads_kv:
            raise ValueError(f"heads_kv: expected a divisor of heads_q {self.heads_q}, got {self.heads_kv}")
        if self.causal not in CAUSAL:
            raise ValueError(f"causal: expected one of {', '.join(CAUSAL)}, got {self.causal!r}")
        if any(limit is not None and limit < 0 for limit in self.window):
            raise ValueError(f"window: expected numbers of at least 0 or None, got {self.window}")

    @property
    def band(self) -> Band:
        """As csrc/api/checks.h makes it: what limits no row is no limit."""
        offset = 0 if self.causal == "top_left" else self.len_k - self.len_q
        left, right = self.window
        right = right if self.causal == "none" else 0
        has_lower = left is not None and offset - left + self.len_q - 1 > 0
        has_upper = right is not None and offset + right < self.len_k - 1
        lower = offset - left if left is not None and has_lower else -NO_LIMIT
        return Band(lower, offset + right if right is not None and has_upper else NO_LIMIT)

    @property
    def mask(self) -> str:
        """What `explain` calls it: "full", "causal" or "window"."""
        band = self.band
        if band.lower > -NO_LIMIT:
            return "window"
        if band.upper == NO_LIMIT:
            return "full"
        return "window" if self.causal == "none" else "causal"

    def seen(self) -> tuple[IntArray, IntArray]:
        """(len_q) twice: each row's first column and the one behind its last; equal where it sees none."""
        rows = np.arange(self.len_q, dtype=np.int64)
        first = np.clip(rows + self.band.lower, 0, self.len_k)
        return first, np.maximum(first, np.clip(rows + self.band.upper + 1, 0, self.len_k))

    def as_dict(self) -> dict[str, int]:
        names = ("batch", "heads_q", "heads_kv", "len_q", "len_k", "head_dim")
        return {name: getattr(self, name) for name in names} | {"lower": self.band.lower, "upper": self.band.upper}


@dataclass(frozen=True)
class PackedProblem:
    """One call with packed sequences, each of which attends to itself."""

    lengths: tuple[int, ...]
    heads_q: int
    heads_kv: int
    causal: str = "none"
    window: tuple[int | None, int | None] = (None, None)

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 0:
            raise ValueError(f"lengths: expected numbers of at least 0, got {self.lengths}")
        longest = max(1, max(self.lengths))
        Problem(1, self.heads_q, self.heads_kv, longest, longest, 0, self.causal, self.window)  # checks the rest

    def as_dict(self, head_dim: int) -> dict[str, Any]:
        offsets = [0, *itertools.accumulate(self.lengths)]
        left, right = (NO_LIMIT if side is None else side for side in self.window)
        return {
            "cu_q": offsets,
            "cu_k": offsets,
            "heads_q": self.heads_q,
            "heads_kv": self.heads_kv,
            "head_dim": head_dim,
            "window_left": left,
            "window_right": right if self.causal == "none" else 0,
            "bottom_right": int(self.causal != "top_left"),
        }


@dataclass(frozen=True)
class Buffer:
    """A part of a CTA's shared memory; offset and size in bytes."""

    name: str
    offset: int
    bytes: int


@dataclass(frozen=True)
class Details:
    """Layouts and partitions. For an operand or result X, `arrays` has of these what exists:

    X.smem (row, column[, stage]) -> element's offset in its buffer.
    X.mma.coord (2, value, rest.., thread) -> (row, column) that a thread holds as the MMA's operand.
    X.mma.register (value, rest..) -> which of the thread's registers holds it.
    X.gmem.coord, .ldsm.coord, .sts.coord (2, value, rest.., thread): the same for the copies
        between global and shared memory, and shared memory and registers; .register as above.
    X.descriptor (value, rest..) -> where in the buffer a WGMMA's descriptor points, in units of 16 bytes.

    X of a forward: Q, K, V, S, P, O; V is (head dim, key), as the MMA takes it, and V.rows is (key, head dim), as it is
    loaded. Of sm90's forward for large head dims Q, K and V are units, which are the stages of X.smem; SharedP is P as
    the other warpgroup reads it, where it is in shared memory. Of sm80's backward: K and Q of the scores, S = K Q^T
    (keys, rows); dSt and Qt (head dim, row) of dK; dS (rows, keys) and Kt (head dim, key) of dQ. V is as K there, dO as
    Q, and P^T as dSt. Of sm90's backward none. Of sm80's kernels for large head dims: see large.py.

    Of sm90's float8 kernels LoadedV is V as it is loaded, and V.smem what the MMA reads: V transposed, whose keys are
    in another order. LoadedV.ldsm.address, V.sts.address (instruction, lane) are the bytes of a stage's buffer at which
    the lanes of the transposing warps load and store 16 bytes, and V.sts.byte (16, instruction, lane) which of the
    loaded ones each stored one is. S.mma.rowcol (row, column) is the register of each of a thread's scores, and
    P.mma.numerator that of P to which it is converted.

    `swizzles[X.smem]`: cute::Swizzle's bits, base and shift, in elements.
    """

    buffers: tuple[Buffer, ...]
    facts: dict[str, int]
    arrays: dict[str, IntArray]
    swizzles: dict[str, tuple[int, int, int]]

    def buffer(self, name: str) -> Buffer:
        """The buffer of an operand or result."""
        name = name.removesuffix("t").removeprefix("Shared")
        return next(item for item in self.buffers if name in item.name.replace(", then ", " ").split())


LARGE_FOLDERS = (
    *("forward/streamed", "backward/streamed", "forward/pair_by_turns", "forward/pair_by_columns"),
    "backward/dq_in_registers_large",
)


@dataclass(frozen=True)
class Kernel:
    """One entry of a kernel's tile table for one head dim."""

    arch: str
    folder: str  # of csrc/<arch>/, see families.json there
    head_dim: int
    entry: str  # its name in csrc/<arch>/<folder>/tile.h: sm80: the chip, "a100"; sm90: "rows192"; "" of an only tile
    entry_index: int
    tile: dict[str, int]  # TileConfig of csrc/<arch>/<folder>/tile.h
    shape: dict[str, int]  # KernelShape: what the plan and `explain` tell
    facts: dict[str, int]  # of the traits themselves
    module: ModuleType = field(repr=False)
    index: int = field(repr=False)

    def __str__(self) -> str:
        return f"{self.arch} {self.folder} d{self.head_dim} {self.entry}".rstrip()

    @property
    def is_forward(self) -> bool:
        return self.folder.startswith("forward/")

    @property
    def is_large(self) -> bool:
        """Whether it is of the kernels for large head dims."""
        return self.folder in LARGE_FOLDERS

    @property
    def is_float8(self) -> bool:
        """Whether its tensors are of float8."""
        return self.folder == "forward/fp8_rows"

    @property
    def is_recorded(self) -> bool:
        """Whether its functions have run on the host, and what they did to shared memory is known: see large.py."""
        return self.is_large and self.arch == "sm80"

    @property
    def ctas_per_tile(self) -> int:
        """CTAs that share a tile, each with a part of the columns."""
        return self.facts.get("ctas_per_tile", 1)

    @property
    def has_packed(self) -> bool:
        """Whether packed batches have a kernel of this tile that can be simulated."""
        return bool(self.facts.get("packed"))

    @property
    def block_m(self) -> int:
        return self.facts["block_m"]

    @property
    def block_n(self) -> int:
        return self.facts["block_n"]

    @property
    def warps(self) -> int:
        return self.facts["threads"] // 32

    def details(self) -> Details:
        return _details(self.module, self.index)

    def schedule(self, problem: Problem, sms: int = 1) -> dict[str, IntArray]:
        """Of a forward: columns m_block, head, batch, and the range of key tiles [begin, end), of which [whole_begin,
        whole_end) need no mask, of the tiles in the launch's order. Where a persistent grid on `sms` multiprocessors
        walks them also cta, round, and the key tiles [key_begin, key_end) of a visit: of a tile that several CTAs share
        each has a part, and the first of them merges so many `parts` (-1: this is one that is merged).
        """
        if sms < 1:
            raise ValueError(f"sms: expected at least 1 multiprocessor, got {sms}")
        columns = self.module.schedule(self.index, problem.as_dict(), sms)
        names = ("m_block", "head", "batch", "begin", "whole_begin", "whole_end", "end")
        return dict(zip((*names, "cta", "round", "key_begin", "key_end", "parts"), columns, strict=False))

    def packed_schedule(self, problem: PackedProblem, sms: int = 1) -> dict[str, IntArray]:
        """Of a packed batch: columns m_block, head, sequence, its key tiles [begin, end), of which [whole_begin,
        whole_end) need no mask, the cta, the ticket that it drew for the tile, and start and finish.

        The scheduler's own code, run by a warp of every CTA on `sms` multiprocessors. A tile takes one unit of time per
        key tile, and one more. Ordered by ticket.

        Raises:
            ValueError: no kernel of packed batches has this tile.
        """
        if sms < 1:
            raise ValueError(f"sms: expected at least 1 multiprocessor, got {sms}")
        columns = self.module.packed_schedule(self.index, problem.as_dict(self.head_dim), sms)
        names = ("m_block", "head", "sequence", "begin", "whole_begin", "whole_end", "end", "cta", "ticket")
        return dict(zip((*names, "start", "finish"), columns[:, columns[8].argsort()], strict=True))

    def masked(self, problem: Problem, m_block: int, n_block: int) -> tuple[IntArray, IntArray]:
        """(BLK_M, BLK_N) twice: how many threads hold each score of a tile, and how many set it to -inf."""
        counts: IntArray = self.module.masked(self.index, problem.as_dict(), m_block, n_block)
        return counts // 1000, counts % 1000


@functools.cache
def _details(module: ModuleType, index: int) -> Details:
    raw: dict[str, Any] = module.describe(index)
    return Details(
        buffers=tuple(Buffer(*entry) for entry in raw["buffers"]),
        facts=raw["facts"],
        arrays=raw["arrays"],
        swizzles={name: tuple(numbers) for name, numbers in raw["swizzles"].items()},
    )


def kernels(
    csrc: Path | str | None = None,
    *,
    archs: Sequence[str] = build.ARCHS,
    directions: Sequence[str] = build.DIRECTIONS,
    head_dims: Sequence[int] | None = None,
) -> tuple[Kernel, ...]:
    """Every kernel of this library, or of the headers in another folder; or only some of them.

    A first call compiles what it is asked for, about 10 s of one core per direction, architecture and head dim, and
    says so on stderr; the modules are kept in a cache folder.

    Args:
        csrc: the folder of headers; default the installed ones.
        archs: kernel folders; those that are not there are left out.
        directions: "fwd", "bwd".
        head_dims: default those that the library was built for.

    Raises:
        InspectError: no C++ compiler, a package of the extra `[inspect]` is missing, the headers do not compile, or a
            head dim is none of the kernels'.

    Example:
        >>> [kernel] = [k for k in kernels(directions=["fwd"], head_dims=[128]) if k.entry == "a100"]
        >>> kernel.details().arrays["Q.smem"].shape[1]
        128
    """
    folder = Path(csrc) if csrc is not None else build.default_csrc()
    wanted = build.units(folder, archs, directions, head_dims or build.default_head_dims())
    return of_units(folder, wanted)


def of_units(csrc: Path, units: Sequence[build.Unit]) -> tuple[Kernel, ...]:
    """The kernels of these units, compiled unless they were before."""
    return tuple(
        Kernel(**entry, module=module, index=index)
        for unit, module in zip(units, build.build_modules(csrc, units), strict=True)
        for index, entry in enumerate(module.kernels())
        if entry["head_dim"] == unit.head_dim
    )


def band_module(csrc: Path | str | None = None) -> ModuleType:
    """csrc/core/mask.cuh: `columns`, and the checks `tile_range_findings` and `keep_range_findings`."""
    [module] = build.build_modules(Path(csrc) if csrc is not None else build.default_csrc(), [build.BAND])
    return module


def find(
    among: Sequence[Kernel], head_dim: int, arch: str = "sm80", entry: str | None = None, folder: str = "forward/rows"
) -> Kernel:
    """The kernel of that name, the first of its table unless `entry` says which."""
    named = [kernel for kernel in among if (kernel.arch, kernel.folder, kernel.head_dim) == (arch, folder, head_dim)]
    for kernel in named:
        if entry in (None, kernel.entry):
            return kernel
    known = ", ".join(kernel.entry for kernel in named)
    there_is = f"; its entries are {known}" if named else ""
    raise ValueError(f"no kernel {arch} {folder} d{head_dim} {entry or ''}".rstrip() + there_is)
