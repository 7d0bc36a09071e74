"""The steps between the GEMMs in Triton: embedding, residual + RMSNorm, RoPE + append to pages, SiLU·mul.

Each moves every byte once. Knows nothing of models or plans.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from worker.kernels.chain import CHAINED, after_previous


@triton.jit
def _embed_kernel(tokens, last_tokens, table, out, hidden, BLOCK: tl.constexpr, PDL: tl.constexpr):
    after_previous(PDL)
    row = tl.program_id(0)
    token = tl.load(tokens + row)
    if token < 0:
        token = tl.load(last_tokens - token - 1)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(table + token.to(tl.int64) * hidden + columns, mask=columns < hidden)
    tl.store(out + row.to(tl.int64) * hidden + columns, values, mask=columns < hidden)


def embed(tokens: torch.Tensor, last_tokens: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
    """out[r] = table[token of row r]; a token -1 - s stands for last_tokens[s], the one last sampled in slot s."""
    hidden = table.shape[1]
    block = min(1024, triton.next_power_of_2(hidden))
    _embed_kernel[(tokens.shape[0], triton.cdiv(hidden, block))](
        tokens, last_tokens, table, out, hidden, BLOCK=block, num_warps=4, **CHAINED
    )


@triton.jit
def _add_rms_norm_kernel(
    residual, delta, rows, num_rows, weight, out, hidden, eps, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    after_previous(PDL)
    target = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < hidden
    source = target
    if rows is not None:
        # A gathered row: the residual itself is not needed again, so it is not written back.
        if target >= tl.load(num_rows):
            return
        source = tl.load(rows + target).to(tl.int64)
    x = tl.load(residual + source * hidden + columns, mask=mask, other=0.0).to(tl.float32)
    if delta is not None:
        x += tl.load(delta + source * hidden + columns, mask=mask, other=0.0).to(tl.float32)
        if rows is None:
            tl.store(residual + source * hidden + columns, x.to(residual.dtype.element_ty), mask=mask)
        # What later layers read is the rounded sum: the norm must see the same.
        x = x.to(residual.dtype.element_ty).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / hidden + eps)
    y = x * scale * tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + target * hidden + columns, y.to(out.dtype.element_ty), mask=mask)


def add_rms_norm(
    residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, out: torch.Tensor, eps: float
) -> None:
    """residual += delta (where given), out = residual / rms(residual) * weight. All [rows, hidden]."""
    hidden = residual.shape[1]
    block = triton.next_power_of_2(hidden)
    _add_rms_norm_kernel[(residual.shape[0],)](
        residual,
        delta,
        None,
        None,
        weight,
        out,
        hidden,
        eps,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
        **CHAINED,
    )


def gather_add_rms_norm(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    rows: torch.Tensor,
    num_rows: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
) -> None:
    """out[i] = RMSNorm((residual + delta, where given)[rows[i]]) for i < num_rows; out [len(rows), hidden]."""
    hidden = residual.shape[1]
    block = triton.next_power_of_2(hidden)
    _add_rms_norm_kernel[(rows.shape[0],)](
        residual,
        delta,
        rows,
        num_rows,
        weight,
        out,
        hidden,
        eps,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
        **CHAINED,
    )


@triton.jit
def _rope_append_kernel(
    qkv,  # [rows, stride]
    positions,
    cells,  # [rows] int32
    cos,  # [positions, D / 2] fp32
    sin,
    k_pages,
    v_pages,
    stride,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,  # D / 2 rounded up to a power of two
    P: tl.constexpr,
    HEADS: tl.constexpr,  # per program
    PDL: tl.constexpr,
):
    after_previous(PDL)
    row = tl.program_id(0)
    cell = tl.load(cells + row)
    if cell < 0:
        return
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    lane = tl.arange(0, HALF)
    position = tl.load(positions + row).to(tl.int64)
    in_half = lane < D // 2
    c = tl.load(cos + position * (D // 2) + lane, mask=in_half, other=0.0)[None, :]
    s = tl.load(sin + position * (D // 2) + lane, mask=in_half, other=0.0)[None, :]
    source = qkv + row.to(tl.int64) * stride + head[:, None] * D + lane[None, :]
    mask = (head < HQ + 2 * HK)[:, None] & in_half[None, :]
    x = tl.load(source, mask=mask, other=0.0)
    y = tl.load(source + D // 2, mask=mask, other=0.0)
    turned = (head < HQ + HK)[:, None]
    x32, y32 = x.to(tl.float32), y.to(tl.float32)
    first = tl.where(turned, x32 * c - y32 * s, x32).to(x.dtype)
    second = tl.where(turned, y32 * c + x32 * s, y32).to(x.dtype)
    is_q = mask & (head < HQ)[:, None]
    tl.store(source, first, mask=is_q)
    tl.store(source + D // 2, second, mask=is_q)
    page, offset = (cell // P).to(tl.int64), cell % P
    is_k = mask & ((head >= HQ) & (head < HQ + HK))[:, None]
    k_target = k_pages + ((page * HK + head - HQ)[:, None] * P + offset) * D + lane[None, :]
    tl.store(k_target, first, mask=is_k)
    tl.store(k_target + D // 2, second, mask=is_k)
    is_v = mask & (head >= HQ + HK)[:, None]
    v_target = v_pages + ((page * HK + head - HQ - HK)[:, None] * P + offset) * D + lane[None, :]
    tl.store(v_target, first, mask=is_v)
    tl.store(v_target + D // 2, second, mask=is_v)


def rope_append(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cells: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    *,
    num_heads: int,
) -> None:
    """Rotate q in place; rotate k and copy k and v to their cells of the pages.

    qkv [rows, (HQ + 2 HK) * D]; cells[r] = page * page_size + offset, negative for a row that is padding;
    cos, sin [positions, D / 2] fp32; pages [pages, HK, P, D]. Halves are rotated against each other (LLaMA).
    """
    _, kv_heads, page_size, head_dim = k_pages.shape
    heads = num_heads + 2 * kv_heads
    per_program = min(16, triton.next_power_of_2(heads))
    _rope_append_kernel[(qkv.shape[0], triton.cdiv(heads, per_program))](
        qkv,
        positions,
        cells,
        cos,
        sin,
        k_pages,
        v_pages,
        qkv.stride(0),
        HQ=num_heads,
        HK=kv_heads,
        D=head_dim,
        HALF=triton.next_power_of_2(head_dim // 2),
        P=page_size,
        HEADS=per_program,
        num_warps=4,
        **CHAINED,
    )


@triton.jit
def _silu_mul_kernel(gate_up, out, width, GATE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    source = gate_up + row * 2 * width + (columns // GATE) * 2 * GATE + columns % GATE
    gate = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(source + GATE, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=mask)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor, gate_block: int) -> None:
    """out[rows, W] = silu(gate) * up, where gate and up alternate in gate_up's columns in blocks of gate_block."""
    width = out.shape[1]
    _silu_mul_kernel[(out.shape[0], triton.cdiv(width, 1024))](
        gate_up, out, width, GATE=gate_block, BLOCK=1024, num_warps=4, **CHAINED
    )
