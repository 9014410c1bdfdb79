"""Batches of the sizes and layouts that the layers of Transformers' models have, and such a layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F

BATCH, ROWS, HEADS, HEADS_KV, DIM, DIM_V = 3, 20, 4, 2, 16, 24
# Of each batch item's rows: what is in use. Offsets into all of them, and used rows, as `padded` makes them.
OFFSETS = (0, 20, 40, 60)
USED = (20, 13, 0)
LAYOUTS = ["rows", "rows of more heads", "heads", "gaps", "columns"]


class Layer(torch.nn.Module):
    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.is_causal, self.layer_idx = True, layer_idx


def random_tensor(device: str, rng: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=rng).to(device, torch.float16 if device == "cuda" else torch.float32)


def batch(device: str, rng: torch.Generator, rows: int = ROWS) -> list[torch.Tensor]:
    """q, k and v (B, H, N, D), rows first in memory."""
    sizes = ((rows, HEADS, DIM), (ROWS, HEADS_KV, DIM), (ROWS, HEADS_KV, DIM_V))
    return [random_tensor(device, rng, BATCH, *size).transpose(1, 2) for size in sizes]


def int32(device: str, *numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def in_memory(x: torch.Tensor, layout: str) -> torch.Tensor:
    """(B, H, N, D) in other strides; those of "heads" and "gaps" are copied, and "columns" once more by the kernel."""
    if layout == "heads":
        return x.contiguous()
    if layout == "gaps":  # between batch items
        return F.pad(x.transpose(1, 2), (0, 0, 0, 0, 1, 2))[:, 1:-2].transpose(1, 2)
    if layout == "rows of more heads":
        return F.pad(x.transpose(1, 2), (0, 0, 1, 1))[:, :, 1:-1].transpose(1, 2)
    return x.mT.contiguous().mT if layout == "columns" else x
