"""What a rank needs to start. Imports no torch, so that the command line reads its defaults at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Everything that a rank needs to start. The same for all ranks of an instance."""

    model_dir: Path  # Hugging Face folder
    load_format: str = "auto"  # auto, safetensors: real weights; dummy: random ones from config.json alone
    dtype: str = "auto"  # of weights, activations and KV; on a CPU float32
    device: str = "cpu"
    tensor_parallel_size: int = 1
    max_batch_tokens: int = 256  # B_dense
    max_slots: int = 64  # live requests at most
    max_model_len: int | None = None  # prompt + output tokens of a request; None: as many as model and pages allow
    page_size: int = 16  # tokens per KV page
    num_pages: int | None = None  # None: as many as kv_cache_bytes hold
    kv_cache_bytes: int = 512 << 20  # per rank; read when num_pages is None
    nano_batches: int = 1  # nano-batches of the built-in schedules; 1 is sequential
    schedule_files: tuple[Path, ...] = ()  # PipelineSchedules to run instead of the built-in ones
    seed: int = 0  # of dummy weights
    num_threads: int | None = None  # CPU threads of one rank; None: its share of all cores
    join_timeout_s: float = 600.0  # for ranks to find each other, and for any one collective
