"""What `bench offload` can be asked for. Plain data; imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from control_plane.bench.offload_rounds import ROUNDS_FILE


class Sweep(StrEnum):
    """What is varied."""

    CPU = "cpu"
    SSD = "ssd"
    ROUNDS = "rounds"
    SHARE = "share"
    LENGTH = "length"
    ENGINES = "engines"
    PAGE = "page"


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """What to play, and on what. Budgets in tokens."""

    rounds: Path = ROUNDS_FILE
    mooncake: Path | None = None  # a trace of blocks, instead of the rounds
    limit: int | None = None  # conversations, or requests of the trace, at most
    page_size: int = 64
    gpu_tokens: int = 1 << 17
    cpu_tokens: int = 1 << 20
    ssd_tokens: int = 0
    ssd_after_hits: int = 0
    num_engines: int = 1
    timed: bool = False  # play a trace at a GPU's speed; else its order alone counts
    sweeps: tuple[Sweep, ...] = ()
    plot: Path | None = None  # picture of the hit rate over the CPU budget


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What to play on a real engine, and the store that is started for it."""

    rounds: Path = ROUNDS_FILE
    limit: int = 24  # conversations at most
    length_scale: float = 1.0  # of prompts and answers
    at_once: int | None = 8  # conversations in play; None: they begin when the file says
    time_scale: float = 0.05  # of arrivals and pauses
    repeats: int = 2  # turns with the store, and without; 0: only the return
    return_len: int = 4096  # tokens of the conversation that returns
    return_repeats: int = 3  # 0: only the rounds
    cpu_bytes: int = 4 << 30
    ssd_dir: Path | None = None
    ssd_bytes: int = 0
    plot: Path | None = None  # picture of times to the first token


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """What to read, and where."""

    ssd_dir: Path  # a folder on the disk in question
    record_bytes: int = 8 << 20  # of a payload: 64 tokens of LLaMA-3-8B in bfloat16
    total_bytes: int = 2 << 30  # of all records
    repeats: int = 5


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """What to move between a cache and a store; by default the pages of LLaMA-3-8B in bfloat16."""

    device: str = "cuda"
    tokens: int = 4096  # of one conversation
    page_size: int = 64
    num_layers: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    repeats: int = 6
    in_a_row: int = 8  # loads that are asked for at once
