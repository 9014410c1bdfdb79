"""What an access to shared memory costs: 32 banks of 4 bytes."""

from __future__ import annotations

import numpy as np

from .kernels import IntArray

__all__ = ["conflicts"]

BANKS = 32
WORD = 4  # bytes


def conflicts(addresses: IntArray, width: int) -> IntArray:
    """How many more passes each instruction takes than its bytes need.

    A pass moves one word of each bank. Lanes are served in groups that together want 128 bytes: all 32 with 4
    bytes each, 8 with 16 (ldmatrix: the 8 rows of one matrix). Lanes of a group that want the same word share it.

    Args:
        addresses: (instructions, lanes), in bytes.
        width: bytes per lane: 4, 8 or 16.
    """
    count, lanes = addresses.shape
    group = min(lanes, BANKS * WORD // width)
    words = addresses[:, :, None] // WORD + np.arange(width // WORD)
    words = words.reshape(count, lanes // group, group * width // WORD)
    words = np.sort(words, axis=-1)
    fresh = np.ones(words.shape, bool)
    fresh[..., 1:] = words[..., 1:] != words[..., :-1]
    per_bank = np.zeros((*words.shape[:2], BANKS), np.int32)
    for bank in range(BANKS):
        per_bank[..., bank] = (fresh & (words % BANKS == bank)).sum(-1)
    needed = -(-group * width // (BANKS * WORD))
    extra: IntArray = (np.maximum(per_bank.max(-1), needed) - needed).sum(-1)
    return extra
