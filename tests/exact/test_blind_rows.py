"""Rows that see no key: whatever their q, dout and dlse hold, their gradients are 0 and those of k and v do not change.

A loss that is masked to 0 has such rows, with gradients of NaN where it divides 0 by 0.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import Backward, Case, Causal, Window
from checks import EVERY_FAMILY, head_dims
from numerics import assert_gradients_match, visible
from packed import Packed, assert_packed_gradients, make_backward, offsets

pytestmark = pytest.mark.kernel

# (rows, keys, causal, window): rows before the first one that sees a key, rows behind the last one, both.
MASKS: list[tuple[int, int, Causal, Window | None]] = [
    (300, 113, True, None),
    (203, 3, True, None),
    (300, 130, False, (20, 10)),
    (300, 70, "top_left", (20, 0)),
    (300, 40, False, (None, 0)),
    (129, 128, True, None),
]


def poison(x: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """A copy with NaN and inf by turns in the rows `where` of dim -2."""
    poisoned = x.clone()
    poisoned[..., where, :] = math.nan
    poisoned[..., where.nonzero().flatten()[::3], :] = math.inf
    return poisoned


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@EVERY_FAMILY
def test_dense(
    device: str,
    head_dim: int,
    mask: tuple[int, int, Causal, Window | None],
    deterministic: bool,
    bwd: Backward,
    rng: torch.Generator,
) -> None:
    len_q, len_k, causal, window = mask
    case = Case(head_dim, len_q, len_k, causal, torch.bfloat16 if device == "cuda" else torch.float32, heads_q=4)
    q, k, v = case.inputs(device, rng)
    dout, dlse = case.flow(device, rng)
    blind = ~visible(len_q, len_k, causal, device, window).any(-1)
    assert blind.any()
    given = bwd(
        poison(dout, blind),
        poison(q, blind),
        k,
        v,
        causal,
        window=window,
        dlse=poison(dlse[..., None], blind)[..., 0],
        deterministic=deterministic,
    )
    assert (given[0][:, :, blind] == 0).all()
    assert_gradients_match(given, dout, q, k, v, causal, window=window, dlse=dlse)


@pytest.mark.parametrize(
    "options", [{"softcap": 5.0}, {"alibi_slopes": (0.5, 0.25)}, {"sinks": (0.5, 1.0)}], ids=lambda x: next(iter(x))
)
@pytest.mark.parametrize("causal", [True, "top_left"], ids=str)
@head_dims(64, 128, 256, 512)
def test_dense_with_options(
    device: str, head_dim: int, causal: Causal, options: dict[str, Any], bwd: Backward, rng: torch.Generator
) -> None:
    window = (50, 0)
    options = {name: torch.tensor(x, device=device) if isinstance(x, tuple) else x for name, x in options.items()}
    q, k, v = Case(head_dim, 300, 100, dtype=torch.float16 if device == "cuda" else torch.float32).inputs(device, rng)
    dout = torch.randn(q.shape, generator=rng).to(q)
    blind = ~visible(300, 100, causal, device, window).any(-1)
    given = bwd(poison(dout, blind), poison(q, blind), k, v, causal, window=window, **options)
    assert (given[0][:, :, blind] == 0).all()
    assert_gradients_match(given, dout, q, k, v, causal, window=window, **options)


@pytest.mark.parametrize("used", [False, True], ids=["all", "seqused"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("window", [(None, None), (30, 5)], ids=str)
@EVERY_FAMILY
def test_packed(
    device: str,
    head_dim: int,
    window: Window,
    deterministic: bool,
    used: bool,
    backend: str | None,
    rng: torch.Generator,
) -> None:
    causal = window == (None, None)
    lengths = ((300, 113), (5, 9), (70, 0), (1, 1), (200, 3), (130, 129), (64, 200))
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rows, keys = (sum(side) for side in zip(*lengths, strict=True))
    q, dout = (torch.randn(rows, 4, head_dim, generator=rng).to(device, dtype) for _ in range(2))
    k, v = (torch.randn(keys, 2, head_dim, generator=rng).to(device, dtype) for _ in range(2))
    dlse = torch.randn(4, rows, generator=rng).to(device)
    of_q, of_k = (offsets(side, device) for side in zip(*lengths, strict=True))
    fewer = {
        "seqused_q": torch.tensor([250, 5, 70, 1, 10, 129, 1], dtype=torch.int32, device=device),
        "seqused_k": torch.tensor([100, 2, 0, 1, 3, 65, 200], dtype=torch.int32, device=device),
    }
    packed = Packed(q, k, v, of_q, of_k, **(fewer if used else {}))
    blind = torch.ones(rows, dtype=torch.bool, device=device)
    for row, key in packed.sequences():
        seen = visible(row.stop - row.start, key.stop - key.start, causal, device, window)
        blind[row] = ~seen.any(-1)
    poisoned = packed.replace(q=poison(q.transpose(0, 1), blind).transpose(0, 1).contiguous())
    given = make_backward(backend)(
        poison(dout.transpose(0, 1), blind).transpose(0, 1).contiguous(),
        poisoned,
        causal,
        dlse=poison(dlse[..., None], blind)[..., 0],
        deterministic=deterministic,
        window=window,
    )
    assert (given[0][blind] == 0).all()
    assert_packed_gradients(given, dout, packed, causal, dlse=dlse, window=window)
