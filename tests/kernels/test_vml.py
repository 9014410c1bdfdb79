"""MKL's vector functions are called by one thread before several do: flash_cute/_vml.py says why."""

from __future__ import annotations

from collections.abc import Callable

# VML: every function that PyTorch takes from there. `Calls` keeps the dtypes that each was called with. The operators'
# kernels are called as functions, since a mode does not see what is called within an operator.
SCRIPT = """
import collections, torch
from torch.utils._python_dispatch import TorchDispatchMode

VML = set("acos asin atan cos erf erfc erfinv exp log log10 log2 sin sqrt tan tanh trunc".split())
WITHIN = {"logsumexp": ["exp", "log"]}

class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.made, self.sizes = collections.defaultdict(set), set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__.rstrip("_")
        for vml in WITHIN.get(name, [name]):
            if vml in VML:
                self.made[vml].add(args[0].dtype)
                self.sizes.add(args[0].numel())
        return function(*args, **(kwargs or {}))

with Calls() as at_import:
    import flash_cute
from flash_cute import cpu, cpu_bwd
from flash_cute._call_options import CallOptions
from flash_cute.band import make_band
from flash_cute.score import make_score

with Calls() as in_use:
    for dtype in (torch.float32, torch.float64):
        q, k, v, dout = (torch.randn(1, 2, 40, 32, dtype=dtype) for _ in range(4))
        sinks, slopes = torch.zeros(2), torch.tensor([0.5, 0.25])
        for causal, left, softcap, alibi in (("none", None, None, None), ("none", 7, 5.0, slopes)):
            band = make_band(causal, left, None, 40, 40)
            options = CallOptions(causal, left, None, softcap, None, alibi, 0.2)
            score = make_score(options, q, k, 0.2)
            for some in (None, sinks):
                out, lse = cpu._fwd(q, k, v, band, score, some)
                cpu_bwd._bwd(dout, q, k, v, out, lse, lse, band, score, some)

print(sorted(in_use.made))
assert in_use.made.keys() >= {"exp", "log", "tanh"}, in_use.made
assert all(in_use.made[name] <= at_import.made[name] for name in in_use.made), (in_use.made, at_import.made)
assert at_import.sizes == {1}, at_import.sizes  # elements: many would be shared among threads
"""


def test_each_function_is_called_at_import(python: Callable[..., str]) -> None:
    assert "exp" in python(SCRIPT)
