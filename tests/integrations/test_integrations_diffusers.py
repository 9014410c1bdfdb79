"""flash_cute as a backend of diffusers' attention dispatcher: the real package, beside its native backend."""

from __future__ import annotations

import copy
import doctest
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from numerics import assert_gradients_match, assert_matches, same_bits
from packages import need

from flash_cute.integrations import diffusers as ours


@pytest.fixture
def dispatch() -> Iterator[Any]:
    """diffusers' module, with our backend; its active backend is as it was, afterwards."""
    need("diffusers")
    import diffusers.models.attention_dispatch as module

    ours.register()
    before = module._AttentionBackendRegistry._active_backend
    yield module
    module._AttentionBackendRegistry.set_active_backend(before)


@pytest.fixture
def calls(dispatch: Any, monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The queries' shapes of the calls that reach us."""
    shapes: list[torch.Size] = []

    def counted(**options: Any) -> Any:
        shapes.append(options["query"].shape)
        return ours.attention(**options)

    backends = dispatch._AttentionBackendRegistry._backends
    monkeypatch.setitem(backends, dispatch.AttentionBackendName("flash_cute"), counted)
    return shapes


def _flux(rng: torch.Generator) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    from diffusers import FluxTransformer2DModel

    config = {"patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16}
    dims = {
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "axes_dims_rope": [4, 4, 8],
    }
    shapes = {"hidden_states": (2, 16, 4), "encoder_hidden_states": (2, 6, 32), "pooled_projections": (2, 32)}
    inputs = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    ids = {name: torch.randn(n, 3, generator=rng) for name, n in (("img_ids", 16), ("txt_ids", 6))}
    return FluxTransformer2DModel(**config, **dims), {**inputs, **ids, "timestep": torch.tensor([0.3, 1.0])}


def _wan(rng: torch.Generator) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    from diffusers import WanTransformer3DModel

    config = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 16}
    dims = {"freq_dim": 32, "ffn_dim": 32, "num_layers": 2, "rope_max_seq_len": 32}
    shapes = {"hidden_states": (2, 4, 2, 8, 8), "encoder_hidden_states": (2, 5, 16)}
    inputs = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    return WanTransformer3DModel(**config, **dims), {**inputs, "timestep": torch.tensor([3, 500])}


MODELS = {"flux": (_flux, 2), "wan": (_wan, 4)}  # how to make one, and how often it attends


def _run(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The result, and its gradients of all parameters."""
    out = model(**inputs, return_dict=False)[0]
    parameters = [x for x in model.parameters() if x.requires_grad]
    gradients = torch.autograd.grad(out.square().sum(), parameters, allow_unused=True)
    return [out.detach(), *(x for x in gradients if x is not None)]


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, dispatch: Any, calls: list[torch.Size], rng: torch.Generator, seed: int) -> None:
    make, count = MODELS[name]
    torch.manual_seed(seed)
    model, inputs = make(rng)
    for x in model.parameters():
        torch.nn.init.normal_(x, std=0.2)  # what is left out at first (gates are 0) would hide the attention
    expected = _run(model, inputs)
    assert not calls and len(expected) > 20
    with dispatch.attention_backend("flash_cute"):
        given = _run(model, inputs)
    assert len(calls) == count
    model.set_attention_backend("flash_cute")
    also = _run(model, inputs)
    assert len(calls) == 2 * count
    for results in (given, also):
        for x, y in zip(results, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5 * y.abs().max().item())
    model.reset_attention_backend()
    with dispatch.attention_backend("native"):
        _run(model, inputs)
    assert len(calls) == 2 * count


@pytest.mark.parametrize("masked", [False, True])
def test_compiled(masked: bool, dispatch: Any, rng: torch.Generator) -> None:
    """In one graph, as models compile it."""
    mask = torch.rand(6, 9, generator=rng) < 0.7 if masked else None
    q, k, v = (torch.randn(1, n, 2, 8, generator=rng).requires_grad_() for n in (6, 9, 9))

    def attend(*tensors: torch.Tensor) -> Any:
        backend = dispatch.AttentionBackendName("flash_cute")
        return dispatch.dispatch_attention_fn(*tensors, attn_mask=mask, scale=0.5, backend=backend)

    out, expected = (f(q, k, v) for f in (torch.compile(attend, fullgraph=True, backend="aot_eager"), attend))
    torch.testing.assert_close(out, expected)
    given, right = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, expected))
    torch.testing.assert_close(given, right)


@pytest.mark.parametrize(("is_causal", "rows"), [(False, 20), (True, 20), (True, 33)])
def test_arguments(is_causal: bool, rows: int, dispatch: Any, device: str, rng: torch.Generator) -> None:
    """20 rows that see 33 keys tell the causal mask's alignment, which is the native backend's."""
    dtype = torch.float16 if device == "cuda" else torch.float32
    shapes = ((2, rows, 4, 16), (2, 33, 2, 16), (2, 33, 2, 24))
    q, k, v = (torch.randn(shape, generator=rng).to(device, dtype).requires_grad_() for shape in shapes)
    options = {"is_causal": is_causal, "scale": 0.3, "enable_gqa": True}
    with dispatch.attention_backend("flash_cute"):
        out, lse = dispatch.dispatch_attention_fn(q, k, v, **options, attention_kwargs={"return_lse": True})
        with torch.no_grad():
            alone = dispatch.dispatch_attention_fn(q, k, v, **options)
    assert same_bits((alone,), (out,))
    causal = "top_left" if is_causal else False
    heads_first = tuple(x.detach().transpose(1, 2) for x in (q, k, v))
    assert_matches(out.detach().transpose(1, 2), lse.detach(), *heads_first, causal, 0.3)
    dout = torch.randn(out.shape, generator=rng).to(out)
    gradients = tuple(x.transpose(1, 2) for x in torch.autograd.grad(out, (q, k, v), dout))
    assert_gradients_match(gradients, dout.transpose(1, 2), *heads_first, causal, 0.3)


SHAPES = ((2, 33), (2, 1, 1, 33), (20, 33), (2, 1, 20, 33), (2, 2, 20, 33), (1, 1, 20, 33))


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_masks(shape: tuple[int, ...], kind: str, dispatch: Any, device: str, rng: torch.Generator) -> None:
    """As the native backend reads them: of two dims, batch and keys or else rows and keys."""
    dtype = torch.float16 if device == "cuda" else torch.float32
    q, k, v = (torch.randn((2, n, 2, 16), generator=rng).to(device, dtype).requires_grad_() for n in (20, 33, 33))
    seen = torch.rand(shape, generator=rng).to(device) < 0.6
    seen[..., 0] = True
    mask = seen if kind == "bool" else torch.zeros(shape, device=device, dtype=dtype).masked_fill(~seen, -torch.inf)
    results = []
    for backend in ("flash_cute", "native"):
        with dispatch.attention_backend(backend):
            out = dispatch.dispatch_attention_fn(q, k, v, attn_mask=mask)
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    tolerance = {"atol": 2e-2, "rtol": 1e-2} if device == "cuda" else {"atol": 1e-5, "rtol": 1e-5}
    for given, expected in zip(*results, strict=True):
        torch.testing.assert_close(given, expected, **tolerance)


X = torch.zeros(1, 4, 2, 8)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bias": ({"attn_mask": torch.full((4, 4), 0.5)}, "attn_mask: expected bool, or 0 and -inf, got a bias"),
    "mask": ({"attn_mask": torch.ones(4, 4).bool(), "is_causal": True}, "is_causal: expected False beside attn_mask"),
    "shape": ({"attn_mask": torch.ones(3, 4, 4).bool()}, "attn_mask: expected leading dims of query and key"),
    "rows": ({"attn_mask": torch.ones(1, 4).bool().expand(3, 4)}, "attn_mask: expected 1 or 4 rows and 1 or 4 keys"),
    "keys": ({"attn_mask": torch.ones(4, 1).bool().expand(4, 3)}, "attn_mask: expected 1 or 4 rows and 1 or 4 keys"),
    "dropout": ({"dropout_p": 0.1}, "dropout_p: expected 0, .*, got 0.1"),
    "parallel": ({"parallel_config": object()}, "_parallel_config: expected None, .*, got one"),
    "unknown": ({"attention_kwargs": {"window_size": (1, 1)}}, "window_size: expected no such argument"),
    "heads": ({"key": X[:, :, :1], "value": X[:, :, :1]}, "enable_gqa: expected True .*, got False"),
    "dims": ({"query": X[0]}, r"query, key, value: expected 4 dims each, .*, got \(4, 2, 8\)"),
    "scale": ({"scale": -1.0}, "scale: expected a finite number above 0, got -1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, dispatch: Any) -> None:
    options, message = REFUSED[name]
    call = {"query": X, "key": X, "value": X, **options}
    with pytest.raises(ValueError, match=f"^flash_cute: {message}"), dispatch.attention_backend("flash_cute"):
        dispatch.dispatch_attention_fn(**call)


def test_registered_once(dispatch: Any) -> None:
    """As if the enumeration had been written with it."""
    names = dispatch.AttentionBackendName
    ours.register()
    member = names("flash_cute")
    assert names.FLASH_CUTE is names["FLASH_CUTE"] is member is copy.deepcopy(member)
    assert pickle.loads(pickle.dumps(member)) is member and isinstance(member, names) and member == "flash_cute"
    assert [x.value for x in names].count("flash_cute") == 1 and len(names) == len(set(names))
    assert dispatch._AttentionBackendRegistry.list_backends().count(member) == 1


def _unet() -> torch.nn.Module:
    from diffusers import UNet2DConditionModel

    blocks = {"down_block_types": ["CrossAttnDownBlock2D"], "up_block_types": ["CrossAttnUpBlock2D"]}
    sizes = {"block_out_channels": [8], "layers_per_block": 1, "norm_num_groups": 2, "cross_attention_dim": 8}
    return UNet2DConditionModel(**blocks, **sizes, attention_head_dim=4)


def test_models_without_the_dispatcher(dispatch: Any) -> None:
    """What diffusers does with any backend, nothing, is refused of ours, before the process's backend is changed."""
    model, active = _unet(), dispatch._AttentionBackendRegistry._active_backend
    message = r"flash_cute: backend: expected .* dispatcher, got UNet2DConditionModel, whose AttnProcessor2_0 does not"
    for name in ("flash_cute", "FLASH_CUTE", dispatch.AttentionBackendName("flash_cute")):
        with pytest.raises(ValueError, match=message):
            model.set_attention_backend(name)
    assert dispatch._AttentionBackendRegistry._active_backend is active
    model.set_attention_backend("native")


def test_a_dispatcher_without_a_backend_of_the_layer(
    dispatch: Any, calls: list[torch.Size], rng: torch.Generator
) -> None:
    """Cosmos's layers have no place for a backend, and take the process's, which is set too."""
    from diffusers import ModelMixin
    from diffusers.models.attention_processor import Attention
    from diffusers.models.transformers.transformer_cosmos import CosmosAttnProcessor2_0

    class Model(ModelMixin):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Attention(16, heads=2, dim_head=8, qk_norm="rms_norm", processor=CosmosAttnProcessor2_0())

    model, x = Model(), torch.randn(1, 5, 16, generator=rng)
    expected = model.layer(x)
    model.set_attention_backend("flash_cute")
    torch.testing.assert_close(model.layer(x), expected)
    assert len(calls) == 1


def test_another_registry(dispatch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dispatch._AttentionBackendRegistry, "_supported_arg_names")
    with pytest.raises(ImportError, match=r"flash_cute: diffusers: version [\d.]+ keeps its attention backends"):
        ours.register()


def test_examples() -> None:
    results = doctest.testmod(ours, extraglobs={"torch": torch})
    assert (results.attempted > 1, results.failed) == (True, 0)
