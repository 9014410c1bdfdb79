"""Budgets, occupancy and roofline of every kernel on the chips it is for: as text, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..explain import _compiled
from .banks import accesses, conflicts
from .kernels import Kernel

__all__ = ["CHIPS", "COLUMNS", "Chip", "budget", "registers_held", "rows", "to_csv", "to_json", "to_text"]


@dataclass(frozen=True)
class Chip:
    """What a multiprocessor has, by NVIDIA's tables of compute capabilities and data sheets."""

    name: str
    capability: int
    sms: int
    clock_ghz: float  # boost; for the H100 the one that its 989 TFLOP/s are given at
    smem_sm: int  # bytes; each CTA takes 1 KB more than it asks for
    threads_sm: int
    mma_flop: dict[str, int]  # kernel folder -> FLOP a clock, 16-bit operands and float32 accumulators
    config: dict[str, tuple[str, ...]]  # kernel folder -> entries of its tile table that run here

    registers_sm = 65536
    ex2_clk = 16  # exponentials a clock
    smem_clk = 128  # bytes a clock


CHIPS = (
    Chip("A100", 80, 108, 1.41, 164 << 10, 2048, {"sm80": 2048}, {"sm80": ("A100",)}),
    Chip("RTX 3080", 86, 68, 1.71, 100 << 10, 1536, {"sm80": 512}, {"sm80": ("Smem99K",)}),
    Chip("RTX 4090", 89, 128, 2.52, 100 << 10, 1536, {"sm80": 512}, {"sm80": ("Smem99K",)}),
    Chip("L20", 89, 92, 2.52, 100 << 10, 1536, {"sm80": 512}, {"sm80": ("Smem99K",)}),
    # mma.sync does not reach wgmma's rate: 645 TFLOP/s were measured with nothing else in the loop.
    Chip("H100", 90, 132, 1.83, 228 << 10, 2048, {"sm80": 2670, "sm90": 4096}, {"sm80": ("H100",), "sm90": ()}),
)

COLUMNS = {
    "chip": "",
    "arch": "kernel folder",
    "head_dim": "",
    "mask": "",
    "config": "entry of the tile table",
    "block_m": "query rows a CTA",
    "block_n": "keys a step",
    "warps": "a CTA",
    "stages": "K/V buffers",
    "smem_bytes": "a CTA",
    "registers": "a thread, by ptxas; what a consumer has where warpgroups share out registers",
    "spill_bytes": "stored, by ptxas",
    "ctas_sm": "that fit a multiprocessor",
    "limited_by": "what keeps a further CTA out",
    "warps_sm": "",
    "mma_clk": "tensor core clocks of a step",
    "mufu_clk": "clocks of its exponentials",
    "smem_clk": "clocks of its shared-memory traffic, bank conflicts included",
    "bound": "the largest of the three",
    "mma_share": "tensor core clocks over those of the bound",
    "tflops": "if a step takes the bound's clocks, at the boost clock",
    "flop_per_byte": "of K and V, read from L2",
}


def rows(kernels: Iterable[Kernel], chips: Iterable[Chip] = CHIPS) -> list[dict[str, Any]]:
    """A row for each kernel on each chip that runs it; keys as in COLUMNS."""
    chips = tuple(chips)
    return [
        budget(kernel, chip)
        for kernel in kernels
        for chip in chips
        if kernel.arch in chip.config and kernel.config in (chip.config[kernel.arch] or (kernel.config,))
    ]


def budget(kernel: Kernel, chip: Chip) -> dict[str, Any]:
    """One row of the table."""
    compiled = compiled_kernel(kernel, chip.capability)
    threads, smem = kernel.facts["threads"], kernel.facts["smem_bytes"]
    # Given out 256 at a time to each warp.
    allotted = kernel.facts.get("consumer_registers")
    registers = compiled["registers"] if compiled else None
    limits = {"shared memory": chip.smem_sm // (smem + 1024), "threads": chip.threads_sm // threads}
    if allotted:
        shared_out = kernel.facts["producer_registers"] + kernel.facts["warpgroups"] * allotted
        limits["registers"] = chip.registers_sm // (128 * shared_out)
    elif registers is not None:
        limits["registers"] = chip.registers_sm // (kernel.warps * -(-registers * 32 // 256) * 256)
    ctas = min(limits.values())
    clocks = step_clocks(kernel, chip)
    bound = max(clocks, key=lambda name: clocks[name])
    flop = 4 * kernel.block_m * kernel.block_n * kernel.head_dim
    return {
        "chip": chip.name,
        "arch": kernel.arch,
        "head_dim": kernel.head_dim,
        "mask": kernel.mask,
        "config": kernel.config,
        "block_m": kernel.block_m,
        "block_n": kernel.block_n,
        "warps": kernel.warps,
        "stages": kernel.facts["stages"],
        "smem_bytes": smem,
        "registers": allotted or registers,
        "spill_bytes": compiled["spill_stores"] if compiled else None,
        "ctas_sm": ctas,
        "limited_by": min(limits, key=lambda name: limits[name]),
        "warps_sm": ctas * kernel.warps,
        "mma_clk": round(clocks["MMA"]),
        "mufu_clk": round(clocks["MUFU"]),
        "smem_clk": round(clocks["shared memory"]),
        "bound": bound,
        "mma_share": round(clocks["MMA"] / clocks[bound], 2),
        "tflops": round(flop / clocks[bound] * chip.sms * chip.clock_ghz / 1000),
        "flop_per_byte": round(flop / (2 * kernel.block_n * kernel.head_dim * 2)),
    }


def compiled_kernel(kernel: Kernel, capability: int) -> dict[str, Any] | None:
    """The compiler's report on this kernel, for float16; None where the library was built without it."""
    plan: dict[str, Any] = {"backend": kernel.arch, "kernel": "fwd_kernel", "dtype": "float16", "mask": kernel.mask}
    plan |= {"kernel_head_dim": kernel.head_dim, "capability": capability}
    return _compiled(plan | kernel.shape | kernel.tile)


def step_clocks(kernel: Kernel, chip: Chip) -> dict[str, float]:
    """Clocks that one key tile of one CTA takes of each unit of a multiprocessor, were it alone."""
    scores = kernel.block_m * kernel.block_n
    return {
        "MMA": 4 * scores * kernel.head_dim / chip.mma_flop[kernel.arch],
        "MUFU": scores / chip.ex2_clk,
        "shared memory": step_smem_bytes(kernel) / chip.smem_clk,
    }


def step_smem_bytes(kernel: Kernel) -> int:
    """Bytes that one step moves through shared memory: counted on the real accesses, a conflict as 128 bytes."""
    details = kernel.details()
    total = 0
    for access in accesses(kernel):
        if access.name.startswith("O") or (access.name[0] in "KV" and "stage 0" not in access.name):
            continue
        if access.name.startswith("Q") and (access.name.startswith("Q into") or kernel.tile.get("q_in_regs")):
            continue
        extra = int(conflicts(access.addresses, access.width).sum())
        total += access.addresses.size * access.width + 128 * extra
    if kernel.arch == "sm90":  # each warpgroup reads all; TMA writes K and V once
        total *= kernel.facts["warpgroups"]
        total += 2 * kernel.block_n * kernel.head_dim * details.facts["element_bytes"]
    return total


def registers_held(kernel: Kernel) -> dict[str, int]:
    """Registers of a thread that the loop keeps through a step: from the partitions, 16-bit values two in one."""
    arrays = kernel.details().arrays
    held = {"O": arrays["O.mma.register"].size, "S": arrays["S.mma.register"].size}
    if kernel.tile.get("q_in_regs"):
        held["Q"] = arrays["Q.mma.register"].size // 2
    if kernel.arch == "sm90":  # P of one step is used while S of the next is made
        held["P"] = arrays["P.mma.register"].size // 2
    return held


# --- Writing ------------------------------------------------------------------------------------------------


def to_json(table: list[dict[str, Any]]) -> str:
    return json.dumps({"columns": COLUMNS, "rows": table}, indent=1) + "\n"


def to_csv(table: list[dict[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(COLUMNS), lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return out.getvalue()


def to_text(table: list[dict[str, Any]]) -> str:
    """Columns for a terminal."""
    texts = [{name: name for name in COLUMNS}]
    texts += [{name: "-" if row[name] is None else str(row[name]) for name in COLUMNS} for row in table]
    widths = {name: max(len(text[name]) for text in texts) for name in COLUMNS}
    numbers = {name for name in COLUMNS if table and isinstance(table[0][name], int | float)}
    lines = []
    for text in texts:
        cells = [text[n].rjust(widths[n]) if n in numbers else text[n].ljust(widths[n]) for n in COLUMNS]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"
