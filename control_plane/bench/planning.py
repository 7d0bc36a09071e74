"""What one iteration costs the scheduler on the CPU: plan() and finish(), with an executor that takes no time.

Measures the central scheduler alone, at a steady number of live decodes with requests ending and starting all
the time. Knows nothing of models, workers or transport.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from control_plane.options import ConfigError
from scheduler.plan import EngineCapacity, IterationPlan, OutputBatch, ScheduleBucket, StepResult
from scheduler.request import NewRequest, SamplingParams
from scheduler.scheduler import Scheduler, SchedulerConfig

_VOCAB = 32_000
_STOP_ID = _VOCAB  # never sampled here: every step still compares each token with it


@dataclass(slots=True)
class _Load:
    """Keeps a scheduler busy: so many requests in the house, each new one of the same lengths."""

    scheduler: Scheduler
    input_len: int
    output_len: int
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    num_made: int = 0

    def add(self, output_len: int | None = None) -> None:
        """One more request with a prompt that no other shares."""
        prompt = tuple(self.rng.choices(range(_VOCAB), k=self.input_len))
        sampling = SamplingParams(max_tokens=output_len or self.output_len, stop_token_ids=(_STOP_ID,))
        self.scheduler.add(NewRequest(f"request-{self.num_made}", prompt, sampling), now=0.0)
        self.num_made += 1


@dataclass(frozen=True, slots=True)
class _Step:
    """What one measured iteration cost and did."""

    plan_ms: float
    finish_ms: float
    cpu_ms: float  # of both, without the time that other processes took
    num_decodes: int
    num_tokens: int


def _answer(plan: IterationPlan, rng: np.random.Generator) -> StepResult:
    sampled = rng.integers(0, _VOCAB, int(plan.samples.sum()), dtype=np.int32)
    return StepResult(plan.step, sampled, faults=(), idle_s=0.0, run_s=0.0)


def _capacity(
    num_live: int, batch_tokens: int, input_len: int, output_len: int, page_size: int, kv_share: float
) -> EngineCapacity:
    num_slots = num_live + max(1, num_live * input_len // (batch_tokens * output_len)) + 8  # some still prefill
    num_pages = int(kv_share * num_slots * -(-(input_len + output_len) // page_size))
    max_model_len = min(8192, num_pages * page_size)
    return EngineCapacity(num_pages, page_size, num_slots, max_model_len, (ScheduleBucket(0, batch_tokens),))


def run(
    num_live: int = 1024,
    batch_tokens: int = 2048,
    input_len: int = 512,
    output_len: int = 512,
    num_steps: int = 1000,
    page_size: int = 16,
    kv_share: float = 1.0,
) -> dict[str, object]:
    """Measure num_steps iterations in steady state; prints the setting and, last, the returned figures as JSON.

    kv_share: KV pages as a share of what all slots would need at full length. Below 1 the page forecast decides
    what runs, and fewer decodes may be live than asked for. Raises ConfigError for a batch that cannot keep so many
    decodes alive.
    """
    needed = num_live + -(-num_live * input_len // output_len)  # each decode that ends is replaced by a prompt
    if batch_tokens < needed:
        raise ConfigError(
            f"batch-tokens={batch_tokens} cannot keep {num_live} requests of {input_len} prompt and {output_len} "
            f"output tokens decoding: at least {needed} are needed, or a lower --num-live"
        )
    capacity = _capacity(num_live, batch_tokens, input_len, output_len, page_size, kv_share)
    print(
        f"planning cost: {num_live} live decodes, B_dense {batch_tokens}, input {input_len}, output {output_len},"
        f" {capacity.num_pages} pages of {page_size}, {num_steps} iterations, Python {platform.python_version()}"
    )
    load = _Load(Scheduler(SchedulerConfig(), capacity), input_len, output_len)
    for _ in range(capacity.max_slots + 16):  # ends spread evenly over time, as after long running
        load.add(output_len=load.rng.randint(1, output_len))
    num_warm_up = 2 * output_len + num_live * input_len // (batch_tokens - num_live)
    steps = _drive(load, num_warm_up + num_steps)[num_warm_up:]
    figures = _figures(steps)
    setting = {"num_live": num_live, "batch_tokens": batch_tokens, "input_len": input_len, "output_len": output_len}
    report = {"benchmark": "planning", **setting, "kv_share": kv_share, "num_steps": num_steps, **figures}
    print(json.dumps(report))
    return report


def _drive(load: _Load, num_steps: int) -> list[_Step]:
    """One iteration ahead, as the loop does it."""
    rng = np.random.default_rng(0)
    steps: list[_Step] = []
    ahead = load.scheduler.plan(0.0)
    while ahead is not None and len(steps) < num_steps:
        started, cpu_started = time.perf_counter(), time.thread_time()
        following = load.scheduler.plan(0.0)
        planned, cpu_planned = time.perf_counter(), time.thread_time()
        result = _answer(ahead, rng)
        answered, cpu_answered = time.perf_counter(), time.thread_time()
        batch: OutputBatch = load.scheduler.finish(ahead, result, 0.0)
        finished, cpu_finished = time.perf_counter(), time.thread_time()
        cpu_ms = 1e3 * (cpu_planned - cpu_started + cpu_finished - cpu_answered)
        plan_ms, finish_ms = 1e3 * (planned - started), 1e3 * (finished - answered)
        steps.append(_Step(plan_ms, finish_ms, cpu_ms, ahead.num_decodes, ahead.num_tokens))
        for _ in batch.ends:
            load.add()
        ahead = following
    return steps


def _figures(steps: Sequence[_Step]) -> dict[str, float]:
    total = np.array([step.plan_ms + step.finish_ms for step in steps])
    return {
        "mean_decodes": round(float(np.mean([step.num_decodes for step in steps])), 1),
        "mean_tokens": round(float(np.mean([step.num_tokens for step in steps])), 1),
        "plan_ms_mean": round(float(np.mean([step.plan_ms for step in steps])), 3),
        "finish_ms_mean": round(float(np.mean([step.finish_ms for step in steps])), 3),
        "total_ms_mean": round(float(total.mean()), 3),
        "cpu_ms_mean": round(float(np.mean([step.cpu_ms for step in steps])), 3),
        "total_ms_p50": round(float(np.percentile(total, 50)), 3),
        "total_ms_p99": round(float(np.percentile(total, 99)), 3),
        "total_ms_max": round(float(total.max()), 3),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line of `python -m control_plane.bench.planning`."""
    parser = argparse.ArgumentParser(description="What planning one iteration costs on the CPU.")
    parser.add_argument("--num-live", type=int, default=1024, help="live decodes")
    parser.add_argument("--batch-tokens", type=int, default=2048, help="B_dense")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=512)
    parser.add_argument("--num-steps", type=int, default=1000, help="measured iterations")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--kv-share", type=float, default=1.0, help="KV pages as a share of what all slots need")
    run(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    main()
