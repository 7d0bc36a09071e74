"""Mixtral's FFN (arXiv 2401.04088, section 2.1), as the operators `router` and `experts`."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autosearch.specs import ModelSpec
from worker.kernels import cpu
from worker.models.feed_forward import FeedForwardRows
from worker.models.layer_operator import LayerOperator
from worker.sharding import Shard


class ExpertFeedForward:
    """A router picks experts_per_token gated FFNs for each token and weighs their outputs."""

    def __init__(self, spec: ModelSpec, shard: Shard, weights: Mapping[str, torch.Tensor], max_rows: int) -> None:
        names = [f"layers.{layer}." for layer in range(spec.num_layers)]
        width, experts = shard.intermediate_size, spec.num_experts
        self._spec = spec
        self._router = tuple(weights[name + "router"] for name in names)  # [experts, hidden]
        self._gate_up = tuple(weights[name + "gate_up"].view(experts, 2 * width, -1) for name in names)
        self._down = tuple(weights[name + "down"].view(experts, -1, width) for name in names)
        self._chosen = self._down[0].new_zeros(max_rows, spec.experts_per_token, dtype=torch.int64)
        # One expert's tokens at a time.
        self._both = self._down[0].new_zeros(max_rows, 2 * width)
        self._gated = self._down[0].new_zeros(max_rows, width)
        self._output = self._down[0].new_zeros(max_rows, spec.hidden_size)
        self._shares = self._down[0].new_zeros(max_rows, spec.experts_per_token)

    def operators(self) -> tuple[LayerOperator[FeedForwardRows], ...]:
        return (
            LayerOperator("router", self._run_router, ("normed",), ("routing",)),
            LayerOperator("experts", self._run_experts, ("normed", "routing"), ("block",)),
        )

    def _run_router(self, layer: int, rows: FeedForwardRows) -> None:
        """Softmax over all experts first, then the top ones of it, then (where the model says so) normalised."""
        scores = (rows.normed @ self._router[layer].t()).float().softmax(dim=-1)
        shares, chosen = scores.topk(self._spec.experts_per_token, dim=-1)
        if self._spec.norm_topk_prob:
            shares /= shares.sum(dim=-1, keepdim=True)
        self._shares[rows.start : rows.stop] = shares.to(self._shares.dtype)
        self._chosen[rows.start : rows.stop] = chosen

    def _run_experts(self, layer: int, rows: FeedForwardRows) -> None:
        chosen, shares = self._chosen[rows.start : rows.stop], self._shares[rows.start : rows.stop]
        rows.block.zero_()
        for expert in torch.unique(chosen).tolist():
            tokens, choice = torch.where(chosen == expert)
            both = self._both[: len(tokens)]
            gated, output = self._gated[: len(tokens)], self._output[: len(tokens)]
            cpu.linear(rows.normed[tokens], self._gate_up[layer][expert], None, both)
            cpu.silu_mul(both, gated)
            cpu.linear(gated, self._down[layer][expert], None, output)
            rows.block.index_add_(0, tokens, output * shares[tokens, choice, None])
