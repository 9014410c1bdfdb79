"""synccheck, of compute-sanitizer, finds nothing in kernels over pages of one key: their lanes arrive with copies."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

CALLS = """
import sys

import torch

import flash_cute

PAGES = 600
backend = sys.argv[1]


def pages(heads, columns, dtype):
    return torch.randn(PAGES, 1, heads, columns, device="cuda", dtype=torch.float16).to(dtype)


def call(rows, heads_q, k, v):
    dtype = torch.float16 if k.element_size() == 1 else k.dtype
    q = torch.randn(2, rows, heads_q, k.shape[-1], device="cuda", dtype=dtype)
    lengths = torch.tensor([290, 35], device="cuda", dtype=torch.int32)
    table = torch.randperm(PAGES, device="cuda").int().view(2, -1)
    out, _ = flash_cute.attention_with_kvcache(q, k, v, cache_seqlens=lengths, page_table=table, backend=backend)
    assert out.isfinite().all()


for dtype in (torch.float16, torch.bfloat16) + (torch.float8_e4m3fn,) * (backend == "sm90"):
    for head_dim in 64, 128, 256:
        for rows in 1, 520:
            call(rows, 32, pages(8, head_dim, dtype), pages(8, head_dim, dtype))
    if dtype.itemsize == 2:
        latent = pages(1, 576, dtype)
        call(1, 16, latent, latent[..., :512])
"""


@pytest.mark.cuda
@pytest.mark.kernel
@pytest.mark.parametrize("device", ["cuda"])
def test_synccheck(backend: str | None) -> None:
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        pytest.skip("compute-sanitizer is not on PATH")
    command = [tool, "--tool", "synccheck", "--kernel-name", "kns=flash_cute", "--error-exitcode", "9"]
    command += [sys.executable, "-c", CALLS, backend or "auto"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[:1500] + done.stderr[-1500:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout
