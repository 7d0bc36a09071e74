"""GEMMs of few rows in Triton: the weights are read once, at the speed of memory; plain or with SiLU·mul.

The weight's rows are the tall side of the product, so that few token rows waste little of it, and the inner dimension
is split over blocks so that every SM reads. Parts are added in a fixed order, by whichever block ends last: a row's
result does not depend on its neighbours or on chance. Knows nothing of models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from worker.kernels.chain import CHAINED, after_previous, prefetch

MAX_ROWS = 64


@dataclass(frozen=True, slots=True)
class SkinnyTile:
    """What one block computes, and how its loop is pipelined."""

    columns: int = 64  # rows of the weight: output columns
    depth: int = 128
    splits: int = 1  # blocks that share one tile's inner dimension
    stages: int = 4
    warps: int = 4


@triton.jit
def _product(x, w, rows, columns, begin, end, x_stride, K, M, N, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """w[columns] @ x[rows].T over [begin, end): [BN, BM] fp32."""
    acc = tl.zeros((BN, BM), tl.float32)
    ks = tl.arange(0, BK)
    w_rows = w + columns.to(tl.int64)[:, None] * K
    x_rows = x + rows[None, :] * x_stride
    for k in range(begin, end, BK):
        inner = k + ks
        a = tl.load(w_rows + inner[None, :], mask=(columns < N)[:, None] & (inner < end)[None, :], other=0.0)
        b = tl.load(x_rows + inner[:, None], mask=(rows < M)[None, :] & (inner < end)[:, None], other=0.0)
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def _skinny_kernel(
    x,  # [M, K], rows x_stride apart
    w,  # [N, K]
    bias,  # [N] or None
    out,  # [M, N] or, with GATED, [M, N / 2]
    partial,  # [tiles, SPLIT, 1 or 2, BN, BM] fp32
    arrived,  # [tiles] int32, zero before and after
    M,
    N,
    K,
    x_stride,
    out_stride,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    GATED: tl.constexpr,  # 0, or how many gate rows come before as many up rows
    PDL: tl.constexpr,
):
    tile, part = tl.program_id(0) // SPLIT, tl.program_id(0) % SPLIT
    rows = tl.arange(0, BM)
    targets = tile * BN + tl.arange(0, BN)
    span = tl.cdiv(tl.cdiv(K, SPLIT), BK) * BK
    begin = part * span
    end = min(begin + span, K)
    columns = targets
    if GATED:
        columns = (targets // GATED) * 2 * GATED + targets % GATED
    # Weights are nobody's output: their first cache lines come while the kernel before still runs.
    lines = begin + tl.arange(0, 8) * (128 // w.dtype.element_ty.primitive_bitwidth * 8)
    prefetch(w + columns.to(tl.int64)[:, None] % N * K + tl.minimum(lines, K - 1)[None, :], PDL)
    after_previous(PDL)
    acc = _product(x, w, rows, columns, begin, end, x_stride, K, M, N, BM, BN, BK)
    up = acc
    if GATED:
        up = _product(x, w, rows, columns + GATED, begin, end, x_stride, K, M, N, BM, BN, BK)
    is_last = True
    if SPLIT > 1:
        cells = tl.arange(0, BN)[:, None] * BM + rows[None, :]
        size: tl.constexpr = (2 if GATED else 1) * BN * BM
        base = partial + tile.to(tl.int64) * SPLIT * size
        tl.store(base + part * size + cells, acc)
        if GATED:
            tl.store(base + part * size + BN * BM + cells, up)
        tl.debug_barrier()
        is_last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLIT - 1
        if is_last:
            acc = tl.zeros((BN, BM), tl.float32)
            up = tl.zeros((BN, BM), tl.float32)
            for i in range(SPLIT):
                # Volatile: another block wrote these; a cached line would be stale.
                acc += tl.load(base + i * size + cells, volatile=True)
                if GATED:
                    up += tl.load(base + i * size + BN * BM + cells, volatile=True)
            tl.store(arrived + tile, 0)
    if is_last:
        if GATED:
            acc = acc / (1.0 + tl.exp(-acc)) * up
        elif bias is not None:
            acc += tl.load(bias + targets, mask=targets < N, other=0.0).to(tl.float32)[:, None]
        width = N // 2 if GATED else N
        target = out + rows[None, :] * out_stride + targets[:, None]
        tl.store(target, acc.to(out.dtype.element_ty), mask=(rows < M)[None, :] & (targets < width)[:, None])


class SkinnyWorkspace:
    """Device memory for the parts of split tiles (16 MiB); launches of one stream share it."""

    def __init__(self, device: torch.device) -> None:
        self.partial = torch.empty(4 << 20, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(4096, dtype=torch.int32, device=device)


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    workspace: SkinnyWorkspace,
    *,
    tile: SkinnyTile,
    bias: torch.Tensor | None = None,
    gate_block: int = 0,
) -> None:
    """out[M, N] = x[M, K] @ weight[N, K].T + bias for M <= MAX_ROWS.

    With gate_block out[M, N / 2] = silu(gate) * up, where gate and up rows alternate in the weight in blocks of
    gate_block rows; tile.columns must divide it.
    """
    (m, k), n = x.shape, weight.shape[0]
    if m > MAX_ROWS:
        raise ValueError(f"{m} rows: the skinny kernel holds at most {MAX_ROWS}")
    width = n // 2 if gate_block else n
    tiles = triton.cdiv(width, tile.columns)
    rows = max(16, triton.next_power_of_2(m))
    needed = tiles * tile.splits * (2 if gate_block else 1) * tile.columns * rows
    if tile.splits > 1 and (needed > workspace.partial.numel() or tiles > workspace.arrived.numel()):
        raise ValueError(f"the workspace holds {workspace.partial.numel()} partial results, {needed} are needed")
    _skinny_kernel[(tiles * tile.splits,)](
        x,
        weight,
        bias,
        out,
        workspace.partial,
        workspace.arrived,
        m,
        n,
        k,
        x.stride(0),
        out.stride(0),
        BM=rows,
        BN=tile.columns,
        BK=tile.depth,
        SPLIT=tile.splits,
        GATED=gate_block,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **CHAINED,
    )
