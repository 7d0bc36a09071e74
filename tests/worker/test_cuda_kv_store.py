"""The GPU executor with a real KV store process: what one engine computed another one loads; faults change speed only.

Without a GPU the same code runs on the reference kernels. Requests run one by one: batches of the same shape are
computed the same way to the last bit, so tokens can be compared.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from kv_store_process import StoreProcess

from kvstore.client import ClientConfig, KVClient
from scheduler.loop import EngineLoop
from scheduler.move_costs import MoveCosts
from scheduler.request import NewRequest, SamplingParams
from scheduler.scheduler import Scheduler
from scheduler.scheduler_config import PrefetchPolicy, SchedulerConfig, StoreConfig
from worker.backend import open_prefix_store
from worker.config import WorkerConfig
from worker.cuda_executor import CudaExecutor

torch.set_num_threads(1)

PAGE, NUM_TOKENS = 16, 12
LENGTHS = (5, 40, 77, 130)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def always_load(monkeypatch):
    """As if no step was timed: a GPU computes pages of a model as small as this in less time than it loads them."""
    monkeypatch.setattr(MoveCosts, "computed", lambda self, *step: None)


class Engine:
    """Scheduler, loop and executor in this process."""

    def __init__(self, folder: Path, device: str, address: str | None) -> None:
        limits = {"max_batch_tokens": 64, "max_slots": 4, "page_size": PAGE, "num_pages": 60}
        dtype = "float32" if device == "cpu" else "bfloat16"
        self.config = WorkerConfig(folder, device=device, dtype=dtype, kv_store=address, **limits)
        self.executor = CudaExecutor(self.config)
        self.prefixes = open_prefix_store(self.config) if address else None
        use = SchedulerConfig(store=StoreConfig(policy=PrefetchPolicy.WAIT, max_wait_s=2.0))
        self.scheduler = Scheduler(use, self.executor.capacity, self.prefixes)
        self.cached: dict[str, int] = {}
        self.pages: Counter[str] = Counter()  # what became of them, by MoveCounts

    def generate(self, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
        """All together."""
        tokens, left = {name: [] for name in prompts}, set(prompts)

        def emit(batch) -> None:
            if batch.stats is not None:
                self.pages.update(asdict(batch.stats.moves))
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

    def generate_each(self, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
        """One after the other."""
        tokens: dict[str, list[int]] = {}
        for name, prompt in prompts.items():
            tokens |= self.generate({name: prompt})
        return tokens

    def check_cached(self, expected: dict[str, int], store: StoreProcess) -> None:
        """That so many tokens of each request were there; if not, tell what became of pages."""
        if self.cached != expected:
            pytest.fail(f"{self.cached} instead of {expected}; pages: {self.pages}; the store: {store.stats()}")

    def close(self) -> None:
        self.executor.close()
        if self.prefixes is not None:
            self.prefixes.close()


def make_prompts(*lengths: int) -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(5)
    return {f"r{n}": torch.randint(0, 101, (n,), generator=generator).tolist() for n in lengths}


def full_pages(prompts: dict[str, list[int]]) -> dict[str, int]:
    """Tokens of each that a store can have: one at least is computed."""
    return {name: (len(prompt) - 1) // PAGE * PAGE for name, prompt in prompts.items()}


def wait_for_records(store: StoreProcess, at_least: int) -> None:
    deadline = time.monotonic() + 10
    while store.stats().get("cpu_records", 0) < at_least and time.monotonic() < deadline:
        time.sleep(0.05)
    assert store.stats()["cpu_records"] >= at_least, store.stats()


@pytest.fixture(params=DEVICES)
def device(request) -> str:
    if request.param == "cuda":
        pytest.importorskip("cupy", reason="CuPy is not installed")
        if not torch.cuda.is_available():
            pytest.skip("no CUDA GPU")
    return request.param


@pytest.fixture
def folder(random_model, device) -> Path:
    # Of a width that the GPU's kernels take.
    widths = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    return Path(random_model("llama", **(widths if device == "cuda" else {})))


def expected_of(folder: Path, device: str) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Tokens without a store: computed, and with the pages that an engine has on its GPU."""
    plain, prompts = Engine(folder, device, None), make_prompts(*LENGTHS)
    computed, again = plain.generate_each(prompts), plain.generate_each(prompts)
    assert plain.cached == full_pages(prompts)
    plain.close()
    return computed, again


def filled(folder: Path, device: str, store: StoreProcess) -> dict[str, list[int]]:
    """Have an engine compute all prompts and give their pages to the store; its tokens."""
    first, prompts = Engine(folder, device, store.address), make_prompts(*LENGTHS)
    tokens = first.generate_each(prompts)
    first.generate(make_prompts(1))  # steps in which full pages are given to the store
    wait_for_records(store, sum(full_pages(prompts).values()) // PAGE)
    first.close()
    return tokens


def test_what_one_engine_computed_another_one_loads(folder, device, store):
    prompts = make_prompts(*LENGTHS)
    computed, again = expected_of(folder, device)
    assert filled(folder, device, store) == computed
    second = Engine(folder, device, store.address)
    assert second.generate_each(prompts) == again
    second.check_cached(full_pages(prompts), store)
    assert store.stats()["reported_corrupt"] == 0
    second.close()


def test_loads_and_saves_beside_each_other(folder, device, store):
    _, again = expected_of(folder, device)
    filled(folder, device, store)
    others = {f"other{name}": prompt[::-1] for name, prompt in make_prompts(*LENGTHS).items()}
    second = Engine(folder, device, store.address)
    tokens = second.generate({**make_prompts(*LENGTHS), **others})
    assert {name: len(each) for name, each in tokens.items()} == dict.fromkeys(tokens, NUM_TOKENS)
    if device == "cpu":
        assert {name: tokens[name] for name in again} == again
    second.check_cached({**full_pages(make_prompts(*LENGTHS)), **dict.fromkeys(others, 0)}, store)
    second.close()


@pytest.mark.parametrize("fault", ["killed", "stalled", "restarted"])
def test_a_store_that_fails_between_two_requests_changes_no_token(folder, device, store, fault):
    prompts = make_prompts(*LENGTHS)
    computed, again = expected_of(folder, device)
    filled(folder, device, store)
    second = Engine(folder, device, store.address)
    before = {name: prompts[name] for name in ("r5", "r40")}
    after = {name: prompts[name] for name in ("r77", "r130")}
    assert second.generate_each(before) == {name: again[name] for name in before}
    if fault == "stalled":
        os.kill(store.process.pid, signal.SIGSTOP)
    else:
        store.stop()
    if fault == "restarted":
        store.start()
    began = time.monotonic()
    assert second.generate_each(after) == {name: computed[name] for name in after}
    assert time.monotonic() - began < 20
    second.check_cached({**full_pages(before), **dict.fromkeys(after, 0)}, store)
    second.close()


def test_records_that_were_harmed_are_computed_instead(folder, device, store):
    prompts = make_prompts(*LENGTHS)
    computed, _ = expected_of(folder, device)
    filled(folder, device, store)
    client = KVClient(ClientConfig(store.address))
    memory = np.frombuffer(client.arena(), np.uint8)
    memory[300::997] ^= 0x55  # somewhere in every record, and in some headers
    client.close()
    second = Engine(folder, device, store.address)
    assert second.generate_each(prompts) == computed
    second.check_cached(dict.fromkeys(prompts, 0), store)
    assert store.stats()["reported_corrupt"] > 0
    second.close()
