"""The benchmark's float8 problems: what each provider is given, its speed, and its errors."""

from __future__ import annotations

import csv
import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_commands
import pytest
import torch
from repository import ROOT

import flash_cute

CPU = torch.device("cpu")
E4M3 = torch.float8_e4m3fn
real_attention = flash_cute.attention


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """bench's modules. The folder comes last on the path: it must not hide the installed package."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    names = ("backends", "figures", "float8", "fp8_errors", "readme", "run", "summary", "timing", "trained")
    names += ("workloads",)
    return SimpleNamespace(**{name: importlib.import_module(f"bench.{name}") for name in names})


def small(bench: SimpleNamespace, **changes: Any) -> Any:
    return replace(bench.workloads.Workload(2, 4, 2, 65, 65, 32, "bottom_right", "e4m3"), **changes)


def widened(x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """(B, H, N, D) in float32 by factors (B, Hkv)."""
    assert x.dtype == E4M3 and factors.dtype == torch.float32
    return x.float() * factors.repeat_interleave(x.shape[1] // factors.shape[1], 1)[..., None, None]


@pytest.fixture
def float8_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """`flash_cute.attention` with float8 as it is promised, on its CPU path in float32; 16 bits as they are."""

    def attention(q: Any, k: Any, v: Any, causal: Any = False, **options: Any) -> torch.Tensor:
        factors = [options.pop(f"descale_{name}", None) for name in "qkv"]
        out_dtype = options.pop("out_dtype", q.dtype)
        if q.dtype == E4M3:
            q, k, v = (widened(x, factor) for x, factor in zip((q, k, v), factors, strict=True))
        return real_attention(q, k, v, causal, **options).to(out_dtype)

    monkeypatch.setattr(flash_cute, "attention", attention)


@pytest.fixture
def flash_attn_3(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention-3's interface in float8: (B, N, H, D), factors (B, Hkv), out in bfloat16."""

    def forward(
        q: Any, k: Any, v: Any, causal: bool, q_descale: Any, k_descale: Any, v_descale: Any, **rest: Any
    ) -> Any:
        assert rest == {"deterministic": False} and q.is_contiguous()
        factors = (q_descale, k_descale, v_descale)
        wide = [widened(x.transpose(1, 2), factor) for x, factor in zip((q, k, v), factors, strict=True)]
        return real_attention(*wide, causal).bfloat16().transpose(1, 2).contiguous()

    monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace(flash_attn_func=forward))


class FakeTensor:
    """A tensor of cuDNN's graph; each of what is said of it can be said once."""

    def __init__(self, dim: list[int] | None = None, stride: list[int] | None = None, data_type: str = "") -> None:
        self.dim, self.stride, self.data_type, self.is_output = dim, stride, data_type, False

    def set_output(self, is_output: bool) -> FakeTensor:
        self.is_output = is_output
        return self

    def set_dim(self, dim: list[int]) -> FakeTensor:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> FakeTensor:
        self.stride = stride
        return self

    def set_data_type(self, data_type: str) -> FakeTensor:
        self.data_type = data_type
        return self


class FakeGraph:
    """cuDNN's graph: its arithmetic is flash_cute's CPU path on what its tensors' sizes and strides say."""

    def __init__(self, **types: Any) -> None:
        assert types["io_data_type"] == "e4m3"

    def tensor(self, **facts: Any) -> FakeTensor:
        return FakeTensor(**facts)

    def sdpa_fp8(self, *, generate_stats: bool, **arguments: Any) -> tuple[Any, ...]:
        assert not generate_stats
        self.arguments, self.results = arguments, [FakeTensor() for _ in range(3)]
        return self.results[0], None, *self.results[1:]

    def build(self, modes: list[str]) -> None:
        assert all(one.is_output and one.dim and one.stride for one in self.results)

    def get_workspace_size(self) -> int:
        return 0

    def execute(self, pack: dict[Any, torch.Tensor], workspace: torch.Tensor, handle: int) -> None:
        given = dict(self.arguments)
        is_causal = given.pop("right_bound", None) == 0 and given.pop("diagonal_alignment") == "top_left"
        scale = given.pop("attn_scale")
        values = {name: pack[tensor] for name, tensor in given.items()}
        for name, tensor in given.items():
            assert values[name].dtype == (E4M3 if name in ("q", "k", "v") else torch.float32)
            assert values[name].is_contiguous() and values[name].numel() == torch.Size(tensor.dim).numel()
        # S is multiplied by its factor before it is rounded, and by the other one afterwards
        assert values["scale_s"] * values["descale_s"] == 1 and values["scale_s"] <= 448
        q, k, v = (
            values[name].as_strided(given[name].dim, given[name].stride).float() * values[f"descale_{name}"]
            for name in ("q", "k", "v")
        )
        out = real_attention(q, k, v, is_causal, scale=scale) * values["scale_o"]
        place = self.results[0]
        pack[place].as_strided(place.dim, place.stride).copy_(out.to(E4M3))


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package nvidia-cudnn-frontend, as far as it is called."""
    fake = SimpleNamespace(
        pygraph=FakeGraph,
        data_type=SimpleNamespace(FP8_E4M3="e4m3", FLOAT="float"),
        heur_mode=SimpleNamespace(A="a", FALLBACK="fallback"),
        diagonal_alignment=SimpleNamespace(TOP_LEFT="top_left"),
        create_handle=lambda: 1,
        set_stream=lambda handle, stream: None,
        backend_version=lambda: 91900,
    )
    monkeypatch.setitem(sys.modules, "cudnn", fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))


def test_inputs_are_what_was_drawn(bench: SimpleNamespace) -> None:
    """Within e4m3's half step, with no value lost to its ends; and bfloat16 has the same values."""
    drawn = [7.3 * x for x in replace(small(bench), dtype="fp32").make_inputs(CPU, seed=3)]
    inputs = bench.float8.quantised(*drawn)
    assert [x.dtype for x in inputs] == [E4M3] * 3 + [torch.float32] * 3
    assert all(x.shape == (2, 2) and x.is_contiguous() for x in inputs[3:])
    for x, stored, factor in zip(drawn, inputs[:3], inputs[3:], strict=True):
        wide = widened(stored, factor)
        assert 224 <= stored.float().abs().max() <= 448
        assert ((wide - x).abs() <= x.abs() / 16 + factor[0, 0] / 1024).all()
    exactly, rounded = (bench.float8.dequantised(inputs, dtype) for dtype in (torch.float64, torch.bfloat16))
    assert all(torch.equal(x, y.double()) for x, y in zip(exactly, rounded, strict=True))
    problem = small(bench)
    assert problem.input_bytes == sum(x.nbytes for x in problem.make_inputs(CPU, seed=0)[:3])
    assert problem.tensor_bytes["out"] == 2 * problem.tensor_bytes["q"]


def test_zeros_have_a_factor(bench: SimpleNamespace) -> None:
    x = torch.zeros(1, 1, 4, 8)
    assert all(torch.equal(one, x) for one in bench.float8.dequantised(bench.float8.quantised(x, x, x), torch.float32))


@pytest.mark.parametrize("causal", ["none", "bottom_right"])
@pytest.mark.parametrize("name", ["flash_cute", "flash_cute:bf16", "fa3", "cudnn"])
@pytest.mark.usefixtures("float8_attention", "flash_attn_3", "cudnn")
def test_every_provider_computes_the_same(bench: SimpleNamespace, name: str, causal: str) -> None:
    """From the same inputs with other factors for q, k and v each, which none may mistake for another's."""
    workload = small(bench, causal=causal)
    drawn = replace(workload, dtype="fp32").make_inputs(CPU, seed=0)
    inputs = bench.float8.quantised(*(x * y for x, y in zip(drawn, (1.0, 0.2, 0.7), strict=True)))
    assert len({float(x[0, 0]) for x in inputs[3:]}) == 3
    expected, _ = flash_cute.reference.attention(*bench.float8.dequantised(inputs, torch.float64), causal)
    backend = bench.backends.prepare(name, workload, CPU)
    (out,) = bench.backends.first_call(backend, workload, inputs)
    # bfloat16's and e4m3's roundings of out; a fake's arithmetic is exact
    limit = 0.04 if name == "cudnn" else 0.005
    assert out.shape == expected.shape and (out.double() - expected).norm() < limit * expected.norm()


def test_who_has_no_float8_says_so(bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cudnn", None)
    for name, words in {
        "sdpa": "SDPA takes no float8",
        "flash-attn": "FlashAttention-2 takes no float8",
        "cudnn": "import cudnn",
        "flash_cute:plain": "no softcap, sink or ALiBi",
    }.items():
        with pytest.raises(bench.backends.Unavailable, match=words):
            bench.backends.prepare(name, small(bench), CPU)
    with pytest.raises(bench.backends.Unavailable, match="only a float8 problem"):
        bench.backends.prepare("flash_cute:bf16", small(bench, dtype="bf16"), CPU)
    with pytest.raises(bench.backends.Unavailable, match="a forward alone"):
        bench.backends.prepare("flash_cute", small(bench, direction="bwd"), CPU)


@pytest.mark.parametrize("direction", ["bwd", "train"])
def test_a_backward_is_refused_by_its_flag(
    bench: SimpleNamespace, direction: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench.run.parse(["--device", "cpu", "--grid", "fp8", "--direction", direction])
    assert f"--direction: float8 has a forward alone, given {direction}" in capsys.readouterr().err


def test_the_grid(bench: SimpleNamespace) -> None:
    cells = bench.workloads.GRIDS["fp8"]()
    assert {(one.D, one.N, one.causal) for one in cells} == {
        (d, n, causal) for d in (64, 128, 256) for n in (4096, 16384) for causal in ("none", "bottom_right")
    }
    assert {(one.rows, one.H * one.D, one.dtype, one.direction) for one in cells} == {(16384, 2048, "e4m3", "fwd")}
    for one in cells:
        assert one.flops == replace(one, dtype="bf16").flops


@pytest.mark.usefixtures("float8_attention", "flash_attn_3", "cudnn")
def test_speeds_stand_beside_bfloat16(bench: SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / "fp8.csv"
    case = ("--B", "1", "--H", "4", "--Hkv", "2", "--N", "130", "--D", "64", "--causal", "--dtype", "e4m3")
    names = ("--ours", "flash_cute,flash_cute:bf16", "--peers", "fa3,cudnn,math")
    options = ("--device", "cpu", "--seconds", "0.01", "--rounds", "5", "--out", str(path))
    printed = bench_commands.run("run", *case, *names, *options)
    assert "math, 1 cell: SDPA takes no float8" in printed
    with path.open(newline="") as file:
        rows = {row["provider"]: row for row in csv.DictReader(file)}
    ours = rows["flash_cute"]
    assert {row["dtype"] for row in rows.values()} == {"e4m3"}
    assert float(ours["tflops"]) == pytest.approx(
        4 * 4 * 130 * 130 * 64 / 2 / float(ours["median_us"]) * 1e-6, rel=0.01, abs=0.01
    )
    assert all(float(ours[f"ratio_{name}"]) > 0 for name in ("flash_cute:bf16", "fa3", "cudnn"))
    assert not rows["flash_cute:bf16"]["ratio_fa3"]
    assert 0.005 < float(rows["cudnn"]["difference"].split()[0]) < 0.04
    (table,) = bench.figures.read(path).tables
    assert [column.title for column in bench.readme.ratio_columns(table)][1:] == ["float8 / bfloat16"]
    (line,) = bench.summary.to_baseline(table, "flash_cute", "flash_cute:bf16")
    assert line.bar == 1.0  # of head dim 64
    wide = bench.figures.Figure({**ours, "D": "128"})
    assert bench.summary.bar_of_baseline(wide, "flash_cute:bf16") == 1.25
    assert bench.summary.bar_of_options(wide) == 1.02 and bench.summary.bar_of_options(line.figure) == 1.0


def test_two_right_answers_in_float8_may_differ_more(bench: SimpleNamespace) -> None:
    for difference, is_wrong in ((0.01, (False, False)), (0.05, (True, False)), (0.1, (True, True))):
        for dtype, expected in zip(("bf16", "e4m3"), is_wrong, strict=True):
            cell = bench.timing.Cell(small(bench, dtype=dtype), "wall", "grad", 2, differences={"fa3": difference})
            assert bool(cell.wrong) == expected
    assert bench.timing.Cell(small(bench), "wall", "grad", 2, differences={"fa3": float("nan")}).wrong


def test_a_plan_that_cannot_be_named_stops_nothing(bench: SimpleNamespace) -> None:
    inputs = small(bench, dtype="bf16").make_inputs(CPU, seed=0)
    plan = bench.backends.ours.plan("flash_cute:sm90", small(bench, dtype="bf16"), inputs)
    assert plan.startswith("no plan: flash_cute: backend: expected")


@pytest.fixture
def errors_csv(
    float8_attention: None, flash_attn_3: None, cudnn: None, tmp_path: Path
) -> tuple[str, Path, list[dict[str, str]]]:
    """What was printed of the errors of small problems on the CPU, their CSV and its rows."""
    path = tmp_path / "fp8-errors.csv"
    options = ("--device", "cpu", "--head-dims", "32", "--N", "128,512", "--peers", "fa3,cudnn,triton")
    options += ("--quantise", "head+rotate")
    printed = bench_commands.run("run", "--fp8-errors", *options, "--out", str(path))
    with path.open(newline="") as file:
        return printed, path, list(csv.DictReader(file))


def test_errors_are_those_of_quantising_and_of_the_arithmetic(
    errors_csv: tuple[str, Path, list[dict[str, str]]],
) -> None:
    printed, path, rows = errors_csv
    assert "not measured: triton: no copy" in printed
    measured = [row for row in rows if row["error"]]
    providers = ("exact", "flash_cute", "flash_cute:bf16", "fa3", "cudnn", "flash_cute:head+rotate")
    assert len(measured) == len(providers) * 2 * 2 * 4
    of = {(row["N"], row["causal"], row["inputs"], row["provider"]): row for row in measured}
    for (*case, provider), row in of.items():
        error, least = float(row["error"]), float(of[(*case, "exact")]["error"])
        assert float(row["over_exact"]) == pytest.approx(error / least, rel=0.01)
        # the fakes compute in float32 and round out alone: to bfloat16's eight bits, cuDNN's to four
        bounds = (0.01, 0.04) if provider == "cudnn" else (0.0005, 0.006)
        assert bounds[0] < float(row["arithmetic"]) < bounds[1]
        if provider in ("flash_cute", "fa3"):
            assert float(row["over_exact"]) == pytest.approx(1, abs=0.02)
        # rounding q, k and v to four bits: of values whose mean is 1 it averages out, of high scores it does not
        low, high = {
            "randn": (0.03, 0.08),
            "mean 1": (0.002, 0.02),
            "scores 8 to 16": (0.1, 0.9),
            "outliers": (0.03, 0.3),
        }[case[2]]
        if provider == "exact":
            assert low < error < high, row
    printed = bench_commands.run("summary", str(path))
    assert "| 32 | causal | 512 | mean 1 |" in printed and "(1.00)" in printed
    assert "a table, not a plot" in bench_commands.run("plot", str(path))


def test_a_rotation_spreads_outliers(bench: SimpleNamespace) -> None:
    """By each quantiser, and what it makes stands for what was drawn: the arithmetic's error is out's rounding."""
    workload = bench.workloads.case(1, 4, 512, 128, False, dtype="e4m3")
    case = bench.fp8_errors.Case(workload, "outliers")
    q, _, _ = case.draw(CPU, seed=0)
    assert 150 < (q.abs() > 5).sum() < 450  # of 262,144 values one of a thousand is ten times as large
    quantisers = list(bench.fp8_errors.QUANTISERS)
    measured = bench.fp8_errors.measure(case, [], CPU, 0, quantisers)
    error = {how: measured[f"flash_cute:{how}"][0] for how in quantisers}
    for plain in ("head", "block"):
        assert error[f"{plain}+rotate"] < 0.75 * error[plain]
        assert error[f"{plain}+rotate"] < 0.08
    assert all(measured[f"flash_cute:{how}"][1] < 0.003 for how in quantisers)


def test_errors_on_a_trained_model(bench: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.trained, "CPU_STEPS", 3)
    monkeypatch.setattr(bench.trained, "CPU_CONTEXT", 64)
    path = tmp_path / "trained.csv"
    options = ("--device", "cpu", "--head-dims", "32", "--N", "64", "--peers", "none", "--ours", "flash_cute")
    bench_commands.run("run", "--fp8-errors", *options, "--trained", "--quantise", "block+rotate", "--out", str(path))
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["inputs"].startswith("trained")]
    assert [(row["inputs"], row["provider"]) for row in rows] == [
        (f"trained, layer {layer}", provider)
        for layer in (1, 2)
        for provider in ("exact", "flash_cute", "flash_cute:block+rotate")
    ]
    for row in rows:
        assert (row["H"], row["N"], row["D"], row["causal"]) == ("2", "64", "32", "bottom_right")
        assert 0.005 < float(row["error"]) < 0.1  # the text that the model is trained on has the pages of docs
    (q, k, v), _ = bench.trained.layers(32, CPU)
    assert q.shape == (1, 2, 64, 32) and k.shape == v.shape == (1, 1, 64, 32) and q.dtype == torch.float32


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [4, 100, 513])
def test_compared_rows_are_those_of_the_whole(bench: SimpleNamespace, length: int, causal: bool) -> None:
    workload = bench.workloads.case(1, 2, length, 16, causal, dtype="fp64")
    inputs = workload.make_inputs(CPU, seed=0)
    whole, _ = flash_cute.reference.attention(*inputs, causal)
    rows = bench.fp8_errors.compared_rows(whole)
    assert rows.shape[2] == 4 * min(64, length // 4)
    torch.testing.assert_close(bench.fp8_errors.exact(workload, *inputs), rows)


def test_high_scores_have_their_deviation(bench: SimpleNamespace) -> None:
    (case,) = (
        one
        for one in bench.fp8_errors.cases([64], [1024], 5)
        if one.inputs == "scores 8 to 16" and not one.workload.is_causal
    )
    q, k, _ = case.draw(CPU, seed=0)
    deviations = (q @ k.mT / 8).std(dim=(0, 2, 3))
    torch.testing.assert_close(deviations, torch.linspace(8, 16, 5), rtol=0.05, atol=0)
