"""The kernels that the GPU model runs on, behind one interface: a GPU's (`triton_kernels`), the references anywhere.

Knows nothing of models or plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from worker.kernels import reference

TILE_COLUMNS = 256  # of the persistent GEMM: it sums a row's squares tile by tile
# Gate and up rows alternate in blocks of this many where the FFN's width divides by it: half of a tile is the gate.
GATE_BLOCK = TILE_COLUMNS // 2
MAX_HEAD_DIM = 128  # a tile of keys and values, several times over, must fit an SM's shared memory
MAX_VOCAB = (1 << 19) - 1  # the sampler adds up a weight of at most 2^44 for each token in 63 bits


@dataclass(frozen=True, slots=True)
class How:
    """How a schedule wants an operation run. The results do not depend on it, beyond rounding."""

    sms: int | None = None  # SMs that it has; None: all
    kernel: str = ""  # a variant by name; empty: the default
    helps: bool = False  # with what another operation on the same rows began; the kernel before it may still run


ANY_WAY = How()


@dataclass(frozen=True, slots=True)
class Norm:
    """Of the rows that a GEMM reads, as kernels.gemm.linear_add left it: they are scaled already."""

    squares: torch.Tensor  # [parts, rows] fp32
    eps: float

    @staticmethod
    def num_parts(columns: int) -> int:
        """Parts that there must be room for."""
        return -(-columns // TILE_COLUMNS)


class KernelSet(Protocol):
    """What the model needs; shapes as in the modules of worker.kernels."""

    def folds_norms(self, rows: int, shapes: Sequence[tuple[int, int]]) -> bool:
        """Whether a batch of so many rows is faster with folded norms, for weights of these [columns, depth]."""

    def embed(
        self, tokens: torch.Tensor, last_tokens: torch.Tensor, table: torch.Tensor, out: torch.Tensor
    ) -> None: ...

    def norm(
        self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, out: torch.Tensor, eps: float
    ) -> None: ...

    def gather_norm(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        rows: torch.Tensor,
        num_rows: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        eps: float,
    ) -> None: ...

    def linear(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        how: How = ANY_WAY,
        norm: Norm | None = None,
    ) -> None: ...

    def gated(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        both: torch.Tensor,
        out: torch.Tensor,
        block: int,
        how: How = ANY_WAY,
        norm: Norm | None = None,
    ) -> None: ...

    def add(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        gain: torch.Tensor,
        scaled: torch.Tensor,
        squares: torch.Tensor,
        how: How = ANY_WAY,
    ) -> None:
        """As kernels.gemm.linear_add."""

    def rope_append(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cells: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        *,
        num_heads: int,
    ) -> None: ...

    def decode(self, *args: torch.Tensor, ticket: torch.Tensor, group: int, rows: int, how: How = ANY_WAY) -> None:
        """(q, k_pages, v_pages, page_table, units, span, out), as kernels.reference.decode_attention.

        rows: that there are at most; which kernel is the fastest depends on it.
        """

    def prefill(self, *args: torch.Tensor, ticket: torch.Tensor, group: int, how: How = ANY_WAY) -> None:
        """As decode(), and kernels.reference.prefill_attention."""

    def argmax(self, x: torch.Tensor, w: torch.Tensor, num_rows: torch.Tensor) -> torch.Tensor:
        """Column of each row's largest product, the lowest of equals; -1 where it is not finite: [rows] int32."""

    def sample(
        self,
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
    ) -> None: ...


class ReferenceKernels:
    """Plain torch, on any device."""

    embed = staticmethod(reference.embed)
    norm = staticmethod(reference.add_rms_norm)
    gather_norm = staticmethod(reference.gather_add_rms_norm)
    rope_append = staticmethod(reference.rope_append)
    sample = staticmethod(reference.sample)

    def folds_norms(self, rows: int, shapes: Sequence[tuple[int, int]]) -> bool:
        return False

    def linear(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        how: How = ANY_WAY,
        norm: Norm | None = None,
    ) -> None:
        reference.linear(x, w, out, bias, norm.squares if norm else None, norm.eps if norm else 0.0)

    def gated(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        both: torch.Tensor,
        out: torch.Tensor,
        block: int,
        how: How = ANY_WAY,
        norm: Norm | None = None,
    ) -> None:
        self.linear(x, w, None, both, how, norm)
        reference.silu_mul(both, out, block)

    def add(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor,
        gain: torch.Tensor,
        scaled: torch.Tensor,
        squares: torch.Tensor,
        how: How = ANY_WAY,
    ) -> None:
        reference.linear_add(x, w, residual, gain, scaled, squares, bias)

    def decode(self, *args: torch.Tensor, ticket: torch.Tensor, group: int, rows: int, how: How = ANY_WAY) -> None:
        reference.decode_attention(*args, group=group)

    def prefill(self, *args: torch.Tensor, ticket: torch.Tensor, group: int, how: How = ANY_WAY) -> None:
        reference.prefill_attention(*args, group=group)

    def argmax(self, x: torch.Tensor, w: torch.Tensor, num_rows: torch.Tensor) -> torch.Tensor:
        logits = x.float() @ w.float().T
        return torch.where(logits.isfinite().all(-1), logits.argmax(-1), -1).int()
