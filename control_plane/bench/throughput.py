"""Offline throughput of one engine in this process: everything submitted at once, nothing else measured.

The work is fixed so that figures of different days and engines can stand side by side: prompts of random token
ids, greedy, ignoring end-of-sequence ids, no prefix hits, no text. With a KV store (an empty one, or its hits count)
all full pages are given to it meanwhile, which is what offloading costs. On a GPU the share of the optimum (paper,
Eq. 5, with the sustained GEMM rate of the same run), clocks, watts and joules stand beside it, and a breakdown where
it is asked for. Knows nothing of Ray or transport.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from autosearch.specs import ModelSpec
from control_plane.bench.gpu_meter import GpuMeter, gemm_rate, memory_bound_step_s, parameters
from control_plane.bench.record import Record
from control_plane.bench.waterfall import Snapshots, waterfall
from control_plane.bench.workload import Workload
from control_plane.config import EngineConfig
from control_plane.engine import check_device, device_of, make_loop, open_engine
from control_plane.options import ConfigError
from control_plane.progress import ProgressLine
from control_plane.release import version_of
from scheduler.loop import EngineLoop
from scheduler.plan import EngineCapacity, IterationPlan, StepResult
from scheduler.ports import Executor, PendingStep
from scheduler.request import NewRequest
from worker.cuda_executor import CudaExecutor
from worker.power_meter import NvmlCard, nvml


@dataclass(frozen=True, slots=True)
class Mode:
    """How a benchmark runs."""

    synchronous: bool = False  # plan a step only after the one before has ended
    breakdown: bool = False  # afterwards, time each operator of a steady iteration by itself (GPU only)


@dataclass(frozen=True, slots=True)
class _Ended:
    """A step that has: its result, which the executor tells only once."""

    value: StepResult

    def done(self) -> bool:
        return True

    def result(self, timeout_s: float | None = None) -> StepResult:
        return self.value


class Synchronous:
    """An executor that returns from submit() only when the step has ended: what planning ahead is measured against."""

    def __init__(self, inner: Executor, timeout_s: float) -> None:
        self._inner, self._timeout_s = inner, timeout_s

    @property
    def capacity(self) -> EngineCapacity:
        return self._inner.capacity

    def submit(self, plan: IterationPlan) -> PendingStep:
        return _Ended(self._inner.submit(plan).result(self._timeout_s))

    def use_schedules(self, number: int) -> None:
        self._inner.use_schedules(number)

    def close(self) -> None:
        self._inner.close()


def run(engine: EngineConfig, workload: Workload, mode: Mode = Mode()) -> dict[str, Any]:
    """Load, run and measure; the result, also printed as one JSON line.

    Raises ConfigError where the workload does not fit, and what the worker raises for a model it cannot load.
    """
    engine = replace(engine, enable_prefix_caching=engine.kv_store is not None)
    spec, lengths = ModelSpec.from_folder(engine.model), workload.lengths()
    _check_lengths(lengths, engine.max_model_len)
    check_device(engine)
    if device_of(engine) == "cuda":
        nvml()
    began = time.perf_counter()
    line = ProgressLine()
    executor = open_engine(engine, line.share)
    line.done()
    start_s = time.perf_counter() - began
    try:
        _check_lengths(lengths, executor.capacity.max_model_len)
        gpu = executor if isinstance(executor, CudaExecutor) else None
        if mode.breakdown and gpu is None:
            raise ConfigError("--breakdown is for GPUs: leave it out")
        setting = _setting(engine, workload, mode, executor, spec)
        print(f"ready after {start_s:.1f} s: {setting}", file=sys.stderr, flush=True)
        figures = _measure(engine, workload, mode, executor, gpu, spec)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the GPU has no room for the benchmark beside the engine: lower gpu-memory-utilization from "
            f"{engine.gpu_memory_utilization}: {str(error).partition('. ')[0]}"
        ) from None
    finally:
        executor.close()
    result = {**setting, "start_s": round(start_s, 3), **figures}
    print(json.dumps(result), flush=True)
    return result


def _measure(
    engine: EngineConfig, workload: Workload, mode: Mode, executor: Executor, gpu: CudaExecutor | None, spec: ModelSpec
) -> dict[str, Any]:
    """Run the work; the figures."""
    requests = workload.requests(spec.vocab_size)
    prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
    output_tokens = sum(request.sampling.max_tokens for request in requests)
    rate = gemm_rate(spec, gpu.dtype) if gpu else 0.0
    snapshots = Snapshots(gpu) if gpu and mode.breakdown else None
    record = Record(len(requests), snapshots.on_step if snapshots else lambda stats: None)
    driven = Synchronous(executor, engine.step_timeout) if mode.synchronous else executor
    submitted, power = play(engine, driven, record, requests, GpuMeter() if gpu else None)
    figures = record.figures(submitted, prompt_tokens, output_tokens)
    if engine.kv_store is not None:
        figures |= _moves(record)
    if gpu:
        figures |= _shares(figures, rate, spec) | power
        capacity, context = executor.capacity, (prompt_tokens + output_tokens / 2) / len(requests)
        concurrent = min(len(requests), capacity.max_slots, int(capacity.num_pages * capacity.page_size / context))
        bound = memory_bound_step_s(spec, concurrent, context, gpu.dtype.itemsize)
        figures["memory_bound_step_ms"] = round(bound * 1e3, 4)
    if snapshots:
        print(f"the run: {_rates(figures)}; now each operator by itself", file=sys.stderr, flush=True)
        figures |= waterfall(snapshots, record, figures, rate, output_tokens)
    return figures


def _rates(figures: dict[str, Any]) -> str:
    """In words; a run of few iterations has no steady middle."""
    whole, steady = f"{figures['tokens_per_s']:.0f} tokens/s", figures["steady_tokens_per_s"]
    return whole if steady is None else f"{whole}, {steady:.0f} in the steady middle"


def play(
    engine: EngineConfig, executor: Executor, record: Record, requests: Sequence[NewRequest], meter: GpuMeter | None
) -> tuple[float, dict[str, Any]]:
    """Submit all requests to a new loop over the executor and wait for their ends: when that was, and the power drawn.

    Raises RuntimeError where a request does not end as it should.
    """
    loop = make_loop(engine, executor, record, len(requests))
    num_tokens = sum(len(request.prompt_token_ids) + request.sampling.max_tokens for request in requests)
    if meter:
        meter.start()
    submitted = time.perf_counter()
    loop.submit(requests)
    try:
        run_until_done(loop, record)
    finally:
        power = meter.stop(num_tokens) if meter else {}
    return submitted, power


class Watcher(Protocol):
    """Takes what a loop emits, and knows when there has been enough."""

    done: threading.Event
    failures: list[str]

    def fail(self, error: BaseException) -> None:
        """The loop itself ended: nothing more will come. Sets `done`."""


def run_until_done(loop: EngineLoop, watcher: Watcher) -> None:
    """The loop in a thread of its own. Raises RuntimeError where a request does not end as it should."""
    thread = threading.Thread(target=_run_loop, args=(loop, watcher), name="engine")
    thread.start()
    watcher.done.wait()
    loop.stop()
    thread.join()
    if watcher.failures:
        raise RuntimeError(f"{len(watcher.failures)} requests did not end as they should: {watcher.failures[0]}")


def _run_loop(loop: EngineLoop, watcher: Watcher) -> None:
    try:
        loop.run()
    except Exception as error:
        watcher.fail(error)


def _moves(record: Record) -> dict[str, int]:
    """Pages that went to the KV store and came from it, and those that should have."""
    counts = [stats.moves for _, stats in record.steps]
    names = ("num_stored", "num_store_failed", "num_dropped", "num_loaded", "num_load_failed")
    return {f"pages_{name.removeprefix('num_')}": sum(getattr(each, name) for each in counts) for name in names}


def _check_lengths(lengths: list[tuple[int, int]], max_model_len: int | None) -> None:
    longest = max(prompt + output for prompt, output in lengths)
    if max_model_len is not None and longest > max_model_len:
        raise ConfigError(
            f"input-len + output-len is {longest}, and one request can have {max_model_len} tokens: "
            "lower them, or raise --max-model-len, --kv-cache-memory-bytes or --num-gpu-blocks-override"
        )


def _shares(figures: dict[str, Any], rate: float, spec: ModelSpec) -> dict[str, Any]:
    """The optimum (paper, Eq. 5) at the measured GEMM rate, and what was reached of it."""
    optimum = rate / (2 * parameters(spec))
    steady = figures["steady_tokens_per_s"]
    return {
        "gemm_tflops": round(rate / 1e12, 1),
        "optimum_tokens_per_s": round(optimum, 1),
        "share_of_optimum": round(figures["tokens_per_s"] / optimum, 4),
        "steady_share_of_optimum": round(steady / optimum, 4) if steady else None,
    }


def _setting(
    engine: EngineConfig, workload: Workload, mode: Mode, executor: Executor, spec: ModelSpec
) -> dict[str, Any]:
    capacity = executor.capacity
    setting: dict[str, Any] = {
        "benchmark": "throughput",
        "model": engine.model.resolve().name,
        "load_format": engine.load_format,
        "num_prompts": workload.num_prompts,
        "input_len": workload.input_len,
        "output_len": workload.output_len,
        "lengths_file": workload.lengths_file and workload.lengths_file.name,
        "synchronous": mode.synchronous,
        "kv_store": engine.kv_store is not None,
        "schedules": engine.schedules and engine.schedules.name,
        "nano_batches": engine.nano_batches,
        "expected_lens": [engine.expected_input_len, engine.expected_output_len],
        "target_itl_ms": engine.target_itl_ms,
        "batch_tokens": capacity.max_batch_tokens,
        "max_slots": capacity.max_slots,
        "num_pages": capacity.num_pages,
        "page_size": capacity.page_size,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if isinstance(executor, CudaExecutor):
        return setting | {
            "device": torch.cuda.get_device_name(),
            "driver": NvmlCard().driver(),
            "triton": version_of("triton"),
            "dtype": str(executor.dtype).removeprefix("torch."),
            "memory_bytes": executor.memory_bytes,
        }
    return setting | {
        "device": platform.processor() or platform.machine(),
        "dtype": "float32",
        "num_cpus": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
    }
