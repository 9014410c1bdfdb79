"""What `explain` says as data, field by field."""

from __future__ import annotations

from typing import Any, TypedDict

__all__ = ["PlanData"]


class PlanData(TypedDict, total=False):
    """`Explanation.data`: plain JSON types. On the CPU it has the call, `backend`, `copies` and `reasons` alone."""

    dtype: str
    """The call: the tensors' dtype, as in "bfloat16"; of float8 tensors q's."""
    dtype_k: str
    """Of float8 tensors and of caches, and absent otherwise. So is the next one."""
    dtype_v: str
    out_dtype: str
    """Of float8 tensors, and absent otherwise."""
    batch: int
    """Of packed sequences their number, as of a call over caches."""
    heads_q: int
    heads_kv: int
    len_q: int
    """Of packed sequences the rows of all of them."""
    len_k: int
    """Of caches the most keys that a sequence may have."""
    head_dim: int
    head_dim_v: int
    causal: str
    """"none", "top_left" or "bottom_right"."""
    window: list[int | None] | None
    """Keys before and after a row's position; None: no limit."""
    mask: str
    """The kind of band that has an effect in this call: "full", "causal" or "window"."""
    mask_intervals: int
    """Of a call with a `Mask`, and absent otherwise: the intervals of rows that each key has. So are the next
    three."""
    mask_matrix: bool
    """Whether it has a matrix of booleans, or blocks, beside them."""
    mask_batches: int
    """The batch items that have a mask of their own; 1: all have one."""
    mask_heads: int
    """The KV heads that have one; 1: all have one."""
    scale: float
    softcap: float | None
    sinks: bool
    alibi: bool

    packed: bool
    """True of packed sequences, and absent otherwise. So are the next four."""
    max_seqlen_q: int | None
    """The hint."""
    max_seqlen_k: int | None
    seqused_q: bool
    """Whether it is given."""
    seqused_k: bool

    page: int | None
    """Of a call over caches: the keys of a page; None: they are contiguous. Absent otherwise. So are the next two."""
    cache_seqlens: bool
    """Whether they are given."""
    new_keys: int
    """Appended to each sequence before; -1: as many as it has rows."""

    backend: str
    """"cpu", "sm80" or "sm90"."""
    copies: dict[str, str | None]
    """Why each tensor is copied, by its name; None: it is read or written in place."""
    reasons: list[str]
    """Sentences: why this kernel, and what it does."""

    family: str
    """The kernel: its namespace in `flash_cute`, which is its folder in csrc/."""
    kernel: str
    """Its function; of a backward that which computes dk and dv."""
    kernel_head_dim: int
    """The head dim that it is compiled for."""
    kernel_head_dim_v: int
    variant: str
    """"dense"; "packed": it reads the sequences at run time; "modified": its scores may have a softcap or ALiBi too;
    "dense modified"."""
    accumulate: str
    """Of a forward: as in `attention`."""
    entry: int
    """The number of its tile in the family's table."""
    tile: str
    """Its name there; "" where the family has one tile."""
    block_m: int
    """Query rows: of a forward per CTA, of a backward per step."""
    block_n: int
    """Keys: of a forward per step, of a backward per CTA."""
    threads: int
    """Per CTA."""
    stages: int
    """Buffers of K and V; of a backward, of Q and dO."""
    smem_bytes: int
    """Per CTA."""
    ctas_per_sm: int
    tiles: int
    """Row tiles of all heads, of a backward key tiles; of packed sequences the most that there can be."""
    column_parts: int
    """Of a forward: the CTAs per row tile that share out's columns."""
    split_tiles: int
    """How many tiles have their keys, in a backward their rows, split over CTAs."""
    split_ctas: int
    """Over how many."""
    capability: int
    workspace_bytes: int
    """What a call allocates beside its results, padded by the allocator to 512 bytes. What `copies` names is copied to
    memory of its own."""
    deterministic: bool
    """Of a backward."""
    dlse: bool
    """Of a backward: whether a gradient flows into the LSE."""

    tuned: bool
    """Whether a file of `use_tuning` decided."""
    tuning_key: dict[str, int] | None
    """The call as such a file has it; None of float8 tensors, which it does not have."""
    compiled: dict[str, Any] | None
    """The compiler's report on that very kernel: `arch`, `registers`, `spill_stores` and `spill_loads` in bytes, ...;
    None where the driver compiles it from PTX."""
