"""A v whose head dim is its own: out has v's, laid out in q's order of dims."""

from __future__ import annotations

import pytest
import torch
from cases import Backward, Case, Causal, Forward, backward_plan, score
from checks import assert_exact, inputs_and_options, on_each_device
from layouts import LAYOUTS, Layout
from numerics import assert_gradients_match, assert_matches
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import flash_cute
from flash_cute.report import load

# D, Dv: DeepSeek's, the same exchanged, instances, sizes that are padded, far apart.
PAIRS = ((192, 128), (128, 192), (64, 32), (32, 64), (96, 256), (256, 8), (8, 256), (33, 20), (100, 129), (1, 3))
DTYPES = (torch.float32, torch.float16, torch.float64, torch.bfloat16)
CASES = [
    *(
        Case(head_dim, len_q, len_k, causal, DTYPES[number % 4], heads_q=4, head_dim_v=head_dim_v)
        for number, (head_dim, head_dim_v) in enumerate(PAIRS)
        for len_q, len_k, causal in ((65, 129, True), (129, 65, "top_left"))
    ),
    *(
        Case(192, len_q, len_k, causal, torch.float32, head_dim_v=128)
        for len_q, len_k in ((1, 1), (1, 300), (300, 300))
        for causal in (False, True)
    ),
    Case(192, 203, 113, True, torch.float32, head_dim_v=128, window=(50, 0)),
    Case(192, 400, 90, False, torch.bfloat16, head_dim_v=128, window=(30, 60)),
    Case(136, 300, 500, True, torch.bfloat16, heads_q=4, heads_kv=2, head_dim_v=72),
]
# bf16 has a backward of its own on sm90, with tiles of 64 rows x 128 keys; also for smaller head dims.
CUDA_ALONE = [
    Case(192, 128, 256, False, torch.bfloat16, head_dim_v=128),
    Case(192, 640, 640, True, torch.bfloat16, heads_q=6, heads_kv=2, head_dim_v=128),
    Case(192, 517, 777, "top_left", torch.bfloat16, heads_q=4, heads_kv=1, head_dim_v=128),
    Case(192, 1100, 1100, True, torch.bfloat16, heads_q=4, heads_kv=2, head_dim_v=128, window=(200, 0)),
]
CPU_ALONE = [
    Case(576, 65, 129, True, torch.float32, head_dim_v=512),
    Case(16, 65, 129, True, torch.float32, head_dim_v=300),
]


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("device", "case"),
    [*on_each_device(CASES, CUDA_ALONE), *(pytest.param("cpu", case, id=f"cpu-{case}") for case in CPU_ALONE)],
)
@pytest.mark.parametrize("dlse", [False, True])
def test_exact(
    device: str, case: Case, dlse: bool, backend: str | None, fwd: Forward, bwd: Backward, rng: torch.Generator
) -> None:
    assert_exact(case, device, fwd, bwd, rng, dlse=dlse, backend=backend)


@pytest.mark.kernel
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_layouts(
    device: str, layout: Layout, causal: Causal, backend: str | None, fwd: Forward, bwd: Backward, rng: torch.Generator
) -> None:
    """Strides of every kind, and out in memory as empty_like(q) is; a fake has the same strides."""
    case = Case(48, 33, 65, causal, heads_q=4, head_dim_v=24)
    inputs, _ = inputs_and_options(case, device, rng)
    q, k, v = (layout.make(x) for x in inputs)
    out, lse = fwd(q, k, v, causal)
    assert_matches(out, lse, q, k, v, causal)
    order = sorted(range(4), key=torch.empty_like(q).stride, reverse=True)
    assert out.permute(order).is_contiguous()
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in (q, k, v)]
        fake, _ = torch.ops.flash_cute.fwd(*fakes, *score(causal), "auto")
    assert (fake.shape, fake.stride(), fake.dtype) == (out.shape, out.stride(), out.dtype)
    if "expanded" in layout.name:
        return  # keys that are all alike: see test_random.py
    dout = case.flow(device, rng)[0]
    assert_gradients_match(bwd(layout.make(dout), q, k, v, causal), dout, q, k, v, causal)


@pytest.mark.parametrize(
    ("dtype", "softcap", "kernel"),
    [
        (torch.bfloat16, None, "bwd_kernel"),
        (torch.float16, None, "bwd_keys_kernel"),
        (torch.bfloat16, 30.0, "bwd_keys_kernel"),
    ],
)
@pytest.mark.parametrize("head_dims", [(192, 128), (136, 72)], ids=str)
def test_plan_of_the_sm90_backward(
    head_dims: tuple[int, int], dtype: torch.dtype, softcap: float | None, kernel: str, rng: torch.Generator
) -> None:
    if not any(entry["file"] == "sm90_bwd_d192_128.cu" for entry in load()["files"]):
        pytest.skip("this build has no sm90 backward for 192 and 128")
    case = Case(head_dims[0], 300, 200, dtype=dtype, heads_q=4, head_dim_v=head_dims[1])
    made = backward_plan(*case.inputs("cpu", rng), capability=90, softcap=softcap)
    assert (made["backend"], made["kernel"]) == ("sm90", kernel)
    assert (made["kernel_head_dim"], made["kernel_head_dim_v"]) == (192, 128)
    sums = 2 * 4 * 320 * 192 * 4  # of dq, in float32: 300 rows are 5 tiles of 64
    five_products = kernel == "bwd_kernel"
    assert (made["block_m"], made["block_n"]) == (64, 128 if five_products else 64)
    assert (made["workspace_bytes"] >= sums) is five_products
    assert made["smem_bytes"] <= 227 * 1024
    assert any("Deterministic in either mode" in reason for reason in made["reasons"]) is not five_products


def test_empty() -> None:
    for shape in ((0, 2, 5), (2, 0, 5), (2, 2, 0)):
        q, k, v = torch.randn(*shape, 16), torch.randn(*shape[:2], 7, 16), torch.randn(*shape[:2], 7, 8)
        out, lse = flash_cute.fwd(q, k, v)
        assert out.shape == (*shape, 8) and lse.shape == shape
        gradients = flash_cute.bwd(out, q, k, v, out, lse)
        assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
    q, v = torch.randn(2, 2, 5, 16), torch.randn(2, 2, 0, 8)
    out, lse = flash_cute.fwd(q, q[:, :, :0], v)
    assert out.shape == (2, 2, 5, 8) and (out == 0).all() and (lse == -torch.inf).all()


def test_flops(rng: torch.Generator) -> None:
    """A product over D and one over Dv; backward three and two."""
    inputs = Case(16, 5, 7, dtype=torch.float32, head_dim_v=24).inputs("cpu", rng)
    with FlopCounterMode(display=False) as counted:
        out = flash_cute.attention(*(x.requires_grad_() for x in inputs))
        forward = counted.get_total_flops()
        out.sum().backward()
    assert forward == 2 * 2 * 2 * 5 * 7 * (16 + 24)
    assert counted.get_total_flops() - forward == 2 * 2 * 2 * 5 * 7 * (3 * 16 + 2 * 24)
