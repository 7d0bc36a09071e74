"""Copies whole KV pages of all layers to contiguous records, and back.

A record is a page's bytes as the KV store keeps them: [layers, K and V, heads, page size, head dim]. What a record has
of one layer and side lies together in the cache as well, so that both kernels copy runs of bytes, many of them, with
a few blocks that leave the GPU to others. Compiled by NVRTC (CuPy) for the widest word that runs are made of. Beside
them the same in torch, the reference. Knows nothing of stores or streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_longlong, c_void_p
from typing import Any

import torch

from worker.kernels.launch import Argument, launch
from worker.kernels.record_checksum import RecordChecksum

MAX_PAGES = 512  # that one launch moves at most: their numbers are kept in shared memory
NUM_BLOCKS = 16  # several times a link's rate, with an eighth of the GPU

_THREADS, _UNROLL = 256, 8
_WORDS = {16: "uint4", 8: "uint2", 4: "unsigned", 2: "ushort1"}

_SOURCE = r"""
// One tile of a run at a time: every thread has UNROLL words on their way.
template <bool TO_RECORDS>
__device__ void copy_pages(const unsigned long long* layers, const int* pages, char* records, long long record_bytes,
                           long long side_bytes, long long run_words, long long num_layers, long long num_pages) {
    __shared__ int page_of[MAX_PAGES];
    for (int i = threadIdx.x; i < num_pages; i += THREADS) page_of[i] = pages[i];
    __syncthreads();
    const long long tile_words = THREADS * UNROLL;
    const long long run_tiles = (run_words + tile_words - 1) / tile_words;
    const long long num_tiles = num_pages * num_layers * 2 * run_tiles;
    for (long long tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
        const long long run = tile / run_tiles;
        const long long first = (tile - run * run_tiles) * tile_words;
        const long long side = run & 1, layer = (run >> 1) % num_layers, number = (run >> 1) / num_layers;
        WORD* cached = reinterpret_cast<WORD*>(layers[layer] + side * side_bytes) + page_of[number] * run_words + first;
        WORD* kept = reinterpret_cast<WORD*>(records + number * record_bytes) + (layer * 2 + side) * run_words + first;
        const WORD* from = TO_RECORDS ? cached : kept;
        WORD* to = TO_RECORDS ? kept : cached;
        const long long left = run_words - first;
        WORD words[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const int place = i * THREADS + threadIdx.x;
            if (place < left) words[i] = from[place];
        }
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const int place = i * THREADS + threadIdx.x;
            if (place < left) to[place] = words[i];
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
gather(const unsigned long long* layers, const int* pages, char* records, long long record_bytes, long long side_bytes,
       long long run_words, long long num_layers, long long num_pages) {
    copy_pages<true>(layers, pages, records, record_bytes, side_bytes, run_words, num_layers, num_pages);
}

extern "C" __global__ void __launch_bounds__(THREADS)
scatter(const unsigned long long* layers, const int* pages, char* records, long long record_bytes, long long side_bytes,
        long long run_words, long long num_layers, long long num_pages) {
    copy_pages<false>(layers, pages, records, record_bytes, side_bytes, run_words, num_layers, num_pages);
}
"""


class PageCopyKernels:
    """The kernels for one cache. Launches are queued on the stream that is given, and nothing is waited for."""

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        """layers: [K and V, pages, heads, page size, head dim] each, contiguous. Raises ImportError without CuPy."""
        import cupy

        first = layers[0]
        assert all(layer.is_contiguous() and layer.shape == first.shape for layer in layers), "layers differ"
        run_bytes = first[0, 0].numel() * first.element_size()
        word_bytes = next(size for size in _WORDS if run_bytes % size == 0)
        self._sizes = (first[0].numel() * first.element_size(), run_bytes // word_bytes, len(layers))
        self._layers = torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.int64, device=first.device)
        numbers = {"THREADS": _THREADS, "UNROLL": _UNROLL, "MAX_PAGES": MAX_PAGES, "WORD": _WORDS[word_bytes]}
        options = ("-std=c++17", *(f"-D{name}={value}" for name, value in numbers.items()))
        self.checksum = RecordChecksum(first.device)
        with cupy.cuda.Device(first.device.index or 0):
            kernels = (cupy.RawKernel(_SOURCE, name, options).kernel for name in ("gather", "scatter"))
            self._gather, self._scatter = kernels

    def gather(
        self, pages: torch.Tensor, records: torch.Tensor, stream: torch.cuda.Stream, num_blocks: int = NUM_BLOCKS
    ) -> None:
        """Pages to records, uint8 [at least so many, record bytes and more]; the rest of each record stays.

        pages: int32 on the device, or in pinned memory that stays as it is until the kernel has ended.
        """
        self._launch(self._gather, pages, records, stream, num_blocks)

    def scatter(
        self, pages: torch.Tensor, records: torch.Tensor, stream: torch.cuda.Stream, num_blocks: int = NUM_BLOCKS
    ) -> None:
        """Records to pages, which must differ. As gather()."""
        self._launch(self._scatter, pages, records, stream, num_blocks)

    def _launch(
        self, kernel: Any, pages: torch.Tensor, records: torch.Tensor, stream: torch.cuda.Stream, num_blocks: int
    ) -> None:
        num_pages = len(pages)
        assert num_pages <= min(MAX_PAGES, len(records)), "too many pages for one launch"
        assert pages.dtype == torch.int32, "page numbers are int32"
        assert records.stride(0) % 16 == records.data_ptr() % 16 == 0, "records lie at multiples of 16 bytes"
        if not num_pages:
            return
        side_bytes, run_words, num_layers = self._sizes
        addresses = self._layers.data_ptr(), pages.data_ptr(), records.data_ptr()
        numbers = records.stride(0), side_bytes, run_words, num_layers, num_pages
        arguments: list[Argument] = [(address, c_void_p) for address in addresses] + [
            (number, c_longlong) for number in numbers
        ]
        launch(kernel.ptr, num_blocks, _THREADS, arguments, stream.cuda_stream)


def gather(layers: Sequence[torch.Tensor], pages: Sequence[int], records: torch.Tensor) -> None:
    """The reference: pages of the layers to records, uint8 [at least so many, record bytes and more]."""
    for record, page in zip(records, pages):
        values = torch.stack([layer[:, page] for layer in layers])
        record[: values.nbytes].copy_(values.view(-1).view(torch.uint8))


def scatter(layers: Sequence[torch.Tensor], pages: Sequence[int], records: torch.Tensor) -> None:
    """The reference: records to pages of the layers. As gather()."""
    shape = (len(layers), *layers[0][:, 0].shape)
    num_bytes = len(layers) * layers[0][:, 0].nbytes
    for record, page in zip(records, pages):
        for layer, values in zip(layers, record[:num_bytes].view(layers[0].dtype).view(shape)):
            layer[:, page] = values
