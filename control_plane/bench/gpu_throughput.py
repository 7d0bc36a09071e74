"""Offline throughput of one GPU, in this process: everything submitted at once, prompts of random ids, greedy.

`python -m control_plane.bench.gpu_throughput MODEL_DIR`. Prints its setting and ends in one JSON line: tokens/s of
the whole run and of its steady middle, shares of the optimum (paper, Eq. 5, with the sustained GEMM rate of the same
run), idle time by device timestamps, clocks, watts and joules. Needs no Ray. Knows nothing of transport or text.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autosearch.specs import ModelSpec
from control_plane.bench.workload import STEADY, draw_requests
from scheduler.loop import EngineLoop
from scheduler.plan import EngineCapacity, IterationPlan, OutputBatch, StepStats
from scheduler.ports import PendingStep
from scheduler.scheduler import Scheduler, SchedulerConfig
from worker.config import WorkerConfig
from worker.cuda_executor import CudaExecutor


@dataclass(frozen=True, slots=True)
class Settings:
    """One benchmark."""

    model_dir: Path
    input_len: int = 512
    output_len: int = 512
    num_prompts: int = 2048
    lengths_file: Path | None = None  # CSV of prompt and output lengths, used instead of the three above
    max_batch_tokens: int = 2048
    max_slots: int = 1536
    page_size: int = 64
    max_model_len: int = 8192
    load_format: str = "dummy"
    dtype: str = "auto"
    device: str = "cuda"
    synchronous: bool = False  # plan a step only after the one before has ended
    profile_step: int = 0  # > 0: print the kernels' times of 20 steps from this one on; slows the run a little


def lengths(settings: Settings) -> list[tuple[int, int]]:
    """Prompt and output tokens of each request; from a file as docs/results.md says."""
    if settings.lengths_file is None:
        return [(settings.input_len, settings.output_len)] * settings.num_prompts
    with settings.lengths_file.open(encoding="utf-8") as file:
        rows = [(int(row[1]), int(row[2])) for row in csv.reader(file) if row[1:] and row[1].isdigit()]
    fitting = [row for row in rows if 4 <= row[0] <= 2048 and 4 <= row[1] <= 1024]
    return random.Random(1).sample(fitting, 3000)


class Synchronous:
    """An executor that returns from submit() only when the step has ended."""

    def __init__(self, inner: CudaExecutor) -> None:
        self._inner = inner

    @property
    def capacity(self) -> EngineCapacity:
        return self._inner.capacity

    def submit(self, plan: IterationPlan) -> PendingStep:
        step = self._inner.submit(plan)
        step.result(60.0)
        return step

    def close(self) -> None:
        self._inner.close()


class Card:
    """Energy, power and clocks of the GPU; zeros where there is no NVML."""

    def __init__(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml: Any = pynvml
            self._handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        except Exception:
            self._nvml = None

    def joules(self) -> float:
        """Energy since the driver was loaded."""
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3 if self._nvml else 0.0

    def reading(self) -> tuple[float, int]:
        """Watts and SM clock in MHz now."""
        if not self._nvml:
            return 0.0, 0
        return (
            self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3,
            self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM),
        )


def gemm_rate(spec: ModelSpec, rows: int = 2048, seconds: float = 2.5) -> float:
    """Sustained FLOP/s of the layer's four GEMMs by cuBLAS, over the second half of `seconds`."""
    qkv = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    shapes = [
        (spec.hidden_size, qkv),
        (spec.num_heads * spec.head_dim, spec.hidden_size),
        (spec.hidden_size, 2 * spec.intermediate_size),
        (spec.intermediate_size, spec.hidden_size),
    ]
    dtype = torch.bfloat16
    x = [torch.randn(rows, k, device="cuda", dtype=dtype) for k, _ in shapes]
    w = [[((torch.rand(n, k, device="cuda") * 2 - 1) * 1e-3).to(dtype) for k, n in shapes] for _ in range(2)]
    y = [torch.empty(rows, n, device="cuda", dtype=dtype) for _, n in shapes]
    flops = 2.0 * rows * sum(k * n for k, n in shapes)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    count = int(seconds * 6e14 / flops)
    for i in range(count):
        if i == count // 2:
            begin.record()
        for a, b, c in zip(x, w[i % 2], y):
            torch.mm(a, b.t(), out=c)
    end.record()
    end.synchronize()
    return float(flops * (count - count // 2) / (begin.elapsed_time(end) / 1e3))


class Record:
    """What the loop puts out, in the loop's thread."""

    def __init__(self, num_requests: int, card: Card, on_step: Callable[[int], None]) -> None:
        self.done = threading.Event()
        self.steps: list[tuple[float, StepStats]] = []  # (time, stats)
        self.readings: list[tuple[float, int]] = []
        self.failures: list[str] = []
        self._open, self._card, self._on_step = num_requests, card, on_step

    def __call__(self, batch: OutputBatch) -> None:
        if batch.stats is not None:
            self.steps.append((time.perf_counter(), batch.stats))
            if len(self.steps) % 20 == 0:
                self.readings.append(self._card.reading())
            self._on_step(len(self.steps))
        self.failures += [end.error or str(end.finish_reason) for end in batch.ends if end.finish_reason != "length"]
        self._open -= len(batch.ends)
        if self._open <= 0:
            self.done.set()


def run(settings: Settings) -> dict[str, Any]:
    """Load, run and measure; the result, also printed as one JSON line."""
    began = time.perf_counter()
    config = WorkerConfig(
        model_dir=settings.model_dir,
        load_format=settings.load_format,
        dtype=settings.dtype,
        device=settings.device,
        max_batch_tokens=settings.max_batch_tokens,
        max_slots=settings.max_slots,
        max_model_len=settings.max_model_len,
        page_size=settings.page_size,
    )
    engine = CudaExecutor(config)
    start_s = time.perf_counter() - began
    capacity, work, card = engine.capacity, draw_requests(lengths(settings), engine.spec.vocab_size), Card()
    print(f"ready after {start_s:.1f} s; {settings}; {capacity.num_pages} pages", flush=True)
    rate = gemm_rate(engine.spec) if settings.device == "cuda" else 0.0
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def on_step(number: int) -> None:
        if settings.profile_step and number == settings.profile_step:
            profiler.start()
        if settings.profile_step and number == settings.profile_step + 20:
            profiler.stop()
            print(profiler.key_averages().table(sort_by="cuda_time_total", row_limit=30, max_name_column_width=60))

    record = Record(len(work), card, on_step)
    scheduler = Scheduler(SchedulerConfig(enable_prefix_caching=False, max_waiting=len(work)), capacity)
    loop = EngineLoop(scheduler, Synchronous(engine) if settings.synchronous else engine, record, 60.0)
    joules, submitted = card.joules(), time.perf_counter()
    loop.submit(work)
    thread = threading.Thread(target=_loop, args=(loop, record))
    thread.start()
    record.done.wait()
    loop.stop()
    thread.join()
    joules = card.joules() - joules
    engine.close()
    if record.failures:
        raise RuntimeError(f"{len(record.failures)} requests failed: {record.failures[0]}")
    result = {
        "benchmark": "gpu_throughput",
        "gpu": torch.cuda.get_device_name() if settings.device == "cuda" else settings.device,
        "torch": torch.__version__,
        **{name: str(getattr(settings, name)) for name in Settings.__slots__},
        "num_pages": capacity.num_pages,
        "start_s": round(start_s, 1),
        **figures(record, submitted, joules, sum(map(sum, lengths(settings))), rate, parameters(engine.spec)),
    }
    print(json.dumps(result), flush=True)
    return result


def _loop(loop: EngineLoop, record: Record) -> None:
    try:
        loop.run()
    except Exception as error:
        record.failures.append(f"{type(error).__name__}: {error}")
        record.done.set()


def parameters(spec: ModelSpec) -> int:
    """Parameters of a dense model, the embedding included."""
    attention = spec.hidden_size * (2 * spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    layer = attention + 3 * spec.hidden_size * spec.intermediate_size + 2 * spec.hidden_size
    vocabulary = spec.vocab_size * spec.hidden_size * (1 if spec.tie_embeddings else 2)
    return spec.num_layers * layer + vocabulary + spec.hidden_size


def figures(
    record: Record, submitted: float, joules: float, num_tokens: int, rate: float, num_parameters: int
) -> dict[str, Any]:
    """Rates count prompt and output tokens; fill and drain are in the whole run's."""
    last = record.steps[-1]
    total_s = last[0] - submitted
    low, high = (submitted + share * total_s for share in STEADY)
    steady = [step for step in record.steps if low <= step[0] <= high]
    steady_s = steady[-1][0] - steady[0][0]
    steady_tokens = sum(stats.num_tokens for _, stats in steady[1:])
    idle_s = sum(stats.idle_s for _, stats in record.steps)
    run_s = sum(stats.run_s for _, stats in record.steps)
    steady_run_s = sum(stats.run_s for _, stats in steady)
    optimum = rate / (2 * num_parameters)
    readings = sorted(record.readings)
    middle = readings[len(readings) // 2] if readings else (0.0, 0)
    clocks = sorted(clock for _, clock in record.readings)
    return {
        "total_s": round(total_s, 3),
        "tokens_per_s": round(num_tokens / total_s, 1),
        "steady_tokens_per_s": round(steady_tokens / steady_s, 1),
        "gemm_tflops": round(rate / 1e12, 1),
        "optimum_tokens_per_s": round(optimum, 1),
        "share_of_optimum": round(num_tokens / total_s / optimum, 4) if optimum else None,
        "steady_share_of_optimum": round(steady_tokens / steady_s / optimum, 4) if optimum else None,
        "num_steps": len(record.steps),
        "steady_step_ms": round(steady_run_s / len(steady) * 1e3, 3),
        "steady_batch_tokens": round(steady_tokens / (len(steady) - 1), 1),
        "steady_decodes": round(sum(stats.num_decodes for _, stats in steady) / len(steady), 1),
        "idle_share": round(idle_s / (run_s + idle_s), 5) if run_s else None,
        "steady_idle_ms": round(sum(stats.idle_s for _, stats in steady) / len(steady) * 1e3, 4),
        "late_plans": sum(stats.late for _, stats in record.steps),
        "preemptions": sum(stats.num_preemptions for _, stats in record.steps),
        "mean_plan_ms": round(sum(stats.plan_s for _, stats in record.steps) / len(record.steps) * 1e3, 3),
        "watts_median": round(middle[0], 1),
        "sm_mhz_median": clocks[len(clocks) // 2] if clocks else 0,
        "joules_per_token": round(joules / num_tokens, 5),
        "memory_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2) if torch.cuda.is_available() else 0,
    }


def main() -> None:
    """The command line; flags are the fields of Settings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir", type=Path)
    for name in ("input_len", "output_len", "num_prompts", "max_batch_tokens", "max_slots", "page_size"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=argparse.SUPPRESS)
    for name in ("max_model_len", "profile_step"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=argparse.SUPPRESS)
    for name in ("load_format", "dtype", "device"):
        parser.add_argument(f"--{name.replace('_', '-')}", default=argparse.SUPPRESS)
    parser.add_argument("--lengths-file", type=Path, default=argparse.SUPPRESS)
    parser.add_argument("--synchronous", action="store_true", default=argparse.SUPPRESS)
    run(Settings(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
