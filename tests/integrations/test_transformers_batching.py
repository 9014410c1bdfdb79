"""Continuous batching of Transformers (`generate_batch`): eager's tokens, of gathered keys and of pages read in place.

Transformers gives pages on a GPU alone; here it is made to on the CPU, in float32.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.4")
pytest.importorskip("transformers.generation.continuous_batching.initialization")

import hf_models  # noqa: E402 (needs transformers)

import flash_cute  # noqa: E402
import flash_cute.integrations.transformers as integration  # noqa: E402
from flash_cute.integrations import _transformers_paged, flash_attn  # noqa: E402

NEW = 5
# Longer than a page and than what a batch takes at once, so that they are prefilled in parts; two begin alike.
LENGTHS = (37, 37, 5)


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    integration.register()


@pytest.fixture
def prompts(rng: torch.Generator) -> list[list[int]]:
    rows = [torch.randint(3, hf_models.TOKENS, (n,), generator=rng).tolist() for n in LENGTHS]
    rows[1][:33] = rows[0][:33]
    return rows


def generated(model: Any, prompts: list[list[int]], **paging: Any) -> list[list[int]]:
    """The tokens that `generate_batch` gives each prompt."""
    names = inspect.signature(transformers.ContinuousBatchingConfig).parameters
    given = {"num_blocks": 32, "max_batch_tokens": 24, "use_cuda_graph": False, **paging}
    given["page_size" if "page_size" in names else "block_size"] = 16
    if "auto_switch_to_flash" in names:
        given["auto_switch_to_flash"] = False
    if "use_async_batching" in names:  # with sdpa too wrong now and then: docs/adopting/transformers.md
        given["use_async_batching"] = False
    options = transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    config = transformers.ContinuousBatchingConfig(**given)
    results = model.generate_batch(prompts, options, continuous_batching_config=config, progress_bar=False)
    assert not [x.error for x in results.values() if x.error]
    by_prompt = {tuple(x.prompt_ids): x.generated_tokens for x in results.values()}
    return [by_prompt[tuple(prompt)] for prompt in prompts]


def one_by_one(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Eager's tokens, without a batch and without pages."""
    model.set_attn_implementation("eager")
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    rows = [torch.tensor([x], device=model.device) for x in prompts]
    return [model.generate(x, **options)[0, x.shape[1] :].tolist() for x in rows]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_gathered_keys(name: str, prompts: list[list[int]]) -> None:
    """Windows, softcap and sinks, of prompts that are prefilled in parts."""
    model = copy.deepcopy(hf_models.build(name))
    expected = one_by_one(model, prompts)
    model.set_attn_implementation("flash_cute")
    assert generated(model, prompts) == expected
    assert model.config._attn_implementation == "flash_cute"
    if name != "llama":
        return
    model.set_attn_implementation("paged|flash_cute")  # as older versions call it
    assert model.config._attn_implementation.removeprefix("paged|") == "flash_cute"
    assert generated(model, prompts) == expected


FULL = {"layer_types": ["full_attention", "full_attention"]}  # Transformers gives no pages of layers with a window


def give_pages(monkeypatch: pytest.MonkeyPatch, pads: bool) -> list[dict[str, Any]]:
    """Makes Transformers give pages on the CPU, and with `pads` rows that pad a graph; returns the calls to come."""
    batching = "transformers.generation.continuous_batching"
    initialization = importlib.import_module(f"{batching}.initialization")
    monkeypatch.setattr(initialization, "ensure_decode_fast_path_is_available", lambda *args: None)
    runner = importlib.import_module(f"{batching}.model_runner").ModelRunner
    made = runner.__init__

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.pad_inputs = pads

    def padded(self: Any, num_q_tokens: int, max_kv_read: int, use_decode_fast_path: bool) -> tuple[int, int]:
        sizes = pad(self, num_q_tokens, max_kv_read, use_decode_fast_path)
        return (num_q_tokens + 3, 0) if pads and use_decode_fast_path else sizes

    pad = runner.maybe_pad_inputs
    monkeypatch.setattr(runner, "__init__", make)
    monkeypatch.setattr(runner, "maybe_pad_inputs", padded)
    calls: list[dict[str, Any]] = []
    function = _transformers_paged.attention_with_kvcache

    def noted(q: Any, k_cache: Any, v_cache: Any, **options: Any) -> Any:
        lengths = options["cache_seqlens"].clone()
        calls.append({**options, "cache_seqlens": lengths, "k_cache": k_cache, "v_cache": v_cache})
        out = function(q, k_cache, v_cache, **options)
        assert (out[lengths < 0] == 0).all()
        return out

    monkeypatch.setattr(_transformers_paged, "attention_with_kvcache", noted)
    return calls


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("pads", [False, True], ids=["", "pads"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_pages_in_place(name: str, pads: bool, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of one token each are calls over the cache itself, to which the call appends."""
    model = hf_models.load(name, "eager", **({} if name == "llama" else FULL))
    expected = one_by_one(model, prompts)
    calls = give_pages(monkeypatch, pads)
    model.set_attn_implementation("flash_cute_2")
    assert generated(model, prompts, max_blocks_per_request=4, max_requests_per_batch=8) == expected
    assert len(calls) >= (NEW - 1) * model.config.num_hidden_layers
    assert any((call["cache_seqlens"] < 0).any() for call in calls) == pads
    assert {call["k_cache"].shape[1] for call in calls} == {16}
    first = calls[0]  # the caches of one layer in two steps are the same memory
    assert any(call["k_cache"].data_ptr() == first["k_cache"].data_ptr() for call in calls[1:])
    assert all((call["sinks"] is not None) == (name == "gpt_oss") for call in calls)


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use_cuda_graph", [False, True])
def test_on_the_gpu(use_cuda_graph: bool, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers gives pages by itself. In float16 two tokens may be as likely, and what follows then differs."""
    model = copy.deepcopy(hf_models.build("llama")).cuda().half()
    expected = torch.tensor(one_by_one(model, prompts))
    calls = []
    function = _transformers_paged.attention_with_kvcache
    monkeypatch.setattr(
        _transformers_paged,
        "attention_with_kvcache",
        lambda *args, **options: calls.append(1) or function(*args, **options),
    )
    model.set_attn_implementation("flash_cute_2")
    given = generated(model, prompts, max_blocks_per_request=4, use_cuda_graph=use_cuda_graph)
    assert calls and (torch.tensor(given) == expected).float().mean() > 0.7


def test_the_name_that_asks_for_pages() -> None:
    """Transformers asks for a 2 or a 3 behind "flash", and for flash-attn's function with a cache."""
    asked = importlib.import_module("transformers.utils.generic").is_flash_attention_requested
    for name, pages in (
        ("flash_cute", False),
        ("flash_cute_2", True),
        ("flash_cute_row_invariant", False),
        ("flash_cute_2_row_invariant", True),
    ):
        assert asked(requested_attention_implementation=name)
        assert asked(requested_attention_implementation=name, version=[2, 3]) == pages
    flash = importlib.import_module("transformers.modeling_flash_attention_utils")
    paged = getattr(flash, "lazy_import_paged_flash_attention", None)
    if paged is not None:
        function = paged("paged|flash_cute_2")[1]
    else:
        function = flash.lazy_import_flash_attention("flash_cute_2")[0][2]
    assert inspect.unwrap(function) is flash_attn.flash_attn_with_kvcache


def test_an_implementation_of_both_names_is_one(rng: torch.Generator) -> None:
    model = copy.deepcopy(hf_models.build("llama"))
    ids = torch.randint(3, hf_models.TOKENS, (2, 12), generator=rng)
    ones = torch.ones_like(ids)
    ones[0, :4] = 0
    answers = []
    for name in ("flash_cute", "flash_cute_2"):
        model.set_attn_implementation(name)
        assert model.config._attn_implementation == name
        answers.append(model(ids, attention_mask=ones).logits)
    assert torch.equal(*answers)
    with pytest.raises(ValueError, match="flash_cute: output_attentions: expected"):
        model(ids, output_attentions=True)


def test_a_window_that_only_a_mask_would_say_is_refused(rng: torch.Generator) -> None:
    layer = hf_models.build("qwen2_moe").model.layers[0].self_attn
    x, offsets = torch.randn(1, 2, 12, 8, generator=rng), torch.tensor([0, 12])
    given = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 12, "max_length_k": 12}
    with pytest.raises(ValueError, match=r"sliding_window: expected 5, config.sliding_window"):
        integration.attention(layer, x, x, x, None, **given)


CACHE = torch.zeros(4, 16, 2, 8)
PAGES = {
    "block_table": torch.zeros(3, 2, dtype=torch.int32),
    "k_cache": CACHE,
    "v_cache": CACHE,
    "cu_seq_lens_k": torch.tensor([0, 1, 2, 3], dtype=torch.int32),
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v_cache": None}, "v_cache: expected a tensor beside block_table, got None"),
        ({"cu_seq_lens_k": None}, "cu_seq_lens_k: expected a tensor beside block_table"),
        ({"attention_mask": torch.ones(1, 3)}, "attention_mask: expected None beside block_table, got Tensor"),
        ({"block_table": PAGES["block_table"][:2]}, r"query: expected \(1, Hq, 2, D\), .*, got \(1, 2, 3, 8\)"),
        ({"made_up": 1}, "made_up: expected no such argument"),
        ({"dropout": 0.1}, "dropout: expected 0"),
        ({"block_table": 1}, "block_table: expected no such argument"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    x = torch.ones(1, 2, 3, 8)
    given: dict[str, Any] = {"attention_mask": None, **PAGES}
    integration.attention(torch.nn.Module(), x, x, x, **given)
    with pytest.raises(ValueError, match=f"^flash_cute: {message}"):
        integration.attention(torch.nn.Module(), x, x, x, **{**given, **changes})


def test_the_cache_is_asked_for() -> None:
    x = torch.ones(1, 2, 3, 8)
    with pytest.raises(ValueError, match=r"^flash_cute: cache: expected continuous batching's"):
        _transformers_paged.paged_attention(torch.nn.Module(), x, x, x, None)


@pytest.mark.filterwarnings("ignore")
def test_row_invariance_is_asked_for(prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the name that asks for it, of gathered keys and of pages; the CPU's kernels, which refuse it, compute both."""
    calls = give_pages(monkeypatch, pads=False)
    asked = []

    def without(function: Any) -> Any:
        def call(*tensors: Any, row_invariant: bool, **options: Any) -> Any:
            asked.append((function.__name__, row_invariant))
            return function(*tensors, **options)

        return call

    for module, name in (
        (flash_cute, "attention"),
        (flash_cute, "varlen_attention"),
        (_transformers_paged, "attention_with_kvcache"),
    ):
        monkeypatch.setattr(module, name, without(getattr(module, name)))
    model = hf_models.load("llama", "eager")
    expected = one_by_one(model, prompts)
    model.set_attn_implementation("flash_cute_2_row_invariant")
    assert generated(model, prompts) == expected
    assert calls and {"varlen_attention", "noted"} <= {name for name, _ in asked}
    assert all(row_invariant for _, row_invariant in asked)
