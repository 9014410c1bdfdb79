"""Calls over caches under torch.compile, autograd, vmap and the rest of PyTorch; what opcheck says of the operators."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from caches import FLOAT8, Cached, cloned, make
from numerics import same_bits
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import flash_cute

Step = Callable[..., Any]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    with warnings.catch_warnings():  # what the first call imports warns, and a test here makes warnings errors
        warnings.simplefilter("ignore")
        torch._dynamo.reset()


def _operands(case: Cached, new_keys: int, causal: str = "bottom_right") -> tuple[Any, ...]:
    """The arguments of the operators."""
    places = (case.cache_seqlens, case.page_table, case.cu_seqlens_q, new_keys, case.kv_layout)
    score = (causal, 9, None, 5.0, None, None, None)
    return (case.q, case.k_cache, case.v_cache, *places, *score, case.descale_k, case.descale_v, None, "auto")


def _step(q: torch.Tensor, both: torch.Tensor, new: Any, lengths: torch.Tensor, table: torch.Tensor) -> Any:
    """A layer's: caches that are halves of one row, an append, an out that is given."""
    k_cache, v_cache = both.chunk(2, -1)
    out = torch.empty_like(q)
    options = {"cache_seqlens": lengths, "page_table": table, "out": out, "return_lse": True}
    result, lse = flash_cute.attention_with_kvcache(2 * q, k_cache, v_cache, k=new[0], v=new[1], **options)
    return result + 1, out, lse


def _compiled_in_one_graph(function: Step, backend: str) -> tuple[Step, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True, dynamic=True), counter


# On the CPU inductor takes minutes to begin.
@pytest.mark.parametrize(
    ("device", "backend"),
    [("cpu", "aot_eager"), *(pytest.param("cuda", x, marks=pytest.mark.cuda) for x in ("aot_eager", "inductor"))],
)
@torch.fx.experimental._config.patch(use_duck_shape=False)  # sizes that are equal in one call need not be in others
def test_a_step_is_one_graph(device: str, backend: str, rng: torch.Generator) -> None:
    """With the append and the result that it writes; other lengths and batches are not compiled again."""
    compiled, counter = _compiled_in_one_graph(_step, backend)
    for lengths in ((9, 4, -1), (0, 0, 31), (50, 3, 2, 8), (1, 2)):
        case = make(rng, device, lengths, 2, page=4, appends=True, storage="halves", heads_q=12)
        both = case.k_cache.as_strided((*case.k_cache.shape[:3], 128), case.k_cache.stride())
        other = both.clone()
        arguments = ((case.k, case.v), case.cache_seqlens, case.page_table)
        with torch.no_grad():
            expected = _step(case.q, both, *arguments)
            assert same_bits(compiled(case.q, other, *arguments), expected)
        assert same_bits((other,), (both,))
    assert counter.frame_count == 1, "other lengths were compiled again"


@torch.fx.experimental._config.patch(use_duck_shape=False)
def test_a_ragged_step_is_one_graph(device: str, rng: torch.Generator) -> None:
    def step(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *given: torch.Tensor) -> Any:
        lengths, table, offsets, k, v = given
        options = {"cache_seqlens": lengths, "page_table": table, "cu_seqlens_q": offsets}
        return flash_cute.attention_with_kvcache(q, k_cache, v_cache, k=k, v=v, **options)

    compiled, counter = _compiled_in_one_graph(step, "aot_eager")
    for lengths, rows in (((9, 4, 0), (1, 5, 30)), ((0, 70), (2, 2)), ((1, 2, 3, 4), (0, 7, 1, 1))):
        case = make(rng, device, lengths, rows, page=4, appends=True)
        other = case.clone()
        given = (case.cache_seqlens, case.page_table, case.cu_seqlens_q, case.k, case.v)
        expected = step(case.q, case.k_cache, case.v_cache, *given)
        assert same_bits((compiled(case.q, other.k_cache, other.v_cache, *given),), (expected,))
        assert same_bits((other.k_cache, other.v_cache), (case.k_cache, case.v_cache))
    assert counter.frame_count == 1, "other lengths were compiled again"


def test_compiled_calls_refuse_in_the_same_words(device: str, rng: torch.Generator) -> None:
    case = make(rng, device, (9, 4), 1, page=4, appends=True)
    table = case.page_table.long()  # type: ignore[union-attr]
    before = cloned(case.k_cache, case.v_cache)
    compiled = torch.compile(flash_cute.attention_with_kvcache, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="page_table: expected int32, got int64"):
        compiled(case.q, case.k_cache, case.v_cache, **{**case.arguments(), "page_table": table})
    assert same_bits((case.k_cache, case.v_cache), before)


def test_export(rng: torch.Generator) -> None:
    class Attention(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, n: torch.Tensor, t: torch.Tensor) -> Any:
            return flash_cute.attention_with_kvcache(q, k, v, cache_seqlens=n, page_table=t, return_lse=True)

    batch, pages, width = (torch.export.Dim(name) for name in ("batch", "pages", "width"))
    sizes = ({0: batch}, {0: pages}, {0: pages}, {0: batch}, {0: batch, 1: width})
    cases = [make(rng, "cpu", lengths, 2, page=4) for lengths in ((9, 30, 0), (5, 80), (7, 7, 7, -1))]
    calls = [(x.q, x.k_cache, x.v_cache, x.cache_seqlens, x.page_table) for x in cases]
    program = torch.export.export(Attention(), calls[0], dynamic_shapes=sizes).module()
    for call in calls:
        assert same_bits(program(*call), Attention()(*call))


# Of float8 caches all of opcheck's but the schema's, which multiplies its inputs: PyTorch does not multiply float8.
OPCHECKS_OF_FLOAT8 = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("name", ["kvcache_fwd", "kvcache_fwd_out", "kvcache_append"])
@pytest.mark.parametrize("float8", [False, True])
def test_opcheck(device: str, float8: bool, name: str, rng: torch.Generator) -> None:
    options: dict[str, Any] = {"page": None, "rows": 2}
    if float8:
        options = {"page": 4, "rows": (1, 5, 0, 3), "cache_dtypes": FLOAT8, "descales": "heads"}
    case = make(rng, device, (20, 0, -1, 33), appends=True, dtype=torch.float16, **options)
    case.k_cache, case.v_cache = (x.float().nan_to_num().to(x.dtype) for x in (case.k_cache, case.v_cache))
    call = _operands(case, -1 if case.cu_seqlens_q is not None else 2)
    if name == "kvcache_fwd_out":
        call = (*call, *(torch.empty_like(x) for x in case.replace(k=None, v=None).run()))
    if name == "kvcache_append":
        places = (case.cache_seqlens, case.page_table, case.cu_seqlens_q, case.kv_layout)
        call = (case.k_cache, case.v_cache, case.k, case.v, *places, case.descale_k, case.descale_v)
    for twin in (name, f"_{name}"):
        operator = getattr(torch.ops.flash_cute, twin).default
        torch.library.opcheck(operator, call, **({"test_utils": OPCHECKS_OF_FLOAT8} if float8 else {}))


@pytest.mark.parametrize("rows", [2, (1, 5, 0)], ids=str)
@pytest.mark.parametrize("head_dim_v", [64, 48])
def test_fakes_have_the_layout_of_the_results(rows: Any, head_dim_v: int, rng: torch.Generator) -> None:
    case = make(rng, "cpu", (9, 20, 0), rows, page=4, head_dim_v=head_dim_v, dtype=torch.float16)
    case.q = case.q.transpose(0, 1).contiguous().transpose(0, 1)
    real = case.run()
    with FakeTensorMode():
        call = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda") if isinstance(x, torch.Tensor) else x
            for x in _operands(case, 0)
        ]
        fake = torch.ops.flash_cute.kvcache_fwd(*call)
    for x, y in zip(real, fake, strict=True):
        assert (x.shape, x.stride(), x.dtype, y.device.type) == (y.shape, y.stride(), y.dtype, "cuda")


TENSORS = ("q", "k_cache", "v_cache", "k", "v", "descale_k", "sinks", "alibi_slopes", "out")


@pytest.mark.parametrize("name", TENSORS)
def test_gradients_are_refused(device: str, name: str, rng: torch.Generator) -> None:
    """In a sentence, before anything is written; not where gradients are not recorded."""
    own = {"dtype": torch.float16, "cache_dtypes": (torch.float8_e4m3fn,) * 2, "descales": "heads"}
    case = make(rng, device, (9, 4), 1, appends=True, **({} if name.endswith("cache") else own))
    ones = torch.ones(4, device=device)
    more = {"sinks": ones, "alibi_slopes": ones.clone(), "out": torch.empty_like(case.q)}
    before = cloned(case.k_cache, case.v_cache)
    (more[name] if name in more else getattr(case, name)).requires_grad_()
    with pytest.raises(NotImplementedError, match=f"has no backward, and {name} requires grad"):
        case.run(**more)
    assert same_bits((case.k_cache.detach(), case.v_cache.detach()), before)
    with torch.no_grad():
        case.run(**more)


@pytest.mark.parametrize("name", ["kvcache_fwd", "kvcache_fwd_out", "kvcache_append"])
def test_operators_refuse_gradients(device: str, name: str, rng: torch.Generator) -> None:
    case = make(rng, device, (9, 4), 1, appends=True)
    call: tuple[Any, ...] = _operands(case, 1)
    if name == "kvcache_fwd_out":
        call = (*call, *(torch.empty_like(x) for x in case.replace(k=None, v=None).run()))
    if name == "kvcache_append":
        call = (case.k_cache, case.v_cache, case.k, case.v, case.cache_seqlens, None, None, "NHD", None, None)
    operator = getattr(torch.ops.flash_cute, name)
    operator(*call)
    for x in (case.q, case.k):
        x.requires_grad_()  # type: ignore[union-attr]
    with pytest.raises(NotImplementedError, match="has no backward, and an argument requires grad"):
        operator(*call)
    with torch.no_grad():
        operator(*call)


def test_other_derivatives_are_refused(device: str, rng: torch.Generator) -> None:
    case = make(rng, device, (9, 4), 1, appends=True)

    def attend(q: torch.Tensor) -> torch.Tensor:
        return case.replace(q=q).run()[0].sum()

    with pytest.raises(NotImplementedError, match="has no backward"):
        torch.func.grad(attend)(case.q)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(attend, (case.q,), (case.q,))


@pytest.mark.filterwarnings("error")
def test_vmap_is_refused(device: str, rng: torch.Generator) -> None:
    case = make(rng, device, (9, 4), 1, appends=True)
    calls: tuple[Callable[[torch.Tensor], Any], ...] = (
        lambda q: flash_cute.attention_with_kvcache(q, case.k_cache, case.v_cache),
        lambda q: torch.ops.flash_cute.kvcache_fwd(q, *_operands(case, 0)[1:]),
        lambda q: flash_cute.attention_with_kvcache(q, case.k_cache, case.v_cache, out=torch.empty_like(q)),
    )
    for call in calls:
        with pytest.raises((RuntimeError, NotImplementedError), match="vmap"):
            torch.vmap(call)(case.q.expand(3, *case.q.shape))
    with pytest.raises((RuntimeError, NotImplementedError), match="vmap"):
        torch.vmap(lambda k: flash_cute.append_kvcache(case.k_cache, case.v_cache, k, k, **case.places))(
            case.k.expand(3, *case.k.shape)  # type: ignore[union-attr]
        )


def test_symbolic_trace(rng: torch.Generator) -> None:
    case = make(rng, "cpu", (9, 4), 1)

    class Attention(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
            return flash_cute.attention_with_kvcache(q, k, v, cache_seqlens=n, window=(3, 0))

    call = (case.q, case.k_cache, case.v_cache, case.cache_seqlens)
    assert same_bits((torch.fx.symbolic_trace(Attention())(*call),), (Attention()(*call),))


def test_jit_trace(rng: torch.Generator) -> None:
    """The graph has the operator that refuses gradients."""
    case = make(rng, "cpu", (9, 4), 1)
    call = (case.q, case.k_cache, case.v_cache, case.cache_seqlens)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        return flash_cute.attention_with_kvcache(q, k, v, cache_seqlens=n)

    traced = torch.jit.trace(attend, call)
    assert same_bits((traced(*call),), (attend(*call),))
    with pytest.raises(RuntimeError, match="has no backward"):
        traced(case.q.clone().requires_grad_(), *call[1:])


def test_autocast_changes_nothing(device: str, rng: torch.Generator) -> None:
    case = make(rng, device, (9, 4), 1)
    expected = case.run()
    with torch.autocast(device, dtype=torch.bfloat16):
        assert same_bits(case.run(), expected)


def test_flops(device: str, rng: torch.Generator) -> None:
    """The matrix products of each sequence; of fake tensors those of full caches."""
    with FlopCounterMode(display=False) as counter:
        make(rng, device, (9, -1, 40), 2, page=4, head_dim_v=32).run()
    assert counter.get_total_flops() == 2 * 4 * (2 * 9 + 2 * 40) * (64 + 32)
    with FlopCounterMode(display=False) as counter:
        make(rng, device, (9, 0, 40), (1, 5, 3), page=4, appends=True).run()
    assert counter.get_total_flops() == 2 * 4 * (1 * 10 + 5 * 5 + 3 * 43) * 128
    case = make(rng, device, (9, 40), 2)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, FlopCounterMode(display=False) as counter:
        tensors = [mode.from_tensor(x) for x in (case.q, case.k_cache, case.v_cache)]
        flash_cute.attention_with_kvcache(*tensors, cache_seqlens=mode.from_tensor(case.cache_seqlens))
    assert counter.get_total_flops() == 2 * 4 * 2 * 2 * case.k_cache.shape[1] * 128
