"""Attention in float8 behind PyTorch's and Transformers' interfaces: by name, near 16 bits, and for inference alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from numerics import same_bits

import flash_cute
from flash_cute.integrations import _aten, sdpa

pytestmark = pytest.mark.usefixtures("sdpa_counters")

PYTORCHS = F.scaled_dot_product_attention
ERROR = 0.1  # of out's root mean square: rounding q, k, v and P to e4m3 costs about 0.05 on normal inputs


def tensors(rng: torch.Generator, *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.randn(shape, generator=rng).to(dtype) for shape in shapes]


def assert_near(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Float8's error, and not that of the dtype: it has been quantised."""
    error = ((out.double() - expected.double()).norm() / expected.double().norm()).item()
    assert 0.01 < error < ERROR


CALLS: dict[str, tuple[tuple[tuple[int, ...], ...], dict[str, Any]]] = {
    "square": (((2, 4, 90, 32),) * 3, {}),
    "causal, more keys": (((2, 4, 90, 64), (2, 4, 130, 64), (2, 4, 130, 64)), {"is_causal": True, "scale": 0.2}),
    "gqa": (((2, 6, 90, 32), (2, 2, 130, 32), (2, 2, 130, 48)), {"enable_gqa": True, "is_causal": True}),
    "no batch": (((90, 32), (130, 32), (130, 32)), {}),
}


@pytest.mark.parametrize("through", ["function", "enable"])
@pytest.mark.parametrize("name", CALLS)
def test_sdpa(name: str, through: str, rng: torch.Generator) -> None:
    shapes, options = CALLS[name]
    q, k, v = tensors(rng, *shapes)
    if through == "function":
        out = sdpa.sdpa(q, k, v, **options, quantize="fp8")
    else:
        with sdpa.enable(devices=("cpu",), strict=True, quantize="fp8"):
            out = F.scaled_dot_product_attention(q, k, v, **options)
    assert out.dtype == q.dtype and sum(sdpa.report().served.values()) == 1
    assert_near(out, PYTORCHS(*(x.double() for x in (q, k, v)), **options))
    if q.dim() == 4:
        causal, scale = "top_left" if options.get("is_causal") else False, options.get("scale")
        assert same_bits((out,), (flash_cute.attention(q, k, v, causal, scale=scale, quantize="fp8"),))


def test_only_while_it_is_asked_for(rng: torch.Generator) -> None:
    q, k, v = tensors(rng, *((1, 2, 50, 32),) * 3)
    with sdpa.enable(devices=("cpu",)):
        exact = F.scaled_dot_product_attention(q, k, v)
        with sdpa.enable(devices=("cpu",), quantize="fp8"):
            assert_near(F.scaled_dot_product_attention(q, k, v), exact)
        assert same_bits((F.scaled_dot_product_attention(q, k, v),), (exact,))
    assert same_bits((flash_cute.attention(q, k, v),), (exact,))


UNSERVED = {
    "head dim": ((1, 2, 50, 40), torch.bfloat16, "k: expected a head dim that is a multiple of 16 .*, got 40"),
    "large head dim": ((1, 2, 50, 272), torch.bfloat16, "k: expected a head dim .* at most 256, got 272"),
    "dtype": ((1, 2, 50, 32), torch.float64, "k: expected float16, bfloat16 or float32, got float64"),
}


@pytest.mark.parametrize("name", UNSERVED)
def test_what_float8_cannot_serve_is_passed_on(name: str, rng: torch.Generator) -> None:
    shape, dtype, sentence = UNSERVED[name]
    q, k, v = tensors(rng, shape, shape, shape, dtype=dtype)
    expected = PYTORCHS(q, k, v)
    with sdpa.enable(devices=("cpu",), quantize="fp8"):
        assert same_bits((F.scaled_dot_product_attention(q, k, v),), (expected,))
    assert same_bits((sdpa.sdpa(q, k, v, quantize="fp8"),), (expected,))
    report = sdpa.report()
    assert not report.served and list(report.passed_on.values()) == [2]
    with sdpa.enable(devices=("cpu",), strict=True, quantize="fp8"), pytest.raises(ValueError, match=sentence):
        F.scaled_dot_product_attention(q, k, v)
    compiled = torch.compile(lambda: sdpa.sdpa(q, k, v, quantize="fp8"), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(), expected)


@pytest.mark.parametrize("strict", [False, True])
def test_a_gradient_raises(strict: bool, rng: torch.Generator) -> None:
    q, k, v = tensors(rng, *((1, 2, 50, 32),) * 3)
    for leaf in (q, k, v):
        leaf.requires_grad_()
        with sdpa.enable(devices=("cpu",), strict=strict, quantize="fp8"):
            with pytest.raises(NotImplementedError, match=r"float8 tensors has no backward, and [qkv] requires grad"):
                F.scaled_dot_product_attention(q, k, v)
            with torch.no_grad():
                F.scaled_dot_product_attention(q, k, v)
        with pytest.raises(NotImplementedError, match="has no backward"):
            sdpa.sdpa(q, k, v, quantize="fp8")
        leaf.requires_grad_(False)
    assert sum(sdpa.report().served.values()) == 3 and not sdpa.report().passed_on


def test_other_words_are_refused(rng: torch.Generator) -> None:
    q, k, v = tensors(rng, *((1, 2, 50, 32),) * 3)
    for wrong in ("fp4", True, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match="quantize: expected None or 'fp8', got"):
            sdpa.enable(quantize=wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="quantize: expected None or 'fp8', got"):
            sdpa.sdpa(q, k, v, quantize=wrong)  # type: ignore[arg-type]
    assert not sdpa.report().enabled


def test_in_a_graph(rng: torch.Generator) -> None:
    q, k, v = tensors(rng, *((1, 2, 50, 32),) * 3)
    compiled = torch.compile(lambda *x: sdpa.sdpa(*x, is_causal=True, quantize="fp8"), fullgraph=True, backend="eager")
    assert same_bits((compiled(q, k, v),), (sdpa.sdpa(q, k, v, is_causal=True, quantize="fp8"),))


def test_aten_operators(rng: torch.Generator) -> None:
    """As the dispatcher calls them, on the CPU."""
    q, k, v = tensors(rng, (2, 4, 90, 32), (2, 2, 130, 32), (2, 2, 130, 32))
    out, lse, *_ = _aten.sdpa_forward(q, k, v, 0.0, True, scale=0.3, quantize="fp8")
    expected = flash_cute.attention(q, k, v, True, scale=0.3, quantize="fp8", return_lse=True)
    assert same_bits((out, lse), expected)
    slopes = torch.tensor([0.1, 0.2, 0.3, 0.4])
    options = {"window_size_left": 9, "window_size_right": -1, "alibi_slopes": slopes, "quantize": "fp8"}
    rows_first = [x.transpose(1, 2) for x in (q, k, v)]
    out, lse, *_ = _aten.flash_forward(*rows_first, None, None, 90, 130, 0.0, False, False, **options)
    expected = flash_cute.attention(q, k, v, window=(9, None), alibi_slopes=slopes, quantize="fp8", return_lse=True)
    assert same_bits((out.transpose(1, 2), lse), expected)
    offsets_q, offsets_k = (torch.tensor(x, dtype=torch.int32) for x in ((0, 30, 90), (0, 100, 130)))
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    used = torch.tensor([60, 30], dtype=torch.int32)
    given = (offsets_q, offsets_k, 60, 100, 0.0, True, False)
    out, lse, *_ = _aten.flash_forward(*packed, *given, seqused_k=used, quantize="fp8")
    expected = flash_cute.varlen_attention(
        *packed, offsets_q, offsets_k, True, seqused_k=used, quantize="fp8", return_lse=True
    )
    assert same_bits((out, lse), expected)


@pytest.mark.cuda
@pytest.mark.kernel
def test_graphs_and_nested_tensors_on_cuda(rng: torch.Generator) -> None:
    """What reaches the aten operators is computed in float8 too, and has no gradient."""
    if not flash_cute.backends()["sm90"]:
        pytest.skip("float8 needs a GPU of compute capability 9.0")
    q, k, v = (x.cuda() for x in tensors(rng, *((2, 4, 90, 64),) * 3))
    exact = PYTORCHS(q, k, v, is_causal=True)
    with sdpa.enable(strict=True, quantize="fp8"):
        compiled = torch.compile(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True), backend="aot_eager")
        with torch.no_grad():
            assert_near(compiled(q, k, v), exact)
        assert sdpa.report().served
        q.requires_grad_()
        with pytest.raises(NotImplementedError, match="has no backward"):
            compiled(q, k, v).sum().backward()


transformers = pytest.importorskip("transformers", minversion="5.4")

import flash_cute.integrations.transformers as integration  # noqa: E402 (needs transformers)


def llama(name: str, **config: Any) -> Any:
    integration.register()
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 50}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**sizes, **heads, **config})
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation=name).to(torch.bfloat16).eval()


@pytest.mark.parametrize("pad", ["none", "left", "right"])
@torch.no_grad()
def test_transformers(pad: str, rng: torch.Generator) -> None:
    """Each layer's attention is that of the quantised, near what "flash_cute" computes of the same q, k and v."""
    model = llama("flash_cute_fp8")
    ids = torch.randint(50, (2, 40), generator=rng)
    mask = torch.ones_like(ids)
    if pad != "none":
        mask[1, slice(0, 7) if pad == "left" else slice(33, 40)] = 0
    calls = []
    table = transformers.AttentionInterface._global_mapping
    ours = table["flash_cute_fp8"]

    def watching(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:
        exact = integration.attention(module, query, key, value, attention_mask, **options)[0]
        out = ours(module, query, key, value, attention_mask, **options)
        calls.append((out[0], exact))
        return out

    table["flash_cute_fp8"] = watching
    try:
        logits = model(ids, attention_mask=mask).logits
    finally:
        table["flash_cute_fp8"] = ours
    assert len(calls) == 2
    for out, exact in calls:
        assert out.shape == (2, 40, 4, 32)
        assert_near(out, exact)
    model.set_attn_implementation("flash_cute")
    kept = mask.bool()
    assert_near(logits[kept], model(ids, attention_mask=mask).logits[kept])


@torch.no_grad()
def test_transformers_generates(rng: torch.Generator) -> None:
    """With both caches the same tokens: room that a static cache has for later tokens does not count."""
    model = llama("flash_cute_fp8")
    ids = torch.randint(50, (2, 20), generator=rng)
    options = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    dynamic, static = (model.generate(ids, cache_implementation=cache, **options) for cache in (None, "static"))
    torch.testing.assert_close(dynamic.logits[0], static.logits[0])
    assert torch.equal(dynamic.sequences[:, :21], static.sequences[:, :21])


def test_transformers_refusals(rng: torch.Generator) -> None:
    ids = torch.randint(50, (1, 20), generator=rng)
    with pytest.raises(NotImplementedError, match="has no backward, and q requires grad"):
        llama("flash_cute_fp8")(ids)
    with torch.no_grad(), pytest.raises(ValueError, match="k: expected a head dim that is a multiple of 16"):
        llama("flash_cute_fp8", head_dim=24)(ids)
    config = transformers.FalconConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=1, vocab_size=50)
    with pytest.raises(ValueError, match="expected 'flash_cute' for FalconForCausalLM, whose layers do not use"):
        transformers.FalconForCausalLM._from_config(config, attn_implementation="flash_cute_fp8")
    from transformers.modeling_flash_attention_utils import _lazy_imports

    with pytest.raises(ValueError, match="expected 'flash_cute' where flash-attn's own functions are called"):
        _lazy_imports("flash_cute_fp8")[0](*torch.zeros(3, 1, 2, 2, 16))
