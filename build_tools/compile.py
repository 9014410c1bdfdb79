"""Compiles and links the library with ninja.

torch.utils.cpp_extension is not used: it has one set of flags for all .cu files (ours need two), refuses
a torch of another CUDA major or of none (the stable ABI does not care), and links what must not be linked.
Objects stay in build/obj, so that a second build compiles only what changed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from .config import ROOT, BuildConfig
from .errors import BuildError
from .instances import instances, write_if_changed, write_instances
from .report import make_report
from .toolchain import CudaToolkit, find_cutlass, find_cxx, find_ninja, find_toolkit, find_torch

INST = ROOT / "build/inst"
OBJ = ROOT / "build/obj"

# The oldest torch claimed: with a later target the library fails there as soon as it passes a dtype.
TORCH_TARGET = "0x020a000000000000"

CXX_FLAGS = ["-O2", "-DNDEBUG", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
# -lineinfo, so that a profiler shows source lines: four times the code in an object, 0.4 MB a file in the wheel.
NVCC_FLAGS = [
    *("-O3", "-DNDEBUG", "-std=c++20", "--expt-relaxed-constexpr", "-lineinfo"),
    *("-Xptxas", "-v", "-Xcompiler", "-fPIC,-fvisibility=hidden"),
]
# libtorch by name, so that it is NEEDED; of CUDA nothing is: the runtime is linked statically, and the
# one function of torch_cuda that is called is a weak symbol. -z defs: a kernel that the dispatcher names and no
# file holds is an error here, and not when the library is loaded.
LINK_FLAGS = [
    *("-shared", "-Wl,-z,defs", "-Wl,--exclude-libs,ALL", "-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed"),
    *("-ltorch_cpu", "-lc10", "-lrt", "-lpthread", "-ldl"),
]


def build_library(config: BuildConfig, target: Path, report: Path) -> None:
    """Builds the shared library `target` and the compile report `report`."""
    if not sys.platform.startswith("linux"):
        raise BuildError(f"the library builds on Linux only, and this is {sys.platform}.")
    toolkit = find_toolkit() if config.cuda else None
    built = instances(config)
    write_instances(INST, built)
    objects = [OBJ / f"{Path(i.file_name).stem}.o" for i in built]
    library = OBJ / target.name
    write_if_changed(ROOT / "build/build.ninja", _ninja_file(config, toolkit, library))

    print(f"flash_cute: {len(built)} kernel files, {config.jobs} jobs, " + _summary(toolkit), flush=True)
    start = time.monotonic()
    command = [find_ninja(), "-f", "build/build.ninja", "-j", str(config.jobs), str(library)]
    # The wrapper's Python is not in the command line, so that another Python does not rebuild everything.
    if subprocess.run(command, cwd=ROOT, env={**os.environ, "FLASH_CUTE_PYTHON": sys.executable}).returncode:
        raise BuildError("compiling failed; the compiler's message is above.")
    print(f"flash_cute: built in {time.monotonic() - start:.0f} s", flush=True)

    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(library, target)
    logs = [path.with_suffix(".o.json") for path in objects]
    report.write_text(json.dumps(make_report(toolkit.version if toolkit else "", logs), indent=1) + "\n")


def _summary(toolkit: CudaToolkit | None) -> str:
    return f"nvcc {toolkit.version} of {toolkit.home}" if toolkit else "no CUDA"


def _ninja_file(config: BuildConfig, toolkit: CudaToolkit | None, library: Path) -> str:
    cxx, torch = find_cxx(), find_torch()
    includes = ["-Icsrc", f"-I{INST}"]
    cxx_flags = [*CXX_FLAGS, *includes, f"-isystem {torch}/include"]
    cxx_flags += [f"-isystem {torch}/include/torch/csrc/api/include", f"-DTORCH_TARGET_VERSION={TORCH_TARGET}"]
    link_inputs = []
    lines = ["ninja_required_version = 1.5", "builddir = build", f"cxx = {cxx}"]
    if toolkit is None:
        cxx_flags.append("-DFLASH_CUTE_NO_CUDA")
    else:
        cxx_flags.append(f"-isystem {toolkit.include}")
        nvcc_flags = [*NVCC_FLAGS, f"-ccbin {cxx}", *includes, f"-isystem {find_cutlass()}"]
        nvcc_flags += ["-DFLASH_CUTE_RACE_TEST"] * config.race_test
        lines += [
            f"nvcc = {toolkit.nvcc}",
            f"nvcc_flags = {' '.join(nvcc_flags)}",
            "rule nvcc",
            '  command = "$$FLASH_CUTE_PYTHON" build_tools/nvcc.py $out.json'
            " $nvcc -MD -MF $out.d $nvcc_flags -gencode=$gencode -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
            "  description = nvcc $in",
        ]
        link_inputs.append(str(toolkit.cudart))
    lines += [
        f"cxx_flags = {' '.join(cxx_flags)}",
        "rule cxx",
        "  command = $cxx -MD -MF $out.d $cxx_flags -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = c++ $in",
        "rule link",
        f"  command = $cxx $in -o $out -L{torch}/lib {' '.join(LINK_FLAGS)}",
        "  description = link $out",
    ]
    objects = []
    for instance in sorted(instances(config), key=lambda i: (-i.head_dim, i.direction)):  # the slowest files first
        out = OBJ / f"{Path(instance.file_name).stem}.o"
        gencode = config.gencode[instance.arch]
        lines += [f"build {out} | {out}.json: nvcc {INST / instance.file_name}", f"  gencode = {gencode}"]
        objects.append(str(out))
    for source in sorted((ROOT / "csrc/api").glob("*.cpp")):
        out = OBJ / f"api_{source.stem}.o"
        lines.append(f"build {out}: cxx {source.relative_to(ROOT)}")
        objects.append(str(out))
    lines.append(f"build {library}: link {' '.join(objects + link_inputs)}")
    return "\n".join(lines) + "\n"
