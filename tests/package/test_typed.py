"""The package is typed: what a type checker makes of the README's examples, and of results that depend on a flag."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from repository import ROOT

import flash_cute

pytest.importorskip("mypy")

EXAMPLES = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)

# Torch's types, without the packages below it that none of ours need: a tenth of the time. Some of its methods, such as
# Tensor.backward, have no types. flash_cute is checked by the project's own run of mypy.
SETTINGS = """
[mypy]
strict = True
python_version = {version}
untyped_calls_exclude = torch
[mypy-flash_cute.*]
ignore_errors = True
[mypy-{skipped}]
follow_imports = skip
"""
SKIPPED_TORCH = (
    *("_decomp", "_dynamo", "_export", "_functorch", "_higher_order_ops", "_inductor", "_library", "_logging"),
    *("_numpy", "_prims", "_prims_common", "_refs", "_subclasses", "ao", "distributed", "export", "fx", "jit"),
    *("masked", "nested", "onnx", "optim", "package", "profiler", "quantization", "sparse", "testing", "utils"),
)
SKIPPED = (*(f"torch.{name}.*" for name in SKIPPED_TORCH), "numpy.*", "sympy.*", "transformers.*")

TYPES = """
import torch
from torch import Tensor
import flash_cute
import flash_cute.integrations.flash_attn
import flash_cute.integrations.flash_attn_interface
import flash_cute.integrations.transformers
from flash_cute.integrations import sdpa
from flash_cute.integrations.sdpa import varlen_attn

flag = torch.cuda.is_available()
q = torch.randn(1, 2, 16, 64)
reveal_type(flash_cute.attention(q, q, q, True, window=(3, None), sinks=None))
reveal_type(flash_cute.attention(q, q, q, return_lse=True, softcap=1.5))
reveal_type(flash_cute.attention(q, q, q, return_lse=flag))
x, offsets = torch.randn(16, 2, 64), torch.tensor([0, 16], dtype=torch.int32)
reveal_type(flash_cute.varlen_attention(x, x, x, offsets, offsets, max_seqlen_q=16))
reveal_type(flash_cute.varlen_attention(x, x, x, offsets, offsets, return_lse=True, seqused_k=None))
reveal_type(varlen_attn(x, x, x, offsets, offsets, 16, 16))
pages = torch.randn(4, 4, 2, 64)
reveal_type(flash_cute.attention_with_kvcache(q, pages, pages, cache_seqlens=offsets, page_table=None))
reveal_type(flash_cute.attention_with_kvcache(q, pages, pages, k=q, v=q, return_lse=True))
reveal_type(flash_cute.varlen_attention(x, pages, pages, offsets, None, page_table=offsets, seqused_k=offsets))
reveal_type(flash_cute.integrations.sdpa.sdpa(q, q, q))
reveal_type(sdpa.report().served)
flash_cute.integrations.transformers.register()
flash_cute.attention(q, q, q, scales=2.0)  # WRONG: no such option
flash_cute.attention(q, q, q, window=3)  # WRONG
flash_cute.varlen_attention(q, q, q)  # WRONG
flash_cute.attention_with_kvcache(q, pages, pages, block_table=offsets)  # WRONG: no such option
flash_cute.integrations.sdp  # WRONG
"""
REVEALED = (
    "Tensor",
    "tuple[Tensor, Tensor]",
    "Tensor | tuple[Tensor, Tensor]",
    "Tensor",
    "tuple[Tensor, Tensor]",
    "Tensor",
    "Tensor",
    "tuple[Tensor, Tensor]",
    "Tensor",
    "Tensor",
    "dict[str, int]",
)


def _mypy(folder: Path, sources: dict[str, str]) -> str:
    """What `mypy --strict` says of files beside each other."""
    settings = folder / "mypy.ini"
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    settings.write_text(SETTINGS.format(version=version, skipped=",".join(SKIPPED)))
    for name, text in sources.items():
        (folder / name).write_text(text)
    package = Path(flash_cute.__file__).parents[1]
    installed = str(package) in (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"])
    command = [sys.executable, "-m", "mypy", "--config-file", str(settings), "--cache-dir", str(folder), *sources]
    environment = {} if installed else {"MYPYPATH": str(package)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_types(tmp_path: Path) -> None:
    """The README's blocks pass `mypy --strict`; types are as narrow as the flags say; wrong calls are found."""
    sources = {f"example_{i}.py": text for i, text in enumerate(EXAMPLES)}
    said = _mypy(tmp_path, {**sources, "flags.py": TYPES})
    assert EXAMPLES and not [line for line in said.splitlines() if line.startswith("example_")], said
    wrong = [i for i, line in enumerate(TYPES.splitlines(), 1) if "# WRONG" in line]
    found = {int(line) for line in re.findall(r"^flags.py:(\d+): error", said, re.MULTILINE)}
    assert found == set(wrong), said
    revealed = re.findall(r'Revealed type is "(.*)"', said)
    assert tuple(re.sub(r"(torch\._tensor|builtins)\.", "", text) for text in revealed) == REVEALED, said
