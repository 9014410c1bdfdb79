"""Calls over a KV cache: flash_cute's, vLLM's build of FlashAttention-3, and cuDNN's graph over pages.

Every other provider is given the dense problem, where there is one: keys one after the other, as many in all sequences.
Of float8 caches flash_cute alone is given the numbers as they are stored, the others the same numbers in q's dtype.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.caches import NAMES, CacheWorkload
from bench.figures import BF16, CONTIGUOUS, DENSE, DETERMINISTIC, PLAIN
from bench.providers import ours
from bench.providers.base import Backend, Unavailable, module, refuse, window_limits
from bench.workloads import Inputs, Workload
from flash_cute._timing import first_line

INVARIANT = ":invariant"  # keys of a row never divided among CTAs: the bits of a sequence are its own
VLLM = "vllm-fa3"
CUDNN_PAGED = "cudnn-paged"
FLASHMLA = "vllm-flashmla"
PEERS = (VLLM, f"{VLLM}{CONTIGUOUS}", f"{VLLM}{INVARIANT}", FLASHMLA, CUDNN_PAGED)
LIBRARY = "_vllm_fa3_C.abi3.so"
FLASHMLA_LIBRARY = "_flashmla_C.abi3.so"


def forward(
    name: str, workload: CacheWorkload, device: torch.device, dense: Callable[[str, Workload], Backend]
) -> Backend:
    """The provider of that name over a cache; `dense` makes one ready for a problem without."""
    if name in PEERS:
        if workload.append:
            raise Unavailable(f"{name} appends nothing")
        if name == FLASHMLA:
            return _of_16_bits(flash_mla(workload))
        return _of_16_bits(cudnn_paged(workload, device) if name == CUDNN_PAGED else vllm_fa3(name, workload, device))
    if ours.is_ours(name) and not name.endswith(DENSE):
        return flash_cute(name, workload, device)
    if workload.append or workload.lengths:
        lacking = "append" if workload.append else "lengths of their own"
        raise Unavailable(f"a dense call over contiguous keys: it has no {lacking}")
    backend = dense(name.removesuffix(DENSE), workload.dense)
    return _of_16_bits(replace(backend, name=name, arrange=lambda inputs: backend.arrange(_dense_inputs(inputs))))


def _of_16_bits(backend: Backend) -> Backend:
    return replace(backend, arrange=lambda inputs: backend.arrange(_in_16_bits(inputs)))


def _in_16_bits(inputs: Inputs) -> Inputs:
    """Keys and values in q's dtype."""
    q, k_pages, v_pages, table, lengths, k, v = inputs
    k_pages, v_pages, k, v = (x.to(q.dtype) for x in (k_pages, v_pages, k, v))
    return q, k_pages, v_pages, table, lengths, k, v


def absent(name: str) -> None:
    """Raise `Unavailable` if the peer is not on this machine."""
    if name == CUDNN_PAGED:
        module("cudnn")
    elif name == FLASHMLA:
        load_flash_mla()
    else:
        load_vllm_fa3()


def own_call(name: str, workload: CacheWorkload, inputs: Inputs) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """q and the caches, and the arguments of flash_cute's call that are tensors."""
    given = dict(zip(NAMES, _in_16_bits(inputs) if name.endswith(BF16) else inputs, strict=True))
    q, lengths, k, v = given["q"], given["lengths"], given["k"], given["v"]
    places: dict[str, torch.Tensor] = {"cache_seqlens": lengths}
    if workload.append and not name.endswith(PLAIN):
        rows = torch.arange(workload.N, device=lengths.device) + (lengths - workload.N)[:, None]
        batch = torch.arange(workload.B, device=lengths.device)[:, None]
        new = {name: x[batch, rows].to(q.dtype) for name, x in (("k", k), ("v", v))}
        places |= {"cache_seqlens": lengths - workload.N, **new}
    if name.endswith(CONTIGUOUS):
        return (q, k, v), places
    return (q, given["k_pages"], given["v_pages"]), {**places, "page_table": given["table"]}


def flash_cute(name: str, workload: CacheWorkload, device: torch.device) -> Backend:
    """`attention_with_kvcache`, of pages or of contiguous caches."""
    if name.endswith(DETERMINISTIC) or (name.endswith(BF16) and not workload.cache_dtype):
        raise Unavailable("a call over a cache has no such mode")
    if name.endswith(PLAIN) and not workload.append:
        raise Unavailable("nothing is appended that could be in the cache already")
    function = functools.partial(
        ours.require().attention_with_kvcache,
        **ours.score_options(workload, device),
        **_own_options(name),
    )

    def call(tensors: tuple[torch.Tensor, ...], places: dict[str, Any]) -> torch.Tensor:
        out: torch.Tensor = function(*tensors, **places)
        return out

    return Backend(name, call, arrange=functools.partial(own_call, name, workload), restore=_heads_first)


def plan(name: str, workload: CacheWorkload, inputs: Inputs) -> str:
    """What the library says of its call, in few words."""
    if name.endswith(DENSE):
        return ours.plan(name.removesuffix(DENSE), workload.dense, _dense_inputs(_in_16_bits(inputs)))
    flash_cute = ours.require()
    tensors, places = own_call(name, workload, inputs)
    new = places.pop("k", None)
    places.pop("v", None)
    options = ours.score_options(workload, inputs[0].device) | places
    options |= _own_options(name)
    try:
        found = flash_cute.explain(*tensors, **options, new_keys=0 if new is None else workload.N).data
    except Exception as error:
        return f"no plan: {first_line(error)}"
    return ours.plan_words(found)


def _own_options(name: str) -> dict[str, Any]:
    """Those of a call over a cache, which has no backward."""
    return {word: x for word, x in ours.own_options(name).items() if word != "deterministic"}


def _dense_inputs(inputs: Inputs) -> Inputs:
    """q, k and v as views (B, H, rows, D)."""
    q, *_, k, v = inputs
    return tuple(x.transpose(1, 2) for x in (q, k, v))


def _heads_first(out: torch.Tensor) -> torch.Tensor:
    return out.transpose(1, 2)


def load_vllm_fa3() -> Any:
    """The operators of vLLM's build of FlashAttention-3, which is a library beside its Python files."""
    return _load("_vllm_fa3_C", "fwd", LIBRARY, "vllm/vllm_flash_attn")


def load_flash_mla() -> Any:
    """The operators of vLLM's build of FlashMLA, the same."""
    return _load("_flashmla_C", "dense_decode_fwd", FLASHMLA_LIBRARY, "vllm")


def _load(namespace: str, operator: str, library: str, folder_in_wheel: str) -> Any:
    operators = getattr(torch.ops, namespace)
    if not hasattr(operators, operator):
        places = [Path(folder) / inner / library for folder in sys.path for inner in ("", folder_in_wheel)]
        path = next((place for place in places if place.is_file()), None)
        if path is None:
            raise Unavailable(f"no {library} on the path; it is in the wheel of vllm, in {folder_in_wheel}")
        try:
            torch.ops.load_library(path)
        except OSError as error:
            raise Unavailable(f"{library}: {first_line(error.__cause__ or error)}") from error
    return operators


def flash_mla(workload: CacheWorkload) -> Backend:
    """Latent attention over pages of 64 keys; its schedule, which vLLM makes once a step, outside the timed calls."""
    refuse(workload, "FlashMLA", "window", "softcap", "sinks", "alibi")
    w = workload
    if not (w.is_latent and (w.D, w.head_dim_v, w.page) == (576, 512, 64)):
        raise Unavailable("FlashMLA serves latent attention of head dims 576 and 512 over pages of 64 keys")
    function = load_flash_mla().dense_decode_fwd

    def arrange(inputs: Inputs) -> tuple[Any, ...]:
        q, k_pages, _, table, lengths, *_ = inputs
        arguments = (q, k_pages, w.head_dim_v, lengths, table, w.D**-0.5, w.is_causal)
        *_, metadata, splits = function(*arguments, None, None, None)
        return (*arguments, metadata, splits, None)

    return Backend(FLASHMLA, lambda *arguments: function(*arguments)[0], arrange=arrange, restore=_heads_first)


# The arguments of its operators have no defaults.
_UNUSED = ("k_new", "v_new", "q_v", "out", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "kv_batch_idx", "leftpad_k")
_UNUSED += ("rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale", "cp_tot_seqused_k")


def vllm_fa3(name: str, workload: CacheWorkload, device: torch.device) -> Backend:
    """With its scheduler's metadata, which vLLM makes once a step for all layers, outside the timed calls."""
    refuse(workload, "vLLM's FlashAttention-3", "alibi")
    operators = load_vllm_fa3()
    w, pages = workload, not name.endswith(CONTIGUOUS)
    left, right = window_limits(workload)
    offsets = torch.arange(w.B + 1, dtype=torch.int32, device=device) * w.N
    both = {"cu_seqlens_q": offsets, "max_seqlen_q": w.N, "max_seqlen_k": w.M, "is_causal": w.is_causal}
    both |= {"window_size_left": left, "window_size_right": right, "pack_gqa": None, "sm_margin": 0}
    both |= {"num_splits": 1 if name.endswith(INVARIANT) else 0}  # 0: as many as it finds best
    # Of latent attention the keys are the columns behind the values, and what the rest of q multiplies are the values.
    head_dim, values = (w.D - w.head_dim_v, w.head_dim_v) if w.is_latent else (w.D, 0)
    heads = {"num_heads": w.H, "num_heads_k": w.Hkv, "headdim": head_dim, "headdim_v": w.head_dim_v}
    options = {"softmax_scale": w.D**-0.5, "softcap": w.softcap, "is_rotary_interleaved": True, "cp_world_size": 1}
    options |= {"cp_rank": 0, "s_aux": w.make_sinks(device).bfloat16() if w.sinks else None}

    def arrange(inputs: Inputs) -> tuple[Any, ...]:
        given = dict(zip(NAMES, inputs, strict=True))
        lengths = given["lengths"]
        unused = dict.fromkeys(("cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "leftpad_k"))
        metadata = operators.get_scheduler_metadata(
            **{**both, **heads, **unused},
            batch_size=w.B,
            qkv_dtype=given["q"].dtype,
            seqused_k=lengths,
            page_size=w.page if pages else None,
            max_seqlen_k_new=0,
            has_softcap=bool(w.softcap),
        )
        q = given["q"].flatten(0, 1)
        k, v = (given[f"{name}_pages" if pages else name] for name in "kv")
        tensors = {"q": q[..., values:], "k": k[..., values:], "v": v, "seqused_k": lengths}
        tensors |= {"scheduler_metadata": metadata, "page_table": given["table"] if pages else None}
        if w.is_latent:
            tensors["q_v"] = q[..., :values]
        return ({**dict.fromkeys(_UNUSED), **both, **options, **tensors},)

    def restore(out: torch.Tensor) -> torch.Tensor:
        return _heads_first(out.unflatten(0, (w.B, w.N)))

    return Backend(name, lambda arguments: operators.fwd(**arguments)[0], arrange=arrange, restore=restore)


def cudnn_paged(workload: CacheWorkload, device: torch.device) -> Backend:
    """cuDNN's graph of attention over pages, built for the shapes by its own frontend."""
    refuse(workload, "cuDNN over pages, as it is measured here,", "window", "softcap", "sinks", "alibi")
    cudnn = module("cudnn")
    try:
        graph = _PagedGraph(cudnn, workload, device)
    except Exception as error:  # cuDNN's own classes of errors
        raise Unavailable(f"cuDNN {cudnn.backend_version()}: {first_line(error)}") from error
    return Backend(CUDNN_PAGED, graph.run, arrange=graph.arrange, restore=_heads_first)


class _PagedGraph:
    """Tensors are told by sizes in cuDNN's order of dims, (batch or page, head, row, column), and by strides."""

    def __init__(self, cudnn: Any, workload: CacheWorkload, device: torch.device) -> None:
        self.cudnn, self.device, w = cudnn, device, workload
        self.handle = cudnn.create_handle()
        types = cudnn.data_type
        io_type = {"bf16": types.BFLOAT16, "fp16": types.HALF}[w.dtype]
        options = {"intermediate_data_type": types.FLOAT, "compute_data_type": types.FLOAT}
        self.graph = cudnn.pygraph(handle=self.handle, io_data_type=io_type, **options)

        def tensor(like: torch.Tensor, data_type: Any = io_type) -> Any:
            return self.graph.tensor(dim=list(like.shape), stride=list(like.stride()), data_type=data_type)

        meta = self._tensors(tuple(torch.empty(shape, device="meta") for shape in w.shapes.values()), w)
        self.inputs = {name: tensor(x, io_type if name in "qkv" else types.INT32) for name, x in meta.items()}
        self.workload = w
        bottom_right = {"diagonal_alignment": cudnn.diagonal_alignment.BOTTOM_RIGHT, "diagonal_band_right_bound": 0}
        self.out, _ = self.graph.sdpa(
            q=self.inputs["q"],
            k=self.inputs["k"],
            v=self.inputs["v"],
            generate_stats=False,
            attn_scale=w.D**-0.5,
            use_padding_mask=True,
            seq_len_q=self.inputs["rows"],
            seq_len_kv=self.inputs["keys"],
            paged_attention_k_table=self.inputs["k_table"],
            paged_attention_v_table=self.inputs["v_table"],
            paged_attention_max_seq_len_kv=w.M,
            **(bottom_right if w.N > 1 else {}),
        )
        out = torch.empty(w.B, w.N, w.H, w.head_dim_v, device="meta").transpose(1, 2)
        self.out.set_output(True).set_dim(list(out.shape)).set_stride(list(out.stride()))
        self.graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        self.workspace = torch.empty(max(1, self.graph.get_workspace_size()), dtype=torch.uint8, device=device)

    @staticmethod
    def _tensors(inputs: Inputs, workload: CacheWorkload) -> dict[str, torch.Tensor]:
        q, k_pages, v_pages, table, lengths, *_ = inputs
        keys = lengths.reshape(-1, 1, 1, 1)
        named = dict(zip("qkv", (x.transpose(1, 2) for x in (q, k_pages, v_pages)), strict=True))
        pages = table[:, None, :, None]
        return named | {"k_table": pages, "v_table": pages, "rows": torch.full_like(keys, workload.N), "keys": keys}

    def arrange(self, inputs: Inputs) -> tuple[Any, ...]:
        tensors = self._tensors(inputs, self.workload)
        return ({self.inputs[name]: tensor for name, tensor in tensors.items()},)

    def run(self, pack: dict[Any, torch.Tensor]) -> torch.Tensor:
        """out (B, N, H, Dv)."""
        q = pack[self.inputs["q"]]
        w = self.workload
        out = torch.empty(w.B, w.N, w.H, w.head_dim_v, dtype=q.dtype, device=q.device)
        self.cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream(self.device).cuda_stream)
        self.graph.execute({**pack, self.out: out}, self.workspace, handle=self.handle)
        return out
