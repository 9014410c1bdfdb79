"""Models of Transformers whose masks say what layers do not, padding anywhere, whole graphs, refusals at load."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.4")

import hf_models  # noqa: E402 (needs transformers)
from hf_checks import LENGTH, assert_like_eager, padding, tokens  # noqa: E402

import flash_cute  # noqa: E402
import flash_cute.integrations.transformers as integration  # noqa: E402
from flash_cute import _ops  # noqa: E402
from flash_cute.integrations import _transformers_band, flash_attn  # noqa: E402

KINDS = ["none", "left", "right", "inner"]


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    integration.register()
    hf_models.register_oracle()


def mask_of(kind: str) -> torch.Tensor | None:
    """(2, LENGTH) ones where there is a token; inner: also with padding between tokens."""
    if kind != "inner":
        return padding(kind)
    ones = torch.ones(2, LENGTH, dtype=torch.long)
    ones[0, [0, 1, 5, 6, 9]] = 0
    ones[1, 3] = 0
    return ones


def kept_of(mask: torch.Tensor | None) -> torch.Tensor:
    return torch.ones(2, LENGTH, dtype=torch.bool) if mask is None else mask.bool()


@pytest.mark.parametrize("pad", KINDS)
@pytest.mark.parametrize("name", ["bart", "pegasus_x"])
def test_a_source_as_long_as_the_target(name: str, pad: str, rng: torch.Generator) -> None:
    """Its padding is not the target's; PegasusX says in its masks alone that its decoder is causal."""
    target = padding("none" if pad == "none" else "right")
    inputs = {"input_ids": tokens(rng, 2), "attention_mask": mask_of(pad), "decoder_input_ids": tokens(rng, 2)}
    assert_like_eager(hf_models.build(name), {**inputs, "decoder_attention_mask": target}, kept_of(target))


@pytest.mark.parametrize("pad", ["none", "left", "right"])
@pytest.mark.parametrize("name", ["qwen2_moe", "phimoe", "mistral_both_ways", "embedding_gemma"])
def test_windows_of_the_mask(name: str, pad: str, rng: torch.Generator) -> None:
    mask = mask_of(pad)
    assert_like_eager(hf_models.build(name), {"input_ids": tokens(rng, 2), "attention_mask": mask}, kept_of(mask))


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_padding_between_tokens(name: str, rng: torch.Generator) -> None:
    mask = mask_of("inner")
    assert_like_eager(hf_models.build(name), {"input_ids": tokens(rng, 2), "attention_mask": mask}, kept_of(mask))


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss", "modernbert"])
def test_padding_between_tokens_and_a_window(name: str, rng: torch.Generator) -> None:
    """A window counts positions, the padding's too."""
    mask = mask_of("inner")
    assert_like_eager(hf_models.build(name), {"input_ids": tokens(rng, 2), "attention_mask": mask}, kept_of(mask))


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", ["llama", "qwen2_moe"])
def test_generates_from_prompts_padded_on_the_right(name: str, cache: str | None, rng: torch.Generator) -> None:
    """The first token follows from a row of padding, as in eager; later ones have padding between them."""
    model, ids = hf_models.build(name), tokens(rng, 2)
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "cache_implementation": cache}
    answers = []
    for implementation in ("eager", "flash_cute"):
        model.set_attn_implementation(implementation)
        answers.append(model.generate(ids, attention_mask=padding("right"), disable_compile=True, **options))
    assert torch.equal(*answers)


@pytest.mark.parametrize("pad", KINDS)
@pytest.mark.parametrize("name", ["falcon", "gpt_neo", "bark", "bark_fine"])
@torch.no_grad()
def test_layers_without_an_interface(name: str, pad: str, rng: torch.Generator) -> None:
    eager, ours = hf_models.load(name, "eager"), hf_models.load(name, "flash_cute")
    mask, ids = mask_of(pad), tokens(rng, 2)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if name == "bark_fine":
        inputs |= {"input_ids": ids[:, :, None].expand(-1, -1, 4), "codebook_idx": 2}
    if (name, pad) == ("gpt_neo", "inner"):
        with pytest.raises(ValueError, match="in one block where there is a window"):
            ours(**inputs)
        return
    kept = kept_of(mask)
    torch.testing.assert_close(ours(**inputs).logits[kept], eager(**inputs).logits[kept], rtol=1e-4, atol=1e-4)
    if name in ("falcon", "gpt_neo") and pad in ("none", "left"):
        inputs["attention_mask"] = torch.ones_like(ids) if mask is None else mask
        options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
        assert torch.equal(ours.generate(**inputs, **options), eager.generate(**inputs, **options))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("pad", ["none", "left", "inner", "one sequence"])
@torch.no_grad()
def test_in_one_graph(pad: str, rng: torch.Generator) -> None:
    model, mask = hf_models.build("llama"), None if pad == "one sequence" else mask_of(pad)
    model.set_attn_implementation("flash_cute")
    ids = tokens(rng, 1 if pad == "one sequence" else 2)
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    kept, expected = kept_of(mask)[: len(ids)], model(**inputs).logits
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs).logits
    torch.testing.assert_close(compiled[kept], expected[kept])
    torch.compiler.reset()
    exported = torch.export.export(model, (), inputs, strict=False).module()(**inputs).logits
    torch.testing.assert_close(exported[kept], expected[kept])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("pad", "dynamic"), [("none", False), ("left", True)])
@torch.no_grad()
def test_a_window_is_first_met_in_a_graph(
    pad: str, dynamic: bool, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside layers without a window, of whose masks the graph has read before that there is none."""
    for name in ("_BANDS", "_OPTIONS"):
        monkeypatch.setattr(_transformers_band, name, getattr(_transformers_band, name)[:2])
    model, mask = hf_models.build("gemma3"), mask_of(pad)
    inputs = {"input_ids": tokens(rng, 2), "attention_mask": mask, "use_cache": False}
    model.set_attn_implementation("eager")
    kept, expected = kept_of(mask), model(**inputs).logits
    model.set_attn_implementation("flash_cute")
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")(**inputs).logits
    torch.testing.assert_close(compiled[kept], expected[kept], rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_packed_sequences_in_one_graph_raise(rng: torch.Generator) -> None:
    """What a graph cannot look at before it runs it checks when it does; a window is served."""
    model, ids = hf_models.build("mistral"), tokens(rng, 2)
    model.set_attn_implementation("flash_cute")
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    positions = torch.arange(LENGTH)[None].repeat(2, 1)
    expected = model(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(compiled(ids, position_ids=positions, use_cache=False).logits, expected)
    positions[1, 5:] -= 5
    with pytest.raises(RuntimeError, match="position_ids: expected one causal sequence in each row"):
        compiled(ids, position_ids=positions, use_cache=False)
    torch.compiler.reset()


@pytest.mark.parametrize("limits", [(3, 2), (0, 0), (5, 0), (4, 4), (20, 20)])
@pytest.mark.parametrize("shift", [0, 4])
def test_a_band_of_any_function(limits: tuple[int, int], shift: int, rng: torch.Generator) -> None:
    """A function that is not known is a band if all of its values are; `shift` keys stand before the first row."""
    left, right = limits
    q = torch.randn(2, 2, 10, 8, generator=rng)
    k, v = (torch.randn(2, 2, 10 + shift, 8, generator=rng) for _ in range(2))
    stated = {"allow_is_causal_skip": False, "use_vmap": True}
    mask = integration.mask(
        2, 10, 10 + shift, shift, mask_function=lambda b, h, i, j: (j <= i + right) & (j >= i - left), **stated
    )
    out, _ = integration.attention(torch.nn.Module(), q, k, v, mask, is_causal=True)
    expected = flash_cute.attention(q, k, v, window=limits).transpose(1, 2)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("pad", ["none", "left", "inner"])
def test_a_mask_of_three_intervals(pad: str, rng: torch.Generator) -> None:
    """The layers are given the matrix itself, which says the same where what was kept with it has got lost."""
    function = lambda b, h, i, j: (j <= i) | ((i == 3) & (j == 7)) | ((i == 5) & (j == 7))  # noqa: E731
    padded = mask_of(pad)
    tokens = None if padded is None else padded.bool()
    mask = integration.mask(
        2, LENGTH, LENGTH, mask_function=function, attention_mask=tokens, allow_is_causal_skip=False, use_vmap=True
    )
    assert mask is not None and (mask.shape, mask.dtype) == ((2, 1, LENGTH, LENGTH), torch.bool)
    seen = torch.ones(LENGTH, LENGTH).tril().bool()
    seen[3, 7] = seen[5, 7] = True
    seen = seen & (torch.ones(2, LENGTH).bool() if tokens is None else tokens)[:, None, None]
    q = torch.randn(2, 4, LENGTH, 8, generator=rng, requires_grad=True)
    k, v = (torch.randn(2, 2, LENGTH, 8, generator=rng, requires_grad=True) for _ in range(2))
    expected = eager_attention(q, k, v, seen)
    flow = torch.randn(expected.shape, generator=rng)
    for given in (mask, mask.clone()):
        out, _ = integration.attention(torch.nn.Module(), q, k, v, given, is_causal=True)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        gradients = torch.autograd.grad(out, (q, k, v), flow)
        torch.testing.assert_close(gradients, torch.autograd.grad(expected, (q, k, v), flow, retain_graph=True))
    # Nothing that is kept with a mask keeps the mask.
    gone = weakref.ref(mask)
    del mask, given
    assert gone() is None


def test_what_a_mask_function_is_told_and_does_not_know() -> None:
    with pytest.raises(ValueError, match="flash_cute: look_ahead: expected no such argument"):
        integration.mask(1, 4, 4, look_ahead=2)
    with pytest.raises(
        ValueError, match=r"attention_mask: expected a padding mask \(batch, positions\), got \(1, 4, 4"
    ):
        integration.mask(1, 4, 4, attention_mask=torch.ones(1, 4, 4, dtype=torch.bool))


def test_a_mask_that_lost_what_was_kept_with_it(rng: torch.Generator) -> None:
    """As where it is moved to another device: its data and sizes say the same."""
    masking = transformers.masking_utils
    q, k, v = (torch.randn(2, 2, LENGTH, 8, generator=rng) for _ in range(3))
    for pad in KINDS:
        tokens_of = mask_of(pad)
        for function in (masking.causal_mask_function, masking.sliding_window_causal_mask_function(5)):
            if pad == "inner" and function is not masking.causal_mask_function:
                continue
            given = None if tokens_of is None else tokens_of.bool()
            mask = integration.mask(2, LENGTH, LENGTH, mask_function=function, attention_mask=given)
            if mask is None:
                continue
            with torch.no_grad():
                outs = [integration.attention(torch.nn.Module(), q, k, v, x)[0] for x in (mask, mask.clone())]
            torch.testing.assert_close(*outs)
            seen = masking.sdpa_mask(
                2, LENGTH, LENGTH, mask_function=function, attention_mask=given, allow_is_causal_skip=False
            )
            scores = (q @ k.mT * 8**-0.5).masked_fill(~seen, -1e9)
            expected, kept = (scores.softmax(-1) @ v).transpose(1, 2), kept_of(tokens_of)
            kept[:, -1] = True  # what `generate` goes on from is right in padding too
            torch.testing.assert_close(outs[0][kept], expected[kept])


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ("DogeForCausalLM", "DogeConfig"),
        ("DeepseekV32ForCausalLM", "DeepseekV32Config"),
        ("GlmMoeDsaForCausalLM", "GlmMoeDsaConfig"),
        ("Siglip2VisionModel", "Siglip2VisionConfig"),
        ("MambaForCausalLM", "MambaConfig"),
    ],
)
def test_refused_where_it_is_loaded(model: str, config: str) -> None:
    if not hasattr(transformers, model):
        pytest.skip("this Transformers does not have it")
    with torch.device("meta"), pytest.raises(ValueError, match=f"flash_cute: attn_implementation: .* got {model}"):
        getattr(transformers, model)._from_config(getattr(transformers, config)(), attn_implementation="flash_cute")


def test_alibi_is_refused_where_it_is_loaded() -> None:
    with pytest.raises(ValueError, match="expected FalconForCausalLM without ALiBi"):
        hf_models.load("falcon_alibi", "flash_cute")


@pytest.mark.parametrize("name", ["gpt2", "opt", "llama", "bert"])
def test_weights_are_refused(name: str, rng: torch.Generator) -> None:
    model, ids = hf_models.build(name), tokens(rng, 1)
    model.set_attn_implementation("flash_cute")
    with pytest.raises(ValueError, match="output_attentions: expected"):
        model(ids, output_attentions=True)
    model.set_attn_implementation("eager")
    assert len(model(ids, output_attentions=True).attentions) == 2


def test_dropout_is_named(rng: torch.Generator) -> None:
    config = transformers.BertConfig(**hf_models.COMMON | {"attention_probs_dropout_prob": 0.2})
    model = transformers.BertForMaskedLM._from_config(config, attn_implementation="flash_cute").train()
    with pytest.raises(ValueError, match=r"dropout: expected 0 in training \(set config.attention_probs_dropout_prob "):
        model(tokens(rng, 1))


def test_functions_of_flash_attn_by_our_name(rng: torch.Generator) -> None:
    """As sentence-transformers asks for them, and layers that know flash-attn alone."""
    from transformers import modeling_flash_attention_utils as flash

    functions, _ = flash.lazy_import_flash_attention("flash_cute")
    assert functions[:2] == (flash_attn.flash_attn_func, flash_attn.flash_attn_varlen_func)
    q, k, v = (torch.randn(2, LENGTH, 2, 8, generator=rng) for _ in range(3))
    ones = padding("left")
    options: dict[str, Any] = {"query_length": LENGTH, "is_causal": True, "attn_implementation": "flash_cute"}
    out = flash._flash_attention_forward(q, k, v, ones, **options)
    heads = (x.transpose(1, 2) for x in (q, k, v))
    torch.testing.assert_close(out, integration.attention(torch.nn.Module(), *heads, ones, is_causal=True)[0])
    mask = integration.mask(2, LENGTH, LENGTH, attention_mask=ones.bool())
    with pytest.raises(ValueError, match="attention_mask: expected a padding mask"):
        flash._flash_attention_forward(q, k, v, mask, **options)


def test_errors_of_a_device_are_not_hidden(monkeypatch: pytest.MonkeyPatch, rng: torch.Generator) -> None:
    """They are raised as they come, and nothing is tried again."""

    def fails(*args: Any) -> None:
        raise RuntimeError("flash_cute: CUDA could not launch the forward: cudaErrorIllegalAddress")

    monkeypatch.setattr(_ops, "heads_fwd", fails)
    monkeypatch.setattr(integration, "_general", lambda *args: pytest.fail())
    x = torch.randn(1, 2, 4, 8, generator=rng)
    with pytest.raises(RuntimeError, match="cudaErrorIllegalAddress"):
        integration.attention(torch.nn.Module(), x, x, x, None)


def eager_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """(B, Nq, Hq, Dv), of `seen` (B or 1, 1, Nq, Nk); rows that see nothing are 0."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1).nan_to_num(0) @ v).transpose(1, 2)


@pytest.mark.parametrize("pad", ["none", "left", "inner"])
@pytest.mark.parametrize("window", [None, 4])
def test_images_within_text(pad: str, window: int | None, rng: torch.Generator) -> None:
    """As Gemma 3 states them: causal or sliding text, or two tokens of one image; in one mask for all layers."""
    masking = transformers.masking_utils
    blocks = torch.tensor(
        [[-1, 0, 0, 0, 0, 0, -1, -1, 1, 1, 1, 1, -1, -1], [0, 0, 0, -1, -1, -1, -1, 1, 1, 1, 1, 1, 1, 1]]
    )
    causal = masking.causal_mask_function if window is None else masking.sliding_window_causal_mask_function(window)

    def image(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return (blocks[b, i] == blocks[b, j]) & (blocks[b, i] >= 0)

    tokens = mask_of(pad).bool() if pad != "none" else None
    function = masking.or_masks(causal, image)
    mask = integration.mask(
        2, LENGTH, LENGTH, mask_function=function, attention_mask=tokens, allow_is_causal_skip=False
    )
    assert mask is not None and mask.shape[3] == 2
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    seen = (j <= i) & (i - j < (window or LENGTH)) | (blocks[:, :, None] == blocks[:, None]) & (blocks[:, :, None] >= 0)
    seen = seen[:, None] & (torch.ones(2, LENGTH).bool() if tokens is None else tokens)[:, None, None]
    q = torch.randn(2, 4, LENGTH, 8, generator=rng, requires_grad=True)
    k, v = (torch.randn(2, 2, LENGTH, 8, generator=rng, requires_grad=True) for _ in range(2))
    expected = eager_attention(q, k, v, seen)
    flow = torch.randn(expected.shape, generator=rng)
    for given in (mask, mask.clone()):  # what is kept with a mask may get lost
        out, _ = integration.attention(torch.nn.Module(), q, k, v, given, is_causal=True)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        gradients = torch.autograd.grad(out, (q, k, v), flow)
        torch.testing.assert_close(gradients, torch.autograd.grad(expected, (q, k, v), flow, retain_graph=True))


def test_a_boolean_matrix_of_a_user(rng: torch.Generator) -> None:
    """It says all, whatever a layer says; it is read once by all layers, and again when it has changed."""
    q, k, v = (torch.randn(2, 2, LENGTH, 8, generator=rng) for _ in range(3))
    seen = torch.ones(2, 1, LENGTH, LENGTH).tril().bool()
    seen[1, 0, 5:, 2:4] = False
    layer = torch.nn.Module()
    for _ in range(2):
        out, _ = integration.attention(layer, q, k, v, seen, sliding_window=3, is_causal=True)
        torch.testing.assert_close(out, eager_attention(q, k, v, seen), atol=1e-5, rtol=1e-5)
        seen[0, 0, 7:, 0] = False
    stripes = (torch.arange(LENGTH) % 2 == 0).view(1, 1, LENGTH, 1).expand(1, 1, LENGTH, LENGTH)
    for _ in range(2):  # seven intervals: the matrix
        out, _ = integration.attention(layer, q, k, v, stripes, is_causal=True)
        torch.testing.assert_close(out, eager_attention(q, k, v, stripes), atol=1e-5, rtol=1e-5)
        stripes = stripes.clone()
        stripes[0, 0, 4] = False
    by_query_head = torch.rand(2, 4, LENGTH, LENGTH, generator=rng) < 0.5
    grouped = torch.randn(2, 4, LENGTH, 8, generator=rng)
    with pytest.raises(ValueError, match="attention_mask: expected one mask for the 2 query heads of a key head, got"):
        integration.attention(layer, grouped, k, v, by_query_head)
    by_query_head = by_query_head[:, ::2].repeat_interleave(2, 1)
    out, _ = integration.attention(layer, grouped, k, v, by_query_head)
    torch.testing.assert_close(out, eager_attention(grouped, k, v, by_query_head), atol=1e-5, rtol=1e-5)
    with pytest.raises(
        ValueError, match=r"attention_mask: expected \(2 or 1, heads or 1, 14, 14\), got \(1, 1, 3, 14\)"
    ):
        integration.attention(layer, q, k, v, stripes[:, :, :3])


@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_a_boolean_matrix_in_one_graph(rng: torch.Generator) -> None:
    """Nothing is read: the matrix is the mask, with other contents in each call."""
    layer = torch.nn.Module()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return integration.attention(layer, q, k, v, seen)[0]

    torch.compiler.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    q, k, v = (torch.randn(2, heads, LENGTH, 8, generator=rng) for heads in (4, 2, 2))
    for _ in range(2):
        seen = torch.rand(2, 1, LENGTH, LENGTH, generator=rng) < 0.5
        torch.testing.assert_close(compiled(q, k, v, seen), eager_attention(q, k, v, seen), atol=1e-5, rtol=1e-5)
    torch.compiler.reset()

    class Layer(torch.nn.Module):
        forward = staticmethod(attend)

    by_query_head = seen.expand(2, 4, LENGTH, LENGTH).clone()
    with pytest.raises(
        ValueError, match="attention_mask: expected 1 or 2 heads in a graph, where values are not waited"
    ):
        torch.export.export(Layer(), (q, k, v, by_query_head), strict=False)
