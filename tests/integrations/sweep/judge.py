"""Whether an answer is right: within a tolerance in float32, by what eager errs in float16 in float16."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .compare import (
    TOLERANCE,
    TOLERANCE_OF_GRADIENTS,
    TOLERANCE_OF_HALF,
    TOLERANCE_OF_HALF_GRADIENTS,
    Values,
    errors,
    largest,
)
from .outcome import RIGHT, UNCLEAR, WRONG, Outcome
from .rounding import Half

NOISY = 0.3  # what eager may err in float16 for a judgement by it


def judge(mode: str, answer: Values, expected: Values, rounded: Callable[[], Iterable[Values]]) -> Outcome:
    """rounded: eager's answers in float16, one for each way of rounding; asked for only where they decide."""
    found = errors(answer, expected)
    error, name = largest(found)
    of_gradients = mode.startswith("gradients")
    if not Half.on:
        tolerance = TOLERANCE_OF_GRADIENTS if of_gradients else TOLERANCE
        return Outcome(RIGHT, error) if error <= tolerance else Outcome(WRONG, error, name)
    tolerance = TOLERANCE_OF_HALF_GRADIENTS if of_gradients else TOLERANCE_OF_HALF
    own = dict.fromkeys(found, 0.0)
    for given in () if error <= tolerance else rounded():
        of_eager = errors(given, expected)
        # Tokens that eager did not come to, because it chose another before them, have no measure.
        own = {name: max(own[name], of_eager.get(name, NOISY if _has_shape(name) else 0.0)) for name in own}
        if not _above(found, own, tolerance):
            break
    above = _above(found, own, tolerance)
    if not above:
        return Outcome(RIGHT, error)
    certain = {name: x for name, x in above.items() if own[name] < NOISY}
    error, name = largest(certain or above)
    said = f"{name}: eager in float16 errs by {own[name]:.2g}"
    return Outcome(WRONG if certain else UNCLEAR, error, said if certain else f"{said}, too much for a judgement")


def _above(found: dict[str, float], own: dict[str, float], tolerance: float) -> dict[str, float]:
    """What errs by more than it may; and what eager errs in too much to say so.

    Three times what eager errs: twice may be luck, of one draw of its error for each of some hundred tensors.
    """
    bound = {name: 3 * own[name] + tolerance for name in found}
    return {n: x for n, x in found.items() if x > tolerance and (x > bound[n] or own[n] >= NOISY)}


def _has_shape(name: str) -> bool:
    """Whether the answer has the tensor at all, see `errors`."""
    return ": " not in name
