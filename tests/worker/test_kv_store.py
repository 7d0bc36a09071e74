"""A worker with a real KV store process: what one engine computed another one loads; faults change speed only."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from kvstore.client import ClientConfig, KVClient
from scheduler.loop import EngineLoop
from scheduler.request import NewRequest, SamplingParams
from scheduler.scheduler import Scheduler
from scheduler.scheduler_config import PrefetchPolicy, SchedulerConfig, StoreConfig
from worker import store_keys
from worker.backend import open_executor, open_prefix_store
from worker.config import WorkerConfig
from worker.kv_cache import KVCacheShape
from worker.store_keys import PageIdentity, fingerprint

PAGE, NUM_TOKENS = 8, 12


class Engine:
    """Scheduler, loop and worker over a model folder, in this process."""

    def __init__(self, folder: Path, address: str | None, **changes) -> None:
        limits = {"max_batch_tokens": 64, "max_slots": 8, "page_size": PAGE, "num_pages": 200, "num_threads": 1}
        self.config = WorkerConfig(folder, kv_store=address, **{**limits, **changes})
        self.executor = open_executor(self.config)
        self.prefixes = open_prefix_store(self.config) if address else None
        use = SchedulerConfig(store=StoreConfig(policy=PrefetchPolicy.WAIT, max_wait_s=2.0))
        self.scheduler = Scheduler(use, self.executor.capacity, self.prefixes)
        self.cached: dict[str, int] = {}

    def generate(self, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
        tokens, left = {name: [] for name in prompts}, set(prompts)

        def emit(batch) -> None:
            for name, token in zip(batch.request_ids, batch.token_ids.tolist()):
                tokens[name].append(token)
            for end in batch.ends:
                assert end.finish_reason == "length", end
                self.cached[end.request_id] = end.num_cached_tokens
                left.discard(end.request_id)
            if not left:
                loop.stop()

        loop = EngineLoop(self.scheduler, self.executor, emit, 30.0)
        sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
        loop.submit([NewRequest(name, tuple(prompt), sampling) for name, prompt in prompts.items()])
        loop.run()
        return tokens

    def close(self) -> None:
        self.executor.close()
        if self.prefixes is not None:
            self.prefixes.close()


def make_prompts(*lengths: int) -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(5)
    return {f"r{n}": torch.randint(0, 101, (n,), generator=generator).tolist() for n in lengths}


def wait_for_records(address: str, at_least: int) -> None:
    client = KVClient(ClientConfig(address))
    deadline = time.monotonic() + 10
    while (client.stats() or {}).get("cpu_records", 0) < at_least and time.monotonic() < deadline:
        time.sleep(0.05)
    stats = client.stats() or {}
    client.close()
    assert stats.get("cpu_records", 0) >= at_least, stats


@pytest.fixture
def folder(random_model) -> Path:
    return Path(random_model("llama"))


def test_what_one_engine_computed_another_one_loads(folder, store):
    prompts = make_prompts(5, 40, 77)
    plain = Engine(folder, None)
    expected = plain.generate(prompts)
    plain.close()
    first = Engine(folder, store.address)
    assert first.generate(prompts) == expected
    first.generate(make_prompts(1))  # steps in which full pages are given to the store
    wait_for_records(store.address, 40 // PAGE + 77 // PAGE)
    first.close()
    second = Engine(folder, store.address)
    assert second.generate(prompts) == expected
    assert second.cached == {"r5": 0, "r40": 32, "r77": 72}  # one token at least is computed
    second.close()


@pytest.mark.parametrize("fault", ["killed", "stalled", "restarted"])
def test_a_store_that_fails_changes_no_token(folder, store, fault):
    prompts = make_prompts(5, 40, 77)
    first = Engine(folder, store.address)
    expected = first.generate(prompts)
    first.generate(make_prompts(1))
    wait_for_records(store.address, 5)
    second = Engine(folder, store.address)
    if fault == "stalled":
        os.kill(store.process.pid, signal.SIGSTOP)
    else:
        store.stop()
    if fault == "restarted":
        store.start()
    began = time.monotonic()
    assert second.generate(prompts) == expected
    assert time.monotonic() - began < 20
    assert second.cached == {"r5": 0, "r40": 0, "r77": 0}
    first.close()
    second.close()


def test_any_byte_of_the_weights_counts_and_they_are_read_once(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    before, read = fingerprint(copy), []
    digest = store_keys._digest
    monkeypatch.setattr(store_keys, "_digest", lambda path: (read.append(path.name), digest(path))[1])
    assert fingerprint(copy) == before == fingerprint(folder)
    assert len(read) == len(list(folder.glob("*.safetensors")))  # the original's only
    weights = next(copy.glob("*.safetensors"))
    modified_ns = weights.stat().st_mtime_ns
    for place in (-1, weights.stat().st_size // 3):
        data = bytearray(weights.read_bytes())
        data[place] ^= 1
        time.sleep(0.02)  # longer than the tick of a file system's clock
        weights.write_bytes(data)
        os.utime(weights, ns=(1, modified_ns))  # as tools do that keep a file's time
        assert fingerprint(copy) != before
    monkeypatch.setenv("XDG_CACHE_HOME", str(weights))  # nothing can be kept there
    assert fingerprint(folder) == before


def test_another_model_or_layout_shares_no_page(folder, tmp_path, random_model):
    shape = KVCacheShape(2, 10, 4, PAGE, 8)
    base = PageIdentity(fingerprint(folder), "float32", shape, 0, 1)
    others = [
        PageIdentity(fingerprint(Path(random_model("llama", seed=1))), "float32", shape, 0, 1),
        PageIdentity(fingerprint(folder, dummy_seed=0), "float32", shape, 0, 1),
        PageIdentity(base.model, "bfloat16", shape, 0, 1),
        PageIdentity(base.model, "float32", KVCacheShape(2, 10, 4, 2 * PAGE, 8), 0, 1),
        PageIdentity(base.model, "float32", shape, 0, 2),
        PageIdentity(base.model, "float32", shape, 1, 2),
    ]
    assert len({identity.key(b"x" * 32) for identity in [base, *others]}) == 1 + len(others)
    more_pages = PageIdentity(fingerprint(folder), "float32", KVCacheShape(2, 99, 4, PAGE, 8), 0, 1)
    assert more_pages.key(b"x" * 32) == base.key(b"x" * 32)
