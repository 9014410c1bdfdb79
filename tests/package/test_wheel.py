"""One wheel for every torch and Python: an operator of it is called under the oldest and the newest of both that are
claimed (the Pythons of this machine), and under a CPU-only torch.

Importing would prove nothing: a library built for a later torch loads, and fails where it passes a dtype.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import background
import pytest
import torch
import venvs
from wheels import pack

from flash_cute import report
from flash_cute.schedules import _compile

OLDEST = "2.10.0"  # of the torches that pyproject.toml claims

# What the whole library may take, as a wheel and unpacked.
WHEEL_BYTES = 15_000_000
INSTALLED_BYTES = 40_000_000

CALL = """
import sys, torch, flash_cute
from flash_cute import _ops, report
print(sys.version.split()[0], torch.__version__, torch.version.cuda, flash_cute.__file__)
torch.manual_seed(0)
q, k, v = torch.randn(2, 4, 33, 48), torch.randn(2, 2, 65, 48), torch.randn(2, 2, 65, 48)
for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
    out, lse = flash_cute.fwd(*(x.to(dtype) for x in (q, k, v)), causal=True, scale=0.2)
    ref_out, ref_lse = flash_cute.reference.attention(q, k, v, True, 0.2)
    assert out.dtype == dtype and (out - ref_out).abs().max() < 0.05, dtype
    assert (lse - ref_lse).abs().max() < 0.02, dtype
half = [x.half() for x in (q, k, v)]
if report.load()["kernels"]:
    assert '"backend"' in _ops.fwd_plan(*half, "bottom_right", *[None] * 6, "auto", 90)
leaves = [x.requires_grad_() for x in (q, k, v)]
out, lse = flash_cute.attention(*leaves, causal=True, scale=0.2, return_lse=True)
gradients = torch.autograd.grad((out, lse), leaves, (torch.ones_like(out), torch.ones_like(lse)))
ones = torch.ones_like(out)
for x, y in zip(gradients, flash_cute.reference.gradients(ones, q, k, v, True, 0.2, ones[..., 0])):
    assert (x - y).abs().max() < 1e-4
try:
    torch.ops.flash_cute.fwd(q, k, v.half(), "none", *[None] * 6, "auto")
except (ValueError, RuntimeError) as error:
    assert "dtype" in str(error)
else:
    raise AssertionError("a wrong dtype was taken")
if torch.cuda.is_available():
    out, lse = flash_cute.fwd(*(x.cuda() for x in half), causal=True, scale=0.2)
    assert (out.cpu() - ref_out).abs().max() < 0.05
    dq, dk, dv = flash_cute.bwd(torch.ones_like(out), *(x.cuda() for x in half), out, lse, causal=True, scale=0.2)
    truth = flash_cute.reference.gradients(torch.ones_like(out), *(x.cuda() for x in half), True, 0.2)
    assert (dq - truth[0]).abs().max() < 0.05
print("called")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack(tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def without_lineinfo() -> None:
    if report.load()["lineinfo"]:
        pytest.skip("this build has line info for a profiler, which is large")


@pytest.mark.usefixtures("without_lineinfo")
def test_wheel_is_small(wheel: Path) -> None:
    assert wheel.stat().st_size <= WHEEL_BYTES


@pytest.mark.usefixtures("without_lineinfo")
def test_installed_package_is_small(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        assert sum(file.file_size for file in packed.infolist()) <= INSTALLED_BYTES


def test_wheel_has_what_the_schedules_are_compiled_from(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
    sources = (
        *_compile.HOST_FILES,
        "studies/schedules/launch.cuh",
        "sm80/forward/rows/mainloop.cuh",
        "core/softmax.cuh",
    )
    assert {f"flash_cute/csrc/{name}" for name in sources} <= names


def _newest(python: Path) -> str | None:
    """The one that pip would install: its index may list newer ones, which its constraints exclude."""
    words = ("install", "--dry-run", "--quiet", "--ignore-installed", "--no-deps", "--report", "-", "torch")
    answer = venvs.pip(python, *words)
    return json.loads(answer.stdout)["install"][0]["metadata"]["version"] if answer.returncode == 0 else None


def _is_here(which: str, version: str, python: Path) -> bool:
    """Whether the torch and the Python that run these tests are those wanted."""
    if which == "cpu":
        return torch.version.cuda is None
    return python == Path(sys.executable) and torch.__version__.split("+")[0] == version


def call_under_torch(which: str) -> subprocess.CompletedProcess[str]:
    """CALL under a torch, in a venv that is gone afterwards: it takes gigabytes."""
    here = venvs.pythons()
    python = {"oldest": here[0], "newest": here[-1], "cpu": Path(sys.executable)}[which]
    version = _newest(python) if which == "newest" else {"oldest": OLDEST, "cpu": venvs.CPU_ONLY}[which]
    if version is None:
        venvs.cannot("pip cannot say which torch is the newest")
    with tempfile.TemporaryDirectory(prefix="flash_cute_") as name:
        folder = Path(name)
        wheel = pack(folder)
        if not _is_here(which, version, python):
            python = venvs.make(folder / "venv", version, python)
            installed = venvs.pip(python, "install", "--no-deps", wheel)
            assert installed.returncode == 0, installed.stderr
        # In a folder without another flash_cute.
        return background.run([python, "-c", CALL], cwd=folder, PYTHONDONTWRITEBYTECODE="1")


def begin(item: pytest.Function) -> None:
    """See `background`."""
    if item.function is test_operator_works_under_torch:
        background.begin(call_under_torch, item.callspec.params["which"])


@pytest.mark.venv
@pytest.mark.parametrize("which", ["oldest", "newest", "cpu"])
def test_operator_works_under_torch(which: str) -> None:
    done = background.result(call_under_torch, which)
    assert done.returncode == 0 and "called" in done.stdout, done.stdout + done.stderr
    print(done.stdout)
