"""Fill the tables of docs/schedules.md from what `python -m flash_cute.schedules` wrote.

    python -m flash_cute.schedules --D 64 128 256 512 --N 1024 4096 16384 --csv bench/results/h200/schedules.csv
    python -m flash_cute.schedules --list --D 64 128 256 512 --chip H100 --csv bench/results/schedules-facts.csv
    python bench/schedules.py            # rewrites docs/schedules.md
    python bench/schedules.py --check    # exit status 1 if a table is not what its CSV says

A table stands between `<!-- schedules:NAME -->` and `<!-- end schedules -->`, and comes from bench/results/NAME.csv;
one whose CSV is not there stays as it is. No figure is typed by hand.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/schedules.md"
RESULTS = ROOT / "bench/results"
MARKED = re.compile(r"(<!-- schedules:([\w./-]+) -->\n).*?(<!-- end schedules -->)", re.DOTALL)

Rows = list[dict[str, str]]


def filled(page: str, results: Path = RESULTS) -> str:
    """The page with the tables that the CSV files in `results` give."""

    def table(match: re.Match[str]) -> str:
        path = results / f"{match[2]}.csv"
        if not path.exists():
            return match[0]
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        text = measured(rows) if "tflops" in rows[0] else facts(rows)
        return f"{match[1]}{text}{match[3]}"

    return MARKED.sub(table, page)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
    return "\n".join(lines) + "\n"


def measured(rows: Rows) -> str:
    """A line per name, a column per head dim and length, for each mask; then the errors, the worst of all lengths."""
    first = rows[0]
    text = f"{first['gpu']}, torch {first['torch']}, {first['dtype']}, batch {first['B']}, {first['H']} heads"
    text += "" if first["H"] == first["Hkv"] else f", {first['Hkv']} of keys"
    parts = [text + ".\n"]
    names = list(dict.fromkeys(row["name"] for row in rows))
    for causal in dict.fromkeys(row["causal"] for row in rows):
        mine = [row for row in rows if row["causal"] == causal]
        calls = list(dict.fromkeys((row["D"], row["N"]) for row in mine))
        found = {(row["name"], row["D"], row["N"]): row["tflops"] for row in mine}
        ours = [name for name in names if not name.startswith("sdpa")]
        best = {call: max((float(found.get((name, *call)) or 0) for name in ours), default=0) for call in calls}

        def cell(name: str, call: tuple[str, str], found: dict = found, best: dict = best) -> str:
            speed = found.get((name, *call))
            if not speed:
                return "-"
            bold = float(speed) == best[call] and not name.startswith("sdpa")
            return f"**{float(speed):.0f}**" if bold else f"{float(speed):.0f}"

        head = ["causal" if causal == "True" else "full", *(f"D {d}, N {n}" for d, n in calls)]
        parts.append(markdown(head, [[name, *(cell(name, call) for call in calls)] for name in names]))
    parts.append("Largest error of out against float64, and what the contract allows:\n")
    parts.append(_errors(rows, names))
    return "\n".join(parts)


def _errors(rows: Rows, names: Sequence[str]) -> str:
    head_dims = list(dict.fromkeys(row["D"] for row in rows))
    lines = []
    for name in names:
        cells = [name]
        for head_dim in head_dims:
            mine = [row for row in rows if (row["name"], row["D"]) == (name, head_dim) and row["error"]]
            worst = max(mine, key=lambda row: float(row["error"]) / float(row["allowed"]), default=None)
            cells.append(f"{float(worst['error']):.1e} of {float(worst['allowed']):.1e}" if worst else "-")
        lines.append(cells)
    return markdown(["", *(f"D {d}" for d in head_dims)], lines)


def facts(rows: Rows) -> str:
    titles = {
        "schedule": "schedule",
        "head_dim": "D",
        "block_m": "rows",
        "block_n": "keys",
        "warps": "warps",
        "smem_bytes": "shared memory (KB)",
        "registers": "registers",
        "ctas_sm": "CTAs per SM",
        "limited_by": "limited by",
        "barriers": "barriers per key tile",
        "tile_bytes": "KB read per key tile",
        "flop_per_byte": "FLOP per byte",
        "smem_moved": "KB through shared memory",
        "bank_conflicts": "bank conflicts",
    }
    kilobytes = {"smem_bytes", "tile_bytes", "smem_moved"}

    def cell(row: dict[str, str], name: str) -> str:
        return f"{int(row[name]) / 1024:.1f}" if name in kilobytes else row[name] or "-"

    return markdown(list(titles.values()), [[cell(row, name) for name in titles] for row in rows])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a table is stale")
    options = parser.parse_args(arguments)
    page = PAGE.read_text()
    new = filled(page)
    if options.check:
        return int(new != page)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
