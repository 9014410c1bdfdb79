"""What flash_cute.inspect computes from the kernels' traits, and what must hold of every kernel there is."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import background
import compiled
import numpy as np
import pytest
import torch

pytest.importorskip("pybind11", reason="the extra inspect is not installed")

import flash_cute
from flash_cute import inspect, report
from flash_cute.inspect import banks, build, checks, tools
from flash_cute.inspect.kernels import NO_LIMIT, Kernel, band_module

# Where each entry of sm80's tile table is for.
CAPABILITY = {"a100": 80, "99kb": 86, "h100": 90}


def begin(item: pytest.Function) -> None:
    """See `background`."""
    if {"kernels", "broken"} & {*item.fixturenames}:
        background.begin(compiled.modules)


# --- Every kernel -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check", checks.CHECKS.values(), ids=lambda check: check.__name__)
def test_every_kernel(check: Callable[[Kernel], list[str]], kernels: tuple[Kernel, ...]) -> None:
    found = [f"{kernel}: {sentence}" for kernel in kernels for sentence in check(kernel)]
    assert not found, "\n".join(found)


def test_the_mask_is_what_it_is_defined_to_be() -> None:
    seed = int(np.random.default_rng().integers(1 << 31))
    found = checks.mask_definition(seed=seed, cases=300)
    assert not found, f"seed {seed}:\n" + "\n".join(found)


def test_bands_are_those_of_the_definition() -> None:
    """Problem.band, from which the checks follow, against the sentence that defines causal masks and windows."""
    for problem in checks.PROBLEMS:
        first, limit = problem.seen()
        for row in range(0, problem.len_q, 7):
            position = row if problem.causal == "top_left" else row + problem.len_k - problem.len_q
            left, right = problem.window
            sees = np.arange(problem.len_k)
            sees = sees[(left is None) | (sees >= position - (left or 0))]
            if problem.causal != "none":
                right = 0
            sees = sees[(right is None) | (sees <= position + (right or 0))]
            assert list(range(first[row], limit[row])) == sees.tolist(), (problem, row)


def test_no_limit_is_the_headers() -> None:
    assert band_module().NO_LIMIT == NO_LIMIT


def test_kernels_are_those_of_the_library(kernels: tuple[Kernel, ...]) -> None:
    listed = {(kernel.arch, "fwd" if kernel.is_forward else "bwd", kernel.head_dim) for kernel in kernels}
    for arch, direction, head_dim, _ in report.built_instances():
        assert direction not in build.DIRECTIONS or (arch, direction, head_dim) in listed
    assert report.built_architectures() <= {kernel.arch for kernel in kernels}


def test_default_kernels_are_the_builds() -> None:
    config = pytest.importorskip("build_tools.config", reason="not in a checkout")
    instances = pytest.importorskip("build_tools.instances")
    assert config.HEAD_DIMS == build.HEAD_DIMS
    assert tuple(config.GENCODE) == build.ARCHS
    not_drawn = {"decode"}  # kernels over caches
    assert {*build.DIRECTIONS, *not_drawn} == {*instances.DIRECTIONS}
    assert {name: instances.FOLDERS[name] for name in build.DIRECTIONS} == build.FOLDERS


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_explain_says_what_the_traits_say(backward: bool, kernels: tuple[Kernel, ...]) -> None:
    direction = "bwd" if backward else "fwd"
    built = report.built_instances()
    if not built:
        pytest.skip("this build has no CUDA kernels")
    by_name = {
        (k.arch, k.head_dim, k.entry_index): k
        for k in kernels
        if k.is_forward != backward and k.entry != "queries" and not k.is_float8
    }
    told = set()
    for arch, head_dim, index in by_name:
        if (arch, direction, head_dim, head_dim) not in built:
            continue
        capability = 90 if arch == "sm90" else CAPABILITY[by_name[arch, head_dim, index].entry]
        for batch, length, causal in (
            (1, 64, False),
            (1, 512, True),
            (2, 1024, False),
            (4, 8192, True),
        ):  # sm90 chooses
            x = torch.empty(batch, 16, length, head_dim, dtype=torch.float16, device="meta")
            plan = flash_cute.explain(x, x, x, causal, backend=arch, capability=capability, backward=backward).data
            assert arch == "sm90" or plan["entry"] == index
            kernel = by_name[arch, head_dim, plan["entry"]]
            for name in ("block_m", "block_n", "threads", "stages", "smem_bytes", "ctas_per_sm"):
                assert plan[name] == kernel.shape[name], (str(kernel), name)
            told.add(str(kernel))
    assert told


@pytest.mark.parametrize("softcap", [0.0, 20.0], ids=["plain", "modified"])
def test_explain_says_what_the_traits_of_float8_say(softcap: float, kernels: tuple[Kernel, ...]) -> None:
    built = report.built_instances()
    told = 0
    for kernel in kernels:
        if not kernel.is_float8 or kernel.entry != ("modified" if softcap else "plain"):
            continue
        if ("sm90", "fwd", kernel.head_dim, kernel.head_dim) not in built:
            continue
        x = torch.empty(1, 16, 512, kernel.head_dim, dtype=torch.float8_e4m3fn, device="meta")
        plan = flash_cute.explain(x, x, x, True, softcap=softcap or None, capability=90).data
        assert plan["family"] == "sm90::forward::fp8_rows"
        for name in ("block_m", "block_n", "threads", "stages", "smem_bytes", "ctas_per_sm"):
            assert plan[name] == kernel.shape[name], (str(kernel), name)
        told += 1
    if not told:
        pytest.skip("this build has no float8 kernels")


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
    name = ("forward/rows", plan["backend"], plan["kernel_head_dim"], plan["entry"])
    kernel = next(k for k in kernels if (k.folder, k.arch, k.head_dim, k.entry_index) == name)
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
    found = "\n".join(checks.mask_and_schedule(broken[0]))
    assert "hides other scores than it should" in found
    assert "a tile that needs the mask goes without" in found
    assert "tiles are missing" in found


def test_a_wrong_definition_of_the_mask_is_caught(broken_csrc: Path) -> None:
    found = "\n".join(checks.mask_definition(broken_csrc))
    assert "rows do not see what the mask is defined to show them" in found
    assert "a tile that is seen is not visited" in found
    assert "a tile that is not seen wholly goes unmasked" in found
    assert "crosses_band" not in found
    assert "keep_range" in found


def test_a_wrong_mask_of_a_backward_is_caught(kernels: tuple[Kernel, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    backward = [kernel for kernel in kernels if not kernel.is_forward]
    real = Kernel.masked

    def shifted(self: Kernel, problem: inspect.Problem, m_block: int, n_block: int) -> tuple[np.ndarray, np.ndarray]:
        held, hidden = real(self, problem, m_block, n_block)
        return held, np.roll(hidden, 1, axis=0)

    monkeypatch.setattr(Kernel, "masked", shifted)
    checks._masks_of_tile.cache_clear()
    for kernel in backward[:1]:
        assert "hides other scores than it should" in "\n".join(checks.mask_and_schedule(kernel))
    checks._masks_of_tile.cache_clear()


@pytest.mark.parametrize("column", ["key_begin", "key_end", "parts", "cta"])
def test_a_wrong_part_of_a_tile_is_caught(
    column: str, kernels: tuple[Kernel, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = next((kernel for kernel in kernels if kernel.arch == "sm90" and kernel.is_forward), None)
    if kernel is None:
        pytest.skip("this build has no sm90 kernels")
    assert not checks.mask_and_schedule(kernel)
    real = Kernel.schedule

    def one_off(self: Kernel, problem: inspect.Problem, sms: int = 1) -> dict[str, np.ndarray]:
        tiles = real(self, problem, sms)
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
    "a gradient stored elsewhere": ("dK.sts.coord", "data_flow", lambda a: a[..., ::-1]),
    "dS^T stored elsewhere": ("dSt.sts.coord", "data_flow", lambda a: a[..., ::-1]),
    "dS read at other addresses": ("dS.smem", "data_flow", lambda a: a[::-1]),
    "Q's matrices for dK as they lie": ("Qt.ldsm.transposed", "data_flow", lambda _: 0),
    "warps that share a B operand wrongly": ("Kt.mma.coord", "coverage", lambda a: np.where(a == a.max(), 0, a)),
    "V transposed by lanes in another order": ("LoadedV.ldsm.address", "data_flow", lambda a: a[:, ::-1]),
    "V transposed without the byte permutation": (
        "V.sts.byte",
        "data_flow",
        lambda a: np.broadcast_to(np.arange(16)[:, None, None], a.shape),
    ),
    "V transposed to another place": ("V.sts.address", "data_flow", lambda a: a[::-1]),
    "V transposed outside its buffer": ("V.sts.address", "data_flow", lambda a: a + a.max()),
    "V transposed by lanes of one bank": ("V.sts.address", "bank_conflicts", lambda a: 128 * np.indices(a.shape)[1]),
    "numerators one place on": ("P.mma.numerator", "data_flow", lambda a: np.roll(a, 1, 1)),
    "dS without a swizzle": (
        "dS.smem",
        "bank_conflicts",
        lambda a: np.arange(a.size).reshape(a.shape).T.reshape(a.shape),
    ),
}


def _first(kernels: tuple[Kernel, ...], like: Kernel) -> int:
    return next(
        k.entry_index for k in kernels if (k.arch, k.folder, k.head_dim) == (like.arch, like.folder, like.head_dim)
    )


@pytest.mark.parametrize("what", SPOILED)
def test_a_spoiled_layout_is_caught(what: str, kernels: tuple[Kernel, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    name, check, spoil = SPOILED[what]
    tried = 0
    for kernel in (
        kernel for kernel in kernels if kernel.head_dim == 64 and kernel.entry_index == _first(kernels, kernel)
    ):
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
    tools.find_tools.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(inspect.InspectError, match=r"no C\+\+ compiler.*no-such-compiler.*install g\+\+"):
        tools.find_tools()
    tools.find_tools.cache_clear()


def test_no_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    tools.find_tools.cache_clear()
    monkeypatch.setattr(tools, "find_cutlass", lambda: None)
    monkeypatch.setattr(tools, "_find_cuda", lambda: None)
    with pytest.raises(
        inspect.InspectError, match=r"nvidia-cutlass.*nvidia-cuda-cccl.*pip install '\.\[inspect\]' in a checkout"
    ):
        tools.find_tools()
    tools.find_tools.cache_clear()


def test_headers_that_do_not_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_CUTE_INSPECT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "CXX_FLAGS", ("-nostdinc",))
    with pytest.raises(inspect.InspectError, match=r"compiling the traits of .* failed:\n.*error"):
        inspect.kernels(archs=("sm80",), directions=("fwd",), head_dims=(32,))
    assert not list((tmp_path / "cache").glob("*"))


def test_what_is_compiled_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLASH_CUTE_INSPECT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "CXX_FLAGS", ("-nostdinc",))
    with pytest.raises(inspect.InspectError):
        inspect.kernels(archs=("sm80",), head_dims=(32, 64))
    said = capsys.readouterr().err
    families = ("sm80_forward_rows", "sm80_backward_dq_in_memory")
    units = ", ".join(f"{family}_d{head_dim}" for family in families for head_dim in (32, 64))
    assert f"compiling 4 units of kernel types ({units})" in said
    assert str(tmp_path) in said and re.search(r"about \d+ s on \d+ core", said)


def test_the_module_is_compiled_once(kernels: tuple[Kernel, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(build, "_compile", never)
    assert [str(kernel) for kernel in inspect.kernels()] == [str(kernel) for kernel in kernels]
