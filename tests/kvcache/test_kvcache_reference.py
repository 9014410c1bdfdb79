"""The oracle of caches, beside PyTorch's own attention of keys that are gathered by hand."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from flash_cute import reference

TABLE = torch.tensor([[4, 0, 2], [1, 9, -7]], dtype=torch.int32)


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
def test_pages(kv_layout: str, rng: torch.Generator) -> None:
    k, v = (torch.randn(5, 4, 2, 8, generator=rng) for _ in range(2))  # 5 pages of 4 keys, 2 heads
    q = torch.randn(2, 1, 4, 8, generator=rng)
    caches = [x.transpose(1, 2).contiguous() if kv_layout == "HND" else x for x in (k, v)]
    lengths = torch.tensor([10, 6], dtype=torch.int32)
    out, _ = reference.attention_with_kvcache(q, *caches, cache_seqlens=lengths, page_table=TABLE, kv_layout=kv_layout)
    zeros = torch.zeros(4, 2, 8)  # of page 9, which there is not
    first = [torch.cat((x[4], x[0], x[2]))[:10] for x in (k, v)]
    second = [torch.cat((x[1], zeros))[:6] for x in (k, v)]
    for b, keys in enumerate((first, second)):
        wide = [x.double().transpose(0, 1).repeat_interleave(2, 0)[None] for x in keys]
        expected = scaled_dot_product_attention(q[b].double().transpose(0, 1)[None], *wide)
        torch.testing.assert_close(out[b].transpose(0, 1)[None], expected)


def test_lengths_rows_and_new_keys(rng: torch.Generator) -> None:
    """Two sequences of 1 and 2 rows; a third pads. Rows see their own new keys and those before."""
    k_cache, v_cache = (torch.randn(3, 9, 1, 8, generator=rng) for _ in range(2))
    q, k, v = (torch.randn(3, 1, 8, generator=rng) for _ in range(3))
    lengths, offsets = (torch.tensor(x, dtype=torch.int32) for x in ([5, 0, -1], [0, 1, 3, 3]))
    expected_k = torch.cat((k_cache[0, :5], k[:1]))
    expected_v = torch.cat((v_cache[0, :5], v[:1]))
    places = {"cache_seqlens": lengths, "cu_seqlens_q": offsets}
    out, lse = reference.attention_with_kvcache(q, k_cache, v_cache, k=k, v=v, **places)
    assert torch.equal(k_cache[0, :6], expected_k) and torch.equal(v_cache[1, :2], v[1:])
    for rows, keys, values in ((slice(0, 1), expected_k, expected_v), (slice(1, 3), k[1:], v[1:])):
        tensors = [x.double().transpose(0, 1)[None] for x in (q[rows], keys, values)]
        causal = rows.stop - rows.start > 1
        expected = scaled_dot_product_attention(*tensors, is_causal=causal)
        torch.testing.assert_close(out[rows].transpose(0, 1)[None], expected)
    scores = q[0, 0].double() @ expected_k[:, 0].double().T / 8**0.5
    torch.testing.assert_close(lse[0, 0], scores.logsumexp(0))


def test_float8(rng: torch.Generator) -> None:
    """The nearest number times its factor."""
    cache = torch.zeros(1, 4, 2, 8).to(torch.float8_e4m3fn)
    lengths = torch.zeros(1, dtype=torch.int32)
    k = torch.full((1, 1, 2, 8), 3.3)
    descale = torch.tensor([[0.5, 2.0]])
    values = cache.clone()
    reference.append_kvcache(cache, values, k, 1e9 * k, cache_seqlens=lengths, descale_k=descale)
    assert cache[0, 0, :, 0].tolist() == [6.5, 1.625] and values[0, 0, 0, 0].item() == 448
    q = torch.ones(1, 1, 2, 8)
    out, lse = reference.attention_with_kvcache(q, cache, cache, cache_seqlens=lengths + 1, descale_k=descale)
    assert out[0, 0, :, 0].tolist() == [6.5, 1.625]
    torch.testing.assert_close(lse[0, :, 0], torch.tensor([3.25, 3.25], dtype=torch.float64) * 8**0.5)
