"""Builds the wheel: Python files, csrc/'s headers, the library and the compiler's report on it.

Choices, by environment:
  FLASH_CUTE_ARCHS        "all" (default), "native" (this machine's GPU), or a list such as "sm80;sm90"
  FLASH_CUTE_HEAD_DIMS    a list such as "64;128"; default: all of build_tools/config.py
  FLASH_CUTE_JOBS         compiler jobs (MAX_JOBS too); default: the cores, fewer where memory is short
  FLASH_CUTE_RACE_TEST=1  kernels that wait at random at every hand-over, to run the tests on
  FLASH_CUTE_NO_CUDA=1    no kernels: the operators and their checks alone, for the CPU
  CUDA_HOME, CUTLASS_DIR, CXX   where to find the toolkit, CUTLASS and the host compiler
"""

import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # a PEP 517 build does not put it there

from build_tools.compile import build_library  # noqa: E402
from build_tools.config import read_config  # noqa: E402


class BuildPy(build_py):
    """Starts from an empty folder, since files of an earlier build would be packed too; adds the headers."""

    def run(self) -> None:
        package = Path(self.build_lib) / "flash_cute"
        shutil.rmtree(package, ignore_errors=True)
        super().run()
        if self.editable_mode:
            return
        for header in sorted((ROOT / "csrc").rglob("*")):
            if header.suffix in (".h", ".cuh"):
                target = package / header.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(header, target)


class BuildLibrary(build_ext):
    """Compiles with ninja instead of setuptools' own compiler calls."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        build_library(read_config(), target, target.parent / "compile_report.json")

    def copy_extensions_to_source(self) -> None:
        """An editable install: the report goes beside the library."""
        super().copy_extensions_to_source()
        shutil.copy2(Path(self.build_lib) / "flash_cute/compile_report.json", ROOT / "flash_cute")


setup(
    # Not a Python module: torch.ops.load_library loads it. As an Extension it makes the wheel a
    # platform wheel, and abi3 by its name.
    ext_modules=[Extension("flash_cute._C", sources=[], py_limited_api=True)],
    cmdclass={"build_py": BuildPy, "build_ext": BuildLibrary},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
