"""What is measured: flash_cute and its peers, each as one function.

A peer that is not installed, or that refuses a problem, says why; nothing is skipped in silence. What a provider wants
to be done once (a layout, a choice of backend, the forward whose backward is timed) is done outside the timed calls.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.workloads import Inputs, Workload
from flash_cute._timing import first_line

Function = Callable[..., Any]

DETERMINISTIC = ":deterministic"
OURS = tuple(f"flash_cute{forced}{mode}" for mode in ("", DETERMINISTIC) for forced in ("", ":sm80", ":sm90", ":cpu"))
# What `scaled_dot_product_attention` is made to run; "sdpa" is its own choice, and all that the CPU has beside "math".
SDPA = {
    "sdpa": None,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
PEERS = (*SDPA, "flash-attn", "fa3", f"fa3{DETERMINISTIC}", "triton")


class Unavailable(Exception):
    """The provider is not installed, or does not take this problem; the text says which."""


@dataclass(frozen=True)
class Backend:
    """A provider, ready for one workload.

    Attributes:
        call: takes what `arrange` returned; returns out, or dq, dk and dv, and possibly more behind them.
        context: entered around `arrange`, and around a batch of calls.
        arrange: from (B, H, N, D) tensors to what `call` takes; done before anything is timed.
        restore: from a tensor that `call` returned to (B, H, N, D).
    """

    name: str
    call: Function
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    arrange: Callable[[Inputs], tuple[Any, ...]] = lambda inputs: inputs
    restore: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor


def is_ours(name: str) -> bool:
    return name.startswith("flash_cute")


def is_deterministic(name: str) -> bool:
    return name.endswith(DETERMINISTIC)


def pairs(providers: Sequence[str]) -> list[tuple[str, str]]:
    """(ours, peer) that are compared: each of ours with each peer, and a deterministic mode with its default mode.

    A peer's deterministic mode is compared with ours alone.
    """
    return [
        (ours, peer)
        for ours in providers
        for peer in providers
        if is_ours(ours)
        and (ours == peer + DETERMINISTIC if is_ours(peer) else is_deterministic(ours) or not is_deterministic(peer))
    ]


def own_options(name: str) -> dict[str, Any]:
    """The backend and the mode that a name of ours insists on, as arguments of `flash_cute.attention`."""
    forced = name.removesuffix(DETERMINISTIC).partition(":")[2]
    return {"backend": forced or None, "deterministic": is_deterministic(name) or None}


def causal_argument(workload: Workload) -> bool | str:
    """What `flash_cute.fwd` takes as `causal`."""
    return False if workload.causal == "none" else workload.causal


def prepare(name: str, workload: Workload, device: torch.device, triton_tutorial: Path | None = None) -> Backend:
    """The provider of that name for one workload; raises `Unavailable`."""
    if workload.direction == "bwd" and name in OURS:
        return _flash_cute_backward(name, workload)
    if workload.direction == "bwd" and name in ATEN_BACKWARD and device.type == "cuda":
        return _aten_backward(name, workload)
    if workload.direction == "bwd" and name in FLASH_ATTENTION_3:
        return _flash_attn_3_backward(name, workload)
    forward = _forward(name, workload, device, triton_tutorial)
    if workload.direction == "bwd":
        return _backward_by_autograd(forward)
    return _through_autograd(forward) if workload.direction == "train" else forward


def _forward(name: str, workload: Workload, device: torch.device, triton_tutorial: Path | None) -> Backend:
    if name in OURS:
        return _flash_cute(name, workload)
    if name in SDPA:
        return _sdpa(name, workload, device)
    if name == "flash-attn":
        return _flash_attn(workload)
    if name in FLASH_ATTENTION_3:
        return _flash_attn_3(name, workload)
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
        elif name in FLASH_ATTENTION_3:
            _module("flash_attn_interface")
        elif name == "triton":
            _load_tutorial(triton_tutorial)
    except Unavailable as reason:
        return str(reason)
    return None


def first_call(backend: Backend, workload: Workload, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """out, or dq, dk and dv of one call; raises `Unavailable` with the provider's own words if it refuses."""
    with warnings.catch_warnings(record=True) as refusals:
        warnings.simplefilter("always")
        try:
            with backend.context():
                returned = backend.call(*backend.arrange(inputs))
            first = _first(returned)
            if first.is_cuda:
                torch.cuda.synchronize(first.device)
            results = (first,) if workload.direction == "fwd" else returned[:3]
            return tuple(backend.restore(result) for result in results)
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


def _first(returned: Any) -> torch.Tensor:
    """out, of a forward that returns it alone or with the LSE behind it."""
    out: torch.Tensor = returned[0] if isinstance(returned, tuple) else returned
    return out


def _through_autograd(forward: Backend) -> Backend:
    """Forward and backward as a training step calls them."""

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(_first(forward.call(q, k, v)), (q, k, v), dout)

    def arrange(inputs: Inputs) -> tuple[Any, ...]:
        *leaves, dout = forward.arrange(inputs)
        return *(leaf.detach().requires_grad_() for leaf in leaves), dout

    return replace(forward, call=call, arrange=arrange)


def _backward_by_autograd(forward: Backend) -> Backend:
    """The backward alone of a provider that has no function for it: autograd's host time comes with it."""

    def arrange(inputs: Inputs) -> tuple[Any, ...]:
        *leaves, dout = forward.arrange(inputs)
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        return _first(forward.call(*leaves)), leaves, dout

    return replace(forward, call=functools.partial(torch.autograd.grad, retain_graph=True), arrange=arrange)


def _flash_cute(name: str, workload: Workload) -> Backend:
    flash_cute = _require_flash_cute()
    function = flash_cute.attention if workload.direction == "train" else flash_cute.fwd
    return Backend(name, functools.partial(function, causal=causal_argument(workload), **own_options(name)))


def _flash_cute_backward(name: str, workload: Workload) -> Backend:
    forward = _flash_cute(name, workload).call

    def arrange(inputs: Inputs) -> tuple[Any, ...]:
        q, k, v, dout = inputs
        return dout, q, k, v, *forward(q, k, v)

    flash_cute = _require_flash_cute()
    call = functools.partial(flash_cute.bwd, causal=causal_argument(workload), **own_options(name))
    return Backend(name, call, arrange=arrange)


def _aten_backward(name: str, workload: Workload) -> Backend:
    """The backward that autograd would call behind SDPA, called directly with what its forward saved."""
    if workload.is_causal and workload.N != workload.M:
        raise Unavailable("SDPA aligns its causal mask to the top left: another problem when N and M differ")
    if name == "efficient" and workload.Hkv != workload.H:
        raise Unavailable("PyTorch's memory-efficient attention takes no grouped heads")
    saved, backward = ATEN_BACKWARD[name]

    def arrange(inputs: Inputs) -> tuple[Any, ...]:
        q, k, v, dout = inputs
        return saved(q, k, v, dout, workload.is_causal)

    return Backend(name, backward, arrange=arrange)


def _cudnn_saved(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, causal: bool
) -> tuple[Any, ...]:
    out, lse, lengths_q, lengths_k, most_q, most_k, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal
    )
    saved = (_laid_out_like(dout, out), q, k, v, out, lse, seed, offset, None)
    return *saved, lengths_q, lengths_k, most_q, most_k, 0.0, causal


def _flash_saved(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, causal: bool
) -> tuple[Any, ...]:
    out, lse, *lengths, seed, offset, _ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return _laid_out_like(dout, out), q, k, v, out, lse, *lengths, 0.0, causal, seed, offset


def _efficient_saved(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, causal: bool
) -> tuple[Any, ...]:
    out, lse, seed, offset = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
    wanted = [True, True, True, False]  # gradients of q, k and v, none of a bias
    return _laid_out_like(dout, out), q, k, v, None, out, lse, seed, offset, 0.0, wanted, causal


def _laid_out_like(dout: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """dout with out's strides: with others, cuDNN's backward would copy it in each call."""
    return torch.empty_like(out).copy_(dout)


aten = torch.ops.aten
# What the backward of each of SDPA's backends takes, and that backward.
ATEN_BACKWARD: dict[str, tuple[Callable[..., tuple[Any, ...]], Function]] = {
    "cudnn": (_cudnn_saved, aten._scaled_dot_product_cudnn_attention_backward.default),
    "flash": (_flash_saved, aten._scaled_dot_product_flash_attention_backward.default),
    "efficient": (_efficient_saved, aten._scaled_dot_product_efficient_attention_backward.default),
}


def _sdpa(name: str, workload: Workload, device: torch.device) -> Backend:
    if workload.causal == "bottom_right" and workload.N != workload.M:
        raise Unavailable("SDPA aligns its causal mask to the top left: another problem when N and M differ")
    if device.type == "cpu" and name not in ("sdpa", "math"):
        raise Unavailable("a CUDA kernel; on the CPU, scaled_dot_product_attention is measured as sdpa")
    if name == "math":
        _require_memory_for_scores(workload, device)
    options: dict[str, bool] = {"is_causal": workload.is_causal}
    if workload.Hkv != workload.H:
        options["enable_gqa"] = True
    call = functools.partial(F.scaled_dot_product_attention, **options)
    kernel = SDPA[name]
    return Backend(name, call) if kernel is None else Backend(name, call, functools.partial(sdpa_kernel, kernel))


def _require_memory_for_scores(workload: Workload, device: torch.device) -> None:
    """The unfused computation keeps N x M scores a head: in float32, with softmax and mask, and their gradients."""
    copies = 3 if workload.direction == "fwd" else 6
    needed = copies * 4 * workload.B * workload.H * workload.N * workload.M
    limit = 4 << 30
    if device.type == "cuda":
        limit = torch.cuda.mem_get_info(device)[0] * 2 // 3
    if needed > limit:
        raise Unavailable(f"N x M scores need about {needed / 2**30:.0f} GiB")


def _heads_after_length(inputs: Inputs) -> Inputs:
    return tuple(tensor.transpose(1, 2).contiguous() for tensor in inputs)


def _flash_attn(workload: Workload) -> Backend:
    function = _module("flash_attn").flash_attn_func
    _require_flash_attn_mask(workload)
    return Backend(
        "flash-attn",
        functools.partial(function, causal=workload.is_causal),
        arrange=_heads_after_length,
        restore=lambda tensor: tensor.transpose(1, 2),
    )


FLASH_ATTENTION_3 = ("fa3", f"fa3{DETERMINISTIC}")


def _flash_attn_3(name: str, workload: Workload) -> Backend:
    function = _module("flash_attn_interface").flash_attn_func
    _require_flash_attn_mask(workload)
    options: dict[str, Any] = {"causal": workload.is_causal, "deterministic": is_deterministic(name)}
    if workload.direction == "fwd" and workload.N < workload.M:
        options["num_splits"] = 0  # as many as it finds best; by default it divides no row's keys among CTAs
    return Backend(
        name,
        functools.partial(function, **options),
        arrange=_heads_after_length,
        restore=lambda tensor: tensor.transpose(1, 2),
    )


def _flash_attn_3_backward(name: str, workload: Workload) -> Backend:
    """Its backward's operator, called with what its forward saved, writing to new dq, dk and dv."""
    forward = _flash_attn_3(name, workload)
    operator = torch.ops.flash_attn_3.bwd.default

    def arrange(inputs: Inputs) -> tuple[Any, ...]:
        q, k, v, dout = forward.arrange(inputs)
        out, lse = forward.call(q, k, v, return_attn_probs=True)
        return dout, q, k, v, out, lse

    def call(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *saved: torch.Tensor) -> Inputs:
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        options = {"is_causal": workload.is_causal, "deterministic": is_deterministic(name)}
        operator(dout, q, k, v, *saved, dq=dq, dk=dk, dv=dv, **options)
        return dq, dk, dv

    return replace(forward, call=call, arrange=arrange)


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
