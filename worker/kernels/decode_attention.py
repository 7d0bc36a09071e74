"""Paged decode attention in Triton: one query token per sequence against the sequence's KV pages.

A work list on the device holds key ranges ("units"); blocks draw (unit, KV head) pairs from a ticket counter until
none is left, so one launch of fixed size serves any number of sequences of any mix of lengths. A sequence that is
split over several units is merged by whichever block finishes its last part. Knows nothing of models or plans.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from worker.kernels.chain import CHAINED, after_previous


@triton.jit
def _decode_kernel(
    q,  # [rows, q_stride] query heads first
    k_pages,  # [pages, HK, P, D]
    v_pages,
    page_table,  # [slots, table_stride] int32
    units,  # [.., DECODE_FIELDS] int32
    span,  # pointer to two: the units to run are [span[0], span[1])
    ticket,  # pointer, zero before the launch
    arrived,  # [partials, HK] int32, zero before and after
    partial_out,  # [partials, HK, G, D] fp32
    partial_max,  # [partials, HK, 16] fp32
    partial_sum,  # [partials, HK, 16] fp32
    out,  # [rows, out_stride]
    q_stride,
    table_stride,
    out_stride,
    scale,  # softmax scale times log2(e)
    HK: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    P: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous(PDL)
    og, od, on = tl.arange(0, 16), tl.arange(0, DP), tl.arange(0, BN)
    in_head = (og[:, None] < G) & (od[None, :] < D)
    first_unit = tl.load(span)
    total = (tl.load(span + 1) - first_unit) * HK
    work = tl.atomic_add(ticket, 1, sem="relaxed")
    while work < total:
        following = tl.atomic_add(ticket, 1, sem="relaxed")
        unit = units + (first_unit + work // HK) * 8
        h = work % HK
        row, slot, begin, end = tl.load(unit), tl.load(unit + 1), tl.load(unit + 2), tl.load(unit + 3)
        first_part, part, parts = tl.load(unit + 4), tl.load(unit + 5), tl.load(unit + 6)
        head = q + row.to(tl.int64) * q_stride + (h * G + og[:, None]) * D + od[None, :]
        query = tl.load(head, mask=in_head, other=0.0)
        table = page_table + slot.to(tl.int64) * table_stride
        top = tl.full([16], float("-inf"), tl.float32)
        total_p = tl.zeros([16], tl.float32)
        acc = tl.zeros([16, DP], tl.float32)
        for start in tl.range(begin, end, BN, num_stages=STAGES):
            if P >= BN:
                page = tl.load(table + start // P).to(tl.int64)
                tokens = (page * HK + h) * P + start % P + on
            else:
                page = tl.load(table + (start + on) // P, mask=start + on < end, other=0).to(tl.int64)
                tokens = (page * HK + h) * P + (start + on) % P
            offsets = tokens[:, None] * D + od[None, :]
            live = (start + on < end)[:, None] & (od[None, :] < D)
            k = tl.load(k_pages + offsets, mask=live, other=0.0)
            v = tl.load(v_pages + offsets, mask=live, other=0.0)
            s = tl.where((start + on < end)[None, :], tl.dot(query, tl.trans(k)) * scale, float("-inf"))
            higher = tl.maximum(top, tl.max(s, 1))
            fade = tl.exp2(top - higher)
            p = tl.exp2(s - higher[:, None])
            total_p = total_p * fade + tl.sum(p, 1)
            acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v)
            top = higher
        target = out + row.to(tl.int64) * out_stride + (h * G + og[:, None]) * D + od[None, :]
        if parts == 1:
            tl.store(target, (acc / total_p[:, None]).to(out.dtype.element_ty), mask=in_head)
        else:
            slot_of_part = (first_part + part) * HK + h
            tl.store(partial_out + (slot_of_part * G + og[:, None]) * D + od[None, :], acc, mask=in_head)
            tl.store(partial_max + slot_of_part * 16 + og, top)
            tl.store(partial_sum + slot_of_part * 16 + og, total_p)
            tl.debug_barrier()
            counter = arrived + first_part * HK + h
            if tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1:
                top = tl.full([16], float("-inf"), tl.float32)
                total_p = tl.zeros([16], tl.float32)
                acc = tl.zeros([16, DP], tl.float32)
                for i in range(parts):
                    at = (first_part + i) * HK + h
                    # Volatile: another block wrote these; a cached line would be stale.
                    part_top = tl.load(partial_max + at * 16 + og, volatile=True)
                    part_sum = tl.load(partial_sum + at * 16 + og, volatile=True)
                    part_acc = tl.load(
                        partial_out + (at * G + og[:, None]) * D + od[None, :], mask=in_head, other=0.0, volatile=True
                    )
                    higher = tl.maximum(top, part_top)
                    fade, grow = tl.exp2(top - higher), tl.exp2(part_top - higher)
                    total_p = total_p * fade + part_sum * grow
                    acc = acc * fade[:, None] + part_acc * grow[:, None]
                    top = higher
                tl.store(target, (acc / total_p[:, None]).to(out.dtype.element_ty), mask=in_head)
                tl.store(counter, 0)
        work = following


class DecodeWorkspace:
    """Device memory that the launches of one engine share: partial results of split sequences."""

    def __init__(self, num_partials: int, num_kv_heads: int, group: int, head_dim: int, device: torch.device) -> None:
        shape = (num_partials, num_kv_heads)
        self.num_partials = num_partials
        self.arrived = torch.zeros(shape, dtype=torch.int32, device=device)
        self.out = torch.zeros((*shape, group, head_dim), dtype=torch.float32, device=device)
        self.max = torch.zeros((*shape, 16), dtype=torch.float32, device=device)
        self.sum = torch.zeros((*shape, 16), dtype=torch.float32, device=device)


def decode_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    units: torch.Tensor,
    span: torch.Tensor,
    ticket: torch.Tensor,
    workspace: DecodeWorkspace,
    out: torch.Tensor,
    *,
    group: int,
    blocks: int,
    tokens_per_tile: int = 64,
    stages: int = 2,
    warps: int = 4,
) -> None:
    """softmax(q k / sqrt(D)) v for the units' rows.

    q [rows, >= HK * group * D] (leading columns), pages [pages, HK, P, D], page_table [slots, pages per slot],
    units [.., DECODE_FIELDS] int32 (`worker.work_lists`) of which [span[0], span[1]) run, ticket one int32 that is
    zero, out [rows, HK * group * D]. Rows in no unit keep what `out` held. A unit's first key must be a multiple of
    `tokens_per_tile`.
    """
    _, kv_heads, page_size, head_dim = k_pages.shape
    if group > 16:
        raise ValueError(f"{group} query heads per KV head: the decode kernel holds at most 16")
    _decode_kernel[(blocks,)](
        q,
        k_pages,
        v_pages,
        page_table,
        units,
        span,
        ticket,
        workspace.arrived,
        workspace.out,
        workspace.max,
        workspace.sum,
        out,
        q.stride(0),
        page_table.stride(0),
        out.stride(0),
        math.log2(math.e) / math.sqrt(head_dim),
        HK=kv_heads,
        G=group,
        D=head_dim,
        DP=max(16, triton.next_power_of_2(head_dim)),
        P=page_size,
        BN=tokens_per_tile,
        STAGES=stages,
        num_warps=warps,
        **CHAINED,
    )
