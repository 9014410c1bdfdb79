"""Which kernel an attention or its backward will run for a call, and why: as text for a person and as data."""

import json
import re
import textwrap
from dataclasses import dataclass
from typing import Any

from torch import Tensor, are_deterministic_algorithms_enabled

from . import _left, _ops, cpu, cpu_bwd, cpu_varlen, report
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
)
from .autograd import VARLEN
from .band import make_band
from .score import make_score

__all__ = ["Explanation", "explain", "kernel_matches"]

WIDTH = 110  # columns of the text


@dataclass(frozen=True)
class Explanation:
    """What will run. `str()` is the text, `data` the same as plain JSON types.

    Keys of `data`: the call (`dtype`, `batch`, `heads_q`, `heads_kv`, `len_q`, `len_k`, `head_dim`, `head_dim_v`,
    `causal`, `window` ([left, right] or None), `mask` (the kind that has an effect in this call), `scale`, `softcap`
    (or None), `sinks` and `alibi` (whether there are any)), `backend`, `reasons` (sentences), `copies` ("q", "k", "v"
    and "out" to the reason why it is copied, or None); and of the kernel (None on the CPU) `kernel`,
    `kernel_head_dim`, `entry` (of the tile table), `block_m` (query rows per CTA), `block_n` (keys per step), `threads`
    (per CTA), `stages`, `smem_bytes` (per CTA), `ctas_per_sm`, `tiles`, `capability` and `workspace_bytes`. `compiled`
    is the compiler's report on that very kernel (`arch`, `registers`, `spill_stores` and `spill_loads` in bytes, ...),
    or None where the driver compiles it from PTX. `tuned`: whether a file of `use_tuning` decided; `tuning_key`: the
    call as such a file has it.

    Of a forward's kernel there are `kernel_head_dim_v` and `variant`: "dense"; "packed", which reads the sequences at
    run time; or "modified", whose scores may also have a softcap or ALiBi (above head dim 256 the only one); and
    `accumulate`, as in `attention`. Above head dim 256, `column_parts` is the number of CTAs per tile that share out's
    columns.

    `split_tiles`: how many tiles have their keys, in a backward their rows, split over CTAs; `split_ctas`: over how
    many.

    Of packed sequences `packed` is True, `batch` is their number, and `len_q` and `len_k` are the rows and keys of all
    of them; there are `max_seqlen_q` and `max_seqlen_k` (the hints, or None), `seqused_q` and `seqused_k` (whether
    given).

    Of a backward: `block_n` is the keys that a CTA owns, `block_m` the query rows of a step, `copies` has "dout",
    "dq", "dk" and "dv" too, and there are `deterministic` and `dlse`.

    `workspace_bytes` is what a call allocates beside its results, padded by the allocator to 512 bytes; what `copies`
    names is copied to memory of its own.
    """

    data: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """`data`, as a copy that may be changed."""
        copy: dict[str, Any] = json.loads(json.dumps(self.data))
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
    causal: bool | str = False,
    *,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    backend: str | None = None,
    accumulate: str | None = None,
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
) -> Explanation:
    """Say which kernel `attention` (or `fwd`) would run for these arguments, or its backward; nothing is launched.

    With `cu_seqlens_q` and `cu_seqlens_k` the same of `varlen_attention`: what depends on the sequences' lengths is
    decided where they are, on the device, and the explanation says what that is.

    The answer is that of the plan function that the launch itself asks, so it is what runs.

    Args:
        q, k, v, causal, scale, window, softcap, sinks, alibi_slopes, backend, accumulate: as in `attention`; for a
            `capability` other than the tensors' own device, tensors on the CPU or the meta device will do.
        capability: `None`: the tensors' own device. Else plan for a GPU of that compute capability, ten
            times major plus minor: 80 (A100), 86, 89, 90 (H100), 120.
        backward: explain the backward's kernel instead of the forward's, for a dout laid out like out.
        deterministic: as in `attention`; it matters for the backward alone.
        dlse: whether a gradient flows into the LSE, as where a loss uses what `return_lse=True` gave; it matters for
            the backward alone. With sinks it takes a larger workspace.
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k: as in `varlen_attention`, for q, k
            and v as there.

    Raises:
        ValueError: as `attention` raises for the same arguments.

    Example:
        >>> x = torch.empty(4, 16, 4096, 128, dtype=torch.bfloat16, device="meta")
        >>> explain(x, x, x, causal=True, capability=80).data["backend"]
        'sm80'
    """
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    packed = any(x is not None for x in lengths)
    try:
        causal = mask_name(causal)
        left, right = (None, None) if window is None else window_sides(window)
        check_number("scale", scale)
        check_number("softcap", softcap)
        check_longest("max_seqlen_q", max_seqlen_q)
        check_longest("max_seqlen_k", max_seqlen_k)
        *tensors, sinks = _ops.autocast(q, k, v, sinks)
        call = (*(lengths if packed else ()), causal, left, right, softcap, sinks, alibi_slopes, scale)
        asked = "auto" if backend is None else backend
        if accumulate is not None:
            asked = backend_with(asked, accumulate)
        if deterministic is None:
            deterministic = are_deterministic_algorithms_enabled()
        deterministic, dlse = check_deterministic(deterministic), _check_dlse(dlse)
        gpu = check_capability(capability)
        if check_flag("backward", backward):
            operator = _ops.varlen_bwd_plan if packed else _ops.bwd_plan
            plan = json.loads(operator(*tensors, *call, asked, deterministic, gpu, dlse))
        else:
            operator = _ops.varlen_fwd_plan if packed else _ops.fwd_plan
            plan = json.loads(operator(*tensors, *call, asked, gpu))
    except Exception as error:
        given = {"q": q, "k": k, "v": v, "sinks": sinks, "alibi_slopes": alibi_slopes}
        if packed:
            given |= dict(zip(VARLEN.length_names, lengths, strict=True))
        raise_refusal(error, given, scale, window, softcap, backend)
        raise
    if plan["backend"] == "cpu" and packed:
        plan["copies"] |= cpu_varlen.copies(q, k, v, backward)
        plan["reasons"] += cpu_varlen.reasons(backward)
    elif plan["backend"] == "cpu":
        module = cpu_bwd if backward else cpu
        plan["copies"] |= module.copies(q, k, v)
        band = make_band(causal, left, right, q.shape[2], k.shape[2])
        score = make_score(q, k, causal, plan["scale"], softcap, alibi_slopes)
        plan["reasons"] += module.reasons(q, k, v, band, score, sinks)
    else:
        plan["compiled"] = _compiled(plan)
        if divmod(plan["capability"], 10) in _left.CAPABILITIES:
            plan["reasons"].append(_left.EXPLANATION)
    return Explanation(plan)


def _check_dlse(dlse: Any) -> bool:
    """A tensor, as `bwd` takes, is no answer: its strides would matter."""
    if not isinstance(dlse, bool):
        raise ValueError(f"flash_cute: dlse: expected False or True (whether there is one), got {type(dlse).__name__}")
    return dlse


def kernel_matches(plan: dict[str, Any], kernel_name: str) -> bool:
    """Whether `kernel_name`, as a profiler or the compiler prints it, is the kernel of a plan (`Explanation.data`).

    Takes demangled and mangled names.

    Example:
        >>> plan = explain(*[torch.empty(1, 1, 64, 64, dtype=torch.half)] * 3, capability=80).data
        >>> kernel_matches(plan, "void at::native::elementwise_kernel<128, 4>(int)")
        False
    """
    facts = _facts(kernel_name)
    if facts is None or facts["backend"] != plan["backend"]:
        return False
    known = {**plan, "head_dim": plan["kernel_head_dim"], "warps": plan["threads"] // 32, "q_stages": plan["stages"]}
    fields = _TILE_FIELDS[plan["backend"]].get(facts["kernel"])
    if fields is None:
        return False
    tile = dict(zip(fields, facts.pop("tile"), strict=False))  # zeros at its end have no name
    return all(known.get(field, value) == value for field, value in [*facts.items(), *tile.items()])


# Of TileConfig in csrc/<backend>/<kernel>/tile.h, in order. The plan does not tell all of them.
_SM80_BWD_FIELDS = (
    *("block_m", "block_n", "warps", "score_warps", "key_warps", "row_warps"),
    *("q_stages", "dout_stages", "budgeted_ctas"),
)
_TILE_FIELDS: dict[str, dict[str, tuple[str, ...]]] = {
    "sm80": {
        "fwd_kernel": ("block_m", "block_n", "warps", "stages", "q_in_regs", "budgeted_ctas"),
        "bwd_kernel": _SM80_BWD_FIELDS,
        "bwd_sequences_kernel": _SM80_BWD_FIELDS,
        "fwd_large_kernel": (),
        "fwd_large_pair_kernel": (),
        "bwd_keys_kernel": (),
        "bwd_keys_pair_kernel": (),
        "bwd_queries_kernel": (),
        "bwd_queries_pair_kernel": (),
    },
    "sm90": {
        "fwd_kernel": ("block_m", "block_n", "stages", "ping_pong", "late_wait"),
        "bwd_kernel": ("block_m", "block_n", "stages", "late_dp", "v_steps"),
        "bwd_keys_kernel": (),
        "bwd_queries_kernel": (),
        "fwd_wide_kernel": (),
        "fwd_large_kernel": (),
        "bwd_large_kernel": (),
    },
}
_VARIANTS = ("dense", "packed", "modified", "dense modified")  # csrc/core/variant.h
_ACCUMULATE = ("float32", "float16_qk", "float16_pv", "float16")  # csrc/core/accumulate.h
_ELEMENTS = {"half_t": "float16", "__half": "float16", "bfloat16_t": "bfloat16", "__nv_bfloat16": "bfloat16"}


def _facts(kernel_name: str) -> dict[str, Any] | None:
    """What a kernel's name says of it, or None for a kernel that is not ours.

    Demangled: `flash_cute::sm80::fwd::fwd_kernel<flash_cute::sm80::fwd::Traits<cutlass::half_t, 128,
    flash_cute::sm80::fwd::TileConfig{128, 64, 4, 1, false, 2}>>`; mangled, the same words come with lengths in front
    and numbers as `Li128E`.
    """
    folder = r"flash_cute(?:::|4)(sm\d+)(?:::|\d)(?:fwd_large|bwd_large|fwd|fwd_wide|bwd_wide|bwd)"
    kernel = re.search(folder + r"(?:::|\d{2})(\w+?_kernel)(?:<|I)", kernel_name)
    element = re.search("|".join(_ELEMENTS), kernel_name)
    head_dim = re.search(r"(?:half_t|__half|bfloat16_t|__nv_bfloat16)(?:, (?:\(int\))?|ELi)(\d+)", kernel_name)
    if not (kernel and element and head_dim):
        return None
    tile = re.search(r"TileConfig(?:\)?\{([^}]*)\}|E((?:L[a-z]\d+E)+))", kernel_name)
    values = re.findall(r"L[a-z](\d+)E|(\d+)(?![\w)])|\b(true|false)\b", tile[1] or tile[2]) if tile else []
    end = tile.end() if tile else head_dim.end()
    deterministic = re.match(r"[> ]*, (?:\(bool\))?(\w+)>|E+Lb(\d)E", kernel_name[end:])
    facts: dict[str, Any] = {
        "backend": kernel[1],
        "kernel": kernel[2],
        "dtype": _ELEMENTS[element[0]],
        "head_dim": int(head_dim[1]),
        "tile": [int(mangled or number or word == "true") for mangled, number, word in values],
    }
    if variant := re.search(r"Variant(?:\)|E)(\d)(?:(?:, |ELi)(\d+))?", kernel_name[end:]):
        facts["variant"] = _VARIANTS[int(variant[1])]
        facts["kernel_head_dim_v"] = int(variant[2] or head_dim[1])
    if kernel[2] == "fwd_kernel":
        accumulate = re.search(r"Accumulate(?:\)|E)(\d)", kernel_name[end:])
        facts["accumulate"] = _ACCUMULATE[int(accumulate[1]) if accumulate else 0]
    if deterministic:  # the mode has a kernel of its own
        facts["deterministic"] = (deterministic[1] or deterministic[2]) in ("1", "true")
    return facts


def _compiled(plan: dict[str, Any]) -> dict[str, Any] | None:
    """The compiler's report on the machine code that a device of the plan's capability loads."""
    capability = plan["capability"]
    found: dict[str, Any] | None = None
    for entry in report.load()["kernels"]:
        arch = _arch_number(entry["arch"])
        # Machine code runs on its own major version, from its minor version on; the closest is loaded.
        fits = arch // 10 == capability // 10 and arch <= capability
        best = found is None or arch > _arch_number(found["arch"])
        if fits and best and kernel_matches(plan, entry["kernel"]):
            found = entry
    return found


def _arch_number(arch: str) -> int:
    digits = re.search(r"\d+", arch)
    return int(digits[0]) if digits else 0


def _folder(plan: dict[str, Any]) -> str:
    """That of csrc/<backend>/ with the plan's kernel, which is a namespace, too."""
    kernel = plan["kernel"]
    if kernel == "bwd_keys_kernel":
        return "bwd_large" if plan["kernel_head_dim"] > 256 else "bwd_wide"
    others = {
        "bwd_sequences_kernel": "bwd",
        "bwd_keys_pair_kernel": "bwd_large",
        "fwd_large_pair_kernel": "fwd_large",
    }
    return others.get(kernel, kernel.removesuffix("_kernel"))


def _rows(data: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("backend", data["backend"])]
    if data["backend"] != "cpu":
        kernel = data["kernel"]
        name = f"flash_cute::{data['backend']}::{_folder(data)}::{kernel}"
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


def _options(data: dict[str, Any]) -> list[str]:
    """What is asked for beside causal, in words."""
    options = []
    if data["window"] is not None:
        left, right = ("any" if side is None else side for side in data["window"])
        options.append(f"window of {left} keys before and {right} after")
    if data["softcap"] is not None:
        options.append(f"softcap {data['softcap']:g}")
    if data["alibi"]:
        options.append("ALiBi")
    if data["sinks"]:
        options.append("sinks")
    if data.get("accumulate", "float32") != "float32":
        options.append(f"accumulate {data['accumulate']}")
    if data["head_dim_v"] != data["head_dim"]:
        options.append(f"head dim {data['head_dim_v']} of v")
    return options


def _tile(data: dict[str, Any]) -> str:
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


def _registers(data: dict[str, Any]) -> str:
    entry = data["compiled"]
    if entry is None:
        return "not known: the driver compiles this kernel from PTX on this device"
    spilled = entry["spill_stores"] + entry["spill_loads"]
    spills = f"{entry['spill_stores']} / {entry['spill_loads']} bytes spilled / reloaded" if spilled else "no spills"
    return f"{entry['registers']} per thread, {spills} ({entry['arch']} code, nvcc {report.load()['nvcc']})"
