"""One model in all modes."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import transformers

import flash_cute.integrations.transformers as integration

from . import modes, sizes
from .compare import TOLERANCE, Values, difference
from .inputs import Feed, Seed
from .judge import judge
from .models import Model, build
from .outcome import (
    EAGER_FAILS,
    NOT_APPLICABLE,
    NOT_BUILT,
    NOT_REACHED,
    REFUSED_AT_CALL,
    REFUSED_AT_LOAD,
    RIGHT,
    UNCLEAR,
    WRONG,
    NotApplicable,
    Outcome,
)
from .recipes import NO_ATTENTION
from .rounding import SCALES, Half, rounded
from .tiny import tiny

WIDE = "wide window"
TRIALS = 3  # inputs in float16, of which most decide
SENTENCE = "flash_cute: "


class Counter:
    """How often the attention function was called, and how often with offsets of packed sequences."""

    calls = 0
    with_offsets = 0


uncounted = integration.attention


def counted(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """flash_cute's attention function."""
    if not torch.compiler.is_compiling():
        Counter.calls += 1
        Counter.with_offsets += kwargs.get("cu_seq_lens_q") is not None
    if not Half.on or query.dtype != torch.float32:
        return uncounted(module, query, key, value, *args, **kwargs)
    # The kernels have no float32, and eager in float32 is what is compared with.
    out, weights = uncounted(module, query.half(), key.half(), value.half(), *args, **kwargs)
    return out.float(), weights


def register() -> None:
    """Make the attention function count its calls, by whichever name layers find it."""
    integration.register()
    integration.attention = counted
    transformers.AttentionInterface.register("flash_cute", counted)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip()


def _sentence(error: BaseException, mode: str) -> str | None:
    """The sentence by which flash_cute refuses, if that is what was raised."""
    text = str(error)
    if isinstance(error, ValueError) and text.startswith(SENTENCE):
        return text
    # Dynamo and the threads of continuous batching report what was raised in a text of their own.
    if (mode in modes.COMPILED or mode == "batching") and SENTENCE in text:
        return text[text.index(SENTENCE) :].splitlines()[0]
    return None


def run(
    model: Model, wanted: Iterable[str] | None = None, device: str = "cpu", half: bool = False
) -> Iterator[tuple[str, Outcome]]:
    """The outcome of each mode, as soon as it is known; of a model that does not run, the one outcome "load".

    half: flash_cute's attention in float16, as always on a GPU.
    """
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # eager is the truth
    Half.on = half or device != "cpu"
    Seed.value = 0
    wanted = list(wanted or [*modes.MODES, WIDE])
    pair = _load(model, sizes.WINDOW, device)
    if isinstance(pair, Outcome):
        yield "load", pair
        return
    eager, ours = pair
    try:
        feed = Feed(model.name, eager)
        answer, again = (modes.plain(eager, feed, True)[0] for _ in range(2))
        if difference(answer, again)[0] > TOLERANCE / 10:
            raise NotApplicable("eager gives another answer each time")
    except NotApplicable as reason:
        result = NOT_APPLICABLE if model.kind == "part" else NOT_BUILT
        yield "load", Outcome(result, text=str(reason))
        return
    for mode in wanted:
        if mode != WIDE:
            found = _best_outcome(mode, eager, ours, feed)
            if found.result == NOT_REACHED and model.model_type in NO_ATTENTION:
                found = Outcome(NOT_APPLICABLE, found.error, NO_ATTENTION[model.model_type])
            yield mode, found
    if WIDE in wanted:
        yield WIDE, _wide(model, feed, device)


def _load(model: Model, window: int, device: str) -> tuple[Any, Any] | Outcome:
    if model.model_class is None:
        return Outcome(NOT_APPLICABLE, text="a part that has no model of its own")
    try:
        config = tiny(model.model_type, model.kind, window=window)
    except Exception as error:
        return Outcome(NOT_BUILT, text=f"configuration: {_said(error)}")
    try:
        ours = build(model, config, "flash_cute")
    except ValueError as error:
        if str(error).startswith(SENTENCE):
            return Outcome(REFUSED_AT_LOAD, text=str(error))
        ours = error
    except Exception as error:
        ours = error
    try:
        eager = build(model, config, "eager")
    except Exception as error:
        return Outcome(NOT_BUILT, text=_said(error))
    if isinstance(ours, Exception):
        return Outcome(UNCLEAR, text=_said(ours))
    ours.load_state_dict(eager.state_dict(), strict=False)
    return eager.to(device), ours.to(device)


def _wide(model: Model, feed: Feed, device: str) -> Outcome:
    """The modes of `modes.WIDE` with a window that is longer than the input."""
    windowed, wide = (tiny(model.model_type, model.kind, window=w) for w in (sizes.WINDOW, sizes.WIDE_WINDOW))
    if windowed.to_dict() == wide.to_dict():
        return Outcome(NOT_APPLICABLE, text="the configuration has no window")
    pair = _load(model, sizes.WIDE_WINDOW, device)
    if isinstance(pair, Outcome):
        return pair
    feed.config = pair[0].config
    found = [_best_outcome(mode, *pair, feed) for mode in modes.WIDE]
    found = [x for x in found if x.result not in (EAGER_FAILS, NOT_APPLICABLE)] or found
    return next((x for x in found if x.result != RIGHT), found[0])


def _best_outcome(mode: str, eager: Any, ours: Any, feed: Feed) -> Outcome:
    """In float16 that of most of a few inputs, if the first is wrong: a rounding can give a token another expert.

    Of inputs that allow no judgement the next ones are tried; that none does is unclear.
    """
    found: list[Outcome] = []
    for Seed.value in range(TRIALS):
        found.append(_outcome(mode, eager, ours, feed))
        unlike = [x for x in found if x.result in (WRONG, UNCLEAR)]
        if len(found) == 1 and (not unlike or not Half.on or found[0].error is None):
            break
    Seed.value = 0
    results = [x.result for x in found]
    if results.count(WRONG) >= min(2, len(found)):
        return next(x for x in found if x.result == WRONG)
    other = next((x for x in found if x.result not in (WRONG, UNCLEAR)), None)
    if other is None or (WRONG in results and results.count(other.result) < 2):
        return next((x for x in found if x.result == UNCLEAR), found[0])
    if len(found) > 1:
        same = results.count(other.result)
        said = next(x.text for x in found if x.result in (WRONG, UNCLEAR))
        return dataclasses.replace(other, text=f"with {same} of {len(found)} inputs, else: {said}")
    return other


def _outcome(mode: str, eager: Any, ours: Any, feed: Feed) -> Outcome:
    run_mode = modes.MODES[mode]
    try:
        expected = run_mode(eager, feed, True)
        if not all(x.isfinite().all() for answer in expected for x in answer.values()):
            raise NotApplicable("eager's answer is not finite")
        if not any(expected):
            raise NotApplicable("nothing to compare")
        if mode in modes.COMPILED:
            _compile_sdpa(run_mode, eager, feed)
    except NotApplicable as reason:
        return Outcome(NOT_APPLICABLE, text=str(reason))
    except Exception as error:
        return Outcome(EAGER_FAILS, text=_said(error)[:500])
    Counter.calls = Counter.with_offsets = 0
    try:
        (answer,) = run_mode(ours, feed, False)
    except Exception as error:
        sentence = _sentence(error, mode)
        return Outcome(REFUSED_AT_CALL, text=sentence) if sentence else Outcome(UNCLEAR, text=_said(error)[:2000])
    return _compared(mode, answer, expected, lambda i: _rounded_answers(mode, eager, feed, i))


def _rounded_answers(mode: str, eager: Any, feed: Feed, which: int) -> Iterator[Values]:
    """One of eager's answers in float16, for each way of rounding."""
    for scale in SCALES:
        Half.roundings = 0
        with rounded(scale):
            answer = modes.MODES[mode](eager, feed, True)[which]
        if not Half.roundings:
            raise LookupError("eager's attention is not known: it computes in float32 alone (rounding.py)")
        yield answer


def _compared(
    mode: str, answer: Values, expected: modes.Answers, rounded_answers: Callable[[int], Iterator[Values]]
) -> Outcome:
    kinds = ["alone", "as eager", "attention alone"][: len(expected)]
    nearest = sorted(range(len(expected)), key=lambda i: difference(answer, expected[i]))
    if Counter.with_offsets:  # the attention was told of the sequences, and must not compute as if not
        nearest = [i for i in nearest if kinds[i] != "as eager"]
    which = nearest[0]
    try:
        outcome = judge(mode, answer, expected[which], lambda: rounded_answers(which))
    except LookupError as error:
        return Outcome(UNCLEAR, difference(answer, expected[which])[0], str(error))
    if outcome.result != RIGHT:
        return outcome
    if not Counter.calls and mode not in modes.COMPILED:
        return Outcome(NOT_REACHED, outcome.error)
    return Outcome(RIGHT, outcome.error, kinds[which] if len(expected) > 1 else "")


def _compile_sdpa(run_mode: Any, eager: Any, feed: Feed) -> None:
    """Raises where the same model does not compile with sdpa."""
    with _implementation(eager, "sdpa"):
        run_mode(eager, feed, False)


@contextlib.contextmanager
def _implementation(model: Any, name: str) -> Iterator[None]:
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation("eager")


def timed(model: Model, wanted: Iterable[str] | None = None) -> dict[str, Any]:
    """What `run` yields, and the seconds it took; for trying a model by hand."""
    begin = time.monotonic()
    return {**dict(run(model, wanted)), "seconds": time.monotonic() - begin}
