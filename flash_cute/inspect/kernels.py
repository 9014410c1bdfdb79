"""Every kernel's traits as data: what csrc/ compiles, asked of the compiler."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy.typing as npt

from . import build

__all__ = ["Buffer", "Details", "Kernel", "Problem", "find", "kernels"]

IntArray = npt.NDArray[Any]  # of integers


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

    def as_dict(self) -> dict[str, int]:
        diagonal = self.len_k - self.len_q if self.causal == "bottom_right" else 0
        names = ("batch", "heads_q", "heads_kv", "len_q", "len_k", "head_dim")
        return {name: getattr(self, name) for name in names} | {"diagonal": diagonal}


@dataclass(frozen=True)
class Buffer:
    """A part of a CTA's shared memory; offset and size in bytes."""

    name: str
    offset: int
    bytes: int


@dataclass(frozen=True)
class Details:
    """Layouts and partitions. For an operand or result X of Q, K, V, S, P, O, `arrays` has of these what exists:

    X.smem (row, column[, stage]) -> element's place in its buffer. V is (head dim, key), as the MMA takes it;
        V.rows is (key, head dim), as it is loaded.
    X.mma.coord (2, value, rest.., thread) -> (row, column) that a thread holds as the MMA's operand.
    X.mma.register (value, rest..) -> which of the thread's registers holds it.
    X.gmem.coord, .ldsm.coord, .sts.coord (2, value, rest.., thread): the same for the copies
        between global and shared memory, and shared memory and registers; .register as above.
    X.descriptor (value, rest..) -> where in the buffer a WGMMA's descriptor points, in units of 16 bytes.

    `swizzles[X.smem]`: cute::Swizzle's bits, base and shift, in elements.
    """

    buffers: tuple[Buffer, ...]
    facts: dict[str, int]
    arrays: dict[str, IntArray]
    swizzles: dict[str, tuple[int, int, int]]

    def buffer(self, name: str) -> Buffer:
        """The buffer of Q, K, V or O."""
        return next(item for item in self.buffers if name in item.name.replace(", then ", " ").split())


@dataclass(frozen=True)
class Kernel:
    """One entry of an architecture's tile table for one head dim and mask."""

    arch: str
    head_dim: int
    mask: str  # "full" or "causal"
    config: str  # the enumerator's name in csrc/<arch>/fwd_tile.h: sm80: the chip, "A100"; sm90: "Wide"
    config_index: int
    tile: dict[str, int]  # FwdTile of csrc/<arch>/fwd_tile.h
    shape: dict[str, int]  # KernelShape: what the plan and `explain` tell
    facts: dict[str, int]  # of the traits themselves
    module: ModuleType
    index: int

    def __str__(self) -> str:
        return f"{self.arch} d{self.head_dim} {self.mask} {self.config}"

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

    def schedule(self, problem: Problem, ctas: int = 1) -> dict[str, IntArray]:
        """Columns m_block, head, batch, unmasked, end of the tiles in the launch's order. Where a persistent grid of
        `ctas` walks them also cta, round, and the key tiles [key_begin, key_end) of a visit: of a tile that several
        CTAs share each has a part, and the first of them takes in so many `parts` (-1: this is one that is taken in).
        """
        columns = self.module.schedule(self.index, problem.as_dict(), ctas)
        names = ("m_block", "head", "batch", "unmasked", "end", "cta", "round", "key_begin", "key_end", "parts")
        return dict(zip(names, columns, strict=False))

    def column_limits(self, problem: Problem) -> IntArray:
        """(len_q): the first column that each row does not see."""
        limits: IntArray = self.module.column_limits(self.index, problem.as_dict())
        return limits

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
    archs: tuple[str, ...] = build.ARCHS,
    head_dims: tuple[int, ...] | None = None,
) -> tuple[Kernel, ...]:
    """Every kernel of this library, or of the headers in another folder.

    The first call compiles a small module (seconds; kept in a cache folder).

    Args:
        csrc: the folder of headers; default the installed ones.
        archs: kernel folders; those that are not there are left out.
        head_dims: default those that the library was built for.

    Raises:
        InspectError: no C++ compiler, a package of the extra `[inspect]` is missing, or the headers do not compile.

    Example:
        >>> [kernel] = [k for k in kernels() if (k.head_dim, k.mask, k.config) == (128, "causal", "A100")]
        >>> kernel.details().arrays["Q.smem"].shape[1]
        128
    """
    folder = Path(csrc) if csrc is not None else build.default_csrc()
    return _load(folder, archs, head_dims or build.default_head_dims())


def _load(folder: Path, archs: tuple[str, ...], head_dims: tuple[int, ...]) -> tuple[Kernel, ...]:
    module = build.build_module(folder, archs, head_dims)
    return tuple(Kernel(**entry, module=module, index=index) for index, entry in enumerate(module.kernels()))


def find(
    among: tuple[Kernel, ...], head_dim: int, mask: str = "full", arch: str = "sm80", config: str | None = None
) -> Kernel:
    """The kernel of that name, the first of its table unless `config` says which."""
    for kernel in among:
        if (kernel.arch, kernel.head_dim, kernel.mask) == (arch, head_dim, mask) and config in (None, kernel.config):
            return kernel
    raise ValueError(f"no kernel {arch} d{head_dim} {mask} {config or ''}".rstrip())
