"""Which kernel an attention or its backward will run for a call, and why: as text for a person and as data."""

import json
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, are_deterministic_algorithms_enabled

from . import _fp8, _left, _masked, _ops, cpu, cpu_bwd, cpu_fp8, cpu_kvcache, cpu_varlen, kvcache, report
from ._call_options import CallOptions
from ._fp8_types import FLOAT8
from ._kernel_names import kernel_matches
from ._refusals import (
    Window,
    backend_with,
    check_capability,
    check_deterministic,
    check_flag,
    check_longest,
    check_number,
    mask_name,
    raise_refusal,
    window_sides,
    with_batch_dependence,
    with_row_invariance,
)
from .autograd import DENSE, VARLEN, Calls
from .band import make_band
from .given_mask import make_given_mask
from .mask import Mask
from .plan_data import PlanData
from .score import make_score

__all__ = ["Explanation", "PlanData", "explain", "kernel_matches"]

WIDTH = 110  # columns of the text


@dataclass(frozen=True)
class Explanation:
    """What will run. `str()` is the text, `data` the same as plain JSON types, see `PlanData`."""

    data: PlanData

    def to_dict(self) -> PlanData:
        """`data`, as a copy that may be changed."""
        copy: PlanData = json.loads(json.dumps(self.data))
        return copy

    def __str__(self) -> str:
        rows = _rows(self.data)
        indent = max(len(title) for title, _ in rows) + 2
        lines = []
        for title, text in rows:
            first, *rest = textwrap.wrap(text, WIDTH - indent)
            lines += [title.ljust(indent) + first, *(" " * (indent + 2) + line for line in rest)]
        return "\n".join(lines)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool | str = "default",
    *,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    mask: Mask | None = None,
    backend: str | None = None,
    accumulate: str | None = None,
    row_invariant: bool = False,
    capability: int | None = None,
    backward: bool = False,
    deterministic: bool | None = None,
    dlse: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    descale_q: Tensor | None = None,
    descale_k: Tensor | None = None,
    descale_v: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    descale_out: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    page_table: Tensor | None = None,
    kv_layout: str | None = None,
    new_keys: int = 0,
    batch_invariant: bool = True,
) -> Explanation:
    """Say which kernel `attention` (or `fwd`) would run for these arguments, or its backward; nothing is launched.

    With `cu_seqlens_q` and `cu_seqlens_k` the same of `varlen_attention`, with `cache_seqlens`, `page_table` or
    `kv_layout` of `attention_with_kvcache`: what depends on the sequences' lengths is decided where they are, on the
    device, and the explanation says what that is.

    The answer is that of the plan function that the launch itself asks, so it is what runs.

    Args:
        q, k, v, causal, scale, window, softcap, sinks, alibi_slopes, mask, backend, accumulate, row_invariant: as in
            `attention`; for a `capability` other than the tensors' own device, tensors on the CPU or the meta device
            will do. k and v may be caches. causal `"default"`: `True` over caches, else `False`, as the functions have
            it.
        capability: `None`: the tensors' own device. Else plan for a GPU of that compute capability, ten
            times major plus minor: 80 (A100), 86, 89, 90 (H100), 120.
        backward: explain the backward's kernel instead of the forward's, for a dout laid out like out.
        deterministic: as in `attention`; it matters for the backward alone.
        dlse: whether a gradient flows into the LSE, as where a loss uses what `return_lse=True` gave; it matters for
            the backward alone. With sinks it takes a larger workspace.
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k: as in `varlen_attention`, for q, k
            and v as there.
        descale_q, descale_k, descale_v, out_dtype, descale_out: of float8 tensors, as in `attention`.
        cache_seqlens, page_table, kv_layout, cu_seqlens_q, descale_k, descale_v: of a call over caches, as in
            `attention_with_kvcache`. One whose caches are contiguous and full is told by `kv_layout`.
        new_keys: of such a call: how many keys each sequence gets appended; -1: as many as it has rows.
        batch_invariant: of such a call, as in `attention_with_kvcache`.

    Raises:
        ValueError: as the function raises for the same arguments.

    Example:
        >>> x = torch.empty(4, 16, 4096, 128, dtype=torch.bfloat16, device="meta")
        >>> explain(x, x, x, causal=True, capability=80).data["backend"]
        'sm80'
    """
    if row_invariant is not False:
        backend = with_row_invariance(backend, row_invariant)
    if batch_invariant is not True:
        backend = with_batch_dependence(backend, batch_invariant, row_invariant)
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    packed = any(x is not None for x in lengths)
    fp8 = (descale_q, descale_k, descale_v, out_dtype, descale_out)
    over_caches = cache_seqlens is not None or page_table is not None or kv_layout is not None
    if batch_invariant is not True and not over_caches:
        raise ValueError(f"flash_cute: batch_invariant: expected True of a call without caches, got {batch_invariant}")
    if isinstance(causal, str) and causal == "default":
        causal = over_caches
    if over_caches:
        others = dict(zip(VARLEN.length_names[1:], lengths[1:], strict=True))
        others |= {"accumulate": accumulate, "backward": backward or None, "dlse": dlse or None}
        others |= {"descale_q": descale_q, "out_dtype": out_dtype, "descale_out": descale_out}
        others["mask"] = mask
        kvcache.refuse(others, "over a cache")
        places = (cache_seqlens, page_table, cu_seqlens_q, new_keys, "NHD" if kv_layout is None else kv_layout)
        score = (softcap, sinks, alibi_slopes, scale)
        return _of_cache(q, k, v, places, causal, window, score, (descale_k, descale_v), backend, capability)
    kind: Calls = VARLEN if packed else DENSE
    own: tuple[Any, ...] = lengths if packed else ()
    try:
        causal = mask_name(causal)
        left, right = (None, None) if window is None else window_sides(window)
        check_number("scale", scale)
        check_number("softcap", softcap)
        check_longest("max_seqlen_q", max_seqlen_q)
        check_longest("max_seqlen_k", max_seqlen_k)
        float8 = isinstance(q, Tensor) and (q.dtype in FLOAT8 or any(x is not None for x in fp8))
        if mask is not None:
            _masked.refuse_float8(q, fp8)
            kind, own = _masked.calls_and_tensors(mask, own)
        *tensors, sinks = (q, k, v, sinks) if float8 else _ops.autocast(q, k, v, sinks)
        call = CallOptions(causal, left, right, softcap, sinks, alibi_slopes, scale)
        given = (*own, *call)
        asked = "auto" if backend is None else backend
        if accumulate is not None:
            asked = backend_with(asked, accumulate)
        if deterministic is None:
            deterministic = are_deterministic_algorithms_enabled()
        deterministic, dlse = check_deterministic(deterministic), _check_dlse(dlse)
        gpu = check_capability(capability)
        if float8:
            options = _fp8.options(q, *fp8)
            if check_flag("backward", backward):
                raise NotImplementedError(f"{_fp8.NO_BACKWARD}.")
            operator = _ops.fp8_varlen_fwd_plan if packed else _ops.fp8_fwd_plan
            plan = json.loads(operator(*tensors, *options, *given, asked, gpu))
        elif check_flag("backward", backward):
            operator = getattr(_ops, f"{kind.name}bwd_plan")
            plan = json.loads(operator(*tensors, *given, asked, deterministic, gpu, dlse))
        else:
            operator = getattr(_ops, f"{kind.name}fwd_plan")
            plan = json.loads(operator(*tensors, *given, asked, gpu))
    except Exception as error:
        named = {"q": q, "k": k, "v": v, "sinks": sinks, "alibi_slopes": alibi_slopes}
        named |= dict(zip(_fp8.DESCALES, (*fp8[:3], descale_out), strict=True))
        named |= dict(zip(kind.length_names, own, strict=True))
        raise_refusal(error, named, scale, window, softcap, backend)
        raise
    if plan["backend"] == "cpu" and float8:
        plan["copies"] |= dict.fromkeys("qkv", "computed in float32")
        plan["reasons"].append(cpu_fp8.REASON)
        if packed:
            plan["reasons"] += cpu_varlen.reasons(backward)
    elif plan["backend"] == "cpu" and packed:
        plan["copies"] |= cpu_varlen.copies(q, k, v, backward)
        plan["reasons"] += cpu_varlen.reasons(backward)
    elif plan["backend"] == "cpu":
        module = cpu_bwd if backward else cpu
        plan["copies"] |= module.copies(q, k, v)
        band = make_band(*call[:3], q.shape[2], k.shape[2])
        given_mask = None if mask is None else make_given_mask(mask.tensors, q.shape[2])
        scores = make_score(call, q, k, plan["scale"], given_mask)
        plan["reasons"] += module.reasons(q, k, v, band, scores, sinks)
    else:
        plan["compiled"] = _compiled(plan)
        if divmod(plan["capability"], 10) in _left.CAPABILITIES:
            plan["reasons"].append(_left.EXPLANATION)
    return Explanation(plan)


def _of_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    places: tuple[Any, ...],
    causal: Any,
    window: Any,
    score: tuple[Any, ...],
    descales: tuple[Any, ...],
    backend: Any,
    capability: Any,
) -> Explanation:
    """The same of `attention_with_kvcache`."""
    gpu = check_capability(capability)
    descale_k, descale_v = descales
    plan: Any = kvcache.plan(
        q, k_cache, v_cache, places, causal, window, score, descale_k, descale_v, backend, gpu
    )  # fmt: skip
    if plan["backend"] == "cpu":
        plan["copies"] |= cpu_kvcache.copies(q)
        plan["reasons"] += cpu_kvcache.REASONS
    else:
        plan["compiled"] = _compiled(plan)
    return Explanation(plan)


def _check_dlse(dlse: Any) -> bool:
    """A tensor, as `bwd` takes, is no answer: its strides would matter."""
    if not isinstance(dlse, bool):
        raise ValueError(f"flash_cute: dlse: expected False or True (whether there is one), got {type(dlse).__name__}")
    return dlse


def _compiled(plan: Mapping[str, Any]) -> dict[str, Any] | None:
    """The compiler's report on the machine code that a device of the plan's capability loads."""
    capability = plan["capability"]
    found: dict[str, Any] | None = None
    for entry in report.load()["kernels"]:
        arch = _arch_number(entry["arch"])
        # Machine code runs on its own major version, from its minor version on; the closest is loaded.
        fits = arch // 10 == capability // 10 and arch <= capability
        if not fits or (found is not None and arch <= _arch_number(found["arch"])):
            continue
        if kernel_matches(plan, entry["kernel"]):
            found = entry
    return found


@cache
def _arch_number(arch: str) -> int:
    digits = re.search(r"\d+", arch)
    return int(digits[0]) if digits else 0


def _rows(data: PlanData) -> list[tuple[str, str]]:
    rows = [("backend", data["backend"])]
    if data["backend"] != "cpu":
        kernel = data["kernel"]
        name = f"flash_cute::{data['family']}::{kernel}"
        padded = "" if data["head_dim"] == data["kernel_head_dim"] else f" (the tensors have {data['head_dim']})"
        capability = data["capability"]
        rows += [
            ("device", f"compute capability {capability // 10}.{capability % 10}"),
            ("kernel", f"{name}, {data['dtype']}, head dim {data['kernel_head_dim']}{padded}, {data['mask']} mask"),
            ("tile", _tile(data)),
            (
                "shared memory",
                f"{data['smem_bytes'] / 1024:.1f} KiB per CTA, built for {_count(data['ctas_per_sm'], 'CTA')} per SM",
            ),
            ("registers", _registers(data)),
        ]
        if data["split_tiles"] or "deterministic" in data:
            rows.append(("workspace", f"{data['workspace_bytes'] / 2**20:.1f} MiB"))
    options = _options(data)
    if options:
        rows.append(("options", ", ".join(options)))
    copied = [f"{name}: {why}" for name, why in data["copies"].items() if why]
    rows += _block("copied", copied or ["nothing"])
    rows += _block("why", data["reasons"])
    return rows


def _options(data: PlanData) -> list[str]:
    """What is asked for beside causal, in words."""
    options = []
    if data["window"] is not None:
        left, right = ("any" if side is None else side for side in data["window"])
        options.append(f"window of {left} keys before and {right} after")
    if "mask_intervals" in data:
        heads = "" if data["mask_heads"] == 1 else " and KV head"
        items = "" if data["mask_batches"] == 1 else ", by batch item"
        each = f"{items}{heads}" if items or not heads else ", by KV head"
        squares = " and a matrix of booleans" if data["mask_matrix"] else ""
        options.append(f"mask of {_count(data['mask_intervals'], 'interval')} of rows per key{squares}{each}")
    if data["softcap"] is not None:
        options.append(f"softcap {data['softcap']:g}")
    if data["alibi"]:
        options.append("ALiBi")
    if data["sinks"]:
        options.append("sinks")
    if data.get("accumulate", "float32") != "float32":
        options.append(f"accumulate {data['accumulate']}")
    if "out_dtype" in data:
        options.append(f"k {data['dtype_k']}, v {data['dtype_v']}, out {data['out_dtype']}")
    if "page" in data:
        options += [f"a cache of {data['dtype_k']} keys and {data['dtype_v']} values"]
        options += [] if data["page"] is None else [f"pages of {_count(data['page'], 'key')}"]
    if data["head_dim_v"] != data["head_dim"]:
        options.append(f"head dim {data['head_dim_v']} of v")
    return options


def _tile(data: PlanData) -> str:
    rows, keys = f"{data['block_m']} query rows", f"{data['block_n']} keys"
    owned, walked, buffers = (keys, rows, "Q/dO") if data["kernel"].startswith("bwd") else (rows, keys, "K/V")
    return (
        f"{owned} per CTA, {walked} per step, {data['threads']} threads, "
        f"{_count(data['stages'], f'{buffers} stage')}, {_count(data['tiles'], 'tile')} in all"
    )


def _block(title: str, lines: list[str]) -> list[tuple[str, str]]:
    return [(title if index == 0 else "", line) for index, line in enumerate(lines)]


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _registers(data: PlanData) -> str:
    entry = data["compiled"]
    if entry is None:
        return "not known: the driver compiles this kernel from PTX on this device"
    spilled = entry["spill_stores"] + entry["spill_loads"]
    spills = f"{entry['spill_stores']} / {entry['spill_loads']} bytes spilled / reloaded" if spilled else "no spills"
    return f"{entry['registers']} per thread, {spills} ({entry['arch']} code, nvcc {report.load()['nvcc']})"
