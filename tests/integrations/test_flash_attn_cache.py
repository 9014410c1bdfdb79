"""flash-attn's calls over a KV cache: random ones against float64, sequence by sequence; what is written, and where."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from numerics import assert_matches, bits, same_bits

from flash_cute.integrations import _flash_attn_2_cuda, _flash_attn_calls, flash_attn, flash_attn_interface
from flash_cute.integrations._rotary import apply_rotary

BATCH, HEADS, HEADS_KV, DIM, ROTARY = 3, 4, 2, 32, 16


class Call:
    """A cache, and what is asked of it, drawn from a seed; the arguments of both versions' functions."""

    def __init__(self, version: int, device: str, rng: torch.Generator) -> None:
        draw = random.Random(torch.randint(2**31, (), generator=rng).item())
        dtype = torch.float16 if device == "cuda" else torch.float32
        self.kind = draw.choice(("contiguous", "indexed", "paged"))
        self.dim_v = draw.choice((DIM, 16))
        self.page = draw.choice((1, 4, 16, 20)) if self.kind == "paged" else 48
        self.room = self.page * -(-48 // self.page)
        self.lengths = [draw.choice((-1, 0, draw.randrange(40), draw.randrange(40))) for _ in range(BATCH)]
        self.ragged = version == 3 and draw.random() < 0.5
        self.rows = [draw.randrange(6) for _ in range(BATCH)] if self.ragged else [draw.randrange(1, 6)] * BATCH
        self.appends = draw.random() < 0.7
        ragged_new = version == 3 and draw.random() < 0.5
        same_new = self.ragged and draw.random() < 0.5
        self.new = [0] * BATCH
        if self.appends:
            counts = [draw.randrange(6) for _ in range(BATCH)] if ragged_new else [draw.randrange(6)] * BATCH
            self.new = self.rows if same_new else counts
        self.leftpad = [draw.randrange(12) for _ in range(BATCH)] if draw.random() < 0.4 else None
        self.rotary = self.appends and draw.random() < 0.5
        self.interleaved = draw.random() < 0.5
        self.causal = draw.random() < 0.6
        self.window = draw.choice(((-1, -1), (9, 0), (7, 2)))
        self.softcap = draw.choice((0.0, 5.0))
        self.slopes = torch.rand(HEADS, generator=rng).to(device) if version == 2 and draw.random() < 0.3 else None

        def tensor(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=rng).to(device, dtype)

        def int32(values: Any) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        pages = {"contiguous": BATCH, "indexed": BATCH + 2}.get(self.kind, BATCH * self.room // self.page + 2)
        self.pages = torch.randperm(pages, generator=rng)[: BATCH * self.room // self.page].view(BATCH, -1)
        if self.kind == "contiguous":
            self.pages = torch.arange(BATCH)[:, None]
        # K and V are neighbours in a row of one tensor, full of NaN where nothing is used.
        both = torch.full((pages, self.page, HEADS_KV, DIM + self.dim_v), torch.nan, device=device, dtype=dtype)
        self.cache = both[..., :DIM], both[..., DIM:]
        for b, length in enumerate(self.lengths):
            for i in range(0 if self.leftpad is None else self.leftpad[b], max(length, 0)):
                for cache in self.cache:
                    cache[self.place(b, i)] = tensor(*cache.shape[2:])
        self.q = tensor(sum(self.rows), HEADS, DIM)
        self.k, self.v = tensor(sum(self.new), HEADS_KV, DIM), tensor(sum(self.new), HEADS_KV, self.dim_v)
        angles = torch.rand(self.room, ROTARY // 2, generator=rng, dtype=torch.float64) * 6
        self.table = tuple(x.to(device, dtype) for x in (angles.cos(), angles.sin()))
        self.positions = [draw.randrange(40) for _ in range(BATCH)] if version == 3 and self.rotary else self.lengths

        self.options: dict[str, Any] = {
            "cache_seqlens": int32(self.lengths),
            "causal": self.causal,
            "window_size": self.window,
            "softcap": self.softcap,
            "num_splits": draw.randrange(4),
        }
        if version == 2:
            self.options["alibi_slopes"] = self.slopes
        if self.kind == "indexed":
            self.options["cache_batch_idx"] = int32(self.pages[:, 0].tolist())
        if self.kind == "paged":
            self.options["block_table" if version == 2 else "page_table"] = int32(self.pages.tolist())
        if self.leftpad is not None:
            self.options["cache_leftpad"] = int32(self.leftpad)
        if self.rotary:
            self.options |= {"rotary_cos": self.table[0], "rotary_sin": self.table[1]}
            self.options |= {"rotary_interleaved": self.interleaved}
            if version == 3:
                self.options["rotary_seqlens"] = int32(self.positions)
        q, k, v = self.q, self.k, self.v
        if self.ragged:
            self.options["cu_seqlens_q"] = int32([0, *torch.tensor(self.rows).cumsum(0).tolist()])
        else:
            q = q.unflatten(0, (BATCH, -1))
        if self.appends and (ragged_new or same_new):
            offsets = int32([0, *torch.tensor(self.new).cumsum(0).tolist()])
            self.options["cu_seqlens_k_new"] = self.options["cu_seqlens_q"] if same_new else offsets
        else:
            k, v = (x.unflatten(0, (BATCH, self.new[0])) for x in (k, v))
        self.arguments = (q, *self.cache, *((k, v) if self.appends else ()))

    def place(self, b: int, i: int) -> tuple[int, int]:
        """Page and row of key i of sequence b."""
        return int(self.pages[b, i // self.page]), i % self.page

    def rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x `(N, H, D)`, its first dims turned by the angles of the positions, as complex numbers.

        In 16 bits a last bit of a rotated number moves an LSE by more than attention may err. So the numbers of
        `apply_rotary` are returned, where they are within a rounding of the complex ones.
        """
        cos, sin = (x[positions] for x in self.table)
        first, rest = x[..., :ROTARY].double(), x[..., ROTARY:]
        split = (first[..., ::2], first[..., 1::2]) if self.interleaved else first.chunk(2, -1)
        turned = torch.complex(*split) * torch.complex(cos.double(), sin.double())[:, None]
        pair = (turned.real, turned.imag)
        exact = torch.cat((torch.stack(pair, -1).flatten(-2) if self.interleaved else torch.cat(pair, -1), rest), -1)
        if x.dtype == torch.float32 or x.numel() == 0:
            return exact
        rounded = apply_rotary(x[None], cos, sin, interleaved=self.interleaved)[0]
        eps = torch.finfo(x.dtype).eps
        torch.testing.assert_close(rounded.double(), exact, rtol=eps, atol=eps * 2**-10)
        return rounded

    def check(self, function: Callable[..., Any]) -> None:
        """What the function returns and what it has left in the cache."""
        before = [x.clone() for x in self.cache]
        out, lse = function(*self.arguments, **self.options)
        out, lse = (out, lse) if self.ragged else (out.flatten(0, 1), lse.transpose(0, 1).flatten(1))
        own_positions = self.causal or self.window != (-1, -1)
        sides = tuple(None if side < 0 else side for side in self.window)
        score = {"window": None if sides == (None, None) else sides, "softcap": self.softcap or None}
        first_row = first_new = 0
        for b, length in enumerate(self.lengths):
            of_rows = slice(first_row, first_row + self.rows[b])
            of_new = slice(first_new, first_new + self.new[b])
            first_row, first_new = of_rows.stop, of_new.stop
            given = out[of_rows].transpose(0, 1)[None], lse[:, of_rows][None]
            q, k, v = self.q[of_rows], self.k[of_new], self.v[of_new]
            if length < 0:
                assert (given[0] == 0).all() and (given[1] == -torch.inf).all()
                continue
            if self.rotary:
                position = self.positions[b] + torch.arange(50)
                k = self.rotated(k, position[: self.new[b]]).to(k.dtype)
                q = self.rotated(q, position[: len(q)] if own_positions else position[:1].expand(len(q))).to(q.dtype)
            for cache, x in zip(before, (k, v), strict=True):
                for i in range(self.new[b]):
                    cache[self.place(b, length + i)] = x[i]
            start = 0 if self.leftpad is None else self.leftpad[b]
            places = [self.place(b, i) for i in range(start, length + self.new[b])]
            keys = [x[[p for p, _ in places], [r for _, r in places]].transpose(0, 1)[None] for x in before]
            slopes = {} if self.slopes is None else {"alibi_slopes": self.slopes}
            assert_matches(*given, q.transpose(0, 1)[None], *keys, self.causal, **score, **slopes)
        tolerance = 2e-3 if self.q.dtype == torch.float16 else 1e-6  # of rotated keys, which float32 has computed
        for cache, expected in zip(self.cache, before, strict=True):
            torch.testing.assert_close(cache, expected, atol=tolerance, rtol=tolerance, equal_nan=True)
        if not self.rotary:
            assert same_bits(self.cache, tuple(before))


def version_2(*args: Any, **options: Any) -> Any:
    return flash_attn.flash_attn_with_kvcache(*args, **options, return_softmax_lse=True)


def version_3(*args: Any, **options: Any) -> Any:
    given = {**options, "pack_gqa": True, "scheduler_metadata": torch.zeros(1), "max_seqlen_q": 1}
    return flash_attn_interface.flash_attn_with_kvcache(*args, **given, return_softmax_lse=True)


def compiled_module(q: Any, k_cache: Any, v_cache: Any, k: Any = None, v: Any = None, **options: Any) -> Any:
    names = ("cache_seqlens", "rotary_cos", "rotary_sin", "cache_batch_idx", "cache_leftpad", "block_table")
    place = [options.get(name) for name in (*names, "alibi_slopes")]
    score = (None, options["causal"], *options["window_size"], options["softcap"])
    interleaved = options.get("rotary_interleaved", True)
    out = torch.full((*q.shape[:-1], v_cache.shape[-1]), torch.nan, dtype=q.dtype, device=q.device)
    returned, lse = _flash_attn_2_cuda.fwd_kvcache(q, k_cache, v_cache, k, v, *place, out, *score, interleaved, 0)
    assert returned is out
    return out, lse


@pytest.mark.parametrize(
    ("version", "function"), [(2, version_2), (2, compiled_module), (3, version_3)], ids=["2", "module", "3"]
)
def test_random_calls(version: int, function: Callable[..., Any], device: str, rng: torch.Generator) -> None:
    for _ in range(12):
        Call(version, device, rng).check(function)


def paged(rng: torch.Generator, device: str, page: int = 4) -> tuple[torch.Tensor, ...]:
    """q and k, v of sequences of 5, 0 and 9 keys, packed, and the same keys in pages."""
    dtype = torch.float16 if device == "cuda" else torch.float32
    q, k, v = (torch.randn(n, h, 16, generator=rng).to(device, dtype) for n, h in ((6, 4), (14, 2), (14, 2)))
    table = torch.randperm(12, generator=rng).int()[: 3 * 3].view(3, 3)
    pages = torch.full((2, 12, page, 2, 16), torch.nan, dtype=dtype, device=device)
    for b, (first, length) in enumerate(((0, 5), (5, 0), (5, 9))):
        for i in range(length):
            pages[:, table[b, i // page], i % page] = torch.stack((k, v))[:, first + i]
    offsets = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 2, 3, 6], [0, 5, 5, 14])]
    return q, k, v, *pages, table.to(device), *offsets


def test_block_table_of_packed_queries(device: str, rng: torch.Generator) -> None:
    q, k, v, k_pages, v_pages, table, rows, keys = paged(rng, device)
    options = {"causal": True, "window_size": (6, 0), "softcap": 4.0, "return_attn_probs": True}
    expected = flash_attn.flash_attn_varlen_func(q, k, v, rows, keys, 3, 9, **options)
    given = flash_attn.flash_attn_varlen_func(q, k_pages, v_pages, rows, keys, 3, 9, **options, block_table=table)
    torch.testing.assert_close(given[:2], expected[:2], atol=2e-3, rtol=2e-3)
    assert given[2] is None
    torch.testing.assert_close(given[0][2], torch.zeros_like(q[2]))  # no keys
    private = {"softcap": 4.0, "window_size_left": 6, "window_size_right": 0, "block_table": table}
    call = (q, k_pages, v_pages, rows, keys, 3, 9, 0.0, None, True)
    assert same_bits(_flash_attn_calls._flash_attn_varlen_forward(*call, **private)[:2], given[:2])
    used = keys.diff()
    wrong = torch.zeros_like(keys)  # they do not count beside seqused_k
    call = (q, k_pages, v_pages, rows, wrong, 3, 9, 0.0, None, True)
    assert same_bits(_flash_attn_calls._flash_attn_varlen_forward(*call, **private, seqused_k=used)[:2], given[:2])


def test_scores_with_values(device: str, rng: torch.Generator) -> None:
    """FlashAttention-3's qv over MLA's cache, in either order of its parts; an append goes to both."""
    dtype = torch.float16 if device == "cuda" else torch.float32
    q, qv = (torch.randn(2, 3, 4, dim, generator=rng).to(device, dtype) for dim in (16, 32))
    new = torch.randn(2, 3, 1, 48, generator=rng).to(device, dtype)
    lengths = torch.tensor([11, 0], dtype=torch.int32, device=device)
    for of_v, of_k in ((slice(32), slice(32, 48)), (slice(16, 48), slice(16))):
        rows = torch.randn(2, 20, 1, 48, generator=rng).to(device, dtype)
        full = rows.clone()
        for b, length in enumerate(lengths):
            full[b, length : length + 3] = new[b]
        options = {"cache_seqlens": lengths, "causal": True, "return_softmax_lse": True}
        call = (q, rows[..., of_k], rows[..., of_v], new[..., of_k], new[..., of_v])
        out, lse = flash_attn_interface.flash_attn_with_kvcache(*call, qv=qv, **options)
        assert torch.equal(rows, full)
        whole = torch.empty(2, 3, 4, 48, device=device, dtype=dtype)
        whole[..., of_k], whole[..., of_v] = q, qv
        for b, length in enumerate(lengths):
            keys = full[b : b + 1, : length + 3].transpose(1, 2)
            own = slice(b, b + 1)
            assert_matches(out[own].transpose(1, 2), lse[own], whole[own].transpose(1, 2), keys, keys[..., of_v], True)
    apart = (q, rows[..., of_k], rows[..., of_v].clone())
    with pytest.raises(ValueError, match="flash_cute: qv: expected k_cache and v_cache that are neighbours"):
        flash_attn_interface.flash_attn_with_kvcache(*apart, qv=qv, cache_seqlens=lengths)


def test_whole_cache_and_one_length(rng: torch.Generator) -> None:
    """Without lengths all keys count; an int is that of all sequences; flash-attn's causal is False by default."""
    q, k, v = (torch.randn(2, n, 2, 16, generator=rng) for n in (3, 10, 10))
    assert_equal = torch.testing.assert_close
    function = flash_attn.flash_attn_with_kvcache
    assert_equal(function(q, k, v), flash_attn.flash_attn_func(q, k, v))
    assert_equal(function(q, k, v, cache_seqlens=7), flash_attn.flash_attn_func(q, k[:, :7], v[:, :7]))
    left = torch.tensor([4, 0], dtype=torch.int32)
    padded = function(q, k, v, cache_leftpad=left, causal=True)
    assert_equal(padded[:1], flash_attn.flash_attn_func(q[:1], k[:1, 4:], v[:1, 4:], causal=True))
    new = torch.randn(2, 1, 2, 16, generator=rng)
    function(q, k, v, new, new, cache_seqlens=2)
    assert torch.equal(k[:, 2], new[:, 0]) and torch.equal(v[:, 2], new[:, 0])


def test_keys_past_the_room(rng: torch.Generator) -> None:
    """New keys that the cache has no room for are dropped, with left padding too; a page that is none counts as 0."""
    q, k, v = (torch.randn(1, n, 2, 16, generator=rng) for n in (1, 8, 8))
    new = torch.randn(1, 4, 2, 16, generator=rng)
    for left in (None, torch.tensor([3], dtype=torch.int32)):
        caches = (k.clone(), v.clone())
        first = 0 if left is None else 3
        out = flash_attn.flash_attn_with_kvcache(q, *caches, new, new, cache_seqlens=6, cache_leftpad=left)
        assert all(torch.equal(x[:, 6:], new[:, :2]) for x in caches)
        torch.testing.assert_close(out, flash_attn.flash_attn_func(q, *(x[:, first:] for x in caches)))
    table = torch.tensor([[1, 9]], dtype=torch.int32)  # of pages of four rows
    pages = [x.view(2, 4, 2, 16) for x in (k, v)]
    out = flash_attn.flash_attn_with_kvcache(q, *pages, block_table=table, cache_leftpad=left)
    keys = [torch.cat((x[1:, 3:], torch.zeros(1, 4, 2, 16)), 1) for x in pages]
    torch.testing.assert_close(out, flash_attn.flash_attn_func(q, *keys))


def test_hints_change_no_bit(rng: torch.Generator) -> None:
    q, k, v = (torch.randn(1, n, 2, 16, generator=rng) for n in (2, 30, 30))
    function = flash_attn_interface.flash_attn_with_kvcache
    expected = function(q, k, v, cache_seqlens=21)
    hints = {"num_splits": 7, "pack_gqa": False, "max_seqlen_q": 900, "scheduler_metadata": torch.ones(3)}
    assert torch.equal(bits(function(q, k, v, cache_seqlens=21, **hints)), bits(expected))
    given = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=21, num_splits=5)
    assert torch.equal(bits(given), bits(expected))


X = torch.zeros(2, 4, 2, 16)
TABLE = torch.zeros(2, 1, dtype=torch.int32)
LENGTHS = torch.tensor([1, 2], dtype=torch.int32)
NEW = {"k": X[:, :1] + 1, "v": X[:, :1] + 1, "cache_seqlens": LENGTHS}
ANGLES = torch.zeros(4, 4)
V2, V3 = flash_attn.flash_attn_with_kvcache, flash_attn_interface.flash_attn_with_kvcache
REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (V2, {"cache_seqlens": -1}, "cache_seqlens: expected a number of keys or a tensor"),
    (V2, {"cache_batch_idx": LENGTHS, "block_table": TABLE}, "cache_batch_idx: expected None beside a table of pages"),
    (V2, {"cache_batch_idx": LENGTHS.long()}, r"cache_batch_idx: expected .* int32, got \(2,\) torch.int64"),
    (V2, {"cache_leftpad": LENGTHS.long()}, r"cache_leftpad: expected .* int32, got \(2,\) torch.int64"),
    (V2, {"cache_leftpad": LENGTHS[:1]}, r"cache_leftpad: expected \(2,\), got \(1,\)"),
    (V2, {"cache_leftpad": LENGTHS[:1], "block_table": TABLE}, r"cache_leftpad: expected \(2,\), got \(1,\)"),
    (V2, {"cache_leftpad": LENGTHS, "v": X}, "[kv]: expected"),
    (V2, {"cache_leftpad": LENGTHS, "k": X, "v": X}, "cache_seqlens: expected a tensor"),
    (V2, {"rotary_cos": ANGLES, **NEW}, "rotary_sin: expected a tensor beside the other"),
    (V2, {"rotary_cos": ANGLES, "rotary_sin": ANGLES}, "rotary_cos: expected new keys k and v beside it"),
    (V2, {"rotary_cos": ANGLES[:3], "rotary_sin": ANGLES[:3], **NEW}, "rotary_cos: expected a position for .* 4 keys"),
    (V2, {"rotary_cos": 3, "rotary_sin": 3, **NEW}, "rotary_cos: expected a torch.Tensor, got int"),
    (V2, {"cache_leftpad": LENGTHS, "block_table": [[0]]}, "page_table: expected a torch.Tensor, got list"),
    (V2, {"cache_leftpad": LENGTHS, "block_table": LENGTHS}, r"page_table: expected 2 dims, got \(2,\)"),
    (V2, {"cache_seqlens": True}, "cache_seqlens: expected"),
    (V3, {"q_descale": X}, "q_descale: expected None, since"),
    (V3, {"attention_chunk": 4}, "attention_chunk: expected 0, since"),
    (V3, {"sm_margin": 4}, "sm_margin: expected 0, since"),
    (V3, {"qv": X}, "qv: expected k_cache and v_cache that are neighbours"),
    (V3, {"qv": X[:, :1]}, r"qv: expected \(2, 4, 2, 16\) torch.float32, got \(2, 1, 2, 16\)"),
    (V3, {**NEW, "cu_seqlens_k_new": LENGTHS.long()}, "cu_seqlens_k_new: expected .* int32"),
    (V3, {**NEW, "qv": X}, "qv: expected k_cache and v_cache that are neighbours"),
    (V2, {**NEW, "cache_leftpad": LENGTHS.long()}, "cache_leftpad: expected .* int32"),
]


@pytest.mark.parametrize(("function", "options", "message"), REFUSED)
def test_refused(function: Callable[..., Any], options: dict[str, Any], message: str) -> None:
    call = (X, X.clone(), X.clone())
    function(*call, **{"cache_seqlens": LENGTHS})
    with pytest.raises(ValueError, match=f"^flash_cute: {message}"):
        function(*call, **options)
    assert not any(x.any() for x in call)  # nothing has been appended


def test_gradients_are_refused() -> None:
    q = X.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="q requires grad"):
        V2(q, X, X)
    offsets = torch.tensor([0, 2, 4], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="q requires grad"):
        flash_attn.flash_attn_varlen_func(q[0], X, X, offsets, offsets, 4, 4, block_table=TABLE)
    with torch.no_grad():
        torch.testing.assert_close(V2(q, X, X), torch.zeros_like(X))
