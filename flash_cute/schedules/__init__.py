"""The family of schedules: the ways to divide an attention tile among warps and shared memory, side by side.

Each is a forward kernel of csrc/studies/schedules, made of the same pieces as the library's own; docs/schedules.md
explains them. They are studies: `flash_cute.fwd` never chooses one, and the library does not contain them. They are
compiled on first use, where nvcc is installed (`pip install '.[schedules]'` in a checkout), or with the library
(FLASH_CUTE_SCHEDULES=1).

    python -m flash_cute.schedules          runs all on the GPU; without one, prints what is known of each
"""

from ._library import SchedulesError, fwd, library, names, report

__all__ = ["SchedulesError", "fwd", "library", "names", "report"]
