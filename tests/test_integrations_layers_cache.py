"""What the integration of Transformers does with one row of q and the padded keys of a cache: nothing is copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from batches import BATCH, DIM, DIM_V, HEADS, LAYOUTS, OFFSETS, ROWS, USED, Layer, in_memory, int32, random_tensor

import flash_cute
from flash_cute import _ops
from flash_cute.integrations import transformers


def assert_close(given: torch.Tensor, expected: torch.Tensor) -> None:
    """Of kernels that may sum in another order; float16 on a GPU."""
    tolerances = {"atol": 2e-3, "rtol": 2e-3} if given.is_cuda else {}
    torch.testing.assert_close(given, expected, **tolerances)


@pytest.mark.parametrize("heads_kv", [1, 2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_row_by_heads(layout: str, heads_kv: int, device: str, rng: torch.Generator) -> None:
    """A sequence per KV head: of any strides what sequences of all heads give, and a contiguous out."""
    q = random_tensor(device, rng, BATCH, HEADS, 1, DIM)
    k, v = (random_tensor(device, rng, BATCH, heads_kv, ROWS, dim) for dim in (DIM, DIM_V))
    q, k, v = (in_memory(x, layout) for x in (q, k, v))
    used_q, used_k = int32(device, 1, 0, 1), int32(device, *USED)
    lengths = (int32(device, 0, 1, 2, 3), int32(device, *OFFSETS), used_q, used_k, 1, ROWS)
    rows = torch.arange(BATCH * heads_kv + 1, dtype=torch.int32, device=device)
    used = [x.repeat_interleave(heads_kv) for x in (used_q, used_k)]
    by_heads = (rows, rows * ROWS, *used, 1, ROWS)
    for score in ((True, None, None, None, None), (False, 4, 3.0, None, 0.3)):
        expected = _ops.heads_varlen_fwd(q, k, v, *lengths, *score)
        out = _ops.cache_varlen_fwd(q, k, v, *by_heads, *score)
        assert out.shape == (BATCH, 1, HEADS, DIM_V) and out.is_contiguous()
        assert_close(out, expected)
        assert (out[1:] == 0).all() and (out[0] != 0).all()  # no row of q, and no key


@pytest.mark.parametrize(
    ("shape_q", "shape_k", "shape_v"),
    [
        ((3, 4, 2, 8), (3, 2, 9, 8), (3, 2, 9, 8)),  # two rows
        ((2, 4, 1, 8), (3, 2, 9, 8), (3, 2, 9, 8)),
        ((3, 4, 1, 8), (3, 3, 9, 8), (3, 3, 9, 8)),
        ((3, 4, 1, 8), (3, 2, 9, 8), (3, 4, 9, 8)),
        ((3, 4, 1, 8), (3, 0, 9, 8), (3, 0, 9, 8)),
    ],
)
def test_refused_by_heads(shape_q: Any, shape_k: Any, shape_v: Any, device: str) -> None:
    q, k, v = (torch.zeros(x, device=device, dtype=torch.float16) for x in (shape_q, shape_k, shape_v))
    offsets = int32(device, *range(7))
    with pytest.raises((ValueError, RuntimeError), match=r"^flash_cute: [qkv].*: expected"):
        _ops.cache_varlen_fwd(q, k, v, offsets, offsets, *(None,) * 4, True, *(None,) * 4)


def _keys_in_use(device: str) -> torch.Tensor:
    """Of a cache's columns: padding on the left, room for later tokens on the right; one batch item has none."""
    tokens = torch.zeros(BATCH, ROWS, dtype=torch.bool, device=device)
    tokens[0, :17], tokens[1, 7:17] = True, True
    return tokens


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("heads_kv", [1, 2, 4])
def test_keys_of_a_cache_are_not_copied(
    heads_kv: int, mode: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, device: str, rng: torch.Generator
) -> None:
    """One row of q over padded keys that stand by heads; the offsets for that are made by the first layer alone."""
    by_heads: list[tuple[Any, ...]] = []  # of each call whether it is, and its lengths

    def noted(name: str) -> Callable[..., Any]:
        operator = getattr(_ops, name)
        return lambda *args: by_heads.append((name == "cache_varlen_fwd", *args[3:9])) or operator(*args)

    for name in ("heads_varlen_fwd", "cache_varlen_fwd"):
        monkeypatch.setattr(_ops, name, noted(name))
    with mode():
        q = random_tensor(device, rng, BATCH, 1, HEADS, DIM).transpose(1, 2)
        k, v = (random_tensor(device, rng, BATCH, heads_kv, ROWS, dim) for dim in (DIM, DIM_V))
        unused = ~_keys_in_use(device)[:, None, :, None]
        k, v = (x.masked_fill(unused, torch.nan) for x in (k, v))
        mask = transformers.mask(BATCH, 1, ROWS, q_offset=16, attention_mask=_keys_in_use(device), device=device)
        for options in ({}, {"sliding_window": 5, "softcap": 3.0, "scaling": 0.3}):
            outs = [transformers.attention(Layer(i), q, k, v, mask, **options)[0] for i in range(2)]
            rows_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
            of_rows = transformers.attention(Layer(2), q, *rows_first, mask, **options)[0]
            assert outs[0].is_contiguous() and torch.equal(outs[0], outs[1])
            assert_close(outs[0], of_rows)
            assert (outs[0][2] == 0).all()
            given = {"window": (4, 0), "softcap": 3.0, "scale": 0.3} if options else {}
            for item, first in ((0, 0), (1, 7)):
                tensors = (q[item : item + 1], *(x[item : item + 1, :, first:17] for x in (k, v)))
                alone = flash_cute.attention(*tensors, True, **given).transpose(1, 2)
                assert_close(outs[0][item : item + 1], alone)
        sinks = random_tensor(device, rng, HEADS)  # of each query head
        transformers.attention(Layer(3), q, k, v, mask, s_aux=sinks)
        one = transformers.mask(1, 1, ROWS, q_offset=16, attention_mask=_keys_in_use(device)[1:2], device=device)
        out = transformers.attention(Layer(0), q[1:2], k[1:2], v[1:2], one, **options)[0]  # `outs` are of these options
        assert_close(out, outs[0][1:2])
    several = heads_kv > 1  # batch items of one head, and one batch item, are packed rows as they are
    assert [args[0] for args in by_heads] == [several, several, False] * 2 + [False, False]
    assert all(x is y for x, y in zip(by_heads[0][1:], by_heads[4][1:], strict=True))
    if several:  # as many keys per sequence as the hint says
        assert by_heads[0][1].numel() == BATCH * heads_kv + 1 and by_heads[0][5:] == (1, ROWS)


def test_layers_of_other_heads_share_a_mask(rng: torch.Generator) -> None:
    mask = transformers.mask(BATCH, 1, ROWS, q_offset=16, attention_mask=_keys_in_use("cpu"))
    for heads_kv in (2, 1, 2):
        q, k = random_tensor("cpu", rng, BATCH, HEADS, 1, DIM), random_tensor("cpu", rng, BATCH, heads_kv, ROWS, DIM)
        out = transformers.attention(Layer(0), q, k, k, mask)[0]
        with torch.enable_grad():  # the general way
            expected = transformers.attention(Layer(0), q.requires_grad_(), k, k, mask)[0]
        torch.testing.assert_close(out, expected.detach())


def test_a_mask_overwritten_in_place(device: str, rng: torch.Generator) -> None:
    """What the first layer left with the mask was of its old lengths. A captured graph reads the new ones."""
    tokens = _keys_in_use(device)
    later = tokens.clone()
    later[:2, 17:19] = True
    q = random_tensor(device, rng, BATCH, 1, HEADS, DIM).transpose(1, 2)
    k = random_tensor(device, rng, BATCH, 2, ROWS, DIM)
    mask, new_mask = (
        transformers.mask(BATCH, 1, ROWS, q_offset=offset, attention_mask=x, device=device)
        for offset, x in ((16, tokens), (18, later))
    )
    with torch.no_grad():
        old, expected = (transformers.attention(Layer(0), q, k, k, x)[0] for x in (mask, new_mask))
        graph = torch.cuda.CUDAGraph() if q.is_cuda else None
        if graph is not None:
            with torch.cuda.graph(graph):
                captured = transformers.attention(Layer(0), q, k, k, mask)[0]
        for column in range(4):
            mask[:, 0, 0, column].copy_(new_mask[:, 0, 0, column])
        assert not torch.equal(old, expected)
        assert torch.equal(transformers.attention(Layer(0), q, k, k, mask)[0], expected)
        if graph is not None:
            graph.replay()
            assert torch.equal(captured, expected)
