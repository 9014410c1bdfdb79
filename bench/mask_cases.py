"""What a problem of `bench/masks.py` is, and what is counted of it; `mask_grid.py` has the problems themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.workloads import Inputs
from flash_cute import Mask

# FlexAttention's: (batch item, head, row, key), tensors, to a tensor of booleans.
MaskMod = Callable[[Any, Any, Any, Any], Any]

GROUPS = ("bands", "published", "grpo", "padding", "constructors", "blocks", "host", "kernels")
BAND, PACKED, REPLICATED = "flash_cute:band", "flash_cute:packed", "flash_cute:replicated"
UNPADDED, DENSE, CAUSAL = "flash_cute:unpadded", "flash_cute:dense", "flash_cute:causal"
SDPA, FLEX, FA3 = "sdpa", "flex_attention", "fa3"
PEERS = (BAND, PACKED, REPLICATED, UNPADDED, DENSE, CAUSAL, SDPA, FLEX, FA3)
# Providers that compute something else: their rate is compared, not their time, and not their results.
OTHER_PROBLEMS = (DENSE, CAUSAL, FA3)


@dataclass(frozen=True)
class Case:
    """One masked problem.

    Attributes:
        causal: what the call passes beside the mask.
        make_mask: the mask, on a device.
        make_mask_mod: the same, `causal` in it, as who writes for FlexAttention would say it.
        parts: lengths that a packed call has: of the documents of a batch item, of the answers behind the prefix, or of
            the real tokens of each batch item.
        prefix: the tokens that all answers see.
        through_sdpa: whether ours is `flash_cute.integrations.sdpa` with a boolean mask.
        published: TFLOP/s of others on such a problem, forward and backward.
        seen: pairs of a row and a key that sees it, of all batch items; 0: counted from the mask's intervals.
    """

    group: str
    name: str
    B: int
    H: int
    Hkv: int
    N: int
    D: int
    causal: bool
    make_mask: Callable[[torch.device], Mask]
    peers: tuple[str, ...]
    make_mask_mod: Callable[[torch.device], MaskMod] | None = None
    parts: tuple[int, ...] = ()
    prefix: int = 0
    directions: tuple[str, ...] = ("fwd", "bwd")
    through_sdpa: bool = False
    published: tuple[float, float] | None = None
    seen: int = 0

    @property
    def label(self) -> str:
        return f"{self.group}: {self.name}, B {self.B}, {self.H}/{self.Hkv} heads, N {self.N}, D {self.D}"

    def pairs(self, mask: Mask) -> int:
        return self.seen or seen_pairs(mask, self.B, self.N, self.causal)

    def real(self, device: torch.device) -> torch.Tensor:
        """bool (B, N): which tokens are no padding."""
        if not self.through_sdpa:
            return torch.ones(self.B, self.N, dtype=torch.bool, device=device)
        lengths = torch.tensor(self.parts, device=device)
        return torch.arange(self.N, device=device) < lengths[:, None]

    def make_inputs(self, device: torch.device, dtype: torch.dtype, seed: int) -> Inputs:
        """q, k, v and dout, (B, heads, N, D); dout is 0 in rows of padding, as of a loss that leaves them out."""
        generator = torch.Generator(device).manual_seed(seed)
        heads = (self.H, self.Hkv, self.Hkv, self.H)
        q, k, v, dout = (
            torch.randn(self.B, h, self.N, self.D, generator=generator, device=device, dtype=dtype) for h in heads
        )
        return q, k, v, dout * self.real(device)[:, None, :, None]


def flops(pairs: int, heads: int, head_dim: int, direction: str) -> float:
    """Of the products of so many pairs of a row and a key: 2 forward, 5 backward."""
    products = {"fwd": 2, "bwd": 5, "step": 7}[direction]
    return 2.0 * products * pairs * heads * head_dim


def seen_pairs(mask: Mask, batch: int, rows: int, causal: bool) -> int:
    """How many pairs of a row and a key a mask of one head leaves, in all batch items; it waits for the device."""
    keys = mask.first_row.shape[2]
    least = (
        torch.arange(keys, device=mask.first_row.device) if causal else torch.zeros((), device=mask.first_row.device)
    )

    def clamped(first: torch.Tensor, limit: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.maximum(first.double(), least.double()), limit.double().clamp(max=rows)

    def length(first: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
        return (limit - first).clamp(min=0)

    begin, end = clamped(mask.first_row, mask.row_limit)
    total = length(begin, end)
    if mask.first_row_2 is not None and mask.row_limit_2 is not None:
        begin_2, end_2 = clamped(mask.first_row_2, mask.row_limit_2)
        both = length(torch.maximum(begin, begin_2), torch.minimum(end, end_2))
        total = total + length(begin_2, end_2) - both
    if total.shape[1] != 1:
        raise ValueError("a mask with heads of its own is not counted")
    return int(total.sum()) * (batch if total.shape[0] == 1 else 1)


def ids_of(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """0 as often as the first length says, then 1 and so on."""
    numbers = torch.tensor(lengths, device=device)
    return torch.repeat_interleave(torch.arange(len(lengths), device=device), numbers)


def tree_rows(depth: int, unit: int, root: int) -> tuple[list[int], list[int]]:
    """tin and tout of each token of a binary tree: nodes of `unit` tokens, the root of `root`, children behind each
    other."""
    tin: list[int] = []
    tout: list[int] = []

    def visit(level: int, tokens: int) -> None:
        begin = len(tin)
        tin.extend([begin] * tokens)
        tout.extend([0] * tokens)
        if level < depth:
            visit(level + 1, unit)
            visit(level + 1, unit)
        tout[begin : begin + tokens] = [len(tin)] * tokens

    visit(1, root)
    return tin, tout


def without(case: Case, peers: Sequence[str]) -> Case:
    """The case with fewer peers."""
    return replace(case, peers=tuple(name for name in case.peers if name not in peers))
