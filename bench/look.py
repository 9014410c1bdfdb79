"""One look per provider in every plot: colour, marker and line.

The colours are Okabe and Ito's, told apart by every kind of colour vision; marker and dash differ as well.
"""

from __future__ import annotations

LOOKS = {
    "flash_cute": ("#D55E00", "o", "-"),
    "flash_cute:sm90": ("#D55E00", "o", "-"),
    "flash_cute:sm80": ("#CC79A7", "s", "-"),
    "flash_cute:cpu": ("#D55E00", "o", "-"),
    "flash_cute:deterministic": ("#E69F00", "^", "-"),
    "flash_cute:sm90:deterministic": ("#E69F00", "^", "-"),
    "flash_cute:sm80:deterministic": ("#882255", "d", "-"),
    "flash_cute:cpu:deterministic": ("#E69F00", "^", "-"),
    "flash_cute:plain": ("#8FA3AD", "x", "--"),
    "flash_cute:sm90:plain": ("#8FA3AD", "x", "--"),
    "flash_cute:sm80:plain": ("#B8A0B5", "+", "--"),
    "flash_cute:cpu:plain": ("#8FA3AD", "x", "--"),
    "flash_cute:dense": ("#8FA3AD", "x", "--"),
    "flash_cute:sm90:dense": ("#8FA3AD", "x", "--"),
    "flash_cute:sm80:dense": ("#B8A0B5", "+", "--"),
    "flash_cute:cpu:dense": ("#8FA3AD", "x", "--"),
    "flash_cute:bf16": ("#8FA3AD", "x", "--"),
    "flash_cute:sm90:bf16": ("#8FA3AD", "x", "--"),
    "flash_cute:sm80:bf16": ("#B8A0B5", "+", "--"),
    "flash_cute:cpu:bf16": ("#8FA3AD", "x", "--"),
    "flash_cute:contiguous": ("#E69F00", "^", "--"),
    "flash_cute:sm90:contiguous": ("#E69F00", "^", "--"),
    "flash_cute:sm80:contiguous": ("#882255", "d", "--"),
    "flash_cute:cpu:contiguous": ("#E69F00", "^", "--"),
    "cudnn": ("#0072B2", "D", "--"),
    "flash": ("#009E73", "v", "-."),
    "fa3": ("#000000", "^", ":"),
    "fa3:deterministic": ("#666666", "<", ":"),
    "fa4": ("#8C564B", "s", ":"),
    "vllm-fa3": ("#000000", "^", ":"),
    "vllm-fa3:contiguous": ("#000000", "<", "-."),
    "vllm-fa3:invariant": ("#666666", "<", ":"),
    "cudnn-paged": ("#0072B2", "d", ":"),
    "efficient": ("#56B4E9", "P", ":"),
    "math": ("#999999", "h", "-."),
    "flash-attn": ("#F0E442", "*", "--"),
    "triton": ("#332288", "X", ":"),
    "sdpa": ("#0072B2", "D", "--"),
    "eager": ("#999999", "h", "-."),
    "flex_attention": ("#009E73", "v", "-."),
}
