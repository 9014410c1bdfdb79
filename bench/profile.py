"""Profile the kernels of one attention under Nsight Compute and print the counters that matter as one table.

Past 400 lines, so that what is asked of the profiler and how it is read stand side by side.

    python bench/profile.py --D 128 --N 4096 --causal --providers flash_cute:sm80,flash --out /tmp/d128
    python bench/profile.py --direction bwd --D 128 --N 4096 --causal --providers flash_cute,cudnn

With `--out`, the reports (NAME.PROVIDER.ncu-rep, source lines in them) and their pages as CSV are kept for the Nsight
Compute window. The card's clocks are left as they are. A third of the file is the table of counters, which is why it is
long.
"""

from __future__ import annotations

import argparse
import csv
import functools
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
if not __package__:
    # Run as a script: bench/ must not hide the standard library's `profile`, nor this tree the installed package.
    sys.path[:] = [*sys.path[1:], str(ROOT)]

from bench import backends, case_flags  # noqa: E402
from bench.workloads import Workload  # noqa: E402
from flash_cute._timing import tflops  # noqa: E402

ELAPSED = ".avg.pct_of_peak_sustained_elapsed"
CONFLICTS = "smsp__sass_l1tex_data_bank_conflicts_pipe_lsu_mem_shared_op_"
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active")
SECTIONS = ("LaunchStats", "Occupancy", "SourceCounters")

# Label, and the counters that mean it: the first that the chip has is taken.
COUNTERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("duration", ("gpu__time_duration.sum",)),
    ("SM cycles", ("sm__cycles_elapsed.max",)),
    (
        "tensor pipe busy",
        (f"sm__pipe_tensor_cycles_active{ELAPSED}", f"sm__pipe_tensor_op_hmma_cycles_active{ELAPSED}"),
    ),
    ("tensor pipe, wgmma issued", (f"sm__inst_executed_pipe_tensor_op_gmma{ELAPSED}",)),
    ("tensor pipe, mma.sync issued", (f"sm__inst_executed_pipe_tensor_op_hmma{ELAPSED}",)),
    ("MUFU (xu pipe)", (f"sm__inst_executed_pipe_xu{ELAPSED}", f"sm__pipe_xu_cycles_active{ELAPSED}")),
    ("FMA pipe", (f"sm__pipe_fma_cycles_active{ELAPSED}", f"sm__inst_executed_pipe_fma{ELAPSED}")),
    ("ALU pipe", (f"sm__pipe_alu_cycles_active{ELAPSED}", f"sm__inst_executed_pipe_alu{ELAPSED}")),
    ("LSU pipe", (f"sm__inst_executed_pipe_lsu{ELAPSED}",)),
    ("issue slots", (f"sm__inst_issued{ELAPSED}", f"smsp__issue_active{ELAPSED}")),
    ("instructions", ("sm__inst_executed.sum", "smsp__inst_executed.sum")),
    ("shared memory, LSU wavefronts", (f"l1tex__data_pipe_lsu_wavefronts_mem_shared{ELAPSED}",)),
    ("shared memory, bank reads", (f"l1tex__data_bank_reads{ELAPSED}",)),
    ("shared memory, bank writes", (f"l1tex__data_bank_writes{ELAPSED}",)),
    ("bank conflicts, LDSM", (f"{CONFLICTS}ldsm.sum",)),
    ("bank conflicts, STSM", (f"{CONFLICTS}stsm.sum",)),
    ("bank conflicts, LDGSTS", (f"{CONFLICTS}ldgsts.sum",)),
    ("bank conflicts, LDS", (f"{CONFLICTS}ld.sum",)),
    ("bank conflicts, STS", (f"{CONFLICTS}st.sum",)),
    ("bank conflicts, any load", ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",)),
    ("bank conflicts, any store", ("l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",)),
    ("L2 busy", (f"lts__t_sectors{ELAPSED}", f"lts__throughput{ELAPSED}")),
    ("L2 traffic", ("lts__t_bytes.sum",)),
    ("L2 hit rate", ("lts__t_sector_hit_rate.pct",)),
    ("DRAM busy", (f"dram__throughput{ELAPSED}",)),
    ("DRAM read", ("dram__bytes_read.sum",)),
    ("DRAM written", ("dram__bytes_write.sum",)),
    ("local memory instructions", ("smsp__inst_executed_op_local.sum", "smsp__sass_inst_executed_op_local.sum")),
    ("warps active", ("sm__warps_active.avg.pct_of_peak_sustained_active",)),
)
# From the sections LaunchStats and Occupancy, which every chip has.
LAUNCH: tuple[tuple[str, str], ...] = (
    ("grid", "launch__grid_size"),
    ("threads per CTA", "launch__block_size"),
    ("registers per thread", "launch__registers_per_thread"),
    ("shared memory per CTA, dynamic", "launch__shared_mem_per_block_dynamic"),
    ("shared memory per CTA, static", "launch__shared_mem_per_block_static"),
    ("CTAs per SM, by registers", "launch__occupancy_limit_registers"),
    ("CTAs per SM, by shared memory", "launch__occupancy_limit_shared_mem"),
    ("CTAs per SM, by warps", "launch__occupancy_limit_warps"),
    ("waves", "launch__waves_per_multiprocessor"),
)
# Dense fp16/bf16 tensor FLOP with float32 accumulation, and exponentials, per clock and SM.
TENSOR_FLOP_PER_CLOCK = {(8, 0): 2048, (9, 0): 4096}
EXP_PER_CLOCK = 16


@dataclass
class Profile:
    """The counters of one kernel of one provider: name to (value, unit)."""

    provider: str
    kernel: str
    values: dict[str, tuple[float, str]] = field(default_factory=dict)

    def get(self, name: str) -> float | None:
        return self.values[name][0] if name in self.values else None

    @property
    def seconds(self) -> float | None:
        if "gpu__time_duration.sum" not in self.values:
            return None
        value, unit = self.values["gpu__time_duration.sum"]
        return value * {"n": 1e-9, "u": 1e-6, "m": 1e-3, "s": 1.0}[unit[:1] or "n"]


def find_ncu(given: str | None) -> str:
    places = [given or "", shutil.which("ncu") or "", "/usr/local/cuda/bin/ncu"]
    places += sorted(glob.glob("/opt/nvidia/nsight-compute/*/ncu"), reverse=True)
    for place in places:
        if place and os.access(place, os.X_OK) and "Version" in said([place, "--version"]).stdout:
            return place
    raise SystemExit("ncu (Nsight Compute) was not found on the PATH nor in its usual places: give it with --ncu PATH")


def said(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command with numbers written the plain way, 1234.5."""
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})


def output_of(command: Sequence[str]) -> str:
    """Standard output of a command; if it fails, the end of what it said is raised."""
    done = said(command)
    if done.returncode != 0:
        raise SystemExit(f"{Path(command[0]).name} failed with exit status {done.returncode}:\n{end_of(done)}")
    return done.stdout


def end_of(done: subprocess.CompletedProcess[str]) -> str:
    return "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])


def chip_metrics(ncu: str) -> set[str]:
    """Base names of the counters that this GPU has."""
    words = (line.split(maxsplit=1) for line in output_of([ncu, "--query-metrics"]).splitlines())
    return {parts[0] for parts in words if parts and "__" in parts[0]}


def choose(chip: set[str]) -> tuple[dict[str, str], list[str], list[str]]:
    """The counter taken for each label, all counters to ask for, and what the chip lacks."""
    chosen: dict[str, str] = {}
    lacking: list[str] = []
    for label, candidates in COUNTERS:
        found = next((name for name in candidates if name.split(".")[0] in chip), None)
        if found is None:
            lacking.append(f"{label} ({', '.join(name.split('.')[0] for name in candidates)})")
        else:
            chosen[label] = found
    stalls = sorted(f"{name}.ratio" for name in chip if STALL.fullmatch(name) and "not_issued" not in name)
    return chosen, [*chosen.values(), *stalls], lacking


def collect(ncu: str, provider: str, metrics: Sequence[str], report: Path, flags: argparse.Namespace) -> list[Profile]:
    """Run the child under ncu, keep its report, and read the counters of each kernel of the profiled call."""
    command = [
        ncu,
        "--clock-control=none",
        "--profile-from-start=off",
        "--target-processes=all",
        "--import-source=yes",
        f"--source-folders={ROOT / 'csrc'}",
        f"--metrics={','.join(metrics)}",
        "--force-overwrite",
        f"--export={report}",
    ]
    command += [f"--set={flags.set}"] if flags.set else [f"--section={section}" for section in SECTIONS]
    report.unlink(missing_ok=True)
    done = said([*command, sys.executable, str(Path(__file__).resolve()), "--child", provider, *flags.shape])
    if not report.exists():
        refused = [name for name in metrics if name in done.stdout + done.stderr]
        if refused and len(refused) < len(metrics):
            print(f"ncu refuses: {', '.join(refused)}")
            return collect(ncu, provider, [name for name in metrics if name not in refused], report, flags)
        raise SystemExit(f"{provider}: ncu wrote no report:\n{end_of(done)}")
    page = output_of([ncu, "--import", str(report), "--csv", "--page=raw", "--print-units=base"])
    report.with_suffix(".raw.csv").write_text(page)
    return parse_raw_page(page, provider)


def csv_rows(page: str) -> list[list[str]]:
    """The rows of a page, less what ncu says round them."""
    return list(csv.reader(line for line in page.splitlines() if "," in line and not line.startswith("==")))


def parse_raw_page(page: str, provider: str) -> list[Profile]:
    rows = csv_rows(page)
    if len(rows) < 3:
        raise SystemExit(f"{provider}: ncu profiled no kernel")
    names, units = rows[0], rows[1]
    profiles = []
    for row in rows[2:]:
        profile = Profile(provider, row[names.index("Kernel Name")])
        for name, unit, text in zip(names, units, row, strict=False):
            number = as_number(text)
            if number is not None:
                profile.values[name] = (number, unit)
        profiles.append(profile)
    return profiles


def as_number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def human(value: float, unit: str) -> str:
    """A value of ncu's base units, short."""
    if unit == "%":
        return f"{value:.1f} %"
    if unit == "byte":
        return scaled(value, "B")
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:.4g}"


def scaled(value: float, unit: str) -> str:
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}"


def ceilings(profile: Profile, workload: Workload) -> list[tuple[str, str]]:
    """Rates, and what was reached of each ceiling in per cent of the kernel's own cycles."""
    seconds, cycles = profile.seconds, profile.get("sm__cycles_elapsed.max")
    if not seconds or not cycles:
        return []
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    sm_cycles = cycles * properties.multi_processor_count
    rows = [
        ("TFLOP/s", f"{tflops(workload.flops, seconds):.0f}"),
        ("SM clock", scaled(cycles / seconds, "Hz")),
    ]
    peak = TENSOR_FLOP_PER_CLOCK.get((properties.major, properties.minor))
    tensor = f"{100 * workload.flops / (peak * sm_cycles):.1f} %" if peak else "ceiling not known"
    rows.append(("of the tensor cores' rate at this clock", tensor))
    exponentials = workload.B * workload.H * workload.N * workload.M * (0.5 if workload.is_causal else 1.0)
    rows.append(("of the MUFU rate, exponentials needed", f"{100 * exponentials / (EXP_PER_CLOCK * sm_cycles):.1f} %"))
    moved = (profile.get("dram__bytes_read.sum") or 0) + (profile.get("dram__bytes_write.sum") or 0)
    rows.append(("DRAM rate", scaled(moved / seconds, "B/s")))
    rows.append(("DRAM bytes over the least possible", f"{moved / workload.least_bytes:.2f}"))
    rows.append(("L2 rate", scaled((profile.get("lts__t_bytes.sum") or 0) / seconds, "B/s")))
    return rows


def is_longest(profile: Profile, profiles: Sequence[Profile]) -> bool:
    """Whether it is the provider's longest kernel: the one that does the arithmetic."""
    return profile.seconds == max(other.seconds or 0 for other in profiles if other.provider == profile.provider)


def print_table(
    profiles: Sequence[Profile], chosen: dict[str, str], lacking: Sequence[str], workload: Workload
) -> None:
    """One table, a column per kernel."""
    width = 18
    first = 44
    print(f"\n{workload.label}")
    for number, profile in enumerate(profiles):
        print(f"  kernel {number}: {profile.provider}: {profile.kernel[:160]}")
    print("\n" + " " * first + "".join(f"{f'kernel {number}':>{width}}" for number in range(len(profiles))))

    def line(label: str, figures: Iterable[str]) -> None:
        print(f"{label:<{first}}" + "".join(f"{figure:>{width}}" for figure in figures))

    def counters(names: Iterable[tuple[str, str]]) -> None:
        for label, name in names:
            line(label, (human(*profile.values[name]) if name in profile.values else "-" for profile in profiles))

    seconds = [profile.seconds for profile in profiles]
    line("duration", (f"{1e6 * value:.1f} us" if value else "-" for value in seconds))
    derived = [dict(ceilings(profile, workload)) if is_longest(profile, profiles) else {} for profile in profiles]
    for label in dict.fromkeys(label for column in derived for label in column):
        line(label, (column.get(label, "-") for column in derived))
    counters((label, name) for label, name in chosen.items() if label != "duration")
    counters(LAUNCH)
    print("stalls: warps waiting for each issued instruction")
    names = {name for profile in profiles for name in profile.values if STALL.match(name)}
    for name in sorted(names, key=lambda name: -max(profile.get(name) or 0 for profile in profiles))[:8]:
        match = STALL.match(name)
        line(f"  {match[1] if match else name}", (f"{profile.get(name) or 0:.3f}" for profile in profiles))
    for name in lacking:
        print(f"this chip has no counter for: {name}")


def print_source(ncu: str, report: Path, conflicts: Sequence[str], top: int) -> None:
    """The source lines where warps waited most, and the instructions with bank conflicts."""
    lines: dict[tuple[str, str], float] = {}
    for line in source_page(ncu, report, "cuda,sass", []):
        if line.file and line.sampled:
            lines[line.place, line.text] = lines.get((line.place, line.text), 0) + line.sampled
    total = sum(lines.values())
    if total:
        print(f"\n{report.name}: source lines by stall samples ({total:.0f} in all)")
    else:
        print(f"\n{report.name}: no source lines: a peer's kernel, or a build without FLASH_CUTE_LINEINFO=1")
    for (place, text), number in sorted(lines.items(), key=lambda item: -item[1])[:top]:
        print(f"  {100 * number / total:5.1f} %  {place:<28} {text[:100]}")
    for line in source_page(ncu, report, "sass", conflicts) if conflicts else []:
        counts = [(name, number) for name, number in line.columns.items() if "bank_conflicts" in name and number]
        if counts:
            told = ", ".join(f"{name.removeprefix(CONFLICTS)} {number:,.0f}" for name, number in counts)
            print(f"  bank conflicts: {line.place:<8} {line.text[:90]}: {told}")


@dataclass(frozen=True)
class SourceLine:
    """A line of ncu's source page: of a CUDA file, or (with no file) an instruction."""

    file: str
    place: str
    text: str
    columns: dict[str, float]

    @property
    def sampled(self) -> float:
        return self.columns.get("Warp Stall Sampling (All Samples)", self.columns.get("# Samples", 0.0))


def source_page(ncu: str, report: Path, view: str, metrics: Sequence[str]) -> list[SourceLine]:
    command = [ncu, "--import", str(report), "--csv", "--page=source", f"--print-source={view}"]
    if metrics:
        command.append(f"--metrics={','.join(metrics)}")
    done = said(command)
    report.with_suffix(f".{view.replace(',', '_')}.csv").write_text(done.stdout + done.stderr)
    return parse_source_page(done.stdout)


def parse_source_page(page: str) -> list[SourceLine]:
    """Lines of the views "sass" (one column "Source") and "cuda,sass" (two, a CUDA line before its instructions)."""
    lines: list[SourceLine] = []
    header: list[str] = []
    file = ""
    for row in csv_rows(page):
        if "Source" in row and "Address" in row:
            header = row
        elif row[0] == "File Path":
            file = Path(row[1]).name
        elif header and len(row) == len(header):
            columns = {}
            for name, text in zip(header, row, strict=True):
                number = as_number(text)
                if number is not None and name not in ("Source", "Address", "Line No"):
                    columns[name] = number
            correlated = header[0] == "Line No"
            is_cuda_line = correlated and bool(row[0].strip())
            text = row[header.index("Source")] if is_cuda_line or not correlated else row[header.index("Address") + 1]
            place = f"{file}:{row[0]}" if is_cuda_line else row[header.index("Address")]
            lines.append(SourceLine(file if is_cuda_line else "", place, " ".join(text.split()), columns))
    return lines


def child(provider: str, workload: Workload, triton_tutorial: Path | None) -> int:
    """What ncu runs: warm up, then one call inside the profiled range."""
    device = torch.device("cuda", torch.cuda.current_device())
    backend = backends.prepare(provider, workload, device, triton_tutorial)
    with backend.context():
        arguments = backend.arrange(workload.make_inputs(device, seed=0))
        call: Callable[[], object] = functools.partial(backend.call, *arguments)
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/profile.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--providers", default="flash_cute", help="as bench/run.py's, separated by commas (flash_cute)")
    parser.add_argument("--out", type=Path, help="keep NAME.PROVIDER.ncu-rep and its pages as CSV")
    parser.add_argument("--ncu", help="the program ncu")
    parser.add_argument(
        "--set", default="", help="a set of ncu's sections instead of the few that the table needs: full"
    )
    parser.add_argument("--top", type=int, default=12, help="source lines to print (12)")
    parser.add_argument("--triton-tutorial", type=Path, help="a copy of Triton's fused-attention tutorial")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    case_flags.add_direction_flag(parser)
    case_flags.add_shape_flags(parser)
    flags = parser.parse_args(arguments)
    shape = case_flags.from_flags(flags, flags.direction)
    if shape.direction == "train":
        parser.error("--direction: expected fwd or bwd, given train")
    flags.workload = shape
    flags.shape = case_flags.to_flags(shape)
    if flags.triton_tutorial:
        flags.shape.append(f"--triton-tutorial={flags.triton_tutorial}")
    return flags


def main(arguments: Sequence[str]) -> int:
    flags = parse(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("profiling needs a CUDA GPU, and torch finds none")
    if flags.child:
        return child(flags.child, flags.workload, flags.triton_tutorial)
    ncu = find_ncu(flags.ncu)
    chosen, metrics, lacking = choose(chip_metrics(ncu))
    conflicts = [name.removesuffix(".sum") for name in metrics if name.startswith(CONFLICTS)]
    profiles: list[Profile] = []
    reports: list[Path] = []
    with tempfile.TemporaryDirectory() as scratch:
        base = flags.out or Path(scratch) / "profile"
        base.parent.mkdir(parents=True, exist_ok=True)
        for provider in flags.providers.split(","):
            report = base.parent / f"{base.name}.{provider.replace(':', '_')}.ncu-rep"
            profiles += collect(ncu, provider, metrics, report, flags)
            reports.append(report)
        print_table(profiles, chosen, lacking, flags.workload)
        for report in reports:
            print_source(ncu, report, conflicts, flags.top)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
