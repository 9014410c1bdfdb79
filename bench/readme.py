"""Fill the tables of measured figures in the documentation from the CSVs in bench/results/.

    python bench/readme.py            # rewrites README.md and docs/*.md
    python bench/readme.py --check    # exit status 1 if a table is not what its CSV says

A table stands between `<!-- bench:NAME -->` and `<!-- end bench -->`, and comes from bench/results/NAME.csv. NAME is
`h200/paper`, say; `paper` is that of the newest GPU that has it (`figures.GPUS`). No figure is typed by hand.
`<!-- bench:sentence:FORWARD,BACKWARD -->` is a plot of the forward, and one sentence of both.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if not __package__:
    # Run as a script: bench/ must not hide the standard library's `profile`, nor this tree the installed package.
    sys.path[:] = [*sys.path[1:], str(ROOT)]

from bench import choice_table, errors, figures, steps  # noqa: E402
from bench.figures import Figure, Results, Table  # noqa: E402

MARKED = re.compile(r"(<!-- bench:(sentence:)?([\w.,/-]+) -->\n).*?(<!-- end bench -->)", re.DOTALL)


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "bench" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def figure_text(figure: Figure | None, clock: str) -> str:
    if figure is None:
        return "-"
    if clock == "host":
        return f"{figure.number('median_us'):.1f}"
    if figure.row.get("cache_tbytes"):
        return f"{figure.number('median_us'):.1f} ({figure.number('cache_tbytes'):.2f})"
    rate = figure.number("tflops")
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


Shape = tuple[str, ...]  # `Figure.shape`: D, causal, N, M, B, H, Hkv, dtype, options


def length_text(shape: Shape) -> str:
    return shape[2] if shape[2] == shape[3] else f"{shape[2]} x {shape[3]}"


def heads_text(shape: Shape) -> str:
    return f"{shape[4]}, {shape[5] if shape[5] == shape[6] else f'{shape[5]}/{shape[6]}'}"


def shared(table: Table) -> list[str]:
    """What all shapes have in common, and so is said once instead of in a column."""
    facts = []
    columns: list[tuple[str, Callable[[Shape], str]]] = [
        ("", lambda shape: shape[7]),
        ("", lambda shape: shape[8]),
        ("N = ", length_text),
        ("B, H = ", lambda shape: f"({heads_text(shape)})"),
    ]
    for title, text in columns:
        values = {text(shape) for shape in table.shapes}
        if len(values) == 1:
            facts += [title + text for text in values if text]
    tokens = tokens_and_width(table)
    if tokens:
        facts.append(f"B x N = {tokens[0]:,}, H x D = {tokens[1]:,}")
    return facts


def tokens_and_width(table: Table) -> tuple[int, int] | None:
    """B x N and H x D, where every shape has the same of both, no grouped heads, and several lengths."""
    found = set()
    for d, _, n, m, b, h, hkv, _, options in table.shapes:
        if (n, h) != (m, hkv) or "packed" in options:
            return None
        found.add((int(b) * int(n), int(h) * int(d)))
    several = len({shape[2] for shape in table.shapes}) > 1
    return next(iter(found)) if len(found) == 1 and several else None


def shape_columns(table: Table) -> list[tuple[str, Callable[[Shape], str]]]:
    """Head and text of the columns that name a shape; those that `shared` says are left out."""
    always: list[tuple[str, Callable[[Shape], str]]] = [
        ("D", lambda shape: shape[0]),
        ("mask", lambda shape: figures.MASKS[shape[1]]),
    ]
    varying: list[tuple[str, Callable[[Shape], str]]] = [("options", lambda shape: shape[8]), ("N", length_text)]
    varying += [("B, H", heads_text)] if tokens_and_width(table) is None else []
    varying.append(("dtype", lambda shape: shape[7]))
    return always + [(title, text) for title, text in varying if len({text(shape) for shape in table.shapes}) > 1]


@dataclass(frozen=True)
class RatioColumn:
    """The ratios of one of ours: to the fastest peer of each shape, or of a deterministic mode to the default one."""

    title: str
    cells: dict[Shape, str]
    ratios: list[float]


def ratio_columns(table: Table) -> list[RatioColumn]:
    columns = []
    for ours in table.ours:
        name = f"{figures.provider_title(ours)} / " if len(table.ours) > 1 else "ratio to "
        rivals, best = table.rivals(ours), table.best_ratios(ours)
        if len(rivals) == 1:
            cells = {shape: f"{ratio:.3f}" for shape, _, ratio in best}
            columns.append(RatioColumn(name + figures.provider_title(rivals[0]), cells, [x for *_, x in best]))
        elif rivals:
            cells = {shape: f"{ratio:.3f} {figures.provider_title(peer)}" for shape, peer, ratio in best}
            columns.append(RatioColumn(f"{name}best peer", cells, [x for *_, x in best]))
        for title, base in table.baselines(ours).items():
            found = {shape: figure.ratio(base) for shape in table.shapes if (figure := table.find(shape, ours))}
            cells = {shape: f"{ratio:.3f}" for shape, ratio in found.items() if ratio is not None}
            several = sum(title in table.baselines(other) for other in table.ours) > 1
            name = f"{figures.provider_title(ours)}: " if several else ""
            columns.append(RatioColumn(name + title, cells, table.ratios(ours, base)))
    return columns


def markdown_table(table: Table) -> list[str]:
    """One line per shape; the last line has the geometric means of the ratios."""
    shape_part, ratio_part = shape_columns(table), ratio_columns(table)
    heads = [title for title, _ in shape_part]
    heads += [figures.provider_title(name) for name in table.providers]
    heads += [column.title for column in ratio_part]
    lines = [f"| {' | '.join(heads)} |", f"| {' | '.join('---' for _ in heads)} |"]
    for shape in table.shapes:
        cells = [text(shape) for _, text in shape_part]
        cells += [figure_text(table.find(shape, name), table.clock) for name in table.providers]
        cells += [column.cells.get(shape, "-") for column in ratio_part]
        lines.append(f"| {' | '.join(cells)} |")
    if len(table.shapes) > 1 and ratio_part:
        blanks = ["geometric mean", *[""] * (len(shape_part) - 1 + len(table.providers))]
        means = [f"{statistics.geometric_mean(column.ratios):.3f}" for column in ratio_part]
        lines.append(f"| {' | '.join([*blanks, *means])} |")
    return lines


def where(shape: Shape) -> str:
    d, causal, n, m, *_, options = shape
    text = f"D {d} {figures.MASKS[causal]} N {n if n == m else f'{n} x {m}'}"
    return f"{text} {options}" if options else text


def standing(table: Table) -> Iterator[str]:
    """For each of ours in how many shapes it is ahead of the best peer, where least so, and its mean to each peer."""
    for ours in table.ours:
        best = table.best_ratios(ours)
        if not best:
            continue
        ahead = sum(ratio >= 1 for *_, ratio in best)
        shape, peer, least = min(best, key=lambda item: item[2])
        means = [
            f"{table.geometric_mean(ours, one):.3f} to {figures.provider_title(one)}"
            for mine, one in table.pairs
            if mine == ours and not one.startswith("flash_cute")
        ]
        rivals = table.rivals(ours)
        rival = figures.provider_title(rivals[0]) if len(rivals) == 1 else "the best peer"
        yield (
            f"* {figures.provider_title(ours)}: at least as fast as {rival} in {ahead} of {len(best)} shapes; "
            f"least {least:.3f} ({where(shape)}, {figures.provider_title(peer)}); "
            f"geometric mean of the ratio {', '.join(means)}."
        )


def behind_others(table: Table) -> Iterator[str]:
    """For each peer that was not in this run the shapes in which, scaled from another run, it would be ahead."""
    ours = next((name for name in table.ours if ":sm80" not in name and not name.endswith(figures.DETERMINISTIC)), None)
    if ours is None or table.clock != "events":
        return
    for name in figures.OTHERS:
        ahead, shapes = [], 0
        for shape in table.shapes:
            figure = table.find(shape, ours)
            rate = figures.other_rate(name, [one for one in table.figures if one.shape == shape])
            if figure is None or rate is None:
                continue
            shapes += 1
            if figure.number("tflops") < rate:
                ahead.append(f"{where(shape)} ({figure.number('tflops') / rate:.3f})")
        if shapes:
            named = f": {', '.join(ahead)}" if ahead else ""
            yield (
                f"* {figures.provider_title(name)}, not in this run and scaled from another (hollow marks), "
                f"would be ahead of {figures.provider_title(ours)} in {len(ahead)} of {shapes} shapes{named}."
            )


def speed_section(results: Results) -> list[str]:
    lines: list[str] = []
    for table in results.tables:
        spread = max(figure.number("spread") for figure in table.figures)
        title = ", ".join([f"{table.title[0].upper()}{table.title[1:]}", *shared(table)])
        lines += [f"{title} (spread of the rounds at most {100 * spread:.1f} %):", ""]
        sentences = [*standing(table), *behind_others(table)]
        lines += [*markdown_table(table), "", *sentences, *([""] if sentences else [])]
    return lines


def section(path: Path, page: Path) -> str:
    """What stands between the marks of a CSV."""
    up = "../" * (len(page.relative_to(ROOT).parts) - 1)
    notes = []
    if errors.is_accuracy(path):
        found = errors.read(path)
        facts, lines = found.facts, list(errors.markdown_tables(found))
    elif errors.is_float8(path):
        found = errors.read_float8(path)
        facts, lines = found.facts, list(errors.float8_lines(found))
    elif steps.is_layers(path):
        facts, lines = steps.layer_facts(path), list(steps.layer_lines(path))
    elif steps.is_steps(path):
        timed = steps.read(path)
        facts, lines = timed.facts, list(steps.markdown_lines(timed))
        notes.append(f"Transformers {timed.facts['transformers']}.")
    elif choice_table.is_choices(path):
        rows = choice_table.read(path)
        facts, lines = choice_table.facts_of(rows), list(choice_table.markdown(rows))
    else:
        results = figures.read(path)
        facts, lines = results.facts, speed_section(results)
        if facts["matmul_tflops"]:
            notes.append(f"A bf16 8192^3 matrix product ran at {facts['matmul_tflops']} TFLOP/s in the same run.")
        for name, reason in results.absent.items():
            notes.append(f"Not there to be measured: {figures.provider_title(name)} ({reason}).")
    image = path.with_suffix(".png")
    if image.exists():
        lines += [f"![{figures.name_of(path).removesuffix('.csv')}]({up}{image.relative_to(ROOT).as_posix()})", ""]
    link = path.relative_to(ROOT).as_posix()
    lines.append(f"{figures.belongs_to(facts)}; [{figures.name_of(path)}]({up}{link}).")
    return "\n".join([*lines, *notes]) + "\n"


def sentence(forward: Path, backward: Path, page: Path) -> str:
    """The forward's plot, and how both directions stand beside the fastest peer of each shape."""
    up = "../" * (len(page.relative_to(ROOT).parts) - 1)
    image = forward.with_suffix(".png").relative_to(ROOT).as_posix()
    tables = [figures.read(path).tables[0] for path in (forward, backward)]
    found = []
    for table in tables:
        ratios = [ratio for *_, ratio in table.best_ratios(table.ours[0])]
        found.append((f"{statistics.geometric_mean(ratios):.2f} times as fast", f"{min(ratios):.3f}"))
    *others, last = (figures.provider_title(name) for name in tables[0].rivals(tables[0].ours[0]))
    peers = f"{', '.join(others)} and {last}" if others else last
    facts = figures.read(forward).facts
    (mean, least), (mean_backward, least_backward) = found
    text = (
        f"On an {facts['gpu']} the forward is {mean} as the best of {peers} (geometric mean of "
        f"{len(tables[0].shapes)} shapes, least {least}), and the backward is {mean_backward} (least {least_backward})."
    )
    return f"![TFLOP/s of the forward, by length]({up}{image})\n\n{text}\n"


def filled(text: str, page: Path) -> str:
    def fill(match: re.Match[str]) -> str:
        paths = [figures.csv_of(name) for name in match[3].split(",")]
        missing = [figures.name_of(path) for path in paths if not path.exists()]
        if missing:
            body = f"Not measured yet (no {', '.join(missing)}).\n"
        else:
            body = sentence(*paths, page) if match[2] else section(paths[0], page)
        return f"{match[1]}{body}{match[4]}"

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
