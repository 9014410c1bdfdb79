"""FLASH_CUTE_SCHEDULES=1: compiles the kernels of flash_cute.schedules with the library.

By the package's own code, which compiles them on first use otherwise; it is loaded as a file, since flash_cute cannot
be imported before its library is there.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from .compiler import LINKS
from .config import ROOT, BuildConfig
from .errors import BuildError
from .toolchain import CudaToolkit


def _load() -> ModuleType:
    name = "flash_cute_schedules_compile"
    spec = importlib.util.spec_from_file_location(name, ROOT / "flash_cute/schedules/_compile.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


_compile = _load()
HOST_FILES: tuple[str, ...] = _compile.HOST_FILES
FILES: tuple[str, ...] = (_compile.LIBRARY, _compile.REPORT)


def build_schedules(config: BuildConfig, toolkit: CudaToolkit, cxx: str, folder: Path) -> None:
    """The library and the compiler's report, in `folder`, for the GPUs that the sm80 kernels are compiled for."""
    if "sm80" not in config.gencode:
        raise BuildError("FLASH_CUTE_SCHEDULES=1 needs the sm80 kernels: leave FLASH_CUTE_ARCHS out, or name sm80 too.")
    include = LINKS / "cuda/include"  # as the library's: the names are the same in every build
    includes = (LINKS / "cutlass", include, *(path for path in (include / "cccl",) if path.exists()))
    tools = _compile.Toolchain(LINKS / "cuda/bin/nvcc", cxx, toolkit.cudart, includes, LINKS / "torch")
    csrc, gencode = ROOT / "csrc", config.gencode["sm80"]
    work = ROOT / "build/schedules" / _compile.digest(csrc, tools, gencode)
    count = len(_compile.instances())
    print(f"flash_cute: {count} kernel files of flash_cute.schedules, {config.jobs} jobs", flush=True)
    try:
        _compile.build(csrc, tools, gencode, work, folder / _compile.LIBRARY, jobs=config.jobs)
    except _compile.CompileError as error:
        raise BuildError(str(error)) from error
