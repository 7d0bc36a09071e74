"""What a rank needs to start. Imports no torch, so that the command line reads its defaults at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autosearch.pipeline import PipelineSchedule


@dataclass(frozen=True, slots=True)
class DeviceDefaults:
    """What suits a kind of device where the user asks for nothing."""

    max_batch_tokens: int
    max_slots: int
    page_size: int


CPU_KV_CACHE_BYTES = 512 << 20
DEVICE_DEFAULTS = {"cpu": DeviceDefaults(256, 64, 16), "cuda": DeviceDefaults(2048, 1536, 64)}

AUTO_DTYPES = {"cpu": "float32", "cuda": "bfloat16"}  # what --dtype auto is


@dataclass(frozen=True, slots=True)
class StoreAccess:
    """How a rank shows a KV store on a TCP port who it is. Files, as secrets have no place in a configuration."""

    token_file: Path | None = None  # one line; closed to others
    tls_ca: Path | None = None  # PEM; with the two below: mTLS
    tls_cert: Path | None = None
    tls_key: Path | None = None  # closed to others


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Everything that a rank needs to start. The same for all ranks of an instance."""

    model_dir: Path  # Hugging Face folder
    load_format: str = "auto"  # auto, safetensors: real weights; dummy: random ones from config.json alone
    dtype: str = "auto"  # of weights, activations and KV; see AUTO_DTYPES
    device: str = "cpu"  # or cuda
    tensor_parallel_size: int = 1
    max_batch_tokens: int = 256  # B_dense
    max_slots: int = 64  # live requests at most
    max_model_len: int | None = None  # prompt + output tokens of a request; None: as many as model and pages allow
    page_size: int = 16  # tokens per KV page
    num_pages: int | None = None  # None: as many as kv_cache_bytes hold
    kv_cache_bytes: int | None = None  # per rank, read when num_pages is None; None: CPU_KV_CACHE_BYTES, or what fits
    gpu_memory_utilization: float = 0.97  # share of a GPU's memory that weights, buffers, graphs and KV may fill
    kv_store: str | None = None  # address of a KV store (kvstore.client.ClientConfig.address)
    kv_store_access: StoreAccess = StoreAccess()
    expected_input_len: int | None = None  # mean prompt and output tokens; with both, B_dense is what memory keeps full
    expected_output_len: int | None = None
    max_schedules: int | None = None  # held while they are exchanged, old and new; 0: never; None: see schedule_room
    nano_batches: int = 1  # nano-batches of the built-in schedules; 1 is sequential
    schedules: tuple[PipelineSchedule, ...] = ()  # to run where they were measured to be faster, or say no batch
    seed: int = 0  # of dummy weights
    num_threads: int | None = None  # CPU threads of one rank; None: its share of all cores
    join_timeout_s: float = 600.0  # for ranks to find each other, and for any one collective

    @property
    def schedule_room(self) -> int:
        """Schedules to hold at a time while they are exchanged, 0 for never; by default twice those of the start."""
        if self.max_schedules is None:
            return 2 * len(self.schedules)
        return max(self.max_schedules, len(self.schedules)) if self.max_schedules else 0
