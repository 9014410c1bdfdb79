"""Fill the tables of measured figures in the documentation from bench/results/*.csv.

    python bench/readme.py            # rewrites README.md and docs/*.md
    python bench/readme.py --check    # exit status 1 if a table is not what its CSV says

A table stands between `<!-- bench:NAME -->` and `<!-- end bench -->`, and comes from bench/results/NAME.csv; no figure
is typed by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if not __package__:
    # Run as a script: bench/ must not hide the standard library's `profile`, nor this tree the installed package.
    sys.path[:] = [*sys.path[1:], str(ROOT)]

from bench import figures  # noqa: E402
from bench.figures import Figure, Results, Table  # noqa: E402

MARKED = re.compile(r"(<!-- bench:([\w.-]+) -->\n).*?(<!-- end bench -->)", re.DOTALL)


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "bench" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def figure_text(figure: Figure | None, clock: str) -> str:
    if figure is None:
        return "-"
    if clock == "host":
        return f"{figure.number('median_us'):.1f}"
    rate = figure.number("tflops")
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def ratio_text(figure: Figure | None, peer: str) -> str:
    if figure is None or figure.ratio(peer) is None:
        return "-"
    return f"{figure.ratio(peer):.3f}"


def markdown_table(table: Table) -> list[str]:
    """One line a shape; the last line has the geometric means of the ratios."""
    pairs = table.pairs
    several = len({mine for mine, _ in pairs}) > 1
    heads = ["D", "mask", "N", "B, H", "dtype", *(figures.provider_title(name) for name in table.providers)]
    heads += [
        f"{figures.provider_title(mine)} / {figures.provider_title(peer)}"
        if several
        else f"ratio to {figures.provider_title(peer)}"
        for mine, peer in pairs
    ]
    lines = [f"| {' | '.join(heads)} |", f"| {' | '.join('---' for _ in heads)} |"]
    for shape in table.shapes:
        d, causal, n, m, b, h, hkv, dtype = shape
        cells = [
            d,
            figures.MASKS[causal],
            n if n == m else f"{n} x {m}",
            f"{b}, {h if h == hkv else f'{h}/{hkv}'}",
            dtype,
        ]
        cells += [figure_text(table.find(shape, name), table.clock) for name in table.providers]
        cells += [ratio_text(table.find(shape, mine), peer) for mine, peer in pairs]
        lines.append(f"| {' | '.join(cells)} |")
    if len(table.shapes) > 1 and pairs:
        blanks = ["geometric mean", *[""] * (4 + len(table.providers))]
        means = [f"{table.geometric_mean(mine, peer):.3f}" for mine, peer in pairs]
        lines.append(f"| {' | '.join([*blanks, *means])} |")
    return lines


def section(results: Results, page: Path) -> str:
    link = results.path.relative_to(ROOT).as_posix()
    up = "../" * (len(page.relative_to(ROOT).parts) - 1)
    lines: list[str] = []
    for table in results.tables:
        title = table.title
        spread = max(figure.number("spread") for figure in table.figures)
        lines += [f"{title[0].upper()}{title[1:]} (spread of the rounds at most {100 * spread:.1f} %):", ""]
        lines += [*markdown_table(table), ""]
    image = results.path.with_suffix(".png")
    if image.exists():
        lines += [f"![{results.path.stem}]({up}{image.relative_to(ROOT).as_posix()})", ""]
    lines.append(f"{figures.belongs_to(results.facts)}; [{results.path.name}]({up}{link}).")
    if results.facts["matmul_tflops"]:
        lines.append(f"A bf16 8192^3 matrix product ran at {results.facts['matmul_tflops']} TFLOP/s in the same run.")
    for name, reason in results.absent.items():
        lines.append(f"Not there to be measured: {figures.provider_title(name)} ({reason}).")
    return "\n".join(lines) + "\n"


def filled(text: str, page: Path) -> str:
    def fill(match: re.Match[str]) -> str:
        path = figures.RESULTS / f"{match[2]}.csv"
        body = section(figures.read(path), page) if path.exists() else f"Not measured yet (no {path.name}).\n"
        return f"{match[1]}{body}{match[3]}"

    return MARKED.sub(fill, text)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench/readme.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 if a table is stale")
    flags = parser.parse_args(arguments)
    stale = []
    for page in pages():
        if not page.exists():
            continue
        text = page.read_text()
        new = filled(text, page)
        if new != text:
            stale.append(page.relative_to(ROOT))
            if not flags.check:
                page.write_text(new)
    for page in stale:
        print(f"{'stale' if flags.check else 'filled'}: {page}")
    return 1 if flags.check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
