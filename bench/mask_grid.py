"""The problems of `bench/masks.py`, the most important first.

Each has the sizes of a GPU, or with `unit` that part of them: a CPU tries the tool with a 64th of the tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from bench.mask_cases import (
    BAND,
    CAUSAL,
    DENSE,
    FA3,
    FLEX,
    PACKED,
    REPLICATED,
    SDPA,
    UNPADDED,
    Case,
    MaskMod,
    ids_of,
    tree_rows,
)
from flash_cute import Mask

LONGEST = 16384
PARTS = (20, 3, 9, 1, 14, 5, 8, 4)  # of 64: documents of different lengths


def cases(unit: int = 1) -> Iterator[Case]:
    """All of them; `unit`: how many times smaller than on a GPU."""
    for group in (bands, published, grpo, padding, constructors, blocks):
        yield from group(unit)


def shape(B: int, H: int, Hkv: int, N: int, D: int, unit: int) -> dict[str, Any]:
    if unit > 1:
        H, Hkv, D = max(2, H // 8), max(1, Hkv // 8), D // 4
    return {"B": B, "H": H, "Hkv": Hkv, "N": N // unit, "D": D}


def causal_mask(N: int, device: torch.device) -> Mask:
    rows = torch.arange(N, dtype=torch.int32, device=device).view(1, 1, N)
    return Mask(rows, torch.full_like(rows, N))


def full_mask(N: int, device: torch.device) -> Mask:
    zero = torch.zeros(1, 1, N, dtype=torch.int32, device=device)
    return Mask(zero, torch.full_like(zero, N))


def documents(parts: Sequence[int], device: torch.device) -> Mask:
    return Mask.documents(ids_of(parts, device))


def uneven(N: int) -> tuple[int, ...]:
    """8 lengths of N tokens in all; the first two are no multiple of a tile's."""
    first, second, *rest = (N // 64 * part for part in PARTS)
    return (first - 3, second + 3, *rest)


def bands(unit: int) -> Iterator[Case]:
    """Masks that say what a band or a packed batch says too."""
    for D in (128, 64):
        for N in (LONGEST, 4096):
            sizes = shape(LONGEST // N, 16, 16, N, D, unit)
            n = sizes["N"]
            yield Case(
                "bands", "causal", **sizes, causal=False, make_mask=functools.partial(causal_mask, n), peers=(BAND,)
            )
            yield Case("bands", "full", **sizes, causal=False, make_mask=functools.partial(full_mask, n), peers=(BAND,))
            for name, parts in (("8 documents", (n // 8,) * 8), ("8 uneven documents", uneven(n))):
                mask = functools.partial(documents, parts)
                yield Case("bands", name, **sizes, causal=True, make_mask=mask, peers=(PACKED,), parts=parts)


def block_causal_documents(parts: Sequence[int], size: int, device: torch.device) -> Mask:
    """Documents whose tokens see their own chunk, of `size` tokens from the document's beginning, and those before."""
    whole = documents(parts, device)
    index = torch.arange(sum(parts), dtype=torch.int32, device=device)
    chunk = (index - whole.first_row) // size
    return Mask(whole.first_row + chunk * size, whole.row_limit)


def published(unit: int) -> Iterator[Case]:
    """MagiAttention's block-causal documents, in chunks of 2048; it publishes no lengths: these are one draw."""
    N, parts = 32768 // unit, tuple(part // unit for part in (18743, 9216, 1311))
    parts = (*parts, N - sum(parts))
    yield Case(
        "published",
        "block-causal documents",
        **shape(1, 64, 8, 32768, 128, unit),
        causal=False,
        make_mask=functools.partial(block_causal_documents, parts, 2048 // unit),
        peers=(CAUSAL, FA3),
        published=(571.0, 363.0),
    )


def grpo(unit: int) -> Iterator[Case]:
    """A prompt and 8 answers in one sequence, and as 8 sequences that each begin with the prompt."""
    prefix, answers = 4096 // unit, (1024 // unit,) * 8
    yield Case(
        "grpo",
        "shared prefix",
        **shape(1, 32, 8, 4096 + 8 * 1024, 128, unit),
        causal=True,
        make_mask=lambda device: Mask.shared_prefix(prefix, list(answers), device=device),
        peers=(REPLICATED,),
        prefix=prefix,
        parts=answers,
        directions=("step", "fwd", "bwd"),
    )


def padding(unit: int) -> Iterator[Case]:
    """A batch with a quarter to all of its tokens real, through PyTorch's interface."""
    N = 4096 // unit
    lengths = tuple(round(N * (1 + 3 * b / 7) / 4) for b in range(8))
    for D in (128, 64):
        yield Case(
            "padding",
            "a quarter to all",
            **shape(8, 16, 16, 4096, D, unit),
            causal=False,
            make_mask=lambda device: Mask.padding(torch.tensor(lengths, device=device), N),
            peers=(PACKED, UNPADDED, SDPA),
            parts=lengths,
            through_sdpa=True,
        )


def constructors(unit: int) -> Iterator[Case]:
    """Each constructor beside FlexAttention, which is given the mask in the words of its own users."""
    N = LONGEST // unit
    makers: dict[str, tuple[bool, Callable[[torch.device], Mask], Callable[[torch.device], MaskMod]]] = {
        "documents": (True, functools.partial(documents, uneven(N)), functools.partial(_documents_mod, uneven(N))),
        "shared_prefix": (
            True,
            lambda device: Mask.shared_prefix(N // 4, [N * 3 // 32] * 8, device=device),
            functools.partial(_shared_prefix_mod, N // 4, (N * 3 // 32,) * 8),
        ),
        "images": (
            False,
            lambda device: Mask.images(_image_ids(N, device)),
            lambda device: _images_mod(_image_ids(N, device)),
        ),
        "chunks": (
            False,
            lambda device: Mask.chunks(N // 64, N, device=device),
            lambda device: lambda b, h, i, j: j // (N // 64) <= i // (N // 64),
        ),
        "prefix_lm": (
            False,
            lambda device: Mask.prefix_lm(N // 4, N, device=device),
            lambda device: lambda b, h, i, j: (j <= i) | (j < N // 4),
        ),
        "tree": (True, lambda device: Mask.tree(*_tree(N, device)), lambda device: _tree_mod(*_tree(N, device))),
        "global_tokens": (
            True,
            lambda device: Mask.global_tokens(N // 256, N, (N // 16, None), device=device),
            lambda device: lambda b, h, i, j: (j <= i) & ((i - j <= N // 16) | (j < N // 256)),
        ),
        "padding": (
            True,
            lambda device: Mask.padding(_tokens(N, device)),
            lambda device: _padding_mod(_tokens(N, device)),
        ),
    }
    for name, (causal, make_mask, make_mask_mod) in makers.items():
        yield Case(
            "constructors",
            name,
            **shape(1, 32, 8, LONGEST, 128, unit),
            causal=causal,
            make_mask=make_mask,
            make_mask_mod=make_mask_mod,
            peers=(FLEX,),
        )


def _documents_mod(parts: Sequence[int], device: torch.device) -> MaskMod:
    ids = ids_of(parts, device)
    return lambda b, h, i, j: (ids[i] == ids[j]) & (j <= i)


def _shared_prefix_mod(prefix: int, answers: Sequence[int], device: torch.device) -> MaskMod:
    ids = ids_of((prefix, *answers), device)
    return lambda b, h, i, j: (j <= i) & ((j < prefix) | (ids[i] == ids[j]))


def _image_ids(N: int, device: torch.device) -> torch.Tensor:
    """16 images, each the second quarter of its part of the tokens."""
    index = torch.arange(N, device=device)
    part, place = index // (N // 16), index % (N // 16)
    inside = (place >= N // 64) & (place < N // 32)
    return part.where(inside, -1)


def _images_mod(ids: torch.Tensor) -> MaskMod:
    return lambda b, h, i, j: (j <= i) | ((ids[i] == ids[j]) & (ids[j] >= 0))


def _tree(N: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A root of an eighth of the tokens, and 14 nodes below it."""
    tin, tout = tree_rows(4, N // 16, N // 8)
    return torch.tensor(tin, device=device), torch.tensor(tout, device=device)


def _tree_mod(tin: torch.Tensor, tout: torch.Tensor) -> MaskMod:
    return lambda b, h, i, j: (j <= i) & (tin[j] <= i) & (i < tout[j])


def _tokens(N: int, device: torch.device) -> torch.Tensor:
    """Three quarters are tokens; the padding is in four places."""
    return torch.arange(N, device=device) % (N // 4) < N * 3 // 16


def _padding_mod(tokens: torch.Tensor) -> MaskMod:
    return lambda b, h, i, j: (j <= i) & tokens[j]


def blocks(unit: int) -> Iterator[Case]:
    """A quarter of the blocks of 64 rows and keys, as many in each row of blocks."""
    if not hasattr(Mask, "from_blocks"):
        return
    for D in (128, 64):
        sizes = shape(1, 16, 16, LONGEST, D, unit)
        N = sizes["N"]
        yield Case(
            "blocks",
            "a quarter",
            **sizes,
            causal=False,
            make_mask=functools.partial(_quarter, N),
            peers=(DENSE,),
            seen=N * N // 4,
        )


def _quarter(N: int, device: torch.device) -> Mask:
    draws = torch.rand(N // 64, N // 64, generator=torch.Generator().manual_seed(0))
    chosen = torch.zeros(N // 64, N // 64, dtype=torch.bool).scatter_(1, draws.topk(N // 256, 1).indices, True)
    mask: Mask = Mask.from_blocks(chosen.to(device)[None, None], N)  # type: ignore[attr-defined]
    return mask
