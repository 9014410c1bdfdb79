"""The tuner, and the tables that it writes: the plan follows them where they fit, and says so."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CUDA_DTYPES, Case, score
from numerics import assert_gradients_match, assert_matches

import flash_cute
from flash_cute._timing import Timing
from flash_cute.report import built_architectures
from flash_cute.tune import __main__ as command
from flash_cute.tune import _table
from flash_cute.tune._measure import Call, Measured, candidates, choices_by_name, choose, finalists, tune_call
from flash_cute.tune._table import Tuning

needs_both = pytest.mark.skipif(
    built_architectures() != {"sm80", "sm90"}, reason="this build has not the kernels of both architectures"
)
H200 = ("NVIDIA H200", 90)
EVERYTHING = 1 << 30


@pytest.fixture(autouse=True)
def unload() -> Iterator[None]:
    """Whatever a test loads is gone after it."""
    yield
    flash_cute.use_tuning(None)


def call_of(
    length: int = 4096,
    head_dim: int = 128,
    *,
    causal: str = "none",
    packed: int = 0,
    longest: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    heads_kv: int = 4,
    **options: Any,
) -> Call:
    """A call of tensors without memory, for plans alone; `packed`: so many sequences, and `longest` the hint."""

    def empty(heads: int) -> torch.Tensor:
        shape = (length, heads, head_dim) if packed else (2, heads, length, head_dim)
        return torch.empty(shape, dtype=dtype, device="meta")

    lengths: tuple[Any, ...] = ()
    if packed:
        offsets = torch.empty(packed + 1, dtype=torch.int32, device="meta")
        lengths = (offsets, offsets, None, None, longest, longest)
    return Call((empty(8), empty(heads_kv), empty(heads_kv)), lengths, score(causal, **options), False)


def entry_of(call: Call, choice: str, backward: bool = False) -> Measured:
    key = call.plan(backward, capability=90)["tuning_key"]
    return Measured(key, choice, choice, {choice: 1e-3}, 1.0, {})


def load(path: Path, *calls: Measured, gpu: tuple[str, int] = H200) -> None:
    """As FLASH_CUTE_TUNING loads a file, which needs no GPU."""
    Tuning(*gpu, calls).save(path)
    _table._load(path, _table._read(path))


def planned(call: Call, backward: bool = False, capability: int = 90, backend: str = "auto") -> dict[str, Any]:
    """What a call would run that nobody tunes."""
    arguments = (*call.tensors, *call.lengths, *call.options, backend)
    name = f"{'varlen_' if call.lengths else ''}{'bwd' if backward else 'fwd'}_plan"
    options = (call.deterministic, capability) if backward else (capability,)
    return json.loads(getattr(torch.ops.flash_cute, name)(*arguments, *options))


@needs_both
@pytest.mark.parametrize("packed", [0, 5])
@pytest.mark.parametrize("causal", ["none", "bottom_right"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_plan_obeys_each_entry(head_dim: int, causal: str, packed: int, tmp_path: Path) -> None:
    call = call_of(4097, head_dim, causal=causal, packed=packed)
    for backward in (False, True):
        names = candidates(call, backward, 90, EVERYTHING)
        names.pop("plan")
        assert {name.partition(":")[0] for name in names} >= {"sm90"}
        for number, name in enumerate(names):
            load(tmp_path / f"{backward}{number}", entry_of(call, name, backward))
            given = planned(call, backward)
            assert given["tuned"]
            expected = call.plan(backward, name, 90)
            same = ("backend", "block_m", "block_n", "threads", "smem_bytes", "split_tiles", "workspace_bytes")
            assert {x: given[x] for x in same} == {x: expected[x] for x in same}, name
            assert any("the tuning of NVIDIA H200, where this call" in sentence for sentence in given["reasons"])


@needs_both
def test_candidates_differ_and_name_the_plans_own() -> None:
    for head_dim in (32, 64, 96, 128, 192, 256):
        for causal in ("none", "bottom_right"):
            for backward in (False, True):
                call = call_of(4097, head_dim, causal=causal)
                names = candidates(call, backward, 90, EVERYTHING)
                own = names.pop("plan")
                assert own in names and len(names) >= 2
                kernels = [call.plan(backward, name, 90) for name in names]
                assert call.plan(backward, own, 90) | {"reasons": 0} in [
                    call.plan(backward, capability=90) | {"reasons": 0, "entry": x["entry"]} for x in kernels
                ]
    assert not any("a100" in name for name in candidates(call_of(64, 256), False, 86, 99 << 10).values())


@needs_both
def test_an_entry_is_of_its_exact_call(tmp_path: Path) -> None:
    call = call_of(causal="bottom_right")
    load(tmp_path / "t", entry_of(call, "sm90:rows64:whole"))
    assert planned(call)["block_m"] == 64
    others = {
        "length": call_of(4095, causal="bottom_right"),
        "head dim": call_of(head_dim=120, causal="bottom_right"),
        "mask": call_of(),
        "window": call_of(causal="bottom_right", window=(100, 0)),
        "dtype": call_of(causal="bottom_right", dtype=torch.float16),
        "heads": call_of(causal="bottom_right", heads_kv=8),
        "softcap": call_of(causal="bottom_right", softcap=3.0),
    }
    for what, other in others.items():
        given = planned(other)
        assert not given["tuned"], what
        assert any("has no entry for this call" in sentence for sentence in given["reasons"])
    assert not planned(call, backward=True)["tuned"]
    assert not planned(call, backend="sm80")["tuned"]  # the caller insists
    assert planned(call, backend="sm90")["tuned"]
    assert any("is not of this GPU" in sentence for sentence in planned(call, capability=80)["reasons"])


@needs_both
def test_packed_entries_are_of_sizes_rounded_up(tmp_path: Path) -> None:
    load(tmp_path / "t", entry_of(call_of(4000, packed=7), "sm80:h100"))
    assert planned(call_of(2049, packed=5))["backend"] == "sm80"
    assert planned(call_of(2048, packed=5))["backend"] == "sm90"
    assert planned(call_of(4096, packed=9))["backend"] == "sm90"
    assert planned(call_of(4096, packed=5, causal="bottom_right"))["backend"] == "sm90"
    assert planned(call_of(4096, packed=8, longest=512))["backend"] == "sm90"  # equally long, which has other tiles
    assert planned(call_of(4096, packed=8, longest=513))["backend"] == "sm80"


@needs_both
def test_unloading(tmp_path: Path) -> None:
    call = call_of()
    before = planned(call)
    load(tmp_path / "t", entry_of(call, "sm90:rows64:split"))
    assert planned(call) != before
    flash_cute.use_tuning(None)
    assert planned(call) == before


@needs_both
def test_a_missing_kernel_leaves_the_choice_to_the_plan(tmp_path: Path) -> None:
    """sm90 has none above head dim 256 in any build; a hand-made entry may say otherwise."""
    call = call_of(head_dim=64)
    key = entry_of(call, "sm90").key | {"head_dim": 2000, "head_dim_v": 2000}
    load(tmp_path / "t", replace(entry_of(call, "sm90"), key=key), entry_of(call, "sm80:99kb"))
    assert planned(call)["backend"] == "sm80"


def measured(name: str = "sm90:rows192:whole", length: int = 64) -> Measured:
    key = {"backward": 0, "bfloat16": 1, "packed": 0, "equal_lengths": 0, "deterministic": 0}
    key |= {"softcap": 0, "alibi": 0, "batch": 1, "heads_q": 2, "heads_kv": 1, "len_q": length, "len_k": length}
    key |= {"head_dim": 64, "head_dim_v": 64, "band_lower": -(1 << 30), "band_upper": 0, "num_sms": 132}
    return Measured(key, name, name, {name: 2e-6}, 1.0, {})


def test_a_file_is_added_to(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    Tuning(*H200, (measured(), measured(length=128))).save(path)
    Tuning(*H200, (measured("sm80:h100"),)).save(path)
    given = json.loads(path.read_text())
    assert [(entry["call"]["len_q"], entry["choice"]) for entry in given["entries"]] == [
        (64, "sm80:h100"),
        (128, "sm90:rows192:whole"),
    ]
    assert given["gpu"] == "NVIDIA H200" and given["flash_cute"] == flash_cute.__version__
    with pytest.raises(ValueError, match="expected a tuning of NVIDIA A100 to add to, got NVIDIA H200's"):
        Tuning("NVIDIA A100", 80, ()).save(path)


def test_files_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json"

    def refused(content: Any) -> str:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(ValueError) as error:
            _table._load(path, _table._read(path))
        return str(error.value)

    Tuning(*H200, (measured(),)).save(path)
    good = json.loads(path.read_text())
    entry = good["entries"][0]
    assert "got no JSON" in refused("{")
    assert "got other JSON" in refused([])
    assert "got other JSON" in refused({**good, "gpu": 3})
    version = refused({**good, "flash_cute": "0.0.1"})
    assert f"expected a tuning by flash_cute {flash_cute.__version__}, got one by 0.0.1" in version
    assert "expected entries of a call and a choice" in refused({**good, "entries": [{"call": {}}]})
    less = {name: value for name, value in entry["call"].items() if name != "len_q"}
    assert "expected every call to have len_q" in refused({**good, "entries": [{**entry, "call": less}]})
    more = {**entry["call"], "colour": 3}
    assert "expected the fields of a call, got 'colour'" in refused({**good, "entries": [{**entry, "call": more}]})
    large = {**entry["call"], "len_q": 1 << 40}
    assert "len_q: expected a 32-bit number" in refused({**good, "entries": [{**entry, "call": large}]})
    assert "got 'sm90:huge'" in refused({**good, "entries": [{**entry, "choice": "sm90:huge"}]})
    assert "expected a choice of sm80 or sm90" in refused({**good, "entries": [{**entry, "choice": "cpu"}]})
    with pytest.raises(ValueError, match=r"expected a file of Tuning.save, got No such file"):
        flash_cute.use_tuning(tmp_path / "none")


def test_another_gpus_file_is_refused(tmp_path: Path) -> None:
    Tuning("NVIDIA Nonesuch", 90, (measured(),)).save(tmp_path / "t.json")
    with pytest.raises(ValueError, match=r"expected a tuning of a GPU of this process \(.*\), got NVIDIA Nonesuch's"):
        flash_cute.use_tuning(tmp_path / "t.json")


def test_the_environments_file(tmp_path: Path, python: Any) -> None:
    """It is loaded by the import, which leaves the GPU alone; and only the tuner may name choices."""
    path = tmp_path / "t.json"
    Tuning(*H200, (measured(),)).save(path)
    script = """
import os
os.environ.pop("FLASH_CUTE_TEST_TILES", None)
import torch, flash_cute
from flash_cute.tune._measure import choices_by_name
q = torch.empty(1, 1, 64, 64, dtype=torch.float16)
def ask():
    try:
        torch.ops.flash_cute.check_fwd(q, q, q, "none", None, None, None, None, None, None, "sm80:h100")
    except (ValueError, RuntimeError) as error:  # the latter since torch 2.15
        return str(error)
print(torch.cuda.is_initialized())
print(ask())
with choices_by_name():
    print(ask())
print(ask())
"""
    initialized, refused, allowed, again = python(script, FLASH_CUTE_TUNING=str(path)).strip().splitlines()
    assert initialized == "False"
    assert refused == again == "flash_cute: backend: expected 'auto', 'cpu', 'sm80' or 'sm90', got 'sm80:h100'"
    assert allowed == "flash_cute: backend: expected 'auto' or 'cpu' for CPU tensors, got 'sm80:h100'"


def test_the_environments_file_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json"
    Tuning(*H200, (measured(),)).save(path)
    monkeypatch.setenv("FLASH_CUTE_TUNING", str(path))
    _table.load_from_environment()
    path.write_text(path.read_text().replace(flash_cute.__version__, "0.0.1"))
    with pytest.raises(ValueError, match="expected a tuning by flash_cute"):
        _table.load_from_environment()


def timing(*rounds: float) -> Timing:
    return Timing(rounds, 10)


def test_only_a_clear_gain_replaces_the_plans_choice() -> None:
    timings = {"a": timing(1.0, 1.01, 1.02), "b": timing(0.9, 0.92, 0.91), "c": timing(2.0, 2.0, 2.0)}
    assert finalists(timings, "a") == ["a", "b"]
    best, gain = choose(timings, "a", ["a", "b"])
    assert best == "b" and gain == pytest.approx(statistics.median([1 / 0.9, 1.01 / 0.92, 1.02 / 0.91]))
    assert choose(timings, "b", ["b"]) == ("b", 1.0)
    close = {"a": timing(1.0, 1.1, 1.05), "b": timing(1.02, 1.0, 1.04)}
    assert choose(close, "a", ["a", "b"]) == ("a", 1.0)  # within the spread of the rounds
    with pytest.raises(RuntimeError, match="the plan's own choice, d, could not be timed"):
        finalists(timings, "d")


def test_the_table_of_a_tuning() -> None:
    text = str(Tuning(*H200, (measured(),)))
    assert (
        "forward bfloat16, batch 1, 2/1 heads, 64 x 64, head dim 64, causal: the plan chooses sm90:rows192:whole"
        in text
    )
    assert "2.00 us  best, plan" in text


def test_shapes_of_the_command() -> None:
    shape = command.parse_shape("B=2,H=8,Hkv=2,N=64,M=100,D=64,Dv=32,causal,window=31:,softcap=20,sinks,alibi")
    tensors, options = command.inputs(shape, torch.bfloat16, "cpu")
    assert [tuple(x.shape) for x in tensors] == [(2, 8, 64, 64), (2, 2, 100, 64), (2, 2, 100, 32)]
    assert options["causal"] is True and options["window"] == (31, None) and options["softcap"] == 20
    assert options["sinks"].shape == options["alibi_slopes"].shape == (8,)
    tensors, options = command.inputs(command.parse_shape("H=8,D=64,lengths=3:0:5"), torch.float16, "cpu")
    assert [tuple(x.shape) for x in tensors] == [(8, 8, 64)] * 3
    assert options["cu_seqlens_q"].tolist() == [0, 3, 3, 8] and options["max_seqlen_k"] == 5
    for bad in ("H=8,N=64", "H=8,N=x,D=64", "H=8,N=64,D=64,colour", "H=8,N=0,D=64", "H=8,N=64,D=64,window=1"):
        with pytest.raises(command.argparse.ArgumentTypeError):
            command.parse_shape(bad)
    for both in ("H=8,D=64,N=64,lengths=3:5", "B=2,H=8,D=64,lengths=3:5", "H=8,N=64,D=64,causal,top_left"):
        with pytest.raises(command.argparse.ArgumentTypeError, match=r"expected .* or .*, got both"):
            command.parse_shape(both)


def test_a_mode_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.parse(["--shapes", "H=8,N=64,D=64", "--deterministic"])
    assert "--deterministic: expected --backward" in capsys.readouterr().err
    q = torch.randn(1, 1, 8, 8)
    with pytest.raises(ValueError, match="backward: expected False or True, got 'no'"):
        flash_cute.tune(q, q, q, backward="no")


def test_the_command_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["--shapes", "H=8,N=64,D=64"]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_cpu_tensors_are_not_tuned() -> None:
    q = torch.randn(1, 1, 8, 8)
    with pytest.raises(ValueError, match="q: expected a CUDA tensor to time its kernels, got one on cpu"):
        flash_cute.tune(q, q, q)
    with pytest.raises(ValueError, match="causal: expected"):
        flash_cute.tune(q, q, q, 3)  # type: ignore[arg-type]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", CUDA_DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_results_are_right_under_each_entry(
    head_dim: int, causal: bool, dtype: torch.dtype, rng: torch.Generator, tmp_path: Path
) -> None:
    """A tuning of few rounds; then each choice that was timed, by a file of its own, through autograd."""
    q, k, v = Case(head_dim, 333, 1000, causal, dtype, 1, 4, 2).inputs("cuda", rng)
    tuning = flash_cute.tune(q, k, v, causal, backward=True, seconds=0.001, progress=False)
    forward, backward = tuning.calls
    assert not forward.failures and not backward.failures
    assert forward.best in forward.seconds and min(forward.gain, backward.gain) >= 1
    dout = torch.randn(q.shape, generator=rng).to(q)
    names, of_backward = list(forward.seconds), list(backward.seconds)
    for number in range(max(len(names), len(of_backward))):
        chosen = (
            replace(forward, best=names[number % len(names)]),
            replace(backward, best=of_backward[number % len(of_backward)]),
        )
        path = tmp_path / f"{number}.json"
        Tuning(tuning.gpu, tuning.capability, chosen).save(path)
        flash_cute.use_tuning(path)
        assert flash_cute.explain(q, k, v, causal).data["tuned"]
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out, lse = flash_cute.fwd(*leaves, causal)
        assert_matches(out, lse, q, k, v, causal)
        assert_gradients_match(torch.autograd.grad(out, leaves, dout), dout, q, k, v, causal)


@pytest.mark.cuda
def test_packed_calls_are_tuned(rng: torch.Generator, tmp_path: Path) -> None:
    q, k, v = (torch.randn(500, heads, 64, generator=rng).to("cuda", torch.bfloat16) for heads in (4, 2, 2))
    offsets = torch.tensor([0, 100, 130, 500], dtype=torch.int32, device="cuda")
    lengths = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    tuning = flash_cute.tune(q, k, v, True, **lengths, backward=True, seconds=0.001, progress=False)
    tuning.save(tmp_path / "t.json")
    plain = flash_cute.varlen_fwd(q, k, v, offsets, offsets, True)
    flash_cute.use_tuning(tmp_path / "t.json")
    assert flash_cute.explain(q, k, v, True, **lengths).data["tuned"]
    for given, expected in zip(flash_cute.varlen_fwd(q, k, v, offsets, offsets, True), plain, strict=True):
        torch.testing.assert_close(given, expected, rtol=0.02, atol=0.02)


@pytest.mark.cuda
def test_the_call_is_as_it_was_while_tuning(rng: torch.Generator) -> None:
    """A loaded table does not apply to the thread that tunes, and does again after."""
    q, k, v = Case(64, 128, 128).inputs("cuda", rng)
    call = Call((q, k, v), (), score(), False)
    with choices_by_name():
        assert torch.ops.flash_cute.tuner_runs(True)
    assert not torch.ops.flash_cute.tuner_runs(False)
    assert tune_call(call, False, 0.001).key == call.plan(False)["tuning_key"]
