"""Paged causal attention for prefill chunks in Triton: many query tokens of a sequence against its KV pages.

The query heads of one KV head are packed beside the tokens into the rows of a tile, so that K and V are read once
for all of them. Blocks draw tiles from a ticket counter over a work list on the device, longest first, so one
launch of fixed size serves any mix of chunks. Knows nothing of models or plans.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from worker.kernels.chain import CHAINED, after_previous
from worker.work_lists import PREFILL_ROWS


@triton.jit
def _cells(table, keys, start, end, h, HK: tl.constexpr, P: tl.constexpr, BN: tl.constexpr, BORDER: tl.constexpr):
    """Where a tile's keys of KV head h lie, counted in rows of D values."""
    if P >= BN:
        page = tl.load(table + start // P).to(tl.int64)
        return (page * HK + h) * P + keys % P
    if BORDER:
        page = tl.load(table + keys // P, mask=keys < end, other=0).to(tl.int64)
    else:
        page = tl.load(table + keys // P).to(tl.int64)
    return (page * HK + h) * P + keys % P


@triton.jit
def _accumulate(acc, total_p, top, s, v):
    """One tile of scores (times log2 e) and values more (online softmax)."""
    higher = tl.maximum(top, tl.max(s, 1))
    fade = tl.exp2(top - higher)
    p = tl.exp2(s - higher[:, None])
    return tl.dot(p.to(v.dtype), v, acc * fade[:, None]), total_p * fade + tl.sum(p, 1), higher


@triton.jit
def _prefill_kernel(
    q,  # [rows, q_stride]
    k_pages,  # [pages, HK, P, D]
    v_pages,
    page_table,
    units,
    span,
    ticket,
    out,
    q_stride,
    table_stride,
    out_stride,
    scale,
    HK: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,  # G rounded up to a power of two
    D: tl.constexpr,
    DP: tl.constexpr,
    P: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    om, od, on = tl.arange(0, BM), tl.arange(0, DP), tl.arange(0, BN)
    token, g = om // GP, om % GP
    first_unit = tl.load(span)
    total = (tl.load(span + 1) - first_unit) * HK
    work = tl.atomic_add(ticket, 1, sem="relaxed")
    while work < total:
        following = tl.atomic_add(ticket, 1, sem="relaxed")
        unit = units + (first_unit + work // HK) * 4
        h = work % HK
        row, count, position, slot = tl.load(unit), tl.load(unit + 1), tl.load(unit + 2), tl.load(unit + 3)
        inside = ((token < count) & (g < G))[:, None] & (od[None, :] < D)
        head = (h * G + g)[:, None] * D + od[None, :]
        query = tl.load(q + (row + token).to(tl.int64)[:, None] * q_stride + head, mask=inside, other=0.0)
        table = page_table + slot.to(tl.int64) * table_stride
        top = tl.full([BM], float("-inf"), tl.float32)
        total_p = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, DP], tl.float32)
        end = position + count
        # Tiles that every query sees whole need no masks.
        whole = (position + 1) // BN * BN
        for start in tl.range(0, whole, BN, num_stages=STAGES):
            tokens = _cells(table, start + on, start, end, h, HK, P, BN, False)
            offsets = tokens[:, None] * D + od[None, :]
            if D == DP:
                k, v = tl.load(k_pages + offsets), tl.load(v_pages + offsets)
            else:
                k = tl.load(k_pages + offsets, mask=od[None, :] < D, other=0.0)
                v = tl.load(v_pages + offsets, mask=od[None, :] < D, other=0.0)
            s = tl.dot(query, tl.trans(k)) * scale
            acc, total_p, top = _accumulate(acc, total_p, top, s, v)
        for start in tl.range(whole, end, BN, num_stages=STAGES):
            tokens = _cells(table, start + on, start, end, h, HK, P, BN, True)
            offsets = tokens[:, None] * D + od[None, :]
            live = (start + on < end)[:, None] & (od[None, :] < D)
            k = tl.load(k_pages + offsets, mask=live, other=0.0)
            v = tl.load(v_pages + offsets, mask=live, other=0.0)
            # Key 0 is visible to every query, so the running maximum is finite from the first tile on.
            visible = (start + on)[None, :] <= (position + token)[:, None]
            s = tl.where(visible, tl.dot(query, tl.trans(k)) * scale, float("-inf"))
            acc, total_p, top = _accumulate(acc, total_p, top, s, v)
        target = out + (row + token).to(tl.int64)[:, None] * out_stride + head
        tl.store(target, (acc / total_p[:, None]).to(out.dtype.element_ty), mask=inside)
        work = following


def prefill_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    units: torch.Tensor,
    span: torch.Tensor,
    ticket: torch.Tensor,
    out: torch.Tensor,
    *,
    group: int,
    blocks: int,
    tokens_per_tile: int = 64,
    stages: int = 3,
    warps: int = 4,
) -> None:
    """Causal softmax(q k / sqrt(D)) v for the units' rows; shapes as in `decode_attention`.

    A unit, of PREFILL_FIELDS, has at most `prefill_tokens(group)` tokens (`worker.work_lists`). Its keys, the chunk's
    own included, must already lie in the pages.
    """
    _, kv_heads, page_size, head_dim = k_pages.shape
    _prefill_kernel[(blocks,)](
        q,
        k_pages,
        v_pages,
        page_table,
        units,
        span,
        ticket,
        out,
        q.stride(0),
        page_table.stride(0),
        out.stride(0),
        math.log2(math.e) / math.sqrt(head_dim),
        HK=kv_heads,
        G=group,
        GP=triton.next_power_of_2(group),
        D=head_dim,
        DP=max(16, triton.next_power_of_2(head_dim)),
        P=page_size,
        BM=PREFILL_ROWS,
        BN=tokens_per_tile,
        STAGES=stages,
        num_warps=warps,
        **CHAINED,
    )
