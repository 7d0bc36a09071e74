"""What `bench offload engine` found, as rows and tables. Knows nothing of engines or how they were asked."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from control_plane.bench.offload_player import Answer
from control_plane.bench.offload_table import print_table

WITH, WITHOUT = "with the store", "without"
AGAIN = "computed again"


@dataclass(slots=True)
class Turn:
    """One play of the rounds."""

    label: str  # WITH or WITHOUT
    answers: dict[str, Answer]
    num_computed: int  # prompt tokens, recomputed ones too
    num_dropped: int  # pages that the store was not given
    total_s: float


@dataclass(slots=True)
class Returns:
    """Times to the first token of a returning conversation, in seconds, and tokens that were cached, by where from."""

    ttft_s: dict[str, list[float]] = field(default_factory=dict)
    cached: dict[str, list[int]] = field(default_factory=dict)

    def add(self, label: str, answer: Answer) -> None:
        """One more."""
        assert answer.end is not None, "the request has not ended"
        self.ttft_s.setdefault(label, []).append(answer.ttft_s)
        self.cached.setdefault(label, []).append(answer.end.num_cached_tokens)


def answers_of(label: str, turns: Sequence[Turn]) -> list[Answer]:
    """Of all turns of a kind."""
    return [answer for turn in turns if turn.label == label for answer in turn.answers.values()]


def turn_row(label: str, turns: Sequence[Turn]) -> dict[str, Any]:
    """Of all turns of a kind: times over all their requests, tokens per turn."""
    answers, mine = answers_of(label, turns), [turn for turn in turns if turn.label == label]
    ends = [answer.end for answer in answers if answer.end is not None]
    in_store = [end.num_cpu_cached_tokens + end.num_ssd_cached_tokens for end in ends]
    return {
        "label": label,
        **{f"ttft_{name}_ms": value for name, value in _times([answer.ttft_s for answer in answers]).items()},
        **{f"latency_{name}_ms": value for name, value in _times([answer.latency_s for answer in answers]).items()},
        "total_s": round(statistics.median(turn.total_s for turn in mine), 2),
        "prompt_tokens": sum(answer.prompt_len for answer in answers) // len(mine),
        "computed_tokens": sum(turn.num_computed for turn in mine) // len(mine),
        "gpu_cached_tokens": sum(end.num_cached_tokens - part for end, part in zip(ends, in_store)) // len(mine),
        "cpu_cached_tokens": sum(end.num_cpu_cached_tokens for end in ends) // len(mine),
        "ssd_cached_tokens": sum(end.num_ssd_cached_tokens for end in ends) // len(mine),
        "dropped_pages": sum(turn.num_dropped for turn in mine) // len(mine),
    }


def return_row(label: str, returns: Returns) -> dict[str, Any]:
    """Times from one place, beside computing again."""
    times = _times(returns.ttft_s[label])
    again = _times(returns.ttft_s[AGAIN])
    return {
        "label": label,
        "count": len(returns.ttft_s[label]),
        "cached_tokens": min(returns.cached[label]),
        **{f"ttft_{name}_ms": value for name, value in times.items()},
        "times_faster": round(again["p50"] / times["p50"], 2),
    }


def compare(turns: Sequence[Turn]) -> dict[str, int]:
    """Outputs of every later turn beside the first one's."""
    pairs = [
        (answer.token_ids, turns[0].answers[request_id].token_ids)
        for turn in turns[1:]
        for request_id, answer in turn.answers.items()
    ]
    return {"compared": len(pairs), "equal": sum(one == other for one, other in pairs)}


def show(rows: Sequence[dict[str, Any]], back: Sequence[dict[str, Any]], return_len: int) -> None:
    """Print what there is of the two parts."""
    if rows:
        names = [f"{what} {name}" for what in ("ttft", "latency") for name in ("mean", "p50", "p99")]
        times = {f"{name.replace(' ', '_')}_ms": name for name in names}
        tokens = {f"{tier}_cached_tokens": f"from {tier.upper()}" for tier in ("gpu", "cpu", "ssd")}
        columns = {"label": "", **times, "total_s": "total s", "computed_tokens": "computed", **tokens}
        print_table("rounds: times in ms, prompt tokens of a turn", rows, columns)
    if back:
        columns = {"label": "", "ttft_p50_ms": "TTFT p50 ms", "ttft_mean_ms": "mean", "ttft_p99_ms": "p99"}
        columns |= {"cached_tokens": "cached tokens", "times_faster": "times faster"}
        print_table(f"a conversation of {return_len} tokens returns", back, columns)


def _times(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(1e3 * value for value in seconds)
    last = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {
        "mean": round(statistics.fmean(ordered), 2),
        "p50": round(statistics.median(ordered), 2),
        "p99": round(last, 2),
    }
