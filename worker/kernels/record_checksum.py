"""Checksums of KV store records that lie in GPU memory, the same that the host computes: XXH3, 64 bits, seed 0.

By the algorithm's specification (xxHash 0.8, doc/xxhash_spec.md, inputs of more than 240 bytes): blocks of 1 KiB are
summed each for itself, which many threads do at once; the sums enter a chain of eight accumulators, which is short.
A thread block takes a record: some warps sum a tile of blocks while one more is a tile behind with the chain. So few
threads leave the GPU to others, and the time is that of one record's chain, whatever their number. Compiled
by NVRTC (CuPy). Knows nothing of records but where they lie.
"""

from __future__ import annotations

import struct
from ctypes import c_longlong, c_void_p
from typing import Any

import torch

from worker.kernels.launch import Argument, launch

MIN_BYTES = 256  # shorter inputs have another algorithm
ALIGNMENT = 64  # bytes of a stripe; so that the last one starts where the one before it ends

_SUM_WARPS = 24  # tiles of 96 KiB: what is read of one has come when the chain is through with the one before
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)  # of the specification

_SOURCE = r"""
typedef unsigned long long u64;

__device__ const u64 STRIPE_KEYS[24] = {STRIPE_KEY_WORDS};  // the last eight scramble a block's end
__device__ const u64 LAST_KEYS[8] = {LAST_KEY_WORDS};
__device__ const u64 MERGE_KEYS[8] = {MERGE_KEY_WORDS};
__device__ const u64 FIRST[8] = {0xC2B2AE3DULL, 0x9E3779B185EBCA87ULL, 0xC2B2AE3D27D4EB4FULL, 0x165667B19E3779F9ULL,
                                 0x85EBCA77C2B2AE63ULL, 0x85EBCA77ULL, 0x27D4EB2F165667C5ULL, 0x9E3779B1ULL};

__device__ __forceinline__ u64 product(u64 word, u64 key) {
    word ^= key;
    return (word & 0xFFFFFFFFULL) * (word >> 32);
}

__device__ __forceinline__ u64 of_neighbour(u64 word) { return __shfl_xor_sync(0xFFFFFFFFu, word, 1); }

// Eight threads have a word of each stripe of a block.
extern "C" __global__ void __launch_bounds__(32 * (SUM_WARPS + 1))
checksum(const char* records, long long record_bytes, long long num_bytes, u64* checksums) {
    const int TILE = SUM_WARPS * 4;
    __shared__ u64 keys[24];
    __shared__ u64 sums[2][SUM_WARPS * 4][8];
    const u64* words = reinterpret_cast<const u64*>(records + blockIdx.x * record_bytes);
    const int lane = threadIdx.x & 7, group = threadIdx.x >> 3;
    const bool is_summing = threadIdx.x < 32 * SUM_WARPS;
    const long long num_stripes = num_bytes / 64 - 1;  // the last one is apart
    const long long num_blocks = num_stripes / 16;     // whole ones; what is left is one more, maybe empty
    const long long num_tiles = num_blocks / TILE + 1;
    if (threadIdx.x < 24) keys[threadIdx.x] = STRIPE_KEYS[threadIdx.x];
    __syncthreads();

    u64 sum = FIRST[lane];
    for (long long tile = 0; tile <= num_tiles; ++tile) {
        if (is_summing && tile < num_tiles) {
            const long long block = tile * TILE + group, left = num_stripes - block * 16;
            const u64* stripe = words + block * 128 + lane;
            u64 products = 0, values = 0;
            if (left >= 16) {
                u64 read[16];
#pragma unroll
                for (int i = 0; i < 16; ++i) read[i] = stripe[i * 8];
#pragma unroll
                for (int i = 0; i < 16; ++i) {
                    values += read[i];
                    products += product(read[i], keys[i + lane]);
                }
            } else {
                for (int i = 0; i < left; ++i) {
                    values += stripe[i * 8];
                    products += product(stripe[i * 8], keys[i + lane]);
                }
            }
            __syncwarp();
            sums[tile & 1][group][lane] = products + of_neighbour(values);
        }
        if (!is_summing && tile > 0) {
            const u64 (*ready)[8] = sums[(tile - 1) & 1];
            const long long left = num_blocks - (tile - 1) * TILE;
            const int num_whole = left < TILE ? int(left) : TILE;
            const u64 key = keys[16 + lane];
#pragma unroll 8
            for (int i = 0; i < num_whole; ++i) {
                sum += ready[i][lane];
                sum = (sum ^ (sum >> 47) ^ key) * 0x9E3779B1ULL;
            }
            if (num_whole < TILE) sum += ready[num_whole][lane];
        }
        __syncthreads();
    }
    if (is_summing) return;

    const u64 last = words[num_stripes * 8 + lane];
    sum += product(last, LAST_KEYS[lane]) + of_neighbour(last);
    const u64 mixed = sum ^ MERGE_KEYS[lane], other = of_neighbour(mixed);
    u64 folded = (lane & 1) ? 0 : (mixed * other) ^ __umul64hi(mixed, other);
    folded += __shfl_xor_sync(0xFFFFFFFFu, folded, 2);
    folded += __shfl_xor_sync(0xFFFFFFFFu, folded, 4);
    u64 hash = u64(num_bytes) * 0x9E3779B185EBCA87ULL + folded;
    hash ^= hash >> 37;
    hash *= 0x165667919E3779F9ULL;
    hash ^= hash >> 32;
    if (threadIdx.x == 32 * SUM_WARPS) checksums[blockIdx.x] = hash;
}
"""


def source() -> str:
    """The kernel's source, with the secret's words in it."""
    words = {"STRIPE_KEY_WORDS": (0, 24), "LAST_KEY_WORDS": (192 - 64 - 7, 8), "MERGE_KEY_WORDS": (11, 8)}
    text = _SOURCE.replace("SUM_WARPS", str(_SUM_WARPS))
    for name, (start, count) in words.items():
        text = text.replace(name, ", ".join(f"0x{w:X}ULL" for w in struct.unpack_from(f"<{count}Q", _SECRET, start)))
    return text


class RecordChecksum:
    """The kernel on one device. Launches are queued on the stream that is given, and nothing is waited for."""

    def __init__(self, device: torch.device) -> None:
        """Raises ImportError without CuPy."""
        import cupy

        kernel = cupy.RawKernel(source(), "checksum", ("-std=c++17",))
        with cupy.cuda.Device(device.index or 0):
            self._function: Any = kernel.kernel

    def __call__(
        self, records: torch.Tensor, num_bytes: int, checksums: torch.Tensor, stream: torch.cuda.Stream
    ) -> None:
        """Of the first num_bytes of each record, uint8 [records, record bytes], to int64 [at least so many].

        num_bytes is a multiple of 64, at least 256. checksums lie on the device or in pinned memory; an unsigned
        number's bits are in them.
        """
        assert num_bytes >= MIN_BYTES, "short records have another checksum"
        assert num_bytes % ALIGNMENT == 0, "a record ends with a whole stripe"
        assert records.stride(0) % 8 == records.data_ptr() % 8 == 0, "records lie at multiples of 8 bytes"
        assert checksums.dtype == torch.int64, "a checksum has 64 bits"
        assert len(checksums) >= len(records), "room for all"
        if not len(records):
            return
        arguments: list[Argument] = [(records.data_ptr(), c_void_p), (records.stride(0), c_longlong)]
        arguments += [(num_bytes, c_longlong), (checksums.data_ptr(), c_void_p)]
        launch(self._function.ptr, len(records), 32 * (_SUM_WARPS + 1), arguments, stream.cuda_stream)
