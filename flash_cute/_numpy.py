"""Imports torch, quietly where numpy is not installed: flash_cute needs none.

torch warns once, where it first looks for numpy. That is in its own import (2.10 to 2.15), and if not, then here and
not in a user's first call. A program that imports torch before flash_cute has the warning by then.
"""

import warnings

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    import torch

    torch.device("cpu")
