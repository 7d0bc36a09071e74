"""The kernels that gather and scatter pages, against the reference: all bytes, and no byte elsewhere."""

from __future__ import annotations

import pytest
import torch

from worker.kernels import page_copy

pytestmark = pytest.mark.gpu

LAYERS, PAGES, HEADS = 3, 40, 2


@pytest.fixture(scope="module")
def cuda() -> torch.device:
    pytest.importorskip("cupy", reason="CuPy is not installed")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    return torch.device("cuda")


def random_layers(shape: tuple[int, ...], dtype: torch.dtype, device, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    layers = [torch.empty(shape, dtype=dtype, device=device) for _ in range(LAYERS)]
    for layer in layers:
        layer.view(torch.uint8).random_(0, 256, generator=generator)
    return layers


def same_bytes(left, right) -> bool:
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(left, right))


def check(layers: list[torch.Tensor], pages: list[int], num_blocks: int, pinned: bool) -> None:
    device, record_bytes = layers[0].device, LAYERS * layers[0][:, 0].nbytes
    kernels, stream = page_copy.PageCopyKernels(layers), torch.cuda.Stream()
    numbers = torch.tensor(pages, dtype=torch.int32)
    numbers = numbers.pin_memory() if pinned else numbers.to(device)
    # More records than pages, farther apart than they are long.
    found = torch.full((len(pages) + 1, -(-record_bytes // 4096) * 4096 + 4096), 7, dtype=torch.uint8, device=device)
    expected = found.clone()
    page_copy.gather(layers, pages, expected)
    torch.cuda.synchronize()
    kernels.gather(numbers, found, stream, num_blocks)
    stream.synchronize()
    assert torch.equal(found, expected)

    others = random_layers(layers[0].shape, layers[0].dtype, device, 99)
    scattered = [layer.clone() for layer in others]
    page_copy.scatter(others, pages, expected)
    torch.cuda.synchronize()
    page_copy.PageCopyKernels(scattered).scatter(numbers, found, stream, num_blocks)
    stream.synchronize()
    assert same_bytes(scattered, others)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("page_size", [16, 64])
def test_bytes_equal_the_reference(cuda, dtype, head_dim, page_size):
    layers = random_layers((2, PAGES, HEADS, page_size, head_dim), dtype, cuda, 1)
    pages = torch.randperm(PAGES, generator=torch.Generator().manual_seed(2)).tolist()[:23]
    check(layers, pages, page_copy.NUM_BLOCKS, pinned=True)
    check(layers, pages[:1], 1, pinned=False)


@pytest.mark.parametrize(
    ("heads", "page_size", "head_dim"), [(1, 1, 1), (3, 1, 2), (1, 5, 6), (8, 64, 128), (5, 7, 12)]
)
def test_runs_of_any_length(cuda, heads, page_size, head_dim):
    layers = random_layers((2, PAGES, heads, page_size, head_dim), torch.bfloat16, cuda, 1)
    check(layers, [0, PAGES - 1, 7], 5, pinned=False)


def test_no_pages_are_no_launch(cuda):
    layers = random_layers((2, PAGES, HEADS, 16, 64), torch.bfloat16, cuda, 1)
    check(layers, [], 4, pinned=False)
