"""The attention kernels against their reference: mixed lengths, splits, page sizes, head dims, poisoned pages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from worker.kernels import reference
from worker.work_lists import decode_units, prefill_tokens, prefill_units, range_ends

pytestmark = pytest.mark.gpu

CASES = [
    (4, 128, 64),
    (1, 64, 16),
    (3, 96, 16),
    (8, 128, 16),
    (2, 128, 32),
    (4, 128, 128),
    (2, 64, 48),
    (7, 64, 64),
    (16, 128, 64),
]  # group, head dim, page size


class Paged:
    """Random KV pages for sequences of given lengths, NaN wherever no token lies."""

    def __init__(self, lengths, kv_heads, head_dim, page_size, dtype, device):
        torch.manual_seed(sum(lengths))
        per_slot = -(-max(lengths) // page_size)
        pages = sum(-(-n // page_size) for n in lengths) + 1
        order = torch.randperm(pages - 1) + 1
        shape = (pages, kv_heads, page_size, head_dim)
        k, v = torch.full(shape, float("nan")), torch.full(shape, float("nan"))
        self.table = torch.zeros(len(lengths), per_slot, dtype=torch.int32)
        used = 0
        for slot, length in enumerate(lengths):
            for i in range(-(-length // page_size)):
                page = int(order[used])
                used += 1
                self.table[slot, i] = page
                filled = min(page_size, length - i * page_size)
                k[page, :, :filled] = torch.randn(kv_heads, filled, head_dim)
                v[page, :, :filled] = torch.randn(kv_heads, filled, head_dim)
        self.k, self.v = k.to(device, dtype), v.to(device, dtype)
        self.table = self.table.to(device)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    out, expected = out.double().cpu(), expected.double().cpu()
    return float((out - expected).norm() / expected.norm())


def counter(device: torch.device) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


def spans(units: np.ndarray, cuts: tuple[int, ...], device: torch.device) -> list[torch.Tensor]:
    """Of the ranges that end at the cuts."""
    ends = torch.from_numpy(np.append(0, range_ends(units, cuts)).astype(np.int32)).to(device)
    return [ends[number:] for number in range(len(cuts))]


@pytest.mark.parametrize(("group", "head_dim", "page_size"), CASES)
@pytest.mark.parametrize("target", [4, 1000])
@pytest.mark.parametrize("cuts", [(8,), (3, 4, 8)])
def test_decode_equals_reference(group, head_dim, page_size, target, cuts, dtype, device):
    from worker.kernels.decode_attention import DecodeWorkspace, decode_attention

    lengths, kv_heads = [1, 63, 64, 65, 300, 700, 17], 2
    paged = Paged(lengths, kv_heads, head_dim, page_size, dtype, device)
    rows = np.array([6, 0, 3, 1, 2, 5, 4], np.int32)
    slots = np.arange(len(lengths), dtype=np.int32)
    units, partials = decode_units(
        rows, slots, np.array(lengths, np.int32), target=target, shortest=128, align=max(64, page_size), cuts=cuts
    )
    assert target == 4 or partials > 0  # the case with many units exercises the merge
    width = kv_heads * group * head_dim
    q = torch.randn(8, width + 2 * kv_heads * head_dim, device=device).to(dtype)
    workspace = DecodeWorkspace(partials + 1, kv_heads, group, head_dim, device)
    parts, units = spans(units, cuts, device), torch.from_numpy(units).to(device)
    expected, out = (torch.full((8, width), 7.0, dtype=dtype, device=device) for _ in range(2))
    args = (q, paged.k, paged.v, paged.table, units)
    whole = torch.tensor([0, len(units)], dtype=torch.int32, device=device)
    reference.decode_attention(*args, whole, expected, group=group)
    for _ in range(2):  # the second time the arrival counters are found reset
        for span in parts:
            decode_attention(*args, span, counter(device), workspace, out, group=group, blocks=3)
    assert relative_error(out, expected) < 5e-3
    assert torch.equal(out[7], expected[7])  # a row in no unit is left alone
    assert int(workspace.arrived.abs().sum()) == 0


@pytest.mark.parametrize(("group", "head_dim", "page_size"), CASES)
@pytest.mark.parametrize("cuts", [(259,), (5, 6, 130, 155, 259)])
def test_prefill_equals_reference(group, head_dim, page_size, cuts, dtype, device):
    from worker.kernels.prefill_attention import prefill_attention

    starts, counts, kv_heads = [0, 100, 63, 511], [150, 1, 70, 33], 2
    lengths = [a + b for a, b in zip(starts, counts)]
    paged = Paged(lengths, kv_heads, head_dim, page_size, dtype, device)
    chunk = np.array(counts, np.int32)
    first_rows = (5 + np.cumsum(chunk) - chunk).astype(np.int32)
    units = prefill_units(
        first_rows,
        chunk,
        np.array(starts, np.int32),
        np.arange(4, dtype=np.int32),
        tokens=prefill_tokens(group),
        cuts=cuts,
    )
    width, total = kv_heads * group * head_dim, 5 + sum(counts)
    q = torch.randn(total, width + 2 * kv_heads * head_dim, device=device).to(dtype)
    parts, units = spans(units, cuts, device), torch.from_numpy(units).to(device)
    expected, out = (torch.full((total, width), 7.0, dtype=dtype, device=device) for _ in range(2))
    args = (q, paged.k, paged.v, paged.table, units)
    whole = torch.tensor([0, len(units)], dtype=torch.int32, device=device)
    reference.prefill_attention(*args, whole, expected, group=group)
    for span in parts:
        prefill_attention(*args, span, counter(device), out, group=group, blocks=3)
    assert relative_error(out, expected) < 5e-3
    assert torch.equal(out[:5], expected[:5])
