"""The kernels of a GPU: Triton's, CUDA's own where they win, and cuBLAS.

Which of several runs an operation is decided by what was measured, here and in `worker.gemm_choice`, or by a
schedule. Knows nothing of models or plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from worker.kernel_set import ANY_WAY, GATE_BLOCK, How, Norm

# Decode attention: Triton's blocks per SM and warps per block. Those in CUDA (`decode_attention_cuda.VARIANTS`) are
# ahead with few rows, where a kernel's start counts, and on a part of the SMs (docs/results.md); without CuPy and
# cuda-bindings Triton's first takes their place.
DECODE_VARIANTS = {"4x4": (4, 4), "5x2": (5, 2)}
# Tiles of the own GEMM; gate and up have the first one only. Without a name the fastest GEMM is chosen where an
# operation has the device to itself, and elsewhere the first of these.
GEMM_VARIANTS = ("128x256", "128x128")
FEW_ROWS = 256


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # nor the package that it would be in
        return False


class TritonKernels:
    """Triton and cuBLAS on one GPU."""

    def __init__(self, device: torch.device, num_kv_heads: int, group: int, head_dim: int, max_partials: int) -> None:
        from worker import gemm_choice
        from worker.kernels import (
            decode_attention,
            decode_attention_cuda,
            elementwise,
            gemm,
            prefill_attention,
            sampling,
            skinny_gemm,
        )

        self._decode_cuda, self._has_cuda = decode_attention_cuda, _is_there("cupy") and _is_there("cuda.bindings")

        self._decode, self._prefill = decode_attention, prefill_attention
        self._elementwise, self._gemm = elementwise, gemm
        self.embed, self.norm, self.rope_append = elementwise.embed, elementwise.add_rms_norm, elementwise.rope_append
        self.gather_norm, self.sample = elementwise.gather_add_rms_norm, sampling.sample
        self._skinny, self._skinny_workspace = skinny_gemm, skinny_gemm.SkinnyWorkspace(device)
        self._choice, self.gemm_choice = gemm_choice, gemm_choice.GemmChoice()
        self._sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._workspace = decode_attention.DecodeWorkspace(max_partials, num_kv_heads, group, head_dim, device)
        self._made_with = (device, num_kv_heads, group, head_dim, max_partials)

    def twin(self) -> TritonKernels:
        """Workspaces of its own, to run beside these; which GEMM is the fastest is known to both."""
        twin = TritonKernels(*self._made_with)
        twin.gemm_choice = self.gemm_choice
        return twin

    def folds_norms(self, rows: int, shapes: Sequence[tuple[int, int]]) -> bool:
        return self._choice.filled_share(rows, shapes, self._sms) >= self._choice.FULL_WAVES

    def linear(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        how: How = ANY_WAY,
        norm: Norm | None = None,
    ) -> None:
        # What shares the device with others takes neither workspaces nor times of the whole device.
        fits = not (w.shape[0] % 8 or w.shape[1] % 8)  # TMA wants rows of whole 16 bytes
        if norm or (how != ANY_WAY and fits):
            sms, tile = how.sms or self._sms, self._tile(how)
            squares, eps = (norm.squares, norm.eps) if norm else (None, 0.0)
            self._gemm.linear(x, w, out, sms=sms, bias=bias, squares=squares, eps=eps, tile=tile)
            return

        def cublas() -> None:
            if bias is None:
                torch.mm(x, w.t(), out=out)
            else:
                torch.addmm(bias, x, w.t(), out=out)

        rows, columns = x.shape[0], w.shape[0]
        if how != ANY_WAY:
            cublas()
        elif self._choice.is_skinny(rows, w.shape[1]):
            tile = self._choice.skinny_tile(rows, columns, w.shape[1])
            self._skinny.skinny_linear(x, w, out, self._skinny_workspace, tile=tile, bias=bias)
        elif rows < self._choice.MEASURED_ROWS or not fits:
            cublas()
        else:
            persistent = partial(self._gemm.linear, x, w, out, sms=self._sms, bias=bias)
            self.gemm_choice.run((rows, columns, w.shape[1], 0), (cublas, persistent))

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
        if (norm or how != ANY_WAY) and block != GATE_BLOCK:
            self.linear(x, w, None, both, how, norm)
            self._elementwise.silu_mul(both, out, block)
            return
        if norm or how != ANY_WAY:
            squares, eps = (norm.squares, norm.eps) if norm else (None, 0.0)
            self._gemm.linear(x, w, out, sms=how.sms or self._sms, silu_mul=True, squares=squares, eps=eps)
            return

        def cublas() -> None:
            torch.mm(x, w.t(), out=both)
            self._elementwise.silu_mul(both, out, block)

        rows, (columns, depth) = x.shape[0], w.shape
        if self._choice.is_skinny(rows, depth) and block % 64 == 0:
            tile = self._choice.skinny_tile(rows, columns // 2, depth)
            self._skinny.skinny_linear(x, w, out, self._skinny_workspace, tile=tile, gate_block=block)
        elif rows <= 64 and block == GATE_BLOCK:
            self._gemm.linear(x, w, out, sms=self._sms, silu_mul=True, tile=self._gemm.LOW_TILE)
        elif block != GATE_BLOCK:
            cublas()
        else:  # with SiLU·mul at its end the persistent kernel may win from here on
            persistent = partial(self._gemm.linear, x, w, out, sms=self._sms, silu_mul=True)
            self.gemm_choice.run((rows, columns, depth, 1), (cublas, persistent))

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
        self._gemm.linear_add(x, w, residual, gain, scaled, squares, sms=how.sms or self._sms, bias=bias)

    def decode(self, *args: torch.Tensor, ticket: torch.Tensor, group: int, rows: int, how: How = ANY_WAY) -> None:
        q, k, v, table, units, span, out = args
        sms, variant = how.sms or self._sms, how.kernel or ("cuda" if rows <= FEW_ROWS else "4x4")
        _, _, page_size, head_dim = k.shape
        cuda = self._decode_cuda.VARIANTS.get(variant) if self._has_cuda else None
        if cuda and self._decode_cuda.fits(head_dim, group, page_size, k.dtype, cuda):
            tensors = q, k, v, table, units, span, ticket, self._workspace, out
            self._decode_cuda.decode_attention(*tensors, group=group, sms=sms, variant=cuda, helps=how.helps)
            return
        per_sm, warps = DECODE_VARIANTS.get(variant, DECODE_VARIANTS["4x4"])
        blocks = per_sm * sms
        self._decode.decode_attention(
            q, k, v, table, units, span, ticket, self._workspace, out, group=group, blocks=blocks, warps=warps
        )

    def prefill(self, *args: torch.Tensor, ticket: torch.Tensor, group: int, how: How = ANY_WAY) -> None:
        q, k, v, table, units, span, out = args
        blocks = 3 * (how.sms or self._sms)
        self._prefill.prefill_attention(q, k, v, table, units, span, ticket, out, group=group, blocks=blocks)

    def _tile(self, how: How) -> Any:
        return self._gemm.Tile(columns=128, stages=4) if how.kernel == GEMM_VARIANTS[1] else self._gemm.Tile()

    def argmax(self, x: torch.Tensor, w: torch.Tensor, num_rows: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        tile = self._gemm.Tile(rows=128 if rows > 64 else 64, warps=8 if rows > 64 else 4)
        tiles = -(-w.shape[0] // tile.columns)
        best = torch.zeros(tiles, rows, dtype=torch.float32, device=x.device)
        column = torch.zeros(tiles, rows, dtype=torch.int32, device=x.device)
        self._gemm.linear_argmax(x, w, best, column, num_rows, sms=self._sms, tile=tile)
        top = best.max(0).values
        first = torch.where(best == top, column, 2**31 - 1).amin(0)
        return torch.where(top.isfinite(), first, -1).int()
