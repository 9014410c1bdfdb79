"""Fine-tune a small Llama on packed sequences through Transformers' Trainer, its attention flash_cute's.

    pip install '.[examples]'
    python examples/packed_finetuning.py                    # on the GPU if there is one, else a minute on the CPU
    python examples/packed_finetuning.py --steps 300 --model folder   # a model of Transformers' own format

Each document is a sum such as "17+5=22", spelt in bytes. Transformers' DataCollatorWithFlattening puts the documents of
a batch one after the other into one row, without padding, and says in `position_ids` where each begins. flash_cute lets
each attend to itself alone. Before training this is checked: packed logits are those of each document by itself.
Prints the loss before and after; exits with 1 if the check fails or the loss has not fallen.
"""

import argparse
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flash_cute.integrations.transformers

# 1 - cosine of the logits of packed documents and of each alone, by dtype.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-3}


def documents(count: int, seed: int) -> list[dict[str, list[int]]]:
    """Sums in bytes, of different lengths, in the form that Trainer takes as a data set."""
    numbers = random.Random(seed)
    texts = []
    for _ in range(count):
        a, b = (numbers.randrange(10 ** numbers.randint(1, 5)) for _ in range(2))
        texts.append(f"{a}+{b}={a + b}\n")
    return [{"input_ids": list(text.encode())} for text in texts]


def load(folder: Path | None) -> Any:
    """The model of a folder, or a new Llama with random weights: 4 layers, 6 query heads on 2, 2 million parameters."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    if folder is not None:
        return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="flash_cute", local_files_only=True)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=10,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM._from_config(config, attn_implementation="flash_cute")


@torch.no_grad()
def packing_error(model: Any, ids: list[list[int]]) -> float:
    """1 - cosine of the packed documents' logits and each document's own, the largest of all tokens."""
    device = model.device

    def positions(length: int) -> Tensor:
        return torch.arange(length, device=device)

    packed = torch.tensor([[token for document in ids for token in document]], device=device)
    together = torch.cat([positions(len(document)) for document in ids])[None]
    of_all = model(input_ids=packed, position_ids=together, use_cache=False).logits[0]
    alone = [model(input_ids=torch.tensor([document], device=device)).logits[0] for document in ids]
    return float((1 - torch.cosine_similarity(of_all.double(), torch.cat(alone).double(), dim=-1)).max())


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", type=Path, help="folder of a causal language model; default: a new small Llama")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=64, help="documents in a row")
    parser.add_argument("--out", type=Path, help="folder to save the model in; default: it is not saved")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    return parser.parse_args(argv)


def make_trainer(args: argparse.Namespace, model: Any, folder: str) -> Any:
    """Transformers' Trainer on packed documents; it makes the folder."""
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

    gpu = args.device == "cuda"
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=folder,
            max_steps=args.steps,
            per_device_train_batch_size=args.batch_size,
            per_device_eval_batch_size=args.batch_size,
            learning_rate=2e-3,
            warmup_steps=args.steps // 10,
            logging_steps=max(args.steps // 10, 1),
            save_strategy="no",
            report_to="none",
            bf16=gpu,  # under autocast: weights stay in float32, attention is given bfloat16
            use_cpu=not gpu,
            gradient_checkpointing=args.gradient_checkpointing,
            prediction_loss_only=True,
            seed=0,
        ),
        train_dataset=documents(args.steps * args.batch_size, seed=2),
        eval_dataset=documents(4 * args.batch_size, seed=3),
        data_collator=DataCollatorWithFlattening(),
    )
    trainer.args._n_gpu = min(trainer.args.n_gpu, 1)  # torch.nn.DataParallel, for several, would cut packed sequences
    return trainer


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    flash_cute.integrations.transformers.register()
    model = load(args.model)
    gpu = args.device == "cuda"
    model.to(args.device).eval()
    with torch.autocast(args.device, torch.bfloat16, enabled=gpu):
        error = packing_error(model, [document["input_ids"] for document in documents(8, seed=1)])
    allowed = TOLERANCE[torch.bfloat16 if gpu else torch.float32]
    print(f"packed and alone: 1 - cosine of logits at most {error:.1e} (allowed {allowed:.0e})")

    with tempfile.TemporaryDirectory() as temporary:  # Trainer makes a folder, whether or not anything is saved
        trainer = make_trainer(args, model, str(args.out or temporary))
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        after = trainer.evaluate()["eval_loss"]
        print(f"loss {before:.3f} before, {after:.3f} after {args.steps} steps of {args.batch_size} packed documents")
        if args.out:
            trainer.save_model(str(args.out))
    return 0 if error <= allowed and after < before else 1


if __name__ == "__main__":
    sys.exit(main())
