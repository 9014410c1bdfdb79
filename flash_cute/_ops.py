"""Loads the compiled library and attaches to its operators what Python holds.

The schemas, the input checks and the CUDA kernels are in the library (csrc/api/ops.cpp). Here come the
fake (shape) functions for torch.compile, the CPU kernels and vmap's refusal; autograd.py adds autograd.
"""

import re
from typing import NoReturn

import torch
from torch import Tensor

from . import _built, autograd, cpu


def _load_library() -> None:
    try:
        torch.ops.load_library(str(_built.folder() / _built.LIBRARY))
    except OSError as error:
        raise ImportError(
            f"flash_cute's compiled library does not load under torch {torch.__version__}: flash_cute needs "
            f"torch >= 2.10 on Linux. The loader said: {error}"
        ) from error


def _fake_fwd(q: Tensor, k: Tensor, v: Tensor, causal: str, scale: float | None, backend: str) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=lse_dtype)


def _refuse_vmap(info: object, in_dims: object, *args: object) -> NoReturn:
    raise NotImplementedError(
        "flash_cute.fwd does not work under vmap: it takes batches already; put the mapped dim into q's, k's and "
        "v's first dim (for example q.flatten(0, 1)) and call it once."
    )


# How the sentence of a check in csrc/api begins: "flash_cute: <argument>: "; those of CUDA's failures do not.
_REFUSAL = re.compile(r"flash_cute: \w+: ")


def raise_refusal(error: RuntimeError) -> None:
    """Raise ValueError if `error` is a check's: up to torch 2.13 it would be one already, torch 2.15 lost the type."""
    if _REFUSAL.match(str(error)):
        raise ValueError(str(error)) from None


_load_library()
_library = torch.library.Library("flash_cute", "FRAGMENT")
for _name in ("fwd", "_fwd"):
    torch.library.register_fake(f"flash_cute::{_name}", _fake_fwd, lib=_library)
    torch.library.register_vmap(f"flash_cute::{_name}", _refuse_vmap, lib=_library)
    _library.impl(_name, cpu.fwd, "CPU")
autograd.register(_library)

# Looked up once: api.py calls the first two on every forward.
fwd = torch.ops.flash_cute.fwd.default
fwd_without_autograd = torch.ops.flash_cute._fwd.default
fwd_plan = torch.ops.flash_cute.fwd_plan.default
