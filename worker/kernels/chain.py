"""Kernels that follow each other without a gap: each is launched while the one before it still runs.

By programmatic dependent launch (CUDA programming guide, "Programmatic Dependent Launch"; Hopper and later): a kernel
lets the next one be launched as soon as all its own blocks run, and waits, before it touches anything that others
write, until the one before it has ended and its results can be seen. Every kernel of a chain waits, so the end of one
is the end of all before it. Knows nothing of what the kernels compute.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

# Keyword arguments of each launch.
CHAINED: dict[str, Any] = {"PDL": False} if triton.knobs.runtime.interpret else {"PDL": True, "launch_pdl": True}


@triton.jit
def after_previous(PDL: tl.constexpr):
    """Wait for the kernel before; to be called before anything is read or written that another kernel writes."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(pointers, PDL: tl.constexpr):
    """Ask for the cache lines of pointers to be brought into L2; nothing waits for them."""
    if PDL:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
        )
