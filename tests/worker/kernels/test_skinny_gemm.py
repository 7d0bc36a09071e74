"""The GEMMs of few rows against plain torch: odd widths, splits, biases, SiLU·mul, repeated launches."""

from __future__ import annotations

import pytest
import torch

from worker.kernels import reference

pytestmark = pytest.mark.gpu


def operands(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device):
    torch.manual_seed(m * n + k)
    x = torch.randn(m, k, dtype=torch.float32).to(device, dtype)
    w = (torch.randn(n, k, dtype=torch.float32) / k**0.5).to(device, dtype)
    return x, w


def error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(("m", "n", "k"), [(1, 96, 256), (3, 100, 200), (16, 64, 512), (33, 130, 96), (64, 64, 128)])
@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_equals_reference(m, n, k, splits, has_bias, dtype, device):
    from worker.kernels.skinny_gemm import SkinnyTile, SkinnyWorkspace, skinny_linear

    x, w = operands(m, n, k, dtype, device)
    bias = torch.randn(n).to(device, dtype) if has_bias else None
    workspace, tile = SkinnyWorkspace(device), SkinnyTile(columns=32, depth=64, splits=splits, stages=2)
    expected = torch.empty(m, n, dtype=torch.float32, device=device)
    reference.linear(x.float(), w.float(), expected, None if bias is None else bias.float())
    for _ in range(2):  # the second finds the workspace as the first left it
        out = torch.full((m, n), float("nan"), device=device, dtype=dtype)
        skinny_linear(x, w, out, workspace, tile=tile, bias=bias)
        assert error(out, expected) < 6e-3


@pytest.mark.parametrize(("m", "width", "k", "block"), [(1, 128, 128, 64), (5, 96, 160, 96), (40, 64, 96, 32)])
@pytest.mark.parametrize("splits", [1, 3])
def test_gated_equals_reference(m, width, k, block, splits, dtype, device):
    from worker.kernels.skinny_gemm import SkinnyTile, SkinnyWorkspace, skinny_linear

    x, w = operands(m, 2 * width, k, dtype, device)
    both = torch.empty(m, 2 * width, dtype=torch.float32, device=device)
    expected = torch.empty(m, width, dtype=torch.float32, device=device)
    reference.linear(x.float(), w.float(), both)
    reference.silu_mul(both, expected, block)
    out = torch.full((m, width), float("nan"), device=device, dtype=dtype)
    tile = SkinnyTile(columns=32, depth=32, splits=splits, stages=2)
    skinny_linear(x, w, out, SkinnyWorkspace(device), tile=tile, gate_block=block)
    assert error(out, expected) < 6e-3


def test_too_many_rows_are_refused(device):
    from worker.kernels.skinny_gemm import MAX_ROWS, SkinnyTile, SkinnyWorkspace, skinny_linear

    x, w = operands(MAX_ROWS + 1, 32, 32, torch.float16, device)
    with pytest.raises(ValueError, match="at most"):
        skinny_linear(x, w, torch.empty(65, 32, device=device), SkinnyWorkspace(device), tile=SkinnyTile())
