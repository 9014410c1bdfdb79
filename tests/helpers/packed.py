"""Packed sequences for the tests: their inputs, the calls under test, and what must come out, sequence by sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from cases import Causal
from numerics import assert_gradients_match, assert_matches, nan_in_new_memory

import flash_cute

Results = tuple[torch.Tensor, ...]
# (packed, causal, **options) -> (out, lse)
VarlenForward = Callable[..., Results]
# (dout, packed, causal, *, dlse, deterministic, **options) -> (dq, dk, dv), with sinks also dsinks
VarlenBackward = Callable[..., Results]

# (len_q, len_k) of each sequence.
UNEVEN = ((5, 9), (64, 64), (0, 7), (1, 33), (7, 0), (130, 77), (65, 129), (0, 0), (3, 3))
SELF = ((17, 17), (1, 1), (0, 0), (128, 128), (65, 65), (65, 65), (300, 300))
ONE = ((113, 203),)
EMPTY = ((0, 0), (0, 0))
# Of UNEVEN used rows and keys: fewer, none, all, more than there are (as many as there are then), negative (none).
USED_Q = (3, 64, 5, 0, 7, 100, 1000, -4, 2)
USED_K = (9, 30, 7, 12, 0, 77, 1000, 3, -1)


@dataclass(frozen=True)
class Packed:
    """q (Tq, Hq, D), k (Tk, Hkv, D), v (Tk, Hkv, Dv), and where the sequences are."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    seqused_q: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None

    @property
    def tensors(self) -> Results:
        return self.q, self.k, self.v

    @property
    def call(self) -> Results:
        """The positional arguments of varlen_attention."""
        return self.q, self.k, self.v, self.cu_seqlens_q, self.cu_seqlens_k

    @property
    def used(self) -> dict[str, torch.Tensor | None]:
        return {"seqused_q": self.seqused_q, "seqused_k": self.seqused_k}

    def sequences(self) -> list[tuple[slice, slice]]:
        """The rows and the keys that each sequence uses."""
        sides = (
            (self.cu_seqlens_q, self.seqused_q, self.q.shape[0]),
            (self.cu_seqlens_k, self.seqused_k, self.k.shape[0]),
        )
        rows, keys = (flash_cute.reference.packed.ranges(*side) for side in sides)
        return list(zip(rows, keys, strict=True))

    def unused(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(Tq,) and (Tk,) bool, on q's device: the rows and the keys that no sequence uses."""
        rows, keys = (torch.ones(x.shape[0], dtype=torch.bool) for x in (self.q, self.k))
        for row, key in self.sequences():
            rows[row] = keys[key] = False
        return rows.to(self.q.device), keys.to(self.q.device)

    def replace(self, **changes: Any) -> Packed:
        return Packed(**{**self.__dict__, **changes})


def offsets(lengths: Sequence[int], device: str | torch.device = "cpu", first: int = 0) -> torch.Tensor:
    """cu_seqlens of sequences one behind the other."""
    return (torch.tensor([0, *lengths]).cumsum(0) + first).to(device, torch.int32)


def pack(
    lengths: Sequence[tuple[int, int]],
    device: str | torch.device,
    rng: torch.Generator,
    *,
    dtype: torch.dtype | None = None,
    heads_q: int = 4,
    heads_kv: int = 2,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    around: int = 0,
) -> Packed:
    """Standard normal inputs; `around`: so many rows and keys before the first sequence and behind the last."""
    if dtype is None:
        dtype = torch.float16 if str(device).startswith("cuda") else torch.float32
    total_q, total_k = (sum(side) + 2 * around for side in zip(*lengths, strict=True))
    shapes = ((total_q, heads_q, head_dim), (total_k, heads_kv, head_dim), (total_k, heads_kv, head_dim_v or head_dim))
    q, k, v = (torch.randn(shape, generator=rng).to(device, dtype) for shape in shapes)
    of_q, of_k = (offsets(side, device, around) for side in zip(*lengths, strict=True))
    return Packed(q, k, v, of_q, of_k)


def flow(packed: Packed, rng: torch.Generator) -> Results:
    """What may flow back into out and lse: standard normal."""
    rows, heads = packed.q.shape[:2]
    wide = torch.float64 if packed.q.dtype == torch.float64 else torch.float32
    dout = torch.randn((rows, heads, packed.v.shape[2]), generator=rng).to(packed.q)
    return dout, torch.randn((heads, rows), generator=rng).to(packed.q.device, wide)


def make_forward(backend: str | None) -> VarlenForward:
    """`flash_cute.varlen_fwd`, its outputs full of NaN before it runs."""

    def call(packed: Packed, causal: Causal = False, **options: Any) -> Results:
        with nan_in_new_memory(packed.q.unsqueeze(0)):
            return flash_cute.varlen_fwd(*packed.call, causal, backend=backend, **packed.used, **options)

    return call


def make_backward(backend: str | None) -> VarlenBackward:
    """The gradients of a packed attention; outputs and workspace full of NaN before."""

    def call(
        dout: torch.Tensor,
        packed: Packed,
        causal: Causal = False,
        *,
        dlse: torch.Tensor | None = None,
        deterministic: bool = False,
        **options: Any,
    ) -> Results:
        options |= {**packed.used, "backend": backend}
        with torch.no_grad(), nan_in_new_memory(packed.q.unsqueeze(0)):
            out, lse = flash_cute.varlen_fwd(*packed.call, causal, **options)
            tensors = (dout, *packed.tensors, out, lse, packed.cu_seqlens_q, packed.cu_seqlens_k)
            return flash_cute.varlen_bwd(*tensors, causal, dlse=dlse, deterministic=deterministic, **options)

    return call


def alone(x: torch.Tensor, rows: slice) -> torch.Tensor:
    """A sequence's rows of (T, H, D) as a batch of one, (1, H, N, D)."""
    return x[rows].transpose(0, 1).unsqueeze(0)


def _options_of(options: dict[str, Any], b: int, row: slice, key: slice) -> dict[str, Any]:
    """What sequence b has of options that are by sequence, or by row or key of the packed tensors."""
    slopes, mask = options.get("alibi_slopes"), options.get("mask")
    if slopes is not None and slopes.dim() == 2:
        options = {**options, "alibi_slopes": slopes[b : b + 1]}
    if mask is None:
        return options
    *intervals, matrix, blocks = mask.tensors
    part = flash_cute.Mask(*(None if x is None else x[..., key] for x in intervals)).rows_from(row.start)
    if blocks is not None:
        blocks = blocks.repeat_interleave(64, 2).repeat_interleave(64, 3)
    for x in (matrix, blocks):
        if x is not None:
            of_row = x if x.shape[2] == 1 else x[:, :, row]
            part = part.with_matrix(of_row if x.shape[3] == 1 else of_row[..., key])
    return {**options, "mask": part}


def assert_packed_matches(
    out: torch.Tensor, lse: torch.Tensor, packed: Packed, causal: Causal = False, **options: Any
) -> None:
    """Fails unless each sequence's rows are its attention, within the contract's bounds, and the other rows 0."""
    heads, rows = packed.q.shape[1], packed.q.shape[0]
    assert (tuple(out.shape), out.dtype) == ((rows, heads, packed.v.shape[2]), packed.q.dtype)
    assert (tuple(lse.shape), lse.is_contiguous()) == ((heads, rows), True)
    for b, (row, key) in enumerate(packed.sequences()):
        tensors = (alone(x, where) for x, where in zip(packed.tensors, (row, key, key), strict=True))
        assert_matches(alone(out, row), lse[None, :, row], *tensors, causal, **_options_of(options, b, row, key))
    unused, _ = packed.unused()
    assert (out[unused] == 0).all() and (lse[:, unused] == -torch.inf).all()


def assert_packed_gradients(
    gradients: Results,
    dout: torch.Tensor,
    packed: Packed,
    causal: Causal = False,
    *,
    dlse: torch.Tensor | None = None,
    **options: Any,
) -> None:
    """The same of dq, dk and dv, and of dsinks, which is the sum of the sequences'."""
    sinks = options.get("sinks")
    dq, dk, dv, *rest = gradients
    assert len(rest) == (sinks is not None)
    total = None if sinks is None else torch.zeros_like(sinks, dtype=torch.float64)
    for b, (row, key) in enumerate(packed.sequences()):
        if row.start == row.stop or key.start == key.stop:
            continue  # its rows and keys are looked at below
        q, k, v = (alone(x, where) for x, where in zip(packed.tensors, (row, key, key), strict=True))
        given = [alone(x, where) for x, where in zip((dq, dk, dv), (row, key, key), strict=True)]
        part_dlse = None if dlse is None else dlse[None, :, row]
        of_sequence = _options_of(options, b, row, key)
        if sinks is not None:
            truth = flash_cute.reference.gradients(alone(dout, row), q, k, v, causal, dlse=part_dlse, **of_sequence)
            total += truth[3]
            given.append(truth[3].to(sinks.dtype))  # of one sequence there is none to compare
        assert_gradients_match(tuple(given), alone(dout, row), q, k, v, causal, dlse=part_dlse, **of_sequence)
    if sinks is not None:
        (dsinks,) = rest
        assert (dsinks.shape, dsinks.dtype) == (sinks.shape, sinks.dtype)
        share = max(torch.finfo(packed.q.dtype).eps, torch.finfo(sinks.dtype).eps)
        torch.testing.assert_close(dsinks.double(), total, rtol=8 * share, atol=8 * share * packed.q.shape[0] ** 0.5)
    blind_rows, blind_keys = (x.clone() for x in packed.unused())
    for row, key in packed.sequences():
        if row.start == row.stop or key.start == key.stop:
            blind_rows[row] = blind_keys[key] = True
    for gradient, unused in ((dq, blind_rows), (dk, blind_keys), (dv, blind_keys)):
        assert (gradient[unused] == 0).all()
