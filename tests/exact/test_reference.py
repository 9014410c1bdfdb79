"""The yardstick itself: it compares tensors of the right shapes alone, and finds what is wrong with them."""

from __future__ import annotations

import pytest
import torch
from cases import Case

import flash_cute
from flash_cute import reference

CASE = Case(16, 20, 33, batch=2, heads_q=4, head_dim_v=24, dtype=torch.float32)


def test_forward(rng: torch.Generator) -> None:
    q, k, v = CASE.inputs("cpu", rng)
    out, lse = flash_cute.fwd(q, k, v, True)
    assert reference.compare(out, lse, q, k, v, True).ok
    assert not reference.compare(out + 0.01, lse, q, k, v, True).ok
    assert not reference.compare(out, lse + 0.01, q, k, v, True).ok
    # Each would broadcast.
    for name, given in (("out", (out[:1], lse)), ("out", (out[:, :, :1], lse)), ("out", (out[0], lse))):
        with pytest.raises(ValueError, match=rf"^flash_cute: {name}: expected the shape \(2, 4, 20, 24\), got \("):
            reference.compare(*given, q, k, v, True)
    for short in (lse[:1], lse[..., :1], lse[0]):
        with pytest.raises(ValueError, match=r"^flash_cute: lse: expected the shape \(2, 4, 20\), got \("):
            reference.compare(out, short, q, k, v, True)


def test_gradients(rng: torch.Generator) -> None:
    q, k, v = CASE.inputs("cpu", rng)
    dout, _ = CASE.flow("cpu", rng)
    sinks = torch.randn(4, generator=rng)
    out, lse = flash_cute.fwd(q, k, v, sinks=sinks)
    given = flash_cute.bwd(dout, q, k, v, out, lse, sinks=sinks)
    assert reference.compare_gradients(given, dout, q, k, v, sinks=sinks).ok
    for i, name in enumerate(("dq", "dk", "dv", "dsinks")):
        others = [x + 0.1 if j == i else x for j, x in enumerate(given)]
        assert not reference.compare_gradients(tuple(others), dout, q, k, v, sinks=sinks).ok
        others[i] = given[i][:1]
        with pytest.raises(ValueError, match=rf"^flash_cute: {name}: expected the shape \("):
            reference.compare_gradients(tuple(others), dout, q, k, v, sinks=sinks)
    with pytest.raises(ValueError, match=r"^flash_cute: dout: expected the shape \(2, 4, 20, 24\), got \("):
        reference.compare_gradients(given, dout[:1], q, k, v, sinks=sinks)
    with pytest.raises(ValueError, match=r"^flash_cute: given: expected dq, dk, dv, got 4 tensors"):
        reference.compare_gradients(given, dout, q, k, v)
