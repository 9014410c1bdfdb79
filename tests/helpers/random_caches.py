"""Calls over caches of every kernel, and random ones: everything at once."""

from __future__ import annotations

import random
from typing import Any

import torch
from caches import FLOAT8, STORAGES, Cached, make
from cases import CAUSAL, CPU_DTYPES, CUDA_DTYPES

LONGEST = {"cpu": 300, "cuda": 5000}
HEAD_DIMS = (
    *((64, 64), (128, 128), (96, 96), (256, 256), (192, 128), (192, 192), (576, 512), (32, 64), (512, 512), (80, 80)),
    *((16, 32), (1024, 1024)),
)
LATENT: dict[str, Any] = {"head_dim": 576, "head_dim_v": 512, "heads_kv": 1, "storage": "view"}
# Arguments of `make` for which different kernels run.
KERNELS: dict[str, dict[str, Any]] = {
    "64": {},
    "128": {"head_dim": 128},
    "192/128": {"head_dim": 192, "head_dim_v": 128},
    "192": {"head_dim": 192},
    "256": {"head_dim": 256},
    "512": {"head_dim": 512},
    "1024": {"head_dim": 1024},
    "latent, 16 heads": {**LATENT, "heads_q": 16},
    "latent, 128 heads": {**LATENT, "heads_q": 128},
    "float8 64": {"cache_dtypes": FLOAT8, "descales": "heads"},
    "float8 128": {"head_dim": 128, "cache_dtypes": FLOAT8, "descales": "heads"},
    "float8 192/128": {"head_dim": 192, "head_dim_v": 128, "cache_dtypes": FLOAT8, "descales": "heads"},
    "float8 256": {"head_dim": 256, "cache_dtypes": FLOAT8, "descales": "heads"},
}


def draw(pick: random.Random, rng: torch.Generator, device: str) -> tuple[dict[str, Any], Cached]:
    """The arguments of `make`, and the call."""
    count = pick.randint(1, 5)
    longest = LONGEST[device]
    lengths = [pick.choice((-1, 0, pick.randint(1, 64), pick.randint(1, longest))) for _ in range(count)]
    ragged = pick.random() < 0.4
    most = pick.choice((150, 700)) if device == "cuda" and pick.random() < 0.2 else 40  # a chunk of a prompt
    rows: Any = (
        [pick.choice((0, 1, pick.randint(1, most))) for _ in range(count)]
        if ragged
        else pick.choice((1, 1, 2, 4, 16, most))
    )
    heads_kv, group = pick.choice((1, 2, 3)), pick.choice((1, 4, 8, 16))
    head_dim, head_dim_v = pick.choice(HEAD_DIMS)
    dtype = pick.choice(CPU_DTYPES if device == "cpu" else CUDA_DTYPES)
    options: dict[str, Any] = {
        "page": pick.choice((None, 1, 4, 16, 16, 48, 64, 256, 512)),
        "appends": pick.random() < 0.5,
        "new_keys": pick.choice((None, 0, 1, 9)),
        "heads_q": heads_kv * group,
        "heads_kv": heads_kv,
        "head_dim": head_dim,
        "head_dim_v": head_dim_v,
        "dtype": dtype,
        "kv_layout": pick.choice(("NHD", "HND")),
        "storage": pick.choice(STORAGES if head_dim >= head_dim_v else STORAGES[:-2]),
        "room": pick.choice((0, 1, 100)),
        "shared": pick.random() < 0.3,
        "causal": pick.choice((True, True, *CAUSAL)),
        "window": pick.choice((None, None, (pick.randint(0, 100), 0), (pick.randint(0, 1000), pick.randint(0, 9)))),
        "softcap": pick.choice((None, None, 8.0)),
        "scale": pick.choice((None, pick.uniform(0.03, 0.2))),
    }
    if pick.random() < 0.3:
        own = options["storage"] == "plain" or options["storage"] == "gaps"
        options["cache_dtypes"] = (pick.choice(FLOAT8),) * 2 if not own else pick.choices(FLOAT8, k=2)
        options["descales"] = pick.choice(("none", "number", "heads"))
    if pick.random() < 0.3:
        options["sinks"] = torch.randn(heads_kv * group, generator=rng).to(device)
    if pick.random() < 0.2:
        shape = (heads_kv * group,) if pick.random() < 0.5 else (count, heads_kv * group)
        options["alibi_slopes"] = torch.rand(shape, generator=rng).to(device)
    if pick.random() < 0.5 and options["storage"] == "view":  # what it changes is latent attention
        options["batch_invariant"] = False
    case = make(rng, device, lengths, rows, **options)
    return {"lengths": lengths, "rows": rows, **options}, case
