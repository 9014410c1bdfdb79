"""Problems over a KV cache: new rows of sequences whose keys lie in pages, in any order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.lengths import lengths_of
from bench.workloads import DTYPES, Inputs, Workload, pairs_in_window

# Of `make_inputs`.
NAMES = ("q", "k_pages", "v_pages", "table", "lengths", "k", "v")


@dataclass(frozen=True)
class CacheWorkload(Workload):
    """N new rows of each of B sequences over its keys, the new rows' own among them; a forward alone.

    M is the number of keys of a sequence; with `lengths` each has its own, and M is the longest's. Pages have `page`
    keys. With `append` the rows' own keys are not in the cache yet: the call writes them there first. Caches have q's
    dtype, or `cache_dtype`, e4m3, with factors of 1.
    """

    page: int = 64
    append: bool = False
    cache_dtype: str = ""

    @property
    def sequences(self) -> tuple[int, ...]:
        """How many keys each sequence has."""
        return lengths_of(self.lengths) if self.lengths else (self.M,) * self.B

    @property
    def columns(self) -> dict[str, Any]:
        return super().columns | {
            "page": self.page,
            "append": "yes" if self.append else "",
            "cache_dtype": self.cache_dtype,
        }

    @property
    def is_latent(self) -> bool:
        """Multi-head latent attention: one KV head, whose values are the first `Dv` columns of its keys."""
        return self.Hkv == 1 and self.head_dim_v < self.D

    @property
    def visible_pairs(self) -> float:
        """Counted exactly, without a window too."""
        window = self.window or (None, None)
        return sum(pairs_in_window(self.N, keys, window, self.causal) for keys in self.sequences)

    @property
    def rows(self) -> int:
        return self.B * self.N

    @property
    def keys(self) -> int:
        """The keys that rows see: with a window none to the left of all of a sequence's windows."""
        left = self.window[0] if self.window else None
        return sum(keys if left is None else min(keys, left + self.N) for keys in self.sequences)

    @property
    def tensor_bytes(self) -> dict[str, int]:
        sizes, width = super().tensor_bytes, DTYPES[self.cache_dtype or self.dtype].itemsize
        return sizes | {name: sizes[name] // DTYPES[self.dtype].itemsize * width for name in "kv"}

    @property
    def cache_bytes(self) -> int:
        return self.tensor_bytes["k"] + (0 if self.is_latent else self.tensor_bytes["v"])

    @property
    def dense(self) -> Workload:
        """The same problem over keys that lie one after the other, as many in all sequences; one row needs no mask."""
        causal = "none" if self.N == 1 and self.window is None else self.causal
        shape = (self.B, self.H, self.Hkv, self.N, self.M, self.D)
        scores = {name: getattr(self, name) for name in ("Dv", "window", "softcap", "sinks", "alibi")}
        return Workload(*shape, causal, self.dtype, **scores)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of what `make_inputs` returns."""
        pages = sum(-(-keys // self.page) for keys in self.sequences)
        paged, contiguous = (pages, self.page, self.Hkv), (self.B, self.M, self.Hkv)
        of_v = self.head_dim_v
        tables = ((self.B, -(-self.M // self.page)), (self.B,))
        shapes = ((*paged, self.D), (*paged, of_v), *tables, (*contiguous, self.D), (*contiguous, of_v))
        return dict(zip(NAMES, ((self.B, self.N, self.H, self.D), *shapes), strict=True))

    def make_inputs(self, device: torch.device, seed: int) -> Inputs:
        """The same keys twice: in pages, and one after the other. In the order of `NAMES`:

        q (B, N, H, D); k_pages (pages, page, Hkv, D) and v_pages (..., Dv), as many pages as are needed, in a random
        order, of the caches' dtype as k and v; table (B, most pages of a sequence) and lengths (B,) int32, the lengths
        with the rows' own keys; k (B, M, Hkv, D) and v (B, M, Hkv, Dv). Standard normal. Of latent attention v_pages
        and v are views of k's.
        """
        generator = torch.Generator(device).manual_seed(seed)
        width = self.shapes["table"][1]

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=DTYPES[self.dtype])

        lengths = torch.tensor(self.sequences, dtype=torch.int32, device=device)
        used = torch.arange(width, device=device) * self.page < lengths[:, None]
        numbers = torch.randperm(int(used.sum()), generator=generator, device=device)
        table = torch.zeros(self.B, width, dtype=torch.int32, device=device)
        table[used] = numbers.int()

        def both(columns: int) -> tuple[torch.Tensor, torch.Tensor]:
            whole = normal(self.B, width * self.page, self.Hkv, columns)
            whole = whole.to(DTYPES[self.cache_dtype or self.dtype])
            pages = torch.empty(len(numbers), self.page, self.Hkv, columns, dtype=whole.dtype, device=device)
            pages[numbers] = whole.unflatten(1, (width, self.page))[used]
            return pages, whole[:, : self.M]

        q = normal(self.B, self.N, self.H, self.D)
        k_pages, k = both(self.D)
        v_pages, v = (x[..., : self.Dv] for x in (k_pages, k)) if self.is_latent else both(self.head_dim_v)
        return q, k_pages, v_pages, table, lengths, k, v


def over_cache(B: int, H: int, Hkv: int, D: int, M: int, N: int = 1, **changes: Any) -> CacheWorkload:
    """In bfloat16, with pages of 64 keys unless `changes` says otherwise."""
    return replace(CacheWorkload(B, H, Hkv, N, M, D, "bottom_right", "bf16"), **changes)


def decode_grid() -> list[Workload]:
    """One row a sequence and a few, over caches of models' shapes; pages of 16 and of one key, windows, MLA, an append,
    float8."""
    shapes = [(1, 1024), (1, 8192), (1, 32768), (8, 1024), (8, 8192), (8, 32768), (64, 1024), (64, 8192)]
    cells = [over_cache(batch, 32, 8, 128, keys) for batch, keys in shapes]
    float8 = [replace(cells[5], cache_dtype="e4m3")]
    long = cells[-1]
    cells += [replace(long, page=page) for page in (16, 256, 1)]
    cells += [replace(long, B=batch, N=rows) for batch in (64, 1) for rows in (2, 4, 16)]
    mixed = lengths_of("mixed")
    of_mixed = over_cache(len(mixed), 32, 8, 128, max(mixed), lengths="mixed")
    cells += [of_mixed, replace(of_mixed, page=16)]
    cells += [over_cache(8, 64, 8, 64, 8192), over_cache(64, 64, 8, 64, 4096)]
    cells += [over_cache(64, 16, 8, 256, 8192), over_cache(8, 16, 8, 512, 8192)]
    cells += [over_cache(64, heads, 8, head_dim, 4096, window=(127, 0)) for heads, head_dim in ((64, 64), (32, 128))]
    latent = [(16, 8192), (64, 4096)]
    cells += [over_cache(batch, 128, 1, 576, keys, rows, Dv=512) for batch, keys in latent for rows in (1, 2)]
    cells += [over_cache(64, 16, 1, 576, 4096, Dv=512), over_cache(1, 128, 1, 576, 8192, Dv=512)]
    return [*cells, replace(long, append=True), *float8]


def decode_host_grid() -> list[Workload]:
    """A call whose kernel is shorter than the host's work, without and with an append."""
    plain = over_cache(1, 32, 8, 128, 1024)
    return [plain, replace(plain, append=True)]


def prefill_grid() -> list[Workload]:
    """Chunks of prompts over the keys before them, in pages of 64, 16, 8 and one, and of float8; whole prompts."""
    chunk = over_cache(1, 32, 8, 128, 32048, 2048)
    cells = [replace(chunk, page=page) for page in (64, 16, 256, 8, 1)] + [replace(chunk, N=512)]
    cells += [over_cache(4, 32, 8, 128, 8192, 1024), over_cache(1, 32, 8, 128, 8192, 8192)]
    others = [over_cache(1, 64, 8, 64, 32048, 2048), over_cache(1, 16, 8, 256, 32048, 2048)]
    cells += [replace(cell, page=page) for cell in others for page in (64, 1)]
    return [
        *cells,
        *(replace(chunk, page=page, cache_dtype="e4m3") for page in (64, 1)),
        replace(others[0], cache_dtype="e4m3"),
    ]


GRIDS: dict[str, Callable[[], list[Workload]]] = {
    "decode": decode_grid,
    "decode-host": decode_host_grid,
    "prefill": prefill_grid,
}
