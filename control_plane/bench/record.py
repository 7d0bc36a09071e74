"""What a benchmark run put out, and the figures that follow from it. Knows nothing of devices."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from control_plane.bench.workload import STEADY
from scheduler.plan import OutputBatch, StepStats


@dataclass(slots=True)
class _Tokens:
    """When a request's tokens came."""

    first_s: float
    last_s: float
    count: int = 1


class Record:
    """Takes what the loop emits, in the loop's thread; `done` when all requests have ended."""

    def __init__(
        self,
        num_requests: int,
        on_step: Callable[[StepStats], None] = lambda stats: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.done = threading.Event()
        self.steps: list[tuple[float, StepStats]] = []  # when it ended
        self.failures: list[str] = []
        self._tokens: dict[str, _Tokens] = {}
        self._open, self._on_step, self._clock = num_requests, on_step, clock

    def __call__(self, batch: OutputBatch) -> None:
        now = self._clock()
        if batch.stats is not None:
            self.steps.append((now, batch.stats))
            self._on_step(batch.stats)
        for request_id in batch.request_ids:
            tokens = self._tokens.get(request_id)
            if tokens is None:
                self._tokens[request_id] = _Tokens(now, now)
            else:
                tokens.last_s = now
                tokens.count += 1
        self.failures += [end.error or str(end.finish_reason) for end in batch.ends if end.finish_reason != "length"]
        self._open -= len(batch.ends)
        if self._open <= 0:
            self.done.set()

    def fail(self, error: BaseException) -> None:
        """The loop itself ended: nothing more will come."""
        self.failures.append(f"{type(error).__name__}: {error}")
        self.done.set()

    def steady(self, submitted_s: float) -> list[tuple[float, StepStats]]:
        """The steps of the steady middle."""
        total_s = self.steps[-1][0] - submitted_s
        low, high = (submitted_s + share * total_s for share in STEADY)
        return [step for step in self.steps if low <= step[0] <= high]

    def figures(self, submitted_s: float, num_prompt_tokens: int, num_output_tokens: int) -> dict[str, Any]:
        """Rates count prompt and output tokens; fill and drain are in the whole run's."""
        total_s = self.steps[-1][0] - submitted_s
        every, steady = [stats for _, stats in self.steps], self.steady(submitted_s)
        idle_s, run_s = sum(stats.idle_s for stats in every), sum(stats.run_s for stats in every)
        middle = [stats for _, stats in steady[1:]]
        middle_s = steady[-1][0] - steady[0][0] if middle else 0.0
        decode_only = [stats.run_s + stats.idle_s for stats in every if 0 < stats.num_decodes == stats.num_tokens]
        return {
            "total_s": round(total_s, 4),
            "tokens_per_s": round((num_prompt_tokens + num_output_tokens) / total_s, 2),
            "output_tokens_per_s": round(num_output_tokens / total_s, 2),
            "steady_tokens_per_s": round(sum(stats.num_tokens for stats in middle) / middle_s, 2) if middle_s else None,
            "num_steps": len(every),
            "mean_batch_tokens": round(_mean([stats.num_tokens for stats in every]), 2),
            "steady_batch_tokens": round(_mean([stats.num_tokens for stats in middle]), 2),
            "steady_decodes": round(_mean([stats.num_decodes for stats in middle]), 2),
            "steady_step_ms": round(_mean([stats.run_s for stats in middle]) * 1e3, 4),
            "decode_step_ms": round(_median(decode_only) * 1e3, 4),
            "mean_tpot_ms": round(self._time_per_output_token() * 1e3, 4),
            "busy_share": round(run_s / max(run_s + idle_s, 1e-9), 5),
            "idle_share": round(idle_s / max(run_s + idle_s, 1e-9), 5),
            "mean_plan_ms": round(_mean([stats.plan_s for stats in every]) * 1e3, 4),
            "late_plans": sum(stats.late for stats in every),
            "preemptions": sum(stats.num_preemptions for stats in every),
            "overlapped_time": round(sum(s.run_s for s in every if s.overlapped) / max(run_s, 1e-9), 4),
            "unmeasured_time": round(sum(s.run_s for s in every if s.unmeasured) / max(run_s, 1e-9), 4),
        }

    def _time_per_output_token(self) -> float:
        """Mean over the requests of the seconds between two of a request's tokens."""
        return _mean([(t.last_s - t.first_s) / (t.count - 1) for t in self._tokens.values() if t.count > 1])


def _mean(values: list[float] | list[int]) -> float:
    return sum(values) / len(values) if values else 0.0


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0
