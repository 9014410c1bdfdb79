"""What a figure belongs to: the GPU and what it sustains, the versions, the commit."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path

import torch

from flash_cute._timing import Contender, measure, tflops

ROOT = Path(__file__).resolve().parents[1]


def environment(device: torch.device, commit: str) -> dict[str, str]:
    """What a figure belongs to."""
    facts = {
        "gpu": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "cudnn": "",
        "driver": "",
        "python": platform.python_version(),
        "flash_cute": _package_version(),
        "commit": commit or _commit(),
    }
    if device.type == "cuda":
        facts["gpu"] = torch.cuda.get_device_name(device)
        number = torch.backends.cudnn.version() or 0
        facts["cudnn"] = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
        facts["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
    return facts


def _package_version() -> str:
    try:
        return importlib.metadata.version("flash_cute")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _commit() -> str:
    commit = _output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    if not commit:
        return "unknown"
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
    return f"{commit}+changes" if changed else commit


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def matrix_product_tflops(device: torch.device, size: int = 8192) -> float:
    """Rate of a bf16 matrix product: what this card sustains, beside which the attention figures are to be read."""
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    b = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    timing = measure([Contender("matmul", lambda: a @ b)], device, seconds=0.3)["matmul"]
    return tflops(2.0 * size**3, timing.median)
