"""The table of results, in Markdown."""

from __future__ import annotations

import collections
from typing import Any

from .outcome import (
    BAD,
    EAGER_FAILS,
    NO_ANSWER,
    NOT_APPLICABLE,
    NOT_BUILT,
    NOT_REACHED,
    REFUSED_AT_CALL,
    REFUSED_AT_LOAD,
    RESULTS,
    RIGHT,
    UNCLEAR,
    WRONG,
)

OfModel = dict[str, dict[str, Any]]
SIGNS = {
    RIGHT: "right",
    REFUSED_AT_CALL: "refused",
    REFUSED_AT_LOAD: "refused",
    EAGER_FAILS: "",
    NOT_APPLICABLE: "",
    WRONG: "**wrong**",
    UNCLEAR: "**unclear**",
    NOT_REACHED: "**not reached**",
    NOT_BUILT: "**not built**",
    NO_ANSWER: "**no answer**",
}
# Columns, and the modes that are in each: the worst counts.
COLUMNS = {
    "plain": ("plain", "wide window"),
    "padded left, right": ("left", "right", "equal", "equal right"),
    "padding between": ("inner",),
    "packed": ("packed", "packed, cache", "offsets"),
    "images": ("image", "image left"),
    "gradients": ("gradients", "gradients left"),
    "generate": ("dynamic", "static", "beams"),
    "batching": ("batching",),
    "one graph": ("compile", "compile left"),
}
ORDER = (*BAD, REFUSED_AT_CALL, RIGHT)


def counts(results: dict[str, OfModel]) -> dict[str, int]:
    """How many modes of all models had each result."""
    found = collections.Counter(x["result"] for of_model in results.values() for x in of_model.values())
    return {result: found[result] for result in RESULTS if found[result]}


def faults(results: dict[str, OfModel]) -> list[str]:
    """A line for each mode that is neither right nor refused nor without a comparison."""
    return [
        f"{name} {mode}: {x['result']} {x['error'] or ''} {x['text'][:160]!r}"
        for name, of_model in sorted(results.items())
        for mode, x in of_model.items()
        if x["result"] in BAD
    ]


def markdown(results: dict[str, OfModel], versions: str) -> str:
    """What is right, what is refused and with which sentence, and what could not be compared."""
    run = {name: x for name, x in sorted(results.items()) if "load" not in x}
    at_load = {name: x["load"] for name, x in sorted(results.items()) if "load" in x}
    refused = {name: x for name, x in at_load.items() if x["result"] == REFUSED_AT_LOAD}
    other = {name: x for name, x in at_load.items() if x["result"] not in (REFUSED_AT_LOAD, NOT_APPLICABLE)}
    errors = [x["error"] for of_model in run.values() for x in of_model.values() if x["result"] == RIGHT]
    lines = [
        "# Transformers' models",
        "",
        f"Tiny random models of the architectures of {versions}, on the CPU in float32, with eager attention beside: "
        f"{len(run)} run, {len(refused)} are refused when they are loaded.",
        f"The largest relative difference of what is right: {max(errors, default=0):.1e}. Written by `python -m sweep "
        "--table FILE`, from the folder `tests/integrations`, whose `--help` says how to run single models.",
        "",
        "| models that run | " + " | ".join(COLUMNS) + " |",
        "| --- |" + " --- |" * len(COLUMNS),
    ]
    rows: dict[tuple[str, ...], list[str]] = collections.defaultdict(list)
    for name, of_model in run.items():
        rows[tuple(_cell(of_model, modes) for modes in COLUMNS.values())].append(name)
    for cells, names in sorted(rows.items(), key=lambda row: (-len(row[1]), row[1])):
        lines.append(f"| {', '.join(names)} | " + " | ".join(cells) + " |")
    lines += ["", f"Empty: the model has nothing of that, or eager itself fails.{_parts(run)}", ""]
    lines += ["What is refused at a call:", ""]
    lines += _sentences({n: x for n, of_model in run.items() for x in [_first(of_model)] if x})
    lines += ["", "What is refused at load:", ""]
    lines += _sentences({name: x["text"] for name, x in refused.items()})
    if other:
        lines += ["", "What could not be compared:", "", "| model | result | reason |", "| --- | --- | --- |"]
        lines += [f"| {n} | {x['result']} | {_short(x['text'])} |" for n, x in other.items()]
    return "\n".join(lines) + "\n"


def _parts(run: dict[str, OfModel]) -> str:
    """A sentence on the columns of which a part of the models was run."""
    counts = {column: sum(modes[0] in x for x in run.values()) for column, modes in COLUMNS.items()}
    parts = [f"{column} ({n})" for column, n in counts.items() if n < len(run)]
    return f" Run for some of the models alone, chosen at random: {', '.join(parts)}." if parts else ""


def _cell(of_model: OfModel, modes: tuple[str, ...]) -> str:
    found = {of_model[m]["result"] for m in modes if m in of_model}
    return SIGNS[next((result for result in ORDER if result in found), NOT_APPLICABLE)]


def _first(of_model: OfModel) -> str:
    return next((x["text"] for x in of_model.values() if x["result"] == REFUSED_AT_CALL), "")


def _short(text: str) -> str:
    return " ".join(text.split())[:160].replace("|", "/")


def _sentences(texts: dict[str, str]) -> list[str]:
    """Each sentence once, without the name of the class that it ends with, and the models that it stands for."""
    models: dict[str, list[str]] = collections.defaultdict(list)
    for name, text in texts.items():
        models[_short(text.split(", got ")[0])].append(name)
    return [f"* {text}: {', '.join(names)}" for text, names in sorted(models.items(), key=lambda x: -len(x[1]))]
