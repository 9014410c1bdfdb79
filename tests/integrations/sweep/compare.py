"""Outputs of a model as named tensors, and the difference of two of them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .inputs import BATCH, Inputs
from .rounding import Half

# Relative, in float32.
TOLERANCE = 1e-4
TOLERANCE_OF_GRADIENTS = 5e-3
# Relative, where flash_cute's attention computes in float16: two spacings, beside three times what eager errs then.
TOLERANCE_OF_HALF = 2e-3
# Of gradients. Where a row's weights are nearly equal, dP minus its mean is a small difference, and flash attention has
# the mean from the output as float16 keeps it: up to 0.01 in cross-attention, on the CPU and on a GPU.
TOLERANCE_OF_HALF_GRADIENTS = 1.5e-2
LEFT_OUT = ("past_key_values", "attentions", "router_logits")  # caches: what they hold is seen in later tokens
Values = dict[str, Tensor]


def values_of(output: Any, inputs: Inputs) -> Values:
    """All floating tensors of an output; of sequences with padding, those tokens that count."""
    found: Values = {}
    _collect("out", output, found)
    if inputs.part < 1:
        targets = inputs.kept_targets
        if targets is not None:
            found = {n: x[targets.to(x.device)] if x.shape[:2] == targets.shape else x for n, x in found.items()}
        return {n: y for name, x in found.items() for n, y in _begin(name, x, inputs.part).items()} or found
    if inputs.kept is None and inputs.kept_targets is None:
        return found
    result: Values = {}
    for name, x in found.items():
        source = inputs.kept_targets is None or name.startswith("out.encoder")
        mask = inputs.kept if source else inputs.kept_targets
        if mask is not None and x.shape[:2] == mask.shape:
            result[name] = x[mask.to(x.device)]
    # What has another shape may be made of padding, but for that of the items that have none: all but the first.
    return result or {name: x[len(x) // BATCH :] for name, x in found.items() if len(x) % BATCH == 0}


def _begin(name: str, x: Tensor, part: float) -> Values:
    """Of sequences made of padded audio: the first item's frames that hold none of the padding, and the other items."""
    if x.dim() < 3 or x.shape[0] != BATCH:
        return {name: x} if x.dim() == 2 and x.shape[0] > BATCH else {}  # chosen tokens of targets
    return {f"{name}[0]": x[0, : max(int(x.shape[1] * part) - 2, 1)], f"{name}[1:]": x[1:]}


def _collect(name: str, value: Any, found: Values) -> None:
    if any(x in name for x in LEFT_OUT):
        return
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            found[name] = value
    elif isinstance(value, dict):
        for key, x in value.items():
            _collect(f"{name}.{key}", x, found)
    elif isinstance(value, (list, tuple)):
        for i, x in enumerate(value):
            _collect(f"{name}.{i}", x, found)


def errors(ours: Values, expected: Values) -> dict[str, float]:
    """The largest difference of each tensor, relative to its largest value: "tensor: what is wrong with it" if none is.

    Of what was generated those of logits up to the first step whose tokens differ, or of the scores of beams: tokens
    whose logits are equal but for rounding may be either.
    """
    if "tokens" not in expected:
        return _errors(ours, expected)
    if ours["tokens"].shape != expected["tokens"].shape:
        return {f"tokens: {tuple(ours['tokens'].shape)}, not {tuple(expected['tokens'].shape)}": math.inf}
    other = (ours["tokens"] != expected["tokens"]).any(0).nonzero()
    last = int(other[0, 0]) if len(other) else ours["tokens"].shape[1]
    kept = [n for n in expected if n == "scores" or (n.startswith("logits.") and int(n.split(".")[1]) <= last)]
    return _errors({n: ours[n] for n in kept if n in ours}, {n: expected[n] for n in kept})


def _errors(ours: Values, expected: Values) -> dict[str, float]:
    found: dict[str, float] = {}
    # What is nothing but rounding, as gradients of a key's bias are, is measured by the largest of all tensors. In
    # float16 there is more of it: the backward reads out as it was rounded, which eager's never sees (numerics.py).
    share = 1e-1 if Half.on else 1e-2
    largest = max((x.abs().max().item() for x in expected.values() if x.numel()), default=0.0)
    for name, x in expected.items():
        if name not in ours or ours[name].shape != x.shape:
            given = tuple(ours[name].shape) if name in ours else "absent"
            return {f"{name}: {given}, not {tuple(x.shape)}": math.inf}
        if not x.numel():
            continue
        a, b = ours[name].double(), x.double()
        same = (a == b) | (a.isnan() & b.isnan())
        error = torch.where(same, 0.0, (a - b).abs()).max().item()
        relative = error / max(x.abs().max().item(), share * largest, 1e-30)
        found[name] = math.inf if math.isnan(relative) else relative
    return found


def largest(found: dict[str, float]) -> tuple[float, str]:
    """The largest of some errors, and the tensor's name."""
    return max(((error, name) for name, error in found.items()), default=(0.0, ""), key=lambda x: x[0])


def difference(ours: Values, expected: Values) -> tuple[float, str]:
    """The largest difference of a tensor, relative to its largest value, and the tensor's name."""
    return largest(errors(ours, expected))
