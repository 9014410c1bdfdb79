"""Keywords that reach Transformers' attention function: served, known to change nothing, or refused."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.4")

import hf_models  # noqa: E402 (needs transformers)

import flash_cute.integrations.transformers as integration  # noqa: E402
from flash_cute.integrations._transformers_keywords import HARMLESS, REASONS  # noqa: E402

NAMED = inspect.signature(integration.attention).parameters
NOT_KNOWN = "flash_cute: {}: expected no such argument of the attention function, since .*, got {}"
LENGTH = 12


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    integration.register()


def call(x: torch.Tensor, **options: Any) -> torch.Tensor:
    return integration.attention(torch.nn.Module(), x, x, x, None, **options)[0]


def ids(rng: torch.Generator, batch: int = 2) -> torch.Tensor:
    return torch.randint(3, hf_models.TOKENS, (batch, LENGTH), generator=rng)


def padding() -> torch.Tensor:
    ones = torch.ones(2, LENGTH, dtype=torch.long)
    ones[0, :4] = 0
    return ones


def build(name: str) -> Any:
    model = hf_models.build(name)
    model.set_attn_implementation("flash_cute")
    return model


def test_a_keyword_stands_in_one_table() -> None:
    assert not HARMLESS & REASONS.keys() and not NAMED.keys() & (HARMLESS | REASONS.keys())


@pytest.mark.parametrize("name", [*REASONS, "made_up", "max_seqlen_q", "k_cache"])
def test_refused_unless_none_or_false(name: str, rng: torch.Generator) -> None:
    x = torch.randn(1, 2, 4, 8, generator=rng)
    expected = call(x)
    for value in (None, False):
        assert torch.equal(call(x, **{name: value}), expected)
    reason = REASONS.get(name)
    for value in (True, 0, torch.ones(4), "a string"):
        sentence = NOT_KNOWN.format(name, type(value).__name__)
        if reason is not None:
            sentence = re.escape(f"flash_cute: {name}: expected None, since {reason}")
        with pytest.raises(ValueError, match=f"^{sentence}$"):
            call(x, **{name: value})


def test_a_keyword_with_a_reason_is_named_first(rng: torch.Generator) -> None:
    x = torch.randn(1, 2, 4, 8, generator=rng)
    with pytest.raises(ValueError, match=r"^flash_cute: cache: expected None, since the cache of"):
        call(x, use_cache=True, read_index=[], made_up=1, cache=object())


def test_harmless_keywords_change_nothing(rng: torch.Generator) -> None:
    x = torch.randn(1, 2, 4, 8, generator=rng)
    assert torch.equal(call(x, **dict.fromkeys(HARMLESS, torch.full((1, 4), 2))), call(x))


@torch.no_grad()
def test_what_a_user_gives_a_model(rng: torch.Generator) -> None:
    """It goes through all forwards to the attention."""
    model, tokens = build("llama"), ids(rng)
    with pytest.raises(ValueError, match=NOT_KNOWN.format("made_up", "int")):
        model(tokens, made_up=1)
    logits = model(tokens, made_up=None).logits
    given = {"labels": tokens, "num_items_in_batch": torch.tensor(7), "output_router_logits": True}
    given |= {"token_type_ids": torch.ones_like(tokens), "output_hidden_states": True, "return_dict": True}
    output = model(tokens, attention_mask=torch.ones_like(tokens), **given)
    assert torch.equal(output.logits, logits)
    model.set_attn_implementation("eager")
    eager = model(tokens, **given)
    torch.testing.assert_close((output.loss, output.logits), (eager.loss, eager.logits))


def test_what_transformers_says_that_users_may_give() -> None:
    """A new Transformers with a new keyword fails here: is it harmless?"""
    from transformers.modeling_flash_attention_utils import FlashAttentionKwargs
    from transformers.utils import TransformersKwargs

    keywords = FlashAttentionKwargs.__optional_keys__ | TransformersKwargs.__optional_keys__
    assert len(keywords) >= 8
    assert keywords <= NAMED.keys() | HARMLESS | REASONS.keys()


@pytest.fixture(scope="module")
def sources() -> list[str]:
    """Of the layers and attention functions of the installed Transformers."""
    folder = Path(transformers.__file__).parent
    paths = (*folder.glob("models/*/modeling_*.py"), *folder.glob("integrations/*_attention.py"))
    return [path.read_text(encoding="utf-8") for path in paths]


CALL = re.compile(r"^( *)(?:\S.*)?attention_interface\(\n([\s\S]*?)^\1\)", re.MULTILINE)
FUNCTION = re.compile(r"^def (?:eager|sdpa|flash)_attention_forward\(\n([\s\S]*?)^\)", re.MULTILINE)


def test_what_layers_give_by_name(sources: list[str]) -> None:
    """All that is written in a call of an attention function is known."""
    calls = [arguments for text in sources for _, arguments in CALL.findall(text)]
    found = {name for x in calls for name in re.findall(r"^ *(\w+)=[^=]", x, re.MULTILINE)}
    assert len(calls) > 300 and {"scaling", "dropout", "position_ids", "s_aux", "position_bias"} <= found
    assert found <= NAMED.keys() | HARMLESS | REASONS.keys(), found - NAMED.keys() - HARMLESS - REASONS.keys()


def test_what_attention_functions_look_at(sources: list[str]) -> None:
    """None takes a keyword that is said to change nothing."""
    functions = [parameters for text in sources for parameters in FUNCTION.findall(text)]
    found = {name for x in functions for name in re.findall(r"^    (\w+):", x, re.MULTILINE)}
    assert len(functions) > 200 and {"scaling", "dropout", "softcap", "position_bias", "is_causal"} <= found
    assert not found & HARMLESS


def test_offsets_of_keys_alone(rng: torch.Generator) -> None:
    x, offsets = torch.randn(1, 2, 4, 8, generator=rng), torch.tensor([0, 1, 4])
    with pytest.raises(ValueError, match="cu_seq_lens_q: expected offsets beside those of cu_seq_lens_k, got None"):
        call(x, cu_seq_lens_k=offsets)
    with pytest.raises(ValueError, match="cu_seq_lens_k: expected offsets beside those of cu_seq_lens_q, got dict"):
        call(x, cu_seq_lens_q=offsets, cu_seq_lens_k={"full_attention": offsets})


@torch.no_grad()
def test_a_decoder_as_an_encoder(rng: torch.Generator) -> None:
    """Transformers changes the mask with `is_causal`."""
    model, tokens = build("llama"), ids(rng)
    for ones in (None, padding()):
        logits = []
        for implementation, options in (
            ("flash_cute", {"is_causal": False}),
            ("eager", {"is_causal": False}),
            ("eager", {}),
        ):
            model.set_attn_implementation(implementation)
            kept = slice(None) if ones is None else ones.bool()
            logits.append(model(tokens, attention_mask=ones, **options).logits[kept])
        torch.testing.assert_close(*logits[:2])
        assert (logits[0] - logits[2]).abs().max() > 1e-2


@torch.no_grad()
def test_an_encoder_as_a_decoder(rng: torch.Generator) -> None:
    """Its mask stays as it is: as "sdpa" where there is none, else refused, since the mask would count."""
    model, tokens = build("bert"), ids(rng)
    logits = model(tokens, is_causal=True).logits
    with pytest.raises(ValueError, match=r"is_causal: expected False, as the layer and its mask have it, .*, got True"):
        model(tokens, attention_mask=padding(), is_causal=True)
    assert torch.equal(model(tokens, is_causal=False).logits, model(tokens).logits)
    model(tokens, attention_mask=padding(), is_causal=False)
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(logits, model(tokens, is_causal=True).logits)
    assert (logits - model(tokens).logits).abs().max() > 1e-2


def test_layers_that_leave_causality_to_the_mask(rng: torch.Generator) -> None:
    """Moonshine's decoder says False of it where there is a mask; of other layers it is somebody else who does."""
    module, x = torch.nn.Module(), torch.randn(2, 2, LENGTH, 8, generator=rng)
    module.is_causal = True
    mask = integration.mask(2, LENGTH, LENGTH, attention_mask=padding().bool())
    expected = integration.attention(module, x, x, x, mask)[0]
    module.config = transformers.MoonshineConfig()
    assert torch.equal(integration.attention(module, x, x, x, mask, is_causal=False)[0], expected)
    module.config = transformers.LlamaConfig()
    with pytest.raises(ValueError, match=r"is_causal: expected True, .*, got False"):
        integration.attention(module, x, x, x, mask, is_causal=False)
    step = integration.mask(2, 1, LENGTH, LENGTH - 1, attention_mask=padding().bool())
    one_row = integration.attention(module, x[:, :, -1:], x, x, step, is_causal=False)[0]  # sees all keys in any case
    torch.testing.assert_close(one_row, expected[:, -1:])


def test_positions_of_patches_are_refused(rng: torch.Generator) -> None:
    """Rows and columns, as some versions give them to Pixtral's layers, do not say where an image ends."""
    q = torch.randn(1, 2, 6, 16, generator=rng)
    with pytest.raises(ValueError, match="position_ids: expected one position of a token"):
        call(q, is_causal=False, position_ids=torch.zeros(6, 2, dtype=torch.long))
