"""Caches of keys and values for the tests: what is in them, the calls under test, and what must come out.

What no sequence has is NaN, and entries of tables that nothing may read name pages that do not exist, or hold NaN.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from cases import Causal
from numerics import ABSOLUTE, LSE_RELATIVE, mismatches, nan_in_new_memory, same_bits
from packed import offsets

import flash_cute
from flash_cute.reference.kvcache import cached, rows_of

Results = tuple[torch.Tensor, ...]
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# Where the caches' values are: memory of their own; the halves of one row, as vLLM has them; one buffer after the
# other; v the first columns of k; rows with gaps between them.
STORAGES = ("plain", "halves", "buffer", "view", "gaps")
GARBAGE = (-1, -(2**31), 2**31 - 1, 10**6)  # numbers of no page


@dataclass
class Cached:
    """A call of `flash_cute.attention_with_kvcache`."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    cache_seqlens: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    descale_k: torch.Tensor | None = None
    descale_v: torch.Tensor | None = None
    kv_layout: str = "NHD"
    causal: Causal = True
    options: dict[str, Any] = field(default_factory=dict)

    def replace(self, **changes: Any) -> Cached:
        return dataclasses.replace(self, **changes)

    def clone(self) -> Cached:
        """The same call with caches of its own, of the same strides."""
        k_cache, v_cache = cloned(self.k_cache, self.v_cache)
        return self.replace(k_cache=k_cache, v_cache=v_cache)

    @property
    def places(self) -> dict[str, Any]:
        names = ("cache_seqlens", "page_table", "descale_k", "descale_v", "kv_layout")
        return {name: getattr(self, name) for name in names}

    def arguments(self) -> dict[str, Any]:
        own = {"cu_seqlens_q": self.cu_seqlens_q, "k": self.k, "v": self.v, "causal": self.causal}
        return {**self.places, **own, **self.options}

    def run(self, backend: str | None = None, **more: Any) -> Results:
        """(out, lse), in memory that holds NaN before; the append, if there is one, happens.

        Of a call that the backend has no kernel for, the one that the plan chooses is tested.
        """
        name, *chip = (backend or "auto").split(":")  # see with_multiprocessors
        backend = backend if self.served_by(name) else ":".join(("auto", *chip))
        with nan_in_new_memory(self.q if self.q.dim() == 4 else self.q.unsqueeze(0)):
            arguments = {**self.arguments(), "return_lse": True, "backend": backend, **more}
            return flash_cute.attention_with_kvcache(self.q, self.k_cache, self.v_cache, **arguments)

    def served_by(self, backend: str) -> bool:
        """Whether a backend's kernels serve this call: see docs/decode.md."""
        if self.k_cache.dtype in FLOAT8:
            return backend != "sm80"
        if backend != "sm90" or max(self.k_cache.shape[-1], self.v_cache.shape[-1]) <= 256:
            return True
        return self.is_latent and self.k_cache.shape[-1] <= 576 and self.v_cache.shape[-1] <= 512

    @property
    def is_latent(self) -> bool:
        """Whether v_cache is a view of k_cache's first columns."""
        same = self.k_cache.data_ptr() == self.v_cache.data_ptr() and self.k_cache.dtype == self.v_cache.dtype
        return same and self.k_cache.stride() == self.v_cache.stride()

    def refused_on_cuda(self) -> str:
        """What is said of a call for which there is no kernel, of float8; else nothing."""
        if self.k_cache.dtype not in FLOAT8:
            return ""
        largest = max(self.k_cache.shape[-1], self.v_cache.shape[-1])
        return "no kernel for caches of (float8 of )?head dims" if largest > 256 else ""

    def rows(self) -> list[slice]:
        return rows_of(self.q, self.cu_seqlens_q)

    def of_sequence(self, b: int, out: torch.Tensor, lse: torch.Tensor) -> Results:
        """q, out and lse of a sequence alone: (1, Hq, n, D), (1, Hq, n, Dv) and (1, Hq, n)."""
        if self.cu_seqlens_q is None:
            return self.q[b : b + 1].transpose(1, 2), out[b : b + 1].transpose(1, 2), lse[b : b + 1]
        rows = self.rows()[b]
        q, out = (x[rows].transpose(0, 1).unsqueeze(0) for x in (self.q, out))
        return q, out, lse[None, :, rows]


def with_multiprocessors(backend: str | None, count: int) -> str:
    """The backend, whose plan counts with so many multiprocessors: take_multiprocessors in csrc/api/parse.h."""
    return f"{backend or 'auto'}:sms{count}"


def cloned(k_cache: torch.Tensor, v_cache: torch.Tensor) -> Results:
    """Both with their strides, in a copy of the memory that they share, or of the memory of each."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in (k_cache, v_cache)}
    copies = {data: storage.clone() for data, storage in storages.items()}

    def of(x: torch.Tensor) -> torch.Tensor:
        empty = torch.empty(0, dtype=x.dtype, device=x.device)
        memory = copies[x.untyped_storage().data_ptr()]
        return empty.set_(memory, x.storage_offset(), x.shape, x.stride())  # type: ignore[call-overload]

    return of(k_cache), of(v_cache)


def caches(
    shape: tuple[int, int, int],
    head_dims: tuple[int, int],
    dtype: torch.dtype,
    device: str,
    storage: str = "plain",
    dtype_v: torch.dtype | None = None,
) -> Results:
    """Two caches `(entries, keys, Hkv, D or Dv)` full of NaN."""
    head_dim, head_dim_v = head_dims
    options: dict[str, Any] = {"device": device}
    nan = float("nan")
    if storage == "halves":
        both = torch.full((*shape, head_dim + head_dim_v), nan, **options).to(dtype)
        return both[..., :head_dim], both[..., head_dim:]
    if storage == "buffer":
        both = torch.full((2, *shape, max(head_dims)), nan, **options).to(dtype)
        return both[0, ..., :head_dim], both[1, ..., :head_dim_v]
    if storage == "view":
        k_cache = torch.full((*shape, head_dim), nan, **options).to(dtype)
        return k_cache, k_cache[..., :head_dim_v]
    gap = 16 if storage == "gaps" else 0
    k_cache, v_cache = (
        torch.full((shape[0], shape[1] + (gap > 0), shape[2], d + gap), nan, **options).to(x)[:, : shape[1], :, :d]
        for d, x in ((head_dim, dtype), (head_dim_v, dtype_v or dtype))
    )
    return k_cache, v_cache


def make(
    rng: torch.Generator,
    device: str,
    lengths: Sequence[int],
    rows: int | Sequence[int] = 1,
    *,
    page: int | None = None,
    new_keys: int | None = None,
    appends: bool = False,
    heads_q: int = 4,
    heads_kv: int = 2,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    dtype: torch.dtype | None = None,
    cache_dtypes: tuple[torch.dtype, torch.dtype] | None = None,
    descales: str = "none",
    kv_layout: str = "NHD",
    storage: str = "plain",
    room: int = 3,
    shared: bool = False,
    causal: Causal = True,
    **options: Any,
) -> Cached:
    """Standard normal values; `lengths`: cache_seqlens; `rows`: of each sequence, several numbers are ragged.

    appends: new keys too, `new_keys` of each sequence, by default as many as rows. room: how many more keys a sequence
    may have than the longest one has after that. shared: the first pages of each sequence are the first one's.
    descales: "none", "number", "heads", or "powers" of two, of heads.
    """
    pick = random.Random(int(torch.randint(2**31, (1,), generator=rng)))
    if dtype is None:
        dtype = torch.float16 if str(device).startswith("cuda") else torch.float32
    ragged = not isinstance(rows, int)
    counts = list(rows) if not isinstance(rows, int) else [rows] * len(lengths)
    news = [0] * len(counts) if not appends else counts if ragged or new_keys is None else [new_keys] * len(counts)
    head_dim_v = head_dim if head_dim_v is None else head_dim_v

    def normal(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=rng).to(device, of)

    final = [0 if n < 0 else n + new for n, new in zip(lengths, news, strict=True)]
    capacity = max([1, *final]) + room
    dtype_k, dtype_v = cache_dtypes or (dtype, dtype)
    table: list[list[int]] = []
    shape = (len(counts), capacity, heads_kv)
    if page is not None:
        width = -(-capacity // page)
        table, pages = _table(pick, lengths, final, page, width, shared)
        shape = (pages, page, heads_kv)
    k_cache, v_cache = caches(shape, (head_dim, head_dim_v), dtype_k, device, storage, dtype_v)
    keys = [(b, key) for b, length in enumerate(lengths) for key in range(length)]
    places = keys if page is None else [(table[b][key // page], key % page) for b, key in keys]
    if places:
        entries, numbers = (list(x) for x in zip(*places, strict=True))
        k_cache[entries, numbers] = normal(len(places), heads_kv, head_dim, of=dtype_k)
        if storage != "view":
            v_cache[entries, numbers] = normal(len(places), heads_kv, head_dim_v, of=dtype_v)
    if kv_layout == "HND":
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
        if storage == "plain":
            k_cache, v_cache = k_cache.contiguous(), v_cache.contiguous()
    shape_q = (sum(counts),) if ragged else (len(counts), counts[0] if counts else 1)
    shape_new = shape_q if ragged else (len(counts), news[0] if news else 0)
    new = None
    if appends:
        new = normal(*shape_new, heads_kv, head_dim), normal(*shape_new, heads_kv, head_dim_v)
        if storage == "view":
            new = new[0], new[0][..., :head_dim_v]
    factors = [_descale(descales, rng, len(counts), heads_kv, device) for _ in range(2)]
    if storage == "view":
        factors[1] = factors[0]
    return Cached(
        normal(*shape_q, heads_q, head_dim),
        k_cache,
        v_cache,
        torch.tensor(list(lengths), dtype=torch.int32, device=device),
        None if page is None else torch.tensor(table, dtype=torch.int32, device=device).view(len(counts), width),
        offsets(counts, device) if ragged else None,
        *(new or (None, None)),
        *factors,
        kv_layout=kv_layout,
        causal=causal,
        options=options,
    )


def _table(
    pick: random.Random, lengths: Sequence[int], final: Sequence[int], page: int, width: int, shared: bool
) -> tuple[list[list[int]], int]:
    """Shuffled pages of each sequence and, where it has no keys, garbage; and how many pages there are."""
    used = [-(-n // page) for n in final]
    pages = sum(used) + 3
    free = list(range(pages))
    pick.shuffle(free)
    table = []
    for count in used:
        row = [free.pop() for _ in range(count)]
        table.append(row + [pick.choice((*GARBAGE, free[-1])) for _ in range(width - count)])
    if shared:
        whole = [max(0, n) // page for n in lengths]  # pages that an append does not write
        for row, count in zip(table[1:], whole[1:], strict=True):
            row[: min(count, whole[0])] = table[0][: min(count, whole[0])]
    return table, pages


def _descale(kind: str, rng: torch.Generator, sequences: int, heads: int, device: str) -> torch.Tensor | None:
    if kind == "none":
        return None
    factors = 2.0 ** (2 * torch.rand((sequences, heads), generator=rng) - 1)
    if kind == "number":
        factors = torch.tensor(1.37)
    if kind == "powers":
        factors = 2.0 ** torch.randint(-2, 3, (sequences, heads), generator=rng)
    return factors.to(device)


def problems(case: Cached, out: torch.Tensor, lse: torch.Tensor) -> list[str]:
    """What is wrong with the results of a call whose append, if there is one, is done; one sentence each."""
    found = []
    new = 0 if case.k is None else case.k.shape[1]
    used = torch.zeros(case.q.shape[0], dtype=torch.bool)
    for b, rows in enumerate(case.rows()):
        count = rows.stop - rows.start
        used[rows] = True
        if count == 0:
            continue
        q, part, part_lse = case.of_sequence(b, out, lse)
        of_b = count if case.k is not None and case.cu_seqlens_q is not None else new
        k, v = (
            cached(x, b, case.cache_seqlens, case.page_table, of_b, case.kv_layout, descale)
            for x, descale in ((case.k_cache, case.descale_k), (case.v_cache, case.descale_v))
        )
        options = dict(case.options)
        for name in ("row_invariant", "batch_invariant"):
            options.pop(name, None)
        slopes = options.get("alibi_slopes")
        if slopes is not None and slopes.dim() == 2:
            options["alibi_slopes"] = slopes[b : b + 1]
        exact = case.k_cache.dtype == case.q.dtype
        check = mismatches if exact else _mismatches_of_float8
        of_q = (k.to(q.dtype), v.to(q.dtype)) if exact else (k, v)
        found += [f"sequence {b}: {x}" for x in check(part, part_lse, q, *of_q, case.causal, **options)]
    if case.cu_seqlens_q is not None and not ((out[~used] == 0).all() and (lse[:, ~used] == -torch.inf).all()):
        found.append("rows of no sequence are not empty")
    return found


def _mismatches_of_float8(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: Causal,
    **options: Any,
) -> list[str]:
    """The same rule where k and v, in float64, are more exact than q's dtype: their rounding to it is unfused's."""
    true_out, true_lse = flash_cute.reference.attention(q, k, v, causal, **options)
    plain = flash_cute.reference.unfused(q, k.to(q.dtype), v.to(q.dtype), causal, **options).double()
    peak = true_out.abs().amax()
    allowed = 2 * (plain - true_out).abs().amax() + torch.finfo(q.dtype).eps * peak + ABSOLUTE
    error = (out.double() - true_out).abs().nan_to_num(nan=torch.inf).amax()
    found = [] if error <= allowed else [f"out errs by {error:.3g}, allowed {allowed:.3g}"]
    blind = true_lse == -torch.inf
    of_lse = (lse.double() - true_lse).masked_fill(blind & (lse == -torch.inf), 0).abs().nan_to_num(nan=torch.inf)
    relative = (of_lse / true_lse.abs().clamp(min=1).masked_fill(blind, 1)).amax()
    return found if relative <= LSE_RELATIVE else [*found, f"lse errs by {relative:.3g}"]


def check(case: Cached, backend: str | None = None) -> Results:
    """Runs a call, fails unless caches and results are right, and returns the results; none if it has to be refused."""
    said = case.refused_on_cuda() if case.q.is_cuda else ""
    if said:
        with pytest.raises(ValueError, match=said):
            case.run(backend)
        return ()
    expected = case.clone()
    if case.k is not None:
        flash_cute.reference.append_kvcache(
            expected.k_cache, expected.v_cache, case.k, case.v, cu_seqlens=case.cu_seqlens_q, **case.places
        )
    out, lse = case.run(backend)
    assert same_bits((case.k_cache, case.v_cache), (expected.k_cache, expected.v_cache)), "the caches are wrong"
    found = problems(case, out, lse)
    assert not found, "; ".join(found)
    return out, lse


def alone(case: Cached, b: int) -> Cached:
    """Sequence b of a call as a call of its own, over a contiguous cache in memory of its own."""
    length = 0 if case.cache_seqlens is None else int(case.cache_seqlens[b])
    new = case.rows()[b].stop - case.rows()[b].start if case.cu_seqlens_q is not None else 0
    rows = case.rows()[b] if case.cu_seqlens_q is not None else slice(None)
    pick = (lambda x: x[rows].unsqueeze(0)) if case.cu_seqlens_q is not None else (lambda x: x[b : b + 1])
    room = max(0, length) + (0 if case.k is None else max(new, case.k.shape[1])) + 1
    filled = []
    for x in (case.k_cache, case.v_cache):
        whole = cached(x, b, case.cache_seqlens, case.page_table, 0, case.kv_layout)[0].transpose(0, 1)  # (n, Hkv, D)
        own = torch.zeros((1, room, *whole.shape[1:]), dtype=x.dtype, device=x.device)
        own[0, : whole.shape[0]] = whole.to(x.dtype)
        filled.append(own)
    if case.is_latent:
        filled[1] = filled[0][..., : case.v_cache.shape[-1]]
    slopes = case.options.get("alibi_slopes")
    options = dict(case.options)
    if slopes is not None and slopes.dim() == 2:
        options["alibi_slopes"] = slopes[b : b + 1]
    factors = [x if x is None or x.numel() == 1 else x[b : b + 1] for x in (case.descale_k, case.descale_v)]
    return Cached(
        pick(case.q),
        *filled,
        torch.tensor([length], dtype=torch.int32, device=case.q.device),
        None,
        None,
        *(x if x is None else pick(x) for x in (case.k, case.v)),
        *factors,
        causal=case.causal,
        options=options,
    )
