"""The library, built by torch.utils.cpp_extension, and what that does not offer.

CUDAExtension names torch's and CUDA's folders; BuildExtension writes build/obj/build.ninja, runs it and links. What is
different here, and why:

* Flags differ by folder of csrc/: sm80/ is compiled for several chips, sm90/ for sm_90a alone, and BuildExtension has
  one list for all .cu files. compiler.py, which stands before nvcc, picks those of each file's folder.
* BuildExtension refuses a torch of another CUDA major, and CUDAExtension one without CUDA. The stable ABI does not
  care, so CUDA_HOME is set here, and the .cu files join the sources when that check is done.
* nvcc may come from PyPI: it, CUTLASS and torch are then in a folder of pip's that lives as long as the build. So the
  commands name links in build/links/, and a second build compiles only what changed.
* The library must load under a torch of any CUDA release: nothing of CUDA is linked but the static runtime. And on
  systems older than the one that builds it: manylinux.py.
* The compiler's account of every kernel is kept: flash_cute/compile_report.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from setuptools import Extension
from torch.utils import cpp_extension
from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension

from .compiler import LINKS, ONLY
from .config import ROOT, read_config
from .errors import BuildError
from .instances import instances, source_files, write_instances
from .manylinux import libstdcxx, make_stubs
from .report import make_report
from .schedules import FILES as SCHEDULES_FILES
from .schedules import build_schedules
from .toolchain import CudaToolkit, find_cutlass, find_cxx, find_ninja, find_toolkit, install_tools

INST = ROOT / "build/inst"
OBJ = ROOT / "build/obj"
STUBS = ROOT / "build/stubs"

# The oldest torch claimed: with a later target the library fails there as soon as it passes a dtype.
TORCH_TARGET = "0x020a000000000000"

CXX_FLAGS = ["-O2", "-DNDEBUG", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
NVCC_FLAGS = [
    *("-O3", "-DNDEBUG", "-std=c++20", "-compress-mode=size"),
    *("-Xptxas", "-v", "-Xcompiler", "-fPIC,-fvisibility=hidden"),
    # BuildExtension defines these against ambiguous operators of ATen's types; CuTe needs CUDA's operators.
    *("-U__CUDA_NO_HALF_OPERATORS__", "-U__CUDA_NO_HALF_CONVERSIONS__"),
    *("-U__CUDA_NO_HALF2_OPERATORS__", "-U__CUDA_NO_BFLOAT16_CONVERSIONS__"),
]
# libtorch by name, so that it is NEEDED; of CUDA nothing is: the runtime is linked statically, and the
# one function of torch_cuda that is called is a weak symbol. -z defs: a kernel that the dispatcher names and no
# file holds is an error here, and not when the library is loaded.
LINK_FLAGS = [
    *("-Wl,-z,defs", "-Wl,--exclude-libs,ALL", "-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed"),
    *("-ltorch_cpu", "-lc10"),
]


def library_extension() -> Extension:
    """flash_cute._C, which torch.ops.load_library loads: as an Extension, though no module, it makes the wheel abi3."""
    cpp_extension.CUDA_HOME = str(LINKS / "cuda")
    cuda = read_config().cuda
    make = CUDAExtension if cuda else CppExtension
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc/api").glob("*.cpp"))
    ext: Extension = make("flash_cute._C", sources, py_limited_api=True)
    # As system headers, so that -Wall is about ours; kernels include none of torch's.
    system = [f"-isystem{_through_link(folder)}" for folder in ext.include_dirs]
    ext.include_dirs = [str(ROOT / "csrc"), str(INST)]
    ext.library_dirs = [_through_link(folder) for folder in ext.library_dirs]
    ext.libraries = []
    ext.extra_link_args = LINK_FLAGS
    cxx_flags = [*CXX_FLAGS, *system, f"-DTORCH_TARGET_VERSION={TORCH_TARGET}"]
    ext.extra_compile_args = {"cxx": cxx_flags + ["-DFLASH_CUTE_NO_CUDA"] * (not cuda), "nvcc": []}
    return ext


def _through_link(folder: str) -> str:
    return folder.replace(os.path.dirname(torch.__file__), str(LINKS / "torch"))


class BuildLibrary(BuildExtension):
    """Builds what `library_extension` describes, for the choices that the environment makes."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        with contextlib.suppress(BuildError):  # later: BuildExtension looks for ninja on PATH at once
            os.environ["PATH"] += f"{os.pathsep}{Path(find_ninja()).parent}"
        super().__init__(*arguments, **options)

    def finalize_options(self) -> None:
        super().finalize_options()
        self.build_temp = str(OBJ)  # theirs is named after Python's version, ours serves every one
        self.include_dirs: list[str] = []  # Python's, of which nothing is used
        self.library_dirs: list[str] = []

    def build_extensions(self) -> None:
        if not sys.platform.startswith("linux"):
            raise BuildError(f"the library builds on Linux only, and this is {sys.platform}.")
        if not (Path(torch.__file__).parent / "include/torch/csrc/stable/library.h").exists():
            raise BuildError(f"torch 2.10 or later is needed to build: torch {torch.__version__} has no stable ABI.")
        self.config = read_config()
        self.toolkit = find_toolkit() if self.config.cuda else None
        self.cxx = find_cxx()
        links = {"torch": Path(torch.__file__).parent}
        if self.toolkit:
            links |= {"cuda": self.toolkit.home, "cutlass": find_cutlass()}
        os.environ |= install_tools(self.cxx, find_ninja(), self.toolkit, links)
        os.environ["MAX_JOBS"] = str(self.config.jobs)
        # Python's own flags, such as -g, and its linker may be those of another machine.
        cxx = os.environ["CXX"]
        for name in ("compiler_so", "compiler_so_cxx", "compiler_cxx"):
            self.compiler.set_executable(name, [cxx])
        for name in ("linker_so", "linker_so_cxx"):
            self.compiler.set_executable(name, [cxx, "-shared"])
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        """BuildExtension's own would sort the files by name, and the slowest should not be the last to start."""
        built = instances(self.config)
        write_instances(INST, built)
        kernels = [str((INST / file.name).relative_to(ROOT)) for file in source_files(built)]
        print(f"flash_cute: {len(kernels)} kernel files, {self.config.jobs} jobs, {_name(self.toolkit)}", flush=True)
        (OBJ / ".ninja_log").unlink(missing_ok=True)  # without it ninja gives every command, and compiler.py skips
        start = time.time()
        try:
            objects: list[str] = self.compiler.compile(
                [*kernels, *ext.sources],
                output_dir=str(OBJ),
                include_dirs=ext.include_dirs,
                extra_postargs={**ext.extra_compile_args, "nvcc": self._nvcc_flags()},
            )
        except RuntimeError as error:
            raise BuildError("compiling failed; the compiler's message is above.") from error
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        libraries = [libstdcxx(), *([str(self.toolkit.cudart)] if self.toolkit else [])]
        self.compiler.link_shared_object(
            objects + libraries,
            str(target),
            library_dirs=ext.library_dirs,
            extra_postargs=[*ext.extra_link_args, *make_stubs(STUBS, self.cxx)],
            target_lang="c++",
        )
        logs = [Path(f"{path}.json") for path in objects]
        compiled = sum(log.stat().st_mtime >= start for log in logs)
        print(f"flash_cute: compiled {compiled} of {len(logs)} files in {time.time() - start:.0f} s", flush=True)
        self._write_report(logs[: len(kernels)], target.parent / "compile_report.json")
        if self.config.schedules and self.toolkit:
            build_schedules(self.config, self.toolkit, self.cxx, target.parent)

    def copy_extensions_to_source(self) -> None:
        """An editable install: what is beside the library goes along."""
        super().copy_extensions_to_source()
        made = Path(self.build_lib) / "flash_cute"
        for name in ("compile_report.json", *(SCHEDULES_FILES if self.config.schedules else ())):
            shutil.copy2(made / name, ROOT / "flash_cute")

    def _nvcc_flags(self) -> list[str]:
        config = self.config
        flags = [*NVCC_FLAGS, "-ccbin", self.cxx, "-isystem", str(LINKS / "cutlass")]
        flags += ["-DFLASH_CUTE_RACE_TEST"] * config.race_test + ["-lineinfo"] * config.lineinfo
        return flags + [f"{ONLY}{folder}:-gencode={gencode}" for folder, gencode in config.gencode.items()]

    def _write_report(self, logs: list[Path], path: Path) -> None:
        report = make_report(self.toolkit.version if self.toolkit else "", logs, self.config.lineinfo)
        path.write_text(json.dumps(report, indent=1) + "\n")
        if logs:
            print(f"flash_cute: nvcc's work for these kernels: {report['seconds'] / 60:.1f} core-minutes", flush=True)


def _name(toolkit: CudaToolkit | None) -> str:
    return f"nvcc {toolkit.version} of {toolkit.home}" if toolkit else "no CUDA"
