"""Windows, softcap, sinks, ALiBi and a head dim of v's own: all combinations, and every way to call."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import CAUSAL, CPU_DTYPES, CUDA_DTYPES, Backward, Case, Forward, score
from checks import OPCHECKS, inputs_and_options
from layouts import DISTINCT_LAYOUTS, LAYOUTS
from numerics import assert_gradients_match, assert_matches, same_bits
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import flash_cute

SIDES = (None, 0, 1, 17, 64, 130, 500)
# Everything at once.
ALL = Case(
    *(16, 33, 65),
    heads_q=4,
    head_dim_v=24,
    window=(20, 5),
    softcap=2.0,
    sinks=torch.float32,
    slopes="batch",
)


def _draw(pick: random.Random, device: str) -> Case:
    """Shape, mask, dtype, GQA ratio and options; each option is there half of the time."""
    heads_kv = pick.randint(1, 3)
    dtype = pick.choice(CPU_DTYPES if device == "cpu" else CUDA_DTYPES)
    return Case(
        head_dim=pick.choice((pick.randint(1, 256), 8 * pick.randint(1, 32))),
        len_q=pick.choice((1, pick.randint(1, 70), pick.randint(1, 400))),
        len_k=pick.choice((pick.randint(2, 70), pick.randint(2, 600))),
        causal=pick.choice(CAUSAL),
        dtype=dtype,
        batch=pick.randint(1, 3),
        heads_q=heads_kv * pick.randint(1, 4),
        heads_kv=heads_kv,
        head_dim_v=pick.choice((None, pick.randint(1, 256))),
        window=pick.choice((None, (pick.choice(SIDES), pick.choice(SIDES)))),
        softcap=pick.choice((None, pick.uniform(0.3, 30))),
        sinks=pick.choice((None, pick.choice((dtype, torch.float32)))),
        slopes=pick.choice((None, pick.choice(("head", "batch")))),
    )


@pytest.mark.kernel
@pytest.mark.parametrize("number", range(96))
def test_exact(
    device: str, number: int, seed: int, backend: str | None, fwd: Forward, bwd: Backward, rng: torch.Generator
) -> None:
    pick = random.Random(seed)
    case = _draw(pick, device)
    options: dict[str, Any] = {"scale": pick.choice((None, pick.uniform(0.1, 2) / case.head_dim**0.5))}
    layouts = [pick.choice(LAYOUTS) for _ in range(3)]
    print(case, *layouts, options)
    inputs = [layout.make(x) for layout, x in zip(layouts, case.inputs(device, rng), strict=True)]
    options |= case.options(device, rng)
    assert_matches(*fwd(*inputs, case.causal, **options), *inputs, case.causal, **options)

    layouts = [pick.choice(DISTINCT_LAYOUTS) for _ in range(4)]
    dout, dlse = case.flow(device, rng)
    *inputs, dout = (x.make(y) for x, y in zip(layouts, (*case.inputs(device, rng), dout), strict=True))
    options["dlse"] = pick.choice((None, dlse))
    deterministic = pick.choice((False, True))
    print("backward", *layouts, options["dlse"] is not None, deterministic)
    gradients = bwd(dout, *inputs, case.causal, deterministic=deterministic, **options)
    assert_gradients_match(gradients, dout, *inputs, case.causal, **options)


Call = Callable[..., torch.Tensor]
# Every way to get gradients of `call(*tensors)` by its tensors.
WAYS: dict[str, Callable[[Call, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]] = {}


def _way(function: Callable[[Call, tuple[torch.Tensor, ...]], Any]) -> Any:
    WAYS[function.__name__.strip("_")] = function
    return function


def _eager(call: Call, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    return torch.autograd.grad(call(*leaves).float().square().sum(), leaves)


@_way
def _functorch(call: Call, tensors: tuple[torch.Tensor, ...]) -> Any:
    return torch.func.grad(lambda x: call(*x).float().square().sum())(tensors)


@_way
def _compiled(call: Call, tensors: tuple[torch.Tensor, ...]) -> Any:
    torch._dynamo.reset()
    return _eager(torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True), tensors)


@_way
def _checkpointed(call: Call, tensors: tuple[torch.Tensor, ...]) -> Any:
    return _eager(lambda *x: checkpoint(call, *x, use_reentrant=False), tensors)


@_way
def _saved_by_a_policy(call: Call, tensors: tuple[torch.Tensor, ...]) -> Any:
    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        save = operator is torch.ops.flash_cute.fwd.default
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return _eager(lambda *x: checkpoint(call, *x, use_reentrant=False, context_fn=contexts), tensors)


@_way
def _symbolically_traced(call: Call, tensors: tuple[torch.Tensor, ...]) -> Any:
    return _eager(torch.fx.symbolic_trace(call), tensors)


@_way
def _jit_traced(call: Call, tensors: tuple[torch.Tensor, ...]) -> Any:
    return _eager(torch.jit.trace(call, tensors), tensors)


@_way
def _recorded(call: Call, tensors: tuple[torch.Tensor, ...]) -> Any:
    """With create_graph, where the backward is recorded too."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    given = torch.autograd.grad(call(*leaves).float().square().sum(), leaves, create_graph=True)
    with pytest.raises(NotImplementedError, match="no double backward"):
        given[3].sum().backward()
    return tuple(x.detach() for x in given)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_differentiate(device: str, way: str, rng: torch.Generator) -> None:
    inputs, options = inputs_and_options(ALL, device, rng)
    sinks = options.pop("sinks")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = flash_cute.attention(q, k, v, True, sinks=sinks, deterministic=True, **options)
        return out

    assert same_bits(tuple(WAYS[way](attend, (*inputs, sinks))), _eager(attend, (*inputs, sinks)))


def test_autograd_is_bwd(device: str, rng: torch.Generator) -> None:
    """autograd.Function, the operator's own autograd, and `bwd` called by hand: the same bits."""
    inputs, options = inputs_and_options(ALL, device, rng)
    leaves = [x.requires_grad_() for x in (*inputs, options["sinks"])]
    raw = score("none", options["window"], **{x: options[x] for x in ("softcap", "sinks", "alibi_slopes")})
    results = flash_cute.fwd(*leaves[:3], deterministic=True, **options)
    flow = tuple(x.detach() for x in results)
    expected = torch.autograd.grad(results, leaves, flow)
    results = torch.ops.flash_cute.fwd(*leaves[:3], *raw, "auto", True)
    assert same_bits(torch.autograd.grad(results, leaves, flow), expected)
    out, lse, q, k, v, sinks = (x.detach() for x in (*results, *leaves))
    options["sinks"] = sinks
    given = flash_cute.bwd(out, q, k, v, out, lse, dlse=lse, deterministic=True, **options)
    assert same_bits(given, expected)


@pytest.mark.parametrize("operator", ["fwd", "_fwd", "bwd", "_bwd"])
@pytest.mark.parametrize("slopes", ["head", "batch"])
def test_opcheck(device: str, operator: str, slopes: str, rng: torch.Generator) -> None:
    case = Case(**{**ALL.__dict__, "slopes": slopes})
    (q, k, v), options = inputs_and_options(case, device, rng)
    raw = score(True, options["window"], **{x: options[x] for x in ("softcap", "sinks", "alibi_slopes")})
    call = getattr(torch.ops.flash_cute, operator).default
    if "fwd" in operator:
        torch.library.opcheck(call, (q, k, v, *raw, "auto"))
        if operator == "fwd":
            raw = tuple(x.requires_grad_() if x is options["sinks"] else x for x in raw)
            torch.library.opcheck(call, (q.requires_grad_(), k, v, *raw, "auto", True))
        return
    out, lse = flash_cute.fwd(q, k, v, True, **options)
    arguments = (torch.ones_like(out), q, k, v, out, lse, lse, *raw, True, "auto")
    torch.library.opcheck(call, arguments)
    if operator == "bwd":
        arguments[0].requires_grad_()
        torch.library.opcheck(call, arguments, test_utils=OPCHECKS)


def test_one_graph_for_all_sizes(device: str, rng: torch.Generator) -> None:
    """Compiled once, with lengths, batches and heads that change."""
    torch._dynamo.reset()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **tensors: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = flash_cute.attention(q, k, v, True, window=(20, 5), softcap=2.0, **tensors)
        return out

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, backend=counter, fullgraph=True, dynamic=True)
    # No two sizes are equal, which the compiler would take for a rule.
    for batch, heads, len_q, len_k in ((3, 10, 33, 65), (5, 12, 40, 50), (7, 8, 9, 90)):
        changed = {"batch": batch, "heads_q": heads, "len_q": len_q, "len_k": len_k}
        inputs, options = inputs_and_options(Case(**{**ALL.__dict__, **changed}), device, rng)
        tensors = {name: options[name] for name in ("sinks", "alibi_slopes")}
        assert same_bits((compiled(*inputs, **tensors),), (attend(*inputs, **tensors),))
    assert counter.frame_count == 1


def test_explain_says_what_is_asked_for(rng: torch.Generator) -> None:
    inputs, options = ALL.inputs("cpu", rng), ALL.options("cpu", rng)
    for backward in (False, True):
        explanation = flash_cute.explain(*inputs, backward=backward, **options)
        asked = {"window": [20, 5], "softcap": 2.0, "sinks": True, "alibi": True, "head_dim": 16, "head_dim_v": 24}
        assert {name: explanation.data[name] for name in asked} == asked
        text = str(explanation)
        assert "window of 20 keys before and 5 after, softcap 2, ALiBi, sinks, head dim 24 of v" in text
        assert "query rows at a time" in text
        assert ("scaled by the keys' share" if backward else "sinks are applied last") in text
        assert max(map(len, text.splitlines())) <= 110
    plain = flash_cute.explain(*Case(16, 5, 7).inputs("cpu", rng))
    asked = {"window": None, "softcap": None, "sinks": False, "alibi": False, "head_dim": 16, "head_dim_v": 16}
    assert {name: plain.data[name] for name in asked} == asked
    assert "options" not in str(plain)
    one_side = flash_cute.explain(*Case(16, 5, 7).inputs("cpu", rng), window=(None, 3))
    assert one_side.data["window"] == [None, 3] and "window of any keys before and 3 after" in str(one_side)


@pytest.mark.parametrize(
    "case, sentence",
    [
        (Case(16, 5, 7, softcap=1.0), "since it has no softcap."),
        (Case(16, 5, 7, slopes="head"), "since it has no ALiBi."),
        (Case(16, 5, 7, window=(1, 1)), "since it has no left limit of a window."),
        (Case(16, 5, 7, head_dim_v=96), "since it wants one head dim, and 16 and 96 are too far apart to pad."),
        (Case(16, 5, 7, head_dim_v=24), "Zeros fill q and k up to v's head dim 24."),
        (Case(16, 5, 7, head_dim_v=8), "Zeros fill v up to q and k's head dim 16."),
        (Case(16, 5, 7, sinks=torch.float32), "The sinks are applied last, from each row's LSE."),
        (Case(16, 5, 7, True), "The first 2 keys, which every row sees"),
    ],
    ids=str,
)
def test_how_the_cpu_serves(case: Case, sentence: str, rng: torch.Generator) -> None:
    explanation = flash_cute.explain(*case.inputs("cpu", rng), case.causal, **case.options("cpu", rng))
    assert any(sentence in reason for reason in explanation.data["reasons"]), explanation.data["reasons"]
