"""Builds the wheel: Python files, csrc/'s headers, the schedules' sources, the library and the compiler's report.

build_tools/extension.py says how torch.utils.cpp_extension compiles them. Choices, by environment:
  FLASH_CUTE_ARCHS        "all" (default), "native" (this machine's GPU), or a list such as "sm80;sm90"
  FLASH_CUTE_HEAD_DIMS    a list such as "64;128"; default: all of build_tools/config.py
  FLASH_CUTE_JOBS         compiler jobs (MAX_JOBS too); default: the cores, fewer where memory is short
  FLASH_CUTE_RACE_TEST=1  kernels that wait at random at every hand-over, to run the tests on
  FLASH_CUTE_LINEINFO=1   source lines for bench/profile.py, and a larger library
  FLASH_CUTE_SCHEDULES=1  the kernels of flash_cute.schedules too, else they are compiled on first use
  FLASH_CUTE_NO_CUDA=1    no kernels: the operators and their checks alone, for the CPU
  CUDA_HOME, CUTLASS_DIR, CXX   where to find the toolkit, CUTLASS and the host compiler
"""

import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # a PEP 517 build does not put it there

from build_tools.extension import BuildLibrary, library_extension  # noqa: E402
from build_tools.manylinux import platform_tag  # noqa: E402
from build_tools.schedules import HOST_FILES  # noqa: E402


class BuildPy(build_py):
    """Starts from an empty folder, since files of an earlier build would be packed too; adds what is compiled later."""

    def run(self) -> None:
        package = Path(self.build_lib) / "flash_cute"
        shutil.rmtree(package, ignore_errors=True)
        super().run()
        if self.editable_mode:
            return
        sources = [ROOT / "csrc" / name for name in HOST_FILES]
        for source in sorted((ROOT / "csrc").rglob("*")):
            if source.suffix in (".h", ".cuh", ".json") or source in sources:
                target = package / source.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)


class BdistWheel(bdist_wheel):
    """Names the systems on which what was built loads: `linux`, setuptools' own word, would be this one alone."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, system = super().get_tag()
        build_lib = Path(self.get_finalized_command("build").build_lib)
        return python, abi, platform_tag(system, build_lib.rglob("*.so"))


setup(
    ext_modules=[library_extension()],  # torch.utils.cpp_extension.CUDAExtension
    cmdclass={"bdist_wheel": BdistWheel, "build_py": BuildPy, "build_ext": BuildLibrary},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
