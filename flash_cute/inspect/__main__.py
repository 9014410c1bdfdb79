"""python -m flash_cute.inspect: tables, pictures and checks of the kernels, from the traits that are compiled.

table                       budget, occupancy and roofline of every kernel
check                       every check on every kernel; exit status 1 if one fails
kernels                     their names, for the options below
draw banks --operand V      a picture of one kernel: banks, threads, mask, schedule, budget, or all
tour --out docs             docs/sm80_forward_tour.md and its pictures; --check: only say what is stale
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import pictures, tables, tour
from .build import InspectError
from .checks import CHECKS
from .kernels import Kernel, Problem, find, kernels


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        every = kernels(options.csrc, head_dims=tuple(options.head_dims) if options.head_dims else None)
        done: int = options.run(options, every)
        return done
    except (InspectError, ValueError) as error:
        print(f"flash_cute.inspect: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flash_cute.inspect", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--csrc", type=Path, help="another folder of headers than the installed one")
    parser.add_argument("--head-dims", type=int, nargs="+", help="default: those of the library")
    commands = parser.add_subparsers(required=True, metavar="command")

    table = commands.add_parser("table", help="budget, occupancy and roofline")
    table.add_argument("--format", choices=("text", "csv", "json"), default="text")
    table.add_argument("--chip", choices=[chip.name for chip in tables.CHIPS], help="default: all")
    table.add_argument("--out", type=Path, help="a file; default: print")
    table.set_defaults(run=_table)

    check = commands.add_parser("check", help="every check on every kernel")
    check.set_defaults(run=_check)

    names = commands.add_parser("kernels", help="list the kernels")
    names.set_defaults(run=_kernels)

    draw = commands.add_parser("draw", help="pictures of one kernel")
    draw.add_argument("what", choices=(*DRAW, "all"))
    draw.add_argument("--arch", default="sm80", choices=("sm80", "sm90"))
    draw.add_argument("--head-dim", type=int, default=128)
    draw.add_argument("--mask", choices=("full", "causal"), default="causal")
    draw.add_argument("--config", help="entry of the tile table, as `kernels` lists them; default: the first")
    draw.add_argument("--operand", choices=tuple("QKVO"), default="K", help="of banks")
    draw.add_argument("--access", help="of banks: a word of the access's name: into, registers, shared, global, tensor")
    draw.add_argument("--lengths", type=int, nargs=2, default=(2048, 2048), metavar=("LEN_Q", "LEN_K"))
    draw.add_argument("--heads", type=int, default=8)
    draw.add_argument("--sms", type=int, default=8, help="multiprocessors of the schedule")
    draw.add_argument("--format", nargs="+", choices=("svg", "png"), default=["svg", "png"])
    draw.add_argument("--out", type=Path, default=Path())
    draw.set_defaults(run=_draw)

    guide = commands.add_parser("tour", help="the guided tour of docs/")
    guide.add_argument("--out", type=Path, default=Path("docs"))
    guide.add_argument("--check", action="store_true", help="write nothing; exit status 1 if something is stale")
    guide.set_defaults(run=_tour)
    return parser


def _table(options: argparse.Namespace, every: tuple[Kernel, ...]) -> int:
    chips = [chip for chip in tables.CHIPS if options.chip in (None, chip.name)]
    make = {"text": tables.to_text, "csv": tables.to_csv, "json": tables.to_json}[options.format]
    text = make(tables.rows(every, chips))
    if options.out:
        options.out.write_text(text)
    else:
        print(text, end="")
    return 0


def _check(_: argparse.Namespace, every: tuple[Kernel, ...]) -> int:
    failed = 0
    for name, check in CHECKS.items():
        found = [f"{kernel}: {sentence}" for kernel in every for sentence in check(kernel)]
        failed += len(found)
        print(f"{name}: {'ok' if not found else f'{len(found)} findings'}, {len(every)} kernels")
        print("".join(f"  {line}\n" for line in found), end="")
    return int(failed > 0)


def _kernels(_: argparse.Namespace, every: tuple[Kernel, ...]) -> int:
    for kernel in every:
        print(kernel)
    return 0


def _draw_banks(options: argparse.Namespace, every: tuple[Kernel, ...]) -> pictures.Picture:
    access = {"O": "to shared"}.get(options.operand, "tensor" if options.arch == "sm90" else "registers")
    return pictures.bank_picture(_chosen(options, every), options.operand, options.access or access)


def _draw_threads(options: argparse.Namespace, every: tuple[Kernel, ...]) -> pictures.Picture:
    return pictures.thread_value_picture(_chosen(options, every))


def _draw_mask(options: argparse.Namespace, every: tuple[Kernel, ...]) -> pictures.Picture:
    return pictures.mask_picture(_chosen(options, every), *options.lengths)


def _draw_schedule(options: argparse.Namespace, every: tuple[Kernel, ...]) -> pictures.Picture:
    len_q, len_k = options.lengths
    problem = Problem(1, options.heads, options.heads, len_q, len_k, options.head_dim, "bottom_right")
    masks = [find(every, options.head_dim, mask, options.arch, options.config) for mask in ("full", "causal")]
    return pictures.gantt_picture(masks, problem, options.sms)


def _draw_budget(options: argparse.Namespace, every: tuple[Kernel, ...]) -> pictures.Picture:
    config = _chosen(options, every).config
    alike = [k for k in every if (k.arch, k.mask, k.config) == (options.arch, options.mask, config)]
    capabilities = {name: chip.capability for chip in tables.CHIPS for name in chip.config.get(options.arch, ())}
    return pictures.budget_picture(alike, capabilities.get(config))


DRAW = {
    "banks": _draw_banks,
    "threads": _draw_threads,
    "mask": _draw_mask,
    "schedule": _draw_schedule,
    "budget": _draw_budget,
}


def _chosen(options: argparse.Namespace, every: tuple[Kernel, ...]) -> Kernel:
    return find(every, options.head_dim, options.mask, options.arch, options.config)


def _draw(options: argparse.Namespace, every: tuple[Kernel, ...]) -> int:
    for name in DRAW if options.what == "all" else (options.what,):
        for path in DRAW[name](options, every).save(options.out, options.format):
            print(path)
    return 0


def _tour(options: argparse.Namespace, every: tuple[Kernel, ...]) -> int:
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
