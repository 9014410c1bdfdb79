"""The modes: each runs a model in one way and returns what is compared, for eager all answers that are right."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers

from .compare import Values, values_of
from .images import Images
from .inputs import Feed, Inputs, on_device_of, ones, rng, tokens
from .outcome import NotApplicable
from .rounding import smooth

Answers = list[Values]
PACKED = (8, 1, 6)
NEW_TOKENS = 6


def _forward(model: Any, inputs: Inputs) -> Values:
    torch.manual_seed(2)
    with torch.no_grad():
        return values_of(model(**on_device_of(model, inputs.arguments)), inputs)


def plain(model: Any, feed: Feed, is_eager: bool) -> Answers:
    return [_forward(model, feed.make())]


def padded(pad: str, *, equal: bool = False) -> Callable[..., Answers]:
    def mode(model: Any, feed: Feed, is_eager: bool) -> Answers:
        if equal and not (feed.is_seq2seq and "input_ids" in feed.names):
            raise NotApplicable("no encoder and decoder of tokens")
        return [_forward(model, feed.make(pad, equal=equal))]

    return mode


def gradients(pad: str) -> Callable[..., Answers]:
    def mode(model: Any, feed: Feed, is_eager: bool) -> Answers:
        inputs = feed.make(pad)
        torch.manual_seed(2)
        model.zero_grad()
        with smooth():
            values = values_of(model(**on_device_of(model, inputs.arguments)), inputs)
        # Random weights: a sum of squares of what a norm has made is a constant. The gradient of each tensor has a norm
        # of about 1: that of a mean over many pixels would be too small for float16.
        weights = rng(11)
        loss = torch.zeros(())
        for x in values.values():
            weight = torch.randn(x.shape, generator=weights)
            if x.requires_grad:
                loss = loss + (x.float() * weight.to(x.device)).sum().cpu() / x.numel() ** 0.5
        loss.backward()
        found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return [found]

    return mode


def images(pad: str) -> Callable[..., Answers]:
    def mode(model: Any, feed: Feed, is_eager: bool) -> Answers:
        if feed.recipe is not None:
            if not {"input_ids", "pixel_values"} <= feed.make().arguments.keys():
                raise NotApplicable("the model takes no images within text")
            return [_forward(model, feed.make(pad))]
        if feed.images is None:
            feed.images = Images(model, feed.signature)
        return [_forward(model, feed.images.make(pad))]

    return mode


def _packed_inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return tokens(1, sum(PACKED)), torch.cat([torch.arange(n) for n in PACKED])[None]


@contextlib.contextmanager
def _masked_by_blocks() -> Iterator[None]:
    """Eager's attention keeps the sequences of `PACKED` apart, whatever a model tells it; states and convolutions that
    run on through them do not."""
    names = transformers.AttentionMaskInterface._global_mapping
    whole = names["eager"]
    apart = torch.block_diag(*(torch.ones(n, n) for n in PACKED)).bool()

    def by_blocks(*args: Any, **options: Any) -> Any:
        made = whole(*args, **{**options, "allow_is_bidirectional_skip": False})
        if made.shape[-2:] != apart.shape:
            return made
        return made.masked_fill(~apart.to(made.device), torch.finfo(made.dtype).min)

    names["eager"] = by_blocks
    try:
        yield
    finally:
        names["eager"] = whole


def packed(offsets: bool, cache: bool = False) -> Callable[..., Answers]:
    """Sequences in one row, by position_ids alone or beside offsets. Right is each as if alone; or what eager computes
    of the row, where a model passes neither on to its attention."""

    def mode(model: Any, feed: Feed, is_eager: bool) -> Answers:
        if not feed.is_text or "position_ids" not in feed.signature:
            raise NotApplicable("the model takes no position_ids")
        ids, positions = _packed_inputs()
        given: dict[str, Any] = {"input_ids": ids, "position_ids": positions}
        if "use_cache" in feed.signature:
            given["use_cache"] = cache
        row = torch.ones(1, ids.shape[1], dtype=torch.bool)
        told = given
        if offsets:
            ends = torch.tensor([0, *torch.tensor(PACKED).cumsum(0).tolist()], dtype=torch.int32)
            longest = {"max_length_q": max(PACKED), "max_length_k": max(PACKED)}
            told = {**given, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, **longest}
        as_given = _forward(model, Inputs(told, row))
        if not is_eager:
            return [as_given]
        alone = []
        for part, of_part in zip(ids.split(PACKED, 1), positions.split(PACKED, 1), strict=True):
            one = {**given, "input_ids": part, "position_ids": of_part}
            alone.append(_forward(model, Inputs(one, torch.ones(part.shape, dtype=torch.bool))))
        answers = [{name: torch.cat([x[name] for x in alone]) for name in alone[0]}, as_given]
        with _masked_by_blocks():
            answers.append(_forward(model, Inputs(told, row)))
        return answers

    return mode


def generate(pad: str, **options: Any) -> Callable[..., Answers]:
    def mode(model: Any, feed: Feed, is_eager: bool) -> Answers:
        if not (feed.is_text or feed.is_seq2seq) or not _can_generate(model):
            raise NotApplicable("the model generates no tokens")
        made = feed.make("none")
        given = {k: x for k, x in made.arguments.items() if k != "decoder_input_ids"}
        if "input_ids" in given:
            given["attention_mask"] = ones(pad, given["input_ids"].shape[1])
        torch.manual_seed(2)
        answer = model.generate(
            **on_device_of(model, given),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            disable_compile=True,  # on a GPU a static cache makes generate() compile the forward, for a minute and more
            return_dict_in_generate=True,
            output_logits=True,
            output_scores="num_beams" in options,
            **options,
        )
        found = {"tokens": answer.sequences[:, -NEW_TOKENS:].double()}
        if "num_beams" in options:
            found["scores"] = answer.sequences_scores
        else:
            found |= {f"logits.{i}": x.masked_fill(~x.isfinite(), 0.0) for i, x in enumerate(answer.logits)}
        return [found]

    return mode


def _can_generate(model: Any) -> bool:
    return callable(getattr(model, "can_generate", None)) and model.can_generate()


def generate_batch(model: Any, feed: Feed, is_eager: bool) -> Answers:
    """Continuous batching: several prompts of different lengths over a paged cache."""
    if not feed.is_text or not _can_generate(model) or not hasattr(model, "generate_batch"):
        raise NotApplicable("the model generates no tokens")
    from transformers import ContinuousBatchingConfig, GenerationConfig

    prompts = [row[:n].tolist() for row, n in zip(tokens(3, 14), (14, 5, 9), strict=True)]
    options = GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cache=True
    )
    paging = ContinuousBatchingConfig(block_size=32, num_blocks=16, max_batch_tokens=64, auto_switch_to_flash=False)
    implementation = model.config._attn_implementation
    try:
        answers = model.generate_batch(inputs=prompts, generation_config=options, continuous_batching_config=paging)
    finally:
        if model.config._attn_implementation != implementation:  # it failed before it was reset
            model.set_attn_implementation(implementation)
    found = {}
    for i, (_, answer) in enumerate(sorted(answers.items(), key=lambda item: len(item[1].prompt_ids))):
        if answer.error:
            raise RuntimeError(answer.error)
        found[f"tokens.{i}"] = torch.tensor(answer.generated_tokens, dtype=torch.double)
    if len(found) != len(prompts):
        raise RuntimeError(f"{len(found)} of {len(prompts)} requests were answered")
    return [found]


def compiled(pad: str) -> Callable[..., Answers]:
    """One graph of the whole forward."""

    def mode(model: Any, feed: Feed, is_eager: bool) -> Answers:
        inputs = feed.make(pad)
        if "use_cache" in feed.signature:
            inputs.arguments["use_cache"] = False
        if is_eager:
            return [_forward(model, inputs)]
        torch._dynamo.reset()
        graph = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.manual_seed(2)
        with torch.no_grad():
            return [values_of(graph(**on_device_of(model, inputs.arguments)), inputs)]

    return mode


# What is run on the windowed configuration, in this order.
MODES: dict[str, Callable[..., Answers]] = {
    "plain": plain,
    "left": padded("left"),
    "right": padded("right"),
    "inner": padded("inner"),
    "equal": padded("left", equal=True),
    "equal right": padded("right", equal=True),
    "packed": packed(False),
    "packed, cache": packed(False, cache=True),
    "offsets": packed(True),
    "image": images("none"),
    "image left": images("left"),
    "gradients": gradients("none"),
    "gradients left": gradients("left"),
    "dynamic": generate("left"),
    "static": generate("left", cache_implementation="static"),
    "beams": generate("left", num_beams=3),
    "batching": generate_batch,
    "compile": compiled("none"),
    "compile left": compiled("left"),
}
# What is run again with a window that is longer than the input, where the configuration has one.
WIDE = ("plain", "left")
COMPILED = ("compile", "compile left")
