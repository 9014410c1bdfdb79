"""Calls of float8 tensors: what they refuse and how, fakes, torch.compile, the operators' own tests, `explain`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bad_calls import RAW_ERRORS
from cases import score
from fp8 import E4M3, E5M2, Call, make
from numerics import same_bits
from packed import offsets
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import flash_cute

OPERATORS = ("fp8_fwd", "_fp8_fwd", "fp8_fwd_plan", "check_fp8_fwd")
SHAPES = {"len_q": 150, "len_k": 300, "heads_q": 4, "heads_kv": 2, "batch": 2}


def good(rng: torch.Generator, **options: Any) -> Call:
    """q (2, 4, 150, 64), k and v (2, 2, 300, 64)."""
    return make(rng, "cpu", **SHAPES, **options)


def arguments(call: Call, backend: str = "auto", out_dtype: str = "bfloat16") -> list[Any]:
    """Those of the operators."""
    names = ("descale_q", "descale_k", "descale_v", "descale_out")
    given = [call.descales.get(x) for x in names]
    return [*call.tensors, *given, out_dtype, True, *score(call.causal, sinks=call.sinks), backend]


# Name: the changes of a call's fields and descales, and the sentence.
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "k_dtype": ({"k": torch.zeros(2, 2, 300, 64)}, "k: expected float8_e4m3fn or float8_e5m2, got float32"),
    "v_dtype": (
        {"v": torch.zeros(2, 2, 300, 64, dtype=torch.bfloat16)},
        "v: expected float8_e4m3fn or float8_e5m2, got bfloat16",
    ),
    "k_length": ({"v": torch.zeros(2, 2, 299, 64).to(E4M3)}, "v: expected k's length 300, got 299"),
    "descale_dtype": ({"descale_q": torch.ones((), dtype=torch.float64)}, "descale_q: expected float32, got float64"),
    "descale_float8": ({"descale_v": torch.ones(1).to(E4M3)}, "descale_v: expected float32, got float8_e4m3fn"),
    "q_heads": (
        {"descale_q": torch.ones(2, 4)},
        "descale_q: expected one number or the shape (2, 2) or (2, 4, 2), got (2, 4)",
    ),
    "q_blocks": (
        {"descale_q": torch.ones(2, 4, 150)},
        "descale_q: expected one number or the shape (2, 2) or (2, 4, 2), got (2, 4, 150)",
    ),
    "q_block_heads": (
        {"descale_q": torch.ones(2, 2, 2)},
        "descale_q: expected one number or the shape (2, 2) or (2, 4, 2), got (2, 2, 2)",
    ),
    "k_batch": (
        {"descale_k": torch.ones(1, 2)},
        "descale_k: expected one number or the shape (2, 2) or (2, 2, 3), got (1, 2)",
    ),
    "k_blocks": (
        {"descale_k": torch.ones(2, 2, 2)},
        "descale_k: expected one number or the shape (2, 2) or (2, 2, 3), got (2, 2, 2)",
    ),
    "k_empty": (
        {"descale_k": torch.ones(0)},
        "descale_k: expected one number or the shape (2, 2) or (2, 2, 3), got (0,)",
    ),
    "v_channels": (
        {"descale_v": torch.ones(2, 2, 1)},
        "descale_v: expected one number or the shape (2, 2) or (2, 2, 64), got (2, 2, 1)",
    ),
    "v_vector": (
        {"descale_v": torch.ones(64)},
        "descale_v: expected one number or the shape (2, 2) or (2, 2, 64), got (64,)",
    ),
    "out_16_bits": (
        {"descale_out": torch.ones(())},
        "descale_out: expected None for an out of bfloat16, which is not float8, got a tensor",
    ),
    "sinks": (
        {"sinks": torch.zeros(4, dtype=torch.bfloat16)},
        "sinks: expected float32 for float8 tensors, got bfloat16",
    ),
}


def bad(name: str, rng: torch.Generator) -> tuple[Call, str]:
    changes, sentence = BAD[name]
    call = good(rng)
    for field, x in changes.items():
        if field.startswith("descale"):
            call.descales[field] = x
        else:
            setattr(call, field, x)
    return call, f"flash_cute: {sentence}"


def _said(function: Callable[[], Any], errors: Any = ValueError) -> str:
    with pytest.raises(errors) as caught:
        function()
    return str(caught.value).splitlines()[0]


@pytest.mark.parametrize("name", BAD)
def test_refused(name: str, rng: torch.Generator) -> None:
    """By the public functions, the operators and their fakes, in the same words."""
    call, sentence = bad(name, rng)
    tensors = call.tensors
    assert _said(call.run) == sentence
    assert _said(lambda: flash_cute.attention(*tensors, **call.options())) == sentence
    assert _said(lambda: flash_cute.explain(*tensors, **call.options())) == sentence
    for operator in OPERATORS:
        more = [0] if operator.endswith("plan") else []
        run = getattr(torch.ops.flash_cute, operator)
        assert _said(lambda run=run, more=more: run(*arguments(call), *more), RAW_ERRORS) == sentence
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) if torch.is_tensor(x) else x for x in arguments(call)]
        assert _said(lambda: torch.ops.flash_cute.fp8_fwd(*fakes), RAW_ERRORS) == sentence


def test_out_dtype(rng: torch.Generator) -> None:
    call = good(rng)
    for given in ("bfloat16", torch.int8, torch.float64, 3):
        said = _said(lambda given=given: flash_cute.attention(*call.tensors, out_dtype=given))
        assert said.startswith("flash_cute: out_dtype: expected None, torch.float16, bfloat16, float32, float8_e4m3fn")
    call.descales = {"descale_out": torch.ones(2, 2)}
    call.out_dtype = E4M3
    assert _said(call.run) == "flash_cute: descale_out: expected one number or the shape (2, 4), got (2, 2)"
    call.descales = {}
    said = _said(lambda: torch.ops.flash_cute.fp8_fwd(*arguments(call, out_dtype="float64")), RAW_ERRORS)
    assert said.startswith("flash_cute: out_dtype: expected float16, bfloat16, float32, float8_e4m3fn or float8_e5m2")


@pytest.mark.parametrize("name", ["descale_q", "descale_k", "descale_v", "descale_out", "out_dtype"])
def test_of_16_bits(name: str, rng: torch.Generator) -> None:
    """Other tensors take none of the arguments, in no public function; without them they are refused as ever."""
    x = torch.randn(5, 2, 16, generator=rng, dtype=torch.float16)
    value: Any = torch.float16 if name == "out_dtype" else torch.ones(())
    cu = offsets((5,))
    sentence = (
        f"flash_cute: {name}: expected None for a q of float16: it is of float8 tensors (float8_e4m3fn or float8_e5m2)"
    )
    for function in (flash_cute.attention, flash_cute.fwd, flash_cute.explain):
        assert _said(lambda f=function: f(x[None], x[None], x[None], **{name: value})) == sentence
    for function in (flash_cute.varlen_attention, flash_cute.varlen_fwd):
        assert _said(lambda f=function: f(x, x, x, cu, cu, **{name: value})) == sentence


@pytest.mark.parametrize("operator", ["fwd", "_fwd"])
def test_operators_of_16_bits(operator: str, rng: torch.Generator) -> None:
    call = good(rng)
    said = _said(lambda: getattr(torch.ops.flash_cute, operator)(*call.tensors, *score(), "auto"), RAW_ERRORS)
    assert said == "flash_cute: q: expected float16, bfloat16, float32 or float64, got float8_e4m3fn"


def test_descale_that_is_no_tensor(rng: torch.Generator) -> None:
    call = good(rng)
    for name in ("descale_q", "descale_k", "descale_v", "descale_out"):
        said = _said(lambda name=name: flash_cute.attention(*call.tensors, **{name: 0.5}))
        assert said == f"flash_cute: {name}: expected a torch.Tensor, got float"


@pytest.mark.parametrize("value", [0.0, -1.0, torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["descale_q", "descale_k", "descale_v", "descale_out"])
def test_factors_that_make_no_sense(name: str, value: float, rng: torch.Generator) -> None:
    """The CPU sees them."""
    call = good(rng, out_dtype=E4M3)
    factors = torch.ones(2, 4 if name == "descale_out" else 2)
    for given in (torch.tensor(value), factors.index_fill(1, torch.tensor(1), value)):
        call.descales = {name: given}
        assert _said(call.run) == f"flash_cute: {name}: expected finite numbers above 0, got {value:g}"


def test_unused_factors_of_packed_sequences_are_not_read(rng: torch.Generator) -> None:
    call = make(rng, "cpu", batch=1)
    q, k, v = (x[0].transpose(0, 1) for x in call.tensors)
    cu_q, cu_k = offsets((150, 0)), offsets((100, 200))
    factors = torch.ones(2, 4, 2)
    factors[1] = torch.nan
    out = flash_cute.varlen_attention(q, k, v, cu_q, cu_k, descale_q=factors)
    assert torch.equal(out, flash_cute.varlen_attention(q, k, v, cu_q, cu_k))
    factors[0, 0, 1] = 0
    said = _said(lambda: flash_cute.varlen_attention(q, k, v, cu_q, cu_k, descale_q=factors))
    assert said == "flash_cute: descale_q: expected finite numbers above 0, got 0"


@pytest.mark.parametrize(
    "options, sentence",
    [
        (
            {"descale_q": torch.ones(3, 4)},
            "descale_q: expected one number or the shape (2, 2) or (2, 4, blocks of 128 rows), got (3, 4)",
        ),
        (
            {"descale_k": torch.ones(2, 2, 0)},
            "descale_k: expected one number or the shape (2, 2) or (2, 2, blocks of 128 rows), got (2, 2, 0)",
        ),
        (
            {"descale_k": torch.ones(2, 2, 2), "max_seqlen_k": 300},
            "descale_k: expected at least 3 blocks of 128 rows for sequences of up to 300, got (2, 2, 2)",
        ),
        (
            {"descale_q": torch.ones(2, 4, 1), "max_seqlen_q": 129},
            "descale_q: expected at least 2 blocks of 128 rows for sequences of up to 129, got (2, 4, 1)",
        ),
    ],
    ids=str,
)
def test_packed_refused(options: dict[str, Any], sentence: str, rng: torch.Generator) -> None:
    call = make(rng, "cpu", batch=1)
    q, k, v = (x[0].transpose(0, 1) for x in call.tensors)
    lengths = (offsets((150, 0)), offsets((300, 0)))
    assert _said(lambda: flash_cute.varlen_fwd(q, k, v, *lengths, **options)) == f"flash_cute: {sentence}"
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, v, *lengths)]
        given = {x: mode.from_tensor(y) if torch.is_tensor(y) else y for x, y in options.items()}
        assert _said(lambda: flash_cute.varlen_fwd(*fakes, **given)) == f"flash_cute: {sentence}"


@pytest.mark.parametrize(
    "options, capability, sentence",
    [
        ({}, 80, "q: expected a GPU of compute capability 9.0 for float8 tensors, got 8.0"),
        ({}, 120, "q: expected a GPU of compute capability 9.0 for float8 tensors, got 12.0"),
        ({"backend": "sm80"}, 90, "backend: expected 'auto' or 'sm90' for float8 tensors, got 'sm80'"),
        ({"head_dim": 320}, 90, "q: expected a head dim of at most 256 for float8 tensors on CUDA, got 320"),
        ({"head_dim_v": 264}, 90, "v: expected a head dim of at most 256 for float8 tensors on CUDA, got 264"),
        (
            {"accumulate": "float16_pv"},
            90,
            "accumulate: expected 'float32' for float8_e4m3fn tensors, got 'float16_pv', which float16 ones take",
        ),
    ],
    ids=str,
)
def test_gpus_refuse(options: dict[str, Any], capability: int, sentence: str, rng: torch.Generator) -> None:
    sizes = {x: options.pop(x) for x in ("head_dim", "head_dim_v") if x in options}
    call = good(rng, **sizes)
    said = _said(lambda: flash_cute.explain(*call.tensors, capability=capability, **options))
    assert said == f"flash_cute: {sentence}"


def test_no_gradient(rng: torch.Generator) -> None:
    """Asking for one raises, in the public functions and in the operator; under no_grad nothing does."""
    call = good(rng, sinks=True, kinds=("number", "none", "none", "none"))
    call.sinks = call.sinks.requires_grad_() if call.sinks is not None else None
    with pytest.raises(NotImplementedError, match="has no backward, and sinks requires grad"):
        call.run()
    with pytest.raises(NotImplementedError, match="has no backward"):
        torch.ops.flash_cute.fp8_fwd(*arguments(call))
    with torch.no_grad():
        call.run()
    call.sinks = None
    call.q = call.q.requires_grad_()
    with pytest.raises(NotImplementedError, match="has no backward, and q requires grad"):
        call.run()
    with pytest.raises(NotImplementedError, match="has no backward, and q requires grad"):
        torch.func.grad(lambda q: flash_cute.attention(q, *call.tensors[1:]).sum())(call.q.detach())
    call.q = call.q.detach()
    call.descales["descale_q"] = torch.ones((), requires_grad=True)
    with pytest.raises(NotImplementedError, match="has no backward, and descale_q requires grad"):
        call.run()
    with pytest.raises(NotImplementedError, match="has no backward"):
        flash_cute.explain(*call.tensors, backward=True)


def test_vmap(rng: torch.Generator) -> None:
    call = good(rng)
    many = torch.stack([call.q, call.q])
    with pytest.raises(NotImplementedError, match="do not work under vmap"):
        torch.vmap(lambda q: flash_cute.attention(q, call.k, call.v))(many)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool, rng: torch.Generator) -> None:
    def function(*given: Any) -> Any:
        q, k, v, of_q, of_v, of_out = given
        descales = {"descale_q": of_q, "descale_v": of_v, "descale_out": of_out}
        return flash_cute.fwd(q, k, v, True, out_dtype=E4M3, **descales)

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in (150, 300):
        call = make(rng, "cpu", len_q=length, len_k=length, kinds=("fine", "none", "fine", "head"), out_dtype=E4M3)
        given = [*call.tensors, *(call.descales[x] for x in ("descale_q", "descale_v", "descale_out"))]
        assert same_bits(compiled(*given), function(*given))


def test_compiled_packed(rng: torch.Generator) -> None:
    call = make(rng, "cpu", batch=1)
    given = [
        *(x[0].transpose(0, 1) for x in call.tensors),
        offsets((100, 50)),
        offsets((120, 180)),
        torch.ones(2, 2, 2),
    ]

    def function(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, of_k: Any) -> Any:
        return flash_cute.varlen_fwd(q, k, v, cu_q, cu_k, descale_k=of_k, out_dtype=torch.float16)

    assert same_bits(torch.compile(function, fullgraph=True, backend="aot_eager")(*given), function(*given))


@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(packed: bool, rng: torch.Generator) -> None:
    """All of its tests but that of the schema, which multiplies its inputs: PyTorch does not multiply float8."""
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    call = make(rng, "cpu", len_q=20, len_k=30, head_dim_v=32, batch=2, kinds=("head", "number", "fine", "none"))
    given = arguments(call)
    if packed:
        tensors = [x.transpose(1, 2).flatten(0, 1) for x in call.tensors]
        lengths = (offsets((20, 20)), offsets((30, 30)), None, None, None, None)
        given = [*tensors, *given[3:9], *lengths, *given[9:]]
    for name in ("fp8_varlen_fwd", "_fp8_varlen_fwd") if packed else ("fp8_fwd", "_fp8_fwd"):
        torch.library.opcheck(getattr(torch.ops.flash_cute, name).default, tuple(given), test_utils=tests)


def test_fake_of_a_gpu() -> None:
    with FakeTensorMode():
        q, k = (torch.empty(2, 4, 10, 64, device="cuda", dtype=x) for x in (E4M3, E5M2))
        out, lse = flash_cute.fwd(q, k, k, descale_q=torch.empty((), device="cuda"), out_dtype=torch.float16)
        assert (out.dtype, out.device.type, lse.dtype) == (torch.float16, "cuda", torch.float32)
        said = _said(lambda: flash_cute.fwd(q, k, k, descale_q=torch.empty(())))
        assert said == "flash_cute: descale_q: expected q's device cuda:0, got cpu"
        wide = torch.empty(2, 4, 10, 320, device="cuda", dtype=E4M3)
        said = _said(lambda: flash_cute.fwd(wide, wide, wide))
        assert said == "flash_cute: q: expected a head dim of at most 256 for float8 tensors on CUDA, got 320"


def test_flops(rng: torch.Generator) -> None:
    call = good(rng)
    with FlopCounterMode(display=False) as dense:
        call.run()
    assert dense.get_total_flops() == 2 * 2 * 4 * 150 * 300 * (64 + 64)
    q, k, v = (x[0].transpose(0, 1) for x in call.tensors)
    with FlopCounterMode(display=False) as packed:
        flash_cute.varlen_attention(q, k, v, offsets((100, 50)), offsets((0, 300)))
    assert packed.get_total_flops() == 2 * 4 * (100 * 0 + 50 * 300) * (64 + 64)


def test_explain(rng: torch.Generator) -> None:
    call = good(rng, dtypes=(E4M3, E5M2, E4M3))
    explanation = flash_cute.explain(*call.tensors, out_dtype=torch.float16)
    data = explanation.data
    assert [data[x] for x in ("backend", "dtype", "dtype_k", "dtype_v", "out_dtype")] == [
        *("cpu", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fn", "float16")
    ]
    assert "k float8_e5m2, v float8_e4m3fn, out float16" in str(explanation)
    json.dumps(explanation.to_dict())


def test_symbolic_trace(rng: torch.Generator) -> None:
    call = good(rng)
    traced = torch.fx.symbolic_trace(lambda q, k, v, s: flash_cute.attention(q, k, v, True, descale_q=s))
    factor = torch.tensor(0.5)
    expected = flash_cute.attention(*call.tensors, True, descale_q=factor)
    assert torch.equal(traced(*call.tensors, factor), expected)


def test_dtensor_is_refused(python: Callable[..., str]) -> None:
    script = """
import os
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29537", "RANK": "0", "WORLD_SIZE": "1"}
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
import flash_cute
mesh = init_device_mesh("cpu", (1,))
x = DTensor.from_local(torch.ones(1, 2, 8, 16).to(torch.float8_e4m3fn), mesh, [Replicate()])
try:
    flash_cute.attention(x, x, x)
except Exception as error:
    print(error)
torch.distributed.destroy_process_group()
"""
    assert "flash_cute's attention of float8 tensors takes no DTensor" in python(script)
