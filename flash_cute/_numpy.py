"""Imports torch, quietly where numpy is not installed: flash_cute needs none.

torch then warns once, where it first looks for numpy: in `import torch` up to 2.13, later in a user's first call. So
it looks here. (With an older torch that is imported before flash_cute, the warning has come by then.)
"""

import warnings

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch

    torch.device("cpu")
