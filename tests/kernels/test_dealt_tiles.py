"""The row tiles of the sm90 forward: dealt to the CTAs where they are few, else drawn from a counter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import Case, Causal, Forward, Window, plan
from numerics import assert_matches
from packed import VarlenForward, assert_packed_matches, make_forward, pack

import flash_cute
from flash_cute.report import built_architectures

pytestmark = pytest.mark.kernel

needs_sm90 = pytest.mark.skipif("sm90" not in built_architectures(), reason="this build has no kernels of sm90")
WAVES = (0.9, 1.5, 2.5, 3.5, 5.5)  # tiles per multiprocessor
LONG, SHORT = 300, 60  # more than a tile's rows, whichever tile it is, and fewer


def draws(made: dict[str, Any]) -> bool:
    said = any("a CTA that is done draws the next from a counter" in reason for reason in made["reasons"])
    assert said == (made["workspace_bytes"] > 0)  # no tile is split here
    return said


def planned(lengths: int, sequences: int, heads: int, longest: int | None, causal: Causal = True) -> dict[str, Any]:
    q = torch.empty(lengths, heads, 128, dtype=torch.bfloat16, device="meta")
    cu_seqlens = torch.empty(sequences + 1, dtype=torch.int32, device="meta")
    hints = {"max_seqlen_q": longest, "max_seqlen_k": longest}
    return flash_cute.explain(
        q, q, q, causal, capability=90, backend="sm90", cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, **hints
    ).data


@needs_sm90
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_four_waves_of_a_dense_batch(head_dim: int, causal: bool) -> None:
    """Without a mask tiles are equally long, and none is drawn."""
    found = set()
    for heads in range(20, 1200, 20):
        q = torch.empty(1, heads, 512, head_dim, dtype=torch.bfloat16, device="meta")
        made = flash_cute.explain(q, q, q, causal, capability=90, backend="sm90").data
        if made["split_tiles"] == 0:
            assert draws(made) == (causal and made["tiles"] > 4 * 132)
            found.add(draws(made))
    assert found == ({False, True} if causal else {False})


@needs_sm90
def test_the_waves_of_a_packed_batch() -> None:
    """The hints tell them: where no sequence has two tiles there are as many tiles as sequences."""
    assert [draws(planned(40 * 50, 40, heads, 100)) for heads in (3, 13, 14)] == [False, False, True]
    # One sequence of 1,000 rows, and 15 of 200: eight tiles of 128, and two for each; or six of 192, and two.
    for heads in (4, 6, 8, 12):
        made = planned(4000, 16, heads, 1000)
        assert draws(made) == (heads * {128: 38, 192: 36}[made["block_m"]] > 2 * 132)
    # Hints that cannot be are taken for the nearest that can; without one the longest has twice the mean.
    assert not draws(planned(40 * 50, 40, 3, 0)) and not draws(planned(40 * 50, 40, 3, 10**6))
    assert planned(4000, 16, 8, None)["block_m"] == planned(4000, 16, 8, 500)["block_m"]


@pytest.mark.cuda
@pytest.mark.parametrize("window", [(None, None), (100, 0)], ids=["causal", "window"])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
def test_dense(head_dim: int, window: Window, fwd: Forward, backend: str | None, rng: torch.Generator) -> None:
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    tiles = set()
    for waves in WAVES:
        heads = int(waves * multiprocessors / 3)  # which have two to five tiles
        q, k, v = Case(head_dim, LONG, LONG, True, torch.float16, 1, heads, heads).inputs("cuda", rng)
        tiles.add(plan(q, k, v, True, backend=backend, window=window)["tiles"] // multiprocessors)
        assert_matches(*fwd(q, k, v, True, window=window), q, k, v, True, window=window)
    assert len(tiles) > 2


@pytest.mark.cuda
@pytest.mark.parametrize("hint", [None, 0, SHORT, LONG, 10**6], ids=str)
@pytest.mark.parametrize("lengths", [(SHORT, 7, 0, 41), (LONG, 7, 150, 1, 33)], ids=["short", "long"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_packed(
    head_dim: int, lengths: tuple[int, ...], hint: int | None, backend: str | None, rng: torch.Generator
) -> None:
    """A wrong hint changes which CTA computes a tile, and nothing else."""
    call: VarlenForward = make_forward(backend)
    for waves in WAVES:
        heads = int(waves * torch.cuda.get_device_properties(0).multi_processor_count / len(lengths))
        packed = pack([(n, n) for n in lengths], "cuda", rng, heads_q=heads, heads_kv=heads, head_dim=head_dim)
        out, lse = call(packed, True, max_seqlen_q=hint, max_seqlen_k=hint)
        assert_packed_matches(out, lse, packed, True)
