"""Time masks beside what computes the same without them, and beside PyTorch's FlexAttention.

    python bench/run.py --masks --out mine-masks.csv
    python bench/run.py --masks --only bands,grpo --budget 30

The groups of problems: masks that say what a band or a packed batch says too (`bands`); MagiAttention's block-causal
documents (`published`); a prompt with 8 answers beside the batch that has it 8 times (`grpo`); padding through
PyTorch's interface (`padding`); every constructor beside FlexAttention (`constructors`); lists of blocks (`blocks`);
the host's time (`host`), and the kernels of a call one by one (`kernels`). A provider's results are compared with ours
before it is timed. TFLOP/s are of the pairs that are seen. No row is started after `--budget` seconds.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from bench import case_flags, errors, mask_cases, mask_grid
from bench.environment import environment
from bench.mask_cases import FLEX, GROUPS, OTHER_PROBLEMS, PEERS, Case
from bench.providers import masks as providers
from bench.providers.masks import OURS, Calls, Results
from flash_cute import Mask
from flash_cute._timing import Clock, Contender, Timing, first_line, measure, speed_ratio, tflops

RUN = Path(__file__).resolve().parent / "run.py"
LARGEST_DIFFERENCE = 0.02  # of ||x - y|| / ||y||: two right answers in bf16 differ by 0.004
SMALLER = 64  # how many times fewer tokens the CPU has
HOST_ROUNDS = 41
MOST_COMPILING = 60.0  # seconds
COLUMNS = ["group", "case", "direction", "B", "H", "Hkv", "N", "D", "dtype", "causal", "pairs", "provider", "clock"]
COLUMNS += ["median_us", "best_us", "spread", "tflops", "rounds", "calls"]
COLUMNS += [f"ratio_{peer}{end}" for peer in (*PEERS, "published") for end in ("", "_spread")]
COLUMNS += ["difference", "missing"]

Row = dict[str, object]


class Budget:
    """The time that is left for all rows."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.end = time.perf_counter() + seconds

    @property
    def left(self) -> float:
        return self.end - time.perf_counter()

    @property
    def reason(self) -> str:
        return f"not started: {self.seconds:g} s are over" if self.left < 0 else ""


def shape_of(case: Case, dtype: torch.dtype) -> Row:
    shape = {"group": case.group, "case": case.name, "causal": case.causal, "dtype": str(dtype).removeprefix("torch.")}
    return {**shape, **{name: getattr(case, name) for name in ("B", "H", "Hkv", "N", "D")}}


def difference(results: Results, expected: Results, real: torch.Tensor) -> float:
    """The largest ||x - y|| / ||y|| of out, in the rows that are no padding, and of the gradients; NaN if one is."""
    found = []
    for index, (x, y) in enumerate(zip(results, expected, strict=False)):  # a provider may have no backward
        x, y = x.float(), y.float()
        if index == 0:
            x, y = (one * real[:, None, :, None] for one in (x, y))
        found.append((x - y).norm() / y.norm().clamp_min(1e-30))
    return float(torch.stack(found).max())


class Problem:
    """One case: its providers, each compared with ours, ready to be timed."""

    def __init__(self, case: Case, device: torch.device, seed: int) -> None:
        self.case, self.device = case, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        mask = case.make_mask(device)
        self.pairs = case.pairs(mask)
        self.calls: dict[str, Calls] = {}
        self.missing: dict[str, str] = {}
        self.differences: dict[str, float] = {}
        inputs = case.make_inputs(device, self.dtype, seed)
        real, expected = case.real(device), None
        for name in (OURS, *case.peers):
            try:
                calls = providers.prepare(name, case, mask, inputs)
                results = () if name in OTHER_PROBLEMS else calls.results()
            except Exception as error:
                self.missing[name] = first_line(error)
                continue
            if name == OURS:
                expected = results
            elif results and expected is not None:
                found = self.differences[name] = difference(results, expected, real)
                if not found <= LARGEST_DIFFERENCE:
                    self.missing[name] = f"wrong: differs by {found:.2e} from {OURS}"
                    continue
            self.calls[name] = calls

    def rows(self, direction: str, rounds: int, seconds: float, clock: Clock = "events") -> Iterator[Row]:
        case = self.case
        shape = {**shape_of(case, self.dtype), "direction": direction, "pairs": self.pairs}
        missing = dict(self.missing)
        contenders = []
        for name, calls in self.calls.items():
            call = calls.call(direction)
            if call is None:
                missing[name] = "it has no backward"
            else:
                contenders.append(Contender(name, call))
        clock = clock if self.device.type == "cuda" else "wall"
        timings = measure(contenders, self.device, clock=clock, rounds=rounds, seconds=seconds, failures=missing)
        for name, timing in timings.items():
            pairs = self.calls[name].pairs or self.pairs
            rate = tflops(mask_cases.flops(pairs, case.H, case.D, direction), timing.median)
            row: Row = {**shape, "pairs": pairs, "provider": name, "clock": clock, **columns_of(timing)}
            row["tflops"] = f"{rate:.2f}"
            if name in self.differences:
                row["difference"] = f"{self.differences[name]:.2e} from {OURS}"
            if name == OURS:
                row |= self.ratios(timings)
                if case.published is not None and direction != "step":
                    row["ratio_published"] = f"{rate / case.published[direction == 'bwd']:.4f}"
            yield row
        for name, reason in missing.items():
            yield {**shape, "provider": name, "missing": reason}

    def ratios(self, timings: Mapping[str, Timing]) -> Row:
        """The others' time over ours, of other problems our rate over theirs."""
        row: Row = {}
        for name in self.case.peers:
            if name not in timings:
                continue
            ratio = speed_ratio(timings[OURS], timings[name])
            scale = self.pairs / self.calls[name].pairs if name in OTHER_PROBLEMS else 1.0
            row |= {
                f"ratio_{name}": f"{ratio.median * scale:.4f}",
                f"ratio_{name}_spread": f"{ratio.spread * scale:.4f}",
            }
        return row


def columns_of(timing: Timing) -> Row:
    columns: Row = {"median_us": f"{timing.median * 1e6:.3f}", "best_us": f"{timing.best * 1e6:.3f}"}
    return {**columns, "spread": f"{timing.spread:.4f}", "rounds": len(timing.rounds), "calls": timing.calls}


def compile_ahead(cases: Sequence[Case], seed: int, seconds: float) -> None:
    """FlexAttention's kernels of several problems into the caches on the disk, each in a process of its own.

    Those that do not end in time are stopped: then this process compiles them, as it does without a cache.
    """
    threads = max(1, (os.cpu_count() or 1) // max(1, len(cases)))
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": str(threads)}
    end = time.perf_counter() + seconds

    def compile_one(case: Case) -> str:
        command = [sys.executable, str(RUN), "--masks", "--compile", case.name, "--seed", str(seed)]
        limit = max(1.0, end - time.perf_counter())
        try:
            ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return f"{case.name}: stopped after {limit:.0f} s"
        lines = ended.stderr.strip().splitlines()
        return f"{case.name}: {lines[-1] if lines else 'no word'}" if ended.returncode else ""

    started = time.perf_counter()
    with ThreadPoolExecutor(len(cases)) as pool:
        for reason in pool.map(compile_one, cases):
            if reason:
                print(f"not compiled ahead: {reason}", flush=True)
    print(f"{len(cases)} masks compiled for FlexAttention in {time.perf_counter() - started:.0f} s", flush=True)


def compile_one(name: str, device: torch.device, seed: int) -> int:
    """What a process of `compile_ahead` does: FlexAttention is made ready, and run once."""
    case = next(case for case in mask_grid.cases() if case.name == name and FLEX in case.peers)
    inputs = case.make_inputs(device, torch.bfloat16, seed)
    providers.prepare(FLEX, case, case.make_mask(device), inputs)
    torch.cuda.synchronize(device)
    return 0


def problem_rows(flags: argparse.Namespace, device: torch.device, budget: Budget) -> Iterator[list[Row]]:
    unit = 1 if device.type == "cuda" else SMALLER
    chosen = [case for case in mask_grid.cases(unit) if case.group in flags.only]
    to_compile = [case for case in chosen if FLEX in case.peers and FLEX not in flags.without]
    is_compiled = device.type != "cuda" or len(to_compile) < 2
    for case in chosen:
        case = mask_cases.without(case, flags.without)
        if FLEX in case.peers and not is_compiled and not budget.reason:
            compile_ahead(to_compile, flags.seed, min(budget.left, MOST_COMPILING))
            is_compiled = True
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        problem = None if budget.reason else Problem(case, device, flags.seed)
        for direction in case.directions:
            if problem is None or budget.reason:
                yield [{**shape_of(case, dtype), "direction": direction, "provider": OURS, "missing": budget.reason}]
            else:
                yield list(problem.rows(direction, flags.rounds, flags.seconds, flags.clock))
        if problem is not None:
            problem = None
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def _causal_case(B: int, H: int, N: int, D: int) -> Case:
    mask = functools.partial(mask_grid.causal_mask, N)
    return Case("host", "causal", B, H, H, N, D, False, mask, (mask_cases.BAND,))


def host_rows(device: torch.device) -> Iterator[Row]:
    """Host microseconds of a call with a mask beside the call with `causal`, whose kernels are short."""
    case = _causal_case(1, 8, 64, 64)
    with torch.no_grad():
        problem = Problem(case, device, 0)
        for name, reason in problem.missing.items():
            yield {**shape_of(case, problem.dtype), "provider": name, "missing": reason}
        for direction in case.directions:
            contenders = [Contender(name, x.call(direction)) for name, x in problem.calls.items()]  # type: ignore[arg-type]
            timings = measure(contenders, device, clock="host", rounds=HOST_ROUNDS, seconds=0.2)
            for name, timing in timings.items():
                shape = {**shape_of(case, problem.dtype), "direction": direction, "provider": name, "clock": "host"}
                yield {**shape, **columns_of(timing), **(problem.ratios(timings) if name == OURS else {})}


def kernel_name(signature: str) -> str:
    """The kernel's own name of what the profiler calls it."""
    found = re.search(r"(\w+)(?:<.*)?\(", signature)
    return found[1] if found else signature[:60]


def kernel_rows(device: torch.device, unit: int) -> Iterator[Row]:
    """The time of each kernel of a masked call, a call's mean: what the mask's own kernels take."""
    case = next(case for case in mask_grid.cases(unit) if case.name == "8 documents")
    case = mask_cases.without(case, case.peers)
    problem = Problem(case, device, 0)
    shape = {**shape_of(case, problem.dtype), "group": "kernels", "pairs": problem.pairs}
    if OURS in problem.missing or device.type != "cuda":
        yield {**shape, "provider": OURS, "missing": problem.missing.get(OURS, "kernels are those of a GPU")}
        return
    calls = 5
    for direction in case.directions:
        call = problem.calls[OURS].call(direction)
        assert call is not None
        call()
        torch.cuda.synchronize(device)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(calls):
                call()
            torch.cuda.synchronize(device)
        for event in profile.key_averages():
            if event.self_device_time_total > 0:
                time_of_one = f"{event.self_device_time_total / calls:.3f}"
                row = {**shape, "direction": direction, "provider": kernel_name(event.key), "clock": "profiler"}
                yield {**row, "median_us": time_of_one, "calls": calls}


def line(row: Row) -> str:
    text = f"{row['group']:<12} {row['case']:<22} {row.get('direction', ''):<4} N {row['N']:<6} D {row['D']:<4}"
    text += f" {row['provider']:<22}"
    if "missing" in row:
        return f"{text} {row['missing']}"
    text += f" {float(str(row['median_us'])):>10.1f} us"
    if "tflops" in row:
        text += f" {float(str(row['tflops'])):>7.1f} TFLOP/s ±{100 * float(str(row['spread'])):.1f} %"
    ratios = {k[6:]: v for k, v in row.items() if k.startswith("ratio_") and not k.endswith("_spread")}
    return text + "".join(f"  {float(str(ratio)):.3f} of {peer}" for peer, ratio in ratios.items())


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/run.py --masks", description=(__doc__ or "").split("\n")[0], allow_abbrev=False
    )
    parser.add_argument(
        "--only", default=",".join(GROUPS), help=f"groups, separated by commas (all): {', '.join(GROUPS)}"
    )
    parser.add_argument("--without", default="", help=f"peers to leave out, of {', '.join(PEERS)}")
    parser.add_argument(
        "--clock", choices=["events", "graph"], default="events", help="graph: short kernels without the host's time"
    )
    parser.add_argument("--rounds", type=int, default=5, help="turns of each provider (5)")
    parser.add_argument("--seconds", type=float, default=0.06, help="measured time per provider and row (0.06)")
    parser.add_argument("--budget", type=float, default=130, help="start no row after so many seconds (130)")
    parser.add_argument(
        "--device", type=case_flags.device_name, default="cuda", help="cuda (default), or cpu with a 64th of the tokens"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the inputs (0)")
    parser.add_argument("--commit", default="", help="commit to name in the CSV (git's)")
    parser.add_argument("--out", type=Path, help="CSV to write")
    parser.add_argument("--compile", help="compile FlexAttention for this constructor alone, and measure nothing")
    flags = parser.parse_args(arguments)
    if flags.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("there is no CUDA GPU here; --device cpu tries the tool on the CPU")
    for name, known in (("only", GROUPS), ("without", PEERS)):
        chosen = [one for one in getattr(flags, name).split(",") if one]
        if set(chosen) - set(known):
            parser.error(f"--{name}: expected some of {', '.join(known)}, given {','.join(chosen)}")
        setattr(flags, name, chosen)
    return flags


def measured(flags: argparse.Namespace, device: torch.device) -> Iterator[list[Row]]:
    budget = Budget(flags.budget)
    if "host" in flags.only and not budget.reason:
        yield list(host_rows(device))
    if "blocks" in flags.only and not hasattr(Mask, "from_blocks"):
        print("absent: blocks: flash_cute.Mask has no from_blocks", flush=True)
    yield from problem_rows(flags, device, budget)
    if "kernels" in flags.only and not budget.reason:  # last: what has been profiled once may launch slower
        yield list(kernel_rows(device, 1 if device.type == "cuda" else SMALLER))


def main(arguments: Sequence[str]) -> int:
    flags = parse(arguments)
    device = torch.device(flags.device)
    if flags.compile:
        return compile_one(flags.compile, device, flags.seed)
    started = time.perf_counter()
    facts = environment(device, flags.commit)
    print(", ".join(f"{name} {value}" for name, value in facts.items() if value), f"seed {flags.seed}", sep=", ")
    right, ran = True, False
    with errors.rows_to(flags.out, [*COLUMNS, *facts]) as write:
        for rows in measured(flags, device):
            for row in rows:
                print(line(row), flush=True)
                right &= not str(row.get("missing", "")).startswith("wrong")
                ran |= row["provider"] == OURS and "median_us" in row
            write([{**row, **facts} for row in rows])
    print(f"\n{time.perf_counter() - started:.0f} s in all")
    return 0 if right and ran else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
