"""Who computes a masked problem: flash_cute with the mask and without, PyTorch's attention, FlexAttention.

What is made once for many calls (a mask, FlexAttention's list of blocks, a packed copy of the inputs, a compiled
kernel) is made before anything is timed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench import mask_cases
from bench.mask_cases import Case
from bench.providers import flash_attn
from bench.providers.base import Unavailable, first
from bench.workloads import Inputs, Workload
from flash_cute import Mask

OURS = "flash_cute"


Results = tuple[torch.Tensor, ...]  # out, and dq, dk and dv if there is a backward


@dataclass(frozen=True)
class Calls:
    """A provider, ready for one problem.

    Attributes:
        forward: returns out, possibly with more behind it.
        backward: returns dq, dk and dv of a forward that has run; None: there is none.
        pairs: of rows and keys that it computes; 0: those of the problem.
        restore: from its results to what those of the problem would be.
    """

    forward: Callable[[], Any]
    backward: Callable[[], tuple[torch.Tensor, ...]] | None
    pairs: int = 0
    restore: Callable[[Results], Results] = lambda results: results

    def call(self, direction: str) -> Callable[[], Any] | None:
        """What is timed of a direction; None: the provider has not that."""
        if direction == "fwd":
            return self.forward
        return self._step if direction == "step" and self.backward is not None else self.backward

    def _step(self) -> None:
        assert self.backward is not None
        self.forward()
        self.backward()

    def results(self) -> Results:
        gradients = () if self.backward is None else self.backward()[:3]
        return self.restore((first(self.forward()).detach(), *gradients))


def prepare(name: str, case: Case, mask: Mask, inputs: Inputs) -> Calls:
    """The provider of that name; raises `Unavailable`, or what the provider itself raises."""
    if name == OURS:
        if case.through_sdpa:
            return _ours_through_sdpa(case, inputs)
        return _operators(inputs, causal=case.causal, mask=mask)
    if name == mask_cases.BAND:
        return _operators(inputs, causal=case.name == "causal")
    if name in (mask_cases.DENSE, mask_cases.CAUSAL):
        causal = name == mask_cases.CAUSAL
        return _operators(inputs, pairs=whole_pairs(case, causal), causal=causal)
    if name == mask_cases.FA3:
        return _flash_attn_3(case, inputs)
    if name == mask_cases.SDPA:
        return _pytorch(case, inputs)
    if name == mask_cases.FLEX:
        return _flex_attention(case, inputs)
    return _packed(name, case, inputs)


def whole_pairs(case: Case, causal: bool) -> int:
    """Pairs of a call without a mask."""
    return case.B * (case.N * (case.N + 1) // 2 if causal else case.N * case.N)


def _operators(inputs: Inputs, pairs: int = 0, **options: Any) -> Calls:
    """flash_cute's own operators."""
    import flash_cute

    q, k, v, dout = inputs
    forward = functools.partial(flash_cute.fwd, q, k, v, **options)
    return Calls(forward, functools.partial(flash_cute.bwd, dout, q, k, v, *forward(), **options), pairs)


def _by_autograd(function: Callable[..., torch.Tensor], inputs: Inputs, *, backward: bool = True) -> Calls:
    """Through autograd: the backward's graph is kept, the forward has one of its own each time."""
    *tensors, dout = inputs
    if not backward:
        return Calls(functools.partial(function, *tensors), None)
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = function(*leaves)
    gradients = functools.partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)
    return Calls(functools.partial(function, *leaves), gradients)


def _boolean(case: Case, inputs: Inputs) -> torch.Tensor:
    return case.real(inputs[0].device)[:, None, None, :]


def _ours_through_sdpa(case: Case, inputs: Inputs) -> Calls:
    from flash_cute.integrations import sdpa

    before = sdpa.report().passed_on
    calls = _by_autograd(functools.partial(sdpa.sdpa, attn_mask=_boolean(case, inputs)), inputs)
    passed_on = [reason for reason, count in sdpa.report().passed_on.items() if count != before.get(reason, 0)]
    if passed_on:
        raise Unavailable(f"passed on to PyTorch: {passed_on[0]}")
    return calls


def _pytorch(case: Case, inputs: Inputs) -> Calls:
    """PyTorch's attention with the backend that it picks for a boolean mask."""
    function = functools.partial(torch.nn.functional.scaled_dot_product_attention, attn_mask=_boolean(case, inputs))
    return _by_autograd(function, inputs)


def _flash_attn_3(case: Case, inputs: Inputs) -> Calls:
    """Its causal kernel on the same tensors; the builds on PyPI may have no backward."""
    if inputs[0].device.type != "cuda":
        raise Unavailable("FlashAttention-3 needs a GPU")
    c, dtype = case, {torch.bfloat16: "bf16", torch.float16: "fp16"}[inputs[0].dtype]
    workload = Workload(c.B, c.H, c.Hkv, c.N, c.N, c.D, "bottom_right", dtype)
    forward = flash_attn.flash_attn_3(mask_cases.FA3, workload, inputs[0].device)
    call = functools.partial(forward.call, *forward.arrange(inputs[:3]))
    backward = None
    if hasattr(torch.ops.flash_attn_3, "bwd"):
        bound = flash_attn.flash_attn_3_backward(mask_cases.FA3, workload, inputs[0].device)
        backward = functools.partial(bound.call, *bound.arrange(inputs))
    return Calls(call, backward, whole_pairs(case, True))


@dataclass(frozen=True)
class Packing:
    """Sequences of rows and keys, each by its places among the B * N tokens of a problem."""

    rows: list[torch.Tensor]
    keys: list[torch.Tensor]
    causal: bool

    @property
    def pairs(self) -> int:
        sizes = [(len(rows), len(keys)) for rows, keys in zip(self.rows, self.keys, strict=True)]
        return sum(m * (m + 1) // 2 if self.causal else m * n for m, n in sizes)


def packing(name: str, case: Case, device: torch.device) -> Packing:
    """How a packed call computes the problem.

    Documents are sequences. Of a shared prefix each answer is one, behind a copy of the prefix. Of padding the real
    keys are, with all rows (`packed`: the same work as with the mask) or with the real ones (`unpadded`: less).
    """
    tokens = torch.arange(case.B * case.N, device=device).view(case.B, case.N)
    if name == mask_cases.REPLICATED:
        prefix = tokens[0, : case.prefix]
        answers = tokens[0, case.prefix :].split(list(case.parts))
        sequences = [torch.cat((prefix, answer)) for answer in answers]
    elif case.through_sdpa:
        sequences = [row[:length] for row, length in zip(tokens, case.parts, strict=True)]
        if name == mask_cases.PACKED:
            return Packing(list(tokens), sequences, case.causal)
    else:
        sequences = [part for row in tokens for part in row.split(list(case.parts))]
    return Packing(sequences, sequences, case.causal)


def _offsets(sequences: Sequence[torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Where each begins, and the longest."""
    lengths = torch.tensor([0, *map(len, sequences)], device=sequences[0].device)
    return lengths.cumsum(0).int(), int(lengths.max())


def _packed(name: str, case: Case, inputs: Inputs) -> Calls:
    """flash_cute's packed call without a mask. Copies of a row share its gradient among them."""
    import flash_cute

    device = inputs[0].device
    plan = packing(name, case, device)
    rows, keys = torch.cat(plan.rows), torch.cat(plan.keys)
    copies = torch.bincount(rows, minlength=case.B * case.N).clamp(min=1)[:, None, None]

    def pack(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).flatten(0, 1)[places].contiguous()

    def unpack(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """The sum of the copies, (B, heads, N, D); 0 where there is none."""
        whole = torch.zeros(case.B * case.N, *x.shape[1:], device=device).index_add_(0, places, x.float())
        return whole.unflatten(0, (case.B, case.N)).transpose(1, 2)

    def restore(results: Results) -> Results:
        out, dq, dk, dv = results
        return (
            unpack(out, rows) / copies.view(case.B, 1, case.N, 1),
            unpack(dq, rows),
            unpack(dk, keys),
            unpack(dv, keys),
        )

    q, k, v, dout = inputs
    q, k, v, dout = pack(q, rows), pack(k, keys), pack(v, keys), pack(dout, rows) / copies[rows]
    (of_rows, longest_rows), (of_keys, longest_keys) = _offsets(plan.rows), _offsets(plan.keys)
    options: dict[str, Any] = {"causal": plan.causal, "max_seqlen_q": longest_rows, "max_seqlen_k": longest_keys}
    forward = functools.partial(flash_cute.varlen_fwd, q, k, v, of_rows, of_keys, **options)
    backward = functools.partial(
        flash_cute.varlen_bwd, dout, q, k, v, *forward(), cu_seqlens_q=of_rows, cu_seqlens_k=of_keys, **options
    )
    return Calls(forward, backward, plan.pairs, restore)


def _flex_attention(case: Case, inputs: Inputs) -> Calls:
    """PyTorch's FlexAttention, compiled for the shape; on the CPU, which has no backward of it, not compiled."""
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if case.make_mask_mod is None:
        raise Unavailable("there is no such mask for FlexAttention")
    device = inputs[0].device
    mask = create_block_mask(case.make_mask_mod(device), None, None, case.N, case.N, device=device)
    options = {"block_mask": mask, "enable_gqa": case.Hkv != case.H}
    if device.type != "cuda":
        return _by_autograd(functools.partial(flex_attention, **options), inputs, backward=False)
    torch._dynamo.reset()  # else after some masks it no longer compiles, and runs without
    # A backward whose graph is kept must not write over what the forward has saved.
    with torch._functorch.config.patch(donated_buffer=False):
        calls = _by_autograd(functools.partial(torch.compile(flex_attention, dynamic=False), **options), inputs)
        calls.results()
    return calls
