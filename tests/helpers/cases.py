"""The grid: which shapes, masks and dtypes the kernels are tested on.

Every kernel, whatever its architecture, is held to the same grid; lengths stand around the edges of
the tiles in use (32, 64, 128), head dims on the instances and between them.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from flash_cute.report import built_architectures, built_instances

Causal = bool | str
Window = tuple[int | None, int | None]  # left, right
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# (q, k, v, causal, **options) -> (out, lse)
Forward = Callable[..., tuple[torch.Tensor, torch.Tensor]]
# (dout, q, k, v, causal, *, dlse, deterministic, **options) -> (dq, dk, dv), with sinks also dsinks
Backward = Callable[..., tuple[torch.Tensor, ...]]

CAUSAL: tuple[Causal, ...] = (False, "bottom_right", "top_left")
CUDA_DTYPES = (torch.float16, torch.bfloat16)
CPU_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# One head dim a compiled instance, and the largest tensor that may use it.
INSTANCE_HEAD_DIMS = (32, 64, 96, 128, 192, 256)
# Every head dim that a kernel reads in place, and some that are padded to one.
NATIVE_HEAD_DIMS = tuple(range(8, 257, 8))
PADDED_HEAD_DIMS = (1, 3, 20, 33, 100, 129, 250, 255)

# (len_q, len_k)
TINY_LENGTHS = ((1, 1), (1, 64), (64, 1), (2, 3))
EDGE_LENGTHS = (
    (31, 33),
    (63, 65),
    (64, 64),
    (65, 63),
    (65, 127),
    (127, 127),
    (128, 128),
    (129, 257),
    (257, 129),
)
LONG_LENGTHS = ((113, 203), (203, 113), (1, 1023), (1023, 1024), (1024, 1023), (300, 2049))
LENGTHS = TINY_LENGTHS + EDGE_LENGTHS + LONG_LENGTHS

# Query heads, key heads.
HEADS = ((1, 1), (2, 1), (4, 4), (4, 2), (6, 2), (8, 1), (12, 3))


def mask_name(causal: Causal) -> str:
    """The operator's name of a mask: none, top_left or bottom_right."""
    if isinstance(causal, str):
        return causal
    return "bottom_right" if causal else "none"


def score(
    causal: Causal = False,
    window: Window = (None, None),
    *,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """The operators' arguments of mask and score, in the schema's order."""
    return (mask_name(causal), *window, softcap, sinks, alibi_slopes, scale)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Case:
    """One problem: shapes, mask, dtype and what modifies the scores."""

    head_dim: int
    len_q: int
    len_k: int
    causal: Causal = False
    dtype: torch.dtype = torch.float16
    batch: int = 2
    heads_q: int = 2
    heads_kv: int = 2
    head_dim_v: int | None = None  # None: head_dim
    window: Window | None = None
    softcap: float | None = None
    sinks: torch.dtype | None = None  # their dtype
    slopes: str | None = None  # "head": (Hq,), "batch": (B, Hq)

    def __str__(self) -> str:
        options = {"dv": self.head_dim_v, "cap": self.softcap, "alibi-": self.slopes}
        options["sinks-"] = self.sinks and dtype_name(self.sinks)
        options["w"] = self.window and "_".join(map(str, self.window))
        return (
            f"{dtype_name(self.dtype)}-d{self.head_dim}-{self.len_q}x{self.len_k}"
            f"-{mask_name(self.causal)}-b{self.batch}h{self.heads_q}k{self.heads_kv}"
        ) + "".join(f"-{name}{value}" for name, value in options.items() if value is not None)

    def inputs(self, device: str | torch.device, rng: torch.Generator) -> Inputs:
        """q, k, v: contiguous, standard normal."""
        q = self._normal((self.heads_q, self.len_q, self.head_dim), device, rng)
        k = self._normal((self.heads_kv, self.len_k, self.head_dim), device, rng)
        v = self._normal((self.heads_kv, self.len_k, self.head_dim_v or self.head_dim), device, rng)
        return q, k, v

    def options(self, device: str | torch.device, rng: torch.Generator) -> dict[str, Any]:
        """What the case asks for beside causal, as keyword arguments; sinks and slopes are random.

        Sinks are about as large as a row's LSE, so that neither they nor the keys have all the weight.
        """
        options: dict[str, Any] = {}
        if self.window is not None:
            options["window"] = self.window
        if self.softcap is not None:
            options["softcap"] = self.softcap
        if self.sinks is not None:
            sinks = torch.randn(self.heads_q, generator=rng) * 2 + math.log(max(1, self.len_k))
            options["sinks"] = sinks.to(device=device, dtype=self.sinks)
        if self.slopes is not None:
            shape = (self.heads_q,) if self.slopes == "head" else (self.batch, self.heads_q)
            options["alibi_slopes"] = (torch.rand(shape, generator=rng) * 0.5).to(device)
        return options

    def flow(self, device: str | torch.device, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """dout and dlse, standard normal."""
        dout = self._normal((self.heads_q, self.len_q, self.head_dim_v or self.head_dim), device, rng)
        dlse = self._normal((self.heads_q, self.len_q), device, rng)
        return dout, dlse.to(torch.float64 if self.dtype == torch.float64 else torch.float32)

    def _normal(self, shape: tuple[int, ...], device: str | torch.device, rng: torch.Generator) -> torch.Tensor:
        return torch.randn((self.batch, *shape), generator=rng).to(device=device, dtype=self.dtype)


def masks_for(len_q: int, len_k: int) -> tuple[Causal, ...]:
    """The masks that differ at these lengths: both alignments agree on a square."""
    return CAUSAL[:2] if len_q == len_k else CAUSAL


def cross(
    head_dims: Iterable[int],
    lengths: Iterable[tuple[int, int]],
    dtypes: Iterable[torch.dtype],
    **fixed: Any,
) -> Iterator[Case]:
    """Every head dim by every length by every mask that matters there by every dtype."""
    for head_dim, (len_q, len_k), dtype in itertools.product(head_dims, lengths, dtypes):
        for causal in masks_for(len_q, len_k):
            yield Case(head_dim, len_q, len_k, causal, dtype, **fixed)


def sampled_dtypes(
    head_dims: Iterable[int], lengths: Iterable[tuple[int, int]], dtypes: tuple[torch.dtype, ...]
) -> Iterator[Case]:
    """As `cross`, with the dtypes taken in turn: for grids where each dtype need not meet each size."""
    turn = itertools.cycle(dtypes)
    for head_dim, (len_q, len_k) in itertools.product(head_dims, lengths):
        for causal in masks_for(len_q, len_k):
            yield Case(head_dim, len_q, len_k, causal, next(turn))


# What compute-sanitizer sees: each compiled instance once with each mask, ragged lengths.
SANITIZER_CASES = frozenset(
    Case(head_dim, len_q, len_k, causal, dtype)
    for head_dim in INSTANCE_HEAD_DIMS
    for (len_q, len_k), causal, dtype in (
        ((113, 203), False, torch.float16),
        ((203, 113), "bottom_right", torch.bfloat16),
        ((113, 203), "top_left", torch.float16),
    )
)


def params(cpu: Iterable[Case] = (), cuda: Iterable[Case] = ()) -> list[Any]:
    """`parametrize("device, case", params(...))`: the device of each case, its marks and its name."""
    on_cpu = [pytest.param("cpu", case, id=f"cpu-{case}") for case in cpu]
    on_cuda = []
    for case in cuda:
        marks = [pytest.mark.cuda]
        if case in SANITIZER_CASES:
            marks.append(pytest.mark.sanitizer)
        on_cuda.append(pytest.param("cuda", case, id=f"cuda-{case}", marks=marks))
    return on_cpu + on_cuda


def backward_plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: Causal = False,
    *,
    deterministic: bool = False,
    backend: str | None = None,
    capability: int = 0,
    window: Window = (None, None),
    softcap: float | None = None,
) -> dict[str, Any]:
    """As `plan`, of the backward."""
    if capability and not backward_head_dims("sm80"):
        pytest.skip("this build has no sm80 backward to plan for")
    call = (q, k, v, *score(causal, window, softcap=softcap), backend or "auto")
    return json.loads(torch.ops.flash_cute.bwd_plan(*call, deterministic, capability))


def backward_head_dims(arch: str) -> tuple[int, ...]:
    """The head dims of this build's backward kernels for the architecture."""
    return tuple(sorted({instance[2] for instance in built_instances() if instance[:2] == (arch, "bwd")}))


def plan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: Causal = False,
    *,
    scale: float | None = None,
    backend: str | None = None,
    capability: int = 0,
    window: Window = (None, None),
) -> dict[str, Any]:
    """What the launch would do, from the same function that it asks. capability 80: as if on sm_80."""
    if capability and "sm80" not in built_architectures():
        pytest.skip("this build has no sm80 kernels to plan for")
    call = (q, k, v, *score(causal, window, scale=scale), backend or "auto")
    return json.loads(torch.ops.flash_cute.fwd_plan(*call, capability))
