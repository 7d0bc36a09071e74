"""What one GPU does beside a benchmark: energy, power, clocks, the rate of its GEMMs. Knows nothing of engines."""

from __future__ import annotations

import threading
from typing import Any

import torch

from autosearch.specs import ModelSpec
from worker.power_meter import NvmlCard

PERIOD_S = 0.5  # between two readings of power and clocks
_MOST_GEMMS = 20_000  # launches of a layer's four: of a small model the rate is the launches'
MEMORY_BYTES_PER_S = 4.3e12  # what decode attention and few-row GEMMs are held against: an H200's HBM in practice


class GpuMeter:
    """Reads the card in a thread of its own from start() to stop()."""

    def __init__(self) -> None:
        self._card = NvmlCard()
        self._readings: list[tuple[float, int]] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._read, name="gpu-meter", daemon=True)
        self._joules = 0.0

    def joules(self) -> float:
        """The card's energy counter: since the driver was loaded."""
        return self._card.joules()

    def start(self) -> None:
        """Begin to read. Raises NVML's error where the card does not tell, before anything has run for nothing."""
        self._readings.append(self._reading())
        self._joules = self.joules()
        self._thread.start()

    def stop(self, num_tokens: int) -> dict[str, Any]:
        """Medians since start(), and the energy that each of num_tokens took."""
        joules = self.joules() - self._joules
        self._stopping.set()
        self._thread.join()
        watts, clocks = (sorted(values)[len(values) // 2] for values in zip(*self._readings))
        return {
            "watts": round(watts, 1),
            "sm_mhz": clocks,
            "joules": round(joules, 1),
            "joules_per_token": round(joules / num_tokens, 6),
        }

    def _read(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            self._readings.append(self._reading())

    def _reading(self) -> tuple[float, int]:
        return self._card.watts(), int(self._card.sm_mhz())


def gemm_shapes(spec: ModelSpec) -> list[tuple[int, int]]:
    """Outputs and inputs of a dense layer's GEMMs: qkv, o, up and gate, down."""
    return [
        ((spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim, spec.hidden_size),
        (spec.hidden_size, spec.num_heads * spec.head_dim),
        (2 * spec.intermediate_size, spec.hidden_size),
        (spec.hidden_size, spec.intermediate_size),
    ]


def gemm_rate(spec: ModelSpec, dtype: torch.dtype, rows: int = 2048, seconds: float = 2.5) -> float:
    """Sustained FLOP/s of a layer's four GEMMs by cuBLAS, over the second half of `seconds`."""
    shapes = gemm_shapes(spec)
    x = [torch.randn(rows, k, device="cuda", dtype=dtype) for _, k in shapes]
    w = [[torch.empty(n, k, device="cuda", dtype=dtype).uniform_(-1e-3, 1e-3) for n, k in shapes] for _ in range(2)]
    y = [torch.empty(rows, n, device="cuda", dtype=dtype) for n, _ in shapes]
    flops = 2.0 * rows * sum(n * k for n, k in shapes)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    count = min(max(4, int(seconds * 6e14 / flops)), _MOST_GEMMS)
    for i in range(count):
        if i == count // 2:
            begin.record()
        for a, b, c in zip(x, w[i % 2], y):
            torch.mm(a, b.t(), out=c)
    end.record()
    end.synchronize()
    return float(flops * (count - count // 2) / (begin.elapsed_time(end) / 1e3))


def parameters(spec: ModelSpec) -> int:
    """Parameters of a dense model, the embedding included."""
    layer = sum(n * k for n, k in gemm_shapes(spec)) + 2 * spec.hidden_size
    vocabulary = spec.vocab_size * spec.hidden_size * (1 if spec.tie_embeddings else 2)
    return spec.num_layers * layer + vocabulary + spec.hidden_size


def memory_bound_step_s(spec: ModelSpec, num_sequences: int, mean_context: float, item_bytes: int) -> float:
    """Seconds of a decode step that does nothing but read weights and KV at MEMORY_BYTES_PER_S.

    The embedding counts where it is the head as well; otherwise only single rows of it are read.
    """
    weights = parameters(spec) - (0 if spec.tie_embeddings else spec.vocab_size * spec.hidden_size)
    kv = num_sequences * mean_context * 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim
    return (weights + kv) * item_bytes / MEMORY_BYTES_PER_S
