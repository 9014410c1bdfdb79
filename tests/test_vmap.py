"""torch.vmap is refused with a sentence: the operator takes batches as it is."""

from __future__ import annotations

import pytest
import torch
from cases import Case

import flash_cute


@pytest.mark.filterwarnings("error")
def test_refused(device: str, rng: torch.Generator) -> None:
    q, k, v = (x.expand(3, *x.shape) for x in Case(16, 5, 7).inputs(device, rng))
    with pytest.raises((RuntimeError, NotImplementedError), match="vmap"):
        torch.vmap(flash_cute.fwd)(q, k, v)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("operator", ["fwd", "_fwd"])
def test_operator_refused(device: str, operator: str, rng: torch.Generator) -> None:
    q, k, v = (x.expand(3, *x.shape) for x in Case(16, 5, 7).inputs(device, rng))
    call = getattr(torch.ops.flash_cute, operator)
    with pytest.raises((RuntimeError, NotImplementedError), match="vmap"):
        torch.vmap(lambda *x: call(*x, "none", None, "auto"))(q, k, v)
