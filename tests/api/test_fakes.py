"""What a call refuses, its fakes refuse in the same words: meta and fake tensors, torch.export, torch.compile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from bad_calls import (
    BAD,
    BAD_BACKWARD,
    OPERATORS,
    RAW_ERRORS,
    Call,
    applied,
    good_backward_call,
    good_call,
    operator_call,
)
from cases import Case
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_cute
from flash_cute._call_options import CallOptions, Lengths, MaskTensors


def _said(operator: str, call: Call) -> str:
    with pytest.raises(RAW_ERRORS) as caught:
        operator_call(operator, call)
    return str(caught.value).splitlines()[0]


def _said_backward(operator: str, call: Call) -> str:
    with pytest.raises(RAW_ERRORS) as caught:
        getattr(torch.ops.flash_cute, operator)(*call.values())
    return str(caught.value).splitlines()[0]


def _moved(call: Call, device: str) -> Call:
    """The same call with tensors of the device, whose strides are kept."""
    return {
        name: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device) if torch.is_tensor(x) else x
        for name, x in call.items()
    }


@pytest.mark.parametrize("operator", [x for x in OPERATORS if "plan" not in x])
@pytest.mark.parametrize("name", BAD)
def test_meta_and_fake(name: str, operator: str) -> None:
    real = applied(good_call("cpu"), BAD[name][0])
    expected = _said(operator, real)
    assert _said(operator, _moved(real, "meta")) == expected
    with FakeTensorMode():
        assert _said(operator, _moved(real, "cpu")) == expected


@pytest.mark.parametrize("operator", ["bwd", "_bwd"])
@pytest.mark.parametrize("name", BAD_BACKWARD)
def test_meta_and_fake_backward(name: str, operator: str) -> None:
    real = applied(good_backward_call("cpu"), BAD_BACKWARD[name][0])
    expected = _said_backward(operator, real)
    assert _said_backward(operator, _moved(real, "meta")) == expected
    with FakeTensorMode():
        assert _said_backward(operator, _moved(real, "cpu")) == expected


# Where there is a GPU, torch makes a real tensor on the device of each fake one; with one GPU, cuda:1 is an error.
names_a_second_gpu = pytest.mark.skipif(
    torch.cuda.device_count() == 1, reason="there is one GPU, and torch makes a real tensor on cuda:1"
)


@pytest.mark.parametrize("operator", ["fwd", "_fwd", "bwd", "_bwd"])
@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"k": "cpu"}, "k: expected q's device cuda:0, got cpu"),
        pytest.param({"v": "cuda:1"}, "v: expected q's device cuda:0, got cuda:1", marks=names_a_second_gpu),
        ({"v": "meta"}, "v: expected q's device cuda:0, got meta"),
        ({"sinks": "cpu"}, "sinks: expected q's device cuda:0, got cpu"),
        pytest.param(
            {"alibi_slopes": "cuda:1"},
            "alibi_slopes: expected q's device cuda:0, got cuda:1",
            marks=names_a_second_gpu,
        ),
        ({"softcap": 3e38}, "softcap: expected None or a number from 1e-18 to 1e7 on CUDA, got 3e+38"),
        (torch.float32, "q: expected float16 or bfloat16 on CUDA, got float32"),
        (1032, "q: expected a head dim of at most 1024 on CUDA, got 1032"),
        ({"backend": "cpu"}, "backend: expected 'auto', 'sm80' or 'sm90' for CUDA tensors, got 'cpu'"),
        ({"scale": 3e38}, "scale: expected a number from 1e-18 to 1e18 on CUDA, got 3e+38"),
    ],
    ids=str,
)
def test_fake_of_a_gpu_holds_cudas_rules(operator: str, changes: Any, sentence: str) -> None:
    with FakeTensorMode():
        call = good_backward_call("cuda") if "bwd" in operator else good_call("cuda")
        if isinstance(changes, torch.dtype):
            tensors = {x: call[x].to(changes) for x in ("dout", "q", "k", "v", "out") if x in call}
        elif isinstance(changes, int):
            tensors = {
                x: call[x].new_empty(*call[x].shape[:3], changes) for x in ("dout", "q", "k", "v", "out") if x in call
            }
        else:
            call |= {x: torch.zeros(4, device="cuda") for x in ("sinks", "alibi_slopes")}
            tensors = {x: call[x].to(y) if torch.is_tensor(call[x]) else y for x, y in changes.items()}
        with pytest.raises(RAW_ERRORS) as caught:
            getattr(torch.ops.flash_cute, operator)(*{**call, **tensors}.values())
    assert str(caught.value).splitlines()[0] == f"flash_cute: {sentence}"


class _Attention(torch.nn.Module):
    def __init__(self, causal: Any, scale: float | None) -> None:
        super().__init__()
        self.causal, self.scale = causal, scale

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = flash_cute.attention(q, k, v, self.causal, scale=self.scale)
        return out


# Causal, scale, shape of k and v, and what is said.
REFUSED: tuple[tuple[Any, float | None, tuple[int, ...], str], ...] = (
    ("foo", None, (2, 2, 9, 16), "causal: expected False or 'none', True or 'bottom_right', or 'top_left', got 'foo'"),
    (True, -1.0, (2, 2, 9, 16), "scale: expected a finite number above 0, got -1"),
    (True, None, (2, 2, 9, 8), "k: expected q's head dim 16, got 8"),
    (True, None, (2, 3, 9, 16), "q: expected a number of heads that is a multiple of k's 3, got 4"),
)


@contextlib.contextmanager
def _says(sentence: str) -> Iterator[None]:
    with pytest.raises(Exception) as caught:  # ValueError, or what Dynamo makes of it
        yield
    # Dynamo of torch 2.15 quotes the error that it met, as repr does.
    assert f"flash_cute: {sentence}" in str(caught.value).replace("\\", "")


@pytest.mark.parametrize("way", ["export", "strict_export", "compile"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    "causal, scale, shape, sentence", REFUSED, ids=[x[3].split(":")[0] + str(x[2]) for x in REFUSED]
)
def test_graphs(
    causal: Any, scale: float | None, shape: tuple[int, ...], sentence: str, way: str, dynamic: bool
) -> None:
    torch._dynamo.reset()
    q, k, v = torch.randn(2, 4, 7, 16), torch.randn(shape), torch.randn(shape)
    module = _Attention(causal, scale)
    with _says(sentence):
        if way == "compile":
            torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=dynamic)(q, k, v)
        else:
            keys = torch.export.Dim("keys")
            sizes = {"q": {2: torch.export.Dim("rows")}, "k": {2: keys}, "v": {2: keys}} if dynamic else None
            torch.export.export(module, (q, k, v), dynamic_shapes=sizes, strict=way == "strict_export")


@pytest.mark.parametrize("strict", [False, True])
def test_export_serves_other_lengths(strict: bool, rng: torch.Generator) -> None:
    """The checks at tracing time hold no length fast; the exported program checks its own call."""
    module = _Attention(True, None)
    inputs = Case(16, 7, 9, heads_q=4, dtype=torch.float32).inputs("cpu", rng)
    keys = torch.export.Dim("keys")
    sizes = {"q": {2: torch.export.Dim("rows")}, "k": {2: keys}, "v": {2: keys}}
    program = torch.export.export(module, inputs, dynamic_shapes=sizes, strict=strict).module()
    for len_q, len_k in ((7, 9), (30, 11), (12, 64)):
        q, k, v = Case(16, len_q, len_k, heads_q=4, dtype=torch.float32).inputs("cpu", rng)
        assert torch.equal(program(q, k, v), module(q, k, v))


def test_a_size_that_depends_on_data(rng: torch.Generator) -> None:
    """It has no hint: what it is compared with is left to the call, all else is checked."""

    def attend(q: torch.Tensor, k: torch.Tensor, rows: torch.Tensor, causal: Any) -> torch.Tensor:
        out: torch.Tensor = flash_cute.attention(q[:, :, rows.nonzero().squeeze(-1)], k, k, causal)
        return out

    torch._dynamo.reset()
    q, k, _ = Case(16, 8, 9, dtype=torch.float32).inputs("cpu", rng)
    rows = torch.tensor([1, 0, 1, 1, 0, 0, 1, 0])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(q, k, rows, True), attend(q, k, rows, True))
        with _says("causal: expected"):
            compiled(q, k, rows, "foo")
        with _says("k: expected q's head dim 16, got 8"):
            compiled(q, k[..., :8], rows, True)


def test_sizes_that_depend_on_data_beside_sinks_and_slopes(rng: torch.Generator) -> None:
    """Heads and batches that nobody knows yet are not compared with the sinks' and the slopes'."""

    def attend(q: torch.Tensor, k: torch.Tensor, chosen: torch.Tensor, dim: int, **options: Any) -> torch.Tensor:
        rows = chosen.nonzero().squeeze(-1)
        out: torch.Tensor = flash_cute.attention(q.index_select(dim, rows), k.index_select(dim, rows), k, **options)
        return out

    torch._dynamo.reset()
    q, k, _ = Case(16, 8, 9, dtype=torch.float32, batch=4, heads_q=4, heads_kv=4).inputs("cpu", rng)
    chosen = torch.tensor([1, 1, 1, 1])
    options = {"sinks": torch.zeros(4), "alibi_slopes": torch.rand(4, 4)}
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
        for dim in (0, 1):
            assert torch.equal(compiled(q, k, chosen, dim, **options), attend(q, k, chosen, dim, **options))
        with _says("sinks: expected float32 or q's dtype float32, got float16"):
            compiled(q, k, chosen, 0, sinks=torch.zeros(4).half())


@pytest.mark.parametrize(
    "name",
    [
        *("fwd", "_fwd", "check_fwd", "bwd", "_bwd", "check_bwd", "varlen_fwd", "varlen_bwd", "check_varlen_bwd"),
        *("masked_fwd", "check_masked_bwd", "masked_bwd_plan", "masked_varlen_fwd", "check_masked_varlen_bwd"),
    ],
)
def test_one_order(name: str) -> None:
    """The records of a call's arguments have the order of the operators' schemas."""
    schema = [x.name for x in getattr(torch.ops.flash_cute, name).default._schema.arguments]
    of_bwd = "bwd" in name and not name.endswith("plan")
    tensors = ["dout", "q", "k", "v", "out", "lse", "dlse"] if of_bwd else ["q", "k", "v"]
    masks = [f"mask_{x}" for x in MaskTensors._fields] if "masked" in name else ()
    lengths = Lengths._fields if "varlen" in name else ()
    expected = [*tensors, *masks, *lengths, *CallOptions._fields]
    assert schema[: len(expected)] == expected
