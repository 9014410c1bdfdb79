"""Transformers' models by `attn_implementation="flash_cute"`: what they compute, and what they refuse."""

from __future__ import annotations

import copy
import functools
import importlib.util
import inspect
from typing import Any

import pytest
import torch
from repository import ROOT

transformers = pytest.importorskip("transformers", minversion="5.4")

import hf_models  # noqa: E402 (needs transformers)
from hf_checks import LENGTH, assert_like_eager, padding, run, tokens  # noqa: E402

import flash_cute.integrations.transformers as integration  # noqa: E402
from flash_cute.integrations import _transformers_given  # noqa: E402

NAMES = [*hf_models.DECODERS, *hf_models.ENCODERS]


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    integration.register()
    hf_models.register_oracle()


@pytest.mark.parametrize("pad", ["none", "left", "right"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_gradients(name: str, pad: str, rng: torch.Generator) -> None:
    ones = padding(pad)
    kept = torch.ones(2, LENGTH, dtype=torch.bool) if ones is None else ones.bool()
    assert_like_eager(hf_models.build(name), {"input_ids": tokens(rng, 2), "attention_mask": ones}, kept)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "deepseek_v3"])
def test_packed_by_position_ids(name: str, rng: torch.Generator) -> None:
    ids, positions = tokens(rng, 1, 15), torch.cat([torch.arange(n) for n in (8, 1, 6)])[None]
    kept = torch.ones(1, 15, dtype=torch.bool)
    assert_like_eager(hf_models.build(name), {"input_ids": ids, "position_ids": positions}, kept)


def test_packed_batch_of_two(rng: torch.Generator) -> None:
    positions = torch.stack([torch.cat([torch.arange(n), torch.arange(15 - n)]) for n in (4, 9)])
    inputs = {"input_ids": tokens(rng, 2, 15), "position_ids": positions}
    assert_like_eager(hf_models.build("mistral"), inputs, torch.ones(2, 15, dtype=torch.bool))


@pytest.mark.parametrize("name", ["mistral", "gpt_oss"])
@torch.no_grad()
def test_packed_in_other_ways(name: str, rng: torch.Generator) -> None:
    """Each sequence is as if alone by offsets too, and where the mask function does not see that there are several.

    It does not where the forward makes itself a cache, and in gpt-oss, whose model keeps its positions from it: there
    eager's sequences see each other.
    """
    model, lengths = hf_models.build(name), (8, 1, 6)
    model.set_attn_implementation("flash_cute")
    ids, positions = tokens(rng, 1, 15), torch.cat([torch.arange(n) for n in lengths])[None]
    alone = torch.cat([model(x, use_cache=False).logits for x in ids.split(lengths, 1)], 1)
    offsets = torch.tensor([0, 8, 9, 15])
    given = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 8, "max_length_k": 8}
    for inputs in (given, {"use_cache": True}, {}):
        torch.testing.assert_close(model(ids, position_ids=positions, **inputs).logits, alone, rtol=1e-4, atol=1e-4)
    positions.copy_(torch.arange(15))  # in place: what was read of this tensor before must not be used
    torch.testing.assert_close(model(ids, position_ids=positions).logits, model(ids).logits)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", list(hf_models.DECODERS))
def test_generates_eagers_tokens(name: str, cache: str | None, rng: torch.Generator) -> None:
    """Beyond the window, with and without padding."""
    model = hf_models.build(name)
    for pad in ("none", "left"):
        inputs = {"input_ids": tokens(rng, 2), "attention_mask": padding(pad)}
        if pad == "none":
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        answers = []
        for implementation in ("eager", "flash_cute"):
            model.set_attn_implementation(implementation)
            options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "cache_implementation": cache}
            answers.append(model.generate(**inputs, **options))
        assert torch.equal(*answers)


@torch.no_grad()
def test_static_cache_without_a_mask(rng: torch.Generator) -> None:
    model, ids, logits = hf_models.build("llama"), tokens(rng, 2), []
    for implementation in ("eager", "flash_cute"):
        model.set_attn_implementation(implementation)
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        first = model(ids[:, :9], past_key_values=cache).logits
        logits.append(torch.cat((first, model(ids[:, 9:], past_key_values=cache).logits), 1))
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)


def test_cross_attention(rng: torch.Generator) -> None:
    model = hf_models.build("whisper")
    inputs = {"input_features": torch.randn(2, 8, 24, generator=rng), "decoder_input_ids": tokens(rng, 2)}
    assert_like_eager(model, inputs, torch.ones(2, LENGTH, dtype=torch.bool))
    answers = []
    for implementation in ("eager", "flash_cute"):
        model.set_attn_implementation(implementation)
        answers.append(model.generate(inputs["input_features"], max_new_tokens=5, do_sample=False))
    assert torch.equal(*answers)


def test_gradient_checkpointing(rng: torch.Generator) -> None:
    model = copy.deepcopy(hf_models.build("gpt_oss")).train()
    inputs, kept = {"input_ids": tokens(rng, 2), "attention_mask": padding("left")}, padding("left").bool()
    plain = run(model, "flash_cute", inputs, kept, torch.float32)
    model.gradient_checkpointing_enable()
    again = run(model, "flash_cute", inputs, kept, torch.float32)
    torch.testing.assert_close(again, plain)


def test_from_pretrained(tmp_path: Any, rng: torch.Generator) -> None:
    hf_models.build("gpt_oss").save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="flash_cute")
    assert loaded.config._attn_implementation == "flash_cute"
    assert loaded(tokens(rng, 1)).logits.isfinite().all()


def test_padding_never_influences(rng: torch.Generator) -> None:
    q, k, v = (torch.randn(2, 2, LENGTH, 8, generator=rng) for _ in range(3))
    module = torch.nn.Module()
    for kind in ("left", "right"):
        ones = padding(kind).bool()
        dirty = [x.masked_fill(~ones[:, None, :, None], torch.nan) for x in (q, k, v)]
        for causal in (False, True):
            # Rows of padding are 0; where they may be those of cross-attention, and so of tokens, they are computed.
            # Without gradients the last row is computed too, of which there are tests where it is no NaN.
            module.config = transformers.BertConfig()
            given = [x.requires_grad_() for x in dirty] if causal else dirty
            out, _ = integration.attention(module, *given, ones, is_causal=causal)
            assert out.isfinite().all() and (out[~ones] == 0).all()
            if not causal:
                module.config = transformers.BartConfig()
                crossing, _ = integration.attention(module, q, *dirty[1:], ones, is_causal=False)
                assert (crossing[~ones] != 0).all()
                torch.testing.assert_close(crossing[ones], out[ones])
            alone, _ = integration.attention(module, *(x[:1, :, ones[0]] for x in (q, k, v)), None, is_causal=causal)
            torch.testing.assert_close(out[0, ones[0]], alone[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 0.1}, "dropout: expected 0"),
        ({"output_attentions": True}, "output_attentions: expected None"),
        ({"scaling": True}, "scale: expected None or a number, got True"),
        ({"softcap": True}, "softcap: expected None or a number, got True"),
        ({"sliding_window": True}, "sliding_window: expected None or a number, got True"),
        ({"position_bias": torch.zeros(1)}, "position_bias: expected None"),
        ({"cache": object()}, "cache: expected None"),
        ({"cu_seq_lens_q": torch.tensor([0, 4])}, "cu_seq_lens_k: expected offsets"),
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, "attention_mask: expected None or a padding"),
        (
            {"attention_mask": torch.ones(1, 1, 3, 4, dtype=torch.bool)},
            "attention_mask: expected .1 or 1, heads or 1, 4, 4",
        ),
        ({"attention_mask": torch.ones(1, 5)}, "attention_mask: expected .1, at most 4., got .1, 5."),
        ({"attention_mask": torch.tensor([[1, 0, 1, 1]]), "sliding_window": 2}, "got padding between tokens"),
        ({"attention_mask": torch.zeros(2, 9, 1, 4).int()}, "expected one made for 1 batch items of 4 keys"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    x = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match=message):
        integration.attention(torch.nn.Module(), x, x, x, **{"attention_mask": None, **options})


def test_masks_of_a_model_or_user_raise(rng: torch.Generator) -> None:
    model = hf_models.build("llama")
    model.set_attn_implementation("flash_cute")
    ids = tokens(rng, 1)
    with pytest.raises(ValueError, match="attention_mask: expected None or a padding mask"):
        model(ids, attention_mask=torch.ones(1, 1, LENGTH, LENGTH).tril())
    make = transformers.masking_utils.create_causal_mask
    parameters = inspect.signature(make).parameters
    arguments = (model.config, torch.empty(1, LENGTH, 32), None)
    make = functools.partial(make, **{"cache" if "cache" in parameters else "past_key_values": None})
    of_a_key = make(*arguments, or_mask_function=lambda b, h, q, k: (k == 13) & (q % 3 == 0))  # has five intervals
    assert (of_a_key.shape, of_a_key.dtype) == ((1, 1, LENGTH, LENGTH), torch.bool)
    assert make(*arguments, or_mask_function=lambda b, h, q, k: k < 3).shape == (1, LENGTH, 2, 2)
    if "block_sequence_ids" not in parameters:
        return  # an older Transformers builds such masks from or_mask_function
    blocks = torch.full((1, LENGTH), -1)
    assert make(*arguments, block_sequence_ids=blocks).shape == (1, LENGTH, 1, 0)  # causal, and no more
    blocks[:, 3:6] = 0
    assert make(*arguments, block_sequence_ids=blocks).shape == (1, LENGTH, 2, 2)


def test_an_older_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mask functions take positions in place of lengths."""
    monkeypatch.setattr(transformers.masking_utils, "sdpa_mask", lambda batch_size, cache_position, kv_length: None)
    with pytest.raises(ImportError, match=r"flash_cute: transformers: expected version 5\.4 or newer, got"):
        integration.register()


def test_other_implementations_still_work() -> None:
    model = hf_models.build("llama")
    model.set_attn_implementation("sdpa")
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="no_such_attention"):
        model.set_attn_implementation("no_such_attention")
    integration.register()
    check = transformers.PreTrainedModel._check_and_adjust_attn_implementation
    assert not hasattr(check.__wrapped__, "accepts_flash_cute")


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "bert", "modernbert"])
def test_on_the_gpu(name: str, dtype: torch.dtype, rng: torch.Generator) -> None:
    """Beside SDPA (eager where a model has no SDPA): twice its distance from float32."""
    true_model = copy.deepcopy(hf_models.build(name)).cuda()
    model = copy.deepcopy(true_model).to(dtype)
    other = "eager" if name in ("gemma2", "gpt_oss") else "sdpa"
    for pad in ("none", "left"):
        ones = padding(pad)
        kept = torch.ones(2, LENGTH, dtype=torch.bool) if ones is None else ones.bool()
        inputs = {"input_ids": tokens(rng, 2).cuda(), "attention_mask": None if ones is None else ones.cuda()}
        kept = kept.cuda()
        ours, theirs = (run(model, x, inputs, kept, dtype)[0].float() for x in ("flash_cute", other))
        true = run(true_model, "oracle", inputs, kept, torch.float32)[0]
        size = true.abs().max().item()
        allowed = 2 * (theirs - true).abs().max().item() + torch.finfo(dtype).eps * size + 1e-5
        assert (ours - true).abs().max().item() <= allowed


def test_positions_are_read_once_a_forward(monkeypatch: pytest.MonkeyPatch, rng: torch.Generator) -> None:
    """Of all layers, since reading waits for the GPU; what was read of an earlier forward is not used."""
    model, ids, reads = hf_models.build("llama"), tokens(rng, 1, 15), []
    model.set_attn_implementation("flash_cute")
    read = _transformers_given._read_positions
    monkeypatch.setattr(_transformers_given, "_read_positions", lambda positions: reads.append(1) or read(positions))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            positions = torch.cat([torch.arange(n) for n in (8, 7)])[None]
            for row in (positions.clone(), torch.arange(15)[None]):
                positions.copy_(row)
                reads.clear()
                logits = model(ids, position_ids=positions, use_cache=True).logits
                assert len(reads) == 1
                alone = row.clone()
                torch.testing.assert_close(logits, model(ids, position_ids=alone, use_cache=True).logits)


@pytest.mark.filterwarnings("ignore")
def test_compiled(rng: torch.Generator) -> None:
    """Where masks and positions are read the graph breaks; the answer is the same."""
    model = copy.deepcopy(hf_models.build("llama"))
    inputs, kept = {"input_ids": tokens(rng, 2), "attention_mask": padding("left")}, padding("left").bool()
    expected = run(model, "flash_cute", inputs, kept, torch.float32)
    torch.compiler.reset()
    model.forward = torch.compile(model.forward, backend="aot_eager")
    torch.testing.assert_close(run(model, "flash_cute", inputs, kept, torch.float32), expected)
    torch.compiler.reset()


@pytest.fixture(scope="module")
def trained() -> tuple[Any, list[list[int]]]:
    """The model of examples/packed_finetuning.py, which has learnt some sums by heart, and these sums."""
    path = ROOT / "examples/packed_finetuning.py"
    spec = importlib.util.spec_from_file_location("packed_finetuning", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sums = [document["input_ids"] for document in example.documents(12, seed=4)]
    ids = torch.tensor([[byte for text in sums for byte in text]], device=device)
    positions = torch.cat([torch.arange(len(x)) for x in sums])[None].to(device)
    labels = ids.masked_fill(positions == 0, -100)  # the first byte of a sum follows from nothing
    with torch.random.fork_rng():
        model = example.load(None).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(100):
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(input_ids=ids, position_ids=positions, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval(), sums


@pytest.mark.parametrize("cache", [None, "static"])
def test_a_trained_model_generates_sdpas_tokens(
    cache: str | None, device: str, trained: tuple[Any, list[list[int]]]
) -> None:
    """Greedy, in bfloat16 on a GPU: prompts of different lengths, padded on the left; the sums that it has learnt."""
    model = copy.deepcopy(trained[0]).to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    prompts = [text[: text.index(ord("=")) + 1] for text in trained[1]]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(x)) + x for x in prompts], device=device)
    ones = torch.tensor([[0] * (width - len(x)) + [1] * len(x) for x in prompts], device=device)
    options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache, "pad_token_id": 0}
    answers = []
    for implementation in ("sdpa", "flash_cute"):
        model.set_attn_implementation(implementation)
        answers.append(model.generate(input_ids=ids, attention_mask=ones, **options, disable_compile=True)[:, width:])
    assert torch.equal(*answers)
    right = sum(
        bytes(answer).rstrip(b"\0") == bytes(text[len(prompt) :])
        for answer, text, prompt in zip(answers[0].tolist(), trained[1], prompts, strict=True)
    )
    assert right >= len(prompts) - 2, "the model has not learnt them, so that its tokens say little"
