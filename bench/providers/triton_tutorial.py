"""Triton's fused-attention tutorial, from a copy that the user supplies."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from pathlib import Path
from types import ModuleType

from bench.providers.base import Backend, Unavailable, refuse
from bench.workloads import Workload
from flash_cute._timing import first_line


@functools.cache
def load_tutorial(path: Path | None) -> ModuleType:
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


def triton_tutorial(workload: Workload, path: Path | None) -> Backend:
    refuse(workload, "the tutorial", "Dv", "window", "softcap", "sinks", "alibi", "lengths")
    module = load_tutorial(path)
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
