"""The CPU kernels against plain formulas."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.kernels import cpu, cpu_attention
from worker.kv_cache import KVCache, KVCacheShape

CPU = torch.device("cpu")


def test_norm_linear_and_gate():
    torch.manual_seed(0)
    residual, delta, weight = torch.randn(5, 48), torch.randn(5, 48), torch.randn(48)
    total = residual + delta
    out = torch.empty(5, 48)
    cpu.add_rms_norm(residual, delta, weight, out, 1e-5)
    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(out, total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight)
    matrix, bias, product = torch.randn(20, 48), torch.randn(20), torch.empty(5, 20)
    cpu.linear(out, matrix, None, product)
    torch.testing.assert_close(product, out @ matrix.T)
    cpu.linear(out, matrix, bias, product)
    torch.testing.assert_close(product, out @ matrix.T + bias)
    both, gated = torch.randn(5, 20), torch.empty(5, 10)
    gate, up = both[:, :10].clone(), both[:, 10:].clone()
    cpu.silu_mul(both, gated)
    torch.testing.assert_close(gated, gate * gate.sigmoid() * up)


def test_rotation_turns_pairs_half_a_head_apart():
    angles = torch.rand(3, 4)
    cos, sin = angles.cos(), angles.sin()
    heads = torch.randn(3, 2, 8)
    a, b = heads[..., :4].clone(), heads[..., 4:].clone()
    cpu.rotate(heads, torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None])
    torch.testing.assert_close(heads[..., :4], a * cos[:, None] - b * sin[:, None])
    torch.testing.assert_close(heads[..., 4:], b * cos[:, None] + a * sin[:, None])


def filled_cache(lengths, kv_heads, page_size, head_dim):
    """A cache with random sequences on scattered pages, written row by row; and what was written."""
    tables_width = max(-(-length // page_size) for length in lengths)
    cache = KVCache(KVCacheShape(2, len(lengths) * tables_width, kv_heads, page_size, head_dim), torch.float32, CPU)
    for layer in cache.layers:
        layer.fill_(float("nan"))  # whatever was never written must not be read, masked or not
    tables = np.random.default_rng(0).permutation(cache.shape.num_pages).astype(np.int32)
    tables = tables.reshape(len(lengths), tables_width)
    written = []
    for table, length in zip(tables, lengths):
        keys_values = torch.randn(length, 2 * kv_heads, head_dim)
        positions = np.arange(length, dtype=np.int32)
        # Behind the end, the sequence's last page holds what an earlier owner left, but finite.
        cache.layers[1][:, table[(length - 1) // page_size]] = 1e4
        rows = cache.token_row_indexes(table[positions // page_size], positions % page_size)
        cache.token_rows[1].index_copy_(0, torch.from_numpy(rows.reshape(-1)), keys_values.view(-1, head_dim))
        written.append((keys_values[:, :kv_heads], keys_values[:, kv_heads:]))
    return cache, tables, written


def plain_attention(query, keys, values):
    """query [heads, head_dim] over keys and values [tokens, kv_heads, head_dim]."""
    group = query.shape[0] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("hd,thd->ht", query, keys) / math.sqrt(query.shape[1])
    return torch.einsum("ht,thd->hd", scores.softmax(-1), values)


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=9),
    kv_heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 2, 8]),
    page_size=st.sampled_from([1, 4, 16]),
    gather_bytes=st.sampled_from([1, 4000, 2 << 20]),
)
def test_decode_attention_of_any_mix_of_lengths(lengths, kv_heads, group, page_size, gather_bytes):
    cache, tables, written = filled_cache(lengths, kv_heads, page_size, head_dim=8)
    queries = torch.randn(len(lengths) + 3, kv_heads * group, 8)
    out = torch.zeros_like(queries)
    rows = np.arange(2, 2 + len(lengths))  # some rows of the batch are none of its business
    tasks = cpu_attention.decode_tasks(rows, np.array(lengths, np.int32), tables, cache, gather_bytes)
    for task in tasks:
        cpu_attention.attend(task, queries, cache, 1, out)
    for row, (keys, values) in zip(rows, written):
        torch.testing.assert_close(out[row], plain_attention(queries[row], keys, values), atol=1e-5, rtol=1e-4)
    assert not out[:2].any()
    assert not out[2 + len(lengths) :].any()


@settings(deadline=None, max_examples=40)
@given(
    position=st.integers(0, 40),
    count=st.integers(1, 40),
    group=st.sampled_from([1, 3]),
    page_size=st.sampled_from([1, 4, 16]),
)
def test_prefill_attention_of_any_chunk(position, count, group, page_size):
    cache, tables, written = filled_cache([position + count + 5], 2, page_size, head_dim=8)
    queries = torch.randn(count + 4, 2 * group, 8)
    out = torch.zeros_like(queries)
    task = cpu_attention.prefill_task(3, 3 + count, position, tables[0], cache)
    cpu_attention.attend(task, queries, cache, 1, out)
    keys, values = written[0]
    for i in range(count):
        seen = position + i + 1
        expected = plain_attention(queries[3 + i], keys[:seen], values[:seen])
        torch.testing.assert_close(out[3 + i], expected, atol=1e-5, rtol=1e-4)
    assert not out[:3].any()
    assert not out[3 + count :].any()


def test_pages_of_a_head_are_contiguous():
    cache = KVCache(KVCacheShape(1, 3, 2, 4, 8), torch.float32, CPU)
    assert cache.k(0).shape == cache.v(0).shape == (3, 2, 4, 8)
    assert cache.k(0)[1, 1].is_contiguous()
    rows = cache.token_row_indexes(np.array([2], np.int32), np.array([3], np.int32))
    cache.token_rows[0][rows[0]] = torch.arange(4.0)[:, None].expand(4, 8)
    assert cache.k(0)[2, :, 3, 0].tolist() == [0, 1]
    assert cache.v(0)[2, :, 3, 0].tolist() == [2, 3]
    assert cache.shape.elements_per_page == 2 * 2 * 4 * 8


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(1)
