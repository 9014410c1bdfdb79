"""The table of results."""

from __future__ import annotations

import collections
from typing import Any

from .outcome import RESULTS


def counts(results: dict[str, dict[str, Any]]) -> dict[str, int]:
    found = collections.Counter(x["result"] for of_model in results.values() for x in of_model.values())
    return {result: found[result] for result in RESULTS if found[result]}


def markdown(results: dict[str, dict[str, Any]]) -> str:
    return ""
