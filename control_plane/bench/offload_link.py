"""`bench offload link`: how fast pages move between an engine's cache and a KV store, beside the bare link.

Mover, copier, store process, keys and checksums are the product's; the cache is filled at random. A move's time is from
its start to its result. "Page by page" is what a runtime does that copies each layer's part of each page by itself, K
and V apart, between pinned memory and the cache. The bare link is one copy of as many bytes of pinned memory. All take
turns. Knows nothing of models.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch

from control_plane.bench.offload_options import LinkOptions
from control_plane.bench.offload_store_process import StoreProcess, StoreSize
from control_plane.bench.offload_table import print_table
from control_plane.options import ConfigError
from kvstore.client import ClientConfig, KVClient
from kvstore.record import slot_bytes_for
from scheduler.plan import KVMove, MoveKind
from worker.kv_cache import KVCache, KVCacheShape
from worker.page_copy_cuda import take_staging
from worker.store_client import page_mover
from worker.store_keys import PageIdentity

_CONVERSATIONS = 5  # that the store holds; a save is always of a new one
_WAIT_S = 60.0
_BARE_IN, _BARE_OUT = "the bare link, in", "the bare link, out"


class LinkBench:
    """A cache of two conversations' pages: one is saved, and loaded into the other's place."""

    def __init__(self, options: LinkOptions, store: StoreProcess) -> None:
        """Takes the memory, and saves once."""
        self._device, self._in_a_row = torch.device(options.device), options.in_a_row
        self._num_pages = options.tokens // options.page_size
        shape = _shape(options, 2 * self._num_pages)
        self._cache = KVCache(shape, torch.bfloat16, self._device)
        for layer in self._cache.layers:
            layer.view(torch.int16).random_(-30000, 30000)
        self._layers = [layer.view(torch.uint8).view(2, 2 * self._num_pages, -1) for layer in self._cache.layers]
        self._saved = torch.randperm(self._num_pages).tolist()  # pages lie anywhere
        self._loaded = [self._num_pages + page for page in range(self._num_pages)]
        page_bytes = page_bytes_of(options)
        self.num_bytes = self._num_pages * page_bytes
        pinned = self._device.type == "cuda"
        self._host = torch.zeros(self._num_pages, page_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._flat = torch.zeros(self.num_bytes, dtype=torch.uint8, device=self._device)
        identity = PageIdentity(os.urandom(32), "bfloat16", shape, 0, 1)
        client = KVClient(ClientConfig(store.address, call_timeout_s=2.0))
        staging = take_staging(page_bytes, self._device) if pinned else None
        self._mover = page_mover(client, identity, self._cache, staging)
        self._numbers, self._conversation = count(), 0
        self.save()

    def load(self, times: int = 1) -> None:
        """The conversation that was saved last. Raises ConfigError where the store no longer has it."""
        self._move(MoveKind.LOAD, self._loaded, times)

    def load_in_a_row(self) -> float:
        """So many loads, all asked for at once: how many."""
        self.load(self._in_a_row)
        return self._in_a_row

    def save(self) -> None:
        """The pages as a conversation that the store does not have."""
        self._conversation += 1
        self._move(MoveKind.STORE, self._saved, 1)

    def bare(self, inward: bool) -> None:
        """As many bytes in one copy."""
        host = self._host.view(-1)
        (self._flat if inward else host).copy_(host if inward else self._flat, non_blocking=True)

    def page_by_page(self, inward: bool) -> None:
        """A copy for each layer's K and V of each page."""
        parts = self._host.view(self._num_pages, len(self._layers), 2, -1)
        for number, page in enumerate(self._loaded if inward else self._saved):
            for place, layer in enumerate(self._layers):
                for side in range(2):
                    device, host = layer[side, page], parts[number, place, side]
                    (device if inward else host).copy_(host if inward else device, non_blocking=True)

    def is_right(self) -> bool:
        """Whether what was loaded is what was saved."""
        return all(torch.equal(layer[:, self._saved], layer[:, self._loaded]) for layer in self._layers)

    def seconds(self, way: Callable[[], float | None]) -> float:
        """Of one conversation, the device idle before and after."""
        self._wait()
        began = time.perf_counter()
        times = way()
        self._wait()
        return (time.perf_counter() - began) / (times or 1)

    def close(self) -> None:
        """End the mover."""
        self._mover.close()

    def _move(self, kind: MoveKind, pages: Sequence[int], times: int) -> None:
        digests = tuple(b"%012d%020d" % (self._conversation, page) for page in range(self._num_pages))
        self._mover.start([KVMove(next(self._numbers), kind, tuple(pages), digests) for _ in range(times)])
        num_ended = 0
        while num_ended < times:
            ended = self._mover.take_ended(_WAIT_S)
            if not ended or any(each.num_pages < self._num_pages for each in ended):
                raise ConfigError("a move has not ended whole: is there memory for the KV store?")
            num_ended += len(ended)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def page_bytes_of(options: LinkOptions) -> int:
    """Of one page over all layers, in bfloat16."""
    return _shape(options, 1).elements_per_page * torch.bfloat16.itemsize


def _shape(options: LinkOptions, num_pages: int) -> KVCacheShape:
    return KVCacheShape(options.num_layers, num_pages, options.num_kv_heads, options.page_size, options.head_dim)


def run(options: LinkOptions) -> dict[str, Any]:
    """Measure; prints a table and, last, one JSON line, which is returned. Raises ConfigError."""
    if options.tokens % options.page_size or options.tokens < options.page_size:
        raise ConfigError(f"tokens is {options.tokens}: whole pages of {options.page_size} are needed")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("there is no CUDA GPU here; --device cpu measures memory copies")
    setting = _setting(options)
    print(f"offload, link: {setting}", file=sys.stderr, flush=True)
    num_pages = options.tokens // options.page_size
    store = StoreProcess(StoreSize(_CONVERSATIONS * num_pages * slot_bytes_for(page_bytes_of(options))))
    try:
        bench = LinkBench(options, store)
        try:
            found = _seconds(bench, options.repeats)
            if not bench.is_right():
                raise ConfigError("what was loaded is not what was saved")
            rows = _rows(found, bench.num_bytes)
        finally:
            bench.close()
    finally:
        store.close()
    print_table(
        f"{bench.num_bytes / 1e6:.0f} MB, {options.tokens} tokens in pages of {options.page_size}",
        rows,
        {"way": "", "gb_s": "GB/s, median", "best_gb_s": "best", "share": "of the bare link"},
    )
    result = {**setting, "bytes": bench.num_bytes, "rows": rows}
    print(json.dumps(result), flush=True)
    return result


def _seconds(bench: LinkBench, repeats: int) -> dict[str, list[float]]:
    """Of one conversation by each way, in turns, forwards and backwards; the first turn is for warming up."""
    ways: dict[str, Callable[[], float | None]] = {
        _BARE_IN: lambda: bench.bare(True),
        "load": bench.load,
        "loads in a row": bench.load_in_a_row,
        "page by page, in": lambda: bench.page_by_page(True),
        _BARE_OUT: lambda: bench.bare(False),
        "save": bench.save,
        "page by page, out": lambda: bench.page_by_page(False),
    }
    found: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(repeats + 1):
        for way in list(ways)[:: 1 if repeat % 2 == 0 else -1]:
            seconds = bench.seconds(ways[way])
            if repeat:
                found[way].append(seconds)
    bench.load()  # after what was copied page by page
    return found


def _rows(found: dict[str, list[float]], num_bytes: int) -> list[dict[str, Any]]:
    rows, bare = [], 0.0
    for way, seconds in found.items():
        median, best = (num_bytes / each / 1e9 for each in (statistics.median(seconds), min(seconds)))
        bare = median if way in (_BARE_IN, _BARE_OUT) else bare
        rows.append(
            {"way": way, "gb_s": round(median, 2), "best_gb_s": round(best, 2), "share": round(median / bare, 3)}
        )
    return rows


def _setting(options: LinkOptions) -> dict[str, Any]:
    is_gpu = options.device == "cuda"
    return {
        "benchmark": "offload-link",
        "device": torch.cuda.get_device_name() if is_gpu else options.device,
        "tokens": options.tokens,
        "page_size": options.page_size,
        "page_bytes": page_bytes_of(options),
        "repeats": options.repeats,
        "in_a_row": options.in_a_row,
        "num_cpus": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
