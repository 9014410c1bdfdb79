"""`python -m flash_cute`: what a person types first."""

from __future__ import annotations

import pytest
import torch

from flash_cute.__main__ import main

SMALL = ("--device", "cpu", "--B", "1", "--H", "4", "--N", "70", "--D", "16", "--iters", "2")


def run(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    returned = main(list(arguments))
    captured = capsys.readouterr()
    assert returned == status, captured.out + captured.err
    return captured.out + captured.err


def test_as_a_command(python):
    script = "import runpy, sys; sys.argv[1:] = {!r}; runpy.run_module('flash_cute', run_name='__main__')"
    printed = python(script.format(SMALL))
    for part in ("within the bounds", "sdpa flash", "sdpa math", "TFLOP/s", "as fast", "what runs", "backend  cpu"):
        assert part in printed


def test_without_any_flag(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    printed = run(capsys)
    assert "q (1, 8, 512, 64)" in printed
    assert "float32" in printed


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64", "bfloat16"])
@pytest.mark.parametrize("causal", [(), ("--causal",), ("--causal", "top_left")])
def test_shapes_and_masks(capsys, dtype, causal):
    printed = run(capsys, *SMALL, "--Hkv", "2", "--M", "100", "--dtype", dtype, *causal)
    assert "k and v (1, 2, 100, 16)" in printed
    assert "within the bounds" in printed
    refused = "SDPA's causal mask is the top-left one" in printed
    assert refused == (causal == ("--causal",))


def test_peers(capsys):
    printed = run(capsys, *SMALL, "--peers", "cudnn,math")
    assert "sdpa cudnn     does not run: " in printed
    assert "sdpa flash" not in printed
    assert "sdpa" not in run(capsys, *SMALL, "--peers", "none")


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("causal", [(), ("--causal",), ("--causal", "top_left")])
def test_backward(capsys, dtype, causal):
    printed = run(capsys, *SMALL, "--backward", "--Hkv", "2", "--M", "50", "--dtype", dtype, *causal)
    for part in ("  dq   ", "  dk   ", "  dv   ", "within the bounds", "forward and backward", "what runs, backward"):
        assert part in printed
    assert "NOT WITHIN" not in printed


def test_wrong_gradients_are_reported(capsys, monkeypatch):
    import flash_cute

    right = flash_cute.bwd
    monkeypatch.setattr(flash_cute, "bwd", lambda *args, **options: (2 * (x := right(*args, **options))[0], *x[1:]))
    assert "NOT WITHIN THE BOUNDS" in run(capsys, *SMALL, "--backward", "--peers", "none", status=1)


def test_no_check(capsys):
    assert "error" not in run(capsys, *SMALL, "--no-check")


def test_what_cannot_be_served_exits_with_a_sentence(capsys):
    printed = run(capsys, *SMALL, "--backend", "sm80", status=2)
    assert "backend: expected 'auto' or 'cpu' for CPU tensors, got 'sm80'" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--Hkv", "3"), "expected a divisor of --H 4, got 3"),
        (("--N", "0"), "--N: expected at least 1, got 0"),
        (("--N", "abc"), "--N: expected a number, got abc"),
        (("--seed", "-1"), "--seed: expected a number from 0 to 2^63 - 1, got -1"),
        (("--device", "foo"), "--device: expected cpu, cuda or cuda:<number>, got foo"),
        (("--device", "cuda:x"), "--device: expected cpu, cuda or cuda:<number>, got cuda:x"),
        (("--device", "meta"), "--device: expected cpu, cuda or cuda:<number>, got meta"),
        (("--device", "cuda:99"), "--device: "),
        (("--dtype", "int8"), "expected one of bf16, fp16, fp32, fp64, got int8"),
        (("--peers", "flash,fast"), "got fast"),
        (("--causal", "left"), "invalid choice: 'left'"),
    ],
)
def test_wrong_flags_exit_with_a_sentence(capsys, flags, sentence):
    with pytest.raises(SystemExit) as stopped:
        main([*SMALL, *flags])
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err


def test_a_gpu_that_is_not_there(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit) as stopped:
        main(["--device", "cuda:2"])
    assert stopped.value.code == 2
    assert "--device: expected a number below 2, the GPUs here, got cuda:2" in capsys.readouterr().err


def test_an_error_out_of_bounds_is_reported(capsys, monkeypatch):
    import flash_cute

    right = flash_cute.fwd
    monkeypatch.setattr(
        flash_cute, "fwd", lambda *args, **options: (right(*args, **options)[0] * 1.01, right(*args)[1])
    )
    assert "NOT WITHIN THE BOUNDS" in run(capsys, *SMALL, "--peers", "none", status=1)


@pytest.mark.cuda
def test_on_the_gpu(capsys):
    printed = run(capsys, "--B", "1", "--N", "512", "--causal", "--iters", "3")
    for part in ("bfloat16", "within the bounds", "sdpa flash", "sdpa cudnn", "fwd_kernel", "registers"):
        assert part in printed
    printed = run(capsys, "--B", "1", "--N", "512", "--causal", "--iters", "3", "--backward")
    for part in ("  dq   ", "within the bounds", "sdpa cudnn", "bwd_kernel", "workspace"):
        assert part in printed
    assert "NOT WITHIN" not in printed
