"""The GPUs whose calls `flash_cute.integrations.sdpa.enable()` leaves to PyTorch."""

import torch

# B200 and B300. flash_cute has no kernels of their own; what it would run there, for compute_80, is slower than
# PyTorch's by a factor of 3 to 4.
CAPABILITIES = frozenset({(10, 0), (10, 3)})

REASON = (
    "device: expected a GPU whose compute capability is not 10.0 or 10.3, got one: there PyTorch's kernels are 3 to 4 "
    "times as fast"
)

EXPLANATION = (
    "enable() leaves scaled_dot_product_attention on this GPU to PyTorch, whose kernels for it are 3 to 4 times as fast"
)


def devices() -> frozenset[int | None]:
    """The indices of such GPUs here. Begins to use CUDA where there is any."""
    if not torch.cuda.is_available():
        return frozenset()
    count = range(torch.cuda.device_count())
    return frozenset(index for index in count if torch.cuda.get_device_capability(index) in CAPABILITIES)
