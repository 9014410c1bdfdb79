"""What is measured: flash_cute and its peers, each as one function of q, k and v.

A peer that is not installed, or that refuses a problem, says why; nothing is skipped in silence. What a provider wants
to be done once (a layout, a choice of backend) is done outside the timed calls.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.workloads import Inputs, Workload
from flash_cute._timing import first_line

Function = Callable[..., Any]

OURS = ("flash_cute", "flash_cute:sm80", "flash_cute:sm90", "flash_cute:cpu")
SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
PEERS = (*SDPA, "flash-attn", "fa3", "triton")


class Unavailable(Exception):
    """The provider is not installed, or does not take this problem; the text says which."""


@dataclass(frozen=True)
class Backend:
    """A provider, ready for one workload.

    Attributes:
        call: takes q, k, v as `arrange` returned them; returns what the provider returns.
        context: entered round a batch of calls.
        arrange: from (B, H, N, D) tensors to what `call` takes; done before anything is timed.
        output: from what `call` returns to out (B, H, N, D).
    """

    name: str
    call: Function
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    arrange: Callable[[Inputs], Inputs] = lambda inputs: inputs
    output: Callable[[Any], torch.Tensor] = lambda returned: returned


def is_ours(name: str) -> bool:
    return name.startswith("flash_cute")


def causal_argument(workload: Workload) -> bool | str:
    """What `flash_cute.fwd` takes as `causal`."""
    return False if workload.causal == "none" else workload.causal


def prepare(name: str, workload: Workload, device: torch.device, triton_tutorial: Path | None = None) -> Backend:
    """The provider of that name for one workload; raises `Unavailable`."""
    if name in OURS:
        return _flash_cute(name, workload)
    if name in SDPA:
        return _sdpa(name, workload, device)
    if name == "flash-attn":
        return _flash_attn(workload)
    if name == "fa3":
        return _flash_attn_3(workload)
    if name == "triton":
        return _triton_tutorial(workload, triton_tutorial)
    raise ValueError(f"provider: expected one of {', '.join(OURS + PEERS)}, given {name!r}")


def absent(name: str, triton_tutorial: Path | None = None) -> str | None:
    """Why the provider is not on this machine at all, or None if it is."""
    try:
        if is_ours(name):
            _require_flash_cute()
        elif name == "flash-attn":
            _module("flash_attn")
        elif name == "fa3":
            _module("flash_attn_interface")
        elif name == "triton":
            _load_tutorial(triton_tutorial)
    except Unavailable as reason:
        return str(reason)
    return None


def first_call(backend: Backend, inputs: Inputs) -> torch.Tensor:
    """out of one call, shape (B, H, N, D); raises `Unavailable` with the provider's own words if it refuses."""
    with warnings.catch_warnings(record=True) as refusals:
        warnings.simplefilter("always")
        try:
            with backend.context():
                out = backend.output(backend.call(*backend.arrange(inputs)))
            if out.is_cuda:
                torch.cuda.synchronize(out.device)
            return out
        except torch.cuda.OutOfMemoryError as error:
            raise Unavailable("out of memory") from error
        except Exception as error:
            raise Unavailable("; ".join([first_line(error), *_reasons(refusals, backend.name)])) from error


def _reasons(refusals: list[warnings.WarningMessage], name: str) -> list[str]:
    """What PyTorch warned about the wanted SDPA backend; it also warns about each backend that was not asked for."""
    lines = [str(refusal.message).splitlines()[0].split(" (Triggered", 1)[0] for refusal in refusals]
    return [line for line in lines if "not used because" not in line and "runtime disabled" not in line][:2]


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise Unavailable(f"import {name}: {first_line(error)}") from error


def _require_flash_cute() -> Any:
    flash_cute = _module("flash_cute")
    if not hasattr(flash_cute, "fwd"):
        raise Unavailable("flash_cute is not installed: run pip install . first")
    return flash_cute


def _flash_cute(name: str, workload: Workload) -> Backend:
    flash_cute = _require_flash_cute()
    forced = name.partition(":")[2]
    options = {"backend": forced} if forced else {}
    return Backend(
        name,
        functools.partial(flash_cute.fwd, causal=causal_argument(workload), **options),
        output=lambda returned: returned[0],
    )


def _sdpa(name: str, workload: Workload, device: torch.device) -> Backend:
    if workload.causal == "bottom_right" and workload.N != workload.M:
        raise Unavailable("SDPA aligns its causal mask to the top left: another problem when N and M differ")
    if name == "math":
        _require_memory_for_scores(workload, device)
    options: dict[str, bool] = {"is_causal": workload.is_causal}
    if workload.Hkv != workload.H:
        options["enable_gqa"] = True
    return Backend(
        name,
        functools.partial(F.scaled_dot_product_attention, **options),
        context=functools.partial(sdpa_kernel, SDPA[name]),
    )


def _require_memory_for_scores(workload: Workload, device: torch.device) -> None:
    """The unfused computation keeps N x M scores a head: in float32, with their softmax and their mask."""
    needed = 3 * 4 * workload.B * workload.H * workload.N * workload.M
    limit = 4 << 30
    if device.type == "cuda":
        limit = torch.cuda.mem_get_info(device)[0] * 2 // 3
    if needed > limit:
        raise Unavailable(f"N x M scores need about {needed / 2**30:.0f} GiB")


def _heads_after_length(inputs: Inputs) -> Inputs:
    q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in inputs)
    return q, k, v


def _flash_attn(workload: Workload) -> Backend:
    function = _module("flash_attn").flash_attn_func
    _require_flash_attn_mask(workload)
    return Backend(
        "flash-attn",
        functools.partial(function, causal=workload.is_causal),
        arrange=_heads_after_length,
        output=lambda returned: returned.transpose(1, 2),
    )


def _flash_attn_3(workload: Workload) -> Backend:
    function = _module("flash_attn_interface").flash_attn_func
    _require_flash_attn_mask(workload)
    return Backend(
        "fa3",
        functools.partial(function, causal=workload.is_causal),
        arrange=_heads_after_length,
        output=lambda returned: (returned[0] if isinstance(returned, tuple) else returned).transpose(1, 2),
    )


def _require_flash_attn_mask(workload: Workload) -> None:
    if workload.causal == "top_left" and workload.N != workload.M:
        raise Unavailable("flash-attn aligns its causal mask to the bottom right: another problem when N and M differ")


@functools.cache
def _load_tutorial(path: Path | None) -> ModuleType:
    if path is None:
        raise Unavailable("no copy of Triton's fused-attention tutorial given (--triton-tutorial PATH)")
    if not path.is_file():
        raise Unavailable(f"no file {path}")
    spec = importlib.util.spec_from_file_location("triton_fused_attention_tutorial", path)
    if spec is None or spec.loader is None:
        raise Unavailable(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise Unavailable(f"{path.name}: {first_line(error)}") from error
    if not hasattr(module, "attention"):
        raise Unavailable(f"{path.name} has no function `attention`")
    return module


def _triton_tutorial(workload: Workload, path: Path | None) -> Backend:
    """Triton's fused-attention tutorial, from a copy that the user supplies."""
    module = _load_tutorial(path)
    if workload.dtype != "fp16":
        raise Unavailable("the tutorial's kernel writes fp16 alone")
    if workload.Hkv != workload.H or workload.N != workload.M or workload.N % 128:
        raise Unavailable("the tutorial takes equal heads, and equal lengths that are multiples of 128")
    if workload.D not in (16, 32, 64, 128, 256):
        raise Unavailable("the tutorial takes head dims that are powers of two")
    rest: list[object] = [workload.is_causal, workload.D**-0.5]
    autograd_function = getattr(module, "_attention", None)
    if autograd_function is not None and "warp_specialize" in inspect.signature(autograd_function.forward).parameters:
        rest.append(False)
    return Backend("triton", lambda q, k, v: module.attention(q, k, v, *rest))
