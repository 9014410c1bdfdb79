"""Every architecture of the installed Transformers, by flash_cute against eager, from the folder tests/integrations/:

python -m sweep                              all models in all modes; what results.json knows is not run again
python -m sweep --model llama --model bart:seq2seq --mode plain,left --again
python -m sweep --failed                     only what was wrong, unclear, not reached or not built
python -m sweep --fixed                      the part that CI runs
python -m sweep --table models.md            writes the table of what results.json knows

Slow modes (compile, compile left, batching) are run after all others, and what gave no answer in its time is run once
more at the end, alone; --limit ends a run in time. The results are written as they come, with --results FILE.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sweep", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", action="append", default=[], help="a model type, or type:kind; several times")
    parser.add_argument("--mode", default="", help="modes, separated by commas")
    parser.add_argument("--without", default="", help="modes that are left out, separated by commas")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--slow-jobs", type=int, help="processes for the slow modes; half as many if not given")
    parser.add_argument(
        "--seconds", type=float, default=60, help="how long one mode may take; a slow one twice as long"
    )
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which nothing more is run")
    parser.add_argument("--half", action="store_true", help="flash_cute's attention in float16, as always on a GPU")
    parser.add_argument("--shuffle", action="store_true", help="models in random order, for a run that is ended early")
    parser.add_argument("--fixed", action="store_true", help="the part that CI runs")
    parser.add_argument("--failed", action="store_true", help="only what was wrong, unclear, not reached or not built")
    parser.add_argument("--again", action="store_true", help="run also what is known")
    parser.add_argument("--results", type=Path, default=Path("sweep_results.json"))
    parser.add_argument("--table", type=Path, help="write a table of all results, in Markdown")
    return parser.parse_args()


class Record:
    """The results of this run and earlier ones, in a file that is whole at any time."""

    SECONDS = 2  # between two writes

    def __init__(self, path: Path) -> None:
        self.path, self.begin = path, time.monotonic()
        self.results: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
        self.written = self.count = 0

    def left(self, name: str, wanted: list[str], options: argparse.Namespace) -> list[str]:
        """The modes of a model that are to be run."""
        from .outcome import BAD

        known = self.results.get(name, {})
        if options.again or ("load" in known and options.failed and known["load"]["result"] in BAD):
            return wanted
        if "load" in known:
            return []
        if options.failed:
            return [m for m in wanted if known.get(m, {}).get("result") in BAD] or (wanted if not known else [])
        return [m for m in wanted if m not in known]

    def add(self, model: Any, found: dict[str, Any]) -> None:
        from . import table

        self.count += 1
        known = self.results.get(model.name, {})
        self.results[model.name] = found if "load" in found or "load" in known else {**known, **found}
        bad = table.faults({model.name: found})
        print(f"{self.count}: {time.monotonic() - self.begin:.0f} s {model.name} {len(found)}", *bad, sep="\n    ")
        if time.monotonic() - self.written > self.SECONDS:
            self.write()

    def write(self) -> None:
        self.written = time.monotonic()
        other = self.path.with_name(f"{self.path.name}.new")
        other.write_text(json.dumps(self.results, indent=1, sort_keys=True))
        os.replace(other, self.path)


def _work(options: argparse.Namespace, wanted: list[str], record: Record) -> list[tuple[Any, list[str]]]:
    from .fixed import FIXED, SLOW
    from .models import models

    work: list[tuple[Any, list[str]]] = []
    for model in models():
        if options.model and not {model.model_type, model.name} & set(options.model):
            continue
        if options.fixed:
            if model.name in FIXED:
                part = FIXED[model.name]
                work.append((model, [m for m in wanted if m not in SLOW or m in part.slow]))
        elif modes_left := record.left(model.name, wanted, options):
            work.append((model, modes_left))
    if options.shuffle:
        random.shuffle(work)
    return work


def _run(options: argparse.Namespace, work: list[tuple[Any, list[str]]], record: Record) -> int:
    """Runs the work in phases, and returns how many models were not run, or not in all modes, within the limit."""
    from . import pool, runner
    from .fixed import SLOW
    from .outcome import NO_ANSWER

    runner.register()
    until = time.monotonic() + options.limit
    cut: set[str] = set()

    def phase(part: list[tuple[Any, list[str]]], jobs: int, seconds: float) -> None:
        part = [(m, x) for m, x in part if x and "load" not in record.results.get(m.name, {})]
        setting = {"device": options.device, "jobs": max(jobs, 1), "seconds": seconds, "half": options.half}
        cut.update(m.name for m, _ in pool.run_all(part, record.add, until=until, **setting))

    slow_jobs = options.slow_jobs or options.jobs // 2
    known = {m.name: record.results.pop(m.name) for m, x in work if "load" in record.results.get(m.name, {})}
    try:
        phase([(m, [x for x in of_model if x not in SLOW]) for m, of_model in work], options.jobs, options.seconds)
        phase([(m, [x for x in of_model if x in SLOW]) for m, of_model in work], slow_jobs, 2 * options.seconds)
        unanswered = {
            m.name: [x for x in of_model if record.results.get(m.name, {}).get(x, {}).get("result") == NO_ANSWER]
            for m, of_model in work
        }
        phase([(m, unanswered[m.name]) for m, _ in work], 1, 4 * options.seconds)
    finally:
        record.results = {**known, **record.results}
        record.write()
    return len(cut)


def main() -> int:
    options = _options()
    warnings.simplefilter("ignore")
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))  # what is known is written
    import transformers

    transformers.logging.set_verbosity_error()
    from . import modes, runner, table

    everything = [*modes.MODES, runner.WIDE]
    without = options.without.split(",") if options.without else []
    given = options.mode.split(",") if options.mode else everything
    unknown = [m for m in [*given, *without] if m not in everything]
    if unknown:
        print(f"unknown modes {unknown}; there are {everything}", file=sys.stderr)
        return 2
    record = Record(options.results)
    work = _work(options, [m for m in everything if m in given and m not in without], record)
    cut = _run(options, work, record)
    results = record.results
    named = {m.name for m, _ in work}
    part = {n: x for n, x in results.items() if n in named or not work}
    bad = table.faults(part)
    print(f"\n{time.monotonic() - record.begin:.0f} s", *(f"{n} {x}" for x, n in table.counts(part).items()), sep="\n")
    most = sum(x["text"].startswith("with ") for of_model in part.values() for x in of_model.values())
    if most:
        print(f"{most} of them not with each input that was tried")
    if cut:
        print(f"{cut} models not run, or not in all modes: the limit of {options.limit:.0f} s")
    print(*(bad or ["all right or refused"]), sep="\n")
    if options.table:
        options.table.write_text(table.markdown(results, f"Transformers {transformers.__version__}"))
    return 1 if bad or cut else 0


if __name__ == "__main__":
    sys.exit(main())
