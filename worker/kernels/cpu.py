"""The layer's element-wise and matrix kernels on a CPU: few torch calls, and results into buffers that exist.

At a batch of one a layer's matrices take a millisecond, so every call that is saved shows.
Knows nothing of requests, schedules or models.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

# torch multiplies fp32 matrices by MKL, which on an AMD EPYC takes twice as long as oneDNN for one row, and 1.4
# times for 16 (weights of 3072 x 576 from memory, two cores). This operator is oneDNN's; torch's compiler uses it too.
_ONEDNN_LINEAR: Callable[..., torch.Tensor] | None = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def add_rms_norm(
    residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float
) -> None:
    """residual += delta; out = residual / rms(residual) * weight. All [rows, hidden]."""
    residual.add_(delta)
    scale = torch.linalg.vector_norm(residual, dim=-1, keepdim=True).square_().div_(residual.shape[1]).add_(eps)
    torch.mul(residual, scale.rsqrt_(), out=out).mul_(weight)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """out [rows, N] = x [rows, K] @ weight [N, K].T + bias [N]."""
    if _ONEDNN_LINEAR is not None:
        out.copy_(_ONEDNN_LINEAR(x, weight, bias, "none", [], ""))
    elif bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def rotate(heads: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> None:
    """Rotate heads [rows, heads, head_dim] in place; cos and (-sin, sin) are [rows, 1, head_dim]."""
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
    heads.mul_(cos).addcmul_(swapped, signed_sin)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """out [rows, W] = silu(gate) * up, where gate_up [rows, 2 W] holds gate before up. Overwrites gate_up."""
    gate, up = gate_up.chunk(2, dim=-1)
    torch.mul(functional.silu(gate, inplace=True), up, out=out)
