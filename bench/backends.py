"""What is measured: flash_cute and its peers, each made ready for one workload (`bench/providers/`).

A peer that is not installed, or that refuses a problem, says why; nothing is skipped in silence. What a provider wants
to be done once (a layout, a choice of backend, the forward whose backward is timed) is done outside the timed calls.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.caches import CacheWorkload
from bench.figures import BATCH_DEPENDENT, BF16, CONTIGUOUS, DENSE, DETERMINISTIC, PLAIN, ROW_INVARIANT
from bench.providers import caches, cudnn_frontend, flash_attn, ours, pytorch, triton_tutorial
from bench.providers.base import (
    Backend,
    Unavailable,
    backward_by_autograd,
    first,
    is_deterministic,
    module,
    through_autograd,
)
from bench.providers.ours import causal_argument, is_ours, own_options
from bench.workloads import Inputs, Workload
from flash_cute._timing import first_line

__all__ = ["OURS", "PEERS", "Backend", "Unavailable", "absent", "causal_argument", "first_call", "is_deterministic"]
__all__ += ["is_ours", "own_options", "pairs", "prepare"]

OURS = ours.NAMES
PEERS = (*pytorch.SDPA, "flash-attn", *flash_attn.FLASH_ATTENTION_3, "triton", *caches.PEERS)


def pairs(providers: Sequence[str]) -> list[tuple[str, str]]:
    """(ours, peer) that are compared: each of ours with each peer, and ours with itself in another mode.

    A deterministic, row-invariant or batch-dependent mode is compared with the default mode, the default mode with the
    plain problem, the dense call, the same values in bfloat16 and contiguous caches. A peer's deterministic mode is
    compared with ours alone.
    """
    return [(mine, peer) for mine in providers for peer in providers if is_ours(mine) and _is_compared(mine, peer)]


def _is_compared(mine: str, peer: str) -> bool:
    if is_ours(peer):
        simpler = (PLAIN, DENSE, BF16, CONTIGUOUS)
        modes = (DETERMINISTIC, ROW_INVARIANT, BATCH_DEPENDENT)
        return mine in [peer + mode for mode in modes] or peer in [mine + mode for mode in simpler]
    if mine.endswith((PLAIN, DENSE, BF16, CONTIGUOUS)):
        return False
    return is_deterministic(mine) or not is_deterministic(peer)


def prepare(name: str, workload: Workload, device: torch.device, tutorial: Path | None = None) -> Backend:
    """The provider of that name for one workload; raises `Unavailable`."""
    if workload.is_float8 and workload.direction != "fwd":
        raise Unavailable("float8 has a forward alone")
    if isinstance(workload, CacheWorkload):
        if workload.direction != "fwd":
            raise Unavailable("a cache has a forward alone")
        return caches.forward(name, workload, device, lambda name, dense: _forward(name, dense, device, tutorial))
    if workload.direction == "bwd":
        if name in OURS:
            return ours.backward(name, workload, device)
        if pytorch.needs_flash_operator(name, workload) and device.type != "cpu":
            return pytorch.flash_operator_backward(workload, device)
        if name in pytorch.SDPA_BACKWARD and device.type == "cuda":
            return pytorch.sdpa_backward(name, workload)
        if name in flash_attn.FLASH_ATTENTION_3:
            return flash_attn.flash_attn_3_backward(name, workload, device)
    forward = _forward(name, workload, device, tutorial)
    if workload.direction == "bwd":
        return backward_by_autograd(forward)
    return through_autograd(forward) if workload.direction == "train" else forward


def _forward(name: str, workload: Workload, device: torch.device, tutorial: Path | None) -> Backend:
    if name in OURS:
        return ours.forward(name, workload, device)
    if pytorch.needs_flash_operator(name, workload) and device.type != "cpu":
        return pytorch.flash_operator(workload, device)
    if name == "cudnn" and workload.is_float8:
        return cudnn_frontend.float8_forward(workload, device)
    if name in pytorch.SDPA:
        return pytorch.sdpa(name, workload, device)
    if name == "flash-attn":
        return flash_attn.flash_attn(workload, device)
    if name in flash_attn.FLASH_ATTENTION_3:
        return flash_attn.flash_attn_3(name, workload, device)
    if name == "triton":
        return triton_tutorial.triton_tutorial(workload, tutorial)
    if name in caches.PEERS:
        raise Unavailable(f"{name} is measured over caches alone")
    raise ValueError(f"provider: expected one of {', '.join(OURS + PEERS)}, given {name!r}")


def absent(name: str, tutorial: Path | None = None) -> str | None:
    """Why the provider is not on this machine at all, or None if it is."""
    try:
        if is_ours(name):
            ours.require()
        elif name == "flash-attn":
            module("flash_attn")
        elif name in flash_attn.FLASH_ATTENTION_3:
            module("flash_attn_interface")
        elif name == "triton":
            triton_tutorial.load_tutorial(tutorial)
        elif name in caches.PEERS:
            caches.absent(name)
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
            result = first(returned)
            if result.is_cuda:
                torch.cuda.synchronize(result.device)
            results = (result,) if workload.direction == "fwd" else returned[:3]
            return tuple(backend.restore(result) for result in results)
        except torch.cuda.OutOfMemoryError as error:
            raise Unavailable("out of memory") from error
        except Exception as error:
            raise Unavailable("; ".join([first_line(error), *_reasons(refusals)])) from error


def _reasons(refusals: list[warnings.WarningMessage]) -> list[str]:
    """What PyTorch warned about the wanted SDPA backend; it also warns about each backend that was not asked for."""
    lines = [str(refusal.message).splitlines()[0].split(" (Triggered", 1)[0] for refusal in refusals]
    return [line for line in lines if "not used because" not in line and "runtime disabled" not in line][:2]
