"""cuDNN's forward in float8, which PyTorch does not offer: by cuDNN's own frontend (the package nvidia-cudnn-frontend).

On Hopper its results are e4m3 too, multiplied by a factor that must be given before they are known: `OUT_FACTOR`.
"""

from __future__ import annotations

from typing import Any

import torch

from bench.providers.base import (
    Backend,
    Unavailable,
    heads_after_length,
    heads_before_length,
    module,
    refuse,
)
from bench.workloads import Inputs, Workload

# Of the results: they may be as large as 14, and what is below 0.0005 has fewer than e4m3's three bits.
OUT_FACTOR = 32.0
# Of the probabilities, from 0 to 1: e4m3's largest.
PROBABILITY_FACTOR = 448.0


def float8_forward(workload: Workload, device: torch.device) -> Backend:
    refuse(workload, "cuDNN in float8, as it is measured here,", "Dv", "window", "softcap", "sinks", "alibi", "lengths")
    if workload.is_causal and workload.N != workload.M:
        raise Unavailable("cuDNN aligns its causal mask to the top left: another problem when N and M differ")
    cudnn = module("cudnn")
    try:
        graph = _Graph(cudnn, workload, device)
    except Exception as error:  # cuDNN's own classes of errors
        raise Unavailable(f"cuDNN {cudnn.backend_version()}: {str(error).strip()}") from error
    return Backend("cudnn", graph.run, arrange=graph.arrange, restore=graph.restore)


class _Graph:
    """cuDNN's graph of one attention, built for its shape. Tensors are (B, N, H, D), which cuDNN is told by strides."""

    def __init__(self, cudnn: Any, workload: Workload, device: torch.device) -> None:
        self.cudnn, self.device = cudnn, device
        self.handle = cudnn.create_handle()
        w, types = workload, cudnn.data_type
        self.graph = cudnn.pygraph(
            handle=self.handle,
            io_data_type=types.FP8_E4M3,
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
        )

        def tensor(heads: int, length: int) -> Any:
            size, strides = _layout(w.B, heads, length, w.D)
            return self.graph.tensor(dim=size, stride=strides, data_type=types.FP8_E4M3)

        def scalar() -> Any:
            return self.graph.tensor(dim=[1] * 4, stride=[1] * 4, data_type=types.FLOAT)

        self.inputs = [tensor(w.H, w.N), tensor(w.Hkv, w.M), tensor(w.Hkv, w.M)]
        self.factors = [scalar() for _ in range(6)]  # of q, k, v; of S twice, and of out
        names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
        mask = {"diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT, "right_bound": 0} if w.is_causal else {}
        q, k, v = self.inputs
        self.out, _, *self.largest = self.graph.sdpa_fp8(
            q=q,
            k=k,
            v=v,
            generate_stats=False,
            attn_scale=w.D**-0.5,
            **dict(zip(names, self.factors, strict=True)),
            **mask,
        )
        size, strides = _layout(w.B, w.H, w.N, w.D)
        self.out.set_output(True).set_dim(size).set_stride(strides).set_data_type(types.FP8_E4M3)
        for one in self.largest:
            one.set_output(True).set_dim([1] * 4).set_stride([1] * 4).set_data_type(types.FLOAT)
        self.graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        self.workspace = torch.empty(max(1, self.graph.get_workspace_size()), dtype=torch.uint8, device=device)

    def arrange(self, inputs: Inputs) -> tuple[Any, ...]:
        """What the graph reads, by its tensors: all that a call does not make itself."""
        given = (1 / PROBABILITY_FACTOR, PROBABILITY_FACTOR, OUT_FACTOR)
        factors = [factor[0, 0] for factor in inputs[3:]]
        factors += [torch.tensor(factor, device=self.device) for factor in given]
        pack = dict(zip(self.inputs, heads_after_length(inputs[:3]), strict=True))
        pack |= {name: factor.reshape(1, 1, 1, 1) for name, factor in zip(self.factors, factors, strict=True)}
        pack |= {name: torch.empty(1, 1, 1, 1, device=self.device) for name in self.largest}
        return (pack,)

    def run(self, pack: dict[Any, torch.Tensor]) -> torch.Tensor:
        """out, e4m3 (B, N, H, D) times `OUT_FACTOR`."""
        out = torch.empty_like(pack[self.inputs[0]])
        self.cudnn.set_stream(handle=self.handle, stream=torch.cuda.current_stream(self.device).cuda_stream)
        self.graph.execute({**pack, self.out: out}, self.workspace, handle=self.handle)
        return out

    def restore(self, out: torch.Tensor) -> torch.Tensor:
        return heads_before_length(out).float() / OUT_FACTOR


def _layout(batch: int, heads: int, length: int, head_dim: int) -> tuple[list[int], list[int]]:
    """Sizes and strides of a (B, N, H, D) tensor in cuDNN's order of dims, (B, H, N, D)."""
    row = heads * head_dim
    return [batch, heads, length, head_dim], [length * row, head_dim, row, 1]
