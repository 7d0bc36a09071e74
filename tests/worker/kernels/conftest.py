"""Where kernel tests run: on a CUDA GPU, or with TRITON_INTERPRET=1 on the CPU (fp16 and fp32 only)."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    pytest.importorskip("triton", reason="Triton is not installed")
    if os.environ.get("TRITON_INTERPRET") == "1":
        torch.set_num_threads(1)
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU (set TRITON_INTERPRET=1 to run the kernels on the CPU)")
    return torch.device("cuda")


@pytest.fixture(params=["bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest, device: torch.device) -> torch.dtype:
    if request.param == "bfloat16" and device.type == "cpu":
        pytest.skip("Triton's interpreter computes bf16 wrongly")
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}[request.param]
