"""What a kernel's name says, as profilers and the compiler's report have it: the one place that reads such names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

__all__ = ["TILE_FIELDS", "kernel_matches"]


def kernel_matches(plan: Mapping[str, Any], kernel_name: str) -> bool:
    """Whether `kernel_name`, as a profiler or the compiler prints it, is the kernel of a plan (`Explanation.data`).

    Takes demangled and mangled names.

    Example:
        >>> plan = flash_cute.explain(*[torch.empty(1, 1, 64, 64, dtype=torch.half)] * 3, capability=80).data
        >>> kernel_matches(plan, "void at::native::elementwise_kernel<128, 4>(int)")
        False
    """
    facts = _facts(kernel_name)
    if facts is None or facts["family"] != plan["family"]:
        return False
    known: dict[str, Any] = {
        "warps": plan["threads"] // 32,
        "q_stages": plan["stages"],
        "late_wait": plan["tile"].endswith("late"),
        **plan,
        "head_dim": plan["kernel_head_dim"],
    }
    fields = TILE_FIELDS.get(plan["family"], ())
    tile = zip(fields, facts["tile"], strict=False)  # zeros at its end have no name
    said = [(field, value) for field, value in facts.items() if field != "tile"]
    return all(known.get(field, value) == value for field, value in (*said, *tile))


# Of TileConfig in csrc/<family>/tile.h, in order. The plan does not tell all of them: its `ctas_per_sm` are those that
# fit, up to the budgeted ones. Other families have one tile.
TILE_FIELDS: dict[str, tuple[str, ...]] = {
    "sm80::forward::rows": ("block_m", "block_n", "warps", "stages", "q_in_regs", "budgeted_ctas"),
    "sm80::backward::dq_in_memory": (
        *("block_m", "block_n", "warps", "score_warps", "key_warps", "row_warps"),
        *("q_stages", "dout_stages", "budgeted_ctas"),
    ),
    "sm90::forward::rows": ("block_m", "block_n", "stages", "ping_pong", "late_wait"),
    "sm90::backward::dq_in_memory": ("block_m", "block_n", "stages", "late_dp", "v_steps"),
}
# By whether it reads sequences, modifies scores, and reads a mask: csrc/contract/variant.h. Mangled, what is false at
# the end may be left out.
_VARIANTS = {
    (False, False, False): "dense",
    (True, False, False): "packed",
    (True, True, False): "modified",
    (False, True, False): "dense modified",
    (False, False, True): "masked",
    (False, True, True): "masked modified",
}
_VARIANT = re.compile(
    r"Variant(?:\)?\{(?P<demangled>[^}]*)\}|E(?P<mangled>(?:Lb\dE)*)EE)(?:(?:, |Li)(?P<head_dim_v>\d+))?"
)
_ACCUMULATE = ("float32", "float16_qk", "float16_pv", "float16")  # csrc/contract/accumulate.h
_ELEMENTS = {"half_t": "float16", "__half": "float16", "bfloat16_t": "bfloat16", "__nv_bfloat16": "bfloat16"}


@lru_cache(4096)  # the report has a thousand kernels, and `explain` asks for the facts of each
def _facts(kernel_name: str) -> Mapping[str, Any] | None:
    """What a kernel's name says of it, or None for a kernel that is not ours.

    Demangled: `flash_cute::sm80::forward::rows::fwd_kernel<flash_cute::sm80::forward::rows::Traits<cutlass::half_t,
    128, flash_cute::sm80::forward::rows::TileConfig{128, 64, 4, 1, false, 2}>>`; mangled, the same words come with
    lengths in front and numbers as `Li128E`.
    """
    words = _qualified_name(kernel_name)
    if words[-2:] == ["fp8_rows", "fwd_kernel"]:
        return _float8_facts(words, kernel_name)
    element = re.search("|".join(_ELEMENTS), kernel_name)
    head_dim = re.search(r"(?:half_t|__half|bfloat16_t|__nv_bfloat16)(?:, (?:\(int\))?|ELi)(\d+)", kernel_name)
    if not (words and words[-1].endswith("_kernel") and element and head_dim):
        return None
    if "decode" in words:
        return _decode_facts(words, kernel_name, _ELEMENTS[element[0]])
    tile = re.search(r"TileConfig(?:\)?\{([^}]*)\}|E((?:L[a-z]\d+E)+))", kernel_name)
    values = re.findall(r"L[a-z](\d+)E|(\d+)(?![\w)])|\b(true|false)\b", tile[1] or tile[2]) if tile else []
    end = tile.end() if tile else head_dim.end()
    deterministic = re.match(r"[> ]*, (?:\(bool\))?(\w+)>|E+Lb(\d)E", kernel_name[end:])
    facts: dict[str, Any] = {
        "family": "::".join(words[:-1]),
        "kernel": words[-1],
        "dtype": _ELEMENTS[element[0]],
        "head_dim": int(head_dim[1]),
        "tile": [int(mangled or number or word == "true") for mangled, number, word in values],
    }
    if variant := _VARIANT.search(kernel_name[end:]):
        facts["variant"] = _variant(variant["demangled"] or variant["mangled"] or "")
        facts["kernel_head_dim_v"] = int(variant["head_dim_v"] or head_dim[1])
    if words[-1] == "fwd_kernel":
        accumulate = re.search(r"AccumulateIn(?:\)|E)(\d)", kernel_name[end:])
        facts["accumulate"] = _ACCUMULATE[int(accumulate[1]) if accumulate else 0]
    if deterministic:  # the mode has a kernel of its own
        facts["deterministic"] = (deterministic[1] or deterministic[2]) in ("1", "true")
    return facts


def _decode_facts(words: list[str], kernel_name: str, dtype: str) -> dict[str, Any] | None:
    """The same of a kernel over a cache: `...::decode_kernel<...::Traits<cutlass::half_t, 192, 128>>`.

    That of long sequences has the forward's types, and one head dim, as the row-invariant ones have.
    """
    head_dim, more = r"(?:half_t|bfloat16_t)(?:, (?:\(int\))?|ELi)(\d+)", r"(?:, (?:\(int\))?|ELi)(\d+)"
    has_one = words[-1] == "long_rows_kernel" or "key_chunks" in words
    head_dims = re.search(f"{head_dim}()" if has_one else head_dim + more, kernel_name)
    if head_dims is None:
        return None
    if "key_chunks" in words:
        return _chunks_facts(words, kernel_name, dtype, int(head_dims[1]))
    return {
        "family": "::".join(words[:-1]),
        "kernel": words[-1],
        "dtype": dtype,
        "head_dim": int(head_dims[1]),
        "kernel_head_dim_v": int(head_dims[2] or head_dims[1]),
        "variant": "float8 cache" if "Float8" in kernel_name else "cache",
        "tile": [],
    }


def _chunks_facts(words: list[str], kernel_name: str, dtype: str, head_dim: int) -> dict[str, Any]:
    """The same of a row-invariant kernel, of a cache or of a forward.

    Demangled: `...::chunks_kernel<...::Traits<cutlass::half_t, 128, (...::Chunks)0>>`.
    """
    several = re.search(r"Chunks(?:\)|E)(\d)", kernel_name)
    threads = 256 if several and several[1] == "1" else {64: 640, 128: 512, 256: 384}.get(head_dim)
    return {
        "family": "::".join(words[:-1]),
        "kernel": words[-1],
        "dtype": dtype,
        "head_dim": head_dim,
        "kernel_head_dim_v": head_dim,
        "threads": threads,
        "tile": [],
    }


def _float8_facts(words: list[str], kernel_name: str) -> dict[str, Any] | None:
    """The same of a kernel of float8 tensors.

    Demangled: `...::fwd_kernel<...::Traits<128, 128, flash_cute::Variant{true, false},
    ...::Formats<cutlass::float_e4m3_t, cutlass::float_e4m3_t, cutlass::float_e5m2_t>>>`.
    """
    head_dims = re.search(r"Traits(?:<|I)(?:\(int\)|Li)?(\d+)(?:, (?:\(int\))?|ELi)(\d+)", kernel_name)
    variant = re.search(r"Variant(?:\)?\{([^}]*)\}|E((?:Lb\dE)*)E)", kernel_name)
    formats = _formats(kernel_name)
    if not (head_dims and variant and len(formats) == 3):
        return None
    return {
        "family": "::".join(words[:-1]),
        "kernel": words[-1],
        **dict(zip(("dtype", "dtype_k", "dtype_v"), formats, strict=True)),
        "head_dim": int(head_dims[1]),
        "kernel_head_dim_v": int(head_dims[2]),
        "variant": _variant(variant[1] or variant[2] or ""),
        "tile": [],
    }


def _variant(booleans: str) -> str:
    given = [word in ("true", "1") for word in re.findall(r"true|false|[01]", booleans)]
    reads, modifies, masked, *_ = *given, False, False, False
    return _VARIANTS[reads, modifies, masked]


_FORMATS = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}


def _formats(kernel_name: str) -> list[str]:
    """The dtypes of q, k and v. Mangled, S8_ stands for the name with that number, counted as they come."""
    if demangled := re.search(r"Formats<([^>]*)>", kernel_name):
        return [_FORMATS[x] for x in re.findall(r"float_(e4m3|e5m2)_t", demangled[1])]
    mangled = re.search(r"7FormatsI((?:N(?:7cutlass|S\w*?_)12float_e\dm\d_tE|S\w*?_)+)E", kernel_name)
    found: list[str] = []
    number = None  # of the first one's
    for namespace, spelled, reference in re.findall(
        r"N(7cutlass|S\w*?_)12float_(e\dm\d)_tE|S(\w*?)_", mangled[1] if mangled else ""
    ):
        if namespace.startswith("S"):
            number = int(namespace[1:-1], 36) + 1
        if spelled:
            found.append(_FORMATS[spelled])
        else:
            found.append(found[0] if number is None or int(reference, 36) == number else found[1])
    return found


def _qualified_name(kernel_name: str) -> list[str]:
    """The words of the first name in flash_cute, without that one; none for a kernel that is not ours."""
    if demangled := re.search(r"flash_cute::([\w:]+)", kernel_name):
        return demangled[1].split("::")
    begin, words = kernel_name.find("10flash_cute"), []
    while begin >= 0 and (length := re.match(r"\d+", kernel_name[begin:])):
        first = begin + length.end()
        begin = first + int(length[0])
        words.append(kernel_name[first:begin])
    return words[1:]
