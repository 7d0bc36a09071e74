"""Attention over a paged KV cache on a CPU.

Pages are gathered into padded rows, several sequences at a time, and given to torch's fused attention. What depends
on the batch alone (which pages, which mask) is prepared once per iteration and used by every layer.
Knows nothing of requests, schedules or models.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from worker.kv_cache import KVCache

# Sequences are gathered together up to this many bytes, so that what was just gathered is still in the CPU's cache.
GATHER_BYTES = 2 << 20
# A shorter sequence joins a longer one's group if it fills this share of its padded length.
MIN_FILL = 0.75


@dataclass(frozen=True, slots=True)
class AttentionTask:
    """Queries that attend together: one token each of several sequences, or several tokens of one."""

    rows: torch.Tensor | slice  # token rows of the batch
    page_rows: torch.Tensor  # [2 * sequences * kv_heads * pages] of KVCache.page_rows
    num_sequences: int
    context_len: int  # of the longest sequence, <= pages * page_size
    mask: torch.Tensor | None  # added to the scores; None: every query sees the whole context
    causal: bool = False  # query i sees the first i + 1 tokens of the context


def decode_tasks(
    rows: NDArray[np.int64],
    context_lens: NDArray[np.int32],
    page_table: NDArray[np.int32],
    cache: KVCache,
    gather_bytes: int = GATHER_BYTES,
) -> list[AttentionTask]:
    """One query per sequence: `rows` [n] with contexts [n] (the new token included) and page tables [n, pages]."""
    order = np.argsort(-context_lens, kind="stable")
    page_bytes = 2 * cache.page_rows[0].shape[1] * cache.page_rows[0].element_size() * cache.shape.num_kv_heads
    tasks, start = [], 0
    while start < len(order):
        longest = int(context_lens[order[start]])
        num_pages = -(-longest // cache.shape.page_size)
        most = max(1, gather_bytes // (num_pages * page_bytes))
        fits = context_lens[order[start : start + most]] >= MIN_FILL * longest
        members = order[start : start + int(np.argmin(fits) if not fits.all() else len(fits))]
        lens = context_lens[members]
        mask = None
        if (lens != longest).any():
            hidden = torch.from_numpy(np.arange(longest) >= lens[:, None])
            mask = torch.zeros(len(members), 1, 1, longest).masked_fill_(hidden[:, None, None, :], float("-inf"))
        # Behind a sequence's last page comes that page again: what is there must be finite, though it is masked.
        last_pages = (lens - 1) // cache.shape.page_size
        columns = np.minimum(np.arange(num_pages), last_pages[:, None])
        pages = cache.page_row_indexes(page_table[members[:, None], columns])
        member_rows = rows[members]
        first = int(member_rows[0])
        ordered = bool((np.diff(member_rows) == 1).all())
        tasks.append(
            AttentionTask(
                rows=slice(first, first + len(members)) if ordered else torch.from_numpy(member_rows),
                page_rows=torch.from_numpy(pages.reshape(-1)),
                num_sequences=len(members),
                context_len=longest,
                mask=mask,
            )
        )
        start += len(members)
    return tasks


def prefill_task(start: int, stop: int, position: int, page_table: NDArray[np.int32], cache: KVCache) -> AttentionTask:
    """Rows [start, stop) hold the tokens at `position` and after of one sequence with page table [pages]."""
    count = stop - start
    context_len = position + count
    num_pages = -(-context_len // cache.shape.page_size)
    mask = None
    if position and count > 1:
        mask = torch.full((count, context_len), float("-inf")).triu_(position + 1)
    return AttentionTask(
        rows=slice(start, stop),
        page_rows=torch.from_numpy(cache.page_row_indexes(page_table[None, :num_pages]).reshape(-1)),
        num_sequences=1,
        context_len=context_len,
        mask=mask,
        causal=position == 0,
    )


def attend(task: AttentionTask, queries: torch.Tensor, cache: KVCache, layer: int, out: torch.Tensor) -> None:
    """Attention of the task's rows: queries and out are [rows of the batch, num_heads, head_dim]."""
    kv_heads, head_dim = cache.shape.num_kv_heads, cache.shape.head_dim
    gathered = cache.page_rows[layer].index_select(0, task.page_rows)
    keys, values = gathered.view(2, task.num_sequences, kv_heads, -1, head_dim)[..., : task.context_len, :].unbind()
    query = queries[task.rows]
    num_rows, num_heads, _ = query.shape
    group = num_heads // kv_heads  # queries per KV head
    if task.num_sequences == num_rows:  # one query per sequence: the group takes the place of the query length
        query = query.view(num_rows, kv_heads, group, head_dim)
        result = F.scaled_dot_product_attention(query, keys, values, attn_mask=task.mask)
        out[task.rows] = result.reshape(num_rows, num_heads, head_dim)
        return
    # KV heads take the place of the batch, so that keys are shared within a group instead of copied.
    query = query.view(num_rows, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    shape = (kv_heads, group, task.context_len, head_dim)
    keys, values = keys[0, :, None].expand(shape), values[0, :, None].expand(shape)
    result = F.scaled_dot_product_attention(query, keys, values, attn_mask=task.mask, is_causal=task.causal)
    out[task.rows] = result.permute(2, 0, 1, 3).reshape(num_rows, num_heads, head_dim)
