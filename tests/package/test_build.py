"""The build: what the compiler said of every kernel, what the library links, and what refuses to build and why."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType

import pytest
import torch
from repository import ROOT

import flash_cute
from flash_cute import report

LIBRARY = report.PATH.parent / "_C.abi3.so"
REPORT = report.load()

needs_kernels = pytest.mark.skipif(not REPORT["kernels"], reason="this build has no CUDA kernels")

# What a chip gives a CTA, and all CTAs of an SM together, which pay 1 KB each of the latter.
SMEM_CTA = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
SMEM_SM = {80: 164 << 10, 86: 100 << 10, 89: 100 << 10, 90: 228 << 10, 120: 100 << 10}
REGISTERS_SM = 65536


@needs_kernels
def test_no_kernel_spills() -> None:
    spills = [
        f"{k['spill_stores']} + {k['spill_loads']} bytes: {k['arch']} {k['kernel']}"
        for k in REPORT["kernels"]
        if k["spill_stores"] or k["spill_loads"]
    ]
    assert not spills, "\n".join(spills)


@needs_kernels
def test_no_kernel_has_a_stack() -> None:
    """Around a call that is not inlined, fragments are in memory, which ptxas does not count as spills."""
    assert [f"{k['stack']} bytes: {k['arch']} {k['kernel']}" for k in REPORT["kernels"] if k["stack"]] == []


@needs_kernels
def test_no_wgmma_is_serialised() -> None:
    codes = ("C7508", "C7510", "C7515")
    assert not [w for w in REPORT["warnings"] if w["code"] in codes]


@needs_kernels
def test_report_has_every_file_with_both_dtypes() -> None:
    files = {entry["file"] for entry in REPORT["files"]}
    assert files == {k["file"] for k in REPORT["kernels"]}
    for file in files:
        names = " ".join(k["kernel"] for k in REPORT["kernels"] if k["file"] == file)
        dtypes = ("float_e4m3_t",) if "_fp8_d" in file else ("half_t", "bfloat16_t")
        assert all(dtype in names for dtype in dtypes), file
        seconds = next(entry["seconds"] for entry in REPORT["files"] if entry["file"] == file)
        assert seconds > 0
    assert REPORT["seconds"] == pytest.approx(sum(entry["seconds"] for entry in REPORT["files"]))


def _built_head_dims(arch: str, direction: str) -> list[int]:
    return sorted({instance[2] for instance in report.built_instances() if instance[:2] == (arch, direction[:3])})


@needs_kernels
@pytest.mark.parametrize("capability", SMEM_CTA)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("direction", ["fwd", "bwd", "bwd, deterministic"])
def test_every_planned_kernel_fits_its_chip(
    capability: int, causal: bool, direction: str, softcap: float | None
) -> None:
    """Each chip has machine code (no PTX left to the driver), and as many CTAs per SM as the tile says."""
    plans, wrong = 0, []
    backends = ("sm80", "sm90") if capability == 90 else ("sm80",)
    if not any(_built_head_dims(backend, direction) for backend in backends):
        pytest.skip("this build has no such kernels")
    for backend in backends:
        for head_dim in _built_head_dims(backend, direction):
            for dtype in (torch.float16, torch.bfloat16):
                x = torch.empty(1, 1, 64, head_dim, dtype=dtype, device="meta")
                options = {"backend": backend, "capability": capability, "backward": direction != "fwd"}
                options |= {"deterministic": direction == "bwd, deterministic", "softcap": softcap}
                plan = flash_cute.explain(x, x, x, causal, **options).data
                compiled, ctas = plan["compiled"], plan["ctas_per_sm"]
                plans += 1
                if compiled is None:
                    wrong.append(f"{backend} {dtype} D {head_dim}: no machine code")
                    continue
                registers = -(-compiled["registers"] // 8) * 8 * plan["threads"]  # in units of 8 per thread
                smem = plan["smem_bytes"] + compiled["smem_static"]
                sm_full = registers * ctas > REGISTERS_SM or (smem + 1024) * ctas > SMEM_SM[capability]
                if sm_full or smem > SMEM_CTA[capability]:
                    wrong.append(f"{backend} {dtype} D {head_dim}: {ctas} CTAs of {registers} registers, {smem} bytes")
    assert plans and not wrong, "\n".join(wrong)


@pytest.mark.skipif(shutil.which("readelf") is None, reason="readelf (binutils) is not installed")
def test_library_links_nothing_of_cuda() -> None:
    """So that it loads under a torch of any CUDA release, and under one without CUDA."""
    answer = subprocess.run(["readelf", "-d", LIBRARY], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", answer)
    assert {"libtorch.so", "libstdc++.so.6"} <= set(needed)  # a static libstdc++ would not catch torch's exceptions
    assert not [name for name in needed if re.search(r"cuda|cudart|cublas|nv|python", name)], needed
    assert "RPATH" not in answer and "RUNPATH" not in answer


def test_wheel_is_abi3() -> None:
    assert LIBRARY.name == "_C.abi3.so"
    dist = distribution("flash_cute")
    wheel = dist.read_text("WHEEL")
    if wheel is None or '"editable": true' in (dist.read_text("direct_url.json") or ""):
        pytest.skip("flash_cute is installed in editable mode, so there is no wheel to test")
    assert "Tag: cp310-abi3-" in wheel


# ----------------------------------------------------------------------- build_tools, which is not installed


@pytest.fixture(scope="module")
def tools() -> Callable[[str], ModuleType]:
    """Imports a module of build_tools without putting the checkout, and its flash_cute/, on sys.path."""
    pytest.importorskip("setuptools")
    folder = ROOT / "build_tools"
    spec = importlib.util.spec_from_file_location(
        "build_tools", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    sys.modules["build_tools"] = importlib.util.module_from_spec(spec)
    return lambda name: importlib.import_module(f"build_tools.{name}")


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"FLASH_CUTE_ARCHS": "sm80;sm70"}, "FLASH_CUTE_ARCHS: expected .* got 'sm70'"),
        ({"FLASH_CUTE_HEAD_DIMS": "64;100"}, "FLASH_CUTE_HEAD_DIMS: expected .* got '100'"),
        ({"FLASH_CUTE_JOBS": "none"}, "FLASH_CUTE_JOBS: expected .* got 'none'"),
        ({"MAX_JOBS": "0"}, "MAX_JOBS: expected .* got '0'"),
    ],
)
def test_bad_choice_is_refused(tools: Callable, environment: dict[str, str], sentence: str) -> None:
    with pytest.raises(tools("errors").BuildError, match=sentence):
        tools("config").read_config(environment)


def test_choices(tools: Callable) -> None:
    read_config = tools("config").read_config
    config = read_config({"FLASH_CUTE_ARCHS": "sm80", "FLASH_CUTE_HEAD_DIMS": "128, 64", "MAX_JOBS": "3"})
    assert (list(config.gencode), config.head_dims, config.jobs) == (["sm80"], (64, 128), 3)
    assert not read_config({"FLASH_CUTE_NO_CUDA": "1"}).cuda
    assert read_config({"FLASH_CUTE_NO_CUDA": "0"}).cuda
    assert read_config({}).jobs >= 1
    assert read_config({"FLASH_CUTE_RACE_TEST": "1"}).race_test
    assert not read_config({"FLASH_CUTE_RACE_TEST": "0"}).race_test
    assert read_config({"FLASH_CUTE_LINEINFO": "1"}).lineinfo
    assert not read_config({}).lineinfo


def test_native_without_a_gpu_is_refused(tools: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(tools("errors").BuildError, match="native needs a GPU"):
        tools("config").read_config({"FLASH_CUTE_ARCHS": "native"})


def _program(path: Path, says: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


def test_native_builds_for_this_gpu_alone(tools: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _program(tmp_path / "nvidia-smi", "8.6")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    config = tools("config").read_config({"FLASH_CUTE_ARCHS": "native"})
    assert config.gencode == {"sm80": "arch=compute_80,code=[sm_86]"}


def test_old_nvcc_is_refused(tools: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    toolchain = tools("toolchain")
    _program(tmp_path / "bin/nvcc", "Cuda compilation tools, release 12.4, V12.4.131")
    monkeypatch.setattr(toolchain, "_installed_homes", lambda: [tmp_path])
    monkeypatch.setattr(toolchain, "_pypi_homes", lambda: [])
    with pytest.raises(tools("errors").BuildError, match=r"release 13\.0 or later.* is release 12\.4\.131"):
        toolchain.find_toolkit()


def test_missing_compiler_is_refused(tools: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(tools("errors").BuildError, match="no C\\+\\+ compiler: 'no-such-compiler'"):
        tools("toolchain").find_cxx()


def test_unchanged_instances_keep_their_time_stamps(tools: Callable, tmp_path: Path) -> None:
    """So that a second build compiles nothing."""
    module = tools("instances")
    built = module.instances(tools("config").read_config({"FLASH_CUTE_ARCHS": "sm80", "FLASH_CUTE_HEAD_DIMS": "64"}))
    module.write_instances(tmp_path, built)
    for path in tmp_path.iterdir():
        os.utime(path, ns=(1, 1))
    module.write_instances(tmp_path, built)
    assert {path.stat().st_mtime_ns for path in tmp_path.iterdir()} == {1}
    assert {path.name for path in tmp_path.iterdir()} == {
        "instances.h",
        "sm80_fwd_d64.cu",
        "sm80_bwd_d64.cu",
        "sm80_decode_d64.cu",
        "sm80_side.cu",
    }
    header = (tmp_path / "instances.h").read_text()
    for direction, family in (
        ("FWD", "sm80::forward::rows"),
        ("BWD", "sm80::backward::dq_in_memory"),
        ("DECODE", "sm80::decode::split_keys"),
    ):
        assert f"{direction}_INSTANCES(X) X({family}, 64, 64)\n" in header
        assert f"namespace flash_cute::{family} {{ template <int, int>" in header
    for name in ("QUANTIZE_FP8", "APPEND", "TILE_MASK"):
        assert f"{name}_INSTANCES(X) X(80)\n" in header
    assert "sm90" not in header


@pytest.mark.parametrize(
    ("asked", "arch", "expected"),
    [
        ("32", "sm80", {(64, 64)}),
        ("96", "sm90", {(128, 128)}),
        ("192", "sm80", {(256, 256)}),
        ("192", "sm90", {(192, 192), (192, 128)}),
        ("320;512", "sm80", {(576, 512)}),
        ("320;512", "sm90", {(576, 512)}),
        ("1024", "sm80", {(1024, 1024)}),
    ],
)
def test_kernels_over_caches_of_the_head_dims_asked_for(
    tools: Callable, asked: str, arch: str, expected: set[tuple[int, int]]
) -> None:
    """Head dims without a kernel of their own have that of the next larger one."""
    config = tools("config").read_config({"FLASH_CUTE_ARCHS": arch, "FLASH_CUTE_HEAD_DIMS": asked})
    built = {(i.head_dim, i.head_dim_v) for i in tools("instances").instances(config) if i.direction == "decode"}
    assert built == expected


def test_every_family_is_of_a_direction(tools: Callable) -> None:
    """Else its kernels would be left out of the build without a word."""
    module = tools("instances")
    folders = tuple(module.FOLDERS[direction] for direction in module.DIRECTIONS)
    families = [(arch, family) for arch, of_arch in module.FAMILIES.items() for family in of_arch]
    assert all(family.startswith(folders) for _, family in families)
    assert all((ROOT / "csrc" / arch / family / "launch.cuh").exists() for arch, family in families)
    built = {(i.arch, i.family) for i in module.instances(tools("config").read_config({}))}
    assert built == set(families)


def test_each_instance_is_in_one_file(tools: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one direction; the report finds the instances in the files' names."""
    module = tools("instances")
    built = module.instances(tools("config").read_config({}))
    files = module.kernel_files(built)
    assert Counter(instance for file in files for instance in file.instances) == Counter(built)
    assert all(len({(i.arch, i.files) for i in file.instances}) == 1 for file in files)
    assert len({file.name for file in files}) == len(files)
    named = [{"file": file.name} for file in files]
    monkeypatch.setattr(report, "load", lambda: {"files": named})
    assert report.built_instances() == {(i.arch, i.direction, i.head_dim, i.head_dim_v) for i in built}


def test_the_slowest_files_come_first(tools: Callable) -> None:
    """And none limits a build on many cores."""
    module = tools("instances")
    built = module.instances(tools("config").read_config({}))
    files = module.source_files(built)
    assert Counter(files) == Counter([*module.kernel_files(built), *module.side_files(built)])
    seconds = [file.seconds for file in files]
    assert seconds == sorted(seconds, reverse=True) and 150 < seconds[0] < 250
    known = {(arch, files, head_dim) for (arch, files), of in module.SECONDS.items() for head_dim in of}
    assert {(i.arch, i.files, i.head_dim) for i in built} <= known


def test_float8_and_masks_have_files_of_their_own(tools: Callable) -> None:
    module = tools("instances")
    built = module.instances(tools("config").read_config({"FLASH_CUTE_ARCHS": "sm90", "FLASH_CUTE_HEAD_DIMS": "64"}))
    sources = {file.name: file.source for file in module.kernel_files(built)}
    own = {"sm90_fwd_masked_d64.cu": "masked_rows", "sm90_fwd_fp8_d64.cu": "fp8_rows"}
    assert set(sources) == {"sm90_fwd_d64.cu", *own, "sm90_bwd_d64.cu", "sm90_decode_d64.cu"}
    for name, family in own.items():
        assert family not in sources["sm90_fwd_d64.cu"]
        assert sources[name].splitlines()[1:] == [
            f'#include "sm90/forward/{family}/launch.cuh"',
            f"template cudaError_t flash_cute::sm90::forward::{family}::launch<64, 64>"
            "(flash_cute::FwdPlan const&, flash_cute::FwdParams const&, cudaStream_t);",
        ]


PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z6kernelIfEvPT_' for 'sm_90a'
ptxas info    : Function properties for _Z6kernelIfEvPT_
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 16 bytes stack, 1024 bytes smem
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...
a.cuh(3): warning #177-D: variable "x" was declared but never referenced
"""


def test_report_reads_what_ptxas_says(tools: Callable) -> None:
    module = tools("report")
    assert module.parse_kernels("a.cu", PTXAS) == [
        {
            "file": "a.cu",
            "arch": "sm_90a",
            "kernel": "void kernel<float>(float*)",
            "stack": 16,
            "spill_stores": 8,
            "spill_loads": 12,
            "registers": 168,
            "smem_static": 1024,
        }
    ]
    assert [w["code"] for w in module.parse_warnings("a.cu", PTXAS)] == ["C7510", ""]


def test_report_sums_the_seconds(tools: Callable, tmp_path: Path) -> None:
    logs = [tmp_path / name for name in ("a.o.json", "b.o.json")]
    for log, seconds in zip(logs, (1.5, 0.25), strict=True):
        log.write_text(json.dumps({"seconds": seconds, "gib": 0.5, "output": PTXAS}))
    made = tools("report").make_report("13.0.88", logs, lineinfo=True)
    assert made["seconds"] == pytest.approx(1.75, abs=0.1)
    assert made["lineinfo"] and made["nvcc"] == "13.0.88"
    assert [(entry["file"], entry["gib"]) for entry in made["files"]] == [("a.cu", 0.5), ("b.cu", 0.5)]
    assert len(made["kernels"]) == 2 and len(made["warnings"]) == 4
