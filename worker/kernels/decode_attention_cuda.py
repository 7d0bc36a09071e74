"""Launches decode_attention.cu, the decode attention that K and V reach without shared memory, compiled by NVRTC.

It takes the same work lists and workspace as the Triton kernel beside it, for head dims and groups that fit its
instructions. Knows nothing of models or plans.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import torch

from worker.kernels.launch import Argument, launch

_NAMES = {torch.bfloat16: "bf16", torch.float16: "f16"}


@dataclass(frozen=True, slots=True)
class Variant:
    """How many bytes are on their way, and for how many units at once."""

    warps: int = 4  # of a block, which works on one unit at a time
    groups: int = 1  # of 16 tokens that a warp holds at once
    blocks: int = 3  # per SM


# Per cent of an SM's memory that is shared. The kernel needs little, but must ask: it would run with what a GEMM before
# it left, and beside that the L1 is too small (docs/results.md: 22 % slower).
_CARVEOUT = 50

VARIANTS = {"cuda": Variant(), "cuda-wide": Variant(4, 2, 2), "cuda-small": Variant(2, 2, 4)}

DEVICE_FUNCTIONS = r"""
#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS)
#define SHARED(type, name) __shared__ type name
#define THREAD threadIdx.x
#define SYNC_THREADS __syncthreads
#define THREAD_FENCE __threadfence
typedef unsigned short T16;

DEVICE void after_previous() {  // as worker.kernels.chain
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
DEVICE uint4 load16(const T16* from) { return *(const uint4*)from; }
DEVICE uint4 stream16(const T16* from) {  // read once: leaves the caches to others
    uint4 x;
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(from), "l"(policy));
    return x;
}
DEVICE void mma(float* c, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DEVICE unsigned transpose(unsigned x) {  // of an 8 x 8 matrix, two values of a row per lane
    unsigned y;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}
DEVICE unsigned pack(float low, float high) {
    unsigned x;
    asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
}
DEVICE unsigned permute(unsigned a, unsigned b, unsigned which) { return __byte_perm(a, b, which); }
DEVICE float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE bool any_lane(bool x) { return __any_sync(0xffffffffu, x); }
DEVICE float shuffle_xor(float x, int distance) { return __shfl_xor_sync(0xffffffffu, x, distance); }
DEVICE float fresh(const float* from) { return __ldcg(from); }
DEVICE float4 fresh4(const float* from) { return __ldcg((const float4*)from); }
DEVICE void store4(T16* to, float4 x, float scale) {
    *(uint2*)to = make_uint2(pack(x.x * scale, x.y * scale), pack(x.z * scale, x.w * scale));
}
"""


def source() -> str:
    """The kernel's own text, without the functions above."""
    return (resources.files("worker.kernels") / "decode_attention.cu").read_text()


def fits(head_dim: int, group: int, page_size: int, dtype: torch.dtype, variant: Variant = Variant()) -> bool:
    """Whether the kernel can run these shapes."""
    return head_dim in (64, 128) and group <= 8 and page_size % (16 * variant.groups) == 0 and dtype in _NAMES


@cache
def _kernel(dtype: torch.dtype, head_dim: int, kv_heads: int, group: int, page_size: int, variant: Variant) -> Any:
    import cupy

    sizes = {"HEAD_DIM": head_dim, "KV_HEADS": kv_heads, "GROUP": group, "PAGE_SIZE": page_size}
    sizes |= {"WARPS": variant.warps, "GROUPS": variant.groups, "BLOCKS": variant.blocks}
    defines = [f"-D{name}={value}" for name, value in sizes.items()]
    options = ("-std=c++17", "-default-device", "--use_fast_math", f'-DTYPE="{_NAMES[dtype]}"', *defines)
    kernel = cupy.RawKernel(DEVICE_FUNCTIONS + source(), "decode", options=options)
    kernel.preferred_shared_memory_carveout = _CARVEOUT
    return kernel


def decode_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    units: torch.Tensor,
    span: torch.Tensor,
    ticket: torch.Tensor,
    workspace: Any,
    out: torch.Tensor,
    *,
    group: int,
    sms: int,
    variant: Variant = Variant(),
    helps: bool = False,
) -> None:
    """As worker.kernels.decode_attention.decode_attention, on so many SMs.

    helps: take from another launch's ticket, which began when all that is read here was there; the kernel before this
    one on the stream, whose results are not read, may still run meanwhile.
    """
    assert fits(k_pages.shape[-1], group, k_pages.shape[2], k_pages.dtype, variant)
    _, kv_heads, page_size, head_dim = k_pages.shape
    kernel = _kernel(k_pages.dtype, head_dim, kv_heads, group, page_size, variant)
    pointers = [q, k_pages, v_pages, page_table, units, span, ticket, workspace.arrived]
    pointers += [workspace.out, workspace.max, workspace.sum, out]
    arguments: list[Argument] = [(tensor.data_ptr(), ctypes.c_void_p) for tensor in pointers]
    arguments += [(tensor.stride(0), ctypes.c_longlong) for tensor in (q, page_table, out)]
    arguments += [(math.log2(math.e) / math.sqrt(head_dim), ctypes.c_float), (int(helps), ctypes.c_int)]
    stream = torch.cuda.current_stream(q.device).cuda_stream
    launch(kernel.kernel.ptr, sms * variant.blocks, variant.warps * 32, arguments, stream, chained=True)
