"""The gated FFN of LLaMA and Qwen2, as the operators `up_gate` and `down`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from autosearch.specs import ModelSpec
from worker.kernels import cpu
from worker.models.layer_operator import LayerOperator
from worker.sharding import Shard


class FeedForwardRows(Protocol):
    """What an FFN sees of the batch: its rows [start, stop) of the shared buffers."""

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...

    @property
    def normed(self) -> torch.Tensor:
        """[rows, hidden] the input."""

    @property
    def block(self) -> torch.Tensor:
        """[rows, hidden] the output, with tensor parallelism this rank's summand."""


class FeedForward(Protocol):
    """The second half of a layer, from `ffn_norm` on."""

    def operators(self) -> tuple[LayerOperator[FeedForwardRows], ...]:
        """From buffer `normed` to buffer `block`, in sequential order."""


class DenseFeedForward:
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: ModelSpec, shard: Shard, weights: Mapping[str, torch.Tensor], max_rows: int) -> None:
        names = [f"layers.{layer}." for layer in range(spec.num_layers)]
        self._gate_up = tuple(weights[name + "gate_up"] for name in names)  # [2 width, hidden]
        self._gate_up_bias = tuple(weights.get(name + "gate_up_bias") for name in names)
        self._down = tuple(weights[name + "down"] for name in names)  # [hidden, width]
        self._down_bias = tuple(weights.get(name + "down_bias") for name in names)
        self._both = self._down[0].new_zeros(max_rows, 2 * shard.intermediate_size)
        self._gated = self._down[0].new_zeros(max_rows, shard.intermediate_size)

    def operators(self) -> tuple[LayerOperator[FeedForwardRows], ...]:
        return (
            LayerOperator("up_gate", self._run_up_gate, ("normed",), ("gated",)),
            LayerOperator("down", self._run_down, ("gated",), ("block",)),
        )

    def _run_up_gate(self, layer: int, rows: FeedForwardRows) -> None:
        both = self._both[rows.start : rows.stop]
        cpu.linear(rows.normed, self._gate_up[layer], self._gate_up_bias[layer], both)
        cpu.silu_mul(both, self._gated[rows.start : rows.stop])

    def _run_down(self, layer: int, rows: FeedForwardRows) -> None:
        cpu.linear(self._gated[rows.start : rows.stop], self._down[layer], self._down_bias[layer], rows.block)
