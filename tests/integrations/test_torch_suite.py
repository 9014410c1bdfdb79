"""The tool that runs PyTorch's own tests: it notices what fails with `enable()`, and tells tests of errors apart."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent

SUITE = """
import functools
import unittest
import warnings
import torch
import torch.nn.functional as F

x = torch.randn(1, 2, 9, 8)

class TestAttention(unittest.TestCase):
    def test_right(self):
        torch.testing.assert_close(F.scaled_dot_product_attention(x, x, x, scale=1e-9), x.mean(2, True).expand_as(x))

    def test_an_error(self):
        with self.assertRaisesRegex(RuntimeError, "expanded size of the tensor"):
            F.scaled_dot_product_attention(x, x[:, :, :4], x, attn_mask=torch.ones(9, 4))

    def test_a_warning(self):
        with self.assertWarnsRegex(UserWarning, "not deterministic"):
            out = F.scaled_dot_product_attention(x.clone().requires_grad_(), x, x)
            if "ScaledDotProduct" in type(out.grad_fn).__name__:
                warnings.warn("not deterministic")

    def test_pytorchs_own(self):
        out = F.scaled_dot_product_attention(x.clone().requires_grad_(), x, x)
        self.assertIn("ScaledDotProduct", type(out.grad_fn).__name__)

    def test_broken(self):
        self.fail("in both runs")

def case(self, number):
    F.scaled_dot_product_attention(x, x, x)

for number in range(10):
    test = functools.wraps(case)(functools.partialmethod(case, number)._make_unbound_method())
    setattr(TestAttention, f"test_case_{number}", test)
"""


def test_the_tool(tmp_path: Path) -> None:
    (tmp_path / "test_attention.py").write_text(SUITE)
    command = [sys.executable, str(TESTS / "torch_suite.py"), str(tmp_path), "--files", "test_attention.py", "gone.py"]
    command += ["--device", "cpu", "--most", "3", "--logs", str(tmp_path / "logs")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert done.returncode == 1, done.stdout + done.stderr
    counts = [dict(re.findall(r"'(\w+)': (\d)", part)) for part in lines[0].split("with {")]
    assert counts == [{"passed": "7", "failure": "1"}, {"passed": "4", "failure": "4"}], done.stdout
    assert "served by flash_cute: 6" in lines  # the right one, the warning's, PyTorch's own, and three of the ten cases
    asking, failures = lines.index("ask for an error or a warning: 2"), lines.index("FAIL WITH enable(): 1")
    assert lines[asking + 1].startswith("test_attention.TestAttention::test_a_warning: ")
    assert "UserWarning not triggered" in lines[asking + 1]
    assert lines[asking + 2].startswith("test_attention.TestAttention::test_an_error: ")
    assert lines[failures + 1].startswith("test_attention.TestAttention::test_pytorchs_own: ")
    assert lines[-1] == f"gone.py: not in {tmp_path}"
    assert "in both runs" in (tmp_path / "logs/test_attention-without.log").read_text()
