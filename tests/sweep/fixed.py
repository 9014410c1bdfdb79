"""The part of the sweep that CI runs."""

from __future__ import annotations

FIXED: dict[str, list[str] | None] = {}
