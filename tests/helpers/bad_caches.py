"""Calls over caches that are refused, and in which words."""

from __future__ import annotations

from typing import Any

import torch

Call = dict[str, Any]
SCORE = ("window_left", "window_right", "softcap", "sinks", "alibi_slopes", "scale")
E4M3 = torch.float8_e4m3fn


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


def good_call() -> Call:
    """A good call: q (3, 2, 4, 16), 8 pages of 4 keys and 2 heads, float16."""
    places = {"cache_seqlens": int32(5, 0, -1), "page_table": torch.arange(9, dtype=torch.int32).view(3, 3) % 8}
    rest = {"cu_seqlens_q": None, "new_keys": 0, "kv_layout": "NHD", "causal": "bottom_right", **dict.fromkeys(SCORE)}
    tensors = {"q": half(3, 2, 4, 16), "k_cache": half(8, 4, 2, 16), "v_cache": half(8, 4, 2, 16)}
    own = {"descale_k": None, "descale_v": None, "workspace": None, "backend": "auto"}
    return {**tensors, **places, **rest, **own}


def append_call(changes: Call) -> Call:
    """The same of an append, of two new keys each."""
    call = good_call()
    caches = {"k_cache": call["k_cache"], "v_cache": call["v_cache"], "k": half(3, 2, 2, 16), "v": half(3, 2, 2, 16)}
    places = {"cache_seqlens": call["cache_seqlens"], "page_table": call["page_table"], "cu_seqlens": None}
    good = {**caches, **places, "kv_layout": "NHD", "descale_k": None, "descale_v": None}
    return {**good, **{name: x for name, x in changes.items() if name in good}}


PACKED = {"q": half(7, 4, 16), "cu_seqlens_q": int32(0, 2, 2, 7)}
ONE_PAGE = {"page_table": None, "k_cache": half(3, 9, 2, 16), "v_cache": half(3, 9, 2, 16)}
LARGE = half(1, 1, 1, 16).expand(3, 2**30, 2, 16)  # without the memory of so many keys
FLOAT8 = {"k_cache": torch.zeros(8, 4, 2, 16).to(E4M3), "v_cache": torch.zeros(8, 4, 2, 16).to(E4M3)}

# Name: what to replace in the good call, and what is said of it. These are of attention and append alike.
BAD_CACHES: dict[str, tuple[Call, str]] = {
    "k_rank": (
        {"k_cache": half(8, 4, 16)},
        "k_cache: expected 4 dims (pages, page, heads, head_dim), got 3: (8, 4, 16)",
    ),
    "v_rank": (
        {**ONE_PAGE, "v_cache": half(3, 9, 2, 16, 1)},
        "v_cache: expected 4 dims (batch, keys, heads, head_dim), got 5: (3, 9, 2, 16, 1)",
    ),
    "k_rank_hnd": (
        {"k_cache": half(8), "kv_layout": "HND"},
        "k_cache: expected 4 dims (pages, heads, page, head_dim), got 1: (8,)",
    ),
    "layout": ({"kv_layout": "BSHD"}, "kv_layout: expected 'NHD' or 'HND', got 'BSHD'"),
    "v_dtype": ({"v_cache": half(8, 4, 2, 16).float()}, "v_cache: expected k_cache's dtype float16, got float32"),
    "v_not_float8": (
        {**FLOAT8, "v_cache": half(8, 4, 2, 16)},
        "v_cache: expected float8_e4m3fn or float8_e5m2, got float16",
    ),
    "v_heads": ({"v_cache": half(8, 4, 1, 16)}, "v_cache: expected as many heads as k_cache, 2, got 1"),
    "v_pages": ({"v_cache": half(7, 4, 2, 16)}, "v_cache: expected as many pages as k_cache, 8, got 7"),
    "v_sequences": (
        {**ONE_PAGE, "v_cache": half(2, 9, 2, 16)},
        "v_cache: expected as many sequences as k_cache, 3, got 2",
    ),
    "v_page": ({"v_cache": half(8, 5, 2, 16)}, "v_cache: expected pages of k_cache's 4 keys, got 5"),
    "v_keys": ({**ONE_PAGE, "v_cache": half(3, 8, 2, 16)}, "v_cache: expected k_cache's 9 keys, got 8"),
    "v_head_dim_0": ({"v_cache": half(8, 4, 2, 0)}, "v_cache: expected a head dim of at least 1, got (8, 4, 2, 0)"),
    "k_last_dim": (
        {"k_cache": half(8, 4, 2, 32)[..., ::2]},
        "k_cache: expected a contiguous last dim, got a stride of 2",
    ),
    "page_0": (
        {"k_cache": half(8, 0, 2, 16), "v_cache": half(8, 0, 2, 16)},
        "k_cache: expected pages of at least 1 key, got 0",
    ),
    "table_dtype": ({"page_table": torch.zeros(3, 3).long()}, "page_table: expected int32, got int64"),
    "table_rank": (
        {"page_table": int32(1, 2, 3)},
        "page_table: expected the shape (3, max_pages), a row per sequence, got (3,)",
    ),
    "table_rows": (
        {"page_table": int32(*range(8)).view(2, 4)},
        "page_table: expected the shape (3, max_pages), a row per sequence, got (2, 4)",
    ),
    "table_columns": (
        {"page_table": int32(*range(9)).view(3, 3).T},
        "page_table: expected contiguous columns, got a stride of 3",
    ),
    "capacity": (
        {"k_cache": LARGE, "v_cache": LARGE},
        "page_table: expected pages of at most 10^9 keys per sequence, got 3 of 1073741824",
    ),
    "keys": (
        {"page_table": None, "k_cache": LARGE, "v_cache": LARGE},
        "k_cache: expected at most 10^9 keys per sequence, got 1073741824",
    ),
    "lengths_dtype": ({"cache_seqlens": int32(1, 2, 3).long()}, "cache_seqlens: expected int32, got int64"),
    "lengths_size": (
        {"cache_seqlens": int32(1, 2)},
        "cache_seqlens: expected the shape (3,), a number per sequence, got (2,)",
    ),
    "lengths_strided": (
        {"cache_seqlens": int32(1, 2, 3, 4, 5)[::2]},
        "cache_seqlens: expected a contiguous tensor, got a stride of 2",
    ),
    "descale_of_16_bits": (
        {"descale_k": torch.ones(())},
        "descale_k: expected None for a k_cache of float16, which is not float8, got a tensor",
    ),
    "descale_dtype": (
        {**FLOAT8, "descale_v": torch.ones(()).double()},
        "descale_v: expected float32, got float64",
    ),
    "descale_shape": (
        {**FLOAT8, "descale_k": torch.ones(3, 4)},
        "descale_k: expected one number or the shape (3, 2), got (3, 4)",
    ),
}
BAD: dict[str, tuple[Call, str]] = {
    "q_rank": (
        {"q": half(3, 2, 4, 16, 1)},
        "q: expected 4 dims (batch, rows, heads, head_dim), got 5: (3, 2, 4, 16, 1)",
    ),
    "q_packed": ({"q": half(7, 4, 16)}, "q: expected 4 dims (batch, rows, heads, head_dim), got 3: (7, 4, 16)"),
    "q_not_packed": (
        {"cu_seqlens_q": PACKED["cu_seqlens_q"]},
        "q: expected 3 dims (rows, heads, head_dim), got 4: (3, 2, 4, 16)",
    ),
    "q_dtype": ({"q": half(3, 2, 4, 16).int()}, "q: expected float16, bfloat16, float32 or float64, got int32"),
    "q_float8": (
        {**FLOAT8, "q": torch.zeros(3, 2, 4, 16).to(E4M3)},
        "q: expected float16, bfloat16, float32 or float64, got float8_e4m3fn",
    ),
    "k_dtype": (
        {x: half(8, 4, 2, 16).bfloat16() for x in ("k_cache", "v_cache")},
        "k_cache: expected q's dtype float16, float8_e4m3fn or float8_e5m2, got bfloat16",
    ),
    "k_head_dim": ({"k_cache": half(8, 4, 2, 24)}, "k_cache: expected q's head dim 16, got 24"),
    "k_sequences": (
        {**ONE_PAGE, "q": half(2, 2, 4, 16)},
        "k_cache: expected as many sequences as q has, 2, got 3",
    ),
    "k_packed_sequences": (
        {**ONE_PAGE, **PACKED, "cu_seqlens_q": int32(0, 2, 7)},
        "k_cache: expected as many sequences as cu_seqlens_q has, 2, got 3",
    ),
    "heads": (
        {x: half(8, 4, 3, 16) for x in ("k_cache", "v_cache")},
        "q: expected a number of heads that is a multiple of k_cache's 3, got 4",
    ),
    "offsets_dtype": (
        {**PACKED, "cu_seqlens_q": PACKED["cu_seqlens_q"].long()},
        "cu_seqlens_q: expected int32, got int64",
    ),
    "offsets_rank": (
        {**PACKED, "cu_seqlens_q": PACKED["cu_seqlens_q"][None]},
        "cu_seqlens_q: expected the shape (sequences + 1,), got (1, 4)",
    ),
    "offsets_empty": (
        {**PACKED, "cu_seqlens_q": int32()},
        "cu_seqlens_q: expected the shape (sequences + 1,), got (0,)",
    ),
    "causal": ({"causal": "foo"}, "causal: expected False or 'none', True or 'bottom_right', or 'top_left', got 'foo'"),
    "scale": ({"scale": -1.0}, "scale: expected a finite number above 0, got -1"),
    "window": ({"window_left": -3}, "window_left: expected None (no limit) or a number of at least 0, got -3"),
    "softcap": ({"softcap": 0.0}, "softcap: expected None or a finite number above 0, got 0"),
    "sinks": ({"sinks": torch.zeros(2)}, "sinks: expected the shape (4,), a number per query head, got (2,)"),
    "slopes": (
        {"alibi_slopes": torch.zeros(2, 4)},
        "alibi_slopes: expected the shape (4,) or (3, 4), a slope per query head, got (2, 4)",
    ),
    "workspace_dtype": ({"workspace": torch.zeros(9)}, "workspace: expected uint8, got float32"),
    "workspace_rank": (
        {"workspace": torch.zeros(3, 3, dtype=torch.uint8)},
        "workspace: expected the shape (bytes,), got (3, 3)",
    ),
    "new_keys_without_lengths": (
        {"new_keys": 2, "cache_seqlens": None},
        "cache_seqlens: expected the lengths to which keys are appended, got None",
    ),
    "backend": ({"backend": "fast"}, "backend: expected 'auto', 'cpu', 'sm80' or 'sm90', got 'fast'"),
    "backend_sm90": ({"backend": "sm90"}, "backend: expected 'auto' or 'cpu' for CPU tensors, got 'sm90'"),
    "accumulate": (
        {"backend": "auto+float16"},
        "accumulate: expected 'float32' over a cache, got 'float16'",
    ),
}
BAD_APPENDS: dict[str, tuple[Call, str]] = {
    "k_new_rank": (
        {"k": half(6, 2, 16)},
        "k: expected 4 dims (batch, rows, heads, head_dim), got 3: (6, 2, 16)",
    ),
    "v_new_packed": (
        {"k": half(7, 2, 16), "cu_seqlens": int32(0, 2, 2, 7)},
        "v: expected 3 dims (rows, heads, head_dim), got 4: (3, 2, 2, 16)",
    ),
    "k_new_dtype": ({"k": half(3, 2, 2, 16).float()}, "k: expected k_cache's dtype float16, got float32"),
    "v_new_dtype": ({"v": half(3, 2, 2, 16).float()}, "v: expected k's dtype float16, got float32"),
    "k_new_float8": (
        {**FLOAT8, "k": torch.zeros(3, 2, 2, 16).to(E4M3)},
        "k: expected float16, bfloat16, float32 or float64, got float8_e4m3fn",
    ),
    "caches_int": (
        {x: half(8, 4, 2, 16).int() for x in ("k_cache", "v_cache")},
        "k_cache: expected float16, bfloat16, float32 or float64, got int32",
    ),
    "k_new_heads": ({"k": half(3, 2, 4, 16)}, "k: expected as many heads as k_cache, 2, got 4"),
    "v_new_head_dim": ({"v": half(3, 2, 2, 24)}, "v: expected v_cache's head dim 16, got 24"),
    "v_new_batch": ({"v": half(2, 2, 2, 16)}, "v: expected k's batch size 3, got 2"),
    "v_new_length": ({"v": half(3, 3, 2, 16)}, "v: expected k's length 2, got 3"),
    "no_lengths": (
        {"cache_seqlens": None},
        "cache_seqlens: expected the lengths to which keys are appended, got None",
    ),
    "new_offsets": (
        {"k": half(7, 2, 16), "v": half(7, 2, 16), "cu_seqlens": int32(0, 7)},
        "page_table: expected the shape (1, max_pages), a row per sequence, got (3, 3)",
    ),
}
