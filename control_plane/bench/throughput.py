"""Offline throughput of one engine in this process: everything submitted at once, nothing else measured.

The work is fixed so that figures of different days and engines can stand side by side: prompts of random token
ids, greedy, ignoring end-of-sequence ids, no prefix hits, no text. Knows nothing of Ray or transport.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from control_plane.bench.workload import STEADY, draw_requests
from control_plane.config import EngineConfig
from control_plane.engine import scheduler_config, single_rank_config
from control_plane.options import ConfigError
from control_plane.progress import ProgressLine
from scheduler.loop import EngineLoop
from scheduler.plan import EngineCapacity, OutputBatch
from scheduler.request import NewRequest
from scheduler.scheduler import Scheduler
from worker.executor import LocalExecutor, Worker


@dataclass(frozen=True, slots=True)
class Workload:
    """What is submitted at t = 0."""

    num_prompts: int
    input_len: int  # prompt tokens of each request
    output_len: int  # output tokens of each request

    def requests(self, vocab_size: int) -> list[NewRequest]:
        """The same requests for the same workload and vocabulary."""
        return draw_requests([(self.input_len, self.output_len)] * self.num_prompts, vocab_size)


class _Record:
    """Counts what the loop puts out, in the loop's thread; `done` when all requests have ended."""

    def __init__(self, num_requests: int) -> None:
        self.done = threading.Event()
        self.steps: list[tuple[float, int, int]] = []  # (time, tokens computed, rows of the bucket)
        self.failures: list[str] = []
        self.idle_s = 0.0
        self.run_s = 0.0
        self.late = 0
        self.preemptions = 0
        self._open = num_requests

    def __call__(self, batch: OutputBatch) -> None:
        if (stats := batch.stats) is not None:
            self.steps.append((time.perf_counter(), stats.num_tokens, stats.batch_tokens))
            self.idle_s += stats.idle_s
            self.run_s += stats.run_s
            self.late += stats.late
            self.preemptions += stats.num_preemptions
        self.failures += [end.error or str(end.finish_reason) for end in batch.ends if end.finish_reason != "length"]
        self._open -= len(batch.ends)
        if self._open == 0:
            self.done.set()


def run(engine: EngineConfig, workload: Workload) -> dict[str, Any]:
    """Load, run and measure; the result, also printed as one JSON line.

    Raises ConfigError where the workload does not fit, and what the worker raises for a model it cannot load.
    """
    engine = replace(engine, enable_prefix_caching=False)
    began = time.perf_counter()
    worker = Worker(single_rank_config(engine))
    _check(workload, worker.capacity)
    line = ProgressLine()
    worker.load(line.share)
    line.done()
    executor = LocalExecutor(worker)
    start_s = time.perf_counter() - began
    print(f"ready after {start_s:.1f} s: {describe(engine, workload, worker.capacity)}", file=sys.stderr, flush=True)
    requests = workload.requests(worker.spec.vocab_size)
    record = _Record(len(requests))
    loop = EngineLoop(
        Scheduler(scheduler_config(engine, len(requests)), worker.capacity), executor, record, engine.step_timeout
    )
    thread = threading.Thread(target=_run_loop, args=(loop, record), name="engine")
    submitted = time.perf_counter()
    loop.submit(requests)
    thread.start()
    record.done.wait()
    loop.stop()
    thread.join()
    executor.close()
    if record.failures:
        raise RuntimeError(f"{len(record.failures)} requests did not end as they should: {record.failures[0]}")
    result = {
        **_setting(engine, workload, worker.capacity),
        "start_s": round(start_s, 3),
        **_figures(record, submitted, workload),
    }
    print(json.dumps(result))
    return result


def describe(engine: EngineConfig, workload: Workload, capacity: EngineCapacity) -> str:
    """The setting in one line."""
    return (
        f"{engine.model.name}, {workload.num_prompts} requests of {workload.input_len} in and "
        f"{workload.output_len} out, "
        f"B_dense {capacity.max_batch_tokens}, {capacity.max_slots} slots, {capacity.num_pages} pages of "
        f"{capacity.page_size}"
    )


def _run_loop(loop: EngineLoop, record: _Record) -> None:
    try:
        loop.run()
    except Exception as error:
        record.failures.append(f"{type(error).__name__}: {error}")
        record.done.set()


def _check(workload: Workload, capacity: EngineCapacity) -> None:
    if min(workload.num_prompts, workload.input_len, workload.output_len) < 1:
        raise ConfigError("num-prompts, input-len and output-len must be at least 1")
    length = workload.input_len + workload.output_len
    if length > capacity.max_model_len:
        raise ConfigError(
            f"input-len + output-len is {length}, and one request can have {capacity.max_model_len} tokens: "
            "lower them, or raise --max-model-len or --kv-cache-memory-bytes"
        )


def _setting(engine: EngineConfig, workload: Workload, capacity: EngineCapacity) -> dict[str, Any]:
    return {
        "benchmark": "throughput",
        "model": engine.model.resolve().name,
        "load_format": engine.load_format,
        "dtype": engine.dtype,
        **asdict(workload),
        "batch_tokens": capacity.max_batch_tokens,
        "max_slots": capacity.max_slots,
        "num_pages": capacity.num_pages,
        "page_size": capacity.page_size,
        "device": platform.processor() or platform.machine(),
        "num_cpus": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _figures(record: _Record, submitted: float, workload: Workload) -> dict[str, Any]:
    """Rates count prompt and output tokens; fill and drain are in the whole run's."""
    total_s = record.steps[-1][0] - submitted
    num_tokens = workload.num_prompts * (workload.input_len + workload.output_len)
    low, high = (submitted + share * total_s for share in STEADY)
    steady = [step for step in record.steps if low <= step[0] <= high]
    steady_tokens = sum(tokens for _, tokens, _ in steady[1:])
    steady_s = steady[-1][0] - steady[0][0] if len(steady) > 1 else 0.0
    return {
        "total_s": round(total_s, 4),
        "tokens_per_s": round(num_tokens / total_s, 2),
        "output_tokens_per_s": round(workload.num_prompts * workload.output_len / total_s, 2),
        "steady_tokens_per_s": round(steady_tokens / steady_s, 2) if steady_s else None,
        "num_steps": len(record.steps),
        "mean_batch_tokens": round(sum(tokens for _, tokens, _ in record.steps) / len(record.steps), 2),
        "busy_share": round(record.run_s / max(record.run_s + record.idle_s, 1e-9), 5),
        "late_plans": record.late,
        "preemptions": record.preemptions,
    }
