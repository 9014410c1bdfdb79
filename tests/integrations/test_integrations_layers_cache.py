"""What the integration of Transformers does with one row of q and the padded keys of a cache: nothing is copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from batches import BATCH, DIM, DIM_V, HEADS, LAYOUTS, OFFSETS, ROWS, USED, Layer, in_memory, int32, random_tensor

import flash_cute
from flash_cute import _ops
from flash_cute.integrations import _transformers_lengths, transformers


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
        for options in ({}, {"sliding_window": 5, "softcap": 3.0, "scaling": 0.3}):
            stated = {"local_size": options.get("sliding_window"), "device": device}
            mask = transformers.mask(BATCH, 1, ROWS, q_offset=16, attention_mask=_keys_in_use(device), **stated)
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
        with_sinks = transformers.attention(Layer(3), q, k, v, mask, s_aux=sinks, **options)[0]
        for item, first in ((0, 0), (1, 7)):
            tensors = (q[item : item + 1], *(x[item : item + 1, :, first:17] for x in (k, v)))
            alone = flash_cute.attention(*tensors, True, **given, sinks=sinks).transpose(1, 2)
            assert_close(with_sinks[item : item + 1], alone)
        assert (with_sinks[2] == 0).all()
        one = transformers.mask(1, 1, ROWS, q_offset=16, attention_mask=_keys_in_use(device)[1:2], **stated)
        out = transformers.attention(Layer(0), q[1:2], k[1:2], v[1:2], one, **options)[0]  # `outs` are of these options
        assert_close(out, outs[0][1:2])
    several = heads_kv > 1  # batch items of one head, and one batch item, are packed rows as they are
    # With sinks a sequence per KV head is a call of the public function's.
    assert [args[0] for args in by_heads] == [several, several, False] * 2 + [False] * (1 if several else 2)
    for first in (0, 3):  # of each mask
        assert all(x is y for x, y in zip(by_heads[first][1:], by_heads[first + 1][1:], strict=True))
    if several:  # as many keys per sequence as the hint says
        assert by_heads[0][1].numel() == BATCH * heads_kv + 1 and by_heads[0][5:] == (1, ROWS)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where lengths are looked for, and the operators, by name."""
    called: list[str] = []

    def noted(owner: Any, name: str) -> None:
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: called.append(name) or function(*args))

    noted(transformers, "_of_mask")
    noted(_transformers_lengths, "_by_heads")
    for name in ("heads_varlen_fwd", "cache_varlen_fwd"):
        noted(_ops, name)
    return called


@pytest.fixture
def step(rng: torch.Generator) -> list[torch.Tensor]:
    """q, k and v of a step, and the mask function's result, with which a layer has left lengths by heads."""
    q = random_tensor("cpu", rng, BATCH, HEADS, 1, DIM)
    k, v = (random_tensor("cpu", rng, BATCH, 2, ROWS, dim) for dim in (DIM, DIM_V))
    mask = transformers.mask(BATCH, 1, ROWS, q_offset=16, attention_mask=_keys_in_use("cpu"))
    with torch.no_grad():
        transformers.attention(Layer(0), q, k, v, mask)
    return [q, k, v, mask]


def test_only_the_first_layer_looks_at_the_mask(calls: list[str], step: list[torch.Tensor]) -> None:
    """But of k and v of another shape, or not by heads, each; what is kept for others stays."""
    q, k, v, mask = step
    assert calls == ["_of_mask", "_by_heads", "cache_varlen_fwd"]
    longer = torch.cat((v, v), 3)
    k_by_rows, v_by_rows = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    more = (x.repeat_interleave(2, 1) for x in (k, v))
    cached, by_rows = ["cache_varlen_fwd"], ["_of_mask", "heads_varlen_fwd"]
    for given, expected in (
        ((k, v), cached),
        ((k.clone(), longer), cached),  # k's sizes count, and v's are the operator's to check
        (tuple(more), ["_of_mask", "_by_heads", *cached]),
        ((k_by_rows, v), by_rows),
        ((k, v_by_rows), by_rows),
        ((k, v), cached),
    ):
        calls.clear()
        out = transformers.attention(Layer(1), q, *given, mask)[0]
        assert calls == expected
        torch.testing.assert_close(out, transformers.attention(Layer(0), q, *given, mask.clone())[0])
    calls.clear()
    with torch.no_grad():
        transformers.attention(Layer(1), q, k, v, mask, s_aux=torch.zeros(HEADS))
    assert calls == ["_of_mask"]  # by heads too, see _transformers_sinks.py
    offsets = int32("cpu", 0, 1, 2, 3)
    with pytest.raises(ValueError, match="attention_mask: expected no padding beside cu_seq_lens_q"):
        transformers.attention(Layer(1), q, k, v, mask, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_padding_mask_of_the_layers_own(mode: Callable[..., Any], calls: list[str], rng: torch.Generator) -> None:
    """By heads once per forward too, also where the mask is that of the forward before, overwritten in place."""
    q, k = random_tensor("cpu", rng, BATCH, HEADS, 1, DIM), random_tensor("cpu", rng, BATCH, 2, ROWS, DIM)
    with mode():
        tokens = torch.ones(BATCH, ROWS, dtype=torch.bool)
        for padding in (7, 9):
            tokens[1, :padding] = False
            calls.clear()
            outs = [transformers.attention(Layer(i), q, k, k, tokens)[0] for i in range(3)]
            assert calls == ["_of_mask", "_by_heads", "cache_varlen_fwd", *["_of_mask", "cache_varlen_fwd"] * 2]
            alone = flash_cute.attention(q[1:2], *(k[1:2, :, padding:],) * 2, True).transpose(1, 2)
            for out in outs:
                torch.testing.assert_close(out[1:2], alone)


def test_what_is_kept_serves_plain_calls_alone(calls: list[str], step: list[torch.Tensor]) -> None:
    q, k, v, mask = step
    expected = transformers.attention(Layer(1), q, k, v, mask)[0]
    calls.clear()

    def attend(q: torch.Tensor) -> torch.Tensor:
        return transformers.attention(Layer(1), q, k, v, mask)[0]

    leaf = q.clone().requires_grad_()
    out = attend(leaf)
    out.sum().backward()
    torch.testing.assert_close(out.detach(), expected)
    assert leaf.grad is not None and (leaf.grad[0] != 0).any()
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(q).dtype == torch.bfloat16
    with pytest.raises(NotImplementedError, match="vmap"):
        torch.func.vmap(attend)(q[None])
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(attend, backend="aot_eager")(q), expected)
    assert "cache_varlen_fwd" not in calls


# What q, k and v of a step are made to be, for which the lengths that are kept are not meant.
REFUSED: dict[str, Callable[..., tuple[torch.Tensor, ...]]] = {
    "q of two rows": lambda q, k, v: (torch.cat((q, q), 2), k, v),
    "q of another batch": lambda q, k, v: (q[:2], k, v),
    "another batch": lambda q, k, v: (q[:2], k[:2], v[:2]),
    "k of more keys": lambda q, k, v: (q, torch.cat((k, k), 2), v),
    "more keys": lambda q, k, v: (q, torch.cat((k, k), 2), torch.cat((v, v), 2)),
    "v of more keys": lambda q, k, v: (q, k, torch.cat((v, v), 2)),
    "v of more heads": lambda q, k, v: (q, k, torch.cat((v, v), 1)),
    "heads that do not divide": lambda q, k, v: (q[:, :3], k, v),
    "dtype": lambda q, k, v: (q.double(), k, v),
    "dims": lambda q, k, v: (q[0], k, v),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_kept_changes_no_refusal(name: str, step: list[torch.Tensor]) -> None:
    """As with a copy of the mask, which has lost what was kept with it."""
    *tensors, mask = step
    given = REFUSED[name](*tensors)
    outcomes = []
    for its_mask in (mask.clone(), mask, mask):
        try:
            outcomes.append(transformers.attention(Layer(1), *given, its_mask)[0])
        except (ValueError, RuntimeError) as error:
            outcomes.append((type(error), str(error)))
    if isinstance(outcomes[0], tuple):
        assert outcomes[1:] == outcomes[:1] * 2
    else:
        assert all(torch.equal(x, outcomes[0]) for x in outcomes[1:])


def test_nothing_is_kept_for_k_of_another_batch_size(rng: torch.Generator) -> None:
    """Of such k the first batch items are read, those that q and the mask have; a later q may have them all."""
    mask = transformers.mask(2, 1, ROWS, q_offset=16, attention_mask=_keys_in_use("cpu")[:2])
    q, k = random_tensor("cpu", rng, BATCH, HEADS, 1, DIM), random_tensor("cpu", rng, BATCH, 2, ROWS, DIM)
    out = transformers.attention(Layer(0), q[:2], k, k, mask)[0]
    torch.testing.assert_close(out, transformers.attention(Layer(0), q[:2], k[:2], k[:2], mask)[0])
    with pytest.raises(ValueError, match="attention_mask: expected one made for 3 batch items"):
        transformers.attention(Layer(1), q, k, k, mask)


def test_layers_of_other_heads_share_a_mask(rng: torch.Generator) -> None:
    mask = transformers.mask(BATCH, 1, ROWS, q_offset=16, attention_mask=_keys_in_use("cpu"))
    for heads_kv in (2, 1, 2):
        q, k = random_tensor("cpu", rng, BATCH, HEADS, 1, DIM), random_tensor("cpu", rng, BATCH, heads_kv, ROWS, DIM)
        out = transformers.attention(Layer(0), q, k, k, mask)[0]
        with torch.enable_grad():  # the general path
            expected = transformers.attention(Layer(0), q.requires_grad_(), k, k, mask)[0]
        torch.testing.assert_close(out, expected.detach())


def test_a_mask_overwritten_in_place(device: str, rng: torch.Generator) -> None:
    """What the first layers left with the mask was of its old lengths. A captured graph reads the new ones."""
    tokens = _keys_in_use(device)
    later = tokens.clone()
    later[:2, 17:19] = True
    q = random_tensor(device, rng, BATCH, 1, HEADS, DIM).transpose(1, 2)
    caches = [random_tensor(device, rng, BATCH, heads_kv, ROWS, DIM) for heads_kv in (2, 4)]
    mask, new_mask = (
        transformers.mask(BATCH, 1, ROWS, q_offset=offset, attention_mask=x, device=device)
        for offset, x in ((16, tokens), (18, later))
    )

    def attend(its_mask: torch.Tensor) -> list[torch.Tensor]:
        return [transformers.attention(Layer(i), q, k, k, its_mask)[0] for i, k in enumerate((*caches, *caches))]

    with torch.no_grad():
        old, expected = attend(mask), attend(new_mask)
        graph = torch.cuda.CUDAGraph() if q.is_cuda else None
        if graph is not None:
            with torch.cuda.graph(graph):
                captured = attend(mask)
        for column in range(4):
            mask[:, 0, 0, column].copy_(new_mask[:, 0, 0, column])
        assert not any(torch.equal(x, y) for x, y in zip(old, expected, strict=True))
        assert all(torch.equal(x, y) for x, y in zip(attend(mask), expected, strict=True))
        if graph is not None:
            graph.replay()
            assert all(torch.equal(x, y) for x, y in zip(captured, expected, strict=True))
