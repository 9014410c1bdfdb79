"""What flash_cute.inspect computes from the kernels' traits, and what must hold of every kernel there is."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("pybind11", reason="the extra flash_cute[inspect] is not installed")

import flash_cute
from flash_cute import inspect, report
from flash_cute.inspect import banks, build, checks
from flash_cute.inspect.kernels import Kernel

# Where each entry of sm80's tile table is for.
CAPABILITY = {"A100": 80, "Smem99K": 86, "H100": 90}


@pytest.fixture(scope="session")
def kernels() -> tuple[Kernel, ...]:
    return inspect.kernels()


@pytest.fixture(scope="session")
def broken_csrc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of csrc with mistakes: no swizzle, threads that load nothing, other keys a step, Q's bytes
    forgotten, a mask that hides the diagonal, a schedule that forgets the last row tile."""
    folder = tmp_path_factory.mktemp("csrc") / "csrc"
    shutil.copytree(build.default_csrc(), folder)

    def edit(name: str, pattern: str, replacement: str) -> None:
        path = folder / name
        text, count = re.subn(pattern, replacement, path.read_text())
        assert count, f"{name} has no {pattern}"
        path.write_text(text)

    edit("sm80/fwd_traits.cuh", r"Swizzle<kAtomColumns == 64 \? 3 : 2, 3, 3>", "Swizzle<0, 3, 3>")
    edit("sm80/fwd_traits.cuh", r"Layout<Shape<Int<kThreads / kThreadsPerRow>", "Layout<Shape<Int<kThreads / 16>")
    edit("sm80/fwd_traits.cuh", r"static_assert\(sizeof\(SharedStorage\)[^;]*;", "")
    edit("sm80/fwd_tile.h", r"\.block_n = \w+,", ".block_n = 16,")
    edit("sm80/fwd_tile.h", r"tile\.block_m \+ 2 \* tile\.stages", "2 * tile.stages")
    edit("core/mask.cuh", r"row \+ params\.diagonal \+ 1", "row + params.diagonal")
    edit("core/scheduler.cuh", r"num_m_blocks - 1 -", "num_m_blocks - 2 -")
    return folder


@pytest.fixture(scope="session")
def broken(broken_csrc: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Kernel, ...]:
    return inspect.kernels(broken_csrc, archs=("sm80",), head_dims=(64,))


# --- Every kernel -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", checks.CHECKS.values(), ids=lambda check: check.__name__)
def test_every_kernel(check: Callable[[Kernel], list[str]], kernels: tuple[Kernel, ...]) -> None:
    found = [f"{kernel}: {sentence}" for kernel in kernels for sentence in check(kernel)]
    assert not found, "\n".join(found)


def test_kernels_are_those_of_the_library(kernels: tuple[Kernel, ...]) -> None:
    built = report.built_architectures()
    listed = {(kernel.arch, kernel.head_dim, kernel.mask) for kernel in kernels}
    for entry in report.load()["kernels"]:
        forward = re.fullmatch(r"(sm\d+)_fwd_d(\d+)_(\w+)\.cu", entry["file"])
        if forward:  # the module knows no backward
            assert (forward[1], int(forward[2]), forward[3]) in listed
    assert built <= {kernel.arch for kernel in kernels}


def test_default_head_dims_are_the_builds() -> None:
    config = pytest.importorskip("build_tools.config", reason="not in a checkout")
    assert config.HEAD_DIMS == build.HEAD_DIMS


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_explain_says_what_the_traits_say(dtype: torch.dtype, kernels: tuple[Kernel, ...]) -> None:
    built = {entry["file"] for entry in report.load()["kernels"]}
    if not built:
        pytest.skip("this build has no CUDA kernels")
    by_name = {(k.arch, k.head_dim, k.mask, k.config_index): k for k in kernels}
    told = set()
    for arch, head_dim, mask, config in by_name:
        if f"{arch}_fwd_d{head_dim}_{mask}.cu" not in built:
            continue
        capability = 90 if arch == "sm90" else CAPABILITY[by_name[arch, head_dim, mask, config].config]
        for batch, length in ((1, 64), (1, 512), (2, 1024), (4, 8192)):  # sm90 chooses by the problem
            x = torch.empty(batch, 16, length, head_dim, dtype=dtype, device="meta")
            plan = flash_cute.explain(x, x, x, mask == "causal", backend=arch, capability=capability).data
            assert arch == "sm90" or plan["config"] == config
            kernel = by_name[arch, head_dim, mask, plan["config"]]
            for name in ("block_m", "block_n", "threads", "stages", "smem_bytes"):
                assert plan[name] == kernel.facts[name], (str(kernel), name)
            assert plan["ctas_per_sm"] == kernel.shape["ctas_per_sm"]
            told.add(kernel.index)
    assert told


@pytest.mark.cuda
@pytest.mark.kernel
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_driver_says_what_the_report_says(
    head_dim: int, causal: bool, kernels: tuple[Kernel, ...], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Registers and shared memory of the kernel that ran, as the driver tells the profiler."""
    x = torch.randn(1, 4, 300, head_dim, device="cuda", dtype=torch.float16)
    backend = request.config.option.backend
    plan = flash_cute.explain(x, x, x, causal, backend=backend).data
    if plan["compiled"] is None:
        pytest.skip("the driver compiled this kernel from PTX")
    flash_cute.fwd(x, x, x, causal, backend=backend)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        flash_cute.fwd(x, x, x, causal, backend=backend)
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    ran = [event["args"] for event in events if event.get("cat") == "kernel" and "flash_cute" in event["name"]]
    assert len(ran) == 1
    mask = "causal" if causal else "full"
    name = (plan["backend"], plan["kernel_head_dim"], mask, plan["config"])
    kernel = next(k for k in kernels if (k.arch, k.head_dim, k.mask, k.config_index) == name)
    assert ran[0]["registers per thread"] == plan["compiled"]["registers"]
    assert ran[0]["shared memory"] == kernel.facts["smem_bytes"] + plan["compiled"]["smem_static"]
    assert ran[0]["block"] == [kernel.facts["threads"], 1, 1]


# --- The checks can fail ------------------------------------------------------------------------------------


def test_a_layout_without_swizzle_conflicts(broken: tuple[Kernel, ...]) -> None:
    found = "\n".join(checks.bank_conflicts(broken[0]))
    assert "K of stage 0 to registers (ldmatrix.x4)" in found and "28 more passes at worst" in found


def test_a_copy_for_other_threads_is_caught(broken: tuple[Kernel, ...]) -> None:
    found = "\n".join(checks.coverage(broken[0]))
    assert "Q.gmem.coord: for 64 threads, and there are 128" in found


def test_shared_memory_that_is_not_asked_for_is_caught(broken: tuple[Kernel, ...]) -> None:
    assert any("smem_bytes: the plan says" in sentence for sentence in checks.shared_memory(broken[0]))


def test_too_much_shared_memory_is_caught(kernels: tuple[Kernel, ...]) -> None:
    kernel = kernels[0]
    small = dataclasses.replace(kernel, facts=kernel.facts | {"smem_limit": kernel.facts["smem_bytes"] - 1})
    assert not checks.shared_memory(kernel)
    assert checks.shared_memory(small)


def test_a_wrong_mask_and_a_forgotten_tile_are_caught(broken: tuple[Kernel, ...]) -> None:
    causal = next(kernel for kernel in broken if kernel.mask == "causal")
    found = "\n".join(checks.mask_and_schedule(causal))
    assert "rows do not see what the mask is defined to show them" in found
    assert "tiles are missing" in found


@pytest.mark.parametrize("column", ["key_begin", "key_end", "parts", "cta"])
def test_a_wrong_part_of_a_tile_is_caught(
    column: str, kernels: tuple[Kernel, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = next((kernel for kernel in kernels if kernel.arch == "sm90" and kernel.mask == "full"), None)
    if kernel is None:
        pytest.skip("this build has no sm90 kernels")
    assert not checks.mask_and_schedule(kernel)
    real = Kernel.schedule

    def one_off(self: Kernel, problem: inspect.Problem, ctas: int = 1) -> dict[str, np.ndarray]:
        tiles = real(self, problem, ctas)
        return {**tiles, column: tiles[column] + (tiles["parts"] == -1)}

    monkeypatch.setattr(Kernel, "schedule", one_off)
    assert any("not put together from all their keys" in sentence for sentence in checks.mask_and_schedule(kernel))


def test_another_tile_changes_the_data(broken: tuple[Kernel, ...], kernels: tuple[Kernel, ...]) -> None:
    mine = inspect.find(kernels, 64)
    assert broken[0].block_n == 16 != mine.block_n
    assert broken[0].details().arrays["K.smem"].shape[0] == 16
    assert mine.details().arrays["K.smem"].shape[0] == mine.block_n


SPOILED: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    # array or fact, check, what is done to it
    "an accumulator's registers in another order": ("S.mma.register", "data_flow", lambda a: a[::-1]),
    "a register twice": ("O.mma.register", "coverage", lambda a: np.where(a == a.max(), 0, a)),
    "an element loaded twice": ("Q.gmem.coord", "coverage", lambda a: np.where(a == a.max(), 0, a)),
    "an element held twice": ("S.mma.coord", "coverage", lambda a: np.where(a == a.max(), 0, a)),
    "two elements in one place": ("K.smem", "coverage", lambda a: np.where(a == a.max(), 0, a)),
    "a place outside its buffer": ("K.smem", "coverage", lambda a: np.where(a == a.max(), a.max() + 8, a)),
    "a box of other columns": ("box.columns", "data_flow", lambda columns: 96 - columns),
    "another stride in K's descriptor": ("K.descriptor.stride", "data_flow", lambda stride: 2 * stride),
    "another stride in V's descriptor": ("V.descriptor.stride", "data_flow", lambda stride: 2 * stride),
    "a descriptor without its swizzle": ("Q.descriptor.swizzle", "data_flow", lambda _: 3),
    "a tile whose rows lie one after another": (
        "Q.smem",
        "bank_conflicts",
        lambda a: np.arange(a.size).reshape(a.shape),
    ),
    "V's matrices as they lie": ("V.ldsm.transposed", "data_flow", lambda _: 0),
    "an ldmatrix of other rows": ("K.ldsm.coord", "data_flow", lambda a: a[..., ::-1]),
    "an output stored elsewhere": ("O.sts.coord", "data_flow", lambda a: a[..., ::-1]),
}


@pytest.mark.parametrize("what", SPOILED)
def test_a_spoiled_layout_is_caught(what: str, kernels: tuple[Kernel, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    name, check, spoil = SPOILED[what]
    tried = 0
    for kernel in (inspect.find(kernels, 64, arch=arch) for arch in sorted({kernel.arch for kernel in kernels})):
        if check == "bank_conflicts" and name.endswith(".smem") and kernel.arch == "sm90":
            continue  # its accesses are WGMMA's, whose places are the descriptors'
        good = kernel.details()
        fields = good.arrays if name in good.arrays else good.facts
        if name not in fields:
            continue
        details = copy.deepcopy(good)
        fields = details.arrays if name in good.arrays else details.facts
        fields[name] = spoil(fields[name])
        monkeypatch.setattr(Kernel, "details", lambda self, details=details: details)
        assert getattr(checks, check)(kernel), str(kernel)
        monkeypatch.undo()
        tried += 1
    if not tried:
        pytest.skip(f"no kernel to spoil {name} of")


def test_conflicts_are_counted() -> None:
    lanes = np.arange(32)
    assert banks.conflicts((4 * lanes)[None], 4) == 0  # a row of words
    assert banks.conflicts((128 * lanes)[None], 4) == 31  # one bank
    assert banks.conflicts(np.zeros((1, 32), int), 4) == 0  # one word, for all
    assert banks.conflicts((16 * lanes)[None], 16) == 0
    assert banks.conflicts((32 * lanes)[None], 16) == 4  # 8 lanes on half of the banks, four times
    assert banks.conflicts((128 * lanes)[None], 16) == 28


# --- Building -------------------------------------------------------------------------------------------------


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    build.find_tools.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(inspect.InspectError, match=r"no C\+\+ compiler.*no-such-compiler.*install g\+\+"):
        build.find_tools()
    build.find_tools.cache_clear()


def test_no_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    build.find_tools.cache_clear()
    monkeypatch.setattr(build, "_find_cutlass", lambda: None)
    monkeypatch.setattr(build, "_find_cuda", lambda: None)
    with pytest.raises(inspect.InspectError, match=r"nvidia-cutlass.*nvidia-cuda-cccl.*flash_cute\[inspect\]"):
        build.find_tools()
    build.find_tools.cache_clear()


def test_headers_that_do_not_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_CUTE_INSPECT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "CXX_FLAGS", ("-nostdinc",))
    with pytest.raises(inspect.InspectError, match=r"compiling the traits of .* failed:\n.*error"):
        inspect.kernels(archs=("sm80",), head_dims=(32,))
    assert not list((tmp_path / "cache").glob("*"))


def test_the_module_is_compiled_once(kernels: tuple[Kernel, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(build, "_compile", never)
    assert [str(kernel) for kernel in inspect.kernels()] == [str(kernel) for kernel in kernels]
