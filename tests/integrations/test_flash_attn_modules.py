"""flash_cute in the place of flash-attn: its modules beside the functions, and what is said of those it has not."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from numerics import same_bits
from packed import offsets

from flash_cute.integrations import _bert_padding as padding
from flash_cute.integrations import _flash_attn_modules, _rotary

ROTARY = "interleaved=False, inplace=False"
SIGNATURES = {
    padding: {
        "index_first_axis": "input, indices",
        "index_first_axis_residual": "input, indices",
        "index_put_first_axis": "values, indices, first_axis_dim",
        "pad_input": "hidden_states, indices, batch, seqlen",
        "unpad_input": "hidden_states, attention_mask, unused_mask=None",
        "unpad_input_for_concatenated_sequences": "hidden_states, attention_mask_in_length",
    },
    _rotary: {
        "apply_rotary": f"x, cos, sin, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None, {ROTARY}, conjugate=False",
        "apply_rotary_emb": f"x, cos, sin, {ROTARY}, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None",
        "apply_rotary_emb_func": f"x, cos, sin, {ROTARY}, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None",
        "apply_rotary_emb_kv_": "kv, cos, sin, interleaved=False, seqlen_offsets=0",
        "apply_rotary_emb_qkv_": (
            "qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, num_heads_q=None"
        ),
        "apply_rotary_emb_torch": "x, cos, sin, interleaved=False",
        "rotate_half": "x, interleaved=False",
        "RotaryEmbedding": "dim, base=10000.0, interleaved=False, scale_base=None, device=None",
    },
}


@pytest.mark.parametrize("module", SIGNATURES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_signatures_and_examples(module: Any) -> None:
    given = {}
    for name in module.__all__:
        bare = [x.replace(annotation=x.empty) for x in inspect.signature(getattr(module, name)).parameters.values()]
        given[name] = str(inspect.Signature(bare))[1:-1]
    assert given == SIGNATURES[module]
    results = doctest.testmod(module, extraglobs={"torch": torch})
    assert (results.attempted > 4, results.failed) == (True, 0)


MASKS = {
    "right": [[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]],
    "inner": [[0, 1, 0, 1], [1, 0, 0, 0], [0, 1, 1, 1]],
    "nothing": [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]],
}


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("name", MASKS)
def test_unpadding(name: str, dtype: torch.dtype, device: str, rng: torch.Generator) -> None:
    """Against a loop over the tokens, there and back, with gradients."""
    mask = torch.tensor(MASKS[name])
    x = torch.randn(3, 4, 2, 5, generator=rng, dtype=torch.float64).to(device).requires_grad_()
    rows, indices, bounds, longest, used = padding.unpad_input(x, mask.to(device, dtype))
    where = [(b, i) for b in range(3) for i in range(4) if mask[b, i]]
    expected = torch.stack([x[b, i] for b, i in where]) if where else x.new_empty(0, 2, 5)
    assert same_bits((rows,), (expected,)) and indices.tolist() == [4 * b + i for b, i in where]
    lengths = mask.sum(1)
    assert (bounds.dtype, bounds.tolist()) == (torch.int32, [0, *lengths.cumsum(0).tolist()])
    assert longest == int(lengths.max()) and used.tolist() == lengths.tolist()
    seen = mask.bool().to(device)[:, :, None, None]
    for dtype_of_indices in (torch.int32, torch.int64):
        back = padding.pad_input(rows, indices.to(dtype_of_indices), 3, 4)
        assert same_bits((back,), (x.masked_fill(~seen, 0),))
    flow = torch.randn(back.shape, generator=rng, dtype=torch.float64).to(device)
    assert same_bits(torch.autograd.grad(back, x, flow), (flow.masked_fill(~seen, 0),))


def test_unpadding_what_is_not_used(rng: torch.Generator) -> None:
    x = torch.randn(2, 4, 3, generator=rng)
    mask, unused = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]]), torch.tensor([[0, 1, 1, 0], [0, 1, 1, 1]])
    rows, indices, bounds, longest, used = padding.unpad_input(x, mask, unused)
    assert indices.tolist() == [0, 1, 2, 4, 5, 6, 7] and same_bits((rows,), (x.flatten(0, 1)[indices],))
    assert (bounds.tolist(), longest, used.tolist()) == ([0, 3, 7], 4, [2, 1])


def test_unpadding_several_sequences_a_row(rng: torch.Generator) -> None:
    x = torch.randn(3, 6, 2, generator=rng).requires_grad_()
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0], [1, 1, 2, 0, 0, 0]])
    rows, indices, bounds, longest = padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert indices.tolist() == [*range(5), *range(6, 12), *range(12, 16)]
    assert (bounds.tolist(), bounds.dtype, longest) == ([0, 2, 5, 11, 12, 13, 15], torch.int32, 6)
    seen = torch.arange(6) < lengths.sum(1)[:, None]
    assert same_bits((padding.pad_input(rows, indices, 3, 6),), (x.masked_fill(~seen[..., None], 0),))


def test_rows_by_index(rng: torch.Generator) -> None:
    """Also of a row that is taken twice, and with a residual beside."""
    x = torch.randn(5, 3, generator=rng, dtype=torch.float64).requires_grad_()
    indices = torch.tensor([4, 0, 4])
    torch.autograd.gradcheck(lambda x: padding.index_first_axis(x, indices), x)
    torch.autograd.gradcheck(lambda x: padding.index_first_axis_residual(x, indices), x)
    torch.autograd.gradcheck(lambda x: padding.index_put_first_axis(x, torch.tensor([6, 0, 3, 2, 5]), 7), x)


def _table(positions: int, pairs: int, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.randn(positions, pairs, generator=rng, dtype=torch.float64)
    return angles.cos(), angles.sin()


def _turned(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, conjugate: bool = False
) -> torch.Tensor:
    """x `(N, H, D)` float64, row i by the table's row i: as complex numbers."""
    pairs = cos.shape[1]
    rotated = x[..., : 2 * pairs]
    parts = rotated.unflatten(-1, (pairs, 2)) if interleaved else rotated.unflatten(-1, (2, pairs)).transpose(-1, -2)
    turned = torch.view_as_complex(parts.contiguous()) * torch.complex(cos, -sin if conjugate else sin)[:, None]
    parts = torch.view_as_real(turned)
    back = parts.flatten(-2) if interleaved else parts.transpose(-1, -2).flatten(-2)
    return torch.cat((back, x[..., 2 * pairs :]), -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("conjugate", [False, True])
@pytest.mark.parametrize("offset", [0, 3, "tensor"])
def test_rotary(interleaved: bool, conjugate: bool, offset: Any, device: str, rng: torch.Generator) -> None:
    """Of part of the dims, in float64 and float16, anew and in place; rows past the table stay."""
    x = torch.randn(2, 6, 3, 20, generator=rng, dtype=torch.float64)
    cos, sin = _table(9, 8, rng)
    firsts = [1, 5] if offset == "tensor" else [offset] * 2
    offsets_given = torch.tensor(firsts, device=device) if offset == "tensor" else offset
    expected = x.clone()
    for b, first in enumerate(firsts):
        rows = min(6, 9 - first)
        table = (cos[first : first + rows], sin[first : first + rows])
        expected[b, :rows] = _turned(x[b, :rows], *table, interleaved, conjugate)
    options = {"seqlen_offsets": offsets_given, "interleaved": interleaved, "conjugate": conjugate}
    for dtype, bound in ((torch.float64, 1e-14), (torch.float16, 4e-3)):
        given, table = x.to(device, dtype), (cos.to(device, dtype), sin.to(device, dtype))
        before = given.clone()
        out = _rotary.apply_rotary(given, *table, **options)
        torch.testing.assert_close(out.double().cpu(), expected, rtol=bound, atol=bound)
        assert out.dtype == dtype and same_bits((given,), (before,))
        place = given.transpose(1, 2).contiguous().transpose(1, 2)  # written to through its strides
        assert _rotary.apply_rotary(place, *table, **options, inplace=True) is place and same_bits((place,), (out,))


@pytest.mark.parametrize("offset", [0, 2, "tensor"])
def test_rotary_of_packed_sequences(offset: Any, device: str, rng: torch.Generator) -> None:
    """An empty one among them, and rows before the first and behind the last, which stay."""
    x = torch.randn(15, 2, 16, generator=rng, dtype=torch.float64)
    cos, sin = _table(8, 8, rng)
    lengths = (4, 0, 5, 2)
    bounds = offsets(lengths, device, first=2)
    firsts = [1, 7, 3, 0] if offset == "tensor" else [offset] * 4
    given = torch.tensor(firsts, device=device, dtype=torch.int32) if offset == "tensor" else offset
    expected, begin = x.clone(), 2
    for first, length in zip(firsts, lengths, strict=True):
        table = (cos[first : first + length], sin[first : first + length])
        if length:
            expected[begin : begin + length] = _turned(x[begin : begin + length], *table, False)
        begin += length
    arguments = (x.to(device), cos.to(device), sin.to(device))
    out = _rotary.apply_rotary(*arguments, seqlen_offsets=given, cu_seqlens=bounds, max_seqlen=5)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-14, atol=1e-14)


def test_rotary_gradients(rng: torch.Generator) -> None:
    """Also in place, behind what computes x, as models have it."""
    x = torch.randn(1, 4, 2, 10, generator=rng, dtype=torch.float64).requires_grad_()
    cos, sin = (x.requires_grad_() for x in _table(6, 4, rng))
    for inplace in (False, True):
        torch.autograd.gradcheck(
            lambda x, cos, sin, inplace=inplace: _rotary.apply_rotary_emb(x * 1, cos, sin, True, inplace, 2),
            (x, cos, sin),
        )
    qkv = torch.randn(1, 4, 3, 2, 8, generator=rng, dtype=torch.float64).requires_grad_()
    table = [x.detach() for x in (cos, sin)]
    # A leaf is written to as well, and its gradient is by what it was.
    leaf = qkv.detach().clone().requires_grad_()
    out, flow = _rotary.apply_rotary_emb_qkv_(leaf, *table), torch.randn_like(qkv)
    assert out.data_ptr() == leaf.data_ptr() and same_bits(
        (out, leaf), (_rotary.apply_rotary_emb_qkv_(qkv * 1, *table),) * 2
    )
    gradients = torch.autograd.grad(out, leaf, flow)
    assert same_bits(gradients, torch.autograd.grad(_rotary.apply_rotary_emb_qkv_(qkv * 1, *table), qkv, flow))
    torch.autograd.gradcheck(lambda x: _rotary.apply_rotary_emb_qkv_(x * 1, *table), qkv)
    torch.autograd.gradcheck(lambda x: _rotary.apply_rotary_emb_kv_(x * 1, *table), qkv[:, :, 1:])


def test_rotary_compiled(rng: torch.Generator) -> None:
    """In place, in one graph with what computes qkv, and its gradients."""
    x = torch.randn(1, 4, 3, 2, 8, generator=rng).requires_grad_()
    cos, sin = (x.float() for x in _table(6, 4, rng))

    def turn(x: torch.Tensor) -> torch.Tensor:
        return _rotary.apply_rotary_emb_qkv_(x * 2, cos, sin, seqlen_offsets=1)

    def turn_leaf(x: torch.Tensor) -> torch.Tensor:
        return _rotary.apply_rotary_emb_qkv_(x, cos, sin, seqlen_offsets=1)

    for function in (turn, turn_leaf):
        leaf, another = (x.detach().clone().requires_grad_() for _ in range(2))
        out, expected = torch.compile(function, fullgraph=True, backend="aot_eager")(leaf), function(another)
        torch.testing.assert_close((out, leaf), (expected, another))
        flow = torch.randn(out.shape, generator=rng)
        given, right = (torch.autograd.grad(y, z, flow) for y, z in ((out, leaf), (expected, another)))
        torch.testing.assert_close(given, right)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_in_torch_and_in_one_tensor(interleaved: bool, rng: torch.Generator) -> None:
    x = torch.randn(2, 6, 8, 20, generator=rng, dtype=torch.float64)
    cos, sin, cos_k, sin_k = *_table(6, 8, rng), *_table(6, 8, rng)
    by_q, by_k = (
        torch.stack([_turned(part, *table, interleaved) for part in x]) for table in ((cos, sin), (cos_k, sin_k))
    )
    given = _rotary.apply_rotary_emb_torch(x, cos, sin, interleaved)
    torch.testing.assert_close(given, by_q, rtol=1e-14, atol=1e-14)
    grouped = _rotary.apply_rotary_emb_qkv_(x.clone(), cos, sin, cos_k, sin_k, interleaved, num_heads_q=4)
    expected = torch.cat((by_q[:, :, :4], by_k[:, :, 4:6], x[:, :, 6:]), 2)
    torch.testing.assert_close(grouped, expected, rtol=1e-14, atol=1e-14)
    stacked = torch.stack((x, x, x), 2)
    out = _rotary.apply_rotary_emb_qkv_(stacked, cos, sin, interleaved=interleaved)
    assert out is stacked
    torch.testing.assert_close(out, torch.stack((by_q, by_q, x), 2), rtol=1e-14, atol=1e-14)
    out = _rotary.apply_rotary_emb_kv_(torch.stack((x, x), 2), cos, sin, interleaved)
    torch.testing.assert_close(out, torch.stack((by_q, x), 2), rtol=1e-14, atol=1e-14)


def test_rotary_embedding(rng: torch.Generator) -> None:
    """The angles are position / base^(2i / dim); the table grows; bfloat16 weights do not round positions."""
    x = torch.randn(2, 300, 3, 2, 24, generator=rng, dtype=torch.float64)
    angles = torch.outer(torch.arange(310.0), 1000.0 ** -(torch.arange(8) / 8)).double()
    rotary = _rotary.RotaryEmbedding(16, base=1000.0).bfloat16()
    for rows, first in ((20, 0), (300, 10)):
        qkv = x[:, :rows].float()
        table = (angles[first : first + rows].cos(), angles[first : first + rows].sin())
        expected = x[:, :rows].clone()
        for part in (0, 1):
            expected[:, :, part] = torch.stack([_turned(item, *table, False) for item in x[:, :rows, part]])
        both = rotary(qkv[:, :, 0].clone(), qkv[:, :, 1:].clone(), seqlen_offset=first)
        out = rotary(qkv.clone(), seqlen_offset=first)
        torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
        assert same_bits(both, (out[:, :, 0], out[:, :, 1:]))
    lengths = torch.tensor([3, 7])
    shifted = rotary(x[:, :9].float(), seqlen_offset=lengths, max_seqlen=20)
    apart = [rotary(x[i : i + 1, :9].float(), seqlen_offset=int(n)) for i, n in enumerate(lengths)]
    assert same_bits((shifted,), (torch.cat(apart),))
    with pytest.raises(ValueError, match="flash_cute: max_seqlen: expected an int beside a tensor seqlen_offset"):
        _rotary.RotaryEmbedding(16)(x[:, :9].float(), seqlen_offset=lengths)


def test_rotary_embedding_with_a_scale(rng: torch.Generator) -> None:
    """XPos: a score depends on the distance alone, and is multiplied by scale^(distance / scale_base)."""
    rotary = _rotary.RotaryEmbedding(8, scale_base=16)
    q, k = (torch.randn(8, generator=rng).expand(1, 12, 1, 8) for _ in range(2))
    turned_q, turned_kv = rotary(q.clone(), torch.stack((k, k), 2))
    scores = (turned_q[0, :, 0] @ turned_kv[0, :, 0, 0].T).double()
    scale = (torch.arange(0, 8, 2) + 0.4 * 8) / (1.4 * 8)
    complex_q, complex_k = (torch.complex(x[0, 0, 0, :4], x[0, 0, 0, 4:]) for x in (q, k))
    for i, j in ((5, 5), (7, 2), (11, 0), (3, 9)):
        angle = (i - j) * 10000.0 ** -(torch.arange(4) / 4)
        products = complex_q * torch.polar(scale ** ((i - j) / 16), angle) * complex_k.conj()
        torch.testing.assert_close(scores[i, j].item(), products.real.sum().item(), rtol=1e-4, atol=1e-4)
    assert same_bits((turned_kv[:, :, 1],), (k,))


ROWS = torch.zeros(1, 4, 2, 8)
TABLE = torch.zeros(6, 4)
REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: _rotary.apply_rotary(ROWS[0], TABLE, TABLE), r"x: expected \(B, N, H, D\), got \(4, 2, 8\)"),
    (lambda: _rotary.apply_rotary(ROWS, TABLE, TABLE, cu_seqlens=offsets([4])), "x: expected .T, H, D. beside cu_seq"),
    (lambda: _rotary.apply_rotary(ROWS, TABLE, TABLE[:5]), "cos, sin: expected"),
    (lambda: _rotary.apply_rotary(ROWS[..., :6], TABLE, TABLE), "cos, sin: expected .* at most D = 6"),
    (lambda: _rotary.apply_rotary(ROWS, TABLE, TABLE, 3), "seqlen_offsets: expected positions within the 6 .* 3 to 6"),
    (lambda: _rotary.apply_rotary(ROWS, TABLE, TABLE, -1), "seqlen_offsets: expected positions .* -1 to 2"),
    (lambda: _rotary.apply_rotary_emb_qkv_(ROWS, TABLE, TABLE), r"qkv: expected \(B, N, 3, H, D\), or"),
    (lambda: _rotary.apply_rotary_emb_kv_(ROWS, TABLE, TABLE), r"kv: expected \(B, N, 2, H, D\)"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^flash_cute: {message}"):
        call()


ABSENT = """
import importlib.metadata, importlib.util, pickle, sys
import flash_cute
from flash_cute.integrations.flash_attn import install, uninstall
finders = list(sys.meta_path)
install()
install()
import flash_attn, flash_attn.bert_padding, flash_attn.layers.rotary, flash_attn_2_cuda, flash_attn_interface
from flash_attn.ops.triton.rotary import apply_rotary
from flash_attn import flash_attn_interface as inner
from flash_attn import *
assert flash_attn.layers.rotary.apply_rotary is apply_rotary and flash_attn.flash_attn_func is flash_attn_func
assert inner.flash_attn_gpu is flash_attn_2_cuda and callable(inner._wrapped_flash_attn_varlen_backward)
# The version is one that can be taken apart, and flash_cute's stands beside it.
assert tuple(int(x) for x in flash_attn.__version__.split(".")) == (2, 8, 3)
for name in ("flash_attn", "flash-attn", "Flash_Attn"):
    assert importlib.metadata.version(name) == "2.8.3"
assert "flash_cute" in importlib.metadata.metadata("flash_attn")["Summary"]
assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash_attn"]
assert importlib.metadata.version("torch") and not list(importlib.metadata.distributions(path=[]))
assert importlib.metadata.entry_points() and importlib.metadata.distribution("flash_attn").files is None
for module in (flash_attn, inner, flash_attn_interface, flash_attn_2_cuda):
    assert module.__flash_cute__ == flash_cute.__version__
    assert f"(flash_cute {flash_cute.__version__})" in repr(module) and "uninstall()" in module.__doc__
# Who asks whether there is a module is told so.
assert importlib.util.find_spec("flash_attn") and not importlib.util.find_spec("flash_attn.cute")
assert not hasattr(flash_attn, "install") and not hasattr(inner, "flash_attn_cuda")
assert getattr(flash_attn, "nothing", 5) == 5
for code in (
    "import flash_attn.cute", "from flash_attn.cute import flash_attn_func", "from flash_attn import nothing",
    "from flash_attn.flash_attn_interface import FlashAttnFunc", "from flash_attn.ops.triton.layer_norm import x",
    "from flash_attn_interface import _flash_attn_forward", "import flash_attn.losses.cross_entropy",
    "flash_attn.nothing", "flash_attn_2_cuda.nothing",
):
    try:
        exec(code)
    except (ImportError, AttributeError) as error:
        print(type(error).__name__, error)
uninstall()
assert sys.meta_path == finders
for name in ("flash_attn", "flash_attn_interface", "flash_attn_2_cuda"):
    assert importlib.util.find_spec(name) is None
try:
    importlib.metadata.version("flash_attn")
except importlib.metadata.PackageNotFoundError:
    print("gone")
uninstall()
install()
import flash_attn
assert flash_attn.flash_attn_func is flash_attn_func
"""
SAID = (
    "flash_cute: {}: flash_cute, which has no such name, stands in the place of flash-attn in this process. "
    "flash_cute.integrations.flash_attn.uninstall() takes it away again."
)


@pytest.mark.skipif(_flash_attn_modules._is_installed("flash_attn"), reason="a real flash_attn is installed")
def test_what_is_absent(python: Callable[..., str]) -> None:
    absent = ["flash_attn.cute", "flash_attn.cute", "flash_attn.nothing"]
    absent += ["flash_attn.flash_attn_interface.FlashAttnFunc", "flash_attn.ops.triton.layer_norm"]
    absent += ["flash_attn_interface._flash_attn_forward", "flash_attn.losses"]
    expected = [f"ModuleNotFoundError {SAID.format(name)}" for name in absent]
    expected += [f"AttributeError {SAID.format(name)}" for name in ("flash_attn.nothing", "flash_attn_2_cuda.nothing")]
    assert python(ABSENT).splitlines() == [*expected, "gone"]
