"""Pictures of `bench ablation`: modes of each load with their spread and gain, and the sweeps below.

Knows nothing of how the figures came about.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autosearch import plot
from control_plane.bench.ablation_plan import Mode
from control_plane.bench.ablation_table import LoadResult, Row
from control_plane.options import ConfigError

_COLOURS = {Mode.NON_OVERLAP: "#bab0ac", Mode.NANO_BATCH: "#4e79a7", Mode.OVERLAP: "#e15759"}
_LINES = ("#e15759", "#4e79a7", "#59a14f", "#f28e2b", "#b07aa1")
_WIDTH = 0.26  # of a bar; loads are 1 apart


def save_bars(results: Sequence[LoadResult], path: Path, title: str) -> None:
    """Write a PNG: medians as bars, least to most as whiskers, the gain over non-overlap above them."""
    pyplot = plot.headless_pyplot()
    swept = any(result.nano_batches or result.shares for result in results)
    figure = pyplot.figure(figsize=(9, 7.5 if swept else 4.2))
    grid = figure.add_gridspec(2 if swept else 1, 2, height_ratios=[1.3, 1] if swept else [1], hspace=0.35)
    _bars(figure.add_subplot(grid[0, :]), results, title)
    if swept:
        counts, shares = figure.add_subplot(grid[1, 0]), figure.add_subplot(grid[1, 1])
        _lines(counts, results, [result.nano_batches for result in results], "nano-batches, nothing overlapped")
        _lines(shares, results, [result.shares for result in results], "SMs of the overlapping lane (0: sequential)")
        counts.set_ylabel("speed over sequential, %")
    plot.save_figure(figure, path)


def _bars(axis: Any, results: Sequence[LoadResult], title: str) -> None:
    highest = max(max(row.tokens_per_s) for result in results for row in result.modes)
    for mode in Mode:
        for position, result in enumerate(results):
            row = result.mode(mode)
            if row is None:
                continue
            at = position + (list(Mode).index(mode) - 1) * _WIDTH
            low, high = row.median - min(row.tokens_per_s), max(row.tokens_per_s) - row.median
            axis.bar(at, row.median, _WIDTH * 0.92, color=_COLOURS[mode], yerr=[[low], [high]], capsize=3)
            top = max(row.tokens_per_s)
            axis.text(at, top + 0.012 * highest, f"{result.gain(row):.3f}×", ha="center", va="bottom", fontsize=8)
    patches = [axis.bar(0, 0, color=_COLOURS[mode], label=str(mode)) for mode in Mode]
    axis.legend(handles=patches, frameon=False, fontsize=8, ncols=3, loc="upper left")
    axis.set_ylim(0, 1.2 * highest)
    axis.set_xticks(range(len(results)), [result.load for result in results])
    axis.set_xlabel("prompt/output tokens of a request")
    axis.set_ylabel("tokens/s")
    axis.set_title(f"Ablation: {title}", fontsize=10, loc="left")


def _lines(axis: Any, results: Sequence[LoadResult], sweeps: Sequence[Sequence[Row]], label: str) -> None:
    """Gain over each sweep's first row, which is the sequential schedule."""
    ticks: set[int] = set()
    for result, rows, colour in zip(results, sweeps, _LINES):
        if rows:
            gains = [100 * (row.median / rows[0].median - 1) for row in rows]
            errors = [50 * row.spread * row.median / rows[0].median for row in rows]
            names = [int(row.name) for row in rows]
            axis.errorbar(names, gains, yerr=errors, fmt="o-", ms=4, capsize=2, color=colour, label=result.load)
            ticks.update(names)
    axis.set_xticks(sorted(ticks))
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_xlabel(label)
    axis.tick_params(labelsize=8)
    if ticks:
        axis.legend(frameon=False, fontsize=8)


def title_of(found: Mapping[str, Any]) -> str:
    """What a result's figures are of."""
    return f"{found['of']}, {found['model']}, {found['device']}"


def read_result(path: Path) -> tuple[list[LoadResult], str] | None:
    """The loads and the title of a file whose last line is a result of the ablation; None for another file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        found = json.loads(lines[-1]) if lines else None
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or found.get("benchmark") != "ablation":
        return None
    try:
        return [LoadResult.from_json(load) for load in found["loads"]], title_of(found)
    except (KeyError, TypeError, IndexError):
        raise ConfigError(f"{path}: some fields of the ablation's result are missing") from None


def check_writable(path: Path) -> None:
    """Raise ConfigError where no picture can be written: before long work, not after it."""
    try:
        plot.check_writable(path)
    except plot.PlotError as error:
        raise ConfigError(f"plot: {error}") from None
