"""A model of hf_models by flash_cute, against eager and the oracle: its logits and its gradients."""

from __future__ import annotations

import copy
from typing import Any

import hf_models
import pytest
import torch

EPS = torch.finfo(torch.float32).eps
LENGTH = 14
Result = tuple[torch.Tensor, list[torch.Tensor]]


def padding(kind: str, batch: int = 2) -> torch.Tensor | None:
    """(batch, LENGTH) ones where there is a token."""
    if kind == "none":
        return None
    ones = torch.ones(batch, LENGTH, dtype=torch.long)
    ones[0, slice(0, 4) if kind == "left" else slice(LENGTH - 4, LENGTH)] = 0
    return ones


def run(model: Any, implementation: str, inputs: dict[str, Any], kept: torch.Tensor, dtype: torch.dtype) -> Result:
    """Logits of the tokens that are kept, and gradients of a function of them."""
    if not model._can_set_attn_implementation():
        pytest.skip("this Transformers chooses the attention of such a model only as it is loaded")
    model.set_attn_implementation(implementation)
    assert model.config._attn_implementation == implementation
    model.zero_grad()
    inputs = {k: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for k, x in inputs.items()}
    logits = model(**inputs, use_cache=False).logits[kept]
    logits.float().square().mean().backward()
    return logits.detach(), [x.grad.clone() for x in model.parameters() if x.grad is not None]


def assert_close(ours: torch.Tensor, eager: torch.Tensor, true: torch.Tensor) -> None:
    """At most twice eager's error, plus a rounding, plus 1e-5, all of the largest value (numerics.py has the rule)."""
    size = true.abs().max().item()
    error, allowed = (ours - true).abs().max().item(), (eager - true).abs().max().item()
    assert error <= 2 * allowed + (EPS + 1e-5) * max(size, 1), f"{error:.1e}, eager {allowed:.1e}, of {size:.1e}"


def assert_like_eager(model: Any, inputs: dict[str, Any], kept: torch.Tensor) -> None:
    ours = run(model, "flash_cute", inputs, kept, torch.float32)
    eager = run(model, "eager", inputs, kept, torch.float32)
    true = run(copy.deepcopy(model).double(), "oracle", inputs, kept, torch.float64)
    assert len(ours[1]) == len(eager[1]) > 0
    for a, b, c in zip([ours[0], *ours[1]], [eager[0], *eager[1]], [true[0], *true[1]], strict=True):
        assert_close(a, b, c)


def tokens(rng: torch.Generator, batch: int, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, hf_models.TOKENS, (batch, length), generator=rng)
