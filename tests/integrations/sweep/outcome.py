"""What a mode of a model came to."""

from __future__ import annotations

import dataclasses

RIGHT = "right"
REFUSED_AT_LOAD = "refused at load"
REFUSED_AT_CALL = "refused at call"
EAGER_FAILS = "eager fails"
NOT_APPLICABLE = "-"  # the model has nothing of the mode
WRONG = "wrong"
UNCLEAR = "unclear"
NOT_REACHED = "not reached"  # the attention function was never called
NOT_BUILT = "not built"
NO_ANSWER = "no answer"  # in the time that a mode has
RESULTS = (
    RIGHT,
    REFUSED_AT_LOAD,
    REFUSED_AT_CALL,
    EAGER_FAILS,
    NOT_APPLICABLE,
    WRONG,
    UNCLEAR,
    NOT_REACHED,
    NOT_BUILT,
    NO_ANSWER,
)

BAD = (WRONG, UNCLEAR, NOT_REACHED, NOT_BUILT, NO_ANSWER)


@dataclasses.dataclass
class Outcome:
    result: str
    error: float | None = None  # largest difference from eager, relative to eager's largest value
    text: str = ""


class NotApplicable(Exception):
    """The model has nothing of a mode."""
