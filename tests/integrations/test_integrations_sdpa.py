"""flash_cute in place of scaled_dot_product_attention: the same answers, counted; PyTorch's where it cannot serve.

Past 400 lines, and one file: its tests share the models, the counters and the ways to call PyTorch's function.
"""

from __future__ import annotations

import collections
import doctest
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from numerics import assert_gradients_match, same_bits
from packed import assert_packed_matches, pack
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import flash_cute
from flash_cute import _ops
from flash_cute.integrations import _aten, _tally, _varlen_attn, sdpa

pytestmark = pytest.mark.usefixtures("sdpa_counters")

PYTORCHS = F.scaled_dot_product_attention  # as a module has it that was imported before enable()
CUDA = pytest.param("cuda", marks=pytest.mark.cuda)
HAS_REGISTRY = hasattr(torch.nn.attention, "register_flash_attention_impl")


# Which keys there are of two sequences, of the second some between others; and of four heads.
KEYS = torch.arange(13) < torch.tensor([[9], [13]])
KEYS[1, 3:5] = False
BY_HEAD = torch.arange(13).view(1, 1, 1, 13) != torch.tensor([1, 5, 5, 12]).view(1, 4, 1, 1)

# Shapes of query, key and value, and options; all are served.
SERVED: dict[str, tuple[tuple[tuple[int, ...], ...], dict[str, Any]]] = {
    "square": (((2, 4, 9, 8),) * 3, {}),
    "causal": (((2, 4, 9, 8),) * 3, {"is_causal": True, "scale": 0.2}),
    "more keys, causal": (((2, 4, 9, 8), (2, 4, 13, 8), (2, 4, 13, 8)), {"is_causal": True}),
    "fewer keys, causal": (((2, 4, 13, 8), (2, 4, 9, 8), (2, 4, 9, 8)), {"is_causal": True}),
    "gqa": (((2, 6, 9, 8), (2, 2, 13, 8), (2, 2, 13, 8)), {"enable_gqa": True, "is_causal": True}),
    "value's head dim": (((2, 4, 9, 8), (2, 4, 13, 8), (2, 4, 13, 5)), {}),
    "no heads": (((3, 9, 8), (3, 13, 8), (3, 13, 8)), {"is_causal": True}),
    "no batch": (((9, 8), (13, 8), (13, 5)), {}),
    "two batches": (((2, 3, 4, 9, 8), (2, 3, 4, 13, 8), (2, 3, 4, 13, 8)), {"is_causal": True}),
    "broadcast batch": (((2, 4, 9, 8), (1, 4, 13, 8), (2, 4, 13, 8)), {}),
    "broadcast heads": (((2, 4, 9, 8), (2, 1, 13, 8), (2, 1, 13, 8)), {}),
    "broadcast query": (((9, 8), (2, 4, 13, 8), (4, 13, 8)), {"is_causal": True}),
    "broadcast value": (((2, 4, 9, 8), (2, 4, 13, 8), (1, 13, 8)), {}),
    "padding": (((2, 4, 9, 8), (2, 4, 13, 8), (2, 4, 13, 8)), {"attn_mask": KEYS.view(2, 1, 1, 13)}),
    "padding of all": (((2, 4, 9, 8), (2, 4, 13, 8), (2, 4, 13, 8)), {"attn_mask": KEYS[1:]}),
    "padding by head": (((2, 4, 9, 8), (2, 4, 13, 8), (2, 4, 13, 8)), {"attn_mask": BY_HEAD}),
    "padding, expanded": (
        ((2, 4, 9, 8), (2, 4, 13, 8), (2, 4, 13, 8)),
        {"attn_mask": KEYS[:, None, None].expand(2, 4, 9, 13)},
    ),
    "padding of gqa": (
        ((2, 6, 9, 8), (2, 2, 13, 8), (2, 2, 13, 8)),
        {"enable_gqa": True, "attn_mask": KEYS.view(2, 1, 1, 13)},
    ),
    "padding of everything": (((2, 4, 9, 8),) * 3, {"attn_mask": torch.zeros(1, 1, dtype=torch.bool)}),
    "padding of two batches": (
        ((2, 3, 4, 9, 8), (2, 3, 4, 13, 8), (2, 3, 4, 13, 8)),
        {"attn_mask": KEYS.view(2, 1, 1, 1, 13)},
    ),
    "padding without heads": (((2, 9, 8), (2, 13, 8), (2, 13, 8)), {"attn_mask": KEYS[:1]}),
    "padding as floats": (
        ((2, 4, 9, 8), (2, 4, 13, 8), (2, 4, 13, 8)),
        {"attn_mask": torch.zeros(2, 1, 1, 13, dtype=torch.float64).masked_fill(~KEYS.view(2, 1, 1, 13), -torch.inf)},
    ),
    "gqa of two batches": (((2, 3, 4, 9, 8), (3, 2, 13, 8), (2, 1, 2, 13, 8)), {"enable_gqa": True}),
}
# (query, key, value's shapes), what is given besides, the reason's argument.
PASSED_ON: dict[str, tuple[tuple[tuple[int, ...], ...], dict[str, Any], str]] = {
    "float mask": (((2, 4, 9, 8),) * 3, {"attn_mask": torch.eye(9).double()}, "attn_mask"),
    "float padding": (((2, 4, 9, 8),) * 3, {"attn_mask": torch.linspace(-1, 0, 9).double().view(1, 9)}, "attn_mask"),
    "padding by query head": (
        ((2, 6, 9, 8), (2, 2, 13, 8), (2, 2, 13, 8)),
        {"enable_gqa": True, "attn_mask": torch.arange(13) > torch.arange(6).view(6, 1, 1)},
        "attn_mask",
    ),
    "padding and dropout": (((2, 4, 9, 8),) * 3, {"dropout_p": 0.5, "attn_mask": torch.ones(1, 9).bool()}, "dropout_p"),
    "dropout": (((2, 4, 9, 8),) * 3, {"dropout_p": 0.5}, "dropout_p"),
    "scale": (((2, 4, 9, 8),) * 3, {"scale": -0.3}, "scale"),
    "no keys": (((2, 4, 9, 8), (2, 4, 0, 8), (2, 4, 0, 8)), {}, "query, key, value"),
    "gqa of other heads": (((2, 4, 9, 8), (2, 2, 13, 8), (2, 1, 13, 8)), {"enable_gqa": True}, "enable_gqa"),
}


def _tensors(shapes: tuple[tuple[int, ...], ...], rng: torch.Generator) -> list[torch.Tensor]:
    return [torch.randn(shape, generator=rng, dtype=torch.float64).requires_grad_() for shape in shapes]


def _with_gradients(function: Callable[..., torch.Tensor], tensors: list[torch.Tensor], options: Any) -> Any:
    torch.manual_seed(0)  # dropout draws from the process's generator
    out = function(*tensors, **options)
    return out, torch.autograd.grad(out.square().sum(), tensors)


@pytest.mark.parametrize("through", ["function", "enable"])
@pytest.mark.parametrize("name", SERVED)
def test_served(name: str, through: str, rng: torch.Generator) -> None:
    """The same out and gradients as PyTorch's, in float64."""
    shapes, options = SERVED[name]
    tensors = _tensors(shapes, rng)
    expected = _with_gradients(F.scaled_dot_product_attention, tensors, options)
    with sdpa.enable(devices=["cpu"], strict=True) if through == "enable" else nullcontext():
        given = _with_gradients(PYTORCHS if through == "enable" else sdpa.sdpa, tensors, options)
    torch.testing.assert_close(given, expected, atol=1e-12, rtol=1e-12)
    report = sdpa.report()
    assert (list(report.served.values()), report.passed_on) == ([1], {})


@pytest.mark.parametrize("through", ["function", "both"])
@pytest.mark.parametrize("name", PASSED_ON)
def test_passed_on(name: str, through: str, rng: torch.Generator) -> None:
    """PyTorch's own bits, counted once."""
    shapes, options, argument = PASSED_ON[name]
    tensors = _tensors(shapes, rng)
    expected = _with_gradients(F.scaled_dot_product_attention, tensors, options)
    with sdpa.enable(devices="cpu") if through == "both" else nullcontext():
        given = _with_gradients(sdpa.sdpa, tensors, options)
    assert same_bits((given[0], *given[1]), (expected[0], *expected[1]))
    report = sdpa.report()
    assert report.served == {} and list(report.passed_on.values()) == [1]
    assert next(iter(report.passed_on)).startswith(f"{argument}: expected")
    with sdpa.enable(devices="cpu", strict=True), pytest.raises(ValueError, match=f"flash_cute: {argument}: expected"):
        F.scaled_dot_product_attention(*tensors, **options)


def test_a_scale_that_is_no_number(rng: torch.Generator) -> None:
    """PyTorch takes True for 1; its own function's True is 1 before `enable()`'s kernel sees it."""
    tensors = [x.detach() for x in _tensors(((2, 4, 9, 8),) * 3, rng)]
    for scale in (True, torch.tensor(0.5)):
        assert same_bits((sdpa.sdpa(*tensors, scale=scale),), (PYTORCHS(*tensors, scale=scale),))
    assert sdpa.report().passed_on == {"scale: expected None or a finite number > 0, got another": 2}


def test_examples() -> None:
    for module, fewest in ((sdpa, 10), (_varlen_attn, 3)):
        results = doctest.testmod(module, extraglobs={"torch": torch})
        assert (results.attempted >= fewest, results.failed) == (True, 0)


@pytest.fixture
def x(rng: torch.Generator) -> torch.Tensor:
    return torch.randn(1, 2, 9, 8, generator=rng)


ENTRY = {"scaled_dot_product_attention": 1}


def test_whatever_calls_it(x: torch.Tensor) -> None:
    """Without gradients, in inference mode, of a Parameter, under autocast, from another thread."""
    calls: list[Callable[[], Any]] = [
        lambda: torch.no_grad()(PYTORCHS)(x, x, x),
        lambda: torch.inference_mode()(lambda: PYTORCHS(x.clone(), x, x))(),
        lambda: PYTORCHS(torch.nn.Parameter(x), x, x),
        lambda: torch.autocast("cpu", torch.bfloat16)(PYTORCHS)(x, x, x),
        lambda: ThreadPoolExecutor(1).submit(PYTORCHS, x, x, x).result(),
        lambda: torch.nn.MultiheadAttention(8, 2, bias=False)(*(x[0],) * 3, need_weights=False)[0],
    ]
    for call in calls:
        torch.manual_seed(0)
        expected = call()
        torch.manual_seed(0)
        with sdpa.enable(devices="cpu"):
            given = call()
        torch.testing.assert_close(given, expected, atol=2e-2 if given[0].dtype == torch.bfloat16 else 1e-5, rtol=0)
        assert sdpa.report(reset=True).served == ENTRY


def test_what_knows_pytorchs_operators_keeps_them(x: torch.Tensor) -> None:
    """Compiled graphs, dispatch modes, torch.func and subclasses get PyTorch's operators, which CUDA has overridden."""
    leaf = x.clone().requires_grad_()
    compiled = torch.compile(PYTORCHS, fullgraph=True, backend="aot_eager")
    nested = torch.nested.nested_tensor([x[0], x[0, :, :5]], layout=torch.strided)

    def modes() -> Any:
        with FlopCounterMode(display=False) as counter:
            PYTORCHS(x, x, x)
        return torch.tensor(counter.get_total_flops())

    calls: list[Callable[[], Any]] = [
        lambda: torch.autograd.grad(compiled(leaf, leaf, leaf).sum(), leaf)[0],
        lambda: torch.func.grad(lambda y: PYTORCHS(y, y, y).square().sum())(x),
        lambda: torch.func.vmap(lambda y: PYTORCHS(y, x, x))(x[None]),
        lambda: torch.jit.trace(lambda y: PYTORCHS(y, y, y), x, check_trace=False)(x),
        lambda: PYTORCHS(nested, nested, nested).to_padded_tensor(0.0),
        modes,
    ]
    expected = [call() for call in calls]
    with sdpa.enable(devices="cpu"):
        torch.compiler.reset()
        compiled = torch.compile(PYTORCHS, fullgraph=True, backend="aot_eager")
        given = [call() for call in calls]
    assert same_bits(tuple(given), tuple(expected))


def test_the_function_is_compiled(x: torch.Tensor) -> None:
    """sdpa() in a graph: flash_cute's operator, or PyTorch's."""
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    leaf = x.clone().requires_grad_()
    torch.compiler.reset()
    compiled = torch.compile(sdpa.sdpa, fullgraph=True, backend=keep)
    out = compiled(leaf, leaf, leaf, is_causal=True)
    assert "flash_cute.fwd" in graphs[-1].code
    torch.testing.assert_close(out, PYTORCHS(x, x, x, is_causal=True))
    masked = compiled(x, x, x, attn_mask=torch.eye(9).bool())
    assert "flash_cute" not in graphs[-1].code
    torch.testing.assert_close(masked, x)


@pytest.mark.parametrize("given", [{"is_causal": "no"}, {"is_causal": 1}, {"enable_gqa": None}])
def test_what_is_no_flag_is_pytorchs_to_refuse(given: dict[str, Any], x: torch.Tensor) -> None:
    with pytest.raises(TypeError, match=f"argument '{next(iter(given))}'"):
        sdpa.sdpa(x, x, x, **given)


def test_an_error_of_the_device_is_the_calls_own(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call is not made again, by another way."""

    def fail(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(_ops, "sdpa", fail)
    with sdpa.enable(devices="cpu"):
        for function in (sdpa.sdpa, PYTORCHS):
            with pytest.raises(torch.OutOfMemoryError):
                function(x, x, x)
    assert sdpa.report().data["passed_on"] == {}


def test_what_attention_refuses_is_passed_on(x: torch.Tensor) -> None:
    """Reasons that are found in the call itself: a dtype, a transform of torch.func."""
    with pytest.raises(RuntimeError):
        sdpa.sdpa(x.int(), x.int(), x.int())
    mapped = torch.func.vmap(lambda y: sdpa.sdpa(y, x, x))(x[None])
    torch.testing.assert_close(mapped[0], PYTORCHS(x, x, x))
    first, second = sdpa.report().passed_on
    assert first.startswith("q: expected") and "vmap" in second
    assert sdpa.report().served == {}


def test_a_disabled_backend_is_respected(x: torch.Tensor) -> None:
    """As for gradients of gradients, which the math backend has; in strict mode too, since the call asks for it."""
    leaf = x.clone().requires_grad_()
    with sdpa.enable(devices="cpu", strict=True), sdpa_kernel(SDPBackend.MATH):
        (gradient,) = torch.autograd.grad(PYTORCHS(leaf, leaf, leaf).square().sum(), leaf, create_graph=True)
        assert torch.autograd.grad(gradient.sum(), leaf)[0].any()
    report = sdpa.report()
    assert report.served == {} and list(report.passed_on) == [
        "backend: expected PyTorch's flash backend to be enabled, got it disabled"
    ]


def test_what_was_before_is_restored(x: torch.Tensor) -> None:
    mask = torch.linspace(0, 1, 81).view(9, 9)
    expected = PYTORCHS(x, x, x)
    with sdpa.enable(devices="cpu"):
        with sdpa.enable(devices="cpu", strict=True), pytest.raises(ValueError, match="attn_mask"):
            PYTORCHS(x, x, x, attn_mask=mask)
        PYTORCHS(x, x, x, attn_mask=mask)
        PYTORCHS(x, x, x)
        assert sdpa.report().enabled
    assert not sdpa.report(reset=True).enabled
    assert same_bits((PYTORCHS(x, x, x),), (expected,))
    sdpa.enable()  # for CUDA alone
    PYTORCHS(x, x, x)
    sdpa.disable()
    sdpa.disable()
    assert sdpa.report().data == {"enabled": False, "served": {}, "passed_on": {}}
    for devices in (("cpu", "xpu"), (), 3):
        with pytest.raises(ValueError, match="flash_cute: devices: expected some of 'cuda' and 'cpu'"):
            sdpa.enable(devices=devices)
    with pytest.raises(ValueError, match="flash_cute: strict: expected False or True, got 'no'"):
        sdpa.enable(strict="no")
    with pytest.raises(ValueError, match="flash_cute: reset: expected False or True, got 1"):
        sdpa.report(reset=1)


@pytest.mark.skipif(not HAS_REGISTRY, reason="this torch has no registry of flash attention implementations")
def test_pytorchs_registry() -> None:
    """It can be activated and restored by PyTorch's own functions; another implementation comes back."""
    attention = torch.nn.attention
    assert "flash_cute" in attention.list_flash_attention_impls()
    attention.activate_flash_attention_impl("flash_cute")
    assert attention.current_flash_attention_impl() == "flash_cute" and sdpa.report().enabled
    attention.restore_flash_attention_impl()
    assert attention.current_flash_attention_impl() is None and not sdpa.report().enabled

    class Handle:
        def remove(self) -> None:
            pass

    attention.register_flash_attention_impl("another", register_fn=Handle)
    attention.activate_flash_attention_impl("another")
    with sdpa.enable():
        assert attention.current_flash_attention_impl() == "flash_cute"
    assert attention.current_flash_attention_impl() == "another"
    attention.restore_flash_attention_impl()


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this torch has no CUDA kernels")
def test_cuda_operators_are_overridden() -> None:
    """All of them, under CUDA, until it is disabled; the flash backend is first in the order meanwhile."""

    def kernels() -> list[str]:
        names = [f"aten::{name}" for name in _aten.OPERATORS]
        return [repr(torch.library.get_kernel(name, "CUDA")) for name in names]

    before, order = kernels(), torch._C._get_sdp_priority_order()
    with sdpa.enable():
        during = kernels()
        assert torch._C._get_sdp_priority_order()[0] == int(SDPBackend.FLASH_ATTENTION)
        assert sorted(torch._C._get_sdp_priority_order()) == sorted(order)
    assert [name for name, _ in _aten.overrides(False)] == list(_aten.OPERATORS)
    assert not set(before) & set(during)
    assert (kernels(), torch._C._get_sdp_priority_order()) == (before, order)


def test_few_reasons_are_kept() -> None:
    tally = _tally.Tally()
    for i in range(300):
        tally.pass_on(f"reason {i}")
    tally.pass_on("reason 7")
    report = tally.report(False, reset=False)
    assert len(report.passed_on) == 101 and sum(report.passed_on.values()) == 301 and report.passed_on["reason 7"] == 2
    assert "     200 other reasons" in str(report)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (4, 0)])
def test_varlen_attn(window: tuple[int, int], device: str, rng: torch.Generator) -> None:
    packed = pack(((5, 9), (17, 17), (0, 3), (7, 2)), device, rng, head_dim=16)
    out, lse = sdpa.varlen_attn(*packed.call, 17, 17, return_aux=_Aux(), scale=0.3, window_size=window)
    assert same_bits((sdpa.varlen_attn(*packed.call, 17, 17, scale=0.3, window_size=window),), (out,))
    ours = tuple(None if side < 0 else side for side in window)
    assert_packed_matches(out, lse, packed, scale=0.3, window=None if ours == (None, None) else ours)


class _Aux:
    lse = True


@pytest.mark.parametrize("aux", [True, "lse", collections.namedtuple("Aux", "lse max_scores")(True, True)], ids=repr)
def test_varlen_attn_returns_the_lse_alone(aux: Any) -> None:
    x, offsets = torch.zeros(4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match="flash_cute: return_aux: expected None or a request for lse alone, got "):
        sdpa.varlen_attn(x, x, x, offsets, offsets, 4, 4, return_aux=aux)


@pytest.mark.skipif(not torch.__version__.startswith("2.11"), reason="its arguments are those of torch 2.11")
def test_varlen_attn_has_pytorchs_arguments() -> None:
    from torch.nn.attention.varlen import varlen_attn

    given, expected = (inspect.signature(x).parameters.values() for x in (sdpa.varlen_attn, varlen_attn))
    assert [(p.name, p.kind, p.default) for p in given] == [(p.name, p.kind, p.default) for p in expected]


FIRST_CHOICE = """
import torch
from torch.utils.flop_counter import FlopCounterMode
from flash_cute.integrations import sdpa

if ENABLE:
    with sdpa.enable(strict=True), FlopCounterMode(display=False):
        for _ in range(2):
            q = torch.randn(2, 4, 200, 64, device="cuda", dtype=torch.bfloat16)
            torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert sdpa.report().served == {"aten::_scaled_dot_product_flash_attention": 2}, sdpa.report()
q = torch.randn(2, 4, 200, 64, device="cuda", dtype=torch.bfloat16)
print(torch._fused_sdp_choice(q, q, q, is_causal=True), torch._C._get_sdp_priority_order())
"""


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.skipif(not hasattr(torch._C, "_get_sdp_priority_order"), reason="this PyTorch has no order of backends")
def test_the_first_choice_of_a_process(device: str, python: Callable[..., str]) -> None:
    """PyTorch may set an order of its own when it first chooses: ours holds, and afterwards its own does."""
    enabled, alone = (python(FIRST_CHOICE.replace("ENABLE", str(x))) for x in (True, False))
    assert enabled == alone


@pytest.mark.parametrize("device", [CUDA])
class TestOnCuda:
    """What PyTorch's own functions do on a GPU with flash_cute behind them."""

    @pytest.fixture
    def leaves(self, device: str, rng: torch.Generator) -> list[torch.Tensor]:
        shapes = ((2, 4, 200, 64), *((2, 2, 200, 64),) * 2)
        return [torch.randn(s, generator=rng).to(device, torch.bfloat16).requires_grad_() for s in shapes]

    @staticmethod
    def _check(out: torch.Tensor, leaves: list[torch.Tensor], **options: Any) -> None:
        """out and its gradients against PyTorch's math in float32."""
        dout = torch.ones_like(out)
        given = torch.autograd.grad(out, leaves, dout)
        wide = [x.detach().float().requires_grad_() for x in leaves]
        with sdpa_kernel(SDPBackend.MATH):
            expected = PYTORCHS(*wide, enable_gqa=True, **options)
        torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)
        for x, y in zip(given, torch.autograd.grad(expected, wide, dout.float()), strict=True):
            torch.testing.assert_close(x.float(), y, atol=2e-2 * float(y.abs().max()), rtol=2e-2)

    def test_eager(self, leaves: list[torch.Tensor]) -> None:
        with sdpa.enable(strict=True):
            out = PYTORCHS(*leaves, is_causal=True, enable_gqa=True)
            short = [leaves[0][:, :, :100], *leaves[1:]]
            not_square = PYTORCHS(*short, is_causal=True, enable_gqa=True)
        assert sdpa.report().served == {"scaled_dot_product_attention": 2}
        self._check(out, leaves, is_causal=True)
        torch.testing.assert_close(not_square, out[:, :, :100])

    def test_graphs(self, leaves: list[torch.Tensor]) -> None:
        torch.compiler.reset()
        with sdpa.enable(strict=True):
            compiled = torch.compile(PYTORCHS, fullgraph=True, backend="aot_eager")
            out = compiled(*leaves, is_causal=True, enable_gqa=True)
            self._check(out, leaves, is_causal=True)
        assert sdpa.report().served == {"aten::_scaled_dot_product_flash_attention": 1}

    def test_dispatch_modes(self, leaves: list[torch.Tensor]) -> None:
        # Of as many heads: PyTorch's formula for the operator's FLOPs takes no other.
        full = [leaves[0], *(x.repeat_interleave(2, 1) for x in leaves[1:])]
        with sdpa.enable(strict=True), FlopCounterMode(display=False) as counter:
            PYTORCHS(*full, is_causal=True)
        assert counter.get_total_flops() == 4 * 2 * 4 * 200 * 200 * 64
        assert sdpa.report().served == {"aten::_scaled_dot_product_flash_attention": 1}

    def test_nested_tensors_and_varlen_attn(self, device: str, rng: torch.Generator) -> None:
        parts = [torch.randn(n, 4, 64, generator=rng).to(device, torch.float16) for n in (100, 37)]
        nested = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
        packed, offsets = torch.cat(parts), torch.tensor([0, 100, 137], dtype=torch.int32, device=device)
        with sdpa.enable(strict=True):
            out = PYTORCHS(nested, nested, nested, is_causal=True).transpose(1, 2)
            assert sdpa.report().served == {"aten::_flash_attention_forward": 1}
            varlen = pytest.importorskip("torch.nn.attention.varlen")
            same = varlen.varlen_attn(packed, packed, packed, offsets, offsets, 100, 100, window_size=(-1, 0))
            assert sdpa.report().served == {"aten::_flash_attention_forward": 2}
        torch.testing.assert_close(out.values(), same)
        for part, of in zip(parts, out.unbind(), strict=True):
            alone = PYTORCHS(*(part.transpose(0, 1)[None],) * 3, is_causal=True)[0].transpose(0, 1)
            torch.testing.assert_close(of, alone, atol=4e-3, rtol=4e-3)

    @pytest.mark.parametrize("compiled", [False, True])
    def test_gradients_of_nested_tensors(self, compiled: bool, device: str, rng: torch.Generator) -> None:
        """Jagged ones, causal, in eager mode and in a graph: those of each sequence by itself."""
        parts = [torch.randn(n, 4, 64, generator=rng).to(device, torch.float16).requires_grad_() for n in (100, 37)]
        torch.compiler.reset()

        def attend(nested: torch.Tensor) -> torch.Tensor:
            heads_first = nested.transpose(1, 2)
            return PYTORCHS(heads_first, heads_first, heads_first, is_causal=True).transpose(1, 2)

        function = torch.compile(attend, backend="aot_eager") if compiled else attend
        with sdpa.enable(strict=True):
            out = function(torch.nested.as_nested_tensor(parts, layout=torch.jagged))
            given = torch.autograd.grad(out.values().float().square().sum(), parts)
        assert sdpa.report().served == {"aten::_flash_attention_forward": 1}
        for part, gradient in zip(parts, given, strict=True):
            alone = attend(part[None])[0]
            (expected,) = torch.autograd.grad(alone.float().square().sum(), part)
            torch.testing.assert_close(gradient, expected, atol=2e-2, rtol=2e-2)

    def test_passed_on(self, leaves: list[torch.Tensor]) -> None:
        """Dropout: PyTorch's flash kernel, forward and backward, by the same draws; a bias: another kernel of its."""
        bias = torch.linspace(0, 1, 40_000, device="cuda", dtype=leaves[0].dtype).view(200, 200)
        for options in ({"dropout_p": 0.5}, {"attn_mask": bias}):
            backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
            full = [leaves[0], *(x.repeat_interleave(2, 1) for x in leaves[1:])]
            results = []
            for context in (nullcontext(), sdpa.enable()):
                with context, sdpa_kernel(backends):
                    torch.manual_seed(0)
                    out = PYTORCHS(*full, **options)
                    results.append((out, *torch.autograd.grad(out.square().sum(), full)))
            for expected, given in zip(*results, strict=True):
                torch.testing.assert_close(given, expected, atol=1e-2, rtol=1e-2)  # its dq has other bits each time
        assert sorted(x.partition(":")[0] for x in sdpa.report().passed_on) == ["attn_mask", "dropout_p"]
        assert sdpa.report().served == {}


@pytest.mark.cuda
def test_padding_on_the_gpu(rng: torch.Generator) -> None:
    """Served, with gradients, where kernels read a mask; else PyTorch's, counted. Right in either case."""
    q, k, v = (torch.randn(2, 4, 200, 64, generator=rng).cuda().half().requires_grad_() for _ in range(3))
    keys = torch.arange(200, device="cuda") < torch.tensor([[150], [200]], device="cuda")
    keys[1, 3:70] = False
    dout = torch.randn(q.shape, generator=rng).cuda().half()
    with sdpa.enable():
        torch.cuda.set_sync_debug_mode("error")
        try:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=keys[:, None, None])
            gradients = torch.autograd.grad(out, (q, k, v), dout)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    mask = flash_cute.Mask.padding(keys)
    expected, _ = flash_cute.reference.attention(q.detach(), k.detach(), v.detach(), mask=mask)
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=2e-3)
    report = sdpa.report()
    if report.served:
        assert_gradients_match(gradients, dout, q, k, v, mask=mask)
    assert sum(report.served.values()) + sum(report.passed_on.values()) == 1
    assert all("reads a mask" in reason for reason in report.passed_on)
