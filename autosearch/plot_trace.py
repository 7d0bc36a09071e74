"""Pictures of what a device did during one layer: operations by lane, and how busy they kept SMs, memory and network.

In the manner of the paper's Figure 10, several schedules below each other. Knows nothing of where traces come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autosearch.layer_trace import LayerTrace, TracedOperation, measured_utilisation
from autosearch.operators import Resource
from autosearch.plot import COLOURS, LANE_NAMES, OTHER, RESOURCE_COLOURS, headless_pyplot, save_figure

_NUM_BINS = 200
_NAMES = {Resource.COMPUTE: "SMs (tensor)", Resource.MEMORY: "memory", Resource.NETWORK: "network"}
_LETTER_WIDTH = 0.0055  # of the axis, in a chart's labels
_SHORTEST = 0.002  # of the axis, that is still drawn


def save_traces(traces: Sequence[LayerTrace], path: Path) -> None:
    """Write a PNG: for each trace its lanes over time and the three resources' use below. Raises PlotError."""
    pyplot, longest = headless_pyplot(), max(trace.length_us for trace in traces)
    heights = [part for trace in traces for part in (0.55 * max(1.3, len(_lanes(trace))), 1.1)]
    figure, axes = pyplot.subplots(
        2 * len(traces), 1, figsize=(13, 1.5 * sum(heights) + 0.6), sharex=True, height_ratios=heights
    )
    for number, trace in enumerate(traces):
        chart, use = axes[2 * number], axes[2 * number + 1]
        _chart(pyplot, chart, trace, longest)
        _use(use, trace)
        use.set_xlim(0, longest)
    axes[-1].set_xlabel("µs")
    figure.subplots_adjust(hspace=0.35)
    save_figure(figure, path)


def mean_use(trace: LayerTrace) -> dict[str, float]:
    """Mean over the layer by resource, for tables."""
    return {
        resource.value: sum(values) / _NUM_BINS for resource, values in measured_utilisation(trace, _NUM_BINS).items()
    }


def _lanes(trace: LayerTrace) -> list[int]:
    return sorted({operation.lane for operation in trace.operations})


def _chart(pyplot: Any, axis: Any, trace: LayerTrace, longest: float) -> None:
    lanes = _lanes(trace)
    shown = [each for each in trace.operations if each.end_us > trace.begin_us and each.begin_us < trace.end_us]
    shown = [each for each in shown if each.length_us > _SHORTEST * longest]
    for operation in shown:
        _bar(axis, trace, operation, lanes.index(operation.lane), longest)
    names = [LANE_NAMES.get(lane, f"lane {lane}") for lane in lanes] if len(lanes) > 1 else ["one lane"]
    axis.set_yticks(range(len(lanes)), names)
    axis.set_ylim(len(lanes) - 0.4, -0.6)
    drawn = dict.fromkeys(operation.operator for operation in shown)
    patches = [pyplot.Rectangle((0, 0), 1, 1, color=COLOURS.get(name, OTHER), label=name) for name in drawn]
    axis.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.1), fontsize=7, frameon=False, ncols=2)
    title = f"{trace.name}: {trace.model}, {trace.batch_tokens} rows on {trace.gpu}, {trace.length_us:.0f} µs a layer"
    axis.set_title(title, fontsize=9, loc="left")


def _bar(axis: Any, trace: LayerTrace, operation: TracedOperation, row: int, longest: float) -> None:
    begin = max(operation.begin_us, trace.begin_us) - trace.begin_us
    end = min(operation.end_us, trace.end_us) - trace.begin_us
    axis.broken_barh(
        [(begin, end - begin)],
        (row - 0.4, 0.8),
        facecolors=COLOURS.get(operation.operator, OTHER),
        edgecolor="black",
        linewidth=0.6,
        hatch="///" if operation.helps else None,
        alpha=1.0 if operation.layer == 0 else 0.5,
    )
    lines = [operation.operator, f"{operation.start}–{operation.end}", f"R {operation.sm_share:.2g}"]
    fitting = [line for line in lines if len(line) * _LETTER_WIDTH * longest < end - begin]
    axis.text((begin + end) / 2, row, "\n".join(fitting), ha="center", va="center", fontsize=6.5, clip_on=True)


def _use(axis: Any, trace: LayerTrace) -> None:
    bins, step = measured_utilisation(trace, _NUM_BINS), trace.length_us / _NUM_BINS
    edges = [step * position for position in range(_NUM_BINS + 1)]
    for resource, values in bins.items():
        mean = sum(values) / _NUM_BINS
        label = f"{_NAMES[resource]} {mean:.0%}" if trace.peaks.of(resource) else f"{_NAMES[resource]}: none or unknown"
        axis.stairs(values, edges, baseline=None, color=RESOURCE_COLOURS[resource], linewidth=1.4, label=label)
    axis.set_ylim(0, max(1.05, *(1.05 * max(values) for values in bins.values())))
    axis.set_ylabel("of the peak", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7, frameon=False)
