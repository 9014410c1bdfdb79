"""PyTorch's own attention tests with `enable()`: which of them fail that pass without it.

    python tests/integrations/torch_suite.py ~/pytorch/test    # on the GPU if there is one, else on the CPU
    python tests/integrations/torch_suite.py ~/pytorch/test --most 20 --files test_transformers.py -k nested

The folder is `test/` of a checkout of PyTorch at the version that is installed; another's tests may fail for reasons of
their own, in both runs. The tests need pytest and expecttest. Each file runs twice, without and with
`flash_cute.integrations.sdpa.enable()`. Printed are what flash_cute served, and the tests whose outcome changed: first
those that ask for an error or a warning, where flash_cute's words are others, or it serves the call and has nothing to
warn of; then the rest, which must be none. Exits with 1 where there are any, or where a process died.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import inspect
import math
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from pathlib import Path

import pytest

FILES = (
    "test_transformers.py",
    "test_varlen_attention.py",
    "test_nestedtensor.py",
    "nn/test_multihead_attention.py",
    "test_native_mha.py",
    "test_flop_counter.py",
)
# What a test that asks for an error or a warning says where it gets another or none: unittest's words and pytest's.
ASKING = ("not raised", "DID NOT RAISE", 'does not match "flash_cute: ', "MalformedCall: flash_cute: ")
ASKING += ("Warning not triggered", "DID NOT WARN")


def pytest_addoption(parser: pytest.Parser) -> None:
    """This module is the plugin of its own two runs."""
    parser.addoption("--most", type=int, default=sys.maxsize)
    parser.addoption("--enable-on", default="")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.enable_on:
        from flash_cute.integrations import sdpa

        sdpa.enable(devices=config.option.enable_on.split(","))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """At most so many cases of each test function, evenly; PyTorch makes a method of each, round the same function."""
    cases: dict[object, list[pytest.Item]] = {}
    for item in items:
        function = inspect.unwrap(getattr(item, "function", pytest.fail)).__qualname__
        cases.setdefault(function, []).append(item)
    kept = {item for found in cases.values() for item in found[:: math.ceil(len(found) / config.option.most)]}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.option.enable_on:
        from flash_cute.integrations import sdpa

        terminalreporter.write_line(f"{REPORT}{sum(sdpa.report().served.values())}")
        terminalreporter.write_line(str(sdpa.report()))


REPORT = "served by flash_cute in all: "


def run(file: str, folder: Path, most: int, enable_on: str, more: list[str]) -> tuple[dict[str, tuple[str, str]], str]:
    """({test: (outcome, message)}, what pytest printed); a process that died has the outcome of no test."""
    with tempfile.TemporaryDirectory() as temporary:
        results = Path(temporary) / "results.xml"
        command = [sys.executable, "-m", "pytest", file, "-q", "-p", "torch_suite", "-p", "no:cacheprovider"]
        command += [f"--junitxml={results}", f"--most={most}", f"--enable-on={enable_on}", *more]
        # This plugin, the flash_cute that this process would import, and what the tests import beside them.
        package = Path(importlib.util.find_spec("flash_cute").origin).resolve().parents[1]
        paths = [str(Path(__file__).resolve().parent), str(package), str(folder), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        outcomes: dict[str, tuple[str, str]] = {}
        if results.exists():
            for case in xml.etree.ElementTree.parse(results).iter("testcase"):
                found = next((x for x in case if x.tag in ("failure", "error", "skipped")), None)
                name = f"{case.get('classname')}::{case.get('name')}"
                message = "" if found is None else f"{found.get('message', '')}\n{found.text or ''}"
                outcomes[name] = ("passed" if found is None else found.tag, message)
    return outcomes, done.stdout + done.stderr


def changed(before: dict[str, tuple[str, str]], after: dict[str, tuple[str, str]]) -> tuple[list[str], list[str]]:
    """(tests that ask for an error or a warning, others) that fail only in the second run, each with why."""
    asking, others = [], []
    for name, (outcome, message) in after.items():
        if outcome in ("failure", "error") and before.get(name, ("missing",))[0] not in ("failure", "error"):
            asks = any(words in message for words in ASKING)
            line = message.strip().partition("\n")[0][:300]
            (asking if asks else others).append(f"{name}: {line}")
    return asking, others


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="test/ of a checkout of PyTorch")
    parser.add_argument("--files", nargs="+", default=FILES, help="in that folder (all that concern attention)")
    parser.add_argument("--most", type=int, default=sys.maxsize, help="cases of each test function (all)")
    parser.add_argument("--logs", type=Path, help="folder for what pytest printed")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="what enable() is for (cuda if there is one)")
    args, more = parser.parse_known_args()
    if args.device is None:
        import torch

        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    failed = False
    for file in args.files:
        if not (args.folder / file).exists():
            print(f"{file}: not in {args.folder}", flush=True)
            continue
        before, printed = run(file, args.folder, args.most, "", more)
        after, printed_after = run(file, args.folder, args.most, args.device, more)
        for name, text in (("without", printed), ("with", printed_after)) if args.logs else ():
            args.logs.mkdir(parents=True, exist_ok=True)
            (args.logs / f"{Path(file).stem}-{name}.log").write_text(text)
        asking, others = changed(before, after)
        served = printed_after.partition(REPORT)[2]
        counts = [collections.Counter(outcome for outcome, _ in run.values()) for run in (before, after)]
        print(f"{file}: without {dict(counts[0])}, with {dict(counts[1])}", flush=True)
        if not before and not after and "no tests ran" in printed_after:
            continue  # as those for a GPU where there is none
        if not before or not after or not served:
            failed = True
            print("  no results; the last lines of pytest:\n" + (printed_after if before else printed)[-3000:])
            continue
        print(f"  served by flash_cute: {served.strip()}")
        for title, lines in (("ask for an error or a warning", asking), ("FAIL WITH enable()", others)):
            print(f"  {title}: {len(lines)}", *(f"    {line}" for line in lines), sep="\n", flush=True)
        failed |= bool(others)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
