"""The guided tours of docs/ and their pictures: written from the traits, so that no figure in them is typed. And the
pictures of other pages, whose text is written by hand."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import build, tables
from .banks import accesses, conflicts
from .caches import CacheProblem, cache_kernel, cache_kernels, cache_picture
from .drawing import Picture
from .float8 import transposition_picture
from .kernels import Kernel, PackedProblem, Problem, find, kernels
from .packed import packed_picture
from .pictures import bank_picture, budget_picture, gantt_picture, mask_picture, thread_value_picture
from .warps import warp_picture

__all__ = ["COMMAND", "FOLDER", "PAGES", "TOURS", "needed", "pictures", "stale", "text", "write"]

FOLDER = "pictures"
WIDTH = 118
COMMAND = "python -m flash_cute.inspect tour --out docs"
HEAD_DIM = 128
# One head of few tiles, for the mask; and a few heads on a small GPU, for the schedule.
SHORT = Problem(1, 1, 1, len_q=768, len_k=1024, head_dim=HEAD_DIM)
FULL = Problem(1, 6, 6, len_q=2048, len_k=2048, head_dim=HEAD_DIM)
CAUSAL = replace(FULL, causal="bottom_right")
# Causal, with the 128 keys of gpt-oss's windows; and documents packed one after the other.
WINDOW = replace(CAUSAL, window=(127, None))
PACKED = PackedProblem((3000, 1100, 700, 260, 100, 100, 30), 4, 1, "bottom_right")
# Over caches: three sequences decode, of one a draft is verified, one has a chunk of its prompt.
CACHES = CacheProblem(((1, 6000), (1, 900), (1, 300), (4, 3000), (64, 700)), 8, 2)


@dataclass(frozen=True)
class Tour:
    """One page of docs/."""

    arch: str
    entry: str  # of the tile table
    chip: str  # of tables.CHIPS
    sms: int  # of the schedule's picture
    values: Callable[[Kernel, tables.Chip], dict[str, Any]]

    @property
    def page(self) -> str:
        return f"{self.arch}_forward_tour.md"

    @property
    def template(self) -> Path:
        return Path(__file__).parent / f"tour_{self.arch}.md"

    def entry_of(self, head_dim: int) -> str:
        """That of the tile for many rows: on sm90 above head dim 128 it has fewer."""
        return "rows128" if self.arch == "sm90" and head_dim > HEAD_DIM else self.entry

    def kernel(self, among: Sequence[Kernel]) -> Kernel:
        return find(among, HEAD_DIM, self.arch, self.entry)


def needed(csrc: Path | str | None = None) -> tuple[Kernel, ...]:
    """The kernels of the tours and pictures: every head dim, whatever this library was built for."""
    return kernels(csrc, directions=("fwd",), head_dims=build.HEAD_DIMS)


def pictures(tour: Tour, among: Sequence[Kernel]) -> dict[str, Picture]:
    """A tour's pictures by what they are called in its text."""
    kernel = tour.kernel(among)
    rows = [other for other in among if (other.arch, other.folder) == (tour.arch, "forward/rows")]
    alike = [other for other in rows if other.entry == tour.entry_of(other.head_dim)]
    drawn = {
        "schedule": gantt_picture([(kernel, problem) for problem in (FULL, CAUSAL, WINDOW)], tour.sms),
        "mask": mask_picture(kernel, replace(SHORT, causal="bottom_right")),
        "window": mask_picture(kernel, replace(SHORT, window=(400, 100))),
        "budget": budget_picture(alike, None),
    }
    if tour.arch == "sm80":
        return drawn | {
            "copy": thread_value_picture(kernel, ["K.gmem", "K.ldsm"]),
            "banks": bank_picture(kernel, "K", "registers"),
            "banks_v": bank_picture(kernel, "V", "registers"),
            "mma": thread_value_picture(kernel, ["Q.mma", "K.mma", "S.mma"]),
            "banks_o": bank_picture(kernel, "O", "to shared"),
        }
    return drawn | {
        "packed": packed_picture(kernel, PACKED, tour.sms),
        "banks": bank_picture(kernel, "K", "tensor"),
        "banks_v": bank_picture(kernel, "V", "tensor"),
        "mma": thread_value_picture(kernel, ["S.mma", "P.mma"]),
    }


def text(tour: Tour, among: Sequence[Kernel], drawn: dict[str, Picture]) -> str:
    """The page."""
    kernel = tour.kernel(among)
    chip = next(chip for chip in tables.CHIPS if chip.name == tour.chip)
    panels = drawn["schedule"].data["panels"]
    values = _common_values(kernel, chip) | tour.values(kernel, chip)
    values |= {"sms": tour.sms, "window_keys": 1 + (WINDOW.window[0] or 0)}
    values |= {f"balance_{name}": panels[i]["balance"] for i, name in enumerate(("full", "causal", "window"))}
    if "packed" in drawn:
        values |= {"sequences": len(PACKED.lengths), "balance_packed": drawn["packed"].data["balance"]}
    values |= {f"picture_{name}": f"{FOLDER}/{picture.name}.svg" for name, picture in drawn.items()}
    page = tour.template.read_text().format(**values)
    return "\n\n".join(_wrapped(block) for block in page.strip().split("\n\n")) + "\n"


def _common_values(kernel: Kernel, chip: tables.Chip) -> dict[str, Any]:
    d = kernel.details()
    held = tables.registers_held(kernel)
    clocks = tables.step_clocks(kernel, chip)
    every = list(accesses(kernel))
    return {
        "command": COMMAND,
        "chip": chip.name,
        "head_dim": HEAD_DIM,
        "rows": kernel.block_m,
        "keys": kernel.block_n,
        "threads": kernel.facts["threads"],
        "stages": kernel.facts["stages"],
        "m": d.facts["mma.m"],
        "n": d.facts["mma.n"],
        "k": d.facts["mma.k"],
        "heads": FULL.heads_q,
        "ctas_per_sm": kernel.shape["ctas_per_sm"],
        "smem_bytes": kernel.facts["smem_bytes"],
        "smem_lines": "\n".join(f"| {b.name} | {b.offset:,} | {b.bytes:,} |" for b in d.buffers),
        "bits": d.swizzles["K.smem"][0],
        "pieces": 1 << d.swizzles["K.smem"][0],
        "registers_s": held["S"],
        "registers_o": held["O"],
        "mma": round(clocks["MMA"]),
        "mufu": round(clocks["MUFU"]),
        "smem": round(clocks["shared memory"]),
        "instructions": sum(len(access.addresses) for access in every),
        "kinds": len(every),
        "conflicts": sum(int(conflicts(a.addresses, a.width).sum()) for a in every),
    }


def _sm80_values(kernel: Kernel, _: tables.Chip) -> dict[str, Any]:
    d = kernel.details()
    facts, tile = kernel.facts, kernel.tile
    to_registers = next(access for access in accesses(kernel) if access.name == "K of stage 0 to registers")
    if facts["stages"] == 1:
        turns = (
            "There is one buffer of K and one of V, and they alternate: V of this step is loaded while the first"
            " product reads K, and K of the next while the second product reads V. Two barriers per step."
        )
    else:
        turns = (
            f"There are {facts['stages']} buffers of K and of V: both of the next step are in flight while this one"
            " computes. One barrier per step: what was loaded has arrived, and what will be overwritten has been read."
        )
    if tile["q_in_regs"]:
        q_read = "Q is read once, and its fragments stay in registers for the whole loop."
    else:
        q_read = (
            "Q is read from shared memory again in each step: its fragments would take"
            f" {d.arrays['Q.mma.register'].size // 2} registers per thread, which the accumulators need."
        )
    return {
        "warps": kernel.warps,
        "warp_rows": kernel.block_m // kernel.warps,
        "gmem_bytes": d.facts["gmem.bytes"],
        "chunk_rows": facts["threads"] * 8 // (64 if HEAD_DIM % 64 == 0 else 32),
        "turns": turns,
        "q_read": q_read,
        "matrices": d.facts["K.ldsm.matrices"],
        "per_warp": len(to_registers.addresses) // kernel.warps,
    }


def _sm90_values(kernel: Kernel, _: tables.Chip) -> dict[str, Any]:
    d = kernel.details()
    facts = kernel.facts
    return {
        "warpgroups": facts["warpgroups"],
        "warpgroup_rows": facts["warpgroup_rows"],
        "producer_registers": facts["producer_registers"],
        "consumer_registers": facts["consumer_registers"],
        "box_columns": d.facts["box.columns"],
        "boxes": d.facts["box.count"],
        "steps": HEAD_DIM // d.facts["mma.k"],
        "stride": f"{d.facts['K.descriptor.stride']:,}",
        "registers_p": tables.registers_held(kernel)["P"],
    }


TOURS = (Tour("sm80", "a100", "A100", 10, _sm80_values), Tour("sm90", "rows192", "H100", 12, _sm90_values))


def _portable_large(among: Sequence[Kernel]) -> list[Picture]:
    alike = [
        other for other in among if (other.arch, other.folder, other.entry) == ("sm80", "forward/streamed", "h100")
    ]
    return [warp_picture(find(among, 512, "sm80", "h100", "forward/streamed")), budget_picture(alike, None)]


def _hopper_large(among: Sequence[Kernel]) -> list[Picture]:
    alike = [other for other in among if other.arch == "sm90" and other.folder.startswith("forward/pair")]
    runs = [(kernel, replace(CAUSAL, len_q=1024, len_k=1024, head_dim=kernel.head_dim)) for kernel in alike]
    return [budget_picture(alike, None), gantt_picture(runs, sms=10)]


def _float8(among: Sequence[Kernel]) -> list[Picture]:
    alike = [other for other in among if other.is_float8 and other.entry == "plain"]
    kernel = find(alike, HEAD_DIM, "sm90", folder="forward/fp8_rows")
    threads = thread_value_picture(kernel, ["S.mma", "P.mma"])
    return [transposition_picture(kernel), threads, budget_picture(alike, None)]


def _caches(_: Sequence[Kernel]) -> list[Picture]:
    return [cache_picture(cache_kernel(cache_kernels(), HEAD_DIM, "sm90"), CACHES, sms=12)]


# Pages of docs/ and the pictures that they show.
PAGES: dict[str, Callable[[Sequence[Kernel]], list[Picture]]] = {
    "decode.md": _caches,
    "float8.md": _float8,
    "large_head_dims.md": _portable_large,
    "sm90_forward_large.md": _hopper_large,
}


def _wrapped(block: str) -> str:
    """A paragraph's lines, filled again now that its figures are in it."""
    if block.startswith(("#", "|", "!", "    ")):
        return block
    return textwrap.fill(" ".join(block.split()), WIDTH, break_long_words=False, break_on_hyphens=False)


def write(among: Sequence[Kernel], docs: Path) -> list[Path]:
    """Writes the pages, the pictures and their digests under `docs`."""
    folder = docs / FOLDER
    saved: list[Path] = []
    digests: dict[str, str] = {}
    for tour in TOURS:
        drawn = pictures(tour, among)
        saved += [path for picture in drawn.values() for path in picture.save(folder, ("svg",))]
        digests |= _digests(drawn)
        (docs / tour.page).write_text(text(tour, among, drawn))
        saved.append(docs / tour.page)
    for draw in PAGES.values():
        for picture in draw(among):
            saved += picture.save(folder, ("svg",))
            digests[picture.name] = picture.digest()
    for tour in TOURS:
        for path in folder.glob(f"{tour.arch}_*.svg"):
            if path not in saved:
                path.unlink()  # of an earlier version of the tours
    (folder / "digests.json").write_text(json.dumps(digests, indent=1) + "\n")
    return [folder / "digests.json", *saved]


def stale(among: Sequence[Kernel], docs: Path) -> list[str]:
    """What under `docs` no longer says what the code does."""
    folder = docs / FOLDER
    path = folder / "digests.json"
    committed = json.loads(path.read_text()) if path.exists() else {}
    found = []
    for tour in TOURS:
        drawn = pictures(tour, among)
        found += _stale_pictures(drawn.values(), committed, folder)
        page = docs / tour.page
        if not page.exists() or page.read_text() != text(tour, among, drawn):
            found.append(str(page))
    for name, draw in PAGES.items():
        shown = draw(among)
        found += _stale_pictures(shown, committed, folder)
        page = docs / name
        written = page.read_text() if page.exists() else ""
        if not all(f"({FOLDER}/{picture.name}.svg)" in written for picture in shown):
            found.append(str(page))
    return found


def _stale_pictures(drawn: Iterable[Picture], committed: dict[str, str], folder: Path) -> list[str]:
    return [
        f"{folder / picture.name}.svg"
        for picture in drawn
        if committed.get(picture.name) != picture.digest() or not (folder / f"{picture.name}.svg").exists()
    ]


def _digests(drawn: dict[str, Picture]) -> dict[str, str]:
    return {picture.name: picture.digest() for picture in drawn.values()}
