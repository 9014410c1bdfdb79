"""Random masks, by intervals and by matrices and blocks, and calls with them."""

from __future__ import annotations

import random
from typing import Any

import torch

from flash_cute import Mask

KINDS = ("random", "wide", "tree", "nested", "documents", "hidden", "extreme", "two", "diagonal")


def draw_mask(pick: random.Random, rng: torch.Generator, shape: tuple[int, int, int], len_q: int, kind: str) -> Mask:
    """A mask of (B or 1, Hkv or 1, Nk) on the CPU, for so many rows."""
    len_k = shape[2]
    column = torch.arange(len_k).expand(shape)

    def rows(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, max(low + 1, high), shape, generator=rng)

    match kind:
        case "random":
            first, limit = rows(-3, len_q + 3), rows(-3, len_q + 3)
        case "wide":  # nearly all is seen
            first, limit = rows(-3, len_q // 8 + 1), len_q - rows(-3, len_q // 8 + 1)
        case "tree":
            first, limit = column, _subtrees(pick, len_k).expand(shape)
        case "nested":  # of documents within documents: the smaller one that a key begins, or the whole one
            outer, inner = pick.randint(8, max(8, len_k)), pick.randint(1, 8)
            whole = rows(0, 2) == 1
            first = torch.where(whole, column // outer * outer, column // inner * inner)
            limit = torch.where(whole, (column // outer + 1) * outer, (column // inner + 1) * inner)
        case "documents":
            length = pick.randint(1, max(1, len_k))
            first, limit = column // length * length, (column // length + 1) * length
        case "hidden":  # most keys from all rows, and some rows from all keys
            first, limit = rows(len_q // 3, len_q), torch.where(rows(0, 4) == 0, len_q, 0)
        case "extreme":
            edges = torch.tensor([-(2**31), -1, 0, 1, len_q // 2, len_q, len_q + 1, 2**31 - 1])
            first, limit = (edges[torch.randint(0, len(edges), shape, generator=rng)] for _ in range(2))
        case "two":
            middle = rows(0, len_q)
            return _mask(torch.zeros(shape), middle - rows(0, 9), middle, middle + rows(0, len_q))
        case "diagonal":  # a band, and what comes before a row's own position
            width = pick.randint(1, 40)
            return _mask(column - width, column + 1, column + 2 * width, torch.full(shape, len_q))
        case _:
            raise ValueError(kind)
    if pick.random() < 0.4:
        return _mask(first, limit, rows(-3, len_q), rows(-3, len_q + 3))
    return _mask(first, limit)


def _mask(*tensors: torch.Tensor) -> Mask:
    return Mask(*(x.clamp(-(2**31), 2**31 - 1).to(torch.int32) for x in tensors))


def _subtrees(pick: random.Random, count: int) -> torch.Tensor:
    """The row behind each token's subtree, of tokens in depth-first order."""
    path: list[int] = []
    limits = [count] * count
    for token in range(count):
        while path and pick.random() < 0.4:
            limits[path.pop()] = token
        path.append(token)
    return torch.tensor(limits)


def with_squares(mask: Mask, pick: random.Random, rng: torch.Generator, items: tuple[int, int], len_q: int) -> Mask:
    """The mask, ANDed with a random matrix, blocks or both, of at most so many batch items and KV heads."""
    len_k = mask.first_row.shape[2]
    which = pick.choice(("matrix", "blocks", "both"))
    if which != "blocks":
        mask = mask.with_matrix(draw_matrix(pick, rng, items, (len_q, len_k)).to(mask.first_row.device))
    if which != "matrix":
        shape = (*(pick.choice((1, x)) for x in items), -(-len_q // 64), -(-len_k // 64))
        blocks = torch.rand(shape, generator=rng) < pick.choice((0.1, 0.5, 0.9, 1.0))
        mask = mask.with_blocks(blocks.to(mask.first_row.device))
    return mask


def draw_matrix(
    pick: random.Random, rng: torch.Generator, items: tuple[int, int], lengths: tuple[int, int]
) -> torch.Tensor:
    """Bools (B or 1, Hkv or 1, Nq or 1, Nk or 1), sparse or dense, with rows and keys that see or show nothing."""
    broadcast = pick.choice((None, None, None, 0, 1))
    rows, keys = (1 if broadcast == dim else length for dim, length in enumerate(lengths))
    shape = (*(pick.choice((1, x)) for x in items), rows, keys)
    match pick.choice(("random", "random", "stripes", "tiles", "all", "none")):
        case "random":
            seen = torch.rand(shape, generator=rng) < pick.choice((0.02, 0.3, 0.7, 0.98))
        case "stripes":
            seen = (torch.arange(rows).unsqueeze(-1) + torch.arange(keys)).expand(shape) % pick.randint(2, 5) > 0
        case "tiles":  # whole tiles that all or nobody sees, and some that some see
            wide = torch.rand((*shape[:2], rows // 32 + 1, keys // 32 + 1), generator=rng) < 0.5
            seen = wide.repeat_interleave(32, 2)[:, :, :rows].repeat_interleave(32, 3)[..., :keys]
            seen = seen ^ (torch.rand(shape, generator=rng) < 0.001)
        case "all":
            seen = torch.ones(shape, dtype=torch.bool)
        case _:
            seen = torch.zeros(shape, dtype=torch.bool)
    if pick.random() < 0.3:
        seen = seen & (torch.rand(rows, 1, generator=rng) < 0.8) & (torch.rand(keys, generator=rng) < 0.8)
    return seen


def with_gaps(mask: Mask, pick: random.Random) -> Mask:
    """The same mask with its tensors strided otherwise: expanded, or every other of a larger tensor."""

    def strided(x: torch.Tensor) -> torch.Tensor:
        wide = torch.zeros((*x.shape[:-1], 2 * x.shape[-1] + 1), dtype=x.dtype, device=x.device)
        wide[..., 1::2] = x
        return wide[..., 1::2]

    return Mask(*(x if x is None or pick.random() < 0.5 else strided(x) for x in mask.tensors))  # type: ignore[arg-type]


def draw_options(pick: random.Random, rng: torch.Generator, heads_q: int, dtype: torch.dtype) -> dict[str, Any]:
    """A call's other options, on the CPU."""
    options: dict[str, Any] = {
        "causal": pick.choice((False, False, True, "top_left")),
        "window": pick.choice(
            (None, None, None, (pick.randint(0, 60), pick.randint(0, 60)), (pick.randint(0, 99), None))
        ),
        "softcap": pick.choice((None, None, None, 6.0)),
        "scale": pick.choice((None, None, pick.uniform(0.05, 0.3))),
    }
    if pick.random() < 0.25:
        options["sinks"] = torch.randn(heads_q, generator=rng).to(dtype)
    return options


def inputs(
    device: str,
    rng: torch.Generator,
    heads: tuple[int, int, int],
    lengths: tuple[int, int],
    head_dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype = torch.float16,
) -> list[torch.Tensor]:
    """q, k and v; `heads`: batch, query heads, key heads."""
    (batch, heads_q, heads_kv), (rows, keys), (head_dim, head_dim_v) = heads, lengths, head_dims
    shapes = (
        (batch, heads_q, rows, head_dim),
        (batch, heads_kv, keys, head_dim),
        (batch, heads_kv, keys, head_dim_v),
    )
    return [torch.randn(shape, generator=rng).to(device, dtype) for shape in shapes]


def of_columns(first: Any, limit: Any, device: str) -> Mask:
    """A mask of one interval per key, the same for all heads."""
    return Mask(*(torch.as_tensor(x).to(device, torch.int32).view(1, 1, -1) for x in (first, limit)))
