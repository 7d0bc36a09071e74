"""The GEMM kernels against their reference: odd row counts, counts on the device, biases, both epilogues."""

from __future__ import annotations

import pytest
import torch

from worker.kernel_set import GATE_BLOCK, Norm
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


@pytest.mark.parametrize("rows", [64, 128])
def test_silu_mul_epilogue(rows, dtype, device):
    from worker.kernels import gemm

    x = torch.randn(150, 128, device=device).to(dtype)
    gate, up = (torch.randn(256, 128, device=device).to(dtype) / 8 for _ in range(2))
    weight = reference.interleave_gate_up(gate, up, GATE_BLOCK)
    out, expected = (torch.full((150, 256), float("nan"), dtype=dtype, device=device) for _ in range(2))
    gemm.linear(x, weight, out, sms=3, silu_mul=True, tile=gemm.Tile(rows=rows))
    both = torch.empty(150, 512, dtype=torch.float32, device=device)
    reference.linear(x, weight, both)
    reference.silu_mul(both, expected, GATE_BLOCK)
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


def test_argmax_reports_rows_with_an_infinity_of_either_sign(dtype, device):
    from worker.kernels import gemm

    x, w = (torch.randn(n, 128, device=device).to(dtype).abs() for n in (70, 300))
    w[7, 0] = float("-inf")
    best, column = torch.zeros(2, 70, device=device), torch.zeros(2, 70, dtype=torch.int32, device=device)
    gemm.linear_argmax(x, w, best, column, torch.tensor([70], dtype=torch.int32, device=device), sms=3)
    assert (best[0] == float("inf")).all()
    assert best[1].isfinite().all()


@pytest.mark.parametrize("with_bias", [False, True])
def test_norms_in_the_ends_of_two_gemms_equal_a_norm_between_them(with_bias, dtype, device):
    from worker.kernels import gemm

    rows, hidden, wide, eps = 200, 328, 256, 1e-5
    x, w = (torch.randn(n, 192, device=device).to(dtype) / 8 for n in (rows, hidden))
    residual, gain = torch.randn(rows, hidden, device=device).to(dtype), torch.rand(hidden, device=device).to(dtype)
    bias = torch.randn(hidden, device=device).to(dtype) if with_bias else None
    then = torch.randn(wide, hidden, device=device).to(dtype) / 16
    delta, normed, expected = (torch.empty(rows, n, dtype=dtype, device=device) for n in (hidden, hidden, wide))
    own, scaled, out = residual.clone(), torch.empty_like(normed), torch.empty_like(expected)
    reference.linear(x, w, delta, bias)
    reference.add_rms_norm(residual, delta, gain, normed, eps)
    squares = torch.full((Norm.num_parts(hidden), rows + 8), float("nan"), device=device)
    gemm.linear_add(x, w, own, gain, scaled, squares, sms=3, bias=bias)
    next_bias = 5 * torch.randn(wide, device=device).to(dtype) if with_bias else None
    gemm.linear(scaled, then, out, sms=3, bias=next_bias, squares=squares, eps=eps)
    reference.linear(normed, then, expected, next_bias)
    assert relative_error(own, residual) < 5e-3
    assert relative_error(out, expected) < 8e-3
    assert squares[:, rows:].isnan().all()
    gate_up = reference.interleave_gate_up(then[:128], then[128:], GATE_BLOCK)
    gated, both, wanted = (torch.empty(rows, n, dtype=dtype, device=device) for n in (128, 256, 128))
    gemm.linear(scaled, gate_up, gated, sms=3, silu_mul=True, squares=squares, eps=eps)
    reference.linear(normed, gate_up, both)
    reference.silu_mul(both, wanted, GATE_BLOCK)
    assert relative_error(gated, wanted) < 1e-2
