"""What packages call beneath flash-attn's functions: those that begin with an underscore, and its compiled module's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numerics import assert_gradients_match, assert_matches, same_bits
from packed import assert_packed_gradients, assert_packed_matches, offsets, pack

from flash_cute import _ops
from flash_cute.integrations import _flash_attn_2_cuda as extension
from flash_cute.integrations import _flash_attn_calls as calls
from flash_cute.integrations import flash_attn, flash_attn_interface

LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
TENSORS = "dout, q, k, v, out, softmax_lse, dq, dk, dv"
WINDOW = "window_size_left, window_size_right"
# flash-attn 2.8.3's, of which callers read the names and the defaults.
SIGNATURES = {
    "_flash_attn_forward": (
        f"q, k, v, dropout_p, softmax_scale, causal, {WINDOW}, softcap, alibi_slopes, return_softmax"
    ),
    "_flash_attn_varlen_forward": (
        f"q, k, v, {LENGTHS}, dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1, "
        "softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None, "
        "zero_tensors=False"
    ),
    "_flash_attn_backward": (
        f"{TENSORS}, dropout_p, softmax_scale, causal, {WINDOW}, softcap, alibi_slopes, deterministic, rng_state=None"
    ),
    "_flash_attn_varlen_backward": (
        f"{TENSORS}, {LENGTHS}, dropout_p, softmax_scale, causal, {WINDOW}, softcap, alibi_slopes, deterministic, "
        "rng_state=None, zero_tensors=False"
    ),
}
# (causal, left, right, softcap, whether with ALiBi), and ours beneath.
SCORES: dict[str, tuple[bool, int, int, float, bool]] = {
    "full": (False, -1, -1, 0.0, False),
    "causal": (True, -1, -1, 0.0, False),
    "window": (False, 5, 2, 3.0, False),
    "alibi": (True, 9, -1, 0.0, True),
}


def _dtype(device: str) -> torch.dtype:
    return torch.float16 if device == "cuda" else torch.float32


def _score(name: str, heads: int, device: str, rng: torch.Generator) -> tuple[dict[str, Any], bool, dict[str, Any]]:
    """Their arguments by name, causal, and flash_cute's options."""
    causal, left, right, softcap, has_alibi = SCORES[name]
    slopes = torch.rand(heads, generator=rng).to(device) if has_alibi else None
    theirs = {"causal": causal, "window_size_left": left, "window_size_right": right, "softcap": softcap}
    sides = tuple(None if x < 0 else x for x in (left, right))
    ours = {"window": sides, "softcap": softcap or None, "alibi_slopes": slopes}
    common = {"dropout_p": 0.0, "softmax_scale": 0.3, "alibi_slopes": slopes}
    return {**common, **theirs}, causal, {name: x for name, x in ours.items() if x is not None and x != (None, None)}


def _poisoned(shape: torch.Size, like: torch.Tensor) -> torch.Tensor:
    """A buffer of that shape, full of NaN, which is a part of a larger tensor: its heads lie twice as far apart."""
    return torch.full((*shape[:-1], 2 * shape[-1]), torch.nan, device=like.device, dtype=like.dtype)[..., : shape[-1]]


def test_signatures() -> None:
    for name, signature in SIGNATURES.items():
        function = getattr(calls, name)
        bare = [x.replace(annotation=x.empty) for x in inspect.signature(function).parameters.values()]
        assert str(inspect.Signature(bare))[1:-1] == signature
        assert getattr(calls, name.replace("_flash", "_wrapped_flash")) is function and inspect.isfunction(function)


@pytest.mark.parametrize("name", SCORES)
def test_dense(name: str, device: str, rng: torch.Generator) -> None:
    theirs, causal, ours = _score(name, 4, device, rng)
    shapes = ((2, 20, 4, 16), (2, 33, 2, 16), (2, 33, 2, 16))
    q, k, v = (torch.randn(shape, generator=rng).to(device, _dtype(device)) for shape in shapes)
    out, lse, masked, state = calls._flash_attn_forward(q, k, v, **theirs, return_softmax=False)
    assert (masked.shape, masked.dtype, state.shape, state.dtype) == ((0,), q.dtype, (2,), torch.int64)
    heads_first = tuple(x.transpose(1, 2) for x in (q, k, v))
    assert_matches(out.transpose(1, 2), lse, *heads_first, causal, 0.3, **ours)
    dout = torch.randn(out.shape, generator=rng).to(out)
    gradients = tuple(_poisoned(x.shape, x) for x in (q, k, v))
    softmax_d = calls._flash_attn_backward(dout, q, k, v, out, lse, *gradients, **theirs, deterministic=True)
    by_heads = tuple(x.transpose(1, 2) for x in gradients)
    assert_gradients_match(by_heads, dout.transpose(1, 2), *heads_first, causal, 0.3, **ours)
    assert (softmax_d.shape, softmax_d.dtype) == ((2, 4, 128), torch.float32)
    sums = (dout.double() * out.double()).sum(-1).transpose(1, 2)
    torch.testing.assert_close(softmax_d[..., :20].double(), sums, rtol=1e-5, atol=1e-5)
    assert (softmax_d[..., 20:] == 0).all()


@pytest.mark.parametrize("name", SCORES)
def test_packed_sequences(name: str, device: str, rng: torch.Generator) -> None:
    """Between rows and keys of no sequence, and with keys that are not used."""
    theirs, causal, ours = _score(name, 4, device, rng)
    used = torch.tensor([6, 17, 0, 2], dtype=torch.int32, device=device)
    packed = pack(((5, 9), (17, 17), (3, 4), (7, 2)), device, rng, head_dim=16, around=3)
    lengths = (packed.cu_seqlens_q, packed.cu_seqlens_k, 17, 17)
    forward = calls._flash_attn_varlen_forward(*packed.tensors, *lengths, **theirs, seqused_k=used, zero_tensors=True)
    with_used = packed.replace(seqused_k=used)
    assert_packed_matches(forward[0], forward[1], with_used, causal, scale=0.3, **ours)
    out, lse, *_ = calls._flash_attn_varlen_forward(*packed.tensors, *lengths, **theirs)
    assert_packed_matches(out, lse, packed, causal, scale=0.3, **ours)
    dout = torch.randn(out.shape, generator=rng).to(out)
    gradients = tuple(_poisoned(x.shape, x) for x in packed.tensors)
    tensors = (dout, *packed.tensors, out, lse, *gradients)
    softmax_d = calls._flash_attn_varlen_backward(*tensors, *lengths, **theirs, deterministic=False)
    assert_packed_gradients(gradients, dout, packed, causal, scale=0.3, **ours)
    expected = torch.zeros(4, packed.q.shape[0] + 128 * 4, dtype=torch.float64)
    sums = (dout.double() * out.double()).sum(-1).transpose(0, 1).cpu()
    for b, (rows, _) in enumerate(packed.sequences()):
        expected[:, rows.start + 128 * b : rows.stop + 128 * b] = sums[:, rows]
    torch.testing.assert_close(softmax_d.double().cpu(), expected, rtol=1e-5, atol=1e-5)


def test_the_compiled_module(rng: torch.Generator) -> None:
    """By position; results are written where they are wanted, and are new tensors elsewhere."""
    q, k, v, dout = (torch.randn(1, 9, 2, 8, generator=rng) for _ in range(4))
    score = (None, True, 4, -1, 0.0)  # scale, causal, window, softcap
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected, lse, _ = flash_attn.flash_attn_func(*leaves, causal=True, window_size=(4, -1), return_attn_probs=True)
    right = (expected, lse, *torch.autograd.grad(expected, leaves, dout))
    where = _poisoned(q.shape, q)
    for out in (None, where):
        given = extension.fwd(q, k, v, out, None, 0.0, *score, False, None)
        assert (given[0] is where) == (out is where) and same_bits(given[:2], right[:2])
    for buffers in ((None,) * 3, tuple(_poisoned(q.shape, q) for _ in range(3))):
        tail = (None, 0.0, *score, False, None, None)
        *gradients, sums = extension.bwd(dout, q, k, v, expected.detach(), lse.detach(), *buffers, *tail)
        assert all(y is None or x is y for x, y in zip(gradients, buffers, strict=True))
        assert same_bits(gradients, right[2:]) and sums.shape == (1, 2, 128)
    rows = [x[0] for x in (q, k, v)]
    lengths = (offsets([9]), offsets([9]))
    call = (*rows, where[0], *lengths, None, None, None, None, 9, 9, 0.0, None, True, *score[1:], False, None)
    assert same_bits(extension.varlen_fwd(*call)[:1], (right[0][0],))
    call = (dout[0], *rows, expected[0].detach(), lse[0].detach(), None, None, None, *lengths, None, 9, 9, 0.0, None)
    assert same_bits(extension.varlen_bwd(*call, False, *score[1:], False, None, None)[:3], [x[0] for x in right[2:]])


def test_gradients_of_the_private_forward(rng: torch.Generator) -> None:
    q, k, v = (torch.randn(1, 9, 2, 8, generator=rng).requires_grad_() for _ in range(3))
    out = calls._flash_attn_forward(q, k, v, 0.0, None, True, -1, -1, 0.0, None, False)[0]
    expected = flash_attn.flash_attn_func(q, k, v, causal=True)
    given, right = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, expected))
    assert same_bits(given, right)


def test_compiled(rng: torch.Generator) -> None:
    """In one graph, buffers and all; a longest length that is a tensor does not break it."""
    tensors = [torch.randn(1, 9, 2, 8, generator=rng) for _ in range(4)]
    bounds, score = (
        offsets((4, 5)),
        (0.0, 0.3, True, -1, -1, 0.0, None),
    )  # dropout, scale, causal, window, softcap, alibi

    def both(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> list[torch.Tensor]:
        out, lse, *_ = calls._wrapped_flash_attn_forward(q, k, v, *score, False)
        buffers = [torch.empty_like(x) for x in (q, k, v)]
        sums = calls._wrapped_flash_attn_backward(dout, q, k, v, out, lse, *buffers, *score, False)
        rows, lengths = (q[0], k[0], v[0]), (bounds, bounds, torch.tensor(5), 5)
        packed, packed_lse, *_ = calls._wrapped_flash_attn_varlen_forward(*rows, *lengths, *score)
        packed_buffers = [torch.empty_like(x) for x in rows]
        call = (dout[0], *rows, packed, packed_lse, *packed_buffers, *lengths, *score, False)
        packed_sums = calls._wrapped_flash_attn_varlen_backward(*call)
        return [out, lse, *buffers, sums, packed, packed_lse, *packed_buffers, packed_sums]

    torch.testing.assert_close(torch.compile(both, fullgraph=True, backend="aot_eager")(*tensors), both(*tensors))


X = torch.zeros(1, 4, 2, 8)
LSE = torch.zeros(1, 2, 4)
PLAIN = {"dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size_left": -1, "window_size_right": -1}
FORWARD = {"q": X, "k": X, "v": X, **PLAIN, "softcap": 0.0, "alibi_slopes": None, "return_softmax": False}
TENSORS_OF_BACKWARD = {"dout": X, "q": X, "k": X, "v": X, "out": X, "softmax_lse": LSE}
BUFFERS = {"dq": X.clone(), "dk": X.clone(), "dv": X.clone()}
BACKWARD = {**TENSORS_OF_BACKWARD, **BUFFERS, **PLAIN, "softcap": 0.0, "alibi_slopes": None, "deterministic": False}
PACKED = {"cu_seqlens_q": offsets([4]), "cu_seqlens_k": offsets([4]), "max_seqlen_q": 4, "max_seqlen_k": 4}
VARLEN = {**{name: X[0] for name in "qkv"}, **PACKED, "dropout_p": 0.0, "softmax_scale": None, "causal": False}
REFUSED: list[tuple[Callable[..., Any], dict[str, Any], dict[str, Any], str]] = [
    (calls._flash_attn_forward, FORWARD, {"dropout_p": 0.1}, "dropout_p: expected 0, since .* got 0.1"),
    (calls._flash_attn_forward, FORWARD, {"return_softmax": True}, "return_softmax: expected False, since .* got True"),
    (calls._flash_attn_forward, FORWARD, {"window_size_left": 1.5}, r"window_size: expected \(left, right\)"),
    (calls._flash_attn_forward, FORWARD, {"k": X[0]}, "q, k, v: expected 4 dims each"),
    (calls._flash_attn_backward, BACKWARD, {"dropout_p": 0.1}, "dropout_p: expected 0"),
    (calls._flash_attn_backward, BACKWARD, {"dq": None}, "dq: expected a tensor to write the gradient to, got None"),
    (calls._flash_attn_backward, BACKWARD, {"dk": X[:, :1]}, r"dk: expected a tensor \(1, 4, 2, 8\) .* got \(1, 1"),
    (calls._flash_attn_backward, BACKWARD, {"dv": X.double()}, "dv: expected a tensor .* got .*float64"),
    (calls._flash_attn_backward, BACKWARD, {"out": X[0]}, r"out: expected 4 dims, .*, got \(4, 2, 8\)"),
    (calls._flash_attn_backward, BACKWARD, {"softmax_lse": LSE[..., :3]}, "lse: expected"),
    (calls._flash_attn_varlen_forward, VARLEN, {"leftpad_k": LSE}, "leftpad_k: expected None, since .* got Tensor"),
    (calls._flash_attn_varlen_forward, VARLEN, {"seqused_k": LSE}, "seqused_k: expected"),
]


@pytest.mark.parametrize(("function", "call", "changes", "message"), REFUSED)
def test_refused(function: Callable[..., Any], call: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    function(**call)
    with pytest.raises(ValueError, match=f"^flash_cute: {message}"):
        function(**{**call, **changes})
    with pytest.raises(TypeError, match="unexpected keyword argument 'unknown'"):
        function(**call, unknown=1)


def test_refused_by_the_compiled_module() -> None:
    with pytest.raises(ValueError, match=r"^flash_cute: out: expected a tensor \(1, 4, 2, 8\) .* got \(4, 2, 8\)"):
        extension.fwd(X, X, X, X[0], None, 0.0, None, False, -1, -1, 0.0, False, None)
    with pytest.raises(NotImplementedError, match="flash_cute: _get_block_size_n: "):
        calls._get_block_size_n("cpu", 64, False, False)


MODULES = pytest.mark.parametrize("module", [flash_attn, flash_attn_interface])


@MODULES
@pytest.mark.parametrize("with_gradients", [False, True])
def test_what_stands_for_an_int(module: Any, with_gradients: bool, rng: torch.Generator) -> None:
    """flash-attn's own tests give a window as a tensor; callers give longest lengths as one."""
    q, k, v = (torch.randn(1, 20, 2, 8, generator=rng).requires_grad_(with_gradients) for _ in range(3))
    expected = module.flash_attn_func(q, k, v, window_size=(3, 5))
    for window in (torch.tensor([3, 5]), [3, 5], (torch.tensor(3), 5), torch.tensor([3, 5]).numpy()):
        assert same_bits((module.flash_attn_func(q, k, v, window_size=window),), (expected,))
    assert same_bits(
        (module.flash_attn_func(q, k, v, window_size=torch.tensor([-1, -1])),), (module.flash_attn_func(q, k, v),)
    )
    bools = ((True, 5), (3, np.True_), torch.tensor([True, False]))
    elsewhere = torch.tensor([3, 5], device="meta")  # as on a GPU: its values would have to be waited for
    for window in (torch.tensor([3.0, 5.0]), (3.5, 2), torch.tensor([3, 5, 7]), ("3", 5), *bools, elsewhere):
        with pytest.raises(ValueError, match=r"^flash_cute: window_size: expected \(left, right\)"):
            module.flash_attn_func(q, k, v, window_size=window)
    rows, bounds = [x[0] for x in (q, k, v)], offsets([20])
    for longest in (20, torch.tensor(20), torch.tensor(20, device="meta"), None):
        given = module.flash_attn_varlen_func(*rows, bounds, bounds, longest, longest, window_size=(3, 5))
        assert same_bits((given,), (expected[0],))
    for no_number in ("x", True):
        with pytest.raises(ValueError, match=rf"^flash_cute: max_seqlen_q: expected .* of rows, got {no_number!r}"):
            module.flash_attn_varlen_func(*rows, bounds, bounds, no_number, 20)


@MODULES
@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("value", [True, np.True_, torch.tensor(True), torch.tensor(0.5, device="meta")], ids=str)
def test_what_is_no_number(module: Any, with_gradients: bool, value: Any, rng: torch.Generator) -> None:
    """It would be taken for 1, or waited for. What a number is written as does not matter."""
    q, k, v = (torch.randn(1, 20, 2, 8, generator=rng).requires_grad_(with_gradients) for _ in range(3))
    rows, bounds = [x[0] for x in (q, k, v)], offsets([20])
    for theirs, ours in (("softmax_scale", "scale"), ("softcap", "softcap")):
        with pytest.raises(ValueError, match=rf"^flash_cute: {ours}: expected None or a number"):
            module.flash_attn_func(q, k, v, **{theirs: value})
        with pytest.raises(ValueError, match=rf"^flash_cute: {ours}: expected None or a number"):
            module.flash_attn_varlen_func(*rows, bounds, bounds, 20, 20, **{theirs: value})
        expected = module.flash_attn_func(q, k, v, **{theirs: 2.0})
        for same in (2, np.float64(2), np.int64(2), torch.tensor(2.0)):
            assert same_bits((module.flash_attn_func(q, k, v, **{theirs: same}),), (expected,))


DEVICE_ERRORS = {
    "memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "launch": RuntimeError("flash_cute: CUDA could not launch the kernel: cudaErrorIllegalAddress (an illegal ...)"),
    "late": RuntimeError("CUDA error: an illegal memory access was encountered"),
}


@pytest.mark.parametrize("name", DEVICE_ERRORS)
def test_errors_of_the_device_are_raised_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not hidden by a second call, which would run on a broken device, or succeed with memory that others need."""
    error = DEVICE_ERRORS[name]

    def fail(*args: Any) -> None:
        raise error

    bounds = offsets([4])
    for operator, call in (
        ("rows_fwd", lambda: flash_attn.flash_attn_func(X, X, X)),
        ("rows_varlen_fwd", lambda: flash_attn.flash_attn_varlen_func(X[0], X[0], X[0], bounds, bounds, 4, 4)),
    ):
        monkeypatch.setattr(_ops, operator, fail)
        with pytest.raises(RuntimeError) as raised:
            call()
        assert raised.value is error
