"""Pictures of timelines and sweeps: a Gantt chart with the three resources' utilisation, as PNG or as text.

In the manner of the paper's Figures 4, 6 and 10. Knows nothing of where timelines come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autosearch.errors import AutosearchError
from autosearch.interference import Activity
from autosearch.operators import Resource
from autosearch.simulate import Span, Timeline

if TYPE_CHECKING:
    from autosearch.planner import SweepPoint  # solvers, which pictures do without

COLOURS = {
    "qkv": "#4e79a7",
    "decode_attention": "#e15759",
    "prefill_attention": "#f28e2b",
    "o": "#76b7b2",
    "up_gate": "#59a14f",
    "down": "#8cd17d",
    "experts": "#59a14f",
    "router": "#bab0ac",
    "o_all_reduce": "#b07aa1",
    "ffn_all_reduce": "#9c755f",
    "attention_all_gather": "#d4a6c8",
    "o_all_gather": "#b07aa1",
}
OTHER = "#bab0ac"  # element-wise steps
RESOURCE_COLOURS = {Resource.COMPUTE: "#59a14f", Resource.MEMORY: "#e15759", Resource.NETWORK: "#b07aa1"}
LANE_NAMES = {0: "compute lane", 1: "memory lane", 2: "network lane"}
_LETTER_WIDTH = 0.005  # of the window, in a chart's labels
_SHADES = " ▁▂▃▄▅▆▇█"


class PlotError(AutosearchError):
    """A picture that cannot be written."""


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of a timeline."""

    begin_us: float
    end_us: float

    @property
    def length_us(self) -> float:
        """Its length."""
        return self.end_us - self.begin_us


def steady_window(timeline: Timeline, layers: float = 2.0) -> Window:
    """Some layers from the steady middle."""
    middle = timeline.num_layers // 2
    begin = min(span.begin_us for span in timeline.spans if span.layer == middle)
    return Window(begin, begin + layers * timeline.layer_us)


def utilisation(
    timeline: Timeline, work: Sequence[Activity], window: Window, num_bins: int
) -> dict[Resource, list[float]]:
    """Mean rate of each resource's operations in equal parts of the window, 0 to 1."""
    width = window.length_us / num_bins
    bins = {resource: [0.0] * num_bins for resource in Resource}
    for moment in timeline.moments:
        begin, end = max(moment.begin_us, window.begin_us), min(moment.end_us, window.end_us)
        if end <= begin:
            continue
        first, last = int((begin - window.begin_us) / width), int((end - window.begin_us) / width - 1e-9)
        for position in range(first, min(last, num_bins - 1) + 1):
            low = window.begin_us + position * width
            part = (min(end, low + width) - max(begin, low)) / width
            for index, rate in zip(moment.indexes, moment.rates):
                bins[work[index].resource][position] += part * rate
    return bins


def save_gantt(
    timeline: Timeline, work: Sequence[Activity], path: Path, title: str, window: Window | None = None
) -> None:
    """Write a PNG: a row per lane with each operation's rows and SM share, and the utilisation below."""
    pyplot = headless_pyplot()
    window = window or steady_window(timeline)
    lanes = sorted({operation.lane for operation in timeline.schedule.operations})
    figure, (chart, use) = pyplot.subplots(
        2, 1, figsize=(14, 2.4 + 1.1 * len(lanes)), sharex=True, height_ratios=[max(1.2, len(lanes)), 1.2]
    )
    for span in _visible(timeline, window):
        _bar(chart, timeline, span, lanes, window)
    chart.set_yticks(range(len(lanes)), [LANE_NAMES.get(lane, f"lane {lane}") for lane in lanes])
    chart.set_ylim(len(lanes) - 0.4, -0.6)
    drawn = dict.fromkeys(timeline.schedule.operations[span.index].operator for span in _visible(timeline, window))
    patches = [pyplot.Rectangle((0, 0), 1, 1, color=COLOURS.get(name, OTHER), label=name) for name in drawn]
    chart.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    chart.set_title(title, fontsize=10, loc="left")
    bins = utilisation(timeline, work, window, 400)
    step = window.length_us / 400
    for resource, values in bins.items():
        if any(values):
            mean = sum(values) / len(values)
            use.step(
                [step * position for position in range(400)],
                values,
                where="post",
                color=RESOURCE_COLOURS[resource],
                label=f"{resource.value} {mean:.0%}",
            )
    use.set_ylim(0, 1.05)
    use.set_ylabel("utilisation")
    use.set_xlabel("µs")
    use.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)
    chart.set_xlim(0, window.length_us)
    save_figure(figure, path)


def _visible(timeline: Timeline, window: Window) -> Iterator[Span]:
    for span in timeline.spans:
        if span.end_us > window.begin_us and span.begin_us < window.end_us and span.end_us > span.begin_us:
            yield span


def _bar(chart: Any, timeline: Timeline, span: Span, lanes: list[int], window: Window) -> None:
    operation = timeline.schedule.operations[span.index]
    begin, end = max(span.begin_us, window.begin_us), min(span.end_us, window.end_us)
    row = lanes.index(operation.lane)
    odd = span.layer % 2 == 1
    chart.broken_barh(
        [(begin - window.begin_us, end - begin)],
        (row - 0.4, 0.8),
        facecolors=COLOURS.get(operation.operator, OTHER),
        edgecolor="black",
        linewidth=0.6,
        alpha=0.55 if odd else 1.0,
    )
    lines = [operation.operator, f"{operation.start}–{operation.end}", f"R {operation.sm_share:.2g}"]
    fitting = [line for line in lines if len(line) * _LETTER_WIDTH * window.length_us < end - begin]
    middle = (begin + end) / 2 - window.begin_us
    chart.text(middle, row, "\n".join(fitting), ha="center", va="center", fontsize=6.5, clip_on=True)


def text_gantt(timeline: Timeline, work: Sequence[Activity], width: int = 100, window: Window | None = None) -> str:
    """The same for a terminal: a letter per operation, capitals for even layers, and bars of utilisation."""
    window = window or steady_window(timeline, 1.0)
    lanes = sorted({operation.lane for operation in timeline.schedule.operations})
    names = list(dict.fromkeys(operation.operator for operation in timeline.schedule.operations))
    letters = _letters(names)
    cells = {lane: ["·"] * width for lane in lanes}
    for span in _visible(timeline, window):
        operation = timeline.schedule.operations[span.index]
        first = max(0, round((span.begin_us - window.begin_us) / window.length_us * width))
        last = min(width, round((span.end_us - window.begin_us) / window.length_us * width))
        for position in range(first, last):
            letter = letters[operation.operator]
            begins = position == first and span.begin_us >= window.begin_us
            cells[operation.lane][position] = "|" if begins and last - first > 1 else letter
    lines = [f"{LANE_NAMES.get(lane, f'lane {lane}'):>12} {''.join(cells[lane])}" for lane in lanes]
    for resource, values in utilisation(timeline, work, window, width).items():
        if any(values):
            bars = "".join(_SHADES[min(8, round(8 * min(1.0, value)))] for value in values)
            lines.append(f"{resource.value:>12} {bars} {sum(values) / width:.0%}")
    used = [name for name in names if any(letters[name] in row for row in cells.values())]
    lines.append(" " * 13 + "  ".join(f"{letters[name]} {name}" for name in used))
    lines.append(" " * 13 + f"one layer, {window.length_us:.0f} µs; | begins a nano-operation")
    return "\n".join(lines)


def _letters(names: Sequence[str]) -> dict[str, str]:
    """One letter each: its own first letter where that is free."""
    letters: dict[str, str] = {}
    for name in names:
        wanted = [*name.upper().replace("_", ""), *"ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
        letters[name] = next(letter for letter in wanted if letter not in letters.values())
    return letters


def crossover(points: Sequence[SweepPoint]) -> int | None:
    """The smallest batch from which on the pipeline is always kept; None where the largest is not."""
    found = None
    for point in sorted(points, key=lambda point: -point.batch_tokens):
        if not point.kept_pipeline:
            break
        found = point.batch_tokens
    return found


def save_sweep(points: Sequence[SweepPoint], path: Path, title: str, spread: float) -> None:
    """Write a PNG: throughput of pipeline and sequential schedule over B_dense, the crossover marked."""
    pyplot = headless_pyplot()
    figure, (chart, gains) = pyplot.subplots(2, 1, figsize=(9, 6.5), sharex=True, height_ratios=[2, 1])
    sizes = [point.batch_tokens for point in points]
    chart.plot(sizes, [point.sequential for point in points], "o-", color="#4e79a7", label="sequential")
    chart.plot(sizes, [point.pipeline for point in points], "s-", color="#e15759", label="best pipeline")
    kept = [point for point in points if point.kept_pipeline]
    chart.plot(
        [point.batch_tokens for point in kept],
        [point.pipeline for point in kept],
        "s",
        ms=11,
        mfc="none",
        mec="black",
        label="pipeline kept",
    )
    gains.axhspan(-100 * spread, 100 * spread, color="#dddddd", label=f"spread of the profile, {spread:.0%}")
    gains.plot(sizes, [100 * (point.pipeline / point.sequential - 1) for point in points], "s-", color="#e15759")
    gains.set_ylabel("gain, %")
    gains.set_xlabel("B_dense, tokens")
    chart.set_ylabel("predicted tokens/s/GPU")
    chart.set_xscale("log", base=2)
    gains.set_xticks(sizes, [str(size) for size in sizes], fontsize=7, rotation=45)
    chart.set_title(title, fontsize=10, loc="left")
    where = crossover(points)
    if where is not None:
        for axis in (chart, gains):
            axis.axvline(where, color="black", linestyle="--", linewidth=1)
        chart.annotate(
            f"crossover at {where}", (where, chart.get_ylim()[0]), xytext=(6, 10), textcoords="offset points"
        )
    chart.legend(frameon=False)
    gains.legend(frameon=False, fontsize=8)
    save_figure(figure, path)


def headless_pyplot() -> Any:
    """Matplotlib without a screen; imported here because it is slow and commands without plots need not wait."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def check_writable(path: Path) -> None:
    """Raise PlotError where no picture can be written: before long work, not after it."""
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise PlotError(f"picture {path} cannot be written: {error.strerror}") from None


def save_figure(figure: Any, path: Path) -> None:
    """Write a PNG and forget the figure. Raises PlotError."""
    check_writable(path)
    figure.savefig(path, dpi=120, bbox_inches="tight", format="png")
    headless_pyplot().close(figure)
