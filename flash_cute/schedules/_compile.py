"""Compiles the schedules' library: nvcc for each kernel file, side by side, then one link.

Nothing of flash_cute is imported here, since setup.py loads this file to compile with FLASH_CUTE_SCHEDULES=1; at run
time _library.py does, on first use.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIBRARY = "_schedules.abi3.so"
REPORT = "schedules_report.json"

# csrc/studies/schedules/tile.h: names in the order of the enum, and each one's largest head dim.
MAX_HEAD_DIM = {
    "split_kv": 128,
    "split_kv_2stages": 128,
    "split_q": 128,
    "split_q_2stages": 128,
    "shared_kv": 128,
    "shared_qkv": 128,
    "tiled_qk": 256,
    "tiled_qkv": 512,
}
HEAD_DIMS = (64, 128, 256, 512)

TORCH_TARGET = "0x020a000000000000"  # build_tools/extension.py's: the oldest torch claimed
NVCC_FLAGS = (
    *("-O3", "-DNDEBUG", "-std=c++20", "--expt-relaxed-constexpr"),
    *("-compress-mode=size", "-Xptxas", "-v"),
    *("-Xcompiler", "-fPIC,-fvisibility=hidden"),
)
CXX_FLAGS = ("-O2", "-DNDEBUG", "-std=c++20", "-fPIC", "-fvisibility=hidden")
LINK_FLAGS = (
    *("-Wl,-z,defs", "-Wl,--exclude-libs,ALL", "-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed"),
    *("-ltorch_cpu", "-lc10", "-lrt", "-lpthread", "-ldl"),
)
HOST_FILES = ("studies/schedules/ops.cpp", "api/device.cpp")

_ENTRY = re.compile(r"Compiling entry function '(?P<kernel>\S+)' for '(?P<arch>\S+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")


class CompileError(RuntimeError):
    """A compiler failed; the message has its first errors."""


@dataclass(frozen=True)
class Toolchain:
    """Compilers, and where headers and libraries are."""

    nvcc: Path
    cxx: str
    cudart: Path  # libcudart_static.a
    includes: tuple[Path, ...]  # CuTe's and CUDA's
    torch: Path  # the package's folder

    @property
    def torch_includes(self) -> tuple[Path, ...]:
        return (self.torch / "include", self.torch / "include/torch/csrc/api/include")


@dataclass(frozen=True)
class Instance:
    """The kernels of one schedule at one head dim, both dtypes: one file."""

    schedule: str
    head_dim: int

    @property
    def name(self) -> str:
        return f"{self.schedule}_d{self.head_dim}"

    @property
    def source(self) -> str:
        index = list(MAX_HEAD_DIM).index(self.schedule)
        return (
            '#include "studies/schedules/launch.cuh"\n'
            "namespace flash_cute::studies::schedules {\n"
            f"template cudaError_t launch<Schedule({index}), {self.head_dim}>(DType, int64_t, FwdParams const&, "
            "cudaStream_t);\n"
            "}\n"
        )


def instances() -> tuple[Instance, ...]:
    """Every kernel file, the slowest to compile first."""
    every = [Instance(name, d) for name, most in MAX_HEAD_DIM.items() for d in HEAD_DIMS if d <= most]
    return tuple(sorted(every, key=lambda one: -one.head_dim))


def digest(csrc: Path, tools: Toolchain, gencode: str) -> str:
    """What names a build: the sources, the flags, and which compilers and headers there are."""
    total = hashlib.sha256()
    for path in sorted(csrc.rglob("*")):
        if path.suffix in (".h", ".cuh") or str(path.relative_to(csrc)) in HOST_FILES:
            total.update(f"{path.relative_to(csrc)}\0".encode() + path.read_bytes() + b"\0")
    compilers = (str(tools.nvcc), tools.cxx)
    versions = [subprocess.run([path, "--version"], capture_output=True, text=True).stdout for path in compilers]
    versions += [path.read_text() for folder in tools.includes if (path := folder / "cutlass/version.h").exists()]
    for text in (*versions, *NVCC_FLAGS, *CXX_FLAGS, *LINK_FLAGS, gencode, *map(str, tools.includes), str(tools.torch)):
        total.update(text.encode() + b"\0")
    return total.hexdigest()[:24]


def compile_object(source: Path, target: Path, csrc: Path, tools: Toolchain, gencode: str) -> str:
    """Compiles one file, unless the object is there; returns what the compiler said."""
    log = target.with_suffix(".log")
    if target.exists():
        return log.read_text()
    part = target.with_suffix(".part.o")
    system = [word for folder in tools.includes for word in ("-isystem", str(folder))]
    if source.suffix == ".cu":
        head = [str(tools.nvcc), *NVCC_FLAGS, "-ccbin", tools.cxx, f"-gencode={gencode}"]
    else:
        system += [word for folder in tools.torch_includes for word in ("-isystem", str(folder))]
        head = [tools.cxx, *CXX_FLAGS, f"-DTORCH_TARGET_VERSION={TORCH_TARGET}"]
    command = [*head, f"-I{csrc}", f"-I{target.parent}", *system, "-c", str(source), "-o", str(part)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stdout.splitlines() if "error" in line][:5]
        raise CompileError(f"compiling {source.name} failed:\n" + "\n".join(errors or done.stdout.splitlines()[-20:]))
    log.write_text(done.stdout)
    part.replace(target)  # only now: an interrupted compiler leaves half an object
    return done.stdout


def resources(instance: Instance, output: str) -> list[dict[str, Any]]:
    """What `ptxas -v` says of an instance's kernels."""
    found: list[dict[str, Any]] = []
    for line in output.splitlines():
        if entry := _ENTRY.search(line):
            dtype = "bfloat16" if "bfloat16" in entry["kernel"] else "float16"
            found.append(
                {"schedule": instance.schedule, "head_dim": instance.head_dim, "dtype": dtype, "arch": entry["arch"]}
            )
        elif found and (spills := _SPILLS.search(line)):
            found[-1] |= {"spill_stores": int(spills[1]), "spill_loads": int(spills[2])}
        elif found and (used := _USED.search(line)):
            found[-1]["registers"] = int(used[1])
    return found


def build(
    csrc: Path,
    tools: Toolchain,
    gencode: str,
    work: Path,
    target: Path,
    *,
    jobs: int,
    on_done: Callable[[int, int], None] = lambda done, steps: None,
) -> None:
    """Compiles the library to `target` and the compiler's report beside it.

    Args:
        csrc: the folder of sources.
        tools: what compiles them.
        gencode: nvcc's: the GPUs to compile for.
        work: a folder for objects, which a later build of the same sources takes up again.
        target: the library.
        jobs: compilers at once; each takes up to 4 GB.
        on_done: called after each file with the files compiled and the files of all.

    Raises:
        CompileError: a compiler or the linker failed.
    """
    work.mkdir(parents=True, exist_ok=True)
    (work / "instances.h").write_text("#pragma once\n")  # api/families.h asks for the main library's
    every = instances()
    for one in every:
        (work / f"{one.name}.cu").write_text(one.source)
    sources = [work / f"{one.name}.cu" for one in every] + [csrc / name for name in HOST_FILES]
    objects = [work / f"{source.stem}.o" for source in sources]
    outputs: dict[Path, str] = {}
    with concurrent.futures.ThreadPoolExecutor(max(1, jobs)) as pool:
        running = {
            pool.submit(compile_object, source, made, csrc, tools, gencode): made
            for source, made in zip(sources, objects, strict=True)
        }
        try:
            for future in concurrent.futures.as_completed(running):
                outputs[running[future]] = future.result()
                on_done(len(outputs), len(sources))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    _link(objects, tools, target)
    kernels = [row for one in every for row in resources(one, outputs[work / f"{one.name}.o"])]
    (target.parent / REPORT).write_text(json.dumps({"kernels": kernels}, indent=1) + "\n")


def _link(objects: Sequence[Path], tools: Toolchain, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".part")
    command = [tools.cxx, "-shared", *map(str, objects), str(tools.cudart), f"-L{tools.torch / 'lib'}", *LINK_FLAGS]
    done = subprocess.run([*command, "-o", str(part)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(f"linking {target.name} failed:\n{done.stderr[-2000:]}")
    part.replace(target)  # another process may look


def find_nvcc() -> Path | None:
    """$CUDA_HOME's, $CUDA_PATH's, /usr/local/cuda's, that on PATH, or the one of the nvidia-cuda-nvcc package."""
    import importlib.util

    homes = [Path(home) for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
    homes.append(Path("/usr/local/cuda"))
    if on_path := shutil.which("nvcc"):
        homes.append(Path(on_path).resolve().parent.parent)
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or [] if spec else []:
        homes += sorted(Path(folder).glob("cu*"))
    return next((home / "bin/nvcc" for home in homes if _compiles(home)), None)


def _compiles(home: Path) -> bool:
    """Whether a toolkit is complete: pip may install some of its parts alone."""
    parts = ("bin/nvcc", "bin/ptxas", "nvvm/bin/cicc", "include/cuda_runtime_api.h", "include/crt/host_defines.h")
    return all((home / part).exists() for part in parts) and find_cudart(home) is not None


def find_cudart(home: Path) -> Path | None:
    folders = (home / "lib64", home / "lib", *sorted(home.glob("targets/*/lib")))
    return next((folder / "libcudart_static.a" for folder in folders if (folder / "libcudart_static.a").exists()), None)
