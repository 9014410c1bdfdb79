"""Packages that import flash-attn, with flash_cute in its place: the real ones, computing what they are for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from packages import need

# How ring-flash-attn and yunchang deal rows to two processes; each function's gradients are compared too.
RING = """
import sys, types
import torch, torch.distributed as dist, torch.multiprocessing as mp
import flash_cute, flash_cute.reference
from flash_cute.integrations import flash_attn
flash_attn.install()
WORLD, ROWS, HEADS = 2, 48, (4, 2)

def dealt(x, rank, how):
    if how == "stripe":
        return x[:, rank::WORLD].contiguous()
    pieces = x.chunk(2 * WORLD, 1) if how == "zigzag" else x.chunk(WORLD, 1)
    kept = (pieces[rank], pieces[-1 - rank]) if how == "zigzag" else (pieces[rank],)
    return torch.cat(kept, 1)

def check(rank, name, function, how, causal=True, packed=None):
    torch.manual_seed(SEED)
    shapes = ((2, ROWS, HEADS[0], 16), (2, ROWS, HEADS[1], 16), (2, ROWS, HEADS[1], 16), (2, ROWS, HEADS[0], 16))
    # float16, since the packages sum up parts in float32, and in float32 take one for a copy of the other.
    whole = [torch.randn(shape).half() for shape in shapes]
    if packed:
        whole = [x[:1] for x in whole]
    q, k, v, dout = (x.double().transpose(1, 2) for x in whole)
    bounds = packed or [0, ROWS]
    parts = [[x[:, :, a:b] for x in (q, k, v, dout)] for a, b in zip(bounds, bounds[1:])]
    expected = [[flash_cute.reference.attention(*x[:3], causal)[0],
                 *flash_cute.reference.gradients(x[3], *x[:3], causal)] for x in parts]
    expected = [torch.cat(x, 2).transpose(1, 2) for x in zip(*expected)]
    leaves = [dealt(x, rank, how) for x in whole]
    if packed:
        leaves = [x[0] for x in leaves]
    leaves = [x.requires_grad_() for x in leaves]
    out = function(*leaves[:3], causal=causal)
    given = [out, *torch.autograd.grad(out, leaves[:3], leaves[3].detach())]
    for what, x, y in zip(("out", "dq", "dk", "dv"), given, expected, strict=True):
        y = dealt(y, rank, how)
        y = y[0] if packed else y
        error = ((x.double() - y).abs().max() / y.abs().max()).item()
        # Their basic rings round dq to bfloat16, whatever q's dtype is.
        allowed = 8e-3 if what == "dq" and name.startswith(("ring", "LongContextAttention(basic")) else 2e-3
        assert x.shape == y.shape and error <= allowed, (name, what, error)
    if rank == 0:
        print(name, "causal" if causal else "full")

def ring(rank):
    # Its adapter for Transformers asks for a name that Transformers 5 does not have; the rest needs none of it.
    adapters = types.ModuleType("ring_flash_attn.adapters")
    adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None
    sys.modules["ring_flash_attn.adapters"] = adapters
    import ring_flash_attn as package
    for causal in (True, False):
        check(rank, "ring_flash_attn_func", package.ring_flash_attn_func, "pieces", causal=causal)
    check(rank, "zigzag_ring_flash_attn_func", package.zigzag_ring_flash_attn_func, "zigzag")
    check(rank, "stripe_flash_attn_func", package.stripe_flash_attn_func, "stripe")
    offsets = torch.tensor([0, 10, 34, 48], dtype=torch.int32)
    for causal in (True, False):
        lengths = package.llama3_flash_attn_prepare_cu_seqlens(offsets, causal, rank, WORLD)
        def llama3(q, k, v, causal):
            return package.llama3_flash_attn_varlen_func(
                q, k, v, *lengths[:4], heads_k_stride=1, local_k_slice=lengths[4], causal=causal)
        check(rank, "llama3_flash_attn_varlen_func", llama3, "pieces", causal=causal, packed=offsets.tolist())

def yunchang(rank):
    import yunchang as package
    from yunchang.kernels import AttnType
    package.set_seq_parallel_pg(1, WORLD, rank, WORLD)
    for kind, how in (("basic", "pieces"), ("zigzag", "zigzag"), ("strip", "stripe")):
        layer = package.LongContextAttention(ring_impl_type=kind, attn_type=AttnType.FA)
        check(rank, f"LongContextAttention({kind})", layer, how)
    check(rank, "UlyssesAttention", package.UlyssesAttention(dist.group.WORLD, attn_type=AttnType.FA), "pieces")

def run(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    globals()[PACKAGE](rank)
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.start_processes(run, (STORE,), nprocs=WORLD, start_method="fork")
"""


@pytest.mark.parametrize("package", ["ring", "yunchang"])
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
def test_rings(package: str, tmp_path: Path, seed: int, python: Callable[..., str]) -> None:
    """Their functions' results and gradients in two processes: parts of keys and rows, merged by their LSE."""
    need({"ring": "ring_flash_attn"}.get(package, package))
    script = RING
    values = {"STORE": repr(str(tmp_path / "store")), "PACKAGE": repr(package), "SEED": str(seed % 2**31)}
    for name, value in values.items():
        script = script.replace(name, value)
    assert python(script, timeout=300).splitlines() == DONE[package]


DONE = {
    "ring": [
        "ring_flash_attn_func causal",
        "ring_flash_attn_func full",
        "zigzag_ring_flash_attn_func causal",
        "stripe_flash_attn_func causal",
        "llama3_flash_attn_varlen_func causal",
        "llama3_flash_attn_varlen_func full",
    ],
    "yunchang": [
        "LongContextAttention(basic) causal",
        "LongContextAttention(zigzag) causal",
        "LongContextAttention(strip) causal",
        "UlyssesAttention causal",
    ],
}

TRANSFORMERS = """
import torch
from flash_cute.integrations import flash_attn
flash_attn.install()
import transformers.modeling_utils, transformers.utils.import_utils as imports
# What Transformers asks besides flash-attn is a GPU, and it gives the functions tensors of any device.
imports.is_torch_cuda_available = lambda: True
imports.is_flash_attn_2_available.cache_clear()
assert imports.is_flash_attn_2_available() and not imports.is_flash_attn_3_available()
transformers.modeling_utils.PreTrainedModel._flash_attn_can_dispatch = lambda *args, **options: True
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(SEED)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, max_position_embeddings=64)
model = LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()
ids, mask = torch.randint(0, 64, (2, 12)), torch.ones(2, 12, dtype=torch.int64)
mask[1, :5] = 0
results = []
for name in ("eager", "flash_attention_2"):
    model.set_attn_implementation(name)
    logits = model(ids, attention_mask=mask).logits[mask.bool()]
    gradients = torch.autograd.grad(logits.square().sum(), list(model.parameters()))
    generated = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    results.append((logits, *gradients, generated))
from transformers.modeling_flash_attention_utils import _flash_fn
assert _flash_fn is flash_attn.flash_attn_func
torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
print("flash_attention_2")
"""


def test_transformers(seed: int, python: Callable[..., str]) -> None:
    """`attn_implementation="flash_attention_2"`, padded on the left, with gradients, and a generation."""
    need("transformers")
    assert python(TRANSFORMERS.replace("SEED", str(seed % 2**31)), timeout=300) == "flash_attention_2\n"


OTHERS = {
    "xformers": """
# xformers gives its operators to CUDA tensors alone; these are the functions that they call.
import xformers.ops
from xformers.ops.fmha import flash
assert flash.FLASH_VERSION == "2.8.3" and not flash._USE_PT_FLASH_ATTN
out, lse, _, state = flash._flash_attn_cuda.fwd(q, k, v, None, None, 0.0, 0.25, True, -1, -1, 0.0, False, None)
assert flash.FwOp.is_available()
gradients = [torch.full_like(x, torch.nan) for x in (q, k, v)]
flash._flash_attn_cuda.bwd(
    dout, q, k, v, out, lse, *gradients, None, 0.0, 0.25, True, -1, -1, 0.0, False, None, state)
""",
    "diffusers": """
from diffusers.models import attention_dispatch as dispatch
leaves = [x.clone().requires_grad_() for x in (q, k, v)]
with dispatch.attention_backend("flash"):
    out = dispatch.dispatch_attention_fn(*leaves, is_causal=True, scale=0.25)
gradients = torch.autograd.grad(out, leaves, dout)
assert dispatch._wrapped_flash_attn_forward.__module__.startswith("flash_cute")
""",
    "faesm": """
torch.cuda.get_device_capability = lambda device=None: (9, 0)  # asked for while it is imported
from faesm.fa_utils import RotaryEmbedding, flash_attn_varlen_qkvpacked_func, pad_input, unpad
leaves = [x.clone().requires_grad_() for x in (q, k, v)]
rows, offsets, longest, _, pad = unpad(torch.stack(leaves, 2), torch.ones(2, 20, dtype=torch.bool))
turned = RotaryEmbedding(16)(rows * 1, offsets, longest)
# Turned back by the angles' negatives, so that what comes out is the attention of q, k and v.
angles = torch.outer(torch.arange(20.0), 10000.0 ** -(torch.arange(8) / 8)).repeat(2, 1)[:, None]
first, second = turned[:, :2].chunk(2, -1)
cos, sin = angles.cos()[:, None], angles.sin()[:, None]
back = torch.cat((first * cos + second * sin, second * cos - first * sin), -1)
packed = torch.cat((back, turned[:, 2:]), 1)
torch.testing.assert_close(packed, rows, rtol=1e-4, atol=1e-4)
out = pad(flash_attn_varlen_qkvpacked_func(packed, offsets, longest, softmax_scale=0.25, causal=True))
gradients = torch.autograd.grad(out, leaves, dout)
""",
}
OTHER = """
import torch
import flash_cute.reference
from flash_cute.integrations import flash_attn
flash_attn.install()
torch.manual_seed(SEED)
q, k, v, dout = (torch.randn(2, 20, 4, 16) for _ in range(4))
CODE
by_heads = [x.double().transpose(1, 2) for x in (q, k, v, dout)]
expected = [flash_cute.reference.attention(*by_heads[:3], True, 0.25)[0],
            *flash_cute.reference.gradients(by_heads[3], *by_heads[:3], True, 0.25)]
for x, y in zip((out, *gradients), expected, strict=True):
    torch.testing.assert_close(x.double().transpose(1, 2), y, rtol=1e-4, atol=1e-4)
print("right")
"""


@pytest.mark.parametrize("package", OTHERS)
def test_others(package: str, seed: int, python: Callable[..., str]) -> None:
    if (
        package == "xformers"
    ):  # its wheel is 3 MB, for one torch version: not among those that the `test` extra installs
        pytest.importorskip("xformers")
    need(package)
    code = OTHER.replace("SEED", str(seed % 2**31)).replace("CODE", OTHERS[package])
    assert python(code, timeout=300) == "right\n"
