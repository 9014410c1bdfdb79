"""q, k and v of a trained model's layers, of which the errors of float8 are measured: `fp8_errors.py --trained`.

The model is that of examples/train_gpt.py, trained for a while on its text when it is first asked for, so that nothing
of it is stored: on a GPU its full size, 6 layers of 768 columns and 2,048 bytes of context; on a CPU a small one.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections import deque
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch

from bench.workloads import Inputs

STEPS = 200
CPU_STEPS = 60
CPU_CONTEXT = 256
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "train_gpt.py"


def layers(head_dim: int, device: torch.device) -> list[Inputs]:
    """Of each layer q (1, H, N, D), k and v (1, Hkv, N, D) in float32, in the last step of training."""
    return _trained(head_dim, str(device))


@functools.cache
def _trained(head_dim: int, device: str) -> list[Inputs]:
    example = _example()
    if device.startswith("cuda"):
        config = replace(example.full_size(head_dim), steps=STEPS)
    else:
        config = replace(example.small(head_dim), steps=CPU_STEPS, context=CPU_CONTEXT)
    seen: deque[Inputs] = deque(maxlen=config.layers)

    def watching(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(x[:1].detach().float() for x in (q, k, v)))
        out: torch.Tensor = example.sdpa_attention(q, k, v)
        return out

    example.ATTENTION["watching"] = watching
    text = torch.frombuffer(bytearray(example.read_text()), dtype=torch.uint8).to(device)
    with torch.enable_grad():
        example.train(config, "watching", 0, text, show_progress=False)
    return list(seen)


@functools.cache
def _example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for its dataclasses
    spec.loader.exec_module(module)
    return module
