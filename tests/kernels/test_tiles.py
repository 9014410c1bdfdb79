"""Every tile of every table, on the GPU that there is: those of other chips, and those that no shape would choose."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from cases import CUDA_DTYPES, INSTANCE_HEAD_DIMS, Case, Causal, Window, backward_plan, plan, score
from numerics import assert_gradients_match, assert_matches, nan_in_new_memory, same_bits
from packed import SELF, UNEVEN, assert_packed_gradients, flow, make_backward, pack

import flash_cute
from flash_cute.report import built_architectures

pytestmark = pytest.mark.kernel

# Of csrc/sm80/common/chip.h, with the shared memory that a CTA of such a chip may have.
CHIPS = {"a100": 163 << 10, "99kb": 99 << 10, "h100": 227 << 10}
# Of csrc/sm90/forward/rows/tile.h, with their rows.
TILES = {"rows256": 256, "rows192": 192, "rows192_late": 192, "rows128": 128, "rows128_late": 128, "rows64": 64}

BANDS: tuple[tuple[Causal, Window], ...] = ((False, (None, None)), (True, (None, None)), ("top_left", (70, 20)))
MASKS = pytest.mark.parametrize(("causal", "window"), BANDS, ids=["full", "causal", "window"])
DTYPES = pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
BOTH = pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
PLAIN_SEQUENCE_HEAD_DIMS = (64, 96, 128)  # of csrc/sm80/backward/dq_in_memory/tile.h
FORCED = [f"sm80:{chip}" for chip in CHIPS] + [f"sm90:{tile}" for tile in TILES]


def _has(backend: str, head_dim: int) -> bool:
    """Whether csrc/sm90/forward/rows/tile.h has the tile for that head dim; the sm80 tables have all."""
    tile = backend.partition(":")[2]
    limits = {"rows256": (0, 64), "rows192": (0, 128), "rows192_late": (0, 128)}
    limits |= {"rows128": (33, 256), "rows128_late": (65, 128)}
    low, high = limits.get(tile, (0, 256))
    return low <= head_dim <= high and not (tile == "rows192" and head_dim == 64)


FORWARDS = [
    *((backend, d) for backend in FORCED for d in INSTANCE_HEAD_DIMS if _has(backend, d)),
    *((f"sm90:{tile}", 320) for tile in ("rows128", "rows64")),  # sm80: test_large_head_dims.py
]


def _skip_unbuilt(backend: str) -> None:
    if backend[:4] not in built_architectures():
        pytest.skip(f"this build has no {backend[:4]} kernels")


def _skip_other_gpus() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the tiles of all tables fit in an H100's shared memory, and perhaps not in this GPU's")


def _inputs(case: Case, rng: torch.Generator) -> tuple[torch.Tensor, ...]:
    _skip_other_gpus()
    return case.inputs("cuda", rng)


@pytest.mark.cuda
@DTYPES
@MASKS
@pytest.mark.parametrize(("backend", "head_dim"), FORWARDS)
def test_forward(
    backend: str, head_dim: int, causal: Causal, window: Window, dtype: torch.dtype, rng: torch.Generator
) -> None:
    _skip_unbuilt(backend)
    q, k, v = _inputs(Case(head_dim, 413, 603, causal, dtype, 1, 4, 2), rng)
    with nan_in_new_memory(q):
        out, lse = torch.ops.flash_cute._fwd(q, k, v, *score(causal, window), backend)
    assert_matches(out, lse, q, k, v, causal, window=window)


@pytest.mark.cuda
@BOTH
@DTYPES
@MASKS
@pytest.mark.parametrize("head_dim", INSTANCE_HEAD_DIMS)
@pytest.mark.parametrize("chip", CHIPS)
def test_backward(
    chip: str,
    head_dim: int,
    causal: Causal,
    window: Window,
    dtype: torch.dtype,
    deterministic: bool,
    rng: torch.Generator,
) -> None:
    _skip_unbuilt("sm80")
    q, k, v = _inputs(Case(head_dim, 413, 303, causal, dtype, 1, 4, 2), rng)
    mask = score(causal, window)
    out, lse = torch.ops.flash_cute._fwd(q, k, v, *mask, f"sm80:{chip}")
    dout = torch.randn(q.shape, generator=rng).to(q)
    dlse = torch.randn(q.shape[:3], generator=rng).to(lse)

    def gradients() -> Any:
        with nan_in_new_memory(q):
            given = (dout, q, k, v, out, lse, dlse, *mask, deterministic, f"sm80:{chip}")
            return torch.ops.flash_cute._bwd(*given)[:3]  # behind them dsinks, of sinks that there are none of

    given = gradients()
    assert_gradients_match(given, dout, q, k, v, causal, dlse=dlse, window=window)
    if deterministic:
        assert same_bits(gradients(), given)


@pytest.mark.cuda
@BOTH
@DTYPES
@MASKS
@pytest.mark.parametrize("head_dim", PLAIN_SEQUENCE_HEAD_DIMS)
@pytest.mark.parametrize("chip", CHIPS)
def test_packed_backward(
    chip: str,
    head_dim: int,
    causal: Causal,
    window: Window,
    dtype: torch.dtype,
    deterministic: bool,
    rng: torch.Generator,
) -> None:
    _skip_unbuilt("sm80")
    _skip_other_gpus()
    packed = pack((*UNEVEN, *SELF, (413, 303)), "cuda", rng, dtype=dtype, head_dim=head_dim, around=2)
    dout, dlse = flow(packed, rng)
    bwd = make_backward(f"sm80:{chip}")

    def gradients() -> Any:
        return bwd(dout, packed, causal, dlse=dlse, deterministic=deterministic, window=window)

    given = gradients()
    assert_packed_gradients(given, dout, packed, causal, dlse=dlse, window=window)
    if deterministic:
        assert same_bits(gradients(), given)


@pytest.mark.parametrize("softcap", [None, 20.0], ids=["plain", "softcap"])
@pytest.mark.parametrize("head_dim", INSTANCE_HEAD_DIMS)
@pytest.mark.parametrize("chip", CHIPS)
def test_plain_packed_batches_have_the_dense_tile(chip: str, head_dim: int, softcap: float | None) -> None:
    """Where has_plain_sequence_kernel says so; else the tile is that of modified scores, the same for all chips."""
    _skip_unbuilt("sm80")
    q = torch.empty(64, 1, head_dim, dtype=torch.float16)
    offsets = torch.tensor([0, 64], dtype=torch.int32)
    call = (q, q, q, offsets, offsets, None, None, None, None, *score(True, softcap=softcap), f"sm80:{chip}")
    made = json.loads(torch.ops.flash_cute.varlen_bwd_plan(*call, False, 90))
    padded = q.transpose(0, 1).unsqueeze(0)
    dense = backward_plan(padded, padded, padded, True, backend=f"sm80:{chip}", capability=90)
    same = all(made[field] == dense[field] for field in ("block_m", "block_n", "threads", "stages", "ctas_per_sm"))
    plain = softcap is None and head_dim in PLAIN_SEQUENCE_HEAD_DIMS and chip != "99kb"
    assert same or not plain
    assert made["kernel"] == "bwd_sequences_kernel"
    assert made["smem_bytes"] <= CHIPS[chip]
    assert made["ctas_per_sm"] * (made["smem_bytes"] + 1024) <= CHIPS[chip] + 1024
    assert ("on any chip" in made["reasons"][1]) == (not plain)
    if not plain:
        capped = (*call[:9], *score(True, softcap=20.0), "sm80:99kb")
        assert made["block_n"] == json.loads(torch.ops.flash_cute.varlen_bwd_plan(*capped, False, 90))["block_n"]


def _name(causal: Causal) -> str:
    return {False: "none", True: "bottom_right"}.get(causal, str(causal))


@pytest.mark.parametrize(("backend", "head_dim"), FORWARDS)
def test_the_plan_takes_the_tile(backend: str, head_dim: int) -> None:
    _skip_unbuilt(backend)
    q = torch.empty(1, 1, 64, head_dim, dtype=torch.float16)
    made = plan(q, q, q, True, backend=backend, capability=90)
    arch, _, tile = backend.partition(":")
    assert made["backend"] == arch
    if arch == "sm90":
        assert (made["block_m"], made["tile"]) == (TILES[tile], tile)


@pytest.mark.parametrize("head_dim", INSTANCE_HEAD_DIMS)
@pytest.mark.parametrize("chip", CHIPS)
def test_shared_memory_of_other_chips(chip: str, head_dim: int) -> None:
    """What the tables ask for is there on the chips that they are for, as often per SM as they say."""
    _skip_unbuilt("sm80")
    q = torch.empty(1, 1, 64, head_dim, dtype=torch.float16)
    for made in (
        plan(q, q, q, True, backend=f"sm80:{chip}", capability=90),
        backward_plan(q, q, q, True, backend=f"sm80:{chip}", capability=90),
    ):
        assert made["smem_bytes"] <= CHIPS[chip]
        assert made["ctas_per_sm"] * (made["smem_bytes"] + 1024) <= CHIPS[chip] + 1024


def test_only_tests_can_force_a_tile(python: Any) -> None:
    """The names are refused unless FLASH_CUTE_TEST_TILES was set when the library was loaded."""
    script = """
import os
os.environ.pop("FLASH_CUTE_TEST_TILES", None)
import torch, flash_cute
q = torch.empty(1, 1, 64, 64, dtype=torch.float16)
try:
    flash_cute.explain(q, q, q, backend="sm80:a100", capability=90)
except ValueError as error:
    print(error)
"""
    assert python(script).strip() == ("flash_cute: backend: expected 'auto', 'cpu', 'sm80' or 'sm90', got 'sm80:a100'")


def test_an_unknown_tile_is_refused() -> None:
    q = torch.empty(1, 1, 64, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match="expected a tile or a table that exists, got 'sm90:huge'"):
        flash_cute.explain(q, q, q, backend="sm90:huge", capability=90)
