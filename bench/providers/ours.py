"""flash_cute: dense and packed calls with every option."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from bench import float8
from bench.figures import BATCH_DEPENDENT, BF16, CONTIGUOUS, DENSE, DETERMINISTIC, PLAIN, ROW_INVARIANT
from bench.providers.base import Backend, Function, Unavailable, is_deterministic, module
from bench.workloads import DTYPES, Inputs, Workload
from flash_cute._timing import first_line

MODES = ("", DETERMINISTIC, PLAIN, DENSE, BF16, CONTIGUOUS, ROW_INVARIANT, BATCH_DEPENDENT)
NAMES = tuple(f"flash_cute{forced}{mode}" for mode in MODES for forced in ("", ":sm80", ":sm90", ":cpu"))


def is_ours(name: str) -> bool:
    return name.startswith("flash_cute")


def is_plain(name: str) -> bool:
    """Whether the provider leaves options out, so that its answer is another one."""
    return name.endswith(PLAIN)


def base_of(name: str) -> str:
    """A name of ours without the mode behind it."""
    return next((name.removesuffix(mode) for mode in MODES[1:] if name.endswith(mode)), name)


def own_options(name: str) -> dict[str, Any]:
    """The backend and the mode that a name of ours insists on, as arguments of `flash_cute.attention`."""
    forced = base_of(name).partition(":")[2]
    options: dict[str, Any] = {"backend": forced or None, "deterministic": is_deterministic(name) or None}
    if name.endswith(ROW_INVARIANT):
        options["row_invariant"] = True
    if name.endswith(BATCH_DEPENDENT):
        options["batch_invariant"] = False
    return options


def causal_argument(workload: Workload) -> bool | str:
    """What `flash_cute.fwd` takes as `causal`."""
    return False if workload.causal == "none" else workload.causal


def own_problem(name: str, workload: Workload) -> Workload:
    """What a provider of ours computes of a workload: with `:plain`, `:dense` and `:bf16` something simpler."""
    if name.endswith(PLAIN):
        if not (workload.softcap or workload.sinks or workload.alibi):
            raise Unavailable("there is no softcap, sink or ALiBi to be left out")
        return replace(workload, softcap=0.0, sinks=False, alibi=False)
    if name.endswith(DENSE):
        if len(set(workload.sequences)) != 1:
            raise Unavailable("only a packed batch of equal lengths has the same work as a dense one")
        return replace(workload, lengths="")
    if name.endswith(CONTIGUOUS):
        raise Unavailable("only the keys of a cache can lie in pages, and not")
    if name.endswith(BATCH_DEPENDENT):
        raise Unavailable("only over a cache may the bits depend on the batch")
    if name.endswith(BF16):
        if not workload.is_float8:
            raise Unavailable("only a float8 problem has values to be given in bfloat16 instead")
        return replace(workload, dtype="bf16")
    return workload


def score_options(workload: Workload, device: torch.device) -> dict[str, Any]:
    """The arguments of an attention that say which mask and which score; only those that are asked for."""
    options: dict[str, Any] = {"causal": causal_argument(workload)}
    if workload.window is not None:
        options["window"] = workload.window
    if workload.softcap:
        options["softcap"] = workload.softcap
    if workload.sinks:
        options["sinks"] = workload.make_sinks(device)
    if workload.alibi:
        options["alibi_slopes"] = workload.make_slopes(device)
    return options


def length_options(workload: Workload, device: torch.device) -> dict[str, Any]:
    """The arguments of a packed call that say where the sequences are; none of a dense one."""
    if not workload.lengths:
        return {}
    offsets = workload.make_offsets(device)
    hints = {"max_seqlen_q": workload.N, "max_seqlen_k": workload.M}
    return {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, **hints}


def float8_options(factors: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    """The arguments of an attention that only float8 has; `factors` are those of q, k and v."""
    names = ("descale_q", "descale_k", "descale_v")
    return {**dict(zip(names, factors, strict=True)), "out_dtype": torch.bfloat16}


def forward(name: str, workload: Workload, device: torch.device) -> Backend:
    workload = own_problem(name, workload)
    if workload.is_float8:
        return _float8_forward(name, workload, device)
    direction = "attention" if workload.direction == "train" else "fwd"
    return _with_layout(name, workload, Backend(name, _function(direction, name, workload, device)))


def backward(name: str, workload: Workload, device: torch.device) -> Backend:
    if name.endswith(ROW_INVARIANT):
        raise Unavailable("the backward of a row-invariant forward is the usual one")
    workload = own_problem(name, workload)
    compute = _function("fwd", name, workload, device)

    def arrange(inputs: Inputs) -> tuple[Any, ...]:
        q, k, v, dout = inputs
        return dout, q, k, v, *compute(q, k, v)

    call = _function("bwd", name, workload, device)
    return _with_layout(name, workload, Backend(name, call, arrange=arrange))


def _float8_forward(name: str, workload: Workload, device: torch.device) -> Backend:
    """`attention` on e4m3 with its factors, out in bfloat16."""
    if workload.lengths:
        raise Unavailable("packed batches in float8 are not measured")
    attention = functools.partial(require().attention, **score_options(workload, device), **own_options(name))

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *factors: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = attention(q, k, v, **float8_options(factors))
        return out

    return Backend(name, call)


def _function(direction: str, name: str, workload: Workload, device: torch.device) -> Function:
    """`attention`, `fwd` or `bwd`, or that of packed sequences, with all that is no tensor of the inputs bound."""
    function = getattr(require(), f"varlen_{direction}" if workload.lengths else direction)
    options = score_options(workload, device) | length_options(workload, device) | own_options(name)
    return functools.partial(function, **options)


def _with_layout(name: str, workload: Workload, backend: Backend) -> Backend:
    """The backend for the workload's own inputs, which before anything is timed are unpacked or made bfloat16."""
    if name.endswith(BF16):
        return replace(backend, arrange=lambda inputs: backend.arrange(float8.dequantised(inputs, DTYPES["bf16"])))
    if not name.endswith(DENSE):
        return backend

    def arrange(inputs: Inputs) -> tuple[Any, ...]:
        dense = (tensor.unflatten(0, (workload.B, -1)).transpose(1, 2).contiguous() for tensor in inputs)
        return backend.arrange(tuple(dense))

    return replace(backend, arrange=arrange, restore=lambda tensor: tensor.transpose(1, 2).flatten(0, 1))


def plan(name: str, workload: Workload, inputs: Inputs) -> str:
    """The kernel (the backward's, if it is run) and tile that the library names, in few words; or why it names none."""
    flash_cute = require()
    if not hasattr(flash_cute, "explain"):
        return ""
    workload = own_problem(name, workload)
    device = inputs[0].device
    wanted = inputs if name.endswith(BF16) else inputs[:3]
    tensors = _with_layout(name, workload, Backend(name, flash_cute.fwd)).arrange(wanted)
    options = score_options(workload, device) | length_options(workload, device) | own_options(name)
    options |= float8_options(inputs[3:]) if workload.is_float8 else {}
    try:
        found = flash_cute.explain(*tensors, backward=workload.direction != "fwd", **options).data
    except Exception as error:
        return f"no plan: {first_line(error)}"
    return plan_words(found)


def plan_words(found: Mapping[str, Any]) -> str:
    """An explanation's data in few words."""
    if not found.get("kernel"):
        return str(found["backend"])
    words = "{backend} {block_m}x{block_n} threads {threads} stages {stages}".format(**found)
    variant = found.get("variant", "dense")
    return words if variant == "dense" else f"{words} {variant}"


def require() -> Any:
    flash_cute = module("flash_cute")
    if not hasattr(flash_cute, "fwd"):
        raise Unavailable("flash_cute is not installed: run pip install . first")
    return flash_cute
