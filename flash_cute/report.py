"""The compiler's report that was saved when the library was built: registers, spills, seconds per file."""

import json
import re
from functools import cache
from typing import Any

from . import _built

PATH = _built.folder() / "compile_report.json"


@cache
def load() -> dict[str, Any]:
    """The report as data, or an empty one for a build without CUDA kernels.

    Keys: `nvcc` (version), `seconds` (nvcc's processor time for all files: core-seconds), `lineinfo` (whether it was
    built with source lines for a profiler), `kernels` (one entry per kernel and architecture: `file`, `arch`, `kernel`
    (demangled name), `registers`, `spill_stores`, `spill_loads` (bytes), `stack`, `smem_static`),
    `files` (`file`, `seconds`, `gib`: the memory of the compiler's largest process) and `warnings`.
    """
    if not PATH.exists():
        return {"nvcc": None, "seconds": 0.0, "lineinfo": False, "kernels": [], "files": [], "warnings": []}
    report: dict[str, Any] = json.loads(PATH.read_text())
    return report


def built_instances() -> set[tuple[str, str, int, int]]:
    """The architecture, the direction ("fwd" or "bwd"), and the head dims of q and of v of each kernel that was built.

    A file has the kernels of the head dims in its name: sm90_bwd_d32_d64.cu those of 32 and 64. d192_128 is 192 of q
    and 128 of v. sm90_fwd_fp8_d64.cu has those of float8, whose head dims have kernels of other dtypes, too.
    """
    built = set()
    for entry in load()["files"]:
        arch, direction, *_ = entry["file"].split("_")
        for head_dim, head_dim_v in re.findall(r"_d(\d+)(?:_(\d+))?", entry["file"]):
            built.add((arch, direction, int(head_dim), int(head_dim_v or head_dim)))
    return built


def built_architectures() -> set[str]:
    """The kernel folders that were built: a subset of {"sm80", "sm90"}."""
    return {arch for entry in load()["kernels"] for arch in ("sm80", "sm90") if f"::{arch}::" in entry["kernel"]}
