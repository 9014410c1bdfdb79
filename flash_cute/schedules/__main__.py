"""python -m flash_cute.schedules: the ways to divide an attention tile, side by side.

On a GPU all schedules that serve the head dim are run beside PyTorch's attention: a table of TFLOP/s and of the error
against float64. Without one, or with --list, what is known of each: shared memory, registers, occupancy, traffic, bank
conflicts.

    python -m flash_cute.schedules --D 64 --N 1024 4096 16384 --causal --csv schedules.csv --plot schedules.png
    python -m flash_cute.schedules --list --D 64 128 --chip "RTX 4090"
    python -m flash_cute.schedules --list --D 64 --picture docs/pictures
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .._chips import CHIPS
from .._toolchain import ToolchainError
from . import _library, measure
from ._compile import HEAD_DIMS

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0; 2 where something is missing or a flag is wrong; 1 where an error exceeds the contract's bound."""
    options = _parse(arguments)
    try:
        if options.list or not torch.cuda.is_available():
            return _list(options)
        return _measure(options)
    except (ToolchainError, ValueError, OSError) as error:
        print(f"flash_cute.schedules: {error}", file=sys.stderr)
        return 2


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m flash_cute.schedules", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--D", type=_positive, nargs="+", default=[64], help="head dims (64)")
    parser.add_argument("--N", type=_positive, nargs="+", default=[8192], help="rows and keys (8192)")
    parser.add_argument("--B", type=_positive, default=1, help="batch size (1)")
    parser.add_argument("--heads", type=_positive, default=32, help="query heads (32)")
    parser.add_argument("--heads-kv", type=_positive, help="key heads (--heads)")
    parser.add_argument("--causal", action="store_true", help="a causal mask (none)")
    parser.add_argument("--dtype", choices=DTYPES, default="fp16", help="of the inputs (fp16)")
    parser.add_argument("--schedules", type=_schedules, default=_library.names(), metavar="NAME[,NAME...]")
    parser.add_argument("--peers", type=_peers, default=tuple(measure.PEERS), metavar="NAME[,NAME...]", help="or none")
    parser.add_argument("--rounds", type=_positive, default=7, help="timed rounds (7)")
    parser.add_argument("--seconds", type=_seconds, default=0.2, help="of a contender in a round, about (0.2)")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs (0)")
    parser.add_argument("--list", action="store_true", help="only what is known without running")
    parser.add_argument("--chip", choices=[chip.name for chip in CHIPS], default="A100", help="of the list (A100)")
    parser.add_argument("--csv", type=Path, help="write the rows to this file")
    parser.add_argument("--picture", type=Path, metavar="FOLDER", help="draw the schedules of the list side by side")
    parser.add_argument("--plot", type=Path, help="draw TFLOP/s and error to this file; needs matplotlib")
    options = parser.parse_args(arguments)
    options.heads_kv = options.heads_kv or options.heads
    if options.heads % options.heads_kv:
        parser.error(f"--heads-kv: expected a divisor of --heads {options.heads}, got {options.heads_kv}")
    most = max(HEAD_DIMS)
    if max(options.D) > most:
        parser.error(f"--D: expected at most {most}, got {max(options.D)}")
    return options


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return value


def _some(text: str, known: Sequence[str]) -> tuple[str, ...]:
    chosen = tuple(text.split(","))
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, got {', '.join(unknown)}")
    return chosen


def _schedules(text: str) -> tuple[str, ...]:
    return _some(text, _library.names())


def _peers(text: str) -> tuple[str, ...]:
    return () if text == "none" else _some(text, tuple(measure.PEERS))


def _list(options: argparse.Namespace) -> int:
    """Of the kernels that the head dims run in. Only this needs flash_cute.inspect, which is loaded here."""
    from . import facts

    held = sorted({min(d for d in HEAD_DIMS if d >= wanted) for wanted in options.D})
    chip = next(chip for chip in CHIPS if chip.name == options.chip)
    table = [row for row in facts.facts(held, chip) if row["schedule"] in options.schedules]
    print(f"occupancy on {chip.name}; bytes per CTA, of a step per key tile\n")
    print(facts.to_text(table), end="")
    if any(row["registers"] is None for row in table):
        print("\nregisters are not known before the kernels are compiled: the occupancy is that of their launch bounds")
    if options.csv:
        options.csv.write_text(facts.to_csv(table))
    if options.picture:
        _draw(options, held)
    return 0


def _draw(options: argparse.Namespace, head_dims: Sequence[int]) -> None:
    from . import facts
    from .picture import family_picture

    for head_dim in head_dims:
        chosen = [kernel for kernel in facts.kernels([head_dim]) if kernel.entry in options.schedules]
        for path in family_picture(chosen).save(options.picture, ("svg",)):
            print(path)


def _measure(options: argparse.Namespace) -> int:
    from ..__main__ import Progress

    shape = {"B": options.B, "H": options.heads, "Hkv": options.heads_kv, "causal": options.causal}
    problems = [measure.Problem(d, n, dtype=DTYPES[options.dtype], **shape) for d in options.D for n in options.N]
    _library.library()  # compiled before the bar begins
    steps = sum(measure.turns(problem, options.schedules, options.peers, options.rounds) for problem in problems)
    progress = Progress("measuring", steps)
    rows: list[dict[str, Any]] = []
    chosen = {"peers": options.peers, "rounds": options.rounds, "seconds": options.seconds, "seed": options.seed}
    for problem in problems:
        rows += measure.run(problem, options.schedules, **chosen, on_turn=progress)
    progress.close()
    first = rows[0]
    mask = "causal" if options.causal else "full"
    call = f"{first['dtype']}, batch {options.B}, {options.heads} heads, {mask}"
    print(f"{first['gpu']}, torch {first['torch']}: {call}\n")
    print(_text(rows), end="")
    if options.csv:
        measure.write_csv(options.csv, rows)
    if options.plot:
        _plot(options.plot, rows)
    bad = [row for row in rows if row["error"] is not None and row["error"] > row["allowed"]]
    for row in bad:
        print(f"NOT WITHIN THE BOUND: {row['name']}, D {row['D']}, N {row['N']}", file=sys.stderr)
    return int(any(row["name"] not in measure.PEERS for row in bad))


def _plot(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """One picture per head dim."""
    head_dims = list(dict.fromkeys(row["D"] for row in rows))
    for head_dim in head_dims:
        named = path if len(head_dims) == 1 else path.with_stem(f"{path.stem}_d{head_dim}")
        try:
            measure.plot([row for row in rows if row["D"] == head_dim], named)
        except ModuleNotFoundError as error:
            raise ValueError(f"--plot needs matplotlib: pip install matplotlib ({error})") from None
        print(named)


def _text(rows: Sequence[dict[str, Any]]) -> str:
    """Fastest first within each problem."""
    lines = [f"{'D':>4} {'N':>7}  {'name':<16} {'TFLOP/s':>8} {'+-':>6} {'error':>9} {'allowed':>9} {'lse':>9}"]
    for key in dict.fromkeys((row["D"], row["N"]) for row in rows):
        mine = [row for row in rows if (row["D"], row["N"]) == key]
        for row in sorted(mine, key=lambda row: -(row["tflops"] or 0)):
            begin = f"{row['D']:>4} {row['N']:>7}  {row['name']:<16}"
            if row["tflops"] is None:
                lines.append(f"{begin} not served: {row['reason']}"[:120])
                continue
            lse = "-" if row["lse_error"] is None else f"{row['lse_error']:.1e}"
            speed = f"{row['tflops']:>8.1f} {row['spread']:>6.1%}"
            lines.append(f"{begin} {speed} {row['error']:>9.1e} {row['allowed']:>9.1e} {lse:>9}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
