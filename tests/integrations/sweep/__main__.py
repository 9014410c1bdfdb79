"""Every architecture of the installed Transformers, by flash_cute against eager, from the folder tests/integrations/:

python -m sweep                              all models in all modes; what results.json knows is not run again
python -m sweep --model llama --model bart:seq2seq --mode plain,left --again
python -m sweep --failed                     only what was wrong, unclear, not reached or not built
python -m sweep --fixed                      the part that CI runs
python -m sweep --table models.md            writes the table of what results.json knows
"""

from __future__ import annotations

import argparse
import json
import random
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
    parser.add_argument("--seconds", type=float, default=60, help="how long one mode of a model may take")
    parser.add_argument("--shuffle", action="store_true", help="models in random order, for a run that is ended early")
    parser.add_argument("--fixed", action="store_true", help="the part that CI runs")
    parser.add_argument("--failed", action="store_true", help="only what was wrong, unclear, not reached or not built")
    parser.add_argument("--again", action="store_true", help="run also what is known")
    parser.add_argument("--results", type=Path, default=Path("sweep_results.json"))
    parser.add_argument("--table", type=Path, help="write a table of all results, in Markdown")
    return parser.parse_args()


def main() -> int:
    options = _options()
    warnings.simplefilter("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    from . import modes, pool, runner, table
    from .fixed import FIXED, SLOW
    from .models import models
    from .outcome import BAD

    results: pool.Results = json.loads(options.results.read_text()) if options.results.exists() else {}
    everything = [*modes.MODES, runner.WIDE]
    without = [m for m in options.without.split(",") if m]
    wanted = [m for m in (options.mode.split(",") if options.mode else everything) if m not in without]
    unknown = [m for m in [*wanted, *without] if m not in everything]
    if unknown:
        print(f"unknown modes {unknown}; there are {everything}", file=sys.stderr)
        return 2

    def left(name: str) -> list[str]:
        known = results.get(name, {})
        if options.again or ("load" in known and options.failed and known["load"]["result"] in BAD):
            return wanted
        if "load" in known:
            return []
        if any(m.startswith("after ") for m in known):
            return [m for m in wanted if m not in known]
        if options.failed:
            return [m for m in wanted if known.get(m, {}).get("result") in BAD] or (wanted if not known else [])
        return [m for m in wanted if m not in known]

    work: list[tuple[Any, list[str]]] = []
    for model in models():
        if options.model and not {model.model_type, model.name} & set(options.model):
            continue
        if options.fixed:
            if model.name in FIXED:
                part = FIXED[model.name]
                work.append((model, [m for m in wanted if m not in SLOW or m in part.slow]))
            continue
        if modes_left := left(model.name):
            work.append((model, modes_left))

    if options.shuffle:
        random.shuffle(work)
    begin, count = time.monotonic(), 0

    def done(model: Any, found: dict[str, Any]) -> None:
        nonlocal count
        count += 1
        known = results.get(model.name, {})
        if "load" in found or "load" in known:
            known = {}
        results[model.name] = {**{k: x for k, x in known.items() if not k.startswith("after ")}, **found}
        options.results.write_text(json.dumps(results, indent=1, sort_keys=True))
        bad = [
            f"{m}: {x['result']} {x['error'] or ''} {x['text'][:160]!r}" for m, x in found.items() if x["result"] in BAD
        ]
        print(
            f"{count}/{len(work)} {time.monotonic() - begin:.0f} s {model.name} {len(found)}",
            *bad,
            sep="\n    ",
            flush=True,
        )

    runner.register()
    pool.run_all(work, done, device=options.device, jobs=options.jobs, seconds=options.seconds)
    names = {model.name for model, _ in work}
    counts = table.counts({n: x for n, x in results.items() if n in names or not work})
    print(*(f"{n} {result}" for result, n in counts.items()), sep=", ")
    if options.table:
        options.table.write_text(table.markdown(results, f"Transformers {transformers.__version__}"))
    return 1 if any(x["result"] in BAD for n in names for x in results[n].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
