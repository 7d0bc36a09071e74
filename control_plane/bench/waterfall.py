"""From the bound to what a run reached: which operator of a steady iteration owes how much.

While the benchmark runs, the block of a steady iteration is kept. Afterwards each operator of that iteration runs by
itself over all layers, as a graph that is replayed until power has settled: milliseconds, watts and joules. The same
is done for the GEMMs alone at every batch size that the run used, which gives the GEMM-only bound. Knows nothing of
how the engine came to its batches.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from control_plane.bench.gpu_meter import gemm_shapes
from control_plane.bench.record import Record
from scheduler.plan import StepStats
from worker.cuda_executor import CudaExecutor, Snapshot
from worker.power_meter import NvmlCard, next_step, watts_between

SETTLE_S, MEASURE_S = 1.0, 1.0  # of replaying before, and while measuring
GEMMS = ("qkv", "o", "up_gate", "down")
PARTS = (*GEMMS, "lm_head", "decode_attention", "prefill_attention", "attn_norm", "ffn_norm", "rope_append", "embed")
_EVERY_STEPS = 50  # how often an iteration is looked at


class Snapshots:
    """Keeps one iteration of those that are looked at: the one that decodes most, a full one beside a prefill first."""

    def __init__(self, executor: CudaExecutor) -> None:
        self.executor = executor
        self.latest: Snapshot | None = None
        self.stats: StepStats | None = None

    def on_step(self, stats: StepStats) -> None:
        """Called in the loop's thread, after the step's result."""
        if stats.step % _EVERY_STEPS or not stats.num_tokens:
            return
        if self.stats is None or _worth(stats) >= _worth(self.stats):
            found = self.executor.snapshot(stats.step)
            if found is not None:
                self.latest, self.stats = found, stats


def _worth(stats: StepStats) -> tuple[bool, int, int]:
    is_full_mix = 0 < stats.num_decodes < stats.num_tokens == stats.batch_tokens
    return is_full_mix, stats.num_decodes, stats.num_tokens


@dataclass(frozen=True, slots=True)
class Reading:
    """One part, sustained."""

    ms: float
    joules: float

    @property
    def watts(self) -> float:
        return self.joules / self.ms * 1e3


def waterfall(
    snapshots: Snapshots, record: Record, figures: dict[str, Any], rate: float, num_output_tokens: int
) -> dict[str, Any]:
    """Prints the table; its numbers, and the GEMM-only bound of the whole run. rate: sustained FLOP/s of GEMMs."""
    snapshot, stats, executor = snapshots.latest, snapshots.stats, snapshots.executor
    if snapshot is None or stats is None:
        print("no iteration was kept for the breakdown: the run was too short", file=sys.stderr, flush=True)
        return {"breakdown": None}
    card = NvmlCard()
    # The whole one first, while the card is as warm as in the run: operators that draw little let its clock rise.
    whole = _sustained(executor, card, snapshot, PARTS, seconds=2 * MEASURE_S)
    parts = {name: _sustained(executor, card, snapshot, (name,)) for name in PARTS}
    spec = executor.spec
    ideal_ms = stats.num_tokens * spec.num_layers * 2 * sum(n * k for n, k in gemm_shapes(spec)) / rate * 1e3
    bound_s = _gemm_only_s(executor, card, snapshot, record)
    samples = stats.num_decodes or stats.num_tokens  # rows that lm_head ran on; of prefills alone hardly any
    bound_s += num_output_tokens * parts["lm_head"].ms / samples / 1e3
    table = {name: _row(reading, whole) for name, reading in {**parts, "whole iteration": whole}.items()}
    table["the same in the run"] = {"ms": round(stats.run_s * 1e3, 3), "share": round(stats.run_s * 1e3 / whole.ms, 4)}
    steps = _waterfall(parts, whole, ideal_ms, stats, figures)
    _show(table, steps, stats)
    return {
        "gemm_bound_tokens_per_s": round(figures["tokens_per_s"] * figures["total_s"] / bound_s, 1),
        "share_of_gemm_bound": round(bound_s / figures["total_s"], 4),
        "breakdown": table,
        "waterfall": steps,
        "snapshot": {"rows": stats.num_tokens, "decodes": stats.num_decodes},
    }


def _row(reading: Reading, whole: Reading) -> dict[str, float]:
    return {
        "ms": round(reading.ms, 3),
        "share": round(reading.ms / whole.ms, 4),
        "joules": round(reading.joules, 3),
        "watts": round(reading.watts, 1),
    }


def _show(table: dict[str, dict[str, float]], steps: list[tuple[str, float, float]], stats: StepStats) -> None:
    """Both tables on stderr."""
    lines = [f"one iteration of {stats.num_tokens} rows, {stats.num_decodes} of them decodes, each operator by itself:"]
    for name, row in table.items():
        energy = f" {row['joules']:>8.3f} J {row['watts']:>6.0f} W" if "joules" in row else ""
        lines.append(f"  {name:<20}{row['ms']:>9.3f} ms {row['share']:>7.1%}{energy}")
    lines.append(f"from the bound to what was reached, always for {stats.num_tokens} tokens:")
    lines += [f"  {what:<62}{ms:>9.3f} ms {rate:>10.0f} tokens/s" for what, ms, rate in steps]
    print("\n".join(lines), file=sys.stderr, flush=True)


def _waterfall(
    parts: dict[str, Reading], whole: Reading, ideal_ms: float, stats: StepStats, figures: dict[str, Any]
) -> list[tuple[str, float, float]]:
    """(what, milliseconds that it adds, tokens/s once it is counted in), from the bound down.

    All is for as many tokens as the iteration has: what iterations with fewer of them take longer for these counts too.
    """
    tokens = stats.num_tokens
    gemm_ms = sum(parts[name].ms for name in GEMMS)
    summed = sum(part.ms for part in parts.values())
    added = [
        ("the layers' GEMMs at the rate of cuBLAS at 2,048 rows", ideal_ms),
        ("wave loss and tiles", gemm_ms - ideal_ms),
        ("lm_head and sampling", parts["lm_head"].ms),
        ("decode attention", parts["decode_attention"].ms),
        ("prefill attention", parts["prefill_attention"].ms),
        (
            "norms, RoPE + append, embedding",
            sum(parts[n].ms for n in ("attn_norm", "ffn_norm", "rope_append", "embed")),
        ),
        ("together rather than apart (overlap, launches, caches)", whole.ms - summed),
        ("the clock that the card holds in the run", stats.run_s * 1e3 - whole.ms),
        ("idle until the next iteration", stats.run_s * 1e3 * figures["idle_share"] / max(figures["busy_share"], 1e-9)),
    ]
    steps, total = [], 0.0
    for what, ms in added:
        total += ms
        steps.append((what, round(ms, 3), round(tokens / total * 1e3, 1)))
    for what, rate in _averages(figures):
        ms = tokens / rate * 1e3 - total
        total += ms
        steps.append((what, round(ms, 3), rate))
    return steps


def _averages(figures: dict[str, Any]) -> list[tuple[str, float]]:
    """What stands between one iteration and the run, most of it batches that are not full: (what, tokens/s)."""
    found = []
    if figures["steady_tokens_per_s"] is not None:
        rows, decodes = round(figures["steady_batch_tokens"]), round(figures["steady_decodes"])
        what = f"steady middle: {rows} rows on average, {decodes} of them decodes"
        found.append((what, figures["steady_tokens_per_s"]))
    rows = round(figures["mean_batch_tokens"])
    return [*found, (f"fill and drain (whole run): {rows} rows on average", figures["tokens_per_s"])]


def _gemm_only_s(executor: CudaExecutor, card: NvmlCard, snapshot: Snapshot, record: Record) -> float:
    """Seconds of the layers' GEMMs of all the run's iterations, at the batch sizes that they had."""
    used = Counter(stats.batch_tokens for _, stats in record.steps if stats.num_tokens)  # others only moved pages
    total_s = 0.0
    for rows, count in used.items():
        # Rare sizes are not worth a second each.
        seconds = MEASURE_S if count > len(record.steps) / 50 else MEASURE_S / 10
        total_s += count * _sustained(executor, card, snapshot, GEMMS, rows, seconds).ms / 1e3
    return total_s


def _sustained(
    executor: CudaExecutor,
    card: NvmlCard,
    snapshot: Snapshot,
    parts: tuple[str, ...],
    rows: int | None = None,
    seconds: float = MEASURE_S,
) -> Reading:
    """Replay the parts of the iteration over all layers until power has settled."""
    replay = executor.replay(snapshot, parts, rows)
    _run_for(SETTLE_S * min(1.0, seconds / MEASURE_S), replay, card)
    return _run_for(seconds, replay, card)


def _run_for(seconds: float, replay: Callable[[], None], card: NvmlCard) -> Reading:
    """So long, and on to a step of the card's energy counter at both ends: in between it is not exact."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    count = 0

    def keep_busy() -> None:
        nonlocal count
        for _ in range(4):
            replay()
        count += 4
        end.record()
        end.synchronize()

    begin.record()
    start, first = time.perf_counter(), next_step(card, keep_busy)
    while time.perf_counter() - start < seconds:
        keep_busy()
    watts = watts_between(first, next_step(card, keep_busy))
    ms = begin.elapsed_time(end) / count
    return Reading(ms, (watts or 0.0) * ms / 1e3)
