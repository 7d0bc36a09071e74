"""When pages run short on a real worker with a real store: KV goes there and comes back, and no token changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scheduler.loop import EngineLoop
from scheduler.plan import OutputBatch
from scheduler.request import NewRequest, SamplingParams
from scheduler.scheduler import Scheduler
from scheduler.scheduler_config import PrefetchPolicy, SchedulerConfig, StoreConfig, WritePolicy
from worker.backend import open_executor, open_prefix_store
from worker.config import WorkerConfig

NUM_TOKENS = 60


def generate(folder: Path, num_pages: int, store: StoreConfig, address: str | None) -> tuple[dict, list[OutputBatch]]:
    """Greedy tokens of six requests, whose lengths the scheduler underestimates."""
    limits = {"max_batch_tokens": 64, "max_slots": 8, "page_size": 8, "num_pages": num_pages, "num_threads": 1}
    config = WorkerConfig(folder, kv_store=address, **limits)
    executor, prefixes = open_executor(config), open_prefix_store(config) if address else None
    scheduler = Scheduler(SchedulerConfig(store=store), executor.capacity, prefixes)
    for _ in range(500):
        scheduler._lengths.record(1)
    if scheduler._transfer is not None:  # so small a model computes faster than any store answers
        scheduler._transfer.costs.is_worth_moving = lambda num_saves, num_loads: True  # type: ignore[method-assign]
        scheduler._transfer.costs.num_worth_loading = len  # type: ignore[method-assign,assignment]
    generator = torch.Generator().manual_seed(5)
    prompts = {f"r{n}": torch.randint(0, 101, (30 + n,), generator=generator).tolist() for n in range(6)}
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    batches: list[OutputBatch] = []
    left = set(prompts)

    def emit(batch: OutputBatch) -> None:
        batches.append(batch)
        for name, token in zip(batch.request_ids, batch.token_ids.tolist()):
            tokens[name].append(token)
        left.difference_update(end.request_id for end in batch.ends)
        if not left:
            loop.stop()

    loop = EngineLoop(scheduler, executor, emit, 30.0)
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    loop.submit([NewRequest(name, tuple(prompt), sampling) for name, prompt in prompts.items()])
    loop.run()
    executor.close()
    if prefixes is not None:
        prefixes.close()
    return tokens, batches


@pytest.mark.parametrize("policy", WritePolicy)
def test_preempted_requests_come_back_from_a_real_store(random_model, store, policy):
    folder = Path(random_model("llama"))
    expected, _ = generate(folder, 200, StoreConfig(), None)
    use = StoreConfig(PrefetchPolicy.WAIT, max_wait_s=2.0, write_policy=policy)
    tokens, batches = generate(folder, 30, use, store.address)
    assert tokens == expected
    stats = [batch.stats for batch in batches if batch.stats is not None]
    assert sum(each.num_preemptions for each in stats) > 0
    assert sum(each.moves.num_requests_moved for each in stats) > 0
    assert sum(each.moves.num_loaded for each in stats) > 0
