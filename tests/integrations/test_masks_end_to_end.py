"""Whole models with masks, against what eager attention computes without them: a tree of answers to a prompt, a padded
encoder behind PyTorch's function. Results and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.4")

import hf_models  # noqa: E402 (needs transformers)

import flash_cute.integrations.transformers as integration  # noqa: E402
from flash_cute import Mask  # noqa: E402
from flash_cute.integrations import sdpa  # noqa: E402

pytestmark = pytest.mark.usefixtures("sdpa_counters")

PROMPT, ANSWERS = 9, (5, 1, 7)


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    integration.register()
    hf_models.register_oracle()


def by(model: Any, implementation: str) -> Any:
    model.set_attn_implementation(implementation)
    return model


def gradients_of(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    parameters = {name: x for name, x in model.named_parameters() if x.requires_grad}
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {name: x for name, x in zip(parameters, found, strict=True) if x is not None}


def assert_all_close(given: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert given.keys() == expected.keys() and given
    for name, x in expected.items():
        bound = 2e-4 * max(1.0, x.abs().max().item())
        torch.testing.assert_close(given[name], x, atol=bound, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_step_over_a_tree_of_answers(name: str, rng: torch.Generator) -> None:
    """The prompt is computed once; the answers do not see each other, and each begins behind the prompt."""
    prompt = torch.randint(3, hf_models.TOKENS, (1, PROMPT), generator=rng)
    answers = [torch.randint(3, hf_models.TOKENS, (1, n), generator=rng) for n in ANSWERS]

    model = by(hf_models.build(name), "eager")
    expected, loss = [], torch.zeros(())
    for answer in answers:
        logits = model(input_ids=torch.cat((prompt, answer), 1)).logits[:, PROMPT:]
        expected.append(logits)
        loss = loss + logits.square().sum()
    of_eager = gradients_of(model, loss)

    by(model, "flash_cute")
    tokens = torch.cat((prompt, *answers), 1)
    positions = torch.cat([torch.arange(PROMPT), *(PROMPT + torch.arange(n) for n in ANSWERS)]).unsqueeze(0)
    tree = Mask.shared_prefix(PROMPT, list(ANSWERS)).dense(tokens.shape[1], causal=True)
    logits = model(input_ids=tokens, position_ids=positions, attention_mask=tree, use_cache=False).logits[:, PROMPT:]
    torch.testing.assert_close(logits, torch.cat(expected, 1), atol=1e-4, rtol=1e-4)
    assert_all_close(gradients_of(model, logits.square().sum()), of_eager)


@pytest.mark.parametrize("side", ["right", "left", "between"])
def test_a_padded_encoder_behind_pytorchs_function(side: str, rng: torch.Generator) -> None:
    """BERT with `sdpa` attention, which calls PyTorch's function, and that function served by flash_cute."""
    length, numbers = 17, torch.tensor([17, 11, 4])
    index = torch.arange(length)
    mask = (index < numbers.unsqueeze(1)) if side == "right" else (index >= length - numbers.unsqueeze(1))
    if side == "between":
        mask = (torch.rand(3, length, generator=rng) < 0.6) | (index == 0)
    tokens = torch.randint(3, hf_models.TOKENS, (3, length), generator=rng)
    inputs = {"input_ids": tokens, "attention_mask": mask.long()}

    model = by(hf_models.build("bert"), "eager")
    expected = model(**inputs)[0][mask]
    of_eager = gradients_of(model, expected.square().sum())
    by(model, "sdpa")
    with sdpa.enable(devices=("cpu", "cuda")):
        out = model(**inputs)[0][mask]
        gradients = gradients_of(model, out.square().sum())
    report = sdpa.report()
    assert sum(report.served.values()) == 2 and not report.passed_on, report  # a call a layer
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    assert_all_close(gradients, of_eager)
