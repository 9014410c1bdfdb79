"""Loads the compiled library and attaches to its operators what Python holds.

The schemas, the input checks and the CUDA kernels are in the library (csrc/api/ops.cpp). Here come the
fake (shape) functions for torch.compile, the CPU kernels and vmap's refusal; autograd.py adds autograd.
An operator has a twin `_<name>` without autograd: the same kernel, 12 us a call cheaper (torch 2.11).
"""

import re
from typing import NoReturn

import torch
from torch import Tensor

from . import _built, cpu, cpu_bwd


def _load_library() -> None:
    try:
        torch.ops.load_library(str(_built.folder() / _built.LIBRARY))
    except OSError as error:
        raise ImportError(
            f"flash_cute's compiled library does not load under torch {torch.__version__}: flash_cute needs "
            f"torch >= 2.10 on Linux. The loader said: {error}"
        ) from error


def _fake_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: str,
    window_left: int | None,
    window_right: int | None,
    scale: float | None,
    backend: str,
    deterministic: bool | None = None,
) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=lse_dtype)


def _fake_bwd(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def refuse_vmap(*args: object) -> NoReturn:
    raise NotImplementedError(
        "flash_cute's attention and its backward do not work under vmap: they take batches already; put the mapped dim "
        "into the first dim of q, k and v (for example q.flatten(0, 1)) and call it once."
    )


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inside `torch.autocast` the tensors in its dtype, float64 apart, as `scaled_dot_product_attention` has them."""
    device = q.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    narrow = (torch.float32, torch.float16, torch.bfloat16)
    q, k, v = (x.to(dtype) if x.dtype in narrow else x for x in (q, k, v))
    return q, k, v


# How the sentence of a check in csrc/api begins: "flash_cute: <argument>: "; those of CUDA's failures do not.
_REFUSAL = re.compile(r"flash_cute: \w+: ")


def raise_refusal(error: RuntimeError) -> None:
    """Raise ValueError if `error` is a check's: up to torch 2.13 it would be one already, torch 2.15 lost the type."""
    if _REFUSAL.match(str(error)):
        raise ValueError(str(error)) from None


_load_library()
library: torch.library.Library = torch.library.Library("flash_cute", "FRAGMENT")
for _name, _fake, _cpu in (
    ("fwd", _fake_fwd, cpu.fwd),
    ("_fwd", _fake_fwd, cpu.fwd),
    ("bwd", _fake_bwd, cpu_bwd.bwd),
    ("_bwd", _fake_bwd, cpu_bwd.bwd),
):
    torch.library.register_fake(f"flash_cute::{_name}", _fake, lib=library)
    torch.library.register_vmap(f"flash_cute::{_name}", refuse_vmap, lib=library)
    library.impl(_name, _cpu, "CPU")

# Looked up once, since the first four are called in every forward or backward.
fwd = torch.ops.flash_cute.fwd.default
fwd_without_autograd = torch.ops.flash_cute._fwd.default
bwd = torch.ops.flash_cute.bwd.default
bwd_without_autograd = torch.ops.flash_cute._bwd.default
fwd_plan = torch.ops.flash_cute.fwd_plan.default
bwd_plan = torch.ops.flash_cute.bwd_plan.default
