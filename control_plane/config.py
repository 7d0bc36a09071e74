"""Everything that a user can set: one declaration per option, as a field of a frozen group.

Flags, `NANOFLOW_*` variables, the keys of the configuration file and docs/configuration.md all come from these
fields (`options`, `flags`). Names are vLLM's where the meaning is the same. Nothing is derived in place: what
follows from these values (capacities, addresses) goes into new objects. Knows nothing of typer or of how the
values are used.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from control_plane.grpc_server import GrpcConfig
from control_plane.options import ConfigError, default_of, option
from control_plane.validation import Limits
from kvstore.address import check_address
from kvstore.keys import StoreError
from kvstore.settings import KVServiceConfig, ListenConfig
from scheduler.scheduler_config import PrefetchPolicy, SchedulerConfig, WritePolicy
from scheduler.scheduler_config import StoreConfig as StoreUse
from worker.config import CPU_KV_CACHE_BYTES, DEVICE_DEFAULTS, WorkerConfig

_MAX_CPU_BYTES, _MAX_SSD_BYTES = 1 << 60, 1 << 50  # slips of the hand; what a machine has is found out by asking it


def _by_device(name: str) -> str:
    """The default of a WorkerConfig field that depends on the device."""
    cpu, gpu = (getattr(DEVICE_DEFAULTS[device], name) for device in ("cpu", "cuda"))
    return f"{cpu} on a CPU, {gpu} on a GPU"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Engine: the model, its batches and its memory."""

    model: Path = option(
        "Model folder in Hugging Face's layout: config.json, safetensors, tokenizer.json.", positional=True
    )
    device: str = option(
        "What the model runs on; auto is a GPU where this machine has one.",
        default="auto",
        choices=("auto", "cpu", "cuda"),
    )
    dtype: str = option(
        "Type of weights, activations and KV cache; auto is float32 on a CPU, bfloat16 on a GPU.",
        default=default_of(WorkerConfig, "dtype"),
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    load_format: str = option(
        "Where weights come from; dummy makes random ones from config.json alone, for benchmarks.",
        default=default_of(WorkerConfig, "load_format"),
        choices=("auto", "safetensors", "dummy"),
    )
    tensor_parallel_size: int = option(
        "Ranks that one instance is split over.", default=default_of(WorkerConfig, "tensor_parallel_size"), low=1
    )
    max_num_batched_tokens: int | None = option(
        "Tokens of a full iteration: the constant batch size B_dense.",
        default=None,
        low=1,
        unset=_by_device("max_batch_tokens"),
    )
    expected_input_len: int | None = option(
        "Mean prompt tokens of requests; with --expected-output-len, B_dense is what the KV cache can keep full.",
        default=default_of(WorkerConfig, "expected_input_len"),
        low=1,
        high=10**9,
        unset="B_dense is --max-num-batched-tokens",
    )
    expected_output_len: int | None = option(
        "Mean output tokens of requests.",
        default=default_of(WorkerConfig, "expected_output_len"),
        low=1,
        high=10**9,
        unset="B_dense is --max-num-batched-tokens",
    )
    target_itl_ms: float | None = option(
        "Milliseconds from one token to the next: iterations get as many tokens as keep to that.",
        default=None,
        low=0.1,
        unset="throughput counts alone",
    )
    max_num_seqs: int | None = option(
        "Requests that may run at once.", default=None, low=1, unset=_by_device("max_slots")
    )
    max_model_len: int | None = option(
        "Prompt and output tokens of one request at most.",
        default=default_of(WorkerConfig, "max_model_len"),
        low=2,
        unset="what the model and its pages hold",
    )
    block_size: int | None = option("Tokens of one KV page.", default=None, low=1, unset=_by_device("page_size"))
    kv_cache_memory_bytes: int | None = option(
        "Bytes for the KV cache of each rank.",
        default=default_of(WorkerConfig, "kv_cache_bytes"),
        low=1,
        unset=f"{CPU_KV_CACHE_BYTES >> 20} MiB on a CPU, what is free on a GPU",
    )
    gpu_memory_utilization: float = option(
        "Share of a GPU's memory to use: weights, buffers, graphs, and KV pages for the rest of it.",
        default=default_of(WorkerConfig, "gpu_memory_utilization"),
        low=0.01,
        high=1,
    )
    num_gpu_blocks_override: int | None = option(
        "KV pages; overrides --kv-cache-memory-bytes.",
        default=default_of(WorkerConfig, "num_pages"),
        low=1,
        unset="as many as those bytes hold",
    )
    enable_prefix_caching: bool = option(
        "Keep KV pages of earlier prompts and reuse them.",
        default=default_of(SchedulerConfig, "enable_prefix_caching"),
    )
    kv_store: str | None = option(
        "Address of a running `nanoflow kvstore` on this node: unix:/path/of/its/socket, or HOST:PORT.",
        default=None,
        unset="no store",
    )
    kv_store_token_file: Path | None = option(
        "File with the token that a KV store on a TCP port wants; closed to others (0600).",
        default=None,
        unset="no token",
    )
    kv_store_tls_ca: Path | None = option(
        "CA of the KV store's certificate (PEM), for mTLS on a TCP port.", default=None, unset="no mTLS"
    )
    kv_store_tls_cert: Path | None = option("Certificate chain for it (PEM).", default=None, unset="no mTLS")
    kv_store_tls_key: Path | None = option(
        "Private key for it (PEM); closed to others (0600).", default=None, unset="no mTLS"
    )
    kv_store_policy: str = option(
        "Whether a request whose turn has come waits for the KV store's answer.",
        default=StoreUse().policy.value,
        choices=tuple(policy.value for policy in PrefetchPolicy),
    )
    kv_store_timeout: float = option(
        "Seconds that it then waits at most, with the policy timeout.", default=StoreUse().timeout_s, low=0
    )
    kv_store_write_policy: str = option(
        "When the KV store gets a full page: at once, after its second hit, or before the GPU's own cache drops it.",
        default=StoreUse().write_policy.value,
        choices=tuple(policy.value for policy in WritePolicy),
    )
    schedules: Path | None = option(
        "Folder of schedules, as `nanoflow tune` measured them on this kind of GPU.",
        default=None,
        unset="one operator after the other",
    )
    max_schedules: int | None = option(
        "Schedules that are held while `nanoflow schedules reload` exchanges them, old and new; 0: it never does.",
        default=default_of(WorkerConfig, "max_schedules"),
        low=0,
        high=256,
        unset="twice those of --schedules",
    )
    nano_batches: int = option(
        "Nano-batches that each iteration is split into; 1 is sequential.",
        default=default_of(WorkerConfig, "nano_batches"),
        low=1,
        high=64,
    )
    num_threads: int | None = option(
        "CPU threads of each rank.",
        default=default_of(WorkerConfig, "num_threads"),
        low=1,
        high=1024,
        unset="its share of all cores",
    )
    seed: int = option("Seed of dummy weights.", default=default_of(WorkerConfig, "seed"), low=0, high=2**63 - 1)
    step_timeout: float = option(
        "Seconds after which an iteration counts as hung and the instance is rebuilt.", default=60.0, low=0.1
    )

    def __post_init__(self) -> None:
        if (self.expected_input_len is None) != (self.expected_output_len is None):
            raise ConfigError("expected-input-len and expected-output-len belong together: give both or neither")
        if self.kv_store is not None:
            try:
                check_address(self.kv_store)
            except StoreError as error:
                raise ConfigError(f"kv-store: {error}") from None
        tls = (self.kv_store_tls_ca, self.kv_store_tls_cert, self.kv_store_tls_key)
        if any(tls) and not all(tls):
            raise ConfigError("kv-store-tls-ca, kv-store-tls-cert and kv-store-tls-key belong together: give all three")
        if (any(tls) or self.kv_store_token_file) and (self.kv_store or "unix:").startswith("unix:"):
            raise ConfigError("tokens and certificates are for a KV store on a TCP port: give kv-store as HOST:PORT")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Server: where it listens and who may call."""

    served_model_name: str | None = option("Name of the model in the API.", default=None, unset="the folder's name")
    host: str = option("Address to listen on; 0.0.0.0 is every interface.", default=default_of(GrpcConfig, "host"))
    port: int = option("Port of gRPC; 0 picks a free one.", default=default_of(GrpcConfig, "port"), low=0, high=65535)
    metrics_port: int = option("Port of /metrics for Prometheus; 0 picks a free one.", default=9400, low=0, high=65535)
    api_key: str | None = option(
        "Key that clients must send as `authorization: Bearer KEY`; better given as NANOFLOW_API_KEY.",
        default=None,
        secret=True,
        unset="no key needed",
    )
    admin_api_key: str | None = option(
        "Key for the Admin service; better given as NANOFLOW_ADMIN_API_KEY.",
        default=None,
        secret=True,
        unset="Admin answers this machine's own callers only",
    )
    ssl_keyfile: Path | None = option(
        "Private key for TLS (PEM).", default=default_of(GrpcConfig, "ssl_keyfile"), unset="no TLS"
    )
    ssl_certfile: Path | None = option(
        "Certificate chain for TLS (PEM).", default=default_of(GrpcConfig, "ssl_certfile"), unset="no TLS"
    )
    ssl_ca_certs: Path | None = option(
        "CA of client certificates (PEM); when given, clients must have one (mTLS).",
        default=default_of(GrpcConfig, "ssl_ca_certs"),
        unset="no mTLS",
    )
    grpc_reflection: bool | None = option(
        "Tell clients such as grpcurl what services there are.",
        default=default_of(GrpcConfig, "reflection"),
        unset="on, unless keys would travel without TLS",
    )
    max_connection_age: float = option(
        "Seconds after which a connection is asked to reconnect, so that load spreads over new servers; 0: never.",
        default=default_of(GrpcConfig, "max_connection_age_s"),
        low=0,
    )
    max_connection_age_grace: float = option(
        "Seconds that its running calls then have; 0: for ever.",
        default=default_of(GrpcConfig, "max_connection_age_grace_s"),
        low=0,
    )
    shutdown_timeout: float = option("Seconds that running requests have to finish after SIGTERM.", default=30.0, low=0)

    def __post_init__(self) -> None:
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("ssl-keyfile and ssl-certfile belong together: give both or neither")
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            raise ConfigError("ssl-ca-certs needs TLS: give ssl-keyfile and ssl-certfile too")
        if self.port and self.port == self.metrics_port:
            raise ConfigError(f"port and metrics-port are both {self.port}: give two different ones")


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Log."""

    log_level: str = option(
        "Least important messages to log.", default="info", choices=("debug", "info", "warning", "error")
    )


@dataclass(frozen=True, slots=True)
class KVStoreOptions:
    """KV store: what `nanoflow kvstore` keeps, and where it listens."""

    cpu_bytes: int = option(
        "Bytes of shared memory for the CPU tier, all taken at the start.", default=4 << 30, low=1, high=_MAX_CPU_BYTES
    )
    ssd_dir: Path | None = option(
        "Folder of the SSD tier, made if it is not there; for one store at a time.", default=None, unset="no SSD tier"
    )
    ssd_bytes: int = option(
        "Bytes that the SSD tier may take, those found at the start included.",
        default=64 << 30,
        low=1,
        high=_MAX_SSD_BYTES,
    )
    ssd_after_hits: int = option(
        "Hits after which a record is copied to SSD; 0: every record, when it is put.",
        default=default_of(KVServiceConfig, "ssd_after_hits"),
        low=0,
        high=255,
    )
    slab_bytes: int | None = option(
        "Bytes of the CPU tier that hold records of one size, so also the largest record.",
        default=default_of(KVServiceConfig, "slab_bytes"),
        low=4096,
        high=_MAX_SSD_BYTES,
        unset="a 64th of the tier or 16 MiB if that is more, but at most an eighth and at most 1 GiB",
    )
    store_lease: float = option(
        "Seconds that a client may read or write records before the store takes them back.",
        default=default_of(KVServiceConfig, "lease_s"),
        low=0.1,
        high=3600,
    )
    socket: Path | None = option(
        "Unix socket to listen on; its folder must be closed to others.",
        default=None,
        unset="/tmp/nanoflow-UID/kvstore.sock, unless there is a store-port",
    )
    store_host: str = option("Address to listen on with store-port.", default=default_of(ListenConfig, "host"))
    store_port: int | None = option(
        "TCP port to listen on instead of a socket, with a token or mTLS; 0 picks a free one.",
        default=None,
        low=0,
        high=65535,
        unset="the socket",
    )
    store_token: str | None = option(
        "Token that clients must send; better given as NANOFLOW_STORE_TOKEN.",
        default=None,
        secret=True,
        unset="no token needed on a socket",
    )
    store_token_file: Path | None = option(
        "File with that token; closed to others (0600).", default=None, unset="no token needed on a socket"
    )
    store_ssl_keyfile: Path | None = option(
        "Private key for mTLS (PEM); closed to others (0600).", default=None, unset="no mTLS"
    )
    store_ssl_certfile: Path | None = option("Certificate chain for mTLS (PEM).", default=None, unset="no mTLS")
    store_ssl_ca_certs: Path | None = option("CA of client certificates (PEM).", default=None, unset="no mTLS")
    store_ends_with_stdin: bool = option(
        "End when stdin does, as it does when the process that started the store is gone.", default=False
    )
    store_metrics_port: int | None = option(
        "Port of the store's /metrics for Prometheus; 0 picks a free one.", default=None, low=0, high=65535, unset="off"
    )

    def __post_init__(self) -> None:
        for name in ("ssd_bytes", "ssd_after_hits"):
            if self.ssd_dir is None and getattr(self, name) != default_of(KVStoreOptions, name):
                raise ConfigError(f"{name.replace('_', '-')} is of the SSD tier: give ssd-dir too")


@dataclass(frozen=True, slots=True)
class OwnStoreConfig:
    """KV store of a server's own: `nanoflow serve` starts it beside its instance and ends it."""

    kv_store_cpu_bytes: int | None = option(
        "Bytes of memory for a KV store that the server starts; instead of --kv-store.",
        default=None,
        low=1,
        high=_MAX_CPU_BYTES,
        unset="none is started",
    )
    kv_store_ssd_dir: Path | None = option(
        "Folder of its SSD tier, for one store at a time.", default=None, unset="no SSD tier"
    )
    kv_store_ssd_bytes: int = option(
        "Bytes that its SSD tier may take.",
        default=default_of(KVStoreOptions, "ssd_bytes"),
        low=1,
        high=_MAX_SSD_BYTES,
    )
    kv_store_ssd_after_hits: int = option(
        "Hits after which a record is copied to its SSD tier; 0: every record at once, best for conversations.",
        default=default_of(KVStoreOptions, "ssd_after_hits"),
        low=0,
        high=255,
    )
    kv_store_metrics_port: int | None = option(
        "Port of its /metrics for Prometheus.", default=None, low=1, high=65535, unset="off"
    )

    def __post_init__(self) -> None:
        for name in ("ssd_dir", "metrics_port"):
            if self.kv_store_cpu_bytes is None and getattr(self, f"kv_store_{name}") is not None:
                flag = f"kv-store-{name.replace('_', '-')}"
                raise ConfigError(f"{flag} is of a store that the server starts: give kv-store-cpu-bytes too")
        for name in ("ssd_bytes", "ssd_after_hits"):
            given = getattr(self, f"kv_store_{name}") != default_of(KVStoreOptions, name)
            if self.kv_store_ssd_dir is None and given:
                raise ConfigError(f"kv-store-{name.replace('_', '-')} is of an SSD tier: give kv-store-ssd-dir too")


# What a configuration file may speak of.
ALL_GROUPS = (EngineConfig, ServerConfig, Limits, LogConfig, OwnStoreConfig, KVStoreOptions)
