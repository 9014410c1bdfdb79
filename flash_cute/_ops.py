"""Loads the compiled library and attaches to its operators what Python holds.

The schemas, the input checks and the CUDA kernels are in the library (csrc/api/ops*.cpp). Here come the
fakes for torch.compile, the CPU kernels, vmap's refusal and, once they are imported, what DTensor and
FlopCounterMode ask for; autograd.py adds autograd.
An operator has a twin `_<name>` without autograd: the same kernel, 12 us per call cheaper (torch 2.11).
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from . import _built, _fakes, _layers, cpu, cpu_bwd, cpu_fp8, cpu_kvcache, cpu_quantize, cpu_varlen, flops, sharding
from ._torch import direct_call
from ._when_imported import when_imported


def refuse_vmap(*args: object) -> NoReturn:
    raise NotImplementedError(
        "flash_cute's attention and its backward do not work under vmap: they take batches already; put the mapped dim "
        "into the first dim of q, k and v (for example q.flatten(0, 1)), or pack its sequences, and call it once."
    )


def autocast(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Inside `torch.autocast` the tensors in its dtype, float64 apart, as `scaled_dot_product_attention` has them.

    Sinks of 16 bits follow; float32 ones stay, since they need not have q's dtype.
    """
    device = q.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return q, k, v, sinks
    dtype = torch.get_autocast_dtype(device)
    narrow = (torch.float32, torch.float16, torch.bfloat16)
    q, k, v = (x.to(dtype) if x.dtype in narrow else x for x in (q, k, v))
    if sinks is not None and sinks.dtype in narrow[1:]:
        sinks = sinks.to(dtype)
    return q, k, v, sinks


_built.load(_built.folder() / _built.LIBRARY)
library: torch.library.Library = torch.library.Library("flash_cute", "FRAGMENT")
for _name, _fake, _cpu in (
    ("fwd", _fakes.fwd, cpu.fwd),
    ("_fwd", _fakes.fwd, cpu.fwd),
    ("bwd", _fakes.bwd, cpu_bwd.bwd),
    ("_bwd", _fakes.bwd, cpu_bwd.bwd),
    ("varlen_fwd", _fakes.varlen_fwd, cpu_varlen.fwd),
    ("_varlen_fwd", _fakes.varlen_fwd, cpu_varlen.fwd),
    ("varlen_bwd", _fakes.varlen_bwd, cpu_varlen.bwd),
    ("_varlen_bwd", _fakes.varlen_bwd, cpu_varlen.bwd),
    ("masked_fwd", _fakes.masked_fwd, cpu.masked_fwd),
    ("_masked_fwd", _fakes.masked_fwd, cpu.masked_fwd),
    ("masked_bwd", _fakes.masked_bwd, cpu_bwd.masked_bwd),
    ("_masked_bwd", _fakes.masked_bwd, cpu_bwd.masked_bwd),
    ("masked_varlen_fwd", _fakes.masked_varlen_fwd, cpu_varlen.masked_fwd),
    ("_masked_varlen_fwd", _fakes.masked_varlen_fwd, cpu_varlen.masked_fwd),
    ("masked_varlen_bwd", _fakes.masked_varlen_bwd, cpu_varlen.masked_bwd),
    ("_masked_varlen_bwd", _fakes.masked_varlen_bwd, cpu_varlen.masked_bwd),
    ("fp8_fwd", _fakes.fp8_fwd, cpu_fp8.fwd),
    ("_fp8_fwd", _fakes.fp8_fwd, cpu_fp8.fwd),
    ("fp8_varlen_fwd", _fakes.fp8_varlen_fwd, cpu_fp8.varlen_fwd),
    ("_fp8_varlen_fwd", _fakes.fp8_varlen_fwd, cpu_fp8.varlen_fwd),
    ("_sdpa", _layers.make_sdpa(_fakes.fwd), _layers.make_sdpa(cpu.fwd)),
    ("_rows_fwd", _layers.make_rows_fwd(_fakes.fwd), _layers.make_rows_fwd(cpu.fwd)),
    (
        "_rows_varlen_fwd",
        _layers.make_rows_varlen_fwd(_fakes.varlen_fwd),
        _layers.make_rows_varlen_fwd(cpu_varlen.fwd),
    ),
    ("_heads_fwd", _layers.make_heads_fwd(_fakes.fwd), _layers.make_heads_fwd(cpu.fwd)),
    *(
        (
            name,
            _layers.make_heads_varlen_fwd(_fakes.varlen_fwd, by_heads),
            _layers.make_heads_varlen_fwd(cpu_varlen.fwd, by_heads),
        )
        for name, by_heads in (("_heads_varlen_fwd", False), ("_cache_varlen_fwd", True))
    ),
):
    torch.library.register_fake(f"flash_cute::{_name}", _fake, lib=library)
    torch.library.register_vmap(f"flash_cute::{_name}", refuse_vmap, lib=library)
    library.impl(_name, _cpu, "CPU")

NO_CACHE_GRADIENT = "flash_cute's attention over a cache of keys and values has no backward"


def refuse_cache_gradients(operator: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel for autograd of an operator without a derivative: it calls `operator`, the same below autograd."""

    def call(*given: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in given):
            raise NotImplementedError(
                f"{NO_CACHE_GRADIENT}, and an argument requires grad; torch.no_grad() says that no gradient is needed."
            )
        return operator(*given)

    return call


for _name, _fake, _cpu in (
    ("kvcache_fwd", _fakes.kvcache_fwd, cpu_kvcache.fwd),
    ("kvcache_fwd_out", _fakes.kvcache_fwd_out, cpu_kvcache.fwd_out),
    ("kvcache_append", _fakes.kvcache_append, cpu_kvcache.append),
):
    for _twin in (_name, f"_{_name}"):
        torch.library.register_fake(f"flash_cute::{_twin}", _fake, lib=library)
        torch.library.register_vmap(f"flash_cute::{_twin}", refuse_vmap, lib=library)
        library.impl(_twin, _cpu, "CPU")
    library.impl(_name, refuse_cache_gradients(getattr(torch.ops.flash_cute, f"_{_name}").default), "Autograd")
    library.impl(f"_{_name}", torch.library.fallthrough_kernel, "Autograd")
    library.impl(f"_{_name}", getattr(torch.ops.flash_cute, _name).default, "Tracer")

# Under vmap PyTorch calls it once for each item.
torch.library.register_fake("flash_cute::quantize_fp8", _fakes.quantize_fp8, lib=library)
library.impl("quantize_fp8", cpu_quantize.quantize, "CPU")

# Looked up once, since the first four of each kind are called in every forward or backward.
fwd = torch.ops.flash_cute.fwd.default
fwd_without_autograd = torch.ops.flash_cute._fwd.default
bwd = torch.ops.flash_cute.bwd.default
bwd_without_autograd = torch.ops.flash_cute._bwd.default
fwd_plan = torch.ops.flash_cute.fwd_plan.default
bwd_plan = torch.ops.flash_cute.bwd_plan.default
varlen_fwd = torch.ops.flash_cute.varlen_fwd.default
varlen_fwd_without_autograd = torch.ops.flash_cute._varlen_fwd.default
varlen_bwd = torch.ops.flash_cute.varlen_bwd.default
varlen_bwd_without_autograd = torch.ops.flash_cute._varlen_bwd.default
varlen_fwd_plan = torch.ops.flash_cute.varlen_fwd_plan.default
varlen_bwd_plan = torch.ops.flash_cute.varlen_bwd_plan.default
masked_fwd = torch.ops.flash_cute.masked_fwd.default
masked_fwd_without_autograd = torch.ops.flash_cute._masked_fwd.default
masked_bwd = torch.ops.flash_cute.masked_bwd.default
masked_bwd_without_autograd = torch.ops.flash_cute._masked_bwd.default
masked_fwd_plan = torch.ops.flash_cute.masked_fwd_plan.default
masked_bwd_plan = torch.ops.flash_cute.masked_bwd_plan.default
masked_varlen_fwd = torch.ops.flash_cute.masked_varlen_fwd.default
masked_varlen_fwd_without_autograd = torch.ops.flash_cute._masked_varlen_fwd.default
masked_varlen_bwd = torch.ops.flash_cute.masked_varlen_bwd.default
masked_varlen_bwd_without_autograd = torch.ops.flash_cute._masked_varlen_bwd.default
masked_varlen_fwd_plan = torch.ops.flash_cute.masked_varlen_fwd_plan.default
masked_varlen_bwd_plan = torch.ops.flash_cute.masked_varlen_bwd_plan.default
fp8_fwd = torch.ops.flash_cute.fp8_fwd.default
fp8_fwd_without_autograd = torch.ops.flash_cute._fp8_fwd.default
fp8_fwd_plan = torch.ops.flash_cute.fp8_fwd_plan.default
fp8_varlen_fwd = torch.ops.flash_cute.fp8_varlen_fwd.default
fp8_varlen_fwd_without_autograd = torch.ops.flash_cute._fp8_varlen_fwd.default
fp8_varlen_fwd_plan = torch.ops.flash_cute.fp8_varlen_fwd_plan.default
quantize_fp8 = torch.ops.flash_cute.quantize_fp8.default
kvcache_fwd_without_autograd = torch.ops.flash_cute._kvcache_fwd.default
kvcache_fwd_out_without_autograd = torch.ops.flash_cute._kvcache_fwd_out.default
kvcache_append_without_autograd = torch.ops.flash_cute._kvcache_append.default
kvcache_plan = torch.ops.flash_cute.kvcache_plan.default
check_kvcache_fwd = torch.ops.flash_cute.check_kvcache_fwd.default
# The layers' operators, which only calls reach that `_layers.is_plain` has looked at.
sdpa = direct_call(torch.ops.flash_cute._sdpa.default)
rows_fwd = direct_call(torch.ops.flash_cute._rows_fwd.default)
rows_varlen_fwd = direct_call(torch.ops.flash_cute._rows_varlen_fwd.default)
heads_fwd = direct_call(torch.ops.flash_cute._heads_fwd.default)
heads_varlen_fwd = direct_call(torch.ops.flash_cute._heads_varlen_fwd.default)
cache_varlen_fwd = direct_call(torch.ops.flash_cute._cache_varlen_fwd.default)


# What torch.jit.trace records of `_fwd`: a traced graph may be given inputs that require grad.
library.impl("_fwd", lambda *args: fwd(*args), "Tracer")
library.impl("_varlen_fwd", lambda *args: varlen_fwd(*args), "Tracer")
library.impl("_masked_fwd", lambda *args: masked_fwd(*args), "Tracer")
library.impl("_masked_varlen_fwd", lambda *args: masked_varlen_fwd(*args), "Tracer")
library.impl("_fp8_fwd", lambda *args: fp8_fwd(*args), "Tracer")
library.impl("_fp8_varlen_fwd", lambda *args: fp8_varlen_fwd(*args), "Tracer")
# As the other twins without autograd: autograd.py.
for _name in ("_sdpa", "_rows_fwd", "_rows_varlen_fwd", "_heads_fwd", "_heads_varlen_fwd", "_cache_varlen_fwd"):
    library.impl(_name, torch.library.fallthrough_kernel, "Autograd")
when_imported("torch.utils.flop_counter", flops.register)
when_imported("torch.distributed.tensor", sharding.register)
