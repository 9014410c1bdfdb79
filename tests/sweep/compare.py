"""Outputs of a model as named tensors, and the difference of two of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .inputs import BATCH, Inputs

TOLERANCE, TOLERANCE_OF_GRADIENTS = 1e-4, 1e-3
LEFT_OUT = ("past_key_values", "attentions", "router_logits")  # caches: what they hold is seen in later tokens
Values = dict[str, Tensor]


def values_of(output: Any, inputs: Inputs) -> Values:
    """All floating tensors of an output; of sequences with padding, those tokens that count."""
    found: Values = {}
    _collect("out", output, found)
    if inputs.part < 1:
        return {n: y for name, x in found.items() for n, y in _begin(name, x, inputs.part).items()} or found
    if inputs.kept is None and inputs.kept_targets is None:
        return found
    result: Values = {}
    for name, x in found.items():
        source = inputs.kept_targets is None or name.startswith("out.encoder")
        mask = inputs.kept if source else inputs.kept_targets
        if mask is not None and x.shape[:2] == mask.shape:
            result[name] = x[mask.to(x.device)]
    return result or found


def _begin(name: str, x: Tensor, part: float) -> Values:
    """Of sequences made of padded audio: the first item's frames that hold none of the padding, and the other items."""
    if x.dim() < 3 or x.shape[0] != BATCH:
        return {}
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


def difference(ours: Values, expected: Values) -> tuple[float, str]:
    """The largest difference of a tensor, relative to its largest value, and the tensor's name."""
    worst, where = 0.0, ""
    largest = max((x.abs().max().item() for x in expected.values() if x.numel()), default=0.0)
    for name, x in expected.items():
        if name not in ours or ours[name].shape != x.shape:
            return float("inf"), f"{name}: {tuple(ours[name].shape) if name in ours else 'absent'}, not {tuple(x.shape)}"
        if not x.numel():
            continue
        a, b = ours[name].double(), x.double()
        same = (a == b) | (a.isnan() & b.isnan())
        error = torch.where(same, 0.0, (a - b).abs()).max().item()
        # What is nothing but rounding, as gradients of a key's bias are, is measured by the largest of all tensors.
        relative = error / max(x.abs().max().item(), 1e-2 * largest, 1e-30)
        if not relative <= worst:
            worst, where = relative, name
    return worst, where
