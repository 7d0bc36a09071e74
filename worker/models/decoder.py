"""A decoder-only transformer as named operators over token rows: LLaMA and Qwen2, and the frame of Mixtral.

Holds one rank's weights and the activation buffers of one batch. The order of operators is not decided here:
`worker.nano_pipeline` runs them as a schedule says. Knows nothing of requests or sampling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from autosearch.specs import ModelSpec
from worker.batch_input import BatchInput, PrefillPiece, RowRange
from worker.kernels import cpu, cpu_attention
from worker.kernels.cpu_attention import AttentionTask
from worker.kv_cache import KVCache
from worker.models.feed_forward import DenseFeedForward, FeedForward
from worker.models.layer_operator import LayerOperator
from worker.models.mixtral import ExpertFeedForward
from worker.models.parameters import EMBEDDING, FINAL_NORM, LM_HEAD
from worker.models.rope import cos_sin_tables
from worker.parallel import TensorParallelGroup
from worker.sharding import Shard


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """One layer's weights up to the FFN; row-split biases are there on the first rank only."""

    attn_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(heads + 2 kv_heads) * head_dim, hidden]
    qkv_bias: torch.Tensor | None
    o: torch.Tensor  # [hidden, heads * head_dim]
    o_bias: torch.Tensor | None
    ffn_norm: torch.Tensor  # [hidden]


@dataclass(frozen=True, slots=True)
class Rows:
    """Token rows [start, stop) of the batch in every buffer, and what attention needs to know of them."""

    start: int
    stop: int
    residual: torch.Tensor  # [rows, hidden] sum of all blocks so far
    normed: torch.Tensor  # [rows, hidden]
    qkv: torch.Tensor  # [rows, (heads + 2 kv_heads) * head_dim]
    attention: torch.Tensor  # [rows, heads * head_dim]
    block: torch.Tensor  # [rows, hidden] output of attention or FFN, not yet added to residual
    cos: torch.Tensor  # [rows, 1, head_dim]
    signed_sin: torch.Tensor  # [rows, 1, head_dim]
    kv_rows: torch.Tensor  # [rows * 2 kv_heads] where K and V go
    decodes: tuple[AttentionTask, ...]
    prefills: tuple[AttentionTask, ...]


class Decoder:
    """One rank's model and the activations of one batch at a time."""

    def __init__(
        self,
        spec: ModelSpec,
        shard: Shard,
        weights: Mapping[str, torch.Tensor],
        cache: KVCache,
        group: TensorParallelGroup,
        max_rows: int,
        max_model_len: int,
    ) -> None:
        self.spec, self.shard, self.cache, self.group = spec, shard, cache, group
        self._embedding = weights[EMBEDDING]
        self._lm_head = weights.get(LM_HEAD, self._embedding)
        self._final_norm = weights[FINAL_NORM]
        self._layers = tuple(_attention_weights(weights, layer) for layer in range(spec.num_layers))
        self._cos, self._sin = cos_sin_tables(spec.rope, spec.head_dim, max_model_len)
        like = self._embedding
        self._residual = like.new_zeros(max_rows, spec.hidden_size)
        self._normed = torch.zeros_like(self._residual)
        self._block = torch.zeros_like(self._residual)
        self._qkv = like.new_zeros(max_rows, (shard.num_heads + 2 * shard.num_kv_heads) * spec.head_dim)
        self._attention = like.new_zeros(max_rows, shard.num_heads * spec.head_dim)
        self._feed_forward: FeedForward = (
            ExpertFeedForward(spec, shard, weights, max_rows)
            if spec.num_experts
            else DenseFeedForward(spec, shard, weights, max_rows)
        )
        self._batch: BatchInput | None = None
        self._page_table = np.zeros((0, 0), np.int32)
        self._rows: dict[tuple[int, int], Rows] = {}

    def operators(self) -> tuple[LayerOperator[Rows], ...]:
        """The layer's operators in sequential order, as autosearch.operators.layer_operators names them.

        Decode and prefill attention write different rows of one buffer, hence its two names.
        """
        reduced = self.shard.size > 1
        return (
            LayerOperator("attn_norm", self._run_attn_norm, ("residual", "block"), ("residual", "normed")),
            LayerOperator("qkv", self._run_qkv, ("normed",), ("qkv",)),
            LayerOperator("rope_append", self._run_rope_append, ("qkv",), ("qkv", "kv_cache")),
            LayerOperator("decode_attention", self._run_decode_attention, ("qkv", "kv_cache"), ("attention/decode",)),
            LayerOperator(
                "prefill_attention",
                self._run_prefill_attention,
                ("qkv", "kv_cache"),
                ("attention/prefill",),
                reads_earlier_rows=("kv_cache",),
            ),
            LayerOperator("o", self._run_o, ("attention/decode", "attention/prefill"), ("block",)),
            *([LayerOperator("o_all_reduce", self._run_all_reduce, ("block",), ("block",))] if reduced else []),
            LayerOperator("ffn_norm", self._run_ffn_norm, ("residual", "block"), ("residual", "normed")),
            *self._feed_forward.operators(),
            *([LayerOperator("ffn_all_reduce", self._run_all_reduce, ("block",), ("block",))] if reduced else []),
        )

    def begin(self, batch: BatchInput, token_ids: torch.Tensor, page_table: np.ndarray) -> None:
        """Take in a batch: its tokens' embeddings [rows], and page_table [slots, pages] for attention."""
        self._batch, self._page_table, self._rows = batch, page_table, {}
        self._clear_new_pages(batch)
        num_rows = batch.num_rows
        # The first layer's norm adds block to residual, as every later one does.
        self._residual[:num_rows].zero_()
        self._embed(token_ids, self._block[:num_rows])

    def rows(self, start: int, stop: int) -> Rows:
        """The current batch's rows [start, stop); the same object for the same range."""
        key = (start, stop)
        if key not in self._rows:
            self._rows[key] = self._make_rows(start, stop)
        return self._rows[key]

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Next-token logits after the given token rows [n], once all layers have run: [n, vocab_size]."""
        residual, block = self._residual[rows], self._block[rows]
        normed = torch.empty_like(residual)
        cpu.add_rms_norm(residual, block, self._final_norm, normed, self.spec.norm_eps)
        local = torch.empty(len(rows), self.shard.vocab_size, dtype=normed.dtype, device=normed.device)
        cpu.linear(normed, self._lm_head, None, local)
        # Padded rows of the last ranks' shards lie behind the vocabulary, so no padded id can ever win.
        return self.group.all_gather_columns(local)[:, : self.spec.vocab_size]

    def _clear_new_pages(self, batch: BatchInput) -> None:
        """Zero the pages that begin in this batch.

        Attention masks what lies behind a sequence's end, but an earlier owner's nan there would outlive a mask.
        """
        page_size = self.cache.shape.page_size
        begin = batch.positions % page_size == 0
        pages = self._page_table[batch.slots[begin], batch.positions[begin] // page_size]
        if len(pages):
            rows = torch.from_numpy(self.cache.page_row_indexes(pages[:, None]).reshape(-1))
            for layer in self.cache.page_rows:
                layer.index_fill_(0, rows, 0.0)

    def _embed(self, token_ids: torch.Tensor, out: torch.Tensor) -> None:
        if self.shard.size == 1:
            torch.index_select(self._embedding, 0, token_ids, out=out)
            return
        first, stop = self.shard.vocab
        inside = (token_ids >= first) & (token_ids < stop)
        torch.index_select(self._embedding, 0, torch.where(inside, token_ids - first, 0), out=out)
        out.mul_(inside[:, None])
        self.group.all_reduce(out)

    def _make_rows(self, start: int, stop: int) -> Rows:
        batch = self._batch
        assert batch is not None, "begin() comes first"
        slots, positions = batch.slots[start:stop], batch.positions[start:stop]
        page_size = self.cache.shape.page_size
        pages = self._page_table[slots, positions // page_size]
        kv_rows = self.cache.token_row_indexes(pages, positions % page_size)
        index = torch.from_numpy(positions)
        cos, sin = self._cos[index, None], self._sin[index, None]
        return Rows(
            start=start,
            stop=stop,
            residual=self._residual[start:stop],
            normed=self._normed[start:stop],
            qkv=self._qkv[start:stop],
            attention=self._attention[start:stop],
            block=self._block[start:stop],
            cos=torch.cat((cos, cos), dim=-1),
            signed_sin=torch.cat((-sin, sin), dim=-1),
            kv_rows=torch.from_numpy(kv_rows.reshape(-1)),
            decodes=self._decode_tasks(batch, start, stop),
            prefills=tuple(
                task
                for piece in batch.prefills
                if (task := self._prefill_task(piece, max(start, piece.start), min(stop, piece.stop))) is not None
            ),
        )

    def _decode_tasks(self, batch: BatchInput, start: int, stop: int) -> tuple[AttentionTask, ...]:
        parts = [_rows_within(decode, start, stop) for decode in batch.decodes]
        rows = np.concatenate(parts) if parts else np.empty(0, np.int64)
        tables = self._page_table[batch.slots[rows]]
        return tuple(cpu_attention.decode_tasks(rows, batch.positions[rows] + 1, tables, self.cache))

    def _prefill_task(self, piece: PrefillPiece, start: int, stop: int) -> AttentionTask | None:
        if start >= stop:
            return None
        position = piece.position + start - piece.start
        return cpu_attention.prefill_task(start, stop, position, self._page_table[piece.slot], self.cache)

    def _run_attn_norm(self, layer: int, rows: Rows) -> None:
        weight = self._layers[layer].attn_norm
        cpu.add_rms_norm(rows.residual, rows.block, weight, rows.normed, self.spec.norm_eps)

    def _run_qkv(self, layer: int, rows: Rows) -> None:
        weights = self._layers[layer]
        cpu.linear(rows.normed, weights.qkv, weights.qkv_bias, rows.qkv)

    def _run_rope_append(self, layer: int, rows: Rows) -> None:
        shard, head_dim = self.shard, self.spec.head_dim
        heads = rows.qkv.view(rows.stop - rows.start, -1, head_dim)
        cpu.rotate(heads[:, : shard.num_heads + shard.num_kv_heads], rows.cos, rows.signed_sin)
        keys_values = heads[:, shard.num_heads :].reshape(-1, head_dim)
        self.cache.token_rows[layer].index_copy_(0, rows.kv_rows, keys_values)

    def _run_decode_attention(self, layer: int, rows: Rows) -> None:
        self._attend(layer, rows.decodes)

    def _run_prefill_attention(self, layer: int, rows: Rows) -> None:
        self._attend(layer, rows.prefills)

    def _attend(self, layer: int, tasks: tuple[AttentionTask, ...]) -> None:
        head_dim = self.spec.head_dim
        queries = self._qkv.view(len(self._qkv), -1, head_dim)[:, : self.shard.num_heads]
        out = self._attention.view(len(self._attention), -1, head_dim)
        for task in tasks:
            cpu_attention.attend(task, queries, self.cache, layer, out)

    def _run_o(self, layer: int, rows: Rows) -> None:
        weights = self._layers[layer]
        cpu.linear(rows.attention, weights.o, weights.o_bias, rows.block)

    def _run_ffn_norm(self, layer: int, rows: Rows) -> None:
        weight = self._layers[layer].ffn_norm
        cpu.add_rms_norm(rows.residual, rows.block, weight, rows.normed, self.spec.norm_eps)

    def _run_all_reduce(self, layer: int, rows: Rows) -> None:
        self.group.all_reduce(rows.block)


def _rows_within(rows: RowRange, start: int, stop: int) -> np.ndarray:
    return np.arange(max(start, rows.start), min(stop, rows.stop), dtype=np.int64)


def _attention_weights(weights: Mapping[str, torch.Tensor], layer: int) -> AttentionWeights:
    prefix = f"layers.{layer}."
    return AttentionWeights(
        attn_norm=weights[prefix + "attn_norm"],
        qkv=weights[prefix + "qkv"],
        qkv_bias=weights.get(prefix + "qkv_bias"),
        o=weights[prefix + "o"],
        o_bias=weights.get(prefix + "o_bias"),
        ffn_norm=weights[prefix + "ffn_norm"],
    )
