"""What is to be built: the environment's choices, checked, with their defaults."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .errors import BuildError

ROOT = Path(__file__).resolve().parent.parent

# Head dims of the instances. Every other head dim runs in the smallest one that holds it.
HEAD_DIMS = (32, 64, 96, 128, 192, 256, 320, 512, 1024)

# The code each folder of csrc/ is compiled to. sm80/: one PTX, and machine code for the chips that do
# not run each other's (sm_80 code runs on 8.6 and 8.9; without sm_90 an H100's driver would compile
# the PTX). sm90/: wgmma and TMA exist in sm_90a alone.
GENCODE = {
    "sm80": "arch=compute_80,code=[sm_80,sm_90,sm_120,compute_80]",
    "sm90": "arch=compute_90a,code=sm_90a",
}

GIB_PER_JOB = 6  # what one nvcc job on a CuTe kernel takes at its peak


@dataclass(frozen=True)
class BuildConfig:
    gencode: dict[str, str]  # folder of csrc/ -> nvcc's -gencode argument; empty: no kernels
    head_dims: tuple[int, ...]
    jobs: int
    race_test: bool = False  # kernels that are late at random wherever a buffer or a turn changes hands
    lineinfo: bool = False  # source lines for a profiler: two to three times the machine code
    schedules: bool = False  # the kernels of flash_cute.schedules too

    @property
    def cuda(self) -> bool:
        return bool(self.gencode)


def read_config(environ: dict[str, str] | None = None) -> BuildConfig:
    """The build asked for by FLASH_CUTE_NO_CUDA, _ARCHS, _HEAD_DIMS, _RACE_TEST, _LINEINFO, _SCHEDULES and _JOBS (or
    MAX_JOBS)."""
    env = dict(os.environ if environ is None else environ)
    jobs = _jobs(env)
    if _is_set(env, "FLASH_CUTE_NO_CUDA"):
        return BuildConfig(gencode={}, head_dims=(), jobs=jobs)
    names = ("race_test", "lineinfo", "schedules")
    options = {name: _is_set(env, f"FLASH_CUTE_{name.upper()}") for name in names}
    return BuildConfig(gencode=_gencode(env), head_dims=_head_dims(env), jobs=jobs, **options)


def _is_set(env: dict[str, str], name: str) -> bool:
    return env.get(name, "0") not in ("", "0")


def _items(text: str) -> list[str]:
    return [item for item in re.split(r"[;,\s]+", text) if item]


def _gencode(env: dict[str, str]) -> dict[str, str]:
    wanted = env.get("FLASH_CUTE_ARCHS") or "all"
    present = list(GENCODE)
    if wanted == "all":
        return {arch: GENCODE[arch] for arch in present}
    if wanted == "native":
        return _native_gencode(present)
    chosen = _items(wanted)
    for arch in chosen:
        if arch not in present:
            raise BuildError(
                f"FLASH_CUTE_ARCHS: expected 'all', 'native' or a list of {', '.join(present)}, got {arch!r}."
            )
    return {arch: GENCODE[arch] for arch in present if arch in chosen}


def _native_gencode(present: list[str]) -> dict[str, str]:
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        chips = sorted({int(line.replace(".", "")) for line in answer.split()})
    except (OSError, subprocess.CalledProcessError, ValueError):
        chips = []
    if not chips:
        raise BuildError(
            "FLASH_CUTE_ARCHS=native needs a GPU that nvidia-smi can see;"
            f" name the architectures instead: FLASH_CUTE_ARCHS='{';'.join(present)}'."
        )
    if chips[0] < 80:
        raise BuildError(f"this machine's GPU is sm_{chips[0]}, and the kernels need sm_80 (Ampere) or later.")
    codes = ",".join(f"sm_{chip}" for chip in chips)
    gencode = {"sm80": f"arch=compute_80,code=[{codes}]"}
    if 90 in chips and "sm90" in present:
        gencode["sm90"] = GENCODE["sm90"]
    return gencode


def _head_dims(env: dict[str, str]) -> tuple[int, ...]:
    text = env.get("FLASH_CUTE_HEAD_DIMS")
    if not text:
        return HEAD_DIMS
    known = {str(head_dim) for head_dim in HEAD_DIMS}
    for item in _items(text):
        if item not in known:
            raise BuildError(
                f"FLASH_CUTE_HEAD_DIMS: expected a list of {', '.join(map(str, HEAD_DIMS))}, got {item!r};"
                " other sizes run in the next larger one."
            )
    return tuple(sorted({int(item) for item in _items(text)}))


def _jobs(env: dict[str, str]) -> int:
    for name in ("FLASH_CUTE_JOBS", "MAX_JOBS"):
        text = env.get(name)
        if text:
            if not text.isdigit() or int(text) < 1:
                raise BuildError(f"{name}: expected a whole number of at least 1, got {text!r}.")
            return int(text)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, _free_bytes() // (GIB_PER_JOB << 30)))


def _free_bytes() -> int:
    """Memory a build may take: what the kernel calls available, less where a cgroup allows less."""
    limits = [1 << 62]
    try:
        meminfo = Path("/proc/meminfo").read_text()
        limits.append(int(re.search(r"MemAvailable:\s+(\d+) kB", meminfo)[1]) * 1024)  # type: ignore[index]
    except (OSError, TypeError):
        pass
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text()
        if limit != "max":
            limits.append(int(limit) - int(used))
    except (OSError, ValueError):
        pass
    return max(0, min(limits))
