"""flash_cute.schedules without a GPU: the list, the command, and how the kernels are compiled."""

from __future__ import annotations

import csv
import importlib
import re
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import background
import compiled
import pytest
import torch
from repository import ROOT

from flash_cute import schedules
from flash_cute.inspect import build as inspect_build
from flash_cute.inspect.checks import bank_conflicts, data_flow
from flash_cute.schedules import __main__ as command
from flash_cute.schedules import _compile, _library, facts, measure
from flash_cute.schedules.picture import family_picture

SAMPLE = """ptxas info    : Compiling entry function '_Z1kIN7cutlass6half_tEEvv' for 'sm_90'
ptxas info    : Function properties for _Z1k
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers
ptxas info    : Compiling entry function '_Z1kIN7cutlass10bfloat16_tEEvv' for 'sm_90'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 167 registers, used 1 barriers
"""


def test_names_are_those_of_the_kernels() -> None:
    text = (inspect_build.default_csrc() / "studies/schedules/tile.h").read_text()
    found = re.search(r"kScheduleNames\[kNumSchedules\] = \{(.*?)\};", text, re.DOTALL)
    assert found and tuple(re.findall(r'"(\w+)"', found[1])) == schedules.names()
    found = re.search(r"kHeadDims\[\] = \{(.*?)\};", text)
    assert found and tuple(map(int, found[1].split(","))) == _compile.HEAD_DIMS
    assert schedules.names(512) == ("tiled_qkv",) and schedules.names(513) == ()


def test_arguments_are_checked_before_anything_is_compiled() -> None:
    q = torch.randn(1, 1, 8, 64)
    with pytest.raises(ValueError, match="q: expected a CUDA tensor, got cpu"):
        schedules.fwd(q, q, q, schedule="split_q")
    with pytest.raises(ValueError, match="q: expected a CUDA tensor, got list"):
        schedules.fwd([1.0], q, q, schedule="split_q")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--D", "513"], "at most 512"),
        (["--D", "x"], "expected a number"),
        (["--seconds", "0"], "expected a number above 0"),
        (["--seconds", "soon"], "expected a number above 0, got soon"),
        (["--schedules", "split_k"], "expected some of split_kv"),
        (["--peers", "fa4"], "expected some of sdpa flash"),
        (["--heads", "6", "--heads-kv", "4"], "a divisor of --heads 6"),
    ],
)
def test_wrong_flags(arguments: Sequence[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        command.main(arguments)
    assert left.value.code == 2 and message in capsys.readouterr().err


def test_running_them_needs_no_inspector() -> None:
    """Its packages are those of another extra."""
    modules = "flash_cute.schedules, flash_cute.schedules.__main__, flash_cute.schedules.measure"
    code = f"import sys, {modules}; print([name for name in sys.modules if name.startswith('flash_cute.inspect')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_no_cxx_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_library, "installed", lambda: None)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(schedules.SchedulesError, match=r"schedules compiles .*no C\+\+ compiler: 'no-such-compiler'"):
        schedules.library()


def test_missing_compiler_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(_compile, "find_nvcc", lambda: None)
    monkeypatch.setattr(_library, "installed", lambda: None)
    assert _library.compiled() is None and schedules.report() == []
    with pytest.raises(schedules.SchedulesError, match=r"no CUDA compiler: pip install '\.\[schedules\]'"):
        schedules.library()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert command.main(["--D", "64"]) == 2
    assert "'.[schedules]' in a checkout" in capsys.readouterr().err


def test_report_of_the_compiler_is_read() -> None:
    half, bfloat = _compile.resources(_compile.Instance("split_q", 64), SAMPLE)
    common = {"schedule": "split_q", "head_dim": 64, "arch": "sm_90"}
    assert half == common | {"dtype": "float16", "registers": 168, "spill_stores": 12, "spill_loads": 16}
    assert bfloat == common | {"dtype": "bfloat16", "registers": 167, "spill_stores": 0, "spill_loads": 0}


def _program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return path


@pytest.fixture
def tools(tmp_path: Path) -> _compile.Toolchain:
    """Compilers that note what they are asked for, and write the file after -o."""
    write = f'echo "$@" >> {tmp_path}/calls\nwhile [ "$1" != -o ]; do shift; done\necho made > "$2"'
    nvcc = _program(tmp_path / "nvcc", f"{write}\ncat <<'END'\n{SAMPLE}END")
    return _compile.Toolchain(nvcc, str(_program(tmp_path / "cxx", write)), tmp_path / "cudart.a", (), tmp_path)


def test_build_compiles_each_file_once(tmp_path: Path, tools: _compile.Toolchain) -> None:
    csrc, target, done = tmp_path / "csrc", tmp_path / "out" / _compile.LIBRARY, []
    options: dict[str, Any] = {"jobs": 3, "on_done": lambda count, steps: done.append((count, steps))}
    _compile.build(csrc, tools, "arch=compute_80,code=sm_80", tmp_path / "work", target, **options)
    files = len(_compile.instances()) + len(_compile.HOST_FILES)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == files + 1 and target.read_text() == "made\n"
    assert done == [(count, files) for count in range(1, files + 1)]
    assert sum("-gencode=arch=compute_80,code=sm_80" in call for call in calls) == len(_compile.instances())
    assert (target.parent / _compile.REPORT).exists()

    (tmp_path / "work/split_kv_d64.o").unlink()
    _compile.build(csrc, tools, "arch=compute_80,code=sm_80", tmp_path / "work", target, jobs=1)
    again = (tmp_path / "calls").read_text().splitlines()[files + 1 :]
    assert len(again) == 2 and "split_kv_d64.cu" in again[0]  # and the link


def test_build_says_what_a_compiler_says(tmp_path: Path, tools: _compile.Toolchain) -> None:
    _program(tools.nvcc, "echo 'x.cu(3): error: no such thing'\nexit 1")
    with pytest.raises(_compile.CompileError, match="no such thing"):
        _compile.build(tmp_path, tools, "", tmp_path / "work", tmp_path / _compile.LIBRARY, jobs=2)
    assert not (tmp_path / _compile.LIBRARY).exists() and not list((tmp_path / "work").glob("*_d*.o"))


def begin(item: pytest.Function) -> None:
    """See `background`."""
    if item.function is test_a_kernel_compiles_without_spills and not schedules.report():
        background.begin(compiled.schedule)
    elif item.function in (test_layouts, test_facts):
        background.begin(compiled.modules)


def test_a_kernel_compiles_without_spills() -> None:
    """Of the whole library, where it is compiled; else one of its files is compiled."""
    rows = schedules.report()
    if not rows:
        try:
            rows = background.result(compiled.schedule)
        except schedules.SchedulesError as error:
            pytest.skip(str(error))
        assert {row["dtype"] for row in rows} == {"float16", "bfloat16"}
    assert [row for row in rows if row["spill_stores"] or row["spill_loads"]] == []


def _kernels(head_dim: int) -> Any:
    background.result(compiled.modules)
    try:
        return facts.kernels([head_dim])
    except inspect_build.InspectError as error:
        if "pip install" not in str(error) and "no C++ compiler" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize("head_dim", compiled.SCHEDULE_HEAD_DIMS)
def test_layouts(head_dim: int) -> None:
    """No bank conflicts, and what each ldmatrix brings is what its MMA takes it for; split_kv's P is its S."""
    kernels = _kernels(head_dim)
    assert tuple(kernel.entry for kernel in kernels) == schedules.names(head_dim)
    for kernel in kernels:
        assert kernel.facts["smem_bytes"] == kernel.shape["smem_bytes"], kernel
        assert bank_conflicts(kernel) == [] and data_flow(kernel) == [], kernel
        assert kernel.facts["max_head_dim"] == _compile.MAX_HEAD_DIM[kernel.entry]


def test_the_pages_picture_is_up_to_date() -> None:
    digest = family_picture(_kernels(64)).digest()
    found = re.search(r"<!-- digest (\w+) -->", (ROOT / "docs/schedules.md").read_text())
    assert found and found[1] == digest, "draw it again as docs/schedules.md says, and note the new digest there"
    drawn = (ROOT / "docs/pictures/schedules_d64.svg").read_text()
    assert all(name in drawn for name in schedules.names(64))


def test_facts() -> None:
    _kernels(64)
    rows = {row["schedule"]: row for row in facts.facts([64])}
    assert tuple(rows) == schedules.names(64)
    assert all(set(row) == set(facts.COLUMNS) for row in rows.values())
    one, two = rows["split_q"], rows["split_q_2stages"]
    assert two["smem_bytes"] - one["smem_bytes"] == 2 * 64 * 64 * 2
    assert rows["shared_kv"]["smem_bytes"] == one["smem_bytes"] - 64 * 64 * 2
    assert rows["shared_qkv"]["smem_bytes"] == 128 * 64 * 2
    assert one["tile_bytes"] == 2 * 64 * 64 * 2 and one["q_bytes"] == 128 * 64 * 2
    assert rows["tiled_qk"]["tile_bytes"] == one["tile_bytes"] // 2 + one["q_bytes"]  # half the keys, and Q
    assert rows["tiled_qkv"]["smem_bytes"] < rows["tiled_qk"]["smem_bytes"]
    assert all(row["bank_conflicts"] == 0 and row["ctas_sm"] >= 1 for row in rows.values())


def test_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _kernels(64)
    path = tmp_path / "list.csv"
    assert command.main(["--list", "--D", "40", "--schedules", "split_q,tiled_qkv", "--csv", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "split_q " in printed and "tiled_qkv" in printed and "shared_kv" not in printed
    with path.open() as file:
        assert [row["schedule"] for row in csv.DictReader(file)] == ["split_q", "tiled_qkv"]


def _row(name: str, tflops: float | None, **more: Any) -> dict[str, Any]:
    shape = {"gpu": "GPU", "torch": "2", "dtype": "float16", "B": 1, "H": 8, "Hkv": 8, "N": 1024, "D": 64}
    numbers = {"spread": 0.01, "error": 1e-4, "allowed": 2e-4, "lse_error": None, "reason": None}
    return shape | {"causal": False, "name": name, "tflops": tflops} | numbers | more


def test_table_and_plot_of_a_run(tmp_path: Path) -> None:
    rows = [_row("split_q", 300.0), _row("split_kv", 200.0), _row("sdpa flash", None, error=None, reason="no kernel")]
    lines = command._text(rows).splitlines()
    assert [line.split()[2] for line in lines[1:3]] == ["split_q", "split_kv"]
    assert "not served: no kernel" in lines[3]
    measure.write_csv(tmp_path / "run.csv", rows)
    assert [row["tflops"] for row in measure.read_csv(tmp_path / "run.csv")] == ["300.0", "200.0", ""]
    pytest.importorskip("matplotlib")
    measure.plot(rows, tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 1000


def test_tables_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])  # last: it must not hide the installed package
    tables = importlib.import_module("bench.schedules")
    rows = [_row("split_q", 300.0), _row("split_kv", 200.0), _row("sdpa flash", 310.0)]
    measure.write_csv(tmp_path / "run.csv", rows)
    marked = {"run": "old", "none": "kept"}
    page = "".join(f"<!-- schedules:{name} -->\n{text}\n<!-- end schedules -->\n" for name, text in marked.items())
    text = tables.filled(page, tmp_path)
    assert "| split_q | **300** |" in text and "| sdpa flash | 310 |" in text
    assert "| split_kv | 1.0e-04 of 2.0e-04 |" in text
    assert "old" not in text and "kept" in text and tables.filled(text, tmp_path) == text
    assert tables.main(["--check"]) == 0
