"""The grid of head dims 257 to 1024, forward and backward."""

from __future__ import annotations

import torch
from cases import CUDA_DTYPES, Case

HALF, BF16 = CUDA_DTYPES

# Lengths around the tile (64 rows, 128 keys), head dims around the chunk (64 columns) and the parts of out (512).
CASES = [
    *(
        Case(head_dim, len_q, len_k, causal, CUDA_DTYPES[number % 2], 1, 2, 1)
        for number, (head_dim, (len_q, len_k)) in enumerate(
            (head_dim, lengths)
            for head_dim in (264, 320, 512, 576, 1000, 1024)
            for lengths in ((1, 1), (63, 129), (65, 127), (113, 403))
        )
        for causal in (False, True)
    ),
    *(Case(head_dim, 129, 257, "top_left", BF16, 1, 4, 2) for head_dim in (257, 300, 321, 448, 513, 640, 768, 1023)),
    *(
        Case(head_dim, 203, 313, causal, HALF, 2, 4, 2, head_dim_v=head_dim_v)
        for head_dim, head_dim_v in ((576, 512), (64, 512), (512, 64), (320, 1024), (1024, 320), (8, 1024), (1024, 8))
        for causal in (False, True)
    ),
    *(
        Case(head_dim, len_q, len_k, causal, BF16, 1, 2, 2, window=window)
        for head_dim in (320, 512, 1024)
        for len_q, len_k in ((300, 300), (200, 700))
        for causal, window in ((False, (40, 30)), (True, (130, 0)), (False, (0, 0)), ("top_left", (64, None)))
    ),
    Case(512, 333, 413, True, BF16, 2, 4, 2, softcap=5.0),
    Case(512, 333, 413, False, HALF, 2, 4, 2, slopes="batch"),
    Case(512, 333, 413, True, HALF, 2, 4, 2, sinks=HALF),
    Case(1024, 133, 413, True, BF16, 2, 8, 1, window=(100, 20), softcap=3.0, sinks=torch.float32, slopes="head"),
    Case(576, 133, 1413, True, HALF, 2, 8, 1, 512, window=(900, 20), softcap=3.0, sinks=HALF, slopes="batch"),
    Case(600, 65, 713, True, BF16, 1, 2, 1, 520),
    Case(328, 133, 413, False, BF16, 2, 6, 2, 600, window=(300, 20), softcap=3.0, sinks=BF16, slopes="batch"),
]
