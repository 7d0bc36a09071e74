"""A rank's and the scheduler's way to the KV store that the configuration names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from worker.config import WorkerConfig

if TYPE_CHECKING:
    from kvstore.client import KVClient


def open_store(config: WorkerConfig) -> KVClient:
    """A client of its own for each caller. The store need not be there: all faults are misses."""
    assert config.kv_store is not None
    from kvstore.client import ClientConfig, KVClient  # gRPC is for those who use a store

    return KVClient(ClientConfig(config.kv_store))
