"""Every kernel once more in plain torch, on any device: what the kernels are tested against.

Same arguments, same buffers, same rows written; slow and simple. The GPU backend runs on these where Triton is
missing, which is how its logic is tested without a GPU.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from worker import sampler


def embed(tokens: torch.Tensor, last_tokens: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
    """out[r] = table[token of row r]; a token -1 - s stands for last_tokens[s]."""
    ids = torch.where(tokens >= 0, tokens, last_tokens[(-1 - tokens).clamp(min=0).long()])
    out.copy_(table[ids.long()])


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def add_rms_norm(
    residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, out: torch.Tensor, eps: float
) -> None:
    """residual += delta (where given), out = RMSNorm(residual)."""
    if delta is not None:
        residual.copy_(residual.float() + delta.float())
    out.copy_(_rms_norm(residual, weight, eps))


def gather_add_rms_norm(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    rows: torch.Tensor,
    num_rows: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    eps: float,
) -> None:
    """out[i] = RMSNorm((residual + delta, where given)[rows[i]]) for i < num_rows."""
    chosen = rows[: (count := int(num_rows))].long()
    x = residual[chosen]
    if delta is not None:
        x = (x.float() + delta[chosen].float()).to(residual.dtype)
    out[:count] = _rms_norm(x, weight, eps).to(out.dtype)


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
    """Rotate q in place; rotate k and copy k and v to their cells; rows with a negative cell are padding."""
    _, kv_heads, page_size, head_dim = k_pages.shape
    rows = (cells >= 0).nonzero()[:, 0]
    x = qkv[rows].view(len(rows), num_heads + 2 * kv_heads, head_dim)
    turned, v = torch.split(x, [num_heads + kv_heads, kv_heads], dim=1)
    a, b = turned.float().chunk(2, dim=-1)
    c, s = cos[positions[rows].long()][:, None], sin[positions[rows].long()][:, None]
    turned = torch.cat([a * c - b * s, b * c + a * s], dim=-1).to(qkv.dtype)
    qkv[rows, : num_heads * head_dim] = turned[:, :num_heads].reshape(len(rows), num_heads * head_dim)
    page, offset = cells[rows].long() // page_size, cells[rows].long() % page_size
    k_pages[page, :, offset] = turned[:, num_heads:]
    v_pages[page, :, offset] = v


def interleave_gate_up(gate: torch.Tensor, up: torch.Tensor, block: int) -> torch.Tensor:
    """[2 W, K] from gate and up [W, K], whose rows then alternate in blocks of `block`."""
    width, k = gate.shape
    if width % block:
        raise ValueError(f"{width} rows do not divide into blocks of {block}")
    return torch.stack([gate.view(-1, block, k), up.view(-1, block, k)], dim=1).reshape(2 * width, k)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor, gate_block: int) -> None:
    """out = silu(gate) * up, where gate and up alternate in gate_up's columns in blocks of gate_block."""
    pairs = gate_up.view(gate_up.shape[0], -1, 2, gate_block).float()
    out.copy_((functional.silu(pairs[:, :, 0]) * pairs[:, :, 1]).reshape(out.shape))


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    bias: torch.Tensor | None = None,
    squares: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """out = x @ weight.T + bias, accumulated in fp32; with squares, of the rows over their root mean square."""
    y = x.float() @ weight.float().T
    if squares is not None:
        y *= inverse_rms(squares, x.shape[0], x.shape[1], eps)
    out.copy_(y if bias is None else y + bias.float())


def linear_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    gain: torch.Tensor,
    scaled: torch.Tensor,
    squares: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> None:
    """residual += x @ weight.T + bias, scaled = residual * gain; the first part of squares gets all of the sums."""
    y = x.float() @ weight.float().T
    residual.copy_(residual.float() + (y if bias is None else y + bias.float()))
    scaled.copy_(residual.float() * gain.float())
    squares[:, : len(x)] = 0
    squares[0, : len(x)] = residual.float().square().sum(-1)


def inverse_rms(squares: torch.Tensor, rows: int, columns: int, eps: float) -> torch.Tensor:
    """[rows, 1] from parts of the rows' sums of `columns` squares."""
    return torch.rsqrt(squares[:, :rows].sum(0) / columns + eps)[:, None]


def _keys(pages: torch.Tensor, table: torch.Tensor, end: int) -> torch.Tensor:
    """The first `end` tokens of a sequence, [HK, end, D] fp32."""
    page_size = pages.shape[2]
    used = table[: -(-end // page_size)].long()
    return pages[used].transpose(0, 1).flatten(1, 2)[:, :end].float()


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int) -> torch.Tensor:
    """q [n, HK, G, D] at positions first .. first + n - 1 over k, v [HK, end, D]; [n, HK, G, D]."""
    scores = torch.einsum("nhgd,htd->hgnt", q.float(), k) / math.sqrt(q.shape[-1])
    position = torch.arange(first, first + q.shape[0], device=q.device)
    hidden = torch.arange(k.shape[1], device=q.device)[None, :] > position[:, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hgnt,htd->nhgd", weights, v)


def decode_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    units: torch.Tensor,
    span: torch.Tensor,
    out: torch.Tensor,
    *,
    group: int,
) -> None:
    """Attention of single query tokens; a sequence's end of keys is the largest of its units'."""
    _, kv_heads, _, head_dim = k_pages.shape
    ends: dict[tuple[int, int], int] = {}
    for row, slot, _, end, *_ in units[int(span[0]) : int(span[1])].tolist():
        ends[row, slot] = max(end, ends.get((row, slot), 0))
    for (row, slot), end in ends.items():
        query = q[row, : kv_heads * group * head_dim].view(1, kv_heads, group, head_dim)
        k, v = _keys(k_pages, page_table[slot], end), _keys(v_pages, page_table[slot], end)
        out[row, : kv_heads * group * head_dim] = _attend(query, k, v, end - 1).flatten().to(out.dtype)


def prefill_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    units: torch.Tensor,
    span: torch.Tensor,
    out: torch.Tensor,
    *,
    group: int,
) -> None:
    """Causal attention of the units' query tokens over all keys up to their own position."""
    _, kv_heads, _, head_dim = k_pages.shape
    width = kv_heads * group * head_dim
    for row, count, position, slot in units[int(span[0]) : int(span[1])].tolist():
        query = q[row : row + count, :width].reshape(count, kv_heads, group, head_dim)
        end = position + count
        k, v = _keys(k_pages, page_table[slot], end), _keys(v_pages, page_table[slot], end)
        out[row : row + count, :width] = _attend(query, k, v, position).reshape(count, width).to(out.dtype)


def sample(
    logits: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    noise: torch.Tensor,
    first: int,
    num_rows: torch.Tensor,
    slots: torch.Tensor,
    sampled: torch.Tensor,
    last_tokens: torch.Tensor,
) -> None:
    """sampled[rows[i]] = a token of logits[i], for all i with first + i < num_rows; -1 if a logit is not finite."""
    count = min(len(logits), int(num_rows) - first)
    x, chosen = logits[:count].float(), rows[:count].long()
    finite = x.isfinite().all(-1)
    parameters = (values[:count].cpu().numpy() for values in (temperature, top_k, top_p, noise))
    drawn = sampler.draw(torch.where(finite[:, None], x, 0.0), *parameters)
    sampled[chosen] = torch.where(finite, drawn, -1).int()
    last_tokens[slots[chosen].long()] = sampled[chosen].clamp(min=0)
