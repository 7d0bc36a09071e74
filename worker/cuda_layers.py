"""A dense decoder's layers on one GPU: fixed buffers for the rows of a batch, and what each operator launches.

Where rows lie in the cache and what attention has to do is read from the batch's block (`worker.device_batch`). Knows
nothing of schedules, graphs or sampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from autosearch.specs import ModelSpec
from worker.device_batch import MAX_RANGES, BatchLimits, BlockView
from worker.folded_norms import ADD, NO_PASS, SCALED
from worker.kernel_set import GATE_BLOCK, MAX_HEAD_DIM, MAX_VOCAB, How, KernelSet, Norm
from worker.kernels.reference import interleave_gate_up
from worker.kv_cache import KVCache
from worker.models.layer_operator import LayerOperator
from worker.models.parameters import EMBEDDING, FINAL_NORM
from worker.models.rope import cos_sin_tables
from worker.work_lists import DECODE_FIELDS, PREFILL_FIELDS


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows [start, stop) that an operator runs on, and how."""

    start: int
    stop: int
    number: int  # of the range among the operator's: attention's units are listed by range
    how: How


class CudaLayers:
    """The layers of one rank, with buffers for the rows of one batch."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: dict[str, torch.Tensor],
        limits: BatchLimits,
        kernels: KernelSet,
        view: BlockView,
        page_table: torch.Tensor,
        max_model_len: int,
    ) -> None:
        """weights: with interleave_gates() behind them. view: of the block that the batches are put into.

        page_table: [slots, pages] int32, where each slot's pages lie in the cache.
        """
        self._spec, self._kernels, self._weights = spec, kernels, weights
        self._view, self._page_table = view, page_table
        self._group = spec.num_heads // spec.num_kv_heads
        self._gate_block = _gate_block(spec)
        device, like, rows = view.block.device, weights[EMBEDDING], limits.rows
        cos, sin = cos_sin_tables(spec.rope, spec.head_dim, max_model_len)
        self._cos, self._sin = cos.to(device), sin.to(device)
        self.residual = like.new_zeros(rows, spec.hidden_size)  # the first layer's input, written from outside
        self.delta = torch.zeros_like(self.residual)  # what a norm has still to add to it
        self._normed = torch.zeros_like(self.residual)
        self._qkv = like.new_zeros(rows, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim)
        self._attention = like.new_zeros(rows, spec.num_heads * spec.head_dim)
        self._both = like.new_zeros(rows, 2 * spec.intermediate_size)
        self._gated = like.new_zeros(rows, spec.intermediate_size)
        self._squares = torch.zeros(Norm.num_parts(spec.hidden_size), rows, device=device)
        # Of each layer's launches of decode and of prefill attention; zero when an iteration begins.
        self.tickets = torch.zeros(spec.num_layers, 2, MAX_RANGES, dtype=torch.int32, device=device)
        self.cache: KVCache | None = None  # to be there before anything runs

    def operators(self, has_prefill: bool) -> dict[str, LayerOperator[Rows]]:
        """The layer's operators, named as in autosearch.operators."""
        operators = [
            LayerOperator("attn_norm", self._attn_norm, ("residual", "delta"), ("residual", "normed")),
            LayerOperator("qkv", self._run_qkv, ("normed",), ("qkv",)),
            LayerOperator("rope_append", self._rope_append, ("qkv",), ("qkv", "kv_cache")),
            LayerOperator("decode_attention", self._decode, ("qkv", "kv_cache"), ("attention/decode",)),
            LayerOperator(
                "prefill_attention",
                self._prefill if has_prefill else nothing,
                ("qkv", "kv_cache"),
                ("attention/prefill",),
                reads_earlier_rows=("kv_cache",),
            ),
            LayerOperator("o", self._run_o, ("attention/decode", "attention/prefill"), ("delta",)),
            LayerOperator("ffn_norm", self._ffn_norm, ("residual", "delta"), ("residual", "normed")),
            LayerOperator("up_gate", self._up_gate, ("normed",), ("gated",)),
            LayerOperator("down", self._down, ("gated",), ("delta",)),
        ]
        return {operator.name: operator for operator in operators}

    def _layer(self, layer: int, name: str) -> torch.Tensor:
        return self._weights[f"layers.{layer}.{name}"]

    def _bias(self, layer: int, name: str) -> torch.Tensor | None:
        return self._weights.get(f"layers.{layer}.{name}")

    def _norm(self, rows: Rows) -> Norm | None:
        """Of the rows that a GEMM reads, where the one before has left it."""
        folded = rows.how.kernel == SCALED
        return Norm(self._squares[:, rows.start : rows.stop], self._spec.norm_eps) if folded else None

    def _add(self, x: torch.Tensor, layer: int, name: str, gain: torch.Tensor, rows: Rows) -> None:
        """Add x times a weight to the residual stream, for a norm with this gain."""
        part = slice(rows.start, rows.stop)
        residual, normed, squares = self.residual[part], self._normed[part], self._squares[:, part]
        weight, bias = self._layer(layer, name), self._bias(layer, f"{name}_bias")
        self._kernels.add(x[part], weight, bias, residual, gain, normed, squares, how=rows.how)

    def _attn_norm(self, layer: int, rows: Rows) -> None:
        if layer and rows.how.kernel == NO_PASS:
            return
        part = slice(rows.start, rows.stop)
        delta = self.delta[part] if layer else None
        self._kernels.norm(
            self.residual[part], delta, self._layer(layer, "attn_norm"), self._normed[part], self._spec.norm_eps
        )

    def _run_qkv(self, layer: int, rows: Rows) -> None:
        part = slice(rows.start, rows.stop)
        norm = self._norm(rows) if layer else None  # the first layer's norm always is a pass of its own
        weight, bias = self._layer(layer, "qkv"), self._bias(layer, "qkv_bias")
        self._kernels.linear(self._normed[part], weight, bias, self._qkv[part], rows.how, norm)

    def _rope_append(self, layer: int, rows: Rows) -> None:
        part, cache = slice(rows.start, rows.stop), self._pages()
        positions, cells = self._view["positions"][part], self._view["cells"][part]
        k, v = cache.k(layer), cache.v(layer)
        self._kernels.rope_append(
            self._qkv[part], positions, cells, self._cos, self._sin, k, v, num_heads=self._spec.num_heads
        )

    def _decode(self, layer: int, rows: Rows) -> None:
        units, span = self._view["decode_units"].view(-1, DECODE_FIELDS), self._view["decode_spans"][rows.number :]
        self._kernels.decode(
            *self._attend(layer, units, span), **self._attending(layer, 0, rows), rows=rows.stop - rows.start
        )

    def _prefill(self, layer: int, rows: Rows) -> None:
        units, span = self._view["prefill_units"].view(-1, PREFILL_FIELDS), self._view["prefill_spans"][rows.number :]
        self._kernels.prefill(*self._attend(layer, units, span), **self._attending(layer, 1, rows))

    def _attend(self, layer: int, units: torch.Tensor, span: torch.Tensor) -> tuple[torch.Tensor, ...]:
        k, v = self._pages().k(layer), self._pages().v(layer)
        return self._qkv, k, v, self._page_table, units, span, self._attention

    def _attending(self, layer: int, kind: int, rows: Rows) -> dict[str, Any]:
        ticket = self.tickets[layer, kind, rows.number : rows.number + 1]
        return {"ticket": ticket, "group": self._group, "how": rows.how}

    def _run_o(self, layer: int, rows: Rows) -> None:
        if rows.how.kernel == ADD:
            self._add(self._attention, layer, "o", self._layer(layer, "ffn_norm"), rows)
            return
        part = slice(rows.start, rows.stop)
        self._kernels.linear(
            self._attention[part], self._layer(layer, "o"), self._bias(layer, "o_bias"), self.delta[part], rows.how
        )

    def _ffn_norm(self, layer: int, rows: Rows) -> None:
        if rows.how.kernel == NO_PASS:
            return
        part = slice(rows.start, rows.stop)
        weight = self._layer(layer, "ffn_norm")
        self._kernels.norm(self.residual[part], self.delta[part], weight, self._normed[part], self._spec.norm_eps)

    def _up_gate(self, layer: int, rows: Rows) -> None:
        part = slice(rows.start, rows.stop)
        weight = self._layer(layer, "gate_up")
        both, gated = self._both[part], self._gated[part]
        self._kernels.gated(self._normed[part], weight, both, gated, self._gate_block, rows.how, self._norm(rows))

    def _down(self, layer: int, rows: Rows) -> None:
        if rows.how.kernel == ADD:
            last = layer == self._spec.num_layers - 1
            gain = self._weights[FINAL_NORM] if last else self._layer(layer + 1, "attn_norm")
            self._add(self._gated, layer, "down", gain, rows)
            return
        part = slice(rows.start, rows.stop)
        self._kernels.linear(
            self._gated[part], self._layer(layer, "down"), self._bias(layer, "down_bias"), self.delta[part], rows.how
        )

    def _pages(self) -> KVCache:
        assert self.cache is not None, "use_cache() comes first"
        return self.cache


def interleave_gates(spec: ModelSpec, weights: dict[str, torch.Tensor]) -> None:
    """Put interleaved gate and up rows in place of the joined ones, as the models' kernels read them. Once."""
    for layer in range(spec.num_layers):
        name = f"layers.{layer}.gate_up"
        gate, up = weights[name].chunk(2)
        weights[name] = interleave_gate_up(gate, up, _gate_block(spec))


def _gate_block(spec: ModelSpec) -> int:
    return GATE_BLOCK if spec.intermediate_size % GATE_BLOCK == 0 else spec.intermediate_size


def nothing(layer: int, rows: Rows) -> None:
    """An operator that is left out: a batch without prefill chunks has no prefill attention."""


def why_not_folded(spec: ModelSpec, dtype: torch.dtype) -> str:
    """What forbids schedules with folded norms (worker.folded_norms); empty where nothing does."""
    if dtype == torch.float16:
        return "rows before their norm do not fit float16: use bfloat16"
    heads, kv_heads = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    sizes = (spec.hidden_size, heads, heads + 2 * kv_heads, spec.intermediate_size)  # columns and depths of the GEMMs
    if any(size % 8 for size in sizes):  # TMA wants rows of whole 16 bytes
        return "the model's weights have sizes that are no multiples of 8"
    return ""


def unsupported(spec: ModelSpec) -> str:
    """Why the model cannot run here; empty if it can."""
    if spec.num_experts:
        return "experts are not supported on a GPU yet: use the CPU"
    if spec.mlp_bias:
        return "biases of the FFN are not supported on a GPU yet: use the CPU"
    if spec.num_heads // spec.num_kv_heads > 16:
        return "more than 16 query heads per KV head are not supported on a GPU"
    if spec.head_dim > MAX_HEAD_DIM:
        return f"head_dim {spec.head_dim} is not supported on a GPU: {MAX_HEAD_DIM} at most"
    if spec.hidden_size % 8:  # TMA wants rows of whole 16 bytes
        return f"hidden_size {spec.hidden_size} is not supported on a GPU: a multiple of 8 is"
    if spec.vocab_size > MAX_VOCAB:
        return f"a vocabulary of {spec.vocab_size} tokens is not supported on a GPU: {MAX_VOCAB} at most"
    return ""
