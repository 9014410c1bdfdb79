"""The plug-in of vLLM on the CPU, in vLLM's own classes: its attention layer, metadata, specs and choice of a backend.

vLLM is no requirement of the tests: with its wheel at hand (0.26.0, nothing compiled is used) they run.

Longer than 400 lines: all tests share a layer with its cache and batch.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from numerics import assert_matches, same_bits
from repository import ROOT

PLUGIN = ROOT / "plugins/vllm"
HEADS, HEADS_KV, DIM, BLOCK, BLOCKS = 4, 2, 32, 16, 24
# Of each request: tokens before, and new ones. A prompt, a step, a step of a long one, a part of a prompt, none.
REQUESTS = ((0, 37), (20, 1), (75, 1), (32, 19), (0, 0))
TOKENS = sum(new for _, new in REQUESTS)


def test_the_package() -> None:
    """Its versions are pinned, and its entry point is what vLLM looks for."""
    text = (PLUGIN / "pyproject.toml").read_text()
    assert re.search(r'dependencies = \["flash_cute>=0\.\d,<0\.\d", "vllm==\d+\.\d+\.\d+"\]', text)
    assert '[project.entry-points."vllm.general_plugins"]\nflash_cute = "flash_cute_vllm:register"' in text


@pytest.fixture(scope="module")
def vllm() -> Iterator[Any]:
    """vLLM, with the plug-in registered."""
    pytest.importorskip("vllm", reason="vllm is not installed")
    sys.path.insert(0, str(PLUGIN / "src"))
    try:
        importlib.import_module("flash_cute_vllm").register()
        yield importlib.import_module("vllm")
    finally:
        sys.path.remove(str(PLUGIN / "src"))


@pytest.fixture
def backend(vllm: Any) -> Any:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum.CUSTOM.get_class()


@pytest.fixture
def config(vllm: Any) -> Iterator[Any]:
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config

    config = VllmConfig(device_config=DeviceConfig(device="cpu"))
    with set_current_vllm_config(config):
        yield config


class Step:
    """A layer, its cache, and a batch: NaN wherever no request has a token."""

    def __init__(self, config: Any, rng: torch.Generator, layout: str = "NHD", **options: Any) -> None:
        from vllm.model_executor.layers.attention import Attention
        from vllm.v1.attention.backend import CommonAttentionMetadata
        from vllm.v1.attention.backends import utils
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        backend = AttentionBackendEnum.CUSTOM.get_class()
        config.cache_config.cache_dtype = options.pop("cache_dtype", "auto")
        config.compilation_config.static_forward_context.clear()
        sizes = {"num_kv_heads": HEADS_KV, "cache_config": config.cache_config, "prefix": "model.0"}
        self.config = config
        self.layer = Attention(HEADS, DIM, DIM**-0.5, attn_backend=backend, **sizes, **options)
        self.layer.process_weights_after_loading(torch.float16)
        self.spec = self.layer.get_kv_cache_spec(config)
        utils.set_kv_cache_layout(layout)
        try:
            assert backend.indexes_kv_by_block_stride()
            shape = backend.get_kv_cache_shape(BLOCKS, BLOCK, HEADS_KV, DIM)
            raw = torch.full((BLOCKS * self.spec.page_size_bytes,), -1, dtype=torch.int8)  # NaN in every dtype
            order = backend.get_kv_cache_stride_order()
            in_memory = raw.view(self.spec.dtype).view([shape[i] for i in order])
            self.cache = in_memory.permute([order.index(i) for i in range(4)])  # as vLLM's worker does
            assert self.cache.shape == shape
        finally:
            utils.set_kv_cache_layout(None)
        self.layer.kv_cache = self.cache
        self.keys, self.values = (torch.randn(5, 128, HEADS_KV, DIM, generator=rng).half() for _ in range(2))
        self.query = torch.randn(TOKENS, HEADS, DIM, generator=rng).half()
        # A request has blocks of its own but for the first two of the third and fourth, which begin alike.
        table = torch.randperm(BLOCKS - 1, generator=rng)[:20].int().view(5, 4) + 1
        table = torch.cat((table, table.new_full((5, 2), 10**6)), 1)  # never read
        table[2, 4] = 0
        self.keys[3, :32], self.values[3, :32], table[3, :2] = self.keys[2, :32], self.values[2, :32], table[2, :2]
        self.table = table
        self.lengths = [before + new for before, new in REQUESTS]
        for b, (before, _) in enumerate(REQUESTS):
            self.write(b, range(before))
        offsets = torch.tensor([0, *(new for _, new in REQUESTS)]).cumsum(0).int()
        slots = [self.slot(b, before + i) for b, (before, new) in enumerate(REQUESTS) for i in range(new)]
        self.common = CommonAttentionMetadata(
            query_start_loc=offsets,
            query_start_loc_cpu=offsets,
            seq_lens=torch.tensor(self.lengths, dtype=torch.int32),
            num_reqs=len(REQUESTS),
            num_actual_tokens=TOKENS,
            max_query_len=37,
            max_seq_len=128,
            block_table_tensor=table,
            slot_mapping=torch.tensor(slots),
        )

    def slot(self, b: int, i: int) -> int:
        return int(self.table[b, i // BLOCK]) * BLOCK + i % BLOCK

    def write(self, b: int, rows: range) -> None:
        """What earlier steps have left in the cache."""
        scales = (self.layer._k_scale, self.layer._v_scale)
        for i in rows:
            block, row = divmod(self.slot(b, i), BLOCK)
            for part, x, scale in zip((slice(DIM), slice(DIM, None)), (self.keys, self.values), scales, strict=True):
                kept = self.stored(x[b, i], scale)
                self.cache[block, :, row, part] = kept if kept.dtype == self.cache.dtype else kept.view(torch.uint8)

    def stored(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        float8 = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}.get(self.layer.kv_cache_dtype)
        return x if float8 is None else (x.float() / scale).to(float8)

    def new(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[b, before : before + new] for b, (before, new) in enumerate(REQUESTS)])

    def run(self, padding: int = 0, common: Any = None, keys: bool = True) -> torch.Tensor:
        """The layer's forward, `(T, Hq, D)`; `padding`: so many tokens of no request behind the others."""
        from vllm.forward_context import set_forward_context

        common = self.common if common is None else common
        builder = self.layer.attn_backend.get_builder_cls()(self.spec, ["model.0"], self.config, torch.device("cpu"))
        tensors = []
        for x in (self.query, self.new(self.keys), self.new(self.values)):
            tensors.append(torch.cat((x, x.new_full((padding, *x.shape[1:]), torch.nan))).flatten(1))
        slots = torch.cat((common.slot_mapping, common.slot_mapping.new_full((padding,), -1)))
        meta = builder.build(0, common.replace(slot_mapping=slots))
        with set_forward_context({"model.0": meta}, self.config, slot_mapping={"model.0": slots}):
            return self.layer(*tensors).view(-1, HEADS, DIM)

    def check(self, out: torch.Tensor, causal: bool = True, **score: Any) -> None:
        for b, (before, new) in enumerate(REQUESTS):
            rows = slice(int(self.common.query_start_loc[b]), int(self.common.query_start_loc[b + 1]))
            tensors = [self.query[rows], self.keys[b, : before + new], self.values[b, : before + new]]
            scales = (torch.ones(()), self.layer._k_scale, self.layer._v_scale)
            q, k, v = (x.transpose(0, 1)[None] for x in tensors)
            k, v = (
                (self.stored(x, s).float() * s).half() if x.numel() else x
                for x, s in zip((k, v), scales[1:], strict=True)
            )
            given = out[rows].transpose(0, 1)[None]
            lse = flash_lse(q, k, causal, **score)
            assert_matches(given, lse, q, k, v, causal, **score)


def flash_lse(q: torch.Tensor, k: torch.Tensor, causal: bool, **score: Any) -> torch.Tensor:
    """The LSE, which vLLM's interface has no place for."""
    import flash_cute

    return flash_cute.fwd(q, k, k, causal, **score)[1]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("padding", [0, 7])
def test_a_mixed_batch(layout: str, padding: int, config: Any, rng: torch.Generator) -> None:
    """Prompts, steps and parts of prompts at once; new tokens are in their slots, and nothing else has changed."""
    step = Step(config, rng, layout)
    expected = step.cache.clone()
    out = step.run(padding)
    step.check(out[:TOKENS])
    assert (out[TOKENS:] == 0).all()
    written, step.cache = step.cache, expected
    for b, (before, new) in enumerate(REQUESTS):
        step.write(b, range(before, before + new))
    assert same_bits((written,), (expected,))


@pytest.mark.parametrize(
    ("options", "score"),
    [
        ({"per_layer_sliding_window": 9}, {"window": (8, 0)}),
        ({"logits_soft_cap": 5.0}, {"softcap": 5.0}),
        ({"alibi_slopes": [0.5, 0.25, 0.1, 0.05]}, {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.05])}),
        ({"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])}, {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])}),
    ],
    ids=["window", "softcap", "alibi", "sinks"],
)
def test_options_of_a_layer(options: Any, score: Any, config: Any, rng: torch.Generator) -> None:
    step = Step(config, rng, **options)
    step.check(step.run(), **score)


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e5m2"])
def test_float8_caches(dtype: str, config: Any, rng: torch.Generator) -> None:
    """New keys are divided by the layer's scales, and a query in 16 bits sees them multiplied."""
    step = Step(config, rng, cache_dtype=dtype)
    assert step.cache.dtype == torch.uint8
    step.layer._k_scale.fill_(0.5)
    step.layer._v_scale.fill_(0.25)
    for b, (before, _) in enumerate(REQUESTS):
        step.write(b, range(before))
    step.check(step.run())


def test_not_causal(config: Any, rng: torch.Generator) -> None:
    step = Step(config, rng, per_layer_sliding_window=9)
    step.check(step.run(common=step.common.replace(causal=False)), False, window=(8, 8))


def test_a_dummy_run_writes_nothing(config: Any, rng: torch.Generator) -> None:
    """Its slots are -1, and its block table may be one of requests that live."""
    step = Step(config, rng)
    before = step.cache.clone()
    step.run(common=step.common.replace(slot_mapping=torch.full_like(step.common.slot_mapping, -1)))
    assert same_bits((step.cache,), (before,))
    profiled = step.layer.impl.forward(step.layer, step.query, step.query, step.query, step.cache, None, step.query)
    assert (profiled == 0).all()


def test_a_request_alone_has_the_same_bits(config: Any, rng: torch.Generator) -> None:
    step = Step(config, rng)
    together = step.run()
    for b, (_, new) in enumerate(REQUESTS[:4]):
        first = int(step.common.query_start_loc[b])
        rows = slice(first, first + new)
        offsets = torch.tensor([0, new], dtype=torch.int32)
        lengths, table = step.common.seq_lens[b : b + 1], step.common.block_table_tensor[b : b + 1]
        slots = step.common.slot_mapping[rows]
        alone = {"query_start_loc": offsets, "seq_lens": lengths, "block_table_tensor": table, "slot_mapping": slots}
        builder = step.layer.attn_backend.get_builder_cls()(step.spec, ["model.0"], config, torch.device("cpu"))
        meta = builder.build(0, step.common.replace(**alone, num_reqs=1, num_actual_tokens=new))
        new_keys = (step.new(x)[rows] for x in (step.keys, step.values))
        out = torch.empty_like(step.query[rows])
        step.layer.impl.forward(step.layer, step.query[rows], *new_keys, step.cache, meta, out)
        assert same_bits((out,), (together[rows],))


def test_a_captured_step_serves_later_ones(config: Any, rng: torch.Generator) -> None:
    """A graph reads what its metadata names: tensors of vLLM's and of the builder's, which later steps overwrite."""
    step = Step(config, rng)
    names = ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping")
    kept = {name: torch.zeros_like(getattr(step.common, name)) for name in names}
    common = step.common.replace(**kept)
    common.slot_mapping.fill_(-1)
    builder = step.layer.attn_backend.get_builder_cls()(step.spec, ["model.0"], config, torch.device("cpu"))
    captured = builder.build_for_cudagraph_capture(common)
    for name, x in kept.items():
        x.copy_(getattr(step.common, name))
    for build in (lambda: builder.build(0, common), lambda: builder.build_for_drafting(common, 0)):
        captured.slot_rows.fill_(-1)
        build()
        out = torch.full_like(step.query, torch.nan)
        step.layer.impl.forward(
            step.layer, step.query, step.new(step.keys), step.new(step.values), step.cache, captured, out
        )
        step.check(out)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_layout_is_vllms_own(layout: str, backend: Any) -> None:
    """That of its FlashAttention backend, so that what moves caches between engines finds the same bytes."""
    from vllm.v1.attention.backends import utils
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend as Own

    utils.set_kv_cache_layout(layout)
    try:
        sizes = BLOCKS, BLOCK, HEADS_KV, DIM
        assert backend.get_kv_cache_shape(*sizes) == Own.get_kv_cache_shape(*sizes)
        assert backend.get_kv_cache_block_dim(*sizes[1:]) == Own.get_kv_cache_block_dim(*sizes[1:])
        for layers in (False, True):
            assert backend.get_kv_cache_stride_order(layers) == Own.get_kv_cache_stride_order(layers)
    finally:
        utils.set_kv_cache_layout(None)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_cache_of_all_layers(layout: str, config: Any, rng: torch.Generator) -> None:
    """Blocks that have the rows of all layers, as connectors want them: those of other layers stay."""
    from vllm.v1.attention.backends import utils

    step = Step(config, rng, layout)
    utils.set_kv_cache_layout(layout)
    try:
        order = step.layer.attn_backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
    finally:
        utils.set_kv_cache_layout(None)
    shape = (3, *step.cache.shape)
    in_memory = torch.full([shape[i] for i in order], torch.nan, dtype=step.cache.dtype)
    every = in_memory.permute([order.index(i) for i in range(5)])
    every[1] = step.cache
    expected = step.run()
    step.layer.kv_cache = every[1]
    assert same_bits((step.run(),), (expected,))
    assert same_bits((every[1],), (step.cache,)) and every[::2].isnan().all()


def test_a_shared_cache_is_read(config: Any, rng: torch.Generator) -> None:
    """Of a layer that has another's cache: nothing is written."""
    step = Step(config, rng)
    for b, (before, new) in enumerate(REQUESTS):
        step.write(b, range(before, before + new))
    before = step.cache.clone()
    step.layer.impl.kv_sharing_target_layer_name = "model.1"
    out = step.run()
    step.check(out)
    assert same_bits((step.cache,), (before,))


def test_encoders(config: Any, rng: torch.Generator) -> None:
    step = Step(config, rng)
    builder = step.layer.attn_backend.get_builder_cls()(step.spec, ["model.0"], config, torch.device("cpu"))
    meta = builder.build(0, step.common.replace(causal=False))
    impl = type(step.layer.impl)(HEADS, DIM, DIM**-0.5, HEADS_KV, sliding_window=5, attn_type="encoder_only")
    k, v = step.new(step.keys), step.new(step.values)
    out = torch.full_like(step.query, torch.nan)
    impl.forward(step.layer, step.query, k, v, torch.empty(0), meta, out)
    for first, last in zip(meta.query_start_loc[:-1].tolist(), meta.query_start_loc[1:].tolist(), strict=True):
        q, own_k, own_v = (x[first:last].transpose(0, 1)[None] for x in (step.query, k, v))
        lse = flash_lse(q, own_k, False, window=(4, 4))
        assert_matches(out[first:last].transpose(0, 1)[None], lse, q, own_k, own_v, False, window=(4, 4))


def test_what_the_backend_says(backend: Any, config: Any) -> None:
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backend import AttentionCGSupport

    assert backend.get_name() == "CUSTOM" and backend.supports_batch_invariance()
    builder = backend.get_builder_cls()
    assert builder.get_cudagraph_support(config, None) == AttentionCGSupport.ALWAYS
    usual = {
        "head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16, "use_mla": False,
        "has_sink": True, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(9, 0), "attn_type": "decoder", "has_sliding_window": True,
        "use_non_causal": True, "use_batch_invariant": True, "use_kv_connector": True,
    }  # fmt: skip
    assert backend.validate_configuration(**usual) == []
    for served in ({"head_size": 512}, {"kv_cache_dtype": "fp8_e5m2"}, {"attn_type": "encoder_only"}):
        assert backend.validate_configuration(**{**usual, **served}) == []
    for name, value in {
        "head_size": 100, "dtype": torch.float32, "kv_cache_dtype": "nvfp4", "block_size": 8, "use_mla": True,
        "use_sparse": True, "use_mm_prefix": True, "use_per_head_quant_scales": True, "use_pcp": True,
        "device_capability": DeviceCapability(7, 5), "attn_type": "encoder_decoder",
    }.items():  # fmt: skip
        assert len(backend.validate_configuration(**{**usual, name: value})) == 1, name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"causal": torch.ones(5, dtype=torch.bool)}, "causal: expected one for all requests"),
        ({"mm_req_doc_ranges": {0: [(0, 3)]}}, "mm_req_doc_ranges: expected None"),
        ({"rswa_prefix_lens": torch.ones(5)}, "rswa_prefix_lens: expected None"),
    ],
)
def test_refused(changes: Any, message: str, config: Any, rng: torch.Generator) -> None:
    step = Step(config, rng)
    with pytest.raises(NotImplementedError, match=f"^flash_cute: {message}"):
        step.run(common=step.common.replace(**changes))
    with pytest.raises(NotImplementedError, match=r"^flash_cute: output_scale: expected None"):
        step.layer.impl.forward(step.layer, *[step.query] * 3, step.cache, None, step.query, torch.ones(()))


def test_row_invariance(config: Any, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment asks for it; of the CPU, which has no such kernels, the call is refused."""
    monkeypatch.setenv("FLASH_CUTE_ROW_INVARIANT", "1")
    step = Step(config, rng)
    with pytest.raises(ValueError, match=r"^flash_cute: row_invariant: expected False for CPU"):
        step.run()
    encoder = type(step.layer.impl)(HEADS, DIM, 1.0, HEADS_KV, attn_type="encoder_only")
    meta = step.layer.attn_backend.get_builder_cls()(step.spec, ["model.0"], config, torch.device("cpu"))
    tensors = (step.query, step.new(step.keys), step.new(step.values), torch.empty(0), meta.build(0, step.common))
    with pytest.raises(ValueError, match=r"^flash_cute: row_invariant: expected False for CPU"):
        encoder.forward(step.layer, *tensors, step.query)
    for name, options in {
        "head_size": {"head_size": 512}, "logits_soft_cap": {"logits_soft_cap": 5.0},
        "alibi_slopes": {"alibi_slopes": [0.5] * HEADS}, "kv_cache_dtype": {"kv_cache_dtype": "fp8"},
    }.items():  # fmt: skip
        with pytest.raises(NotImplementedError, match=f"FLASH_CUTE_ROW_INVARIANT: expected .*, got {name} "):
            type(step.layer.impl)(**{"num_heads": HEADS, "head_size": DIM, "scale": 1.0, **options})
    monkeypatch.setenv("FLASH_CUTE_ROW_INVARIANT", "true")
    with pytest.raises(ValueError, match=r"^flash_cute: FLASH_CUTE_ROW_INVARIANT: expected 0 or 1, got 'true'$"):
        type(step.layer.impl)(HEADS, DIM, 1.0)


def test_refused_by_the_layer(config: Any, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(config, rng)
    impl = step.layer.impl
    with pytest.raises(NotImplementedError, match=r"^flash_cute: attn_type: expected decoder or encoder_only, got enc"):
        type(impl)(HEADS, DIM, 1.0, attn_type="encoder_decoder")
    builder = step.layer.attn_backend.get_builder_cls()(step.spec, ["model.0"], config, torch.device("cpu"))
    meta = builder.build(0, step.common)
    k, v = step.new(step.keys), step.new(step.values)
    with pytest.raises(NotImplementedError, match=r"^flash_cute: value: expected q's head dim, 32, .* got 16"):
        impl.forward(step.layer, step.query, k, v[..., :16], step.cache, meta, step.query)
    with pytest.raises(ValueError, match=r"^flash_cute: kv_cache: expected blocks of 16, got 8"):
        impl.forward(step.layer, step.query, k, v, step.cache[:, :, :8], meta, step.query)
    parallel = type("Parallel", (type(impl),), {"__new__": lambda cls, *args, **kwargs: object.__new__(cls)})
    monkeypatch.setattr(parallel, "total_cp_world_size", 2, raising=False)
    with pytest.raises(NotImplementedError, match=r"^flash_cute: context parallelism: expected a group of 1, got 2"):
        parallel(HEADS, DIM, 1.0)
