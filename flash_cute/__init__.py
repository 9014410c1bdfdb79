"""flash_cute: exact attention for PyTorch, in CuTe kernels compiled ahead of time.

>>> import torch, flash_cute
>>> q, k, v = (torch.randn(2, 8, 1024, 64) for _ in range(3))
>>> out, lse = flash_cute.fwd(q, k, v, causal=True)
>>> print(flash_cute.explain(q, k, v, causal=True))  # doctest: +SKIP
"""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as _version

from . import reference
from .api import backends, fwd
from .explain import Explanation, explain

try:
    __version__ = _version("flash_cute")
except PackageNotFoundError:  # the package folder was put on the path without being installed
    __version__ = "unknown"

__all__ = ["Explanation", "__version__", "backends", "explain", "fwd", "reference"]
