"""`bench offload simulate`: hit rates by tier beside an ideal LRU, compute saved, bytes moved for nothing; and sweeps.

Budgets are given in tokens, so that pages of several sizes can stand side by side. Knows nothing of models.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from control_plane.bench.offload_device import Timing
from control_plane.bench.offload_options import SimulationOptions, Sweep
from control_plane.bench.offload_rounds import MAX_TOKENS, Conversation, read
from control_plane.bench.offload_simulation import Node, Outcome, simulate
from control_plane.bench.offload_table import print_table
from control_plane.bench.offload_work import (
    BLOCK_PAGE,
    BLOCK_TOKENS,
    Session,
    read_blocks,
    scaled,
    select,
    sessions_of,
)
from control_plane.options import ConfigError

KV_BYTES_PER_TOKEN = 131_072  # of LLaMA-3-8B in bfloat16: 32 layers, K and V, 8 heads of 128
_LONGEST_TRACE = 1 << 14  # tokens that stand for a trace's longest prompt
_MAX_GPU_PAGES, _MAX_STORE_PAGES = 1 << 24, 1 << 30  # Python's objects and the store's records have to fit here
_BUDGETS = (0, *(1 << power for power in range(16, 21)))  # tokens
_TRACE_BUDGETS = (0, *(1_000_000 * millions for millions in (1, 3, 10, 25, 50)))  # tokens


@dataclass(frozen=True, slots=True)
class Point:
    """One play and what came of it."""

    sweep: str
    label: str
    node: Node
    page_tokens: int
    outcome: Outcome

    def row(self) -> dict[str, Any]:
        """The figures. Rates in per cent of the pages asked for, bytes as LLaMA-3-8B's."""
        got, asked = self.outcome, max(self.outcome.asked_pages, 1)
        per_page = self.page_tokens * KV_BYTES_PER_TOKEN / 1e6
        decodes = got.num_output_tokens - got.num_requests
        scale = self.page_tokens // self.node.page_size  # tokens that one stands for
        return {
            "sweep": self.sweep,
            "point": self.label,
            "requests": got.num_requests,
            "gpu_hits_pct": _percent(got.gpu_hits, asked),
            "cpu_hits_pct": _percent(got.cpu_hits, asked),
            "ssd_hits_pct": _percent(got.ssd_hits, asked),
            "all_hits_pct": _percent(got.hits, asked),
            "ideal_lru_pct": _percent(got.ideal_hits, asked),
            "endless_pct": _percent(got.endless_hits, asked),
            "points_below_ideal": round(got.points_below_ideal(), 2),
            "prefill_tokens": scale * got.num_prompt_tokens,
            "computed_tokens": scale * got.num_computed_tokens,
            "saved_of_ideal_pct": _percent(got.saved_share, 1),
            "times_less_prefill": round(got.num_prompt_tokens / max(got.num_computed_tokens, 1), 2),
            "times_less_compute": round(
                (got.num_prompt_tokens + decodes) / max(got.num_computed_tokens + decodes, 1), 2
            ),
            "loaded_mb": round(got.traffic.num_loaded * per_page),
            "stored_mb": round(got.traffic.num_stored * per_page),
            "loaded_twice_mb": round(got.traffic.num_loaded_twice * per_page),
            "stored_twice_mb": round(got.traffic.num_stored_twice * per_page),
            "kept_twice_mb": round((got.pages_in_stores - got.distinct_in_stores) * per_page),
            "on_cpu_and_ssd_mb": round(got.pages_on_both * per_page),
            "preemptions": got.num_preemptions,
        }


def node_of(options: SimulationOptions) -> Node:
    """In pages. Raises ConfigError for budgets below a page, or far beyond any memory."""
    page = BLOCK_TOKENS if options.mooncake else options.page_size
    if options.gpu_tokens < page:
        raise ConfigError(f"gpu-tokens is {options.gpu_tokens}: one page of {page} tokens is the least")
    for name, most in (("gpu", _MAX_GPU_PAGES), ("cpu", _MAX_STORE_PAGES), ("ssd", _MAX_STORE_PAGES)):
        tokens = getattr(options, f"{name}_tokens")
        if tokens > most * page:
            raise ConfigError(f"{name}-tokens is {tokens}: at most {most * page}, which is {most} pages, can be played")
    node = Node(
        page_size=BLOCK_PAGE if options.mooncake else options.page_size,
        gpu_pages=options.gpu_tokens // page,
        cpu_pages=options.cpu_tokens // page,
        ssd_pages=options.ssd_tokens // page,
        ssd_after_hits=options.ssd_after_hits,
        num_engines=options.num_engines,
    )
    if options.mooncake and not options.timed:
        return replace(node, timing=Timing(1e-4, 0.0, 0.0))
    scale = page // node.page_size  # tokens that one stands for
    timing = Timing(node.timing.step_s, scale * node.timing.token_s, page / 64 * node.timing.load_page_s)
    return replace(node, batch_tokens=node.batch_tokens // scale, timing=timing)


def run(options: SimulationOptions) -> dict[str, Any]:
    """Play, print tables and, last, one JSON line, which is returned. Raises ConfigError."""
    node = node_of(options)
    sweeps = options.sweeps
    if options.plot is not None:
        from control_plane.bench.offload_plot import check_writable, save_hit_rates

        check_writable(options.plot)
        sweeps = tuple(dict.fromkeys((*sweeps, Sweep.CPU)))
    if options.mooncake is not None and set(sweeps) - {Sweep.CPU, Sweep.SSD}:
        raise ConfigError("a trace of blocks can be swept over the budgets only: cpu and ssd")
    setting = _setting(options, node)
    print(f"offload, simulated: {setting}", file=sys.stderr, flush=True)
    points = []
    for point in _plays(options, node, sweeps):
        points.append(point)
        print(f"  {point.sweep} {point.label}: {point.row()['all_hits_pct']} %", file=sys.stderr, flush=True)
    _show(points)
    if options.plot is not None:
        save_hit_rates([point for point in points if point.sweep == Sweep.CPU], options.plot, str(setting["work"]))
    result = {**setting, "rows": [point.row() for point in points]}
    print(json.dumps(result), flush=True)
    return result


def _setting(options: SimulationOptions, node: Node) -> dict[str, Any]:
    return {
        "benchmark": "offload-simulation",
        "work": (options.mooncake or options.rounds).name,
        "limit": options.limit,
        "page_tokens": BLOCK_TOKENS if options.mooncake else options.page_size,
        "gpu_tokens": options.gpu_tokens,
        "cpu_tokens": options.cpu_tokens,
        "ssd_tokens": options.ssd_tokens,
        "ssd_after_hits": options.ssd_after_hits,
        "num_engines": options.num_engines,
        "timed": options.timed or not options.mooncake,
        "python": platform.python_version(),
    }


def _plays(options: SimulationOptions, node: Node, sweeps: Sequence[Sweep]) -> Iterator[Point]:
    if options.mooncake is not None:
        blocks = read_blocks(options.mooncake, options.limit)
        page, longest = BLOCK_TOKENS, _LONGEST_TRACE
        work: Sequence[Session] = blocks
        conversations: list[Conversation] = []
    else:
        conversations = read(options.rounds)[: options.limit]
        page, longest = options.page_size, max(MAX_TOKENS, *(each.num_tokens for each in conversations)) + 1
        work = sessions_of(conversations)

    def play(sweep: str, label: str, node: Node, sessions: Sequence[Session] = work, tokens: int = page) -> Point:
        return Point(sweep, label, node, tokens, simulate(node, sessions, longest))

    given = play("as given", f"{options.cpu_tokens >> 10}k tokens of CPU", node)
    if not given.outcome.asked_pages:
        raise ConfigError(f"no prompt fills a page of {page} tokens, so nothing can be hit: give longer ones")
    yield given
    for sweep in sweeps:
        if sweep in (Sweep.CPU, Sweep.SSD):
            yield from _budgets(sweep, node, page, play)
        else:
            yield from _variants(sweep, options, node, conversations, play)


def _budgets(sweep: Sweep, node: Node, page: int, play: Callable[..., Point]) -> Iterator[Point]:
    sizes = _TRACE_BUDGETS if page == BLOCK_TOKENS else _BUDGETS
    for tokens in sizes:
        pages = tokens // page
        if sweep is Sweep.CPU:
            yield play(sweep, f"{tokens // 1000}k tokens", replace(node, cpu_pages=pages, ssd_pages=0))
            continue
        small = replace(node, cpu_pages=sizes[2] // page, ssd_pages=pages)
        for hits in (0, 2) if tokens else (0,):
            label = f"{tokens // 1000}k tokens" + (f", after {hits} hits" if tokens else "")
            yield play(sweep, label, replace(small, ssd_after_hits=hits))


def _variants(
    sweep: Sweep,
    options: SimulationOptions,
    node: Node,
    conversations: Sequence[Conversation],
    play: Callable[..., Point],
) -> Iterator[Point]:
    if sweep is Sweep.ROUNDS:
        for most in (1, 2, 3, 5, 8):
            yield play(sweep, f"at most {most}", node, sessions_of(select(conversations, max_rounds=most)))
    elif sweep is Sweep.SHARE:
        for share in (0.0, 0.25, 0.5, 0.75, 1.0):
            chosen = select(conversations, multi_round_share=share)
            yield play(sweep, f"{share:.0%} go on", node, sessions_of(chosen))
    elif sweep is Sweep.LENGTH:
        for factor in (0.25, 0.5, 1.0, 2.0, 4.0):
            chosen = scaled(conversations, factor, MAX_TOKENS)
            yield play(sweep, f"× {factor:g}", node, sessions_of(chosen))
    elif sweep is Sweep.ENGINES:
        half = replace(node, gpu_pages=node.gpu_pages // 2)
        none = replace(half, num_engines=2, cpu_pages=0, ssd_pages=0)
        yield play(sweep, "1", node)
        yield play(sweep, "2, no store", none)
        yield play(sweep, "2, a store each", replace(half, num_engines=2, is_shared=False))
        yield play(sweep, "2, one store", replace(half, num_engines=2))
    elif sweep is Sweep.PAGE:
        for size in (16, 32, 64, 128):
            resized = node_of(replace(options, page_size=size))
            yield play(sweep, f"{size} tokens", resized, tokens=size)


def _show(points: Sequence[Point]) -> None:
    for sweep in dict.fromkeys(point.sweep for point in points):
        rows = [point.row() for point in points if point.sweep == sweep]
        print_table(
            f"sweep of {sweep}" if sweep != "as given" else sweep,
            rows,
            {
                "point": "",
                "gpu_hits_pct": "GPU %",
                "cpu_hits_pct": "CPU %",
                "ssd_hits_pct": "SSD %",
                "all_hits_pct": "all %",
                "ideal_lru_pct": "ideal LRU %",
                "endless_pct": "endless %",
                "saved_of_ideal_pct": "saved of ideal %",
                "times_less_prefill": "less prefill",
                "times_less_compute": "with decodes",
                "loaded_mb": "loaded MB",
                "loaded_twice_mb": "twice",
                "kept_twice_mb": "kept twice MB",
            },
        )


def _percent(part: float, whole: float) -> float:
    return round(100 * part / whole, 2)
