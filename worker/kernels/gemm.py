"""Persistent GEMMs for Hopper in Triton: plain, with SiLU·mul or with the row's argmax in the epilogue.

One block per SM walks over the output tiles; operands come by TMA, and the epilogue of a tile runs beside the
loads of the next. With the argmax the row count lives on the device, so that a captured graph serves any number of
rows. Knows nothing of models; which kernel serves which shape is decided by measurement in `worker.gemm_choice`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from worker.kernel_set import TILE_COLUMNS
from worker.kernels.chain import CHAINED, after_previous


@dataclass(frozen=True, slots=True)
class Tile:
    """The shape of one output tile and how its loop is pipelined."""

    rows: int = 128
    columns: int = TILE_COLUMNS
    depth: int = 64
    stages: int = 3
    warps: int = 8


_MOST_GROUPED = 16  # tile rows

LOW_TILE = Tile(rows=64, stages=4, warps=4)  # for at most 64 rows


@triton.jit
def _tile_of(tile, num_m, num_n, group):
    """Row and column of a tile; groups of so many tile rows share the weight's columns in L2."""
    width = group * num_n
    first = (tile // width) * group
    rows = min(num_m - first, group)
    return first + tile % rows, (tile % width) // rows


@triton.jit
def _halves(acc, BM: tl.constexpr, BN: tl.constexpr):
    """Left and right half of a tile's columns."""
    return tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))


@triton.jit
def _add(c, scaled, gain, product, row, column, columns, N, DTYPE: tl.constexpr):
    """c += product, scaled = c * gain, in half a tile's columns; the sums of c squared."""
    value = (product + c.load([row, column]).to(tl.float32)).to(DTYPE)
    c.store([row, column], value)
    # What later layers read is the rounded sum: the norm must see the same.
    value = value.to(tl.float32)
    by_column = tl.load(gain + columns, mask=columns < N, other=0.0).to(tl.float32)
    scaled.store([row, column], (value * by_column[None, :]).to(DTYPE))
    return tl.sum(value * value, 1)


@triton.jit(do_not_specialize=["group"])
def _gemm_kernel(
    a,  # descriptor [M, K], blocks [BM, BK]
    b,  # descriptor [N, K], blocks [BN, BK]
    c,  # descriptor [M, N] or, with SILU_MUL, [M, N // 2], blocks [BM, BN // 2]
    scaled,  # descriptor as c's, with gain
    bias,  # [N] or None
    gain,  # [N] or None: c += product, scaled = c * gain, and each tile's sums of c squared go to squares
    squares,  # [PARTS, squares_stride] fp32: parts of the sums of rows' squares, written with gain, else read, or None
    squares_stride,
    M,
    N,
    K,
    eps,
    group,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,  # of the squares that are read
    SILU_MUL: tl.constexpr,
    DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    num_m, num_n, num_k = tl.cdiv(M, BM), tl.cdiv(N, BN), tl.cdiv(K, BK)
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=True):
        m, n = _tile_of(tile, num_m, num_n, group)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(num_k):
            acc = tl.dot(a.load([m * BM, k * BK]), b.load([n * BN, k * BK]).T, acc)
        rows = m * BM + tl.arange(0, BM)
        if PARTS > 0:
            total = tl.zeros((BM,), tl.float32)
            for part in tl.static_range(PARTS):
                total += tl.load(squares + part * squares_stride + rows, mask=rows < M, other=0.0)
            acc *= tl.rsqrt(total / K + eps)[:, None]
        if bias is not None:
            columns = n * BN + tl.arange(0, BN)
            acc += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
        left, right = _halves(acc, BM, BN)
        if gain is not None:
            columns = n * BN + tl.arange(0, BN // 2)
            total = _add(c, scaled, gain, left, m * BM, n * BN, columns, N, DTYPE)
            total += _add(c, scaled, gain, right, m * BM, n * BN + BN // 2, columns + BN // 2, N, DTYPE)
            tl.store(squares + n * squares_stride + rows, total, mask=rows < M)
        elif SILU_MUL:
            c.store([m * BM, n * (BN // 2)], (left / (1.0 + tl.exp(-left)) * right).to(DTYPE))
        else:
            c.store([m * BM, n * BN], left.to(DTYPE))
            c.store([m * BM, n * BN + BN // 2], right.to(DTYPE))


@triton.jit(do_not_specialize=["group"])
def _gemm_argmax_kernel(
    a,  # descriptor [M, K]
    b,  # descriptor [N, K]
    best,  # [tiles of N, M] fp32: the largest product in the tile's columns
    best_column,  # [tiles of N, M] int32: its column, the lowest of equals
    num_rows,
    M,
    N,
    K,
    group,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    live = min(M, tl.load(num_rows))
    num_m, num_n, num_k = tl.cdiv(live, BM), tl.cdiv(N, BN), tl.cdiv(K, BK)
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=True):
        m, n = _tile_of(tile, num_m, num_n, group)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(num_k):
            acc = tl.dot(a.load([m * BM, k * BK]), b.load([n * BN, k * BK]).T, acc)
        columns = n * BN + tl.arange(0, BN)
        # What is not finite must not lose the comparison: it becomes an infinity, which the reader reports as a fault.
        acc = tl.where(tl.abs(acc) < float("inf"), acc, float("inf"))
        acc = tl.where((columns < N)[None, :], acc, float("-inf"))
        top, where = tl.max(acc, axis=1, return_indices=True, return_indices_tie_break_left=True)
        rows = m * BM + tl.arange(0, BM)
        tl.store(best + n * M + rows, top, mask=rows < live)
        tl.store(best_column + n * M + rows, n * BN + where, mask=rows < live)


def _grid(rows: int, columns: int, tile: Tile, sms: int) -> int:
    return int(min(sms, triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)))


def _group(rows: int, tile: Tile) -> int:
    """Tile rows of a group, all about the same: each group reads the whole weight once."""
    num_rows = triton.cdiv(rows, tile.rows)
    return int(triton.cdiv(num_rows, triton.cdiv(num_rows, _MOST_GROUPED)))


_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    sms: int,
    bias: torch.Tensor | None = None,
    silu_mul: bool = False,
    squares: torch.Tensor | None = None,
    eps: float = 0.0,
    tile: Tile = Tile(),
) -> None:
    """out[M, N] = x[M, K] @ weight[N, K].T + bias; with `silu_mul`, out[M, N/2] = silu(gate) * up.

    `silu_mul` wants a weight whose gate and up rows alternate in blocks of GATE_BLOCK (`interleave_gate_up`).
    K * itemsize and the row sizes of `out` must be multiples of 16 bytes (TMA).

    `squares` [parts, >= M] fp32 are parts of the sums of squares of the rows that x is a multiple of (`linear_add`):
    each row of the product is divided by their root mean square, over K. So x @ weight.T becomes what it would be of
    the normed rows.
    """
    parts = 0 if squares is None else squares.shape[0]
    _launch(x, weight, out, sms, tile, bias=bias, squares=squares, parts=parts, eps=eps, silu_mul=silu_mul)


def linear_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    gain: torch.Tensor,
    scaled: torch.Tensor,
    squares: torch.Tensor,
    *,
    sms: int,
    bias: torch.Tensor | None = None,
    tile: Tile = Tile(),
) -> None:
    """residual[M, N] += x[M, K] @ weight[N, K].T + bias; scaled[M, N] = residual * gain[N].

    Parts of the rows' sums of residual squared, one for each tile's columns, go to squares [parts, >= M] fp32: with
    them and `scaled` the next GEMM computes on RMSNorm(residual) with weight `gain`, and no norm need run.
    """
    assert squares.shape[0] == triton.cdiv(weight.shape[0], tile.columns)
    _launch(x, weight, residual, sms, tile, bias=bias, scaled=scaled, gain=gain, squares=squares)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    sms: int,
    tile: Tile,
    *,
    bias: torch.Tensor | None,
    squares: torch.Tensor | None,
    scaled: torch.Tensor | None = None,
    gain: torch.Tensor | None = None,
    parts: int = 0,
    eps: float = 0.0,
    silu_mul: bool = False,
) -> None:
    (m, k), n = x.shape, weight.shape[0]
    half = [tile.rows, tile.columns // 2]
    _gemm_kernel[(_grid(m, n, tile, sms),)](
        TensorDescriptor.from_tensor(x, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(weight, [tile.columns, tile.depth]),
        TensorDescriptor.from_tensor(out, half),
        None if scaled is None else TensorDescriptor.from_tensor(scaled, half),
        bias,
        gain,
        squares,
        0 if squares is None else squares.stride(0),
        m,
        n,
        k,
        eps,
        _group(m, tile),
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.depth,
        PARTS=parts,
        SILU_MUL=silu_mul,
        DTYPE=_DTYPES[out.dtype],
        num_warps=tile.warps,
        num_stages=tile.stages,
        **CHAINED,
    )


def linear_argmax(
    x: torch.Tensor,
    weight: torch.Tensor,
    best: torch.Tensor,
    best_column: torch.Tensor,
    num_rows: torch.Tensor,
    *,
    sms: int,
    tile: Tile = Tile(),
) -> None:
    """Per tile of columns, the largest of x[M, K] @ weight[N, K].T and its column, for rows < num_rows.

    The products never reach memory: best and best_column are [ceil(N / tile.columns), M], fp32 and int32.
    """
    (m, k), n = x.shape, weight.shape[0]
    grid = _grid(m, n, tile, sms)
    _gemm_argmax_kernel[(grid,)](
        TensorDescriptor.from_tensor(x, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(weight, [tile.columns, tile.depth]),
        best,
        best_column,
        num_rows,
        m,
        n,
        k,
        _group(m, tile),
        BM=tile.rows,
        BN=tile.columns,
        BK=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **CHAINED,
    )
