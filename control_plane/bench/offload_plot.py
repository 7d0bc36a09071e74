"""Pictures of `bench offload`: hit rate over the store's budget beside the ideal LRU, and times to first tokens.

Knows nothing of how the figures came about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autosearch import plot
from control_plane.bench.offload_sweeps import Point
from control_plane.options import ConfigError

_TIERS = (("gpu_hits_pct", "GPU", "#4e79a7"), ("cpu_hits_pct", "CPU", "#59a14f"), ("ssd_hits_pct", "SSD", "#f28e2b"))


def save_hit_rates(points: Sequence[Point], path: Path, title: str) -> None:
    """Write a PNG: pages hit by tier, stacked, over tokens of the CPU tier; the ideal LRU and the endless cache."""
    figure, axis = _pyplot().subplots(figsize=(7.5, 4.5))
    rows = [point.row() for point in points]
    budgets = [point.node.cpu_pages * point.page_tokens / 1e3 for point in points]
    tiers = [(name, label, colour) for name, label, colour in _TIERS if any(row[name] for row in rows)]
    axis.stackplot(
        budgets,
        *([row[name] for row in rows] for name, _, _ in tiers),
        labels=[f"hit on {label}" for _, label, _ in tiers],
        colors=[colour for _, _, colour in tiers],
        alpha=0.75,
    )
    axis.plot(
        budgets, [row["ideal_lru_pct"] for row in rows], "ko--", ms=4, label="ideal LRU of the largest tier's size"
    )
    axis.axhline(rows[0]["endless_pct"], color="#e15759", linewidth=1, label="a cache that never forgets")
    axis.set_ylim(0, 100)
    axis.set_xlim(budgets[0], budgets[-1])
    axis.set_xlabel("tokens that the store's CPU tier holds, thousands")
    axis.set_ylabel("pages of prompts, %")
    axis.set_title(f"Pages that need not be computed: {title}", fontsize=10, loc="left")
    axis.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _save(figure, path)


def save_times(times: Mapping[str, Sequence[float]], path: Path, title: str) -> None:
    """Write a PNG: how many requests had their first token by when. times: seconds by label."""
    figure, axis = _pyplot().subplots(figsize=(7.5, 4.5))
    for (label, values), colour in zip(times.items(), ("#e15759", "#59a14f", "#4e79a7", "#f28e2b")):
        ordered: list[Any] = sorted(1e3 * value for value in values)
        shares = [100 * (i + 1) / len(ordered) for i in range(len(ordered))]
        axis.step(ordered, shares, where="post", color=colour, label=label)
    axis.set_xscale("log")
    axis.set_ylim(0, 101)
    axis.set_xlabel("time to first token, ms")
    axis.set_ylabel("requests, %")
    axis.grid(alpha=0.3)
    axis.set_title(title, fontsize=10, loc="left")
    axis.legend(frameon=False, fontsize=8, loc="lower right")
    _save(figure, path)


def check_writable(path: Path) -> None:
    """Raise ConfigError where no picture can be written: before long work, not after it."""
    try:
        plot.check_writable(path)
    except plot.PlotError as error:
        raise ConfigError(f"plot: {error}") from None


def _pyplot() -> Any:
    """Matplotlib without a screen; imported here because it is slow."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=120, bbox_inches="tight", format="png")
    _pyplot().close(figure)
