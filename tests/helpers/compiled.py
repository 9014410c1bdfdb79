"""What tests compile of csrc/, in one go and in the background: minutes of a core, unless the cache has it.

Every module of flash_cute.inspect that some test asks for, so that CuTe's headers are parsed once for all of them, and
a file of flash_cute.schedules. What goes wrong there is said again where it is asked for.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import background

from flash_cute import inspect
from flash_cute.inspect import build
from flash_cute.schedules import _compile, _library

SCHEDULE_HEAD_DIMS = (64, 256)
KERNEL = _compile.Instance("shared_kv", 64)

_BUILD = """
import sys
from pathlib import Path
from flash_cute.inspect import build, kernels

csrc = build.default_csrc()
every = build.units(csrc, build.ARCHS, build.DIRECTIONS, build.HEAD_DIMS)
every += [build.Unit("sm80", "schedules", int(head_dim)) for head_dim in sys.argv[2:]]
build.build_modules(csrc, [build.BAND])
build.build_modules(csrc, [build.CACHES])
build.build_modules(csrc, every)
kernels(Path(sys.argv[1]), archs=("sm80",), directions=("fwd",), head_dims=(64,))
build.build_modules(Path(sys.argv[1]), [build.BAND])
"""


def modules() -> None:
    """Every kernel's module, the mask's, that of caches, the schedules', and those of a csrc with mistakes."""
    site = Path(inspect.__file__).parents[2]
    with tempfile.TemporaryDirectory(prefix="flash_cute_") as name:
        csrc = copy_with_mistakes(Path(name) / "csrc")
        words = [sys.executable, "-c", _BUILD, csrc, *map(str, SCHEDULE_HEAD_DIMS)]
        background.run(words, PYTHONPATH=str(site))


def copy_with_mistakes(folder: Path) -> Path:
    """A copy of csrc with mistakes: no swizzle, threads that load nothing, other keys per step, Q's bytes forgotten, a
    mask that hides the diagonal and one score more, ranges that leave a tile at the band's left edge unmasked, a
    schedule that forgets the last row tile."""
    shutil.copytree(build.default_csrc(), folder)

    def edit(name: str, pattern: str, replacement: str) -> None:
        path = folder / name
        text, count = re.subn(pattern, replacement, path.read_text())
        assert count, f"{name} has no {pattern}"
        path.write_text(text)

    edit("sm80/forward/rows/traits.cuh", r"Swizzle<kAtomColumns == 64 \? 3 : 2, 3, 3>", "Swizzle<0, 3, 3>")
    edit(
        "sm80/forward/rows/traits.cuh",
        r"Layout<Shape<Int<kThreads / kThreadsPerRow>",
        "Layout<Shape<Int<kThreads / 16>",
    )
    edit("sm80/forward/rows/traits.cuh", r"static_assert\(sizeof\(SharedStorage\)[^;]*;", "")
    edit("sm80/forward/rows/tile.h", r"\.block_n = \w+,", ".block_n = 16,")
    edit("sm80/forward/rows/tile.h", r"tile\.block_m \+ 2 \* tile\.stages", "2 * tile.stages")
    edit("core/mask.cuh", r"row \+ params\.band\.upper \+ 1", "row + params.band.upper")
    edit("core/mask.cuh", r"ceil_div\(first_column\(params, last\), kBlockN\)", "first_column(params, last) / kBlockN")
    edit("core/mask.cuh", r"min\(coordinate & \(kPeriod - 1\), 2\)", "min(coordinate & (kPeriod - 1), 1)")
    edit("contract/tile_order.h", r"m_blocks - 1 - rank", "m_blocks - 2 - rank")
    return folder


def schedule() -> list[dict[str, Any]]:
    """What the compiler says of KERNEL's kernels, of both dtypes.

    Raises:
        SchedulesError: there is no compiler.
    """
    csrc, tools, gencode = _library._toolchain()
    with tempfile.TemporaryDirectory(prefix="flash_cute_") as name:
        source = Path(name) / f"{KERNEL.name}.cu"
        source.write_text(KERNEL.source)
        said = _compile.compile_object(source, source.with_suffix(".o"), csrc, tools, gencode)
    return _compile.resources(KERNEL, said)
