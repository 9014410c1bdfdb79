"""docs/sm80_forward_tour.md and its pictures: written from the traits, so that no figure in it is typed."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path

from . import tables
from .banks import accesses, conflicts
from .kernels import Kernel, Problem, find
from .pictures import (
    Picture,
    bank_picture,
    budget_picture,
    gantt_picture,
    mask_picture,
    thread_value_picture,
)

__all__ = ["PAGE", "pictures", "stale", "text", "write"]

TEMPLATE = Path(__file__).parent / "tour.md"
PAGE = "sm80_forward_tour.md"
FOLDER = "pictures"
WIDTH = 118
COMMAND = "python -m flash_cute.inspect tour --out docs"
HEAD_DIM, CONFIG = 128, "A100"
PROBLEM = Problem(batch=1, heads_q=6, heads_kv=6, len_q=2048, len_k=2048, head_dim=HEAD_DIM, causal="bottom_right")
SMS = 10


def pictures(kernels: Sequence[Kernel]) -> dict[str, Picture]:
    """The tour's pictures by what they are called in its text."""
    kernels = tuple(kernels)
    kernel = find(kernels, HEAD_DIM, "causal", "sm80", CONFIG)
    full = find(kernels, HEAD_DIM, "full", "sm80", CONFIG)
    every = [k for k in kernels if (k.arch, k.mask, k.config) == ("sm80", "causal", CONFIG)]
    return {
        "schedule": gantt_picture([full, kernel], PROBLEM, SMS),
        "copy": thread_value_picture(kernel, ["K.gmem", "K.ldsm"]),
        "banks": bank_picture(kernel, "K", "registers"),
        "banks_v": bank_picture(kernel, "V", "registers"),
        "mma": thread_value_picture(kernel, ["Q.mma", "K.mma", "S.mma"]),
        "mask": mask_picture(kernel),
        "banks_o": bank_picture(kernel, "O", "to shared"),
        "budget": budget_picture(every, None),
    }


def text(kernels: Sequence[Kernel], drawn: dict[str, Picture]) -> str:
    """The page."""
    kernel = find(tuple(kernels), HEAD_DIM, "causal", "sm80", CONFIG)
    d = kernel.details()
    facts, tile = kernel.facts, kernel.tile
    m, n, k = (d.facts[f"mma.{axis}"] for axis in "mnk")
    rows, keys, warps, threads = kernel.block_m, kernel.block_n, kernel.warps, facts["threads"]
    held = tables.registers_held(kernel)
    bits = d.swizzles["K.smem"][0]
    by_name = {access.name: access for access in accesses(kernel)}
    to_registers = by_name["K of stage 0 to registers"]
    panels = drawn["schedule"].data["panels"]
    clocks = tables.step_clocks(kernel, next(chip for chip in tables.CHIPS if chip.name == CONFIG))

    if facts["stages"] == 1:
        turns = (
            "There is one buffer of K and one of V, and they take turns: V of this step travels while the first product"
            " reads K, and K of the next while the second product reads V. Two barriers a step, one for each hand-over."
        )
    else:
        turns = (
            f"There are {facts['stages']} buffers of K and of V: both of the next step travel while this one computes."
            " One barrier a step: what was loaded is there, and what will be overwritten is no longer read."
        )
    if tile["q_in_regs"]:
        q_place = "Q is read once, and its fragments stay in registers for the whole loop."
    else:
        q_place = (
            "Q is read from shared memory again in each step: its fragments would take"
            f" {d.arrays['Q.mma.register'].size // 2} registers of each thread, which the accumulators need."
        )
    values = {
        "command": COMMAND,
        "head_dim": HEAD_DIM,
        "rows": rows,
        "keys": keys,
        "warps": warps,
        "warp_rows": rows // warps,
        "threads": threads,
        "m": m,
        "n": n,
        "k": k,
        "sms": SMS,
        "heads": PROBLEM.heads_q,
        "ctas_per_sm": tile["ctas_per_sm"],
        "balance_full": panels[0]["balance"],
        "balance_causal": panels[1]["balance"],
        "gmem_bytes": d.facts["gmem.bytes"],
        "chunk_rows": threads * 8 // (64 if HEAD_DIM % 64 == 0 else 32),
        "smem_bytes": facts["smem_bytes"],
        "smem_lines": "\n".join(f"| {b.name} | {b.offset:,} | {b.bytes:,} |" for b in d.buffers),
        "turns": turns,
        "q_place": q_place,
        "matrices": d.facts["K.ldsm.matrices"],
        "bits": bits,
        "pieces": 1 << bits,
        "per_warp": len(to_registers.addresses) // warps,
        "registers_s": held["S"],
        "registers_o": held["O"],
        "mma": round(clocks["MMA"]),
        "mufu": round(clocks["MUFU"]),
        "smem": round(clocks["shared memory"]),
        "instructions": sum(len(access.addresses) for access in by_name.values()),
        "kinds": len(by_name),
        "conflicts": sum(int(conflicts(a.addresses, a.width).sum()) for a in by_name.values()),
    }
    places = {name: f"{FOLDER}/{picture.name}.svg" for name, picture in drawn.items()}
    page = TEMPLATE.read_text().format(**values, **{f"picture_{name}": place for name, place in places.items()})
    return "\n\n".join(_wrapped(block) for block in page.strip().split("\n\n")) + "\n"


def _wrapped(block: str) -> str:
    """A paragraph's lines anew, now that its figures are in it."""
    if block.startswith(("#", "|", "!", "    ")):
        return block
    return textwrap.fill(" ".join(block.split()), WIDTH, break_long_words=False, break_on_hyphens=False)


def write(kernels: Sequence[Kernel], docs: Path) -> list[Path]:
    """Writes the page, its pictures and their digests under `docs`."""
    drawn = pictures(kernels)
    folder = docs / FOLDER
    saved = [path for picture in drawn.values() for path in picture.save(folder, ("svg",))]
    for path in folder.glob("sm80_*.svg"):
        if path not in saved:
            path.unlink()  # of an earlier version of the tour
    (folder / "digests.json").write_text(json.dumps(_digests(drawn), indent=1) + "\n")
    (docs / PAGE).write_text(text(kernels, drawn))
    return [docs / PAGE, folder / "digests.json", *saved]


def stale(kernels: Sequence[Kernel], docs: Path) -> list[str]:
    """What under `docs` no longer says what the code does."""
    drawn = pictures(kernels)
    folder = docs / FOLDER
    found = []
    path = folder / "digests.json"
    committed = json.loads(path.read_text()) if path.exists() else {}
    for name, digest in _digests(drawn).items():
        if committed.get(name) != digest or not (folder / f"{name}.svg").exists():
            found.append(f"{folder / name}.svg")
    page = docs / PAGE
    if not page.exists() or page.read_text() != text(kernels, drawn):
        found.append(str(page))
    return found


def _digests(drawn: dict[str, Picture]) -> dict[str, str]:
    return {picture.name: picture.digest() for picture in drawn.values()}
