"""Where this repository lies, some of whose files tests read and run."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
