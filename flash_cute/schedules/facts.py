"""What is known of each schedule without running it: budgets, occupancy, traffic and bank conflicts.

From the traits that are compiled (flash_cute.inspect: a C++ compiler, no GPU) and, once the kernels are compiled, from
the compiler's report.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from .._chips import CHIPS, Chip
from ..inspect import build
from ..inspect.banks import accesses, conflicts
from ..inspect.kernels import Kernel, of_units
from . import _library
from ._compile import HEAD_DIMS

__all__ = ["COLUMNS", "facts", "kernels", "to_csv", "to_text"]

COLUMNS = {
    "schedule": "",
    "head_dim": "",
    "block_m": "query rows per CTA",
    "block_n": "keys per step",
    "warps": "per CTA",
    "stages": "buffers of K and V; of tiled schedules of column tiles",
    "smem_bytes": "shared memory per CTA",
    "registers": "per thread, by ptxas; empty until the kernels are compiled",
    "spill_bytes": "stored, by ptxas",
    "ctas_sm": "CTAs that fit a multiprocessor of the chip",
    "limited_by": "what keeps a further CTA out",
    "barriers": "of the CTA per key tile",
    "q_bytes": "of Q, read once per CTA from L2 or DRAM",
    "tile_bytes": "read per key tile from L2 or DRAM",
    "flop_per_byte": "of a key tile's bytes; S that is computed twice counts once",
    "smem_moved": "bytes that a key tile moves through shared memory, conflicts included",
    "bank_conflicts": "extra passes of a key tile's accesses",
}


def kernels(head_dims: Sequence[int] = HEAD_DIMS) -> tuple[Kernel, ...]:
    """The schedules as flash_cute.inspect has kernels; `entry` is the schedule's name.

    A first call compiles their traits, about 20 s of one core per head dim.

    Raises:
        InspectError: no C++ compiler, or a package of the extra `[inspect]` is missing.

    Example:
        >>> [kernel] = [k for k in kernels([64]) if k.entry == "shared_kv"]
        >>> kernel.facts["smem_bytes"]
        24576
    """
    return of_units(build.default_csrc(), [build.Unit("sm80", "schedules", head_dim) for head_dim in head_dims])


def facts(head_dims: Sequence[int] = HEAD_DIMS, chip: Chip = CHIPS[0]) -> list[dict[str, Any]]:
    """A row for each schedule at each head dim, on a chip; keys as in COLUMNS."""
    report = {(row["schedule"], row["head_dim"]): row for row in _library.report() if row["dtype"] == "float16"}
    return [_row(kernel, chip, report.get((kernel.entry, kernel.head_dim))) for kernel in kernels(head_dims)]


def _row(kernel: Kernel, chip: Chip, compiled: dict[str, Any] | None) -> dict[str, Any]:
    limits = _limits(kernel, chip, compiled)
    moved, extra = _shared_memory(kernel)
    flop = 4 * kernel.block_m * kernel.block_n * kernel.head_dim / kernel.facts["parts"]
    return {
        "schedule": kernel.entry,
        "head_dim": kernel.head_dim,
        "block_m": kernel.block_m,
        "block_n": kernel.block_n,
        "warps": kernel.warps,
        "stages": kernel.facts["stages"],
        "smem_bytes": kernel.facts["smem_bytes"],
        "registers": compiled["registers"] if compiled else None,
        "spill_bytes": compiled["spill_stores"] if compiled else None,
        "ctas_sm": min(limits.values()),
        "limited_by": min(limits, key=lambda name: limits[name]),
        "barriers": kernel.facts["barriers"],
        "q_bytes": kernel.facts["bytes_once"],
        "tile_bytes": kernel.facts["bytes_per_key_tile"],
        "flop_per_byte": round(flop / kernel.facts["bytes_per_key_tile"]),
        "smem_moved": moved,
        "bank_conflicts": extra,
    }


def _limits(kernel: Kernel, chip: Chip, compiled: dict[str, Any] | None) -> dict[str, int]:
    """CTAs per multiprocessor by each resource. Registers are given out 256 at a time to each warp; before the kernel
    is compiled they are those that its launch bounds allow."""
    threads = kernel.facts["threads"]
    allowed = min(255, chip.registers_sm // (threads * kernel.tile["budgeted_ctas"]) // 8 * 8)
    registers = compiled["registers"] if compiled else allowed
    return {
        "registers": chip.registers_sm // (kernel.warps * -(-registers * 32 // 256) * 256),
        "shared memory": chip.smem_sm // (kernel.facts["smem_bytes"] + 1024),
        "threads": chip.threads_sm // threads,
    }


def _shared_memory(kernel: Kernel) -> tuple[int, int]:
    """Bytes that a key tile moves through shared memory, a conflict counted as 128, and its conflicts.

    Of a tiled schedule an access is that of one column tile. Without Q's way to registers where it stays there, and
    without O's.
    """
    columns = kernel.tile["columns"]
    tiles = kernel.head_dim // columns if columns else 1
    out_tiles = kernel.tile["out_columns"] // columns if columns else 1
    moved = passes = 0
    for access in accesses(kernel):
        name = access.name[0]
        if name == "O" or "stage 0" not in access.name:
            continue
        if name == "Q" and (kernel.tile["q_in_regs"] or (not columns and access.name.startswith("Q into"))):
            continue
        times = out_tiles if name == "V" else tiles
        extra = int(conflicts(access.addresses, access.width).sum())
        moved += times * (access.addresses.size * access.width + 128 * extra)
        passes += times * extra
    if kernel.entry.startswith("split_kv"):  # each warp writes its maxima, and reads those of all, as one of 4 threads
        moved += 4 * kernel.block_m * kernel.warps * (1 + kernel.warps)
    return moved, passes


def to_csv(table: Iterable[dict[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(COLUMNS), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return out.getvalue()


def to_text(table: Sequence[dict[str, Any]], columns: Sequence[str] = tuple(COLUMNS)) -> str:
    """Columns for a terminal."""
    texts = [{name: name for name in columns}]
    texts += [{name: "-" if row[name] is None else str(row[name]) for name in columns} for row in table]
    widths = {name: max(len(text[name]) for text in texts) for name in columns}
    words = {"schedule", "limited_by"}
    lines = []
    for text in texts:
        cells = [text[n].ljust(widths[n]) if n in words else text[n].rjust(widths[n]) for n in columns]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"
