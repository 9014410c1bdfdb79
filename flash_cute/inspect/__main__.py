"""python -m flash_cute.inspect: tables, pictures and checks of the kernels, from the traits that are compiled.

table                       budget, occupancy and roofline of every kernel
check                       every check on every kernel; exit status 1 if one fails
kernels                     their names, for the options below
draw schedule --caches 1:6000,4:3000,64:700
                            a batch of attention over caches, as rows:keys of each sequence
draw banks --operand V      a picture of one kernel: banks, threads, warps, transposition, mask, schedule, packed,
                            budget, or all
tour --out docs             the guided tours of docs/ and their pictures; --check: only say what is stale

Only what a command needs is compiled, once: about 10 s of one core per direction, architecture and head dim.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from . import build, caches, float8, packed, pictures, tables, tour
from .build import InspectError
from .checks import CHECKS, mask_definition
from .kernels import CAUSAL, Kernel, PackedProblem, Problem, find, kernels
from .warps import warp_picture


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        done: int = options.run(options)
        return done
    except (InspectError, ValueError, OSError) as error:
        print(f"flash_cute.inspect: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flash_cute.inspect", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--csrc", type=Path, help="another folder of headers than the installed one")
    commands = parser.add_subparsers(required=True, metavar="command")

    some = argparse.ArgumentParser(add_help=False)
    some.add_argument("--arch", choices=build.ARCHS, help="default: all")
    some.add_argument("--direction", choices=build.DIRECTIONS, help="forward or backward; default: both")
    some.add_argument("--head-dims", type=_head_dims, metavar="D[,D...]", help="default: those of the library")

    table = commands.add_parser("table", parents=[some], help="budget, occupancy and roofline")
    table.add_argument("--format", choices=("text", "csv", "json"), default="text")
    table.add_argument("--chip", choices=[chip.name for chip in tables.CHIPS], help="default: all")
    table.add_argument("--out", type=Path, help="a file; default: print")
    table.set_defaults(run=_table)

    check = commands.add_parser("check", parents=[some], help="every check on every kernel")
    check.set_defaults(run=_check)

    names = commands.add_parser("kernels", parents=[some], help="list the kernels")
    names.set_defaults(run=_kernels)

    draw = commands.add_parser("draw", help="pictures of one kernel")
    draw.add_argument("what", choices=(*DRAW, "all"))
    draw.add_argument("--arch", default="sm80", choices=build.ARCHS)
    draw.add_argument(
        "--direction", default="fwd", choices=build.DIRECTIONS, help="a backward has banks and budget (fwd)"
    )
    draw.add_argument("--head-dim", type=_positive, default=128)
    draw.add_argument("--family", help="such as forward/fp8_rows, as `kernels` lists them; default: the first")
    draw.add_argument("--entry", help="of the tile table, as `kernels` lists them; default: the first")
    draw.add_argument(
        "--operand", default="K", help="of banks: Q, K, V, O; of a backward Q, K, Qt, Kt, dS, dSt, dK (K)"
    )
    draw.add_argument("--access", help="of banks: a word of the access's name: into, registers, shared, global, tensor")
    draw.add_argument(
        "--causal",
        nargs="?",
        const="bottom_right",
        choices=CAUSAL,
        help="mask of mask and schedule; default: none, over caches bottom_right",
    )
    draw.add_argument(
        "--window",
        type=_limit,
        nargs=2,
        default=(None, None),
        metavar=("LEFT", "RIGHT"),
        help="keys that a row sees before and after its position; -1: no limit",
    )
    draw.add_argument("--lengths", type=_positive, nargs=2, default=(2048, 2048), metavar=("LEN_Q", "LEN_K"))
    draw.add_argument(
        "--packed",
        type=_lengths,
        default=(3000, 1100, 700, 260, 100, 100, 30),
        metavar="LENGTH[,LENGTH...]",
        help="the sequences of packed",
    )
    draw.add_argument(
        "--caches",
        type=_sequences,
        metavar="ROWS:KEYS[,ROWS:KEYS...]",
        help="of schedule: the sequences of a call over caches; keys below 0: a row that pads a graph",
    )
    draw.add_argument("--heads", type=_positive, default=8)
    draw.add_argument("--heads-kv", type=_positive, help="of keys and values; default: as many")
    draw.add_argument("--sms", type=_positive, default=8, help="multiprocessors of the schedule")
    draw.add_argument("--format", nargs="+", choices=("svg", "png"), default=["svg", "png"])
    draw.add_argument("--out", type=Path, default=Path())
    draw.set_defaults(run=_draw)

    guide = commands.add_parser("tour", help="the guided tours of docs/")
    guide.add_argument("--out", type=Path, default=Path("docs"))
    guide.add_argument("--check", action="store_true", help="write nothing; exit status 1 if something is stale")
    guide.set_defaults(run=_tour)
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text}")
    return int(text)


def _limit(text: str) -> int | None:
    if text == "-1":
        return None
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, or -1 for no limit, got {text}")
    return int(text)


def _head_dims(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _lengths(text: str) -> tuple[int, ...]:
    if not all(part.isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"expected numbers of at least 0, got {text}")
    return tuple(int(part) for part in text.split(","))


def _sequences(text: str) -> tuple[tuple[int, int], ...]:
    pairs = [part.split(":") for part in text.split(",")]
    if not all(len(pair) == 2 and pair[0].isdecimal() and pair[1].removeprefix("-").isdecimal() for pair in pairs):
        raise argparse.ArgumentTypeError(f"expected rows:keys of each sequence, such as 1:6000,4:3000, got {text}")
    return tuple((int(rows), int(keys)) for rows, keys in pairs)


def _asked(options: argparse.Namespace, archs: Sequence[str] = build.ARCHS) -> tuple[Kernel, ...]:
    """The kernels of a command's --arch, --direction and --head-dims."""
    return kernels(
        options.csrc,
        archs=(options.arch,) if options.arch else archs,
        directions=(options.direction,) if options.direction else build.DIRECTIONS,
        head_dims=options.head_dims,
    )


def _table(options: argparse.Namespace) -> int:
    chips = [chip for chip in tables.CHIPS if options.chip in (None, chip.name)]
    archs = [arch for arch in build.ARCHS if any(arch in chip.entries for chip in chips)]
    make = {"text": tables.to_text, "csv": tables.to_csv, "json": tables.to_json}[options.format]
    text = make(tables.rows(_asked(options, archs), chips))
    if options.out:
        options.out.write_text(text)
    else:
        print(text, end="")
    return 0


def _check(options: argparse.Namespace) -> int:
    found = mask_definition(options.csrc)
    failed = len(found)
    _report("mask definition", found, "csrc/core/mask.cuh")
    every = _asked(options)
    for name, check in CHECKS.items():
        found = [f"{kernel}: {sentence}" for kernel in every for sentence in check(kernel)]
        failed += len(found)
        _report(name, found, f"{len(every)} kernels")
    return int(failed > 0)


def _report(name: str, found: Sequence[str], of: str) -> None:
    print(f"{name}: {'ok' if not found else f'{len(found)} findings'}, {of}")
    print("".join(f"  {line}\n" for line in found), end="")


def _kernels(options: argparse.Namespace) -> int:
    for kernel in _asked(options):
        print(kernel)
    return 0


def _draw_banks(options: argparse.Namespace, kernel: Kernel) -> pictures.Picture:
    result = options.operand in ("O", "dK")
    access = "to shared" if result else "tensor" if options.arch == "sm90" else "registers"
    return pictures.bank_picture(kernel, options.operand, options.access or access)


def _draw_threads(_: argparse.Namespace, kernel: Kernel) -> pictures.Picture:
    return pictures.thread_value_picture(kernel)


def _draw_warps(_: argparse.Namespace, kernel: Kernel) -> pictures.Picture:
    return warp_picture(kernel)


def _draw_transposition(_: argparse.Namespace, kernel: Kernel) -> pictures.Picture:
    return float8.transposition_picture(kernel)


def _problem(options: argparse.Namespace, masked: bool = True) -> Problem:
    len_q, len_k = options.lengths
    problem = Problem(1, options.heads, options.heads_kv or options.heads, len_q, len_k, options.head_dim)
    return replace(problem, causal=options.causal or "none", window=tuple(options.window)) if masked else problem


def _draw_mask(options: argparse.Namespace, kernel: Kernel) -> pictures.Picture:
    return pictures.mask_picture(kernel, _problem(options))


def _draw_schedule(options: argparse.Namespace, kernel: Kernel) -> pictures.Picture:
    problems = [_problem(options, masked=False), _problem(options)]
    runs = [(kernel, problem) for problem in dict.fromkeys(problems)]
    return pictures.gantt_picture(runs, options.sms)


def _draw_packed(options: argparse.Namespace, kernel: Kernel) -> pictures.Picture:
    heads_kv, window = options.heads_kv or options.heads, tuple(options.window)
    problem = PackedProblem(options.packed, options.heads, heads_kv, options.causal or "none", window)
    return packed.packed_picture(kernel, problem, options.sms)


def _draw_budget(options: argparse.Namespace, kernel: Kernel) -> pictures.Picture:
    """Of this entry at every head dim; of sm90's backward, whose tables have one entry each, of all kernels."""
    every = kernels(options.csrc, archs=(options.arch,), directions=(options.direction,))
    one_entry = (options.arch, options.direction) != ("sm90", "bwd")
    same_kind = [x for x in every if (x.is_large, x.is_float8) == (kernel.is_large, kernel.is_float8)]
    alike = [other for other in same_kind if other.entry == kernel.entry or not one_entry]
    capabilities = {name: chip.capability for chip in tables.CHIPS for name in chip.entries.get(options.arch, ())}
    return pictures.budget_picture(alike, 90 if options.arch == "sm90" else capabilities[kernel.entry])


DRAW = {
    "banks": _draw_banks,
    "threads": _draw_threads,
    "warps": _draw_warps,
    "transposition": _draw_transposition,
    "mask": _draw_mask,
    "schedule": _draw_schedule,
    "packed": _draw_packed,
    "budget": _draw_budget,
}


def _draw_caches(options: argparse.Namespace) -> int:
    if options.what != "schedule":
        raise ValueError(f"--caches: expected draw schedule, got draw {options.what}")
    heads_kv, window = options.heads_kv or options.heads, tuple(options.window)
    problem = caches.CacheProblem(options.caches, options.heads, heads_kv, options.causal or "bottom_right", window)
    kernel = caches.cache_kernel(caches.cache_kernels(options.csrc), options.head_dim, options.arch, options.family)
    for path in caches.cache_picture(kernel, problem, options.sms).save(options.out, options.format):
        print(path)
    return 0


def _draw(options: argparse.Namespace) -> int:
    if options.caches is not None:
        return _draw_caches(options)
    known = build.default_head_dims()
    if options.head_dim not in known:
        raise ValueError(f"--head-dim: expected one of {', '.join(map(str, known))}, got {options.head_dim}")
    some = kernels(options.csrc, archs=(options.arch,), directions=(options.direction,), head_dims=(options.head_dim,))
    folder = options.family or next((kernel.folder for kernel in some), options.direction)
    kernel = find(some, options.head_dim, options.arch, options.entry, folder)
    for name in DRAW if options.what == "all" else (options.what,):
        if options.what == "all" and not _has(kernel, name):
            continue
        for path in DRAW[name](options, kernel).save(options.out, options.format):
            print(path)
    return 0


def _has(kernel: Kernel, picture: str) -> bool:
    """Whether there is such a picture of the kernel; one that is asked for by name says what is wrong."""
    if picture == "packed":
        return kernel.has_packed
    if picture == "banks":
        return (kernel.is_forward or kernel.arch == "sm80") and not kernel.is_recorded
    if picture == "transposition":
        return kernel.is_float8
    if picture == "warps":
        return kernel.is_forward and kernel.arch == "sm80"
    return kernel.is_forward or picture == "budget"


def _tour(options: argparse.Namespace) -> int:
    every = tour.needed(options.csrc)
    if options.check:
        found = tour.stale(every, options.out)
        for name in found:
            print(f"stale: {name}; run {tour.COMMAND}")
        return int(bool(found))
    for path in tour.write(every, options.out):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
