"""`nanoflow simulate` and `nanoflow sweep`: timelines and pictures from a profile."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from autosearch.catalog import find_gpu, find_model
from autosearch.errors import AutosearchError
from autosearch.operator_times import Target
from autosearch.pipeline import PipelineSchedule
from autosearch.profile_table import ProfileTable
from autosearch.workload import from_lengths
from control_plane.planning_options import (
    GpuOption,
    InputOption,
    JsonOption,
    ModelOption,
    NumGpusOption,
    OutputOption,
    ProfileOption,
    SolverOption,
    mean_lengths,
    numbers,
    say,
    search_options,
)


class Model(StrEnum):
    """Interference models that `simulate` can play."""

    PAIRWISE = "pairwise"
    TRIPLES = "triples"
    POWER = "power"


def sweep(
    model: ModelOption,
    gpu: GpuOption,
    profile: ProfileOption,
    num_gpus: NumGpusOption = 1,
    batch_sizes: Annotated[
        str, typer.Option(help="B_dense, each a multiple of 128.")
    ] = "128,256,384,512,768,1024,1536,2048,4096,8192",
    input_len: InputOption = None,
    output_len: OutputOption = None,
    solver: SolverOption = "glpk",
    time_limit: Annotated[float, typer.Option(help="Seconds of one solve at most.")] = 2.0,
    png: Annotated[Path, typer.Option(help="The plot to write.")] = Path("sweep.png"),
    as_json: JsonOption = False,
) -> None:
    """Pipeline against sequential over B_dense, with the crossover marked, as a plot."""
    from autosearch import planner, plot

    known, card, table = find_model(model), find_gpu(gpu), ProfileTable.from_file(profile)
    lengths = mean_lengths(input_len, output_len)
    options = search_options(solver, time_limit, 0.005, 1, "both", "all")
    plot.check_writable(png)
    sizes = numbers(batch_sizes, int)
    works = [from_lengths(batch, lengths) if lengths else table.workload.resized(batch) for batch in sizes]
    targets = [Target(known, card, num_gpus, work) for work in works]
    for target in targets:
        planner.check(target, table)
    points = []
    for batch, target in zip(sizes, targets):
        point = planner.sweep_point(target, table, options)
        say(f"B_dense {batch}: pipeline {point.pipeline:.0f}, sequential {point.sequential:.0f} tokens/s/GPU")
        points.append(point)
    plot.save_sweep(points, png, f"{known.name} on {num_gpus} x {card.name}, {table.name}", table.spread)
    crossover = plot.crossover(points)
    if as_json:
        print(json.dumps({"crossover": crossover, "points": [asdict(point) for point in points], "png": str(png)}))
    else:
        print(f"crossover at B_dense {crossover}; plot in {png}")


def simulate(
    schedule: Annotated[Path, typer.Argument(help="A schedule file.")],
    profile: ProfileOption,
    model: Annotated[str | None, typer.Option("--model", help="Default: the schedule's own.")] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", help="Default: the schedule's own.")] = None,
    interference: Annotated[Model, typer.Option(help="How operators slow each other down.")] = Model.PAIRWISE,
    power_budget: Annotated[
        float | None, typer.Option(help="Watts per GPU, for --interference power. Default: the card's limit.")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Also draw the Gantt chart to this file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Play a schedule on a profile and draw it, with the three resources' utilisation."""
    from autosearch import plot
    from autosearch.operator_times import OperatorTimes
    from autosearch.simulate import activities
    from autosearch.simulate import simulate as play

    plan, table = _schedule(schedule), ProfileTable.from_file(profile)
    known, card = find_model(model or plan.model), find_gpu(gpu or plan.gpu)
    work = plan.planned_for or table.workload.resized(plan.batch_tokens)
    times = OperatorTimes(table, Target(known, card, plan.num_gpus, work))
    timeline = play(plan, times, _interference(interference, table, power_budget), known.spec.num_layers)
    rows = activities(plan, times)
    rate = plan.batch_tokens / (timeline.makespan_us * 1e-6) / plan.num_gpus
    if png:
        title = f"{plan.name}: {known.name} on {plan.num_gpus} x {card.name}, {timeline.layer_us:.0f} µs per layer"
        plot.save_gantt(timeline, rows, png, title)
    window = plot.steady_window(timeline, 1.0)
    use = plot.utilisation(timeline, rows, window, 200)
    fields = {
        "schedule": plan.name,
        "interference": interference.value,
        "layer_us": timeline.layer_us,
        "iteration_us": timeline.makespan_us,
        "tokens_per_s_per_gpu": rate,
        "utilisation": {resource.value: sum(values) / len(values) for resource, values in use.items()},
    }
    if as_json:
        print(json.dumps(fields))
    else:
        print(plot.text_gantt(timeline, rows))
        print(f"{rate:.0f} tokens/s/GPU, {timeline.makespan_us / 1e3:.1f} ms per iteration")


def _schedule(path: Path) -> PipelineSchedule:
    try:
        return PipelineSchedule.from_file(path)
    except OSError as error:
        raise AutosearchError(f"schedule {path} cannot be read: {error.strerror}") from None


def _interference(kind: Model, table: ProfileTable, power_budget: float | None) -> Any:
    from autosearch.interference import MeasuredTriples, Pairwise, PowerBudget

    if kind is Model.PAIRWISE:
        return Pairwise(table)
    if kind is Model.TRIPLES:
        return MeasuredTriples(table)
    measured = table.measured_on
    budget = power_budget or measured.power_limit_w
    if budget is None or measured.static_power_w is None:
        raise AutosearchError(f"profile {table.name} has no power limit or static power: give --power-budget and one")
    return PowerBudget(Pairwise(table), budget, measured.static_power_w)
