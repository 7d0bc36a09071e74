"""The element-wise kernels against their reference."""

from __future__ import annotations

import pytest
import torch

from worker.kernels import reference

pytestmark = pytest.mark.gpu


def close(out: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(out.float(), expected.float(), rtol=1e-2, atol=1e-2)


def test_embed_reads_known_and_sampled_tokens(dtype, device):
    from worker.kernels import elementwise

    table = torch.randn(50, 1536, device=device).to(dtype)
    tokens = torch.tensor([3, -1, 49, -3], dtype=torch.int32, device=device)
    last = torch.tensor([7, 0, 11], dtype=torch.int32, device=device)
    out = torch.full((4, 1536), float("nan"), dtype=dtype, device=device)
    elementwise.embed(tokens, last, table, out)
    assert torch.equal(out, table[[3, 7, 49, 11]])


@pytest.mark.parametrize("hidden", [576, 4096])
@pytest.mark.parametrize("with_delta", [False, True])
def test_add_rms_norm(hidden, with_delta, dtype, device):
    from worker.kernels import elementwise

    residual = torch.randn(5, hidden, device=device).to(dtype)
    delta = torch.randn(5, hidden, device=device).to(dtype) if with_delta else None
    weight = torch.randn(hidden, device=device).to(dtype)
    copy, out, expected = residual.clone(), torch.empty_like(residual), torch.empty_like(residual)
    elementwise.add_rms_norm(residual, delta, weight, out, 1e-5)
    reference.add_rms_norm(copy, delta, weight, expected, 1e-5)
    assert close(residual, copy)
    assert close(out, expected)


def test_gather_add_rms_norm_writes_the_counted_rows(dtype, device):
    from worker.kernels import elementwise

    residual, delta = (torch.randn(9, 576, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(576, device=device).to(dtype)
    rows = torch.tensor([8, 0, 3, 0, 0], dtype=torch.int32, device=device)
    count = torch.tensor([3], dtype=torch.int32, device=device)
    out, expected = (torch.full((5, 576), 7.0, dtype=dtype, device=device) for _ in range(2))
    elementwise.gather_add_rms_norm(residual, delta, rows, count, weight, out, 1e-5)
    reference.gather_add_rms_norm(residual, delta, rows, count, weight, expected, 1e-5)
    assert close(out, expected)
    assert (out[3:] == 7.0).all()


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (9, 3, 64), (4, 4, 96), (7, 1, 128)])
def test_rope_append(heads, kv_heads, head_dim, dtype, device):
    from worker.kernels import elementwise

    page_size, rows = 16, 6
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * head_dim, device=device).to(dtype)
    positions = torch.tensor([0, 5, 17, 99, 1, 0], dtype=torch.int32, device=device)
    cells = torch.tensor([3 * 16 + 0, 5, 16 + 1, 2 * 16 + 15, 6, -1], dtype=torch.int32, device=device)
    angles = torch.rand(100, head_dim // 2, device=device)
    pages = [torch.zeros(4, kv_heads, page_size, head_dim, dtype=dtype, device=device) for _ in range(4)]
    copy = qkv.clone()
    elementwise.rope_append(qkv, positions, cells, angles.cos(), angles.sin(), *pages[:2], num_heads=heads)
    reference.rope_append(copy, positions, cells, angles.cos(), angles.sin(), *pages[2:], num_heads=heads)
    assert close(qkv, copy)
    assert close(pages[0], pages[2])
    assert torch.equal(pages[1], pages[3])


@pytest.mark.parametrize(("width", "gate_block"), [(1536, 128), (1000, 1000)])
def test_silu_mul(width, gate_block, dtype, device):
    from worker.kernels import elementwise

    gate_up = torch.randn(5, 2 * width, device=device).to(dtype)
    out, expected = (torch.full((5, width), float("nan"), dtype=dtype, device=device) for _ in range(2))
    elementwise.silu_mul(gate_up, out, gate_block)
    reference.silu_mul(gate_up, expected, gate_block)
    assert close(out, expected)
