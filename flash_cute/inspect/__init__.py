"""See the kernels: layouts, schedules and budgets, computed from the traits that are compiled.

Needs the extra `inspect` (`pip install '.[inspect]'` in a checkout) and a C++ compiler, and no GPU.
`python -m flash_cute.inspect --help`.
"""

from .build import InspectError
from .kernels import Band, Buffer, Details, Kernel, PackedProblem, Problem, find, kernels

__all__ = ["Band", "Buffer", "Details", "InspectError", "Kernel", "PackedProblem", "Problem", "find", "kernels"]
