"""The GEMM kernels against their reference: odd row counts, counts on the device, biases, both epilogues."""

from __future__ import annotations

import pytest
import torch

from worker.kernels import reference

pytestmark = pytest.mark.gpu


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    out, expected = out.double().cpu(), expected.double().cpu()
    return float((out - expected).norm() / expected.norm())


def test_linear_with_bias(dtype, device):
    from worker.kernels import gemm

    x, w = (torch.randn(n, 192, device=device).to(dtype) for n in (200, 328))
    bias = torch.randn(328, device=device).to(dtype)
    out, expected = (torch.full((200, 328), float("nan"), dtype=dtype, device=device) for _ in range(2))
    gemm.linear(x, w, out, sms=3, bias=bias)
    reference.linear(x, w, expected, bias)
    assert relative_error(out, expected) < 5e-3


def test_linear_runs_the_rows_that_the_device_counts(dtype, device):
    from worker.kernels import gemm

    x, w = torch.randn(400, 128, device=device).to(dtype), torch.randn(256, 128, device=device).to(dtype)
    out = torch.full((400, 256), 7.0, dtype=dtype, device=device)
    gemm.linear(x, w, out, sms=3, num_rows=torch.tensor([130], dtype=torch.int32, device=device))
    expected = torch.empty_like(out)
    reference.linear(x, w, expected)
    assert relative_error(out[:130], expected[:130]) < 5e-3
    assert (out[256:] == 7.0).all()


@pytest.mark.parametrize("rows", [64, 128])
def test_silu_mul_epilogue(rows, dtype, device):
    from worker.kernels import gemm

    x = torch.randn(150, 128, device=device).to(dtype)
    gate, up = (torch.randn(256, 128, device=device).to(dtype) / 8 for _ in range(2))
    weight = reference.interleave_gate_up(gate, up, gemm.GATE_BLOCK)
    out, expected = (torch.full((150, 256), float("nan"), dtype=dtype, device=device) for _ in range(2))
    gemm.linear(x, weight, out, sms=3, silu_mul=True, tile=gemm.Tile(rows=rows))
    both = torch.empty(150, 512, dtype=torch.float32, device=device)
    reference.linear(x, weight, both)
    reference.silu_mul(both, expected, gemm.GATE_BLOCK)
    assert relative_error(out, expected) < 5e-3


def test_argmax_epilogue(dtype, device):
    from worker.kernels import gemm

    vocab, rows = 1000, 150
    x, w = (torch.randn(n, 128, device=device).to(dtype) for n in (rows, vocab))
    w[700] = w[300] = x[5] * 4  # a tie: the lower column wins
    x[9] = float("nan")
    best = torch.full((4, rows), float("nan"), device=device)
    column = torch.full((4, rows), -1, dtype=torch.int32, device=device)
    live = torch.tensor([140], dtype=torch.int32, device=device)
    gemm.linear_argmax(x, w, best, column, live, sms=3)
    logits = x.float() @ w.float().T
    value, tile = best[:, :140].max(0)
    chosen = column[:, :140].gather(0, tile[None])[0]
    expected = logits[:140].argmax(-1)
    finite = torch.arange(140, device=device) != 9
    assert torch.equal(chosen[finite].long(), expected[finite])
    assert chosen[5] == 300
    assert value[9] == float("inf")
