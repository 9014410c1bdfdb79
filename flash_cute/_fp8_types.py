"""The dtypes of a call of float8 tensors."""

import torch

# Of q, k and v, each its own.
FLOAT8 = frozenset((torch.float8_e4m3fn, torch.float8_e5m2))
# Of out, by the operators' names (csrc/api/checks_fp8.h).
DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
BLOCK = 128  # rows of q or k that share an entry of a descale of three dims
