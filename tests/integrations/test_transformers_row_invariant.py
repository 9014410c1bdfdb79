"""Transformers' models by "flash_cute_row_invariant": a token has the same bits in a forward and while generating."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from numerics import same_bits

import flash_cute

transformers = pytest.importorskip("transformers", minversion="5.4")

import flash_cute.integrations.transformers as integration  # noqa: E402 (needs transformers)

NAMES = ("flash_cute_row_invariant", "flash_cute_2_row_invariant")


def llama(name: str) -> Any:
    integration.register()
    sizes = {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 50}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, **heads, max_position_embeddings=8192)
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation=name).to(torch.bfloat16).eval()


@pytest.mark.parametrize("name", NAMES)
def test_the_cpu_refuses(name: str, rng: torch.Generator) -> None:
    """Each name asks for row invariance, which the CPU does not have."""
    model = llama(name)
    with pytest.raises(ValueError, match=r"^flash_cute: row_invariant: expected False for CPU tensors, got True$"):
        model(torch.randint(50, (1, 20), generator=rng))
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :5] = 0
    with pytest.raises(ValueError, match=r"^flash_cute: row_invariant: expected False for CPU tensors, got True$"):
        model(torch.randint(50, (2, 20), generator=rng), attention_mask=mask)


def test_refused_at_load() -> None:
    integration.register()
    config = transformers.FalconConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=1, vocab_size=50)
    for name in NAMES:
        with pytest.raises(ValueError, match=f"expected 'flash_cute' for FalconForCausalLM, .*, got '{name}'"):
            transformers.FalconForCausalLM._from_config(config, attn_implementation=name)


def watch(name: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Any, Any, Any, Any]]:
    """The calls to come of layers' attention: the layer, q, k, v and out."""
    table = transformers.AttentionInterface._global_mapping
    ours, calls = table[name], []

    def watching(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any) -> Any:
        found = ours(module, query, key, value, attention_mask, **options)
        calls.append((module.layer_idx, query, key, value, found[0]))
        return found

    monkeypatch.setitem(table, name, watching)
    return calls


@pytest.mark.cuda
@pytest.mark.parametrize("pad", [0, 9])
@torch.no_grad()
def test_generation_is_the_forward(pad: int, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a layer computed of a token while generating is, bit for bit, what it computes of the whole sequence.

    The other layers' products depend on the batch, so that each layer's q, k and v are those of generation.
    """
    if not flash_cute.backends()["sm90"]:
        pytest.skip("row-invariant kernels are of backend sm90")
    name, prompt, new = NAMES[0], 2300, 6
    model = llama(name).cuda()
    ids = torch.randint(1, 50, (2, prompt), generator=rng).cuda()
    mask = torch.ones_like(ids)
    mask[0, :pad] = 0
    watched = watch(name, monkeypatch)
    model.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False)
    for layer in range(2):
        calls = [call[1:] for call in watched if call[0] == layer]
        assert len(calls) == new
        q = torch.cat([call[0] for call in calls], 2)
        k, v = calls[-1][1:3]  # all of them
        generated = torch.cat([call[3] for call in calls], 1).transpose(1, 2)
        assert k.shape[2] == q.shape[2] == prompt + new - 1
        for b, first in ((0, pad), (1, 0)):
            whole = (x[b : b + 1, :, first:] for x in (q, k, v))
            trained = flash_cute.attention(*whole, True, row_invariant=True)
            assert same_bits((generated[b : b + 1, :, first:],), (trained,))
