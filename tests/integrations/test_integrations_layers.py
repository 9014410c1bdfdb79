"""What the integrations do without gradients: one operator that takes their arguments, where nothing else takes part.

Such a call has the bits of the general path, which every other call takes, and what the operator refuses.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from numerics import same_bits
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import flash_cute
from flash_cute import _ops
from flash_cute.integrations import _transformers_given, flash_attn, flash_attn_interface, sdpa, transformers

Call = Callable[..., torch.Tensor]
PYTORCHS = F.scaled_dot_product_attention


class Layer(torch.nn.Module):
    is_causal = True
    layer_idx = 0


def _transformers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    return transformers.attention(Layer(), q, k, v, None, **options)[0].transpose(1, 2)


def _rows_first(function: Call) -> Call:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return function(*(x.transpose(1, 2) for x in (q, k, v)), causal=True).transpose(1, 2)

    return call


# Causal attention of q, k and v of (B, H, N, D), as many rows as keys.
LAYERS: dict[str, Call] = {
    "flash_attn": _rows_first(flash_attn.flash_attn_func),
    "flash_attn_interface": _rows_first(flash_attn_interface.flash_attn_func),
    "sdpa": lambda q, k, v: sdpa.sdpa(q, k, v, is_causal=True, enable_gqa=True),
    "enable": lambda q, k, v: PYTORCHS(q, k, v, is_causal=True, enable_gqa=True),
    "transformers": _transformers,
}
EVERY_LAYER = pytest.mark.parametrize("name", LAYERS)


@pytest.fixture(autouse=True)
def pytorch_as_it_was() -> Any:
    sdpa.report(reset=True)
    yield
    sdpa.disable()
    sdpa.report(reset=True)


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

    for name in ("sdpa", "rows_fwd", "rows_varlen_fwd", "heads_fwd", "heads_varlen_fwd"):
        monkeypatch.setattr(_ops, name, counted(name))
    return returned


def _tensors(device: str, rng: torch.Generator, rows: int = 20, keys: int = 20, dim_v: int = 16) -> list[torch.Tensor]:
    shapes = ((2, 4, rows, 16), (2, 2, keys, 16), (2, 2, keys, dim_v))
    dtype = torch.float16 if device == "cuda" else torch.float32
    return [torch.randn(shape, generator=rng).to(device, dtype) for shape in shapes]


# Arguments of `_fwd` from the window on, less backend and slopes; "sinks" stands for a tensor.
SCORES: dict[str, tuple[Any, ...]] = {
    "plain": (None, None, None, None, None),
    "window": (7, 0, None, None, 0.3),
    "softcap, sinks": (None, 3, 5.0, "sinks", None),
}


def _strided(x: torch.Tensor, layout: str) -> torch.Tensor:
    """`x` in other strides; "unaligned" and "columns" are copied before a kernel reads them."""
    if layout == "rows":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "unaligned":
        return F.pad(x, (1, 2))[..., 1:-2]
    return x.mT.contiguous().mT if layout == "columns" else x


@pytest.mark.parametrize("layout", ["heads", "rows", "unaligned", "columns"])
@pytest.mark.parametrize("score", SCORES)
def test_rows_and_heads_fwd(score: str, layout: str, device: str, rng: torch.Generator) -> None:
    """Of either order of rows and heads, and of any strides: the bits of `_fwd`, and its out's memory."""
    sinks = torch.randn(4, generator=rng).to(device)
    left, right, softcap, sinks_or_none, scale = (sinks if x == "sinks" else x for x in SCORES[score])
    q, k, v = (_strided(x, layout) for x in _tensors(device, rng, keys=33, dim_v=24))
    options = (left, right, softcap, sinks_or_none)
    for causal in (False, True):
        mask = "bottom_right" if causal else "none"
        expected, lse = _ops.fwd_without_autograd(q, k, v, mask, *options, None, scale, "auto")
        rows_first = (x.transpose(1, 2) for x in (q, k, v))
        out, its_lse = _ops.rows_fwd(*rows_first, None, causal, *options, None, scale)
        assert same_bits((out.transpose(1, 2), its_lse), (expected, lse))
        assert out.transpose(1, 2).stride() == expected.stride()
    # A model's window counts the row's own key, and has as many on the other side where nothing is causal.
    for causal, window in ((False, None), (True, None), (False, 8), (True, 8)):
        mask, side = "bottom_right" if causal else "none", None if window is None else window - 1
        expected = _ops.fwd_without_autograd(q, k, v, mask, side, side, *options[2:], None, scale, "auto")[0]
        out = _ops.heads_fwd(q, k, v, causal, window, *options[2:], scale).transpose(1, 2)
        assert same_bits((out,), (expected,)) and out.stride() == expected.stride()


@pytest.mark.parametrize("layout", ["heads", "rows", "unaligned", "columns"])
@pytest.mark.parametrize("rows", [20, 40])
def test_sdpa_operator(rows: int, layout: str, device: str, rng: torch.Generator) -> None:
    """Its causal mask is aligned to the top left."""
    q, k, v = (_strided(x, layout) for x in _tensors(device, rng, rows=rows, keys=33, dim_v=24))
    for causal, mask in ((False, "none"), (True, "top_left")):
        out = _ops.sdpa(q, k, v, causal, 0.3, True)
        expected = _ops.fwd_without_autograd(q, k, v, mask, *(None,) * 5, 0.3, "auto")[0]
        assert same_bits((out,), (expected,)) and out.stride() == expected.stride()


@EVERY_LAYER
def test_without_gradients(name: str, calls: list[str], device: str, rng: torch.Generator) -> None:
    """One call of the operator, no gradients, and the bits of a call with gradients."""
    tensors = _tensors(device, rng)
    leaves = [x.requires_grad_() for x in _tensors(device, rng)]
    with sdpa.enable(devices=[device], strict=True):
        out = LAYERS[name](*tensors)  # nothing requires grad
        assert len(calls) == 1
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                without = LAYERS[name](*leaves)
        assert len(calls) == 3 and without.is_inference()
        expected = LAYERS[name](*(x.detach().requires_grad_() for x in tensors))
        LAYERS[name](*leaves).sum().backward()
    assert len(calls) == 3 and not out.requires_grad and expected.requires_grad and leaves[0].grad is not None
    assert same_bits((out,), (expected,)) and out.stride() == expected.stride()
    served = {"sdpa": "flash_cute.integrations.sdpa.sdpa", "enable": "scaled_dot_product_attention"}
    assert sdpa.report().served == ({served[name]: 5} if name in served else {})


class Subclass(torch.Tensor):
    pass


def _in_dual_level(call: Call, tensors: list[torch.Tensor]) -> None:
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        call(forward_ad.make_dual(tensors[0], torch.ones_like(tensors[0])), *tensors[1:])


def _under_vmap(call: Call, tensors: list[torch.Tensor]) -> None:
    with pytest.raises(NotImplementedError, match="vmap"):
        torch.func.vmap(call)(*(x[None] for x in tensors))


def _counting_flops(call: Call, tensors: list[torch.Tensor]) -> None:
    with FlopCounterMode(display=False) as counter:
        call(*tensors)
    batch, heads, rows, dim = tensors[0].shape
    assert counter.get_total_flops() == 4 * batch * heads * rows * rows * dim


def _in_autocast(call: Call, tensors: list[torch.Tensor]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert call(*tensors).dtype == torch.bfloat16


def _of_fakes(call: Call, tensors: list[torch.Tensor]) -> None:
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(x) for x in tensors]
    assert call(*fakes).shape == tensors[0].shape
    with mode:
        assert call(*fakes).shape == tensors[0].shape


def _compiled(call: Call, tensors: list[torch.Tensor]) -> None:
    torch.compiler.reset()
    out = torch.compile(call, fullgraph=True, backend="aot_eager")(*tensors)
    assert same_bits((out,), (flash_cute.attention(*tensors, True),))


def _traced(call: Call, tensors: list[torch.Tensor]) -> None:
    out = torch.jit.trace(call, tensors, check_trace=False)(*tensors)
    assert same_bits((out,), (flash_cute.attention(*tensors, True),))


def _of_another_type(call: Call, tensors: list[torch.Tensor]) -> None:
    expected = flash_cute.attention(*tensors, True)
    out = call(tensors[0].as_subclass(Subclass), *tensors[1:])
    assert same_bits((out.as_subclass(torch.Tensor),), (expected,))


OTHERS = (_counting_flops, _in_autocast, _of_fakes, _compiled, _traced, _of_another_type)
REFUSING = (_in_dual_level, _under_vmap)  # sdpa passes these on to PyTorch: test_integrations_sdpa.py


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("other", "name"),
    [(x, name) for name in ("flash_attn", "transformers") for x in OTHERS + REFUSING] + [(x, "sdpa") for x in OTHERS],
    ids=lambda x: x if isinstance(x, str) else x.__name__.strip("_"),
)
def test_others_go_the_general_way(
    other: Callable[[Call, list[torch.Tensor]], None], name: str, calls: list[str], rng: torch.Generator
) -> None:
    with torch.no_grad():
        other(LAYERS[name], _tensors("cpu", rng))
    assert calls == []


def test_a_gradient_of_sinks_alone(calls: list[str], rng: torch.Generator) -> None:
    sinks = torch.zeros(4, requires_grad=True)
    _transformers(*_tensors("cpu", rng), s_aux=sinks).sum().backward()
    assert calls == [] and sinks.grad is not None
    with torch.no_grad():
        _transformers(*_tensors("cpu", rng), s_aux=sinks)
    assert calls == ["heads_fwd"]


def test_meta_tensors(calls: list[str]) -> None:
    for name in ("flash_attn", "sdpa", "transformers"):
        q, k = torch.empty(2, 4, 20, 16, device="meta"), torch.empty(2, 2, 20, 16, device="meta")
        out = LAYERS[name](q, k, k)
        assert out.is_meta and out.shape == q.shape
    assert calls == ["rows_fwd", "sdpa", "heads_fwd"]


def test_positions(calls: list[str], rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read by the first layer, unless there is one row or more than one batch item."""
    reads = []
    read = _transformers_given._read_positions
    monkeypatch.setattr(_transformers_given, "_read_positions", lambda x: reads.append(x) or read(x))
    q, k, v = (x[:1] for x in _tensors("cpu", rng))
    positions = torch.arange(20)[None]
    for _ in range(3):
        _transformers(q, k, v, position_ids=positions)
    assert (len(reads), calls) == (1, ["heads_fwd"] * 3)
    positions[0, 8:] -= 8  # in place: sequences of 8 and 12 rows
    packed = _transformers(q, k, v, position_ids=positions)
    assert (len(reads), calls[3:]) == (2, ["heads_varlen_fwd"])
    for part in (slice(0, 8), slice(8, 20)):
        alone = flash_cute.attention(*(x[:, :, part] for x in (q, k, v)), True)
        torch.testing.assert_close(packed[:, :, part], alone)
    one_row = torch.zeros(1, 1, dtype=torch.long)
    given = _transformers(q[:, :, -1:], k, v, position_ids=one_row)
    _transformers(*_tensors("cpu", rng), position_ids=one_row.expand(2, 20))
    assert (len(reads), calls[4:]) == (2, ["heads_fwd"] * 2)
    torch.testing.assert_close(given, flash_cute.attention(q, k, v, True)[:, :, -1:])


# What `_sdpa` refuses: shapes of query, key and value, options of the call.
REFUSED = {
    "gqa": (((2, 4, 9, 8), (2, 2, 9, 8), (2, 2, 9, 8)), {}),
    "no rows": (((2, 4, 0, 8), (2, 4, 9, 8), (2, 4, 9, 8)), {}),
    "no keys": (((2, 4, 9, 8), (2, 4, 0, 8), (2, 4, 0, 8)), {}),
    "dims": (((2, 4, 9, 8), (4, 9, 8), (4, 9, 8)), {}),
    "scale": (((2, 4, 9, 8),) * 3, {"scale": -1.0}),
    "batches": (((2, 4, 9, 8), (3, 4, 9, 8), (3, 4, 9, 8)), {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_the_operator(name: str, device: str) -> None:
    """What PyTorch would answer otherwise, or not at all; nothing is left of a refusal."""
    shapes, options = REFUSED[name]
    tensors = [torch.randn(shape).to(device, torch.float16) for shape in shapes]
    with pytest.raises((ValueError, RuntimeError), match=r"^flash_cute: \w[\w, ]*: expected"):
        _ops.sdpa(*tensors, False, options.get("scale"), False)
    results = []
    for function in (PYTORCHS, sdpa.sdpa):
        try:
            results.append(function(*tensors, **options))
        except RuntimeError as error:
            results.append(str(error))
    expected, given = results
    assert type(given) is type(expected)
    if isinstance(expected, str):
        assert given.startswith("flash_cute: query, key, value: expected heads and batches that broadcast, got ")
    else:
        torch.testing.assert_close(given, expected, equal_nan=True, atol=1e-2, rtol=1e-2)


def test_a_refusal_is_heard_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`attention` is not asked for what it would refuse as well: an exception costs as much as a call."""
    monkeypatch.setattr("flash_cute.integrations._sdpa_call.attention", lambda *args, **options: pytest.fail())
    x = torch.randint(3, (1, 2, 8, 16))
    with pytest.raises(RuntimeError) as theirs:
        PYTORCHS(x, x, x)
    with pytest.raises(RuntimeError) as ours:
        sdpa.sdpa(x, x, x)
    assert str(ours.value) == str(theirs.value)
    assert [reason.partition(":")[0] for reason in sdpa.report().passed_on] == ["q"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softmax_scale": -1.0}, "scale: expected a finite number above 0, got -1"),
        ({"softmax_scale": "1"}, "scale: expected None or a number, got '1'"),
        ({"softcap": -2.0}, "softcap: expected None or a finite number above 0, got -2"),
        ({"window_size": 3}, "window_size: expected .left, right."),
    ],
)
def test_refusals_are_worded_the_general_way(options: dict[str, Any], message: str, rng: torch.Generator) -> None:
    q, k, v = (x.transpose(1, 2) for x in _tensors("cpu", rng))
    with pytest.raises(ValueError, match=f"^flash_cute: {message}"):
        flash_attn.flash_attn_func(q, k, v, **options)
    with pytest.raises(ValueError, match=r"^flash_cute: k: expected q's head dim 16, got 8"):
        flash_attn.flash_attn_func(q, k[..., :8], v)
    with pytest.raises(ValueError, match=r"^flash_cute: q, k, v: expected 4 dims each, \(B, N, H, D\)"):
        flash_attn.flash_attn_func(q[0], k, v)


def test_fakes_and_schemas(rng: torch.Generator) -> None:
    q, k, v = _tensors("cpu", rng, keys=33, dim_v=24)
    rows_first = tuple(x.transpose(1, 2) for x in (q, k, v))
    given = {
        "_sdpa": (q, k, v, True, None, True),
        "_rows_fwd": (*rows_first, None, True, 5, None, 2.0, torch.zeros(4), None, 0.1),
        "_heads_fwd": (q, k, v, True, 6, 2.0, torch.zeros(4), 0.1),
    }
    for name, args in given.items():
        operator = getattr(torch.ops.flash_cute, name).default
        torch.library.opcheck(operator, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_enabled_in_autocast(dtype: torch.dtype, calls: list[str], rng: torch.Generator) -> None:
    """The dispatcher casts as it does for PyTorch's own before it calls what `enable()` has put there."""
    tensors = [x.to(dtype) for x in _tensors("cpu", rng)]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        pytorchs_dtype = PYTORCHS(*tensors, enable_gqa=True).dtype
        with sdpa.enable(devices=["cpu"], strict=True):
            out = PYTORCHS(*tensors, enable_gqa=True)
    assert out.dtype == pytorchs_dtype and calls == ["sdpa"]
    assert same_bits((out,), (flash_cute.attention(*(x.to(pytorchs_dtype) for x in tensors)),))


@pytest.mark.parametrize("enabled", [False, True])
def test_a_refusal_keeps_no_tensor_in_memory(enabled: bool) -> None:
    """An exception that a function holds holds that function's variables, until the garbage collector comes."""
    gc.disable()
    try:
        x = torch.randint(3, (1, 2, 8, 16))
        alive = weakref.ref(x)
        with sdpa.enable(devices=["cpu"]) if enabled else nullcontext(), pytest.raises(RuntimeError):
            (PYTORCHS if enabled else sdpa.sdpa)(x, x, x)
        assert sum(sdpa.report().passed_on.values()) == 1
        del x
        assert alive() is None
    finally:
        gc.enable()
