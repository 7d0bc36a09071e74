"""The decode attention in CUDA: emulated on a CPU, instruction by instruction, and on a GPU; against the reference."""

import ctypes
import math
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from worker.kernels import decode_attention_cuda, reference
from worker.work_lists import decode_units, range_ends

LENGTHS = [1, 16, 17, 63, 64, 65, 300, 700]
CASES = [(4, 128, 64), (1, 64, 16), (8, 128, 32), (3, 64, 64), (7, 64, 64), (3, 128, 64)]  # group, head dim, page size
DTYPES = [torch.bfloat16, torch.float16]
PLACES = ["emulated", pytest.param("cuda", marks=pytest.mark.gpu)]


class Work:
    """Random sequences on scattered pages, NaN behind each one's end, and their work list."""

    def __init__(self, group: int, head_dim: int, page_size: int, dtype: torch.dtype, target: int, cuts) -> None:
        draw = torch.Generator().manual_seed(group * head_dim + page_size)
        self.group, self.kv_heads, count = group, 2, len(LENGTHS)
        pages = [-(-length // page_size) for length in LENGTHS]
        shape = (sum(pages), self.kv_heads, page_size, head_dim)
        self.k, self.v = (torch.randn(shape, generator=draw).to(dtype) for _ in range(2))
        self.table = torch.zeros(count, max(pages), dtype=torch.int32)
        order = torch.randperm(sum(pages), generator=draw).int()
        for slot, (length, number) in enumerate(zip(LENGTHS, pages)):
            self.table[slot, :number], order = order[:number], order[number:]
            if length % page_size:
                last = int(self.table[slot, number - 1])
                self.k[last, :, length % page_size :] = float("nan")
                self.v[last, :, length % page_size :] = float("nan")
        rows = np.random.default_rng(0).permutation(count).astype(np.int32)
        lengths = np.array(LENGTHS, np.int32)
        slots = np.arange(count, dtype=np.int32)
        units, self.num_partials = decode_units(rows, slots, lengths, target=target, shortest=128, align=64, cuts=cuts)
        self.spans = torch.from_numpy(np.append(0, range_ends(units, cuts)).astype(np.int32))
        self.units = torch.from_numpy(units)
        width = self.kv_heads * group * head_dim
        # Large scores, so that maxima rise on the way.
        self.q = (4 * torch.randn(count + 1, width + 64, generator=draw)).to(dtype)
        self.out = torch.full((count + 1, width), 7.0, dtype=dtype)

    def expected(self) -> torch.Tensor:
        out, whole = self.out.clone(), torch.tensor([0, len(self.units)], dtype=torch.int32)
        reference.decode_attention(self.q, self.k, self.v, self.table, self.units, whole, out, group=self.group)
        return out

    def workspace(self, device: str) -> list[torch.Tensor]:
        """Arrival counters and partial outputs, maxima and sums."""
        most, heads = self.num_partials + 1, self.kv_heads
        return [
            torch.zeros(most, heads, dtype=torch.int32, device=device),
            torch.zeros(most, heads, self.group, self.k.shape[-1], device=device),
            torch.zeros(most, heads, 16, device=device),
            torch.zeros(most, heads, 16, device=device),
        ]


@pytest.fixture(scope="session")
def emulated(tmp_path_factory):
    """emulated(dtype, head_dim, kv_heads, group, page_size, variant) -> the kernel, compiled for the CPU."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile the emulation with")
    folder = tmp_path_factory.mktemp("emulated")
    (folder / "kernel.cu").write_text(decode_attention_cuda.source())
    types = "const void *q, *k, *v, *table, *units, *span; void *ticket, *arrived, *partial, *top, *sum, *out;"
    (folder / "main.cpp").write_text(
        f"""
#include "{Path(__file__).parent / "emulation.h"}"
#include "kernel.cu"
struct Call {{ {types} long long q_stride, table_stride, out_stride; float scale; int helps, blocks; }};
extern "C" void run(Call* c) {{
    launch(c->blocks, [c] {{
        decode((const T16*)c->q, (const T16*)c->k, (const T16*)c->v, (const int*)c->table, (const int*)c->units,
               (const int*)c->span, (int*)c->ticket, (int*)c->arrived, (float*)c->partial, (float*)c->top,
               (float*)c->sum, (T16*)c->out, c->q_stride, c->table_stride, c->out_stride, c->scale,
               c->helps);
    }});
}}
"""
    )

    class Call(ctypes.Structure):
        _fields_ = [
            *((f"pointer{i}", ctypes.c_void_p) for i in range(12)),
            *((f"stride{i}", ctypes.c_longlong) for i in range(3)),
            ("scale", ctypes.c_float),
            ("helps", ctypes.c_int),
            ("blocks", ctypes.c_int),
        ]

    def compiled(dtype, head_dim, kv_heads, group, page_size, variant):
        sizes = {"HEAD_DIM": head_dim, "KV_HEADS": kv_heads, "GROUP": group, "PAGE_SIZE": page_size}
        sizes |= {"WARPS": variant.warps, "GROUPS": variant.groups}
        name = folder / f"{'-'.join(map(str, sizes.values()))}-{dtype}.so"
        if not name.exists():
            flags = [f"-D{key}={value}" for key, value in sizes.items()] + ["-DBF16"] * (dtype == torch.bfloat16)
            command = [compiler, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", *flags, "main.cpp", "-o", str(name)]
            subprocess.run(command, cwd=folder, check=True, timeout=200)
        library = ctypes.CDLL(str(name))

        def run(tensors, strides, *numbers):
            library.run(ctypes.byref(Call(*(tensor.data_ptr() for tensor in tensors), *strides, *numbers)))

        return run

    return compiled


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", decode_attention_cuda.VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "head_dim", "page_size"), CASES)
@pytest.mark.parametrize(("target", "cuts"), [(4, (9,)), (1000, (3, 4, 9))])
def test_equals_reference(group, head_dim, page_size, target, cuts, dtype, name, place, request):
    if place == "cuda":
        pytest.importorskip("cupy", reason="no CuPy")
        if not torch.cuda.is_available():
            pytest.skip("no CUDA GPU")
    variant = decode_attention_cuda.VARIANTS[name]
    if not decode_attention_cuda.fits(head_dim, group, page_size, dtype, variant):
        pytest.skip("pages are too small for this variant")
    work = Work(group, head_dim, page_size, dtype, target, cuts)
    assert target == 4 or work.num_partials > 0  # the case with many units exercises the merge
    expected, workspace = work.expected(), work.workspace("cpu" if place == "emulated" else place)
    if place == "emulated":
        run = request.getfixturevalue("emulated")(dtype, head_dim, work.kv_heads, group, page_size, variant)
        out = work.out.clone()
        scale = math.log2(math.e) / math.sqrt(head_dim)
        strides = [tensor.stride(0) for tensor in (work.q, work.table, out)]
        for number in range(len(cuts)):
            inputs = [work.q, work.k, work.v, work.table, work.units, work.spans[number:]]
            run([*inputs, torch.zeros(1, dtype=torch.int32), *workspace, out], strides, scale, number % 2, 2)
    else:
        out = run_on_gpu(work, len(cuts), workspace, variant)
    error = float((out.double() - expected.double()).norm() / expected.double().norm())
    assert error < 5e-3
    assert torch.equal(out[-1], expected[-1])  # a row in no unit is left alone
    assert int(workspace[0].abs().sum()) == 0  # arrival counters are ready for the next launch


def run_on_gpu(work: Work, num_ranges: int, workspace, variant) -> torch.Tensor:
    from worker.kernels.decode_attention import DecodeWorkspace

    space = DecodeWorkspace.__new__(DecodeWorkspace)
    space.arrived, space.out, space.max, space.sum = workspace
    inputs = [tensor.cuda() for tensor in (work.q, work.k, work.v, work.table, work.units)]
    spans, out = work.spans.cuda(), work.out.cuda()
    tickets = torch.zeros(num_ranges, 1, dtype=torch.int32, device="cuda")  # there before what helps may begin
    for number in range(num_ranges):
        for helps in (False, True):
            tensors = *inputs, spans[number:], tickets[number], space, out
            decode_attention_cuda.decode_attention(*tensors, group=work.group, sms=2, variant=variant, helps=helps)
    return out.cpu()


def test_shapes_that_do_not_fit_are_known():
    fits = decode_attention_cuda.fits
    assert all(fits(head_dim, group, page, dtype) for group, head_dim, page in CASES for dtype in DTYPES)
    assert not fits(96, 4, 64, torch.bfloat16)
    assert not fits(128, 16, 64, torch.bfloat16)
    assert not fits(128, 4, 8, torch.bfloat16)
    assert not fits(128, 4, 64, torch.float32)
