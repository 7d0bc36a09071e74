"""The kernel for checksums against the host's: of records of many lengths, and none of what lies between them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from xxhash import xxh3_64_intdigest

from worker.kernels.record_checksum import RecordChecksum

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize(
    "num_bytes",
    [256, 320, 960, 1024, 1088, 2048, 32768 - 64, 32768, 32768 + 64, 33792, 33856, 200_000 // 64 * 64, 2 << 20],
)
def test_checksums_equal_the_hosts(num_bytes, pinned):
    pytest.importorskip("cupy", reason="CuPy is not installed")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    device, stream = torch.device("cuda"), torch.cuda.Stream()
    generator = torch.Generator(device).manual_seed(num_bytes)
    records = torch.empty(5, num_bytes + 4096, dtype=torch.uint8, device=device).random_(generator=generator)
    checksums = torch.zeros(6, dtype=torch.int64, **({"pin_memory": True} if pinned else {"device": device}))
    torch.cuda.synchronize()
    RecordChecksum(device)(records, num_bytes, checksums, stream)
    stream.synchronize()
    found = checksums.cpu().numpy().view(np.uint64).tolist()
    expected = [xxh3_64_intdigest(record[:num_bytes]) for record in records.cpu().numpy()]
    assert found == [*expected, 0]
