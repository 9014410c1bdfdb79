"""The one error of the build: a sentence that says what is wrong and what to do."""

from __future__ import annotations

from setuptools.errors import BaseError


class BuildError(BaseError):
    """Stops the build; setuptools prints its sentence with no traceback."""

    def __init__(self, sentence: str) -> None:
        super().__init__(f"flash_cute: {sentence}")
