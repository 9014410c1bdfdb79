"""Transformers' architectures by flash_cute against eager: a part of `python -m sweep`, and on a GPU all of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.24")

from sweep import modes, pool, runner, table  # noqa: E402 (needs transformers)
from sweep.fixed import FIXED  # noqa: E402
from sweep.judge import NOISY, judge  # noqa: E402
from sweep.models import Model, models  # noqa: E402
from sweep.outcome import (  # noqa: E402
    BAD,
    NO_ANSWER,
    NOT_BUILT,
    NOT_REACHED,
    REFUSED_AT_CALL,
    REFUSED_AT_LOAD,
    RIGHT,
    UNCLEAR,
    WRONG,
    Outcome,
)
from sweep.rounding import Half  # noqa: E402

import flash_cute.integrations.transformers as integration  # noqa: E402

TESTS = Path(__file__).parent
MISTRAL = Model("mistral", "causal", "MistralForCausalLM")
# Of 850 models; more are a sign that recipes have to follow a newer Transformers.
MOST_NOT_BUILT = 10
NEEDS_A_PACKAGE = ("No module named", "but it was not found in your environment")  # which need not be installed


def sweep(folder: Path, *options: str, timeout: float) -> dict[str, dict[str, Any]]:
    results = folder / "results.json"
    own = [str(TESTS), str(Path(integration.__file__).parents[2])]
    path = os.pathsep.join([*own, *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run(
        [sys.executable, "-m", "sweep", "--results", str(results), *options],
        env={**os.environ, "PYTHONPATH": path},
        cwd=folder,
        stdout=subprocess.DEVNULL,
        timeout=timeout,
        check=False,  # its status says whether there is a fault, which the tests say by model
    )
    return json.loads(results.read_text())


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return sweep(tmp_path_factory.mktemp("sweep"), "--fixed", timeout=900)


@pytest.mark.parametrize("name", FIXED)
def test_models(results: dict[str, dict[str, Any]], name: str) -> None:
    found = results[name]
    bad = {mode: x for mode, x in found.items() if x["result"] in BAD}
    assert not bad
    refused = {mode: x["text"] for mode, x in found.items() if x["result"] in (REFUSED_AT_CALL, REFUSED_AT_LOAD)}
    assert set(refused) == set(FIXED[name].refused)
    assert all(text.startswith("flash_cute: ") for text in refused.values())
    if "load" not in found:
        assert all(found[mode]["result"] == RIGHT for mode in ("plain", "gradients", *FIXED[name].slow))


def test_table(results: dict[str, dict[str, Any]]) -> None:
    written = table.markdown(results, "Transformers")
    assert "llama:causal | right | right | right | right |" in written
    assert "What is refused at load" in written and "t5:seq2seq" in written and "**" not in written


def test_every_architecture_is_listed() -> None:
    listed = {model.model_type for model in models()}
    assert listed == set(transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES)


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The attention function that models call, counted; a test may put another in its place."""
    names = transformers.AttentionInterface._global_mapping
    before = dict(names)
    monkeypatch.setattr(integration, "attention", integration.attention)  # for register()
    runner.register()
    yield names
    names.clear()
    names.update(before)


@pytest.mark.parametrize("half", [False, True], ids=["float32", "float16"])
@pytest.mark.parametrize(
    ("fault", "mode", "result"),
    [
        ("no window", "plain", WRONG),
        ("not causal", "plain", WRONG),
        ("no padding", "left", WRONG),
        ("no offsets", "offsets", WRONG),
        ("error", "plain", UNCLEAR),
        ("refusal", "plain", REFUSED_AT_CALL),
        ("another attention", "plain", NOT_REACHED),
        ("another gradient", "gradients", WRONG),
        ("no fault", "plain", RIGHT),
        ("no fault", "gradients left", RIGHT),
    ],
)
def test_faults_are_seen(attention: dict[str, Any], fault: str, mode: str, result: str, half: bool) -> None:
    right = attention["flash_cute"]

    def faulty(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        if fault == "error":
            raise RuntimeError("no such kernel")
        if fault == "refusal":
            raise ValueError("flash_cute: query: expected nothing, got something")
        if fault == "another attention":
            return runner.uncounted(module, query, key, value, mask, **options)
        if fault == "not causal":
            options["is_causal"], mask = False, None
        if fault in ("no window", "no padding"):
            options["sliding_window"], mask = options["sliding_window"] if fault == "no padding" else None, None
        if fault == "no offsets":
            options["cu_seq_lens_q"] = options["cu_seq_lens_k"] = options["position_ids"] = mask = None
        out, weights = right(module, query, key, value, mask, **options)
        if fault == "another gradient":
            out = out + 2 * (value.mean() - value.mean().detach())
        return out, weights

    attention["flash_cute"] = faulty
    found = dict(runner.run(MISTRAL, [mode], half=half))
    assert found[mode].result == result, found


@pytest.mark.parametrize(
    ("error", "errors_of_eager", "result"),
    [
        (0.001, (), RIGHT),
        (0.05, (0.03,), RIGHT),
        (0.05, (0.01, 0.03), RIGHT),
        (0.05, (0.01, 0.015, 0.01), WRONG),
        (0.5, (0.1, 0.15), WRONG),
        (0.05, (2 * NOISY,), UNCLEAR),
        (0.9, (2 * NOISY,), UNCLEAR),
        (float("nan"), (0.1,), WRONG),
    ],
)
def test_float16_is_judged_by_eager(
    monkeypatch: pytest.MonkeyPatch, error: float, errors_of_eager: tuple[float, ...], result: str
) -> None:
    monkeypatch.setattr(Half, "on", True)
    expected = {"out": torch.tensor([1.0, -0.5]), "other": torch.ones(3)}

    def shifted(by: float) -> dict[str, torch.Tensor]:
        return {**expected, "out": expected["out"] + by}

    found = judge("plain", shifted(error), expected, lambda: map(shifted, errors_of_eager))
    assert found.result == result, found
    assert result == RIGHT or found.text.startswith(f"out: eager in float16 errs by {max(errors_of_eager):.2g}")


@pytest.mark.parametrize(
    ("results", "result"),
    [
        ((RIGHT,), RIGHT),
        ((WRONG, RIGHT, RIGHT), RIGHT),
        ((WRONG, RIGHT, WRONG), WRONG),
        ((WRONG, UNCLEAR, RIGHT), UNCLEAR),
        ((UNCLEAR, RIGHT, UNCLEAR), RIGHT),
        ((UNCLEAR, UNCLEAR, UNCLEAR), UNCLEAR),
    ],
    ids=str,
)
def test_most_inputs_decide(monkeypatch: pytest.MonkeyPatch, results: tuple[str, ...], result: str) -> None:
    monkeypatch.setattr(Half, "on", True)
    given = iter(results)
    monkeypatch.setattr(runner, "_outcome", lambda *_: Outcome(next(given), 0.1, "why"))
    found = runner._best_outcome("plain", None, None, None)
    assert found.result == result and next(given, None) is None
    assert "why" in found.text


def test_a_mode_without_an_answer_costs_itself_alone(
    attention: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(modes.MODES, "left", lambda *_: time.sleep(1000))
    found: dict[str, Any] = {}
    work = [(MISTRAL, ["plain", "left", "right"])]
    left = pool.run_all(work, lambda _, x: found.update(x), device="cpu", jobs=1, seconds=12)
    assert {mode: x["result"] for mode, x in found.items()} == {"plain": RIGHT, "left": NO_ANSWER, "right": RIGHT}
    assert not left and found["left"]["text"] == "no answer after 12 seconds"
    assert pool.run_all(work, lambda *_: None, device="cpu", jobs=1, seconds=12, until=time.monotonic()) == work


def test_a_process_whose_device_fails_is_replaced(
    attention: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As after a device-side assert of one model, of which all calls of that process would fail."""
    failed = tmp_path / "failed"

    def is_usable(_: str) -> bool:
        if failed.exists():
            return True
        failed.touch()
        return False

    monkeypatch.setattr(pool, "_is_usable", is_usable)
    found: dict[str, Any] = {}
    work = [(MISTRAL, ["plain", "left"]), (MISTRAL, ["right"])]
    assert not pool.run_all(work, lambda _, x: found.update(x), device="cpu", jobs=1, seconds=60)
    assert failed.exists()
    assert {mode: x["result"] for mode, x in found.items()} == {"plain": RIGHT, "left": RIGHT, "right": RIGHT}


@pytest.mark.cuda
def test_all_models_on_a_gpu(tmp_path: Path) -> None:
    """All models in all modes but those that take seconds each; a model costs a second of one core."""
    jobs = str(max(1, min(8, (os.cpu_count() or 2) - 1)))
    found = sweep(
        tmp_path, "--device", "cuda", "--jobs", jobs, "--without", "compile,compile left,batching", timeout=3000
    )
    bad = {
        f"{name} {mode}": (x["result"], x["error"], x["text"][:200])
        for name, of_model in found.items()
        for mode, x in of_model.items()
        if x["result"] in BAD
    }
    assert not {name: x for name, x in bad.items() if x[0] != NOT_BUILT}
    not_built = {name: x for name, x in bad.items() if not any(said in x[2] for said in NEEDS_A_PACKAGE)}
    assert len(not_built) <= MOST_NOT_BUILT, not_built
    assert sum(x["result"] == RIGHT for of_model in found.values() for x in of_model.values()) > 1500


@pytest.mark.cuda
def test_a_few_models_on_a_gpu(tmp_path: Path) -> None:
    assert torch.cuda.is_available()
    found = sweep(tmp_path, "--device", "cuda", "--model", "mistral", "--model", "bart", timeout=900)
    assert not [x for of_model in found.values() for x in of_model.values() if x["result"] in BAD]
