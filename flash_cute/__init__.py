"""flash_cute: exact attention for PyTorch, in CuTe kernels compiled ahead of time.

>>> import torch, flash_cute
>>> q, k, v = (torch.randn(2, 8, 1024, 64) for _ in range(3))
>>> out = flash_cute.attention(q, k, v, causal=True)
>>> print(flash_cute.explain(q, k, v, causal=True))  # doctest: +SKIP
"""

__version__ = "0.2.0"

from typing import TYPE_CHECKING

from . import _numpy, reference  # noqa: F401 (_numpy is the first to import torch)
from .api import attention, backends, bwd, fwd
from .explain import Explanation, explain
from .kvcache import append_kvcache, attention_with_kvcache, kvcache_workspace_bytes
from .mask import Mask
from .quantize import Fp8Descales, quantize_fp8
from .tune import Tuning, tune, use_tuning
from .tune._table import load_from_environment as _load_from_environment
from .varlen import varlen_attention, varlen_bwd, varlen_fwd

__all__ = [
    "Explanation",
    "Fp8Descales",
    "Mask",
    "Tuning",
    "__version__",
    "append_kvcache",
    "attention",
    "attention_with_kvcache",
    "backends",
    "bwd",
    "explain",
    "fwd",
    "kvcache_workspace_bytes",
    "quantize_fp8",
    "reference",
    "tune",
    "use_tuning",
    "varlen_attention",
    "varlen_bwd",
    "varlen_fwd",
]

_load_from_environment()

if TYPE_CHECKING:
    from . import integrations as integrations
else:  # type checkers would take any name for an attribute

    def __getattr__(name: str) -> object:
        """`flash_cute.integrations`, imported on first use."""
        if name != "integrations":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return import_module(f".{name}", __name__)
