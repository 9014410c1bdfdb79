"""The benchmark measures what it says: speed, and errors against float64."""

from __future__ import annotations

import csv
import importlib
import itertools
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_commands
import pytest
import torch
from repository import ROOT

from flash_cute._timing import turn_order

SHAPE = ("--B", "1", "--H", "4", "--Hkv", "2", "--N", "65", "--D", "32", "--causal", "--dtype", "fp32")
FLOPS = {"fwd": 1.0, "bwd": 2.5, "train": 3.5}  # of 4*B*H*N*N*D / 2


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def small_case(direction: str, path: Path) -> list[str]:
    """Arguments of bench/run.py: a small case on the CPU, whose CSV is `path`."""
    names = ("--ours", "flash_cute,flash_cute:deterministic", "--peers", "math,fa3,triton")
    options = ("--device", "cpu", "--seconds", "0.05", "--rounds", "5", "--commit", "abc", "--out", str(path))
    return ["--direction", direction, *SHAPE, *names, *options]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What was printed of a backward, and its CSV: as a command, in a process of its own."""
    path = tmp_path_factory.mktemp("bench") / "case.csv"
    command = [sys.executable, "bench/run.py", *small_case("bwd", path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, path


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """bench's modules. The folder comes last on the path: it must not hide the installed package."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT)])
    names = (
        "accuracy",
        "all",
        "backends",
        "case_flags",
        "choices",
        "figures",
        "fp8_errors",
        "masks",
        "models",
        "providers.ours",
        "providers.pytorch",
        "run",
        "timing",
    )
    names += ("workloads",)
    return SimpleNamespace(**{name.split(".")[-1]: importlib.import_module(f"bench.{name}") for name in names})


@pytest.mark.parametrize("direction", FLOPS)
def test_csv_says_what_was_measured(bench: SimpleNamespace, direction: str, tmp_path: Path) -> None:
    assert bench.run.main(small_case(direction, tmp_path / "case.csv")) == 0
    rows = {row["provider"]: row for row in rows_of(tmp_path / "case.csv")}
    ours, peer = rows["flash_cute"], rows["math"]
    flops = 4 * 4 * 65 * 65 * 32 / 2 * FLOPS[direction]
    for row in (ours, peer):
        assert float(row["tflops"]) == pytest.approx(flops / float(row["median_us"]) * 1e-6, rel=0.01, abs=0.01)
        assert (row["rounds"], row["commit"], row["clock"], row["causal"]) == ("5", "abc", "wall", "bottom_right")
        assert row["direction"] == direction
    assert float(ours["ratio_math"]) > 0 and float(ours["ratio_math_spread"]) >= 0
    assert float(ours["difference"].split()[0]) < 1e-5
    assert float(rows["flash_cute:deterministic"]["ratio_flash_cute"]) > 0


def test_missing_peer_is_named(measured: tuple[str, Path]) -> None:
    printed, path = measured
    assert "absent: triton: no copy of Triton's fused-attention tutorial given" in printed
    missing = {row["provider"]: row["missing"] for row in rows_of(path) if row["missing"]}
    assert "triton" in missing


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said(bench: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    for main, arguments in (
        (bench.run.main, ["--grid", "paper"]),
        (bench.run.main, ["--accuracy"]),
        (bench.run.main, ["--choices"]),
        (bench.all.main, ["--out", "x"]),
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2 and "there is no CUDA GPU here" in capsys.readouterr().err


def test_sdpa_on_the_cpu_is_not_named_after_a_cuda_kernel(bench: SimpleNamespace) -> None:
    workload, device = bench.workloads.cpu_grid()[0], torch.device("cpu")
    assert bench.backends.prepare("sdpa", workload, device).name == "sdpa"
    with pytest.raises(bench.backends.Unavailable, match="measured as sdpa"):
        bench.backends.prepare("flash", workload, device)


def test_wrong_provider_is_not_timed(bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench.ours.backward

    def wrong(name: str, *problem: Any) -> Any:
        backend = right(name, *problem)
        return replace(backend, call=lambda *arguments: tuple(1.1 * x for x in backend.call(*arguments)))

    workload = bench.workloads.Workload(1, 2, 1, 33, 33, 16, "none", "fp32", "bwd")
    monkeypatch.setattr(bench.ours, "backward", wrong)
    names, device = ["flash_cute", "math"], torch.device("cpu")
    (cell,) = bench.timing.time_cell(workload, names, device, clocks=["wall"], rounds=5, seconds=0.01)
    assert cell.wrong == ["flash_cute"] and list(cell.timings) == ["math"]
    assert cell.missing["flash_cute"].startswith("wrong: differs by 1.0")


@pytest.mark.parametrize("name", ["cudnn", "flash", "efficient"])
def test_backward_of_sdpa_is_called_with_what_its_forward_saved(bench: SimpleNamespace, name: str) -> None:
    """On meta tensors, since only a GPU computes it: argument for argument what the operator takes."""
    heads = 8 if name == "efficient" else 2
    workload = bench.workloads.case(1, 8, 64, 128, True, Hkv=heads)
    backend = bench.pytorch.sdpa_backward(name, workload)
    q, kv = torch.empty(1, 8, 64, 128, device="meta", dtype=torch.half), (1, heads, 64, 128)
    k, v = q.new_empty(kv), q.new_empty(kv)
    dq, dk, dv = backend.call(*backend.arrange((q, k, v, torch.empty_like(q))))[:3]
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What was printed of the errors of small cases on the CPU, and their CSV."""
    path = tmp_path_factory.mktemp("bench") / "accuracy.csv"
    options = ("--device", "cpu", "--N", "96", "--H", "2", "--head-dims", "32", "--peers", "sdpa,math,fa3")
    return bench_commands.run("run", "--accuracy", *options, "--out", str(path)), path


def test_errors_are_measured_against_float64(errors: tuple[str, Path]) -> None:
    rows = [row for row in rows_of(errors[1]) if row["rms_out"]]
    assert Counter(row["provider"] for row in rows) == {"flash_cute": 20, "sdpa": 20, "math": 20}
    assert len({(row["dtype"], row["causal"], row["inputs"]) for row in rows}) == 20
    by_case = {(row["dtype"], row["causal"], row["inputs"], row["provider"]): row for row in rows}
    for (*case, provider), row in by_case.items():
        if provider != "flash_cute":
            continue
        for result in ("out", "dq", "dk", "dv"):
            peers = {name: float(by_case[(*case, name)][f"rms_{result}"]) for name in ("sdpa", "math")}
            best = row[f"best_{result}"]
            assert peers[best] == min(peers.values())
            ratio = float(row[f"rms_{result}"]) / peers[best]
            assert float(row[f"ratio_{result}"]) == pytest.approx(ratio, abs=2e-3, rel=2e-3)
            # roundings to 16 bits, of results whose size is about 1
            assert 1e-6 < float(row[f"rms_{result}"]) < 0.1


def test_errors_are_drawn_and_summarised(errors: tuple[str, Path]) -> None:
    assert "flash_cute         dq" in bench_commands.run("summary", str(errors[1]))
    pytest.importorskip("matplotlib")
    bench_commands.run("plot", str(errors[1]))
    assert errors[1].with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_rising_scores_rise(bench: SimpleNamespace) -> None:
    """By 20 from the first key to the last, and from each tile of 128 keys to the next."""
    case = next(one for one in bench.accuracy.cases([64], ["fp32"], 1024, 2) if one.inputs == "rising scores")
    q, k, _, _ = case.make_inputs(torch.device("cpu"), seed=0)
    scores = (q @ k.mT / 8).mean((0, 1, 2)).view(8, 128).mean(-1)
    assert scores.diff().min() > 1 and scores[-1] - scores[0] == pytest.approx(20 * 7 / 8, abs=1)


@pytest.mark.parametrize("count", range(1, 8))
def test_nobody_always_follows_the_same(count: int) -> None:
    rounds = [turn_order(turn, count) for turn in range(count * (1 + count % 2))]
    assert all(sorted(one) == list(range(count)) for one in rounds)
    follows = Counter(pair for one in rounds for pair in itertools.pairwise(one))
    places = Counter(pair for one in rounds for pair in enumerate(one))
    assert len(follows) == count * (count - 1) and len(set(follows.values())) <= 1
    assert len(places) == count**2 and len(set(places.values())) == 1


# As FlashAttention-3 declares it.
FLASH_ATTN_3_BACKWARD = """bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse,
Tensor(dq!)? dq=None, Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None,
Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None,
float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, float softcap=0.0,
bool deterministic=False, int sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"""


@pytest.fixture
def flash_attn_3(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlashAttention-3's interface over flash_cute's CPU path: (B, N, H, D), gradients written where they are given."""
    import flash_cute

    def mask(causal: bool, window: tuple[int, int]) -> dict[str, Any]:
        return {"causal": causal, "window": tuple(None if side < 0 else side for side in window)}

    def forward(q: Any, k: Any, v: Any, causal: bool = False, return_attn_probs: bool = False, **options: Any) -> Any:
        chosen = mask(causal, options.pop("window_size", (-1, -1)))
        assert q.is_contiguous() and options == {"deterministic": False}
        out, lse = flash_cute.fwd(*(x.transpose(1, 2) for x in (q, k, v)), **chosen)
        out = out.transpose(1, 2).contiguous()
        return (out, lse) if return_attn_probs else out

    def packed(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, *longest: int, **options: Any) -> Any:
        chosen = mask(options.pop("causal"), options.pop("window_size", (-1, -1)))
        both = options.pop("return_attn_probs", False)
        assert options == {"deterministic": False, "max_seqlen_q": 33, "max_seqlen_k": 33}
        out, lse = flash_cute.varlen_fwd(q, k, v, cu_seqlens_q, cu_seqlens_k, **chosen)
        return (out, lse) if both else out

    def backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dq: Any, dk: Any, dv: Any, *rest: Any) -> Any:
        offsets, chosen = rest[:2], mask(rest[7], (*rest[8:10], -1, -1)[:2])  # trailing defaults are not passed
        if offsets[0] is None:
            inputs = (x.transpose(1, 2) for x in (dout, q, k, v, out))
            gradients = (x.transpose(1, 2) for x in flash_cute.bwd(*inputs, lse, **chosen))
        else:
            gradients = flash_cute.varlen_bwd(dout, q, k, v, out, lse, *offsets, **chosen)
        for given, gradient in zip((dq, dk, dv), gradients, strict=True):
            given.copy_(gradient)
        return (lse,) * 5

    interface = SimpleNamespace(flash_attn_func=forward, flash_attn_varlen_func=packed)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", interface)
    library = torch.library.Library("flash_attn_3", "DEF")
    library.define(FLASH_ATTN_3_BACKWARD)
    library.impl("bwd", backward, "CPU")
    yield
    library._destroy()


@pytest.mark.parametrize(
    "option", [{"Dv": 16}, {"window": (9, 0)}, {"lengths": "9+2x33"}], ids=["Dv", "window", "packed"]
)
@pytest.mark.parametrize("direction", FLOPS)
@pytest.mark.usefixtures("flash_attn_3")
def test_flash_attention_3_has_windows_packed_batches_and_a_head_dim_of_vs_own(
    bench: SimpleNamespace, direction: str, option: dict[str, Any]
) -> None:
    lengths = {"B": 3, "N": 33, "M": 33} if "lengths" in option else {}
    plain = bench.workloads.Workload(2, 4, 2, 65, 65, 32, "bottom_right", "fp32", direction)
    workload = replace(plain, **option, **lengths)
    device = torch.device("cpu")
    inputs = workload.make_inputs(device, seed=0)
    results = []
    for name in ("fa3", "flash_cute"):
        backend = bench.backends.prepare(name, workload, device)
        results.append(bench.backends.first_call(backend, workload, inputs))
    for peer, ours in zip(*results, strict=True):
        torch.testing.assert_close(peer, ours)


@pytest.mark.parametrize("direction", FLOPS)
@pytest.mark.usefixtures("flash_attn_3")
def test_flash_attention_3_is_called_as_it_wants(bench: SimpleNamespace, direction: str) -> None:
    workload = bench.workloads.Workload(2, 4, 2, 65, 65, 32, "bottom_right", "fp32", direction)
    device = torch.device("cpu")
    inputs = workload.make_inputs(device, seed=0)
    results = []
    for name in ("fa3", "math"):
        backend = bench.backends.prepare(name, workload, device)
        results.append(bench.backends.first_call(backend, workload, inputs))
    for ours, peer in zip(*results, strict=True):
        torch.testing.assert_close(ours, peer)


def test_every_published_figure_has_a_run_that_can_start(
    bench: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What bench/all.py asks of bench/run.py, as that reads it on a machine with a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    flags = bench.all.parse(["--out", "folder", "--commit", "abc"])
    for name in flags.only:
        arguments = bench.all.arguments_of(name, flags, Path("x.csv"))
        if name in bench.all.UNTIMED:
            parse = getattr(bench, name.replace("-", "_")).parse
            assert parse([one for one in arguments if one != f"--{name}"]).commit == "abc"
        else:
            asked = bench.run.parse(arguments)
            assert asked.out == "x.csv" and asked.seconds == pytest.approx(1.4 if name == "large" else 0.1)


def test_modes_are_compared_with_their_own(bench: SimpleNamespace) -> None:
    names = ("flash_cute", "flash_cute:deterministic", "cudnn", "fa3:deterministic")
    assert bench.backends.pairs(names) == [
        ("flash_cute", "cudnn"),
        ("flash_cute:deterministic", "flash_cute"),
        ("flash_cute:deterministic", "cudnn"),
        ("flash_cute:deterministic", "fa3:deterministic"),
    ]
