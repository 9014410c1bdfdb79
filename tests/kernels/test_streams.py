"""The current stream and no other, no host synchronisation, several streams and threads at once."""

from __future__ import annotations

import threading

import pytest
import torch
from cases import Case, Inputs
from numerics import same_bits

import flash_cute

pytestmark = pytest.mark.kernel

LONG_SLEEP = 200_000_000  # cycles: about a tenth of a second
ON_CUDA = [pytest.param("cuda", marks=pytest.mark.cuda)]
# Shapes whose work is of different length, so that launches of several streams overlap in many ways.
CASES = (
    Case(64, 113, 203, heads_q=4),
    Case(128, 500, 700, dtype=torch.bfloat16, heads_q=8),
    Case(128, 64, 2000, heads_q=8),
    Case(80, 300, 300),
)


@pytest.mark.parametrize("device", ON_CUDA)
def test_runs_on_the_current_stream(device: str, backend: str | None, rng: torch.Generator) -> None:
    """On a stream whose inputs arrive late: a launch elsewhere would read them too early."""
    case = Case(64, 113, 203)
    late = case.inputs(device, rng)
    expected = flash_cute.fwd(*late, True, backend=backend)
    inputs = tuple(torch.full_like(x, float("nan")) for x in late)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG_SLEEP)
        for x, new in zip(inputs, late, strict=True):
            x.copy_(new)
        result = flash_cute.fwd(*inputs, True, backend=backend)
    stream.synchronize()
    assert same_bits(result, expected)


@pytest.mark.parametrize("device", ON_CUDA)
@pytest.mark.parametrize("head_dim", [64, 100, 128])
def test_the_host_does_not_wait(device: str, head_dim: int, backend: str | None, rng: torch.Generator) -> None:
    q, k, v = Case(head_dim, 113, 203).inputs(device, rng)
    flash_cute.fwd(q, k, v, True, backend=backend)
    torch.cuda.synchronize()
    asleep = torch.cuda.Event()
    torch.cuda._sleep(LONG_SLEEP)
    asleep.record()
    flash_cute.fwd(q, k, v, True, backend=backend)
    assert not asleep.query(), "the call came back only after the work queued before it was done"
    torch.cuda.synchronize()


@pytest.mark.parametrize("device", ON_CUDA)
def test_streams_at_once(device: str, backend: str | None, rng: torch.Generator) -> None:
    problems = [case.inputs(device, rng) for case in CASES]
    expected = [flash_cute.fwd(*inputs, True, backend=backend) for inputs in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    results: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in problems]
    for _ in range(30):
        for inputs, stream, collected in zip(problems, streams, results, strict=True):
            with torch.cuda.stream(stream):
                collected.append(flash_cute.fwd(*inputs, True, backend=backend))
    torch.cuda.synchronize()
    for collected, right in zip(results, expected, strict=True):
        assert all(same_bits(x, right) for x in collected)


@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
def test_threads_at_once(device: str, training: bool, backend: str | None, rng: torch.Generator) -> None:
    rounds = 5 if device == "cpu" else 50
    problems = [case.inputs(device, rng) for case in CASES]

    def attend(inputs: Inputs) -> tuple[torch.Tensor, ...]:
        return _train(inputs, backend) if training else flash_cute.fwd(*inputs, True, backend=backend)

    expected = [attend(inputs) for inputs in problems]
    wrong: list[str] = []
    start = threading.Barrier(len(problems))

    def work(index: int, inputs: Inputs) -> None:
        try:
            stream = torch.cuda.Stream() if device == "cuda" else None
            start.wait(timeout=60)
            with torch.cuda.stream(stream):
                for _ in range(rounds):
                    result = attend(inputs)
                    if stream:
                        stream.synchronize()
                    if not same_bits(result, expected[index]):
                        wrong.append(f"thread {index} got other bits")
        except Exception as error:  # a thread's exception would otherwise be lost
            wrong.append(f"thread {index}: {error!r}")

    if device == "cuda":
        torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=x) for x in enumerate(problems)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong, wrong[:3]


@pytest.mark.parametrize("device", ON_CUDA)
def test_outputs_may_be_freed_at_once(device: str, backend: str | None, rng: torch.Generator) -> None:
    """Temporaries (here the copies of misaligned inputs) live as long as the kernel reads them."""
    q, k, v = Case(33, 200, 300, heads_q=8, heads_kv=8).inputs(device, rng)
    expected = flash_cute.fwd(q, k, v, True, backend=backend)
    torch.cuda._sleep(LONG_SLEEP // 10)
    results = []
    for _ in range(20):
        flash_cute.fwd(k, q, q, backend=backend)
        results.append(flash_cute.fwd(q, k, v, True, backend=backend))
        torch.full_like(q, float("nan"))
    assert all(same_bits(x, expected) for x in results)


def _train(inputs: Inputs, backend: str | None) -> tuple[torch.Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    out, lse = flash_cute.attention(*leaves, True, return_lse=True, deterministic=True, backend=backend)
    return torch.autograd.grad((out, lse), leaves, (out.detach(), lse.detach().nan_to_num(neginf=0)))


@pytest.mark.parametrize("device", ON_CUDA)
def test_the_host_does_not_wait_for_a_backward(device: str, backend: str | None, rng: torch.Generator) -> None:
    inputs = Case(100, 113, 203).inputs(device, rng)
    _train(inputs, backend)
    torch.cuda.synchronize()
    asleep = torch.cuda.Event()
    torch.cuda._sleep(LONG_SLEEP)
    asleep.record()
    _train(inputs, backend)
    assert not asleep.query(), "the call came back only after the work queued before it was done"
    torch.cuda.synchronize()


@pytest.mark.parametrize("device", ON_CUDA)
def test_backwards_of_streams_at_once(device: str, backend: str | None, rng: torch.Generator) -> None:
    """Each on the stream of its forward, with a workspace and semaphores of its own."""
    problems = [case.inputs(device, rng) for case in CASES]
    expected = [_train(inputs, backend) for inputs in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    results: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in problems]
    for _ in range(30):
        for inputs, stream, collected in zip(problems, streams, results, strict=True):
            with torch.cuda.stream(stream):
                collected.append(_train(inputs, backend))
    torch.cuda.synchronize()
    for collected, right in zip(results, expected, strict=True):
        assert all(same_bits(x, right) for x in collected)


@pytest.mark.parametrize("device", ON_CUDA)
def test_a_workspace_may_be_freed_at_once(device: str, backend: str | None, rng: torch.Generator) -> None:
    inputs = Case(33, 200, 300, heads_q=8, heads_kv=8).inputs(device, rng)
    expected = _train(inputs, backend)
    torch.cuda._sleep(LONG_SLEEP // 10)
    results = []
    for _ in range(20):
        results.append(_train(inputs, backend))
        torch.full((1 << 20,), float("nan"), device=device)
    assert all(same_bits(x, expected) for x in results)


@pytest.mark.parametrize("device", ON_CUDA)
@pytest.mark.parametrize("head_dim", [64, 256, 512])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_first_call_of_a_thread(
    device: str, head_dim: int, backward: bool, backend: str | None, rng: torch.Generator
) -> None:
    """A thread of autograd's, or of a server, may have used CUDA for nothing before: it has no context yet."""
    q, k, v = Case(head_dim, 113, 203).inputs(device, rng)
    out, lse = flash_cute.fwd(q, k, v, True, backend=backend)

    def call() -> tuple[torch.Tensor, ...]:
        if backward:
            return flash_cute.bwd(q, q, k, v, out, lse, True, deterministic=True, backend=backend)
        return flash_cute.fwd(q, k, v, True, backend=backend)

    expected = call()
    call()  # what the thread allocates is freed here, so that the allocator need not ask CUDA for it
    results: list[tuple[torch.Tensor, ...]] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    assert results and all(same_bits(x, y) for x, y in zip(results[0], expected, strict=True))
