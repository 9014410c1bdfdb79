"""Budgets, occupancy and roofline of every kernel on the chips it is for: as text, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from typing import Any

from .._chips import CHIPS, Chip
from ..explain import _compiled
from . import large
from .banks import Access, accesses, conflicts
from .kernels import Kernel

__all__ = ["CHIPS", "COLUMNS", "Chip", "budget", "registers_held", "rows", "to_csv", "to_json", "to_text"]


COLUMNS = {
    "chip": "",
    "arch": "architecture folder",
    "kernel": "its kernel",
    "head_dim": "",
    "entry": "of the kernel's tile table",
    "block_m": "query rows per CTA; of a backward per step, but bwd_queries: per CTA",
    "block_n": "keys per step; of a backward per CTA, but bwd_queries: per step",
    "warps": "per CTA",
    "stages": "K/V buffers; of a backward Q/dO buffers",
    "smem_bytes": "per CTA",
    "registers": "per thread, by ptxas; a consumer's where warpgroups share out registers",
    "spill_bytes": "stored, by ptxas",
    "ctas_sm": "that fit a multiprocessor",
    "limited_by": "what keeps a further CTA out",
    "warps_sm": "",
    "mma_clk": "tensor core clocks of a step",
    "mufu_clk": "clocks of its exponentials",
    "smem_clk": "clocks of its shared-memory traffic, bank conflicts included; not known of sm90's backward",
    "bound": "the largest of the three",
    "mma_share": "tensor core clocks over those of the bound",
    "tflops": "if a step takes the bound's clocks, at the boost clock",
    "flop_per_byte": "of what a step reads from L2",
}

# A kernel's __global__ function and the products of its step.
_FUNCTIONS = {
    ("forward/rows", ""): ("fwd_kernel", 2),
    ("forward/fp8_rows", ""): ("fwd_kernel", 2),
    ("forward/streamed", ""): ("fwd_streamed_kernel", 2),
    ("forward/pair_by_turns", ""): ("fwd_pair_by_turns_kernel", 2),
    ("forward/pair_by_columns", ""): ("fwd_pair_by_columns_kernel", 2),
    ("backward/dq_in_memory", ""): ("bwd_kernel", 5),
    ("backward/streamed", ""): ("bwd_keys_kernel", 3),  # of the CTAs that compute dK, S and dP with it; dQ's are alike
    ("backward/dq_in_registers", "keys"): ("bwd_keys_kernel", 4),
    ("backward/dq_in_registers", "queries"): ("bwd_queries_kernel", 3),
    ("backward/dq_in_registers_large", "keys"): ("bwd_keys_kernel", 4),
    ("backward/dq_in_registers_large", "queries"): ("bwd_queries_kernel", 3),
}


def _function(kernel: Kernel) -> tuple[str, int]:
    return _FUNCTIONS[kernel.folder, kernel.entry if kernel.entry in ("keys", "queries") else ""]


def _parts(kernel: Kernel) -> int:
    """CTAs among which the columns of a tile, or its tensors and their columns, are divided."""
    return kernel.tile.get("parts", 1)


def _turns(kernel: Kernel) -> int:
    """CTAs that compute the scores of a tile by turns, each of every second or further step."""
    return kernel.tile.get("turns", 1)


def _products(kernel: Kernel) -> float:
    """Of a step of one CTA, over all of the head dim. CTAs that share a tile have an equal part of each product. Of the
    two sides of sm90's backward one has S and dQ, and the other dP alone: the first one counts."""
    products = _function(kernel)[1]
    if kernel.tile.get("sides") == 2 and kernel.entry == "queries":
        products = 2 * 2
    return products / _parts(kernel)


def rows(kernels: Iterable[Kernel], chips: Iterable[Chip] = CHIPS) -> list[dict[str, Any]]:
    """A row for each kernel on each chip that runs it; keys as in COLUMNS."""
    chips = tuple(chips)
    return [
        budget(kernel, chip)
        for kernel in kernels
        for chip in chips
        if kernel.arch in chip.entries and kernel.entry in (chip.entries[kernel.arch] or (kernel.entry,))
    ]


def budget(kernel: Kernel, chip: Chip) -> dict[str, Any]:
    """One row of the table."""
    compiled = compiled_kernel(kernel, chip.capability)
    threads, smem = kernel.facts["threads"], kernel.facts["smem_bytes"]
    # Registers are given out 256 at a time to each warp.
    allotted = kernel.facts.get("consumer_registers")
    registers = compiled["registers"] if compiled else None
    limits = {"shared memory": chip.smem_sm // (smem + 1024), "threads": chip.threads_sm // threads}
    if allotted:
        shared_out = kernel.facts["producer_registers"] + kernel.facts["warpgroups"] * allotted
        shared_out += kernel.facts.get("scores_registers", 0)  # of a warpgroup that makes P and dS alone
        limits["registers"] = chip.registers_sm // (128 * shared_out)
    elif registers is not None:
        limits["registers"] = chip.registers_sm // (kernel.warps * -(-registers * 32 // 256) * 256)
    ctas = min(limits.values())
    clocks = step_clocks(kernel, chip)
    bound = max(clocks, key=lambda name: clocks[name])
    function, products = _function(kernel)
    # Scores that several CTAs compute count once.
    flop = 2 * products * kernel.block_m * kernel.block_n * kernel.head_dim / _parts(kernel)
    return {
        "chip": chip.name,
        "arch": kernel.arch,
        "kernel": "fwd_fp8" if kernel.is_float8 else function.removesuffix("_kernel"),
        "head_dim": kernel.head_dim,
        "entry": kernel.entry,
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
        "smem_clk": round(clocks["shared memory"]) if "shared memory" in clocks else None,
        "bound": bound,
        "mma_share": round(clocks["MMA"] / clocks[bound], 2),
        "tflops": round(flop / clocks[bound] * chip.sms * chip.clock_ghz / 1000),
        "flop_per_byte": round(flop / _streamed_bytes(kernel)),
    }


def _element_bytes(kernel: Kernel) -> int:
    return 1 if kernel.is_float8 else 2


def _streamed_bytes(kernel: Kernel) -> float:
    """What a step of one CTA loads: the rows of two tensors, its part of the columns. CTAs of sm80's kernels for large
    head dims load their own rows again where these do not stay in shared memory; those of its backward load all columns
    of both, and their part of one again for the gradient. Of a pair each computes every second tile of scores."""
    streams_keys = kernel.is_forward or _function(kernel)[0] == "bwd_queries_kernel"
    streamed = kernel.block_n if streams_keys else kernel.block_m
    rows = 2 * streamed / _parts(kernel)
    if kernel.is_recorded:
        own = 0 if kernel.tile["left_resident"] else kernel.facts["tile_rows"]
        if kernel.is_forward:
            rows += own / _parts(kernel)
        else:
            rows = (2 * (streamed + own) + streamed) / _parts(kernel)
    return rows * kernel.head_dim * _element_bytes(kernel)


def compiled_kernel(kernel: Kernel, capability: int) -> dict[str, Any] | None:
    """The compiler's report on this kernel, for float16; None where the library was built without it."""
    function, _ = _function(kernel)
    if kernel.is_recorded and _parts(kernel) > 1:
        function = function.replace("_kernel", "_pair_kernel")
    family = f"{kernel.arch}::{kernel.folder}".replace("/", "::")
    plan: dict[str, Any] = {"family": family, "kernel": function, "tile": kernel.entry, "dtype": "float16"}
    plan |= {"deterministic": False}
    if kernel.is_float8:
        plan |= dict.fromkeys(("dtype", "dtype_k", "dtype_v"), "float8_e4m3fn")
        plan |= {"variant": "modified" if kernel.entry == "modified" else "dense", "kernel_head_dim_v": kernel.head_dim}
    # One instance serves all large head dims of sm80.
    plan |= {"kernel_head_dim": 1024 if kernel.is_recorded else kernel.head_dim, "capability": capability}
    return _compiled(plan | kernel.shape | kernel.tile)


def step_clocks(kernel: Kernel, chip: Chip) -> dict[str, float]:
    """Clocks that one step of one CTA takes of each unit of a multiprocessor, were it alone."""
    scores = kernel.block_m * kernel.block_n
    clocks = {
        "MMA": _element_bytes(kernel) * _products(kernel) * scores * kernel.head_dim / chip.mma_flop[kernel.arch],
        "MUFU": scores / _turns(kernel) / chip.ex2_clk,
    }
    moved = step_smem_bytes(kernel)
    return clocks if moved is None else clocks | {"shared memory": moved / chip.smem_clk}


def step_smem_bytes(kernel: Kernel) -> int | None:
    """Bytes that one step moves through shared memory: counted on the real accesses, a conflict as 128 bytes. None for
    sm90's backward, of which the accesses are not known here."""
    if kernel.is_recorded:
        return large.step_smem_bytes(kernel)
    if kernel.is_forward:
        own = {
            "forward/pair_by_turns": _sm90_by_turns_step_smem_bytes,
            "forward/pair_by_columns": _sm90_by_columns_step_smem_bytes,
            "forward/fp8_rows": _float8_step_smem_bytes,
        }
        return own.get(kernel.folder, _fwd_step_smem_bytes)(kernel)
    return _sm80_bwd_step_smem_bytes(kernel) if kernel.arch == "sm80" else None


def _moved(access: Access) -> int:
    return access.addresses.size * access.width + 128 * int(conflicts(access.addresses, access.width).sum())


def _fwd_step_smem_bytes(kernel: Kernel) -> int:
    details = kernel.details()
    total = 0
    for access in accesses(kernel):
        if access.name.startswith("O") or (access.name[0] in "KV" and "stage 0" not in access.name):
            continue
        if access.name.startswith("Q") and (access.name.startswith("Q into") or kernel.tile.get("q_in_regs")):
            continue
        total += _moved(access)
    if kernel.arch == "sm90":  # each warpgroup reads all; TMA writes K and V once
        total *= kernel.facts["warpgroups"]
        total += 2 * kernel.block_n * kernel.head_dim * details.facts["element_bytes"]
    return total


def _float8_step_smem_bytes(kernel: Kernel) -> int:
    """Each warpgroup reads Q, K and V transposed; V is read and written to be transposed. TMA writes K and V."""
    moved = _moved_by_unit(kernel)
    total = kernel.facts["warpgroups"] * sum(moved[f"{name} to the tensor cores"] for name in "QKV")
    total += moved["LoadedV to registers"] + moved["V to shared memory"]
    return total + 2 * kernel.block_n * kernel.head_dim


def _moved_by_unit(kernel: Kernel) -> dict[str, int]:
    """By what reads or writes a unit of an operand."""
    first = {access.name.replace(" of stage 0", ""): access for access in accesses(kernel)}
    return {name: _moved(access) for name, access in first.items() if " of stage " not in name}


def _sm90_by_turns_step_smem_bytes(kernel: Kernel) -> int:
    """Of a key tile, the mean of two: the scores by both warpgroups of one CTA, and a message with P to the other one,
    written and read; the CTA's columns of V by both. TMA writes K in one CTA, and V once."""
    moved, tile = _moved_by_unit(kernel), kernel.tile
    units = -(-kernel.head_dim // tile["unit_columns"])
    own = kernel.facts["warpgroups"] * units * (moved["Q to the tensor cores"] + moved["K to the tensor cores"])
    own += 2 * tile["message_bytes"] + 2 * kernel.block_n * units * tile["unit_columns"]
    every = kernel.facts["warpgroups"] * tile["units_of_v"] * moved["V to the tensor cores"]
    every += 2 * kernel.block_n * tile["columns_of_o"]
    return own // _turns(kernel) + every


def _sm90_by_columns_step_smem_bytes(kernel: Kernel) -> int:
    """Of a key tile: the scores by one warpgroup, which stores P for the other one; P and the halves of V by both. TMA
    writes K and V once. Two CTAs write their parts of the scores to each other, and read the other one's."""
    moved, tile, parts = _moved_by_unit(kernel), kernel.tile, _parts(kernel)
    units = -(-kernel.head_dim // (parts * tile["unit_columns"]))
    total = units * (moved["Q to the tensor cores"] + moved["K to the tensor cores"])
    total += 2 * tile["units_of_v"] * moved["V to the tensor cores"]
    # Each product with a part of V's columns reads P again.
    total += moved["SharedP to shared memory"]
    total += tile["columns_of_o"] // tile["unit_columns_of_v"] * moved["SharedP to the tensor cores"]
    total += 2 * kernel.block_n * (units * tile["unit_columns"] + 2 * tile["columns_of_o"])
    return total + 2 * 4 * kernel.block_m * kernel.block_n


def _sm80_bwd_step_smem_bytes(kernel: Kernel) -> int:
    """Of a part of the step's rows: K and V for the scores, Q and dO for all products, dS^T and, where it is in shared
    memory, P^T. Of the whole step: dS and K for dQ, and the next Q and dO."""
    first = {access.name.replace(" of stage 0", "").replace(" stage 0", ""): access for access in accesses(kernel)}
    moved = {name: _moved(access) for name, access in first.items()}
    parts = kernel.block_m // kernel.facts["score_rows"]
    stored = 2 if "dSt to registers" in moved else 1
    part = 2 * sum(moved[f"{name} to registers"] for name in ("K", "Q", "Qt")) + 2 * moved["Q into"]
    part += stored * moved["dSt to shared memory"] + 2 * moved.get("dSt to registers", 0)
    return parts * part + moved["dS to registers"] + moved["Kt to registers"]


def registers_held(kernel: Kernel) -> dict[str, int]:
    """Registers of a thread that the loop keeps through a step: from the partitions, 16-bit values two in one; of
    sm90's backward from the tile."""
    arrays = kernel.details().arrays
    if kernel.is_recorded:
        names = ("S",) if kernel.is_forward else ("S", "dP")
        held = {"O" if kernel.is_forward else "a gradient": arrays["O.mma.register"].size}
        return held | dict.fromkeys(names, arrays["S.mma.register"].size)
    if kernel.folder == "backward/dq_in_registers_large":
        # A warpgroup that has a sum, and scores unless another one computes them all.
        held = {"dK or dV" if kernel.entry == "keys" else "dQ": 64 * kernel.tile["columns_of_sums"] // 128}
        no_scores = kernel.entry == "queries" and kernel.tile["sides"] == 1
        return held if no_scores else held | {"S or dP": 64 * 64 // 128}
    if kernel.arch == "sm90" and not kernel.is_forward:  # 64 rows or keys of a sum, of a warpgroup's 128 threads
        scores = {"S": 64 * (64 if kernel.folder == "backward/dq_in_registers" else kernel.block_m) // 128}
        if kernel.entry != "keys":
            scores["dP"] = scores["S"]
        results = {"all": ("dK", "dV"), "keys": ("dK or dV",), "queries": ("dQ",)}[kernel.entry]
        return dict.fromkeys(results, kernel.head_dim // 2) | scores
    if not kernel.is_forward:
        sums = dict.fromkeys(("dK", "dV"), arrays["dK.mma.register"].size)
        return sums | dict.fromkeys(("S", "dP"), arrays["S.mma.register"].size)
    held = {"O": arrays["O.mma.register"].size, "S": arrays["S.mma.register"].size}
    if kernel.is_float8:  # scores and products take turns, and P has four in one
        turns = max(held["S"], kernel.facts["product_registers"])
        return {"O": held["O"], "S or P V": turns, "P": arrays["P.mma.register"].size // 4}
    if kernel.tile.get("q_in_regs"):
        held["Q"] = arrays["Q.mma.register"].size // 2
    if kernel.arch == "sm90":  # P of one step is used while S of the next is made
        held["P"] = _turns(kernel) * arrays["P.mma.register"].size // 2  # of each CTA's step
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
