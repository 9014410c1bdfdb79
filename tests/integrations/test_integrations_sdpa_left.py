"""What `enable()` leaves to PyTorch (GPUs that have faster kernels there, the fast path), and what it refuses."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from numerics import same_bits
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import flash_cute
from flash_cute import _left, report
from flash_cute.integrations import _sdpa_kernel, sdpa

pytestmark = pytest.mark.usefixtures("sdpa_counters")

HAS_ORDER = hasattr(torch._C, "_set_sdp_priority_order")


Q = (2, 4, 9, 8)
# Shapes of query, key and value, options, and how our sentence begins. PyTorch's flash kernel for the CPU answers the
# first two, from beyond the end of key or of value, and the process dies of the next two.
MALFORMED: dict[str, tuple[tuple[tuple[int, ...], ...], dict[str, Any], str]] = {
    "value is longer": ((Q, (2, 4, 5, 8), (2, 4, 9, 8)), {}, "value: expected key's 5 rows"),
    "value is shorter": ((Q, (2, 4, 9, 8), (2, 4, 5, 8)), {"is_causal": True}, "value: expected key's 9 rows"),
    "value is empty": ((Q, (2, 4, 9, 8), (2, 4, 0, 8)), {}, "value: expected key's 9 rows"),
    "gqa of none": ((Q, (2, 0, 9, 8), (2, 0, 9, 8)), {"enable_gqa": True}, "enable_gqa: expected numbers of key"),
    "value is longer, masked": ((Q, (2, 4, 5, 8), Q), {"attn_mask": torch.ones(9, 1)}, "value: expected key's 5"),
    "three dims": (((4, 9, 8), (4, 5, 8), (4, 9, 8)), {}, "value: expected key's 5 rows"),
    "head dims": ((Q, (2, 4, 9, 7), Q), {}, "key: expected query's head dim 8"),
    "heads": ((Q, (2, 3, 9, 8), (2, 3, 9, 8)), {}, "query, key, value: expected heads and batches"),
    "value's heads": ((Q, Q, (2, 2, 9, 8)), {}, "query, key, value: expected heads and batches"),
    "gqa heads": ((Q, (2, 3, 9, 8), (2, 3, 9, 8)), {"enable_gqa": True}, "enable_gqa: expected numbers of key"),
    "gqa, more": ((Q, (2, 8, 9, 8), (2, 8, 9, 8)), {"enable_gqa": True}, "enable_gqa: expected numbers of key"),
    "batches": ((Q, (3, 4, 9, 8), (3, 4, 9, 8)), {}, "query, key, value: expected heads and batches"),
    "dims": (((8,), (9, 8), (9, 8)), {}, "query: expected at least 2 dims"),
    "mask's keys": ((Q, Q, Q), {"attn_mask": torch.ones(9, 8)}, "attn_mask: expected a shape"),
    "mask's heads": ((Q, Q, Q), {"attn_mask": torch.ones(3, 9, 9).bool()}, "attn_mask: expected a shape"),
    "dropout": ((Q, Q, Q), {"dropout_p": -0.5}, "dropout_p: expected a probability"),
}
THROUGH: dict[str, Callable[[], Any]] = {
    "enable": lambda: sdpa.enable(devices="cpu"),
    "backend off": lambda: sdpa_kernel(SDPBackend.MATH),
    "dispatch mode": lambda: FlopCounterMode(display=False),
}


@pytest.mark.parametrize("through", ["function", "torch.func", *THROUGH])
@pytest.mark.parametrize("name", MALFORMED)
def test_what_no_implementation_can_serve(name: str, through: str, rng: torch.Generator) -> None:
    """A ValueError of ours, and a RuntimeError as PyTorch's is, counted neither as served nor as passed on."""
    shapes, options, sentence = MALFORMED[name]
    q, k, v = (torch.randn(shape, generator=rng) for shape in shapes)
    with ExitStack() as stack:
        raised = stack.enter_context(pytest.raises(ValueError, match=f"^flash_cute: {sentence}"))
        if through == "function":
            sdpa.sdpa(q, k, v, **options)
        stack.enter_context(THROUGH["enable"]())
        if through == "torch.func":
            torch.func.grad(lambda query: F.scaled_dot_product_attention(query, k, v, **options).sum())(q)
        stack.enter_context(THROUGH[through]())
        F.scaled_dot_product_attention(q, k, v, **options)
    assert isinstance(raised.value, RuntimeError)
    assert sdpa.report().served == sdpa.report().passed_on == {}


@pytest.mark.parametrize("name", ["value is longer", "gqa heads", "mask's keys"])
def test_in_a_graph_too(name: str, rng: torch.Generator) -> None:
    shapes, options, sentence = MALFORMED[name]
    tensors = [torch.randn(shape, generator=rng) for shape in shapes]
    torch.compiler.reset()
    with pytest.raises(ValueError, match=f"^flash_cute: {sentence}"):
        torch.compile(sdpa.sdpa, backend="eager")(*tensors, **options)


def _jagged(lengths: list[int], rng: torch.Generator) -> torch.Tensor:
    """(B, 2, N, 8), the sequences N long."""
    parts = [torch.randn(length, 2, 8, generator=rng) for length in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)


@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.parametrize("compiled", [False, True])
def test_jagged_value_of_other_sequences(compiled: bool, rng: torch.Generator) -> None:
    """As many rows in all, so that a kernel that is given key's offsets alone would read the wrong ones."""
    torch.compiler.reset()
    function = torch.compile(sdpa.sdpa, backend="eager") if compiled else sdpa.sdpa
    query, key, other = (_jagged(lengths, rng) for lengths in ([2, 7], [3, 5], [4, 4]))
    for k, v in ((key, other), (other, key), (key, _jagged([3, 5], rng))):
        with pytest.raises(ValueError, match=r"^flash_cute: value: expected key's sequences, .*j\d.*, got .*j\d"):
            function(query, k, v)
    assert sdpa.report().passed_on == {}
    rows = other.transpose(1, 2).values()
    value = torch.nested.nested_tensor_from_jagged(rows, key.transpose(1, 2).offsets()).transpose(1, 2)
    out = function(query, key, value).transpose(1, 2).unbind()
    parts = (x.transpose(1, 2).unbind() for x in (query, key, value))
    for given, *alone in zip(out, *parts, strict=True):
        expected, _ = flash_cute.reference.attention(*(x.transpose(0, 1)[None] for x in alone))
        torch.testing.assert_close(given.transpose(0, 1)[None].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_strided_nested_value_of_other_sequences(rng: torch.Generator) -> None:
    lengths = ([2, 7], [3, 5], [4, 4], [3, 5])
    parts = [[torch.randn(2, length, 8, generator=rng) for length in x] for x in lengths]
    query, key, other, value = (torch.nested.nested_tensor(x, layout=torch.strided) for x in parts)
    with pytest.raises(
        ValueError, match=r"^flash_cute: value: expected key's numbers of rows, \[3, 5\], got \[4, 4\]$"
    ):
        sdpa.sdpa(query, key, other)
    out = sdpa.sdpa(query, key, value).unbind()
    for given, *alone in zip(out, query.unbind(), key.unbind(), value.unbind(), strict=True):
        expected, _ = flash_cute.reference.attention(*(x[None] for x in alone))
        torch.testing.assert_close(given[None].double(), expected, atol=1e-5, rtol=1e-5)


def test_random_shapes(seed: int, rng: torch.Generator) -> None:
    """What PyTorch's math serves is served, with the same values, and nothing else is."""
    draw = random.Random(seed)
    outcomes = {"served": 0, "refused": 0}
    for _ in range(400):
        base = [draw.choice((1, 2, 3)) for _ in range(draw.choice((0, 1, 2, 2, 3)))]
        rows, keys, head_dim = (draw.choice((1, 3, 4)) for _ in range(3))
        shapes = []
        for length in (rows, keys, keys):
            leading = [n if draw.random() < 0.9 else draw.choice((1, n + 1, 2 * n)) for n in base]
            leading = leading[draw.random() < 0.1 :]
            shapes.append((*leading, length if draw.random() < 0.95 else length + 1, head_dim))
        mask = None
        if draw.random() < 0.3:
            sizes = [draw.choice((1, n)) for n in (*base, rows, keys)]
            mask = torch.randn(sizes if draw.random() < 0.9 else [n + 1 for n in sizes], generator=rng)
            mask = mask > -0.5 if draw.random() < 0.5 else mask
        is_causal = mask is None and draw.random() < 0.3
        options = {"attn_mask": mask, "enable_gqa": draw.random() < 0.3, "is_causal": is_causal}
        tensors = [torch.randn(shape, generator=rng) for shape in shapes]
        expected, given = (_outcome(function, tensors, options) for function in (_math, sdpa.sdpa))
        said = f"shapes {shapes}, mask {None if mask is None else tuple(mask.shape)}, {options}"
        if isinstance(expected, Exception):
            assert isinstance(given, Exception), said
            outcomes["refused"] += 1
        else:
            assert not isinstance(given, Exception), f"{said}: {given}"
            torch.testing.assert_close(given, expected, atol=1e-5, rtol=1e-5, msg=said)
            outcomes["served"] += 1
    assert min(outcomes.values()) > 40, outcomes


def _math(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*tensors, **options)


def _outcome(function: Callable[..., torch.Tensor], tensors: list[torch.Tensor], options: Any) -> Any:
    try:
        return function(*tensors, **options)
    except (RuntimeError, ValueError, IndexError) as error:
        return error


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with an H100, a B200, a B300 and a GeForce of the same generation."""
    capabilities = [(9, 0), (10, 0), (10, 3), (12, 0)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)


def test_which_gpus_are_left_to_pytorch(gpus: None) -> None:
    assert _left.devices() == {1, 2}


def test_a_gpu_that_is_left_to_pytorch(rng: torch.Generator) -> None:
    """PyTorch's bits, counted with the reason; PyTorch may choose its backend first. In strict mode the call raises."""
    x = torch.randn(1, 2, 9, 8, generator=rng)
    expected = F.scaled_dot_product_attention(x, x, x)
    asked: list[int] = []
    for strict in (False, True):
        # The CPU's index for a GPU's.
        kernel = _sdpa_kernel.make_kernel(strict, lambda: asked.append(1), lambda: frozenset({None}))
        if strict:
            with pytest.raises(ValueError, match=r"^flash_cute: device: expected a GPU whose compute capability is"):
                kernel(x, x, x)
        else:
            assert same_bits((kernel(x, x, x),), (expected,)) and asked == [1]
        assert sdpa.report(reset=True).data == {"enabled": False, "served": {}, "passed_on": {_left.REASON: 1}}
    kernel = _sdpa_kernel.make_kernel(True, lambda: None, lambda: frozenset({1}))  # another GPU is
    torch.testing.assert_close(kernel(x, x, x), expected)
    assert sdpa.report().served == {"scaled_dot_product_attention": 1}


@pytest.mark.skipif(not HAS_ORDER, reason="this PyTorch has no order of backends")
@pytest.mark.parametrize("in_use", ["before", "between", "at the first call"])
def test_its_order_of_backends_is_pytorchs(in_use: str, gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """From `enable()` on where CUDA was in use before, else from the first call on that may choose a backend."""
    order = torch._C._get_sdp_priority_order()
    flash = int(SDPBackend.FLASH_ATTENTION)
    flash_last = [*(backend for backend in order if backend != flash), flash]
    new = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, device, **options: new(*sizes, **options))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use == "before")
    monkeypatch.setattr(sdpa, "_chosen_once", False)
    torch._C._set_sdp_priority_order(flash_last)
    try:
        with sdpa.enable():
            assert (torch._C._get_sdp_priority_order() == flash_last) == (in_use == "before")
            monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use != "at the first call")
            sdpa._active.keep_flash_first()
            assert torch._C._get_sdp_priority_order() == flash_last
        assert torch._C._get_sdp_priority_order() == flash_last
    finally:
        torch._C._set_sdp_priority_order(order)


@pytest.mark.skipif(not report.load()["kernels"], reason="this build has no CUDA kernels")
@pytest.mark.parametrize("capability", [90, 100, 103, 120])
def test_explain_says_so(capability: int) -> None:
    x = torch.empty(1, 2, 64, 64, dtype=torch.float16, device="meta")
    for backward in (False, True):
        reasons = flash_cute.explain(x, x, x, capability=capability, backward=backward).data["reasons"]
        assert (_left.EXPLANATION in reasons) == (capability in (100, 103))


@pytest.mark.parametrize("module", ["MultiheadAttention", "TransformerEncoderLayer"])
def test_the_fast_path_is_counted(module: str, rng: torch.Generator) -> None:
    """In inference on the CPU both modules have a kernel of their own, unless it is turned off."""
    made = getattr(torch.nn, module)(16, 2, batch_first=True).eval()
    x = torch.randn(2, 5, 16, generator=rng)
    arguments = (x,) if module == "TransformerEncoderLayer" else (x, x, x, None, False)

    def call() -> torch.Tensor:
        with torch.inference_mode():
            out = made(*arguments)
        return out if isinstance(out, torch.Tensor) else out[0]

    expected = call()
    with sdpa.enable(devices="cpu"):
        given = call()
        counted = sdpa.report(reset=True)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            slow = call()
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert same_bits((given,), (expected,)) and counted.served == {}
    assert list(counted.passed_on.values()) == [1] and next(iter(counted.passed_on)).startswith("fast path: expected")
    assert sdpa.report(reset=True).served == {"scaled_dot_product_attention": 1}
    torch.testing.assert_close(slow, expected)
    with sdpa.enable(devices="cpu", strict=True), pytest.raises(ValueError, match=r"^flash_cute: fast path: expected"):
        call()
    sdpa.report(reset=True)
    assert same_bits((call(),), (expected,)) and sdpa.report().passed_on == {}


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("masked", [False, True])
def test_the_fast_path_on_cuda(masked: bool, device: str, rng: torch.Generator) -> None:
    """Without a mask it calls scaled_dot_product_attention."""
    layer = torch.nn.TransformerEncoderLayer(64, 2, batch_first=True, device=device, dtype=torch.float16).eval()
    x = torch.randn(2, 32, 64, generator=rng).to(device, torch.float16)
    mask = torch.arange(32, device=device)[None].expand(2, 32) >= 20 if masked else None
    with torch.inference_mode():
        expected = layer(x, src_key_padding_mask=mask)
        with sdpa.enable():
            given = layer(x, src_key_padding_mask=mask)
    torch.testing.assert_close(given, expected, atol=2e-2, rtol=2e-2)
    counted = sdpa.report()
    assert (sum(counted.served.values()), sum(counted.passed_on.values())) == ((0, 1) if masked else (1, 0))
