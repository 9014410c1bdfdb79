"""What the integrations do with packed, padded and stacked tensors without gradients: as test_integrations_layers.py.

One operator takes them as they are; it has the bits of the general path, and what it refuses goes there.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from batches import (
    BATCH,
    DIM,
    DIM_V,
    HEADS,
    LAYOUTS,
    OFFSETS,
    ROWS,
    USED,
    Layer,
    batch,
    in_memory,
    int32,
    random_tensor,
)
from numerics import same_bits

import flash_cute
from flash_cute import _ops
from flash_cute.integrations import (
    _transformers_given,
    _transformers_mask,
    flash_attn,
    flash_attn_interface,
    sdpa,
    transformers,
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The layers' operators that have returned, by name."""
    returned: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        operator = getattr(_ops, name)

        def call(*args: Any) -> Any:
            result = operator(*args)
            returned.append(name)
            return result

        return call

    for name in ("rows_fwd", "rows_varlen_fwd", "heads_fwd", "heads_varlen_fwd"):
        monkeypatch.setattr(_ops, name, counted(name))
    return returned


def _general(function: Callable[..., Any], *args: Any, **options: Any) -> tuple[torch.Tensor, ...]:
    """out, and the LSE if there is one, of the same call by the general path, which a call with gradients takes."""
    with torch.enable_grad():
        result = function(*(x.detach().requires_grad_() if i < 1 else x for i, x in enumerate(args)), **options)
    results = result[:2] if isinstance(result, tuple) else (result,)
    return tuple(x.detach() for x in results)


@pytest.mark.parametrize("rows", [ROWS, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_as_packed_rows(layout: str, rows: int, device: str, rng: torch.Generator) -> None:
    """Of any strides: the bits of `varlen_fwd` of the flattened tensors, and its out's memory."""
    q, k, v = (in_memory(x, layout) for x in batch(device, rng, rows))
    offsets = int32(device, *(i * rows for i in range(BATCH + 1))), int32(device, *OFFSETS)
    lengths = (*offsets, None, int32(device, *USED), rows, None)
    sinks = random_tensor(device, rng, HEADS)
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    for causal, window, score in ((True, None, (None, None)), (False, 5, (3.0, sinks)), (True, 5, (None, sinks))):
        mask, side = "bottom_right" if causal else "none", None if window is None else window - 1
        of_rows = (mask, side, side, *score, None, 0.3, "auto")
        expected = _ops.varlen_fwd_without_autograd(*flat, *lengths, *of_rows)[0]
        out = _ops.heads_varlen_fwd(q, k, v, *lengths, causal, window, *score, 0.3)
        assert out.shape == (BATCH, rows, HEADS, DIM_V) and same_bits((out.flatten(0, 1),), (expected,))
        assert out.is_contiguous() == expected.is_contiguous()


def test_unused_rows_of_a_copy_never_influence(device: str, rng: torch.Generator) -> None:
    q, k, v = (x.contiguous() for x in batch(device, rng))
    lengths = (int32(device, *OFFSETS), int32(device, *OFFSETS), None, int32(device, *USED), None, None)
    clean = _ops.heads_varlen_fwd(q, k, v, *lengths, False, *(None,) * 4)
    for item, used in enumerate(USED):
        k[item, :, used:], v[item, :, used:] = torch.nan, torch.nan
    assert same_bits((_ops.heads_varlen_fwd(q, k, v, *lengths, False, *(None,) * 4),), (clean,))
    assert clean.isfinite().all() and (clean[2] == 0).all()


def test_a_batch_without_rows(device: str, rng: torch.Generator) -> None:
    for shape in ((0, HEADS, ROWS, DIM), (BATCH, HEADS, 0, DIM)):
        x = random_tensor(device, rng, *shape)
        offsets = torch.zeros(shape[0] + 1, dtype=torch.int32, device=device)
        out = _ops.heads_varlen_fwd(x, x, x, offsets, offsets, *(None,) * 4, True, *(None,) * 4)
        assert out.shape == (shape[0], shape[2], HEADS, DIM)


OPTIONS: dict[str, Any] = {"causal": True, "window_size": (7, 0), "softcap": 3.0, "softmax_scale": 0.3}
# Each function by its arguments of a stacked tensor (N, 3, H, D), and the operator that it calls.
STACKED: dict[str, tuple[str, Callable[..., Any]]] = {
    "kvpacked": ("rows_fwd", lambda x, **o: flash_attn.flash_attn_kvpacked_func(x[None, :, 0], x[None, :, 1:], **o)),
    "qkvpacked": ("rows_fwd", lambda x, **o: flash_attn.flash_attn_qkvpacked_func(x[None], **o)),
    "qkvpacked, 3": ("rows_fwd", lambda x, **o: flash_attn_interface.flash_attn_qkvpacked_func(x[None], **o)),
    "qkvpacked, 3, heads": (
        "rows_fwd",
        lambda x, **o: flash_attn_interface.flash_attn_qkvpacked_func(x[None].flatten(2, 3), num_heads_q=6, **o),
    ),
    "varlen": (
        "rows_varlen_fwd",
        lambda x, **o: flash_attn.flash_attn_varlen_func(*x.unbind(1), *_of_two(x), 12, 12, **o),
    ),
    "varlen, 3": (
        "rows_varlen_fwd",
        lambda x, **o: flash_attn_interface.flash_attn_varlen_func(*x.unbind(1), *_of_two(x), 12, 12, **o),
    ),
    "varlen kvpacked": (
        "rows_varlen_fwd",
        lambda x, **o: flash_attn.flash_attn_varlen_kvpacked_func(x[:, 0], x[:, 1:], *_of_two(x), 12, 12, **o),
    ),
    "varlen qkvpacked": (
        "rows_varlen_fwd",
        lambda x, **o: flash_attn.flash_attn_varlen_qkvpacked_func(x, _of_two(x)[0], 12, **o),
    ),
}


def _of_two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    offsets = int32(x.device.type, 0, 12, 20)
    return offsets, offsets


@pytest.mark.parametrize("name", STACKED)
def test_flash_attns_forms(name: str, calls: list[str], device: str, rng: torch.Generator) -> None:
    operator, function = STACKED[name]
    x = random_tensor(device, rng, ROWS, 3, HEADS, DIM)
    slopes = torch.rand(6 if "heads" in name else HEADS, generator=rng).to(device)
    given: list[dict[str, Any]] = [{}, OPTIONS, {**OPTIONS, "softcap": 0.0}]
    if "3" not in name:  # FlashAttention-3 has no slopes
        given.append({"alibi_slopes": slopes})
    for options in given:
        calls.clear()
        out, lse = function(x, **options, return_attn_probs=True)[:2]
        assert calls == [operator]
        expected = _general(function, x, **options, return_attn_probs=True)
        assert calls == [operator] and same_bits((out, lse), expected)
        assert out.stride() == expected[0].stride()


def test_varlen_attn(calls: list[str], device: str, rng: torch.Generator) -> None:
    q, k, v = random_tensor(device, rng, ROWS, 3, HEADS, DIM).unbind(1)
    for window in ((-1, 0), (5, 2), (-1, -1)):
        options = {"window_size": window, "scale": 0.3}
        out = sdpa.varlen_attn(q, k, v, *_of_two(q), 12, 12, **options)
        assert same_bits((out,), _general(sdpa.varlen_attn, q, k, v, *_of_two(q), 12, 12, **options))
    assert calls == ["rows_varlen_fwd"] * 3


def test_slopes_that_require_grad_are_refused(calls: list[str], device: str, rng: torch.Generator) -> None:
    x = random_tensor(device, rng, 1, ROWS, HEADS, DIM)
    with pytest.raises(ValueError, match="alibi_slopes: expected a tensor that does not require grad"):
        flash_attn.flash_attn_func(x, x, x, alibi_slopes=torch.ones(HEADS, device=device, requires_grad=True))
    assert calls == []


@pytest.mark.parametrize(
    ("shapes", "num_heads_q", "message"),
    [
        (((1, 9, 2, 4, 8),), None, "qkv: expected 3 stacked tensors in dim -3"),
        (((9, 4, 8), (9, 3, 4, 8)), None, "kv: expected 2 stacked tensors in dim -3"),
        (((9, 4, 8), None, (9, 4, 8)), None, "k: expected a tensor beside v, got None"),
        (((9, 8, 8),), 8, r"num_heads_q: expected Hq of the Hq \+ 2 \* Hkv = 8 heads of qkv, got 8"),
        (((9, 8, 8),), 3, r"num_heads_q: expected Hq of the Hq \+ 2 \* Hkv = 8 heads of qkv, got 3"),
        (((9, 4, 8), (9, 4, 8), (9, 4, 8)), 2, "num_heads_q: expected None beside k, got 2"),
        (((9, 4, 8), (9, 3, 8), (9, 3, 8)), None, "q: expected a number of heads that is a multiple of k's 3"),
        (((9, 4), (9, 4, 8), (9, 4, 8)), None, "q: expected 3 dims"),
    ],
)
def test_refused_by_the_operators(shapes: Any, num_heads_q: int | None, message: str, device: str) -> None:
    given = [None if x is None else torch.zeros(x, device=device, dtype=torch.float16) for x in shapes]
    given += [None] * (3 - len(given))
    offsets = int32(device, 0, 9)
    with pytest.raises((ValueError, RuntimeError), match=f"^flash_cute: {message}"):
        _ops.rows_varlen_fwd(*given, num_heads_q, offsets, offsets, *(None,) * 4, True, *(None,) * 6)
    if len(shapes[0]) != 2 and given[1] is None and num_heads_q is not None:
        with pytest.raises((ValueError, RuntimeError), match=f"^flash_cute: {message}"):
            _ops.rows_fwd(given[0][None], None, None, num_heads_q, True, *(None,) * 6)


def test_batches_are_no_packed_tensors(rng: torch.Generator) -> None:
    """Nor are packed tensors batches."""
    x, offsets = random_tensor("cpu", rng, 1, ROWS, HEADS, DIM), int32("cpu", 0, ROWS)
    for call in (
        lambda: flash_attn.flash_attn_varlen_func(x, x, x, offsets, offsets, 9, 9),
        lambda: flash_attn.flash_attn_varlen_qkvpacked_func(torch.stack((x, x, x), 2), offsets, 9),
        lambda: sdpa.varlen_attn(x, x, x, offsets, offsets, 9, 9),
    ):
        with pytest.raises(ValueError, match="flash_cute: q: expected 3 dims"):
            call()


def test_operators_refuse_other_dims(device: str) -> None:
    x = torch.zeros(1, ROWS, HEADS, DIM, device=device, dtype=torch.float16)
    offsets = (int32(device, 0, ROWS), int32(device, 0, ROWS), *(None,) * 4)
    for operator, given, score in (
        (_ops.rows_varlen_fwd, (x, x, x, None), (True, *(None,) * 6)),
        (_ops.heads_varlen_fwd, (x[0], x[0], x[0]), (True, *(None,) * 4)),
    ):
        with pytest.raises((ValueError, RuntimeError), match=r"^flash_cute: q.*: expected [34] dims"):
            operator(*given, *offsets, *score)
    with pytest.raises((ValueError, RuntimeError), match=r"^flash_cute: q.*: expected 4 dims"):
        _ops.heads_fwd(x[0], x[0], x[0], True, *(None,) * 4)


def test_fakes_and_schemas(rng: torch.Generator) -> None:
    tests = ("test_schema", "test_faketensor")
    operators = torch.ops.flash_cute
    score = (True, 5, None, 2.0, torch.zeros(HEADS), torch.ones(HEADS), 0.1)
    lengths = (int32("cpu", *OFFSETS), int32("cpu", *OFFSETS), None, int32("cpu", *USED), 20, None)
    q, k, v = batch("cpu", rng)
    for given in ((q, k, v), tuple(x.contiguous() for x in (q, k, v))):
        of_model = (True, 6, 2.0, torch.zeros(HEADS), 0.1)
        torch.library.opcheck(operators._heads_varlen_fwd.default, (*given, *lengths, *of_model), test_utils=tests)
        one_row = (q[:, :, :1], *given[1:], *lengths, *of_model[:3], None, 0.1)
        torch.library.opcheck(operators._cache_varlen_fwd.default, one_row, test_utils=tests)
    x = random_tensor("cpu", rng, BATCH * ROWS, 3, HEADS, DIM)
    for stacked in ((x, None, None, None), (x[:, 0], x[:, 1:], None, None), (x.flatten(1, 2), None, None, HEADS)):
        torch.library.opcheck(operators._rows_varlen_fwd.default, (*stacked, *lengths, *score), test_utils=tests)
        dense = (x if x is None or isinstance(x, int) else x[None] for x in stacked)
        torch.library.opcheck(operators._rows_fwd.default, (*dense, *score), test_utils=tests)


def _padding(kind: str, device: str) -> torch.Tensor | None:
    """Padding on the left, on the right and nowhere, as the layers of a model are given it."""
    tokens = torch.ones(BATCH, ROWS, dtype=torch.bool, device=device)
    tokens[1, :7], tokens[2, 5:] = False, False
    if kind == "mask":
        return transformers.mask(BATCH, ROWS, ROWS, attention_mask=tokens, device=device)
    return tokens if kind == "2-D" else tokens.long()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An item per call of `padded`, which waits for the GPU."""
    done: list[int] = []
    padded = _transformers_mask.padded
    for module in (_transformers_given, _transformers_mask):
        monkeypatch.setattr(module, "padded", lambda *args: done.append(1) or padded(*args))
    return done


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", ["mask", "2-D", "2-D, int64"])
def test_padding_is_read_once(
    kind: str, mode: Callable[..., Any], calls: list[str], reads: list[int], device: str, rng: torch.Generator
) -> None:
    """By the mask function, or, of a 2-D mask, by the first layer of a forward; in each forward again."""
    q, k, v = batch(device, rng)
    with mode():
        mask = _padding(kind, device)
        for tokens_of_second in (13, 9):
            if kind != "mask":
                mask[1] = torch.arange(ROWS, device=device) >= ROWS - tokens_of_second
            outs = [transformers.attention(Layer(i), q, k, v, mask)[0] for i in range(3)]
            assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
            used = tokens_of_second if kind != "mask" else 13
            alone = flash_cute.attention(*(x[1:2, :, ROWS - used :] for x in (q, k, v)), True).transpose(1, 2)
            torch.testing.assert_close(outs[0][1:2, ROWS - used :], alone)
            assert (outs[0][1, : ROWS - used] == 0).all() and (outs[0][2, 5:-1] == 0).all()
            last = flash_cute.attention(q[2:, :, -1:], k[2:, :, :5], v[2:, :, :5]).transpose(1, 2)
            torch.testing.assert_close(outs[0][2:, -1:], last)  # what `generate` goes on from
    assert len(reads) == (1 if kind == "mask" else 2) and calls == ["heads_varlen_fwd"] * 6


@pytest.mark.parametrize("kind", ["mask", "2-D"])
def test_padding_has_the_bits_of_the_general_way(
    kind: str, calls: list[str], device: str, rng: torch.Generator
) -> None:
    q, k, v = batch(device, rng)
    options: dict[str, Any] = {"s_aux": random_tensor(device, rng, HEADS), "sliding_window": 6, "softcap": 4.0}
    for given in ((q, k, v), (q, k.contiguous(), v.contiguous())):  # projections, and as a cache holds keys

        def attend(q: torch.Tensor, given: Any = given) -> torch.Tensor:
            return transformers.attention(Layer(0), q, *given[1:], _padding(kind, device), **options)[0]

        with torch.no_grad():
            out = attend(given[0])
        assert calls == ["heads_varlen_fwd"]
        out[2, -1] = 0  # the last row of a batch item with padding behind its tokens, which gradients leave out
        assert same_bits((out,), _general(attend, given[0])) and out.is_contiguous()
        assert calls == ["heads_varlen_fwd"]
        calls.clear()


def test_layers_of_other_lengths_read_a_padding_mask_once_each(reads: list[int], rng: torch.Generator) -> None:
    """As where some layers keep a window of the keys alone."""
    q, k, v = batch("cpu", rng)
    with torch.inference_mode():
        mask = _padding("2-D", "cpu")
        for i in range(6):
            first = 0 if i % 2 else 4
            keys = (F.pad(x, (0, 0, first, 0)) for x in (k, v))
            transformers.attention(Layer(i), q, *keys, mask, is_causal=False)
    assert len(reads) == 2


def test_a_mask_for_other_sizes_is_refused(rng: torch.Generator) -> None:
    q, k, v = batch("cpu", rng)
    mask = _padding("mask", "cpu")
    with pytest.raises(ValueError, match="attention_mask: expected one made for 3 batch items of 19 keys"):
        transformers.attention(Layer(0), q, k[:, :, 1:], v[:, :, 1:], mask)
    with pytest.raises(ValueError, match="attention_mask: expected one made for 2 batch items of 20 keys"):
        transformers.attention(Layer(0), q[:2], k[:2], v[:2], mask)


def test_a_copied_mask_is_as_good(calls: list[str], rng: torch.Generator) -> None:
    """One that has been moved between devices has lost what the mask function attached to it."""
    q, k, v = batch("cpu", rng)
    mask = _padding("mask", "cpu")
    expected = transformers.attention(Layer(0), q, k, v, mask)[0]
    assert torch.equal(transformers.attention(Layer(0), q, k, v, mask.clone())[0], expected)
    assert calls == ["heads_varlen_fwd"] * 2


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_nothing_keeps_a_mask_in_memory(mode: Callable[..., Any], rng: torch.Generator) -> None:
    """What is kept with a tensor must not keep that tensor: no garbage collector sees a cycle through a view's base."""
    q, k, v = batch("cpu", rng)
    gc.disable()
    try:
        with mode():
            masks = [_padding("mask", "cpu"), _padding("2-D", "cpu"), torch.arange(ROWS)[None] % 7]
            for mask in masks[:2]:
                transformers.attention(Layer(0), q, k, v, mask)
            transformers.attention(Layer(0), q[:1], k[:1], v[:1], None, position_ids=masks[2])
            masks.append(
                transformers.mask(BATCH, 1, ROWS, q_offset=16, attention_mask=torch.arange(ROWS).expand(BATCH, -1) > 6)
            )
            transformers.attention(Layer(0), q[:, :, :1], k.contiguous(), v.contiguous(), masks[3])
            alive = [weakref.ref(x) for x in masks]
            del mask, masks
        assert [x() for x in alive] == [None] * 4
    finally:
        gc.enable()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_of_packed_sequences(dtype: torch.dtype, calls: list[str], device: str, rng: torch.Generator) -> None:
    q, k, v = (x[:1] for x in batch(device, rng))
    offsets = torch.tensor((0, 12, 20), dtype=dtype, device=device)
    options = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 12, "max_length_k": 12}
    out = transformers.attention(Layer(0), q, k, v, None, **options)[0].transpose(1, 2)
    assert calls == ["heads_varlen_fwd"]
    for part in (slice(0, 12), slice(12, 20)):
        alone = flash_cute.attention(*(x[:, :, part] for x in (q, k, v)), True)
        torch.testing.assert_close(out[:, :, part], alone)
