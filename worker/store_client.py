"""A rank's and the scheduler's way to the KV store that the configuration names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from worker.config import WorkerConfig
from worker.kv_cache import KVCache
from worker.page_copy import CpuPageCopier
from worker.store_keys import PageIdentity, page_identities
from worker.store_pages import PageMover

if TYPE_CHECKING:
    from kvstore.client import KVClient


def open_store(config: WorkerConfig) -> KVClient:
    """A client of its own for each caller. The store need not be there: all faults are misses.

    Raises StoreError where files of the configuration cannot be read, or secrets in them are open to others.
    """
    assert config.kv_store is not None
    from kvstore.client import ClientConfig, KVClient  # gRPC is for those who use a store
    from kvstore.credentials import read_token

    access = config.kv_store_access
    return KVClient(
        ClientConfig(
            config.kv_store,
            token=None if access.token_file is None else read_token(access.token_file),
            ssl_ca_certs=access.tls_ca,
            ssl_keyfile=access.tls_key,
            ssl_certfile=access.tls_cert,
        )
    )


def open_mover(config: WorkerConfig, rank: int, cache: KVCache, staging: torch.Tensor | None = None) -> PageMover:
    """What moves a rank's pages. staging: of page_copy_cuda, for a cache on a GPU.

    On a GPU all graphs must have been captured. The memory of a store that runs already is registered: about 0.1 s a
    gigabyte. Raises ImportError without CuPy.
    """
    return page_mover(open_store(config), page_identities(config)[rank], cache, staging)


def page_mover(store: KVClient, identity: PageIdentity, cache: KVCache, staging: torch.Tensor | None) -> PageMover:
    """As open_mover(), for a store that is open; the mover closes it."""
    assert identity.dtype == str(cache.layers[0].dtype).removeprefix("torch."), "pages are not what their keys say"
    if staging is None:
        return PageMover(CpuPageCopier(cache), CpuPageCopier(cache), identity, store)
    from worker.cuda_dma import CudaDma
    from worker.kernels.page_copy import PageCopyKernels
    from worker.page_copy_cuda import CudaPageCopier

    kernels, dma = PageCopyKernels(cache.layers), CudaDma(staging.device)
    store.on_gone = dma.memory.forget
    arena = store.arena()
    if arena is not None:
        dma.register_ahead(arena)
    loads, saves = (CudaPageCopier(cache, part, kernels, dma) for part in staging)
    return PageMover(loads, saves, identity, store, dma.prepare_thread)
