"""The lengths of packed batches, in words: `16x1024`, `28672+16x256`, or the name of a drawn batch."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import cache
from statistics import NormalDist


def documents() -> tuple[int, ...]:
    """42 lengths as documents have them: lognormal, of mean 7.2 and deviation 1.1 in the logarithm; 65,761 tokens."""
    draw, normal = random.Random(17111), NormalDist(7.2, 1.1)
    return tuple(round(math.exp(normal.inv_cdf(draw.random()))) for _ in range(42))


def short() -> tuple[int, ...]:
    """96 lengths of 1 to 512, equally likely; 24,441 tokens."""
    draw = random.Random(2520)
    return tuple(1 + int(512 * draw.random()) for _ in range(96))


def mixed() -> tuple[int, ...]:
    """64 lengths of a batch that is served: lognormal, of mean 7.6 and deviation 1.1 in the logarithm, within 32 and
    26,710; 257,809 keys."""
    draw, normal = random.Random(17180), NormalDist(7.6, 1.1)
    return tuple(min(26710, max(32, round(math.exp(normal.inv_cdf(draw.random()))))) for _ in range(64))


# The seeds are such that there are as many tokens as in measurements of the other packages (others_h200.csv).
DRAWN: dict[str, Callable[[], tuple[int, ...]]] = {"documents": documents, "short": short, "mixed": mixed}


@cache
def lengths_of(text: str) -> tuple[int, ...]:
    """The lengths that a text names; raises ValueError where it names none.

    Example:
        >>> lengths_of("300+2x100")
        (300, 100, 100)
    """
    if text in DRAWN:
        return DRAWN[text]()
    found: list[int] = []
    for part in text.split("+"):
        count, _, length = part.rpartition("x")
        numbers = (count or "1", length)
        if not all(number.isdecimal() and int(number) > 0 for number in numbers):
            raise ValueError(f"lengths: expected COUNTxLENGTH+LENGTH+..., or {' or '.join(DRAWN)}, given {text!r}")
        found += [int(length)] * int(numbers[0])
    return tuple(found)
