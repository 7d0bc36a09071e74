"""`nanoflow cost-model`, `search`, `sweep` and `simulate`: plans from numbers, on any machine.

Each command parses, calls autosearch and prints. No torch, no Ray, no GPU. `register` adds them to an app;
`python -m control_plane.search_commands` runs them alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from autosearch.catalog import find_gpu, find_model
from autosearch.operator_times import Target
from autosearch.profile_table import ProfileTable
from autosearch.workload import from_lengths
from control_plane.cost_command import cost_model
from control_plane.planning_options import (
    GpuOption,
    InputOption,
    JsonOption,
    ModelOption,
    NumGpusOption,
    OutputOption,
    ProfileOption,
    SolverOption,
    ends_in_one_line,
    mean_lengths,
    numbers,
    say,
    search_options,
)
from control_plane.simulate_commands import simulate, sweep


def register(app: typer.Typer) -> None:
    """Add the commands to an app."""
    app.command("cost-model")(ends_in_one_line(cost_model))
    app.command("search")(ends_in_one_line(search))
    app.command("sweep")(ends_in_one_line(sweep))
    app.command("simulate")(ends_in_one_line(simulate))


def search(
    model: ModelOption,
    gpu: GpuOption,
    profile: ProfileOption,
    num_gpus: NumGpusOption = 1,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", help="B_dense of one plan. Default: the grid of buckets.")
    ] = None,
    input_len: InputOption = None,
    output_len: OutputOption = None,
    batch_sizes: Annotated[str, typer.Option(help="B_dense of the grid.")] = "512,1024,2048",
    decode_shares: Annotated[str, typer.Option(help="Decode shares of the grid.")] = "0.33,0.67",
    mean_contexts: Annotated[str, typer.Option(help="Mean contexts of the grid's decodes.")] = "512,1024",
    solver: SolverOption = "glpk",
    time_limit: Annotated[float, typer.Option(help="Seconds of one solve at most.")] = 5.0,
    gap: Annotated[float, typer.Option(help="Relative gap at which a solve may stop.")] = 0.005,
    candidates: Annotated[int, typer.Option(min=1, help="Pipelines to write beside the sequential one.")] = 3,
    collectives: Annotated[str, typer.Option(help="all_reduce, all_gather, or both.")] = "both",
    overlap: Annotated[str, typer.Option(help="all, or network: what runs beside GEMMs.")] = "all",
    expert_imbalance: Annotated[float, typer.Option(help="Rows of the busiest expert over the mean.")] = 1.0,
    ablation: Annotated[bool, typer.Option("--ablation", help="Add the predicted ablation to the report.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the schedules; also the cache.")] = None,
    reuse_similar: Annotated[
        bool, typer.Option("--reuse-similar", help="Take a similar model's plan from --out, with a warning.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Search pipelines: two MILPs, candidates, and the sequential schedule where nothing beats it."""
    from autosearch import planner
    from autosearch.schedule_store import ScheduleStore

    known, card, table = find_model(model), find_gpu(gpu), ProfileTable.from_file(profile)
    options = search_options(solver, time_limit, gap, candidates, collectives, overlap)
    lengths = mean_lengths(input_len, output_len)
    if batch_size is not None:
        works = [from_lengths(batch_size, lengths) if lengths else table.workload.resized(batch_size)]
    else:
        grid = (numbers(batch_sizes, int), numbers(decode_shares, float), numbers(mean_contexts, float))
        works = list(planner.buckets(*grid))
    store = ScheduleStore(out) if out else None
    if store:
        store.prepare()
    targets = [Target(known, card, num_gpus, work, expert_imbalance) for work in works]
    for target in targets:
        planner.check(target, table)
    reports = []
    for number, target in enumerate(targets, start=1):
        work = target.work
        say(f"[{number}/{len(works)}] {known.name}: B_dense {work.batch_tokens}, decodes {work.decode_share:.0%}")
        found = planner.plan(target, table, options, store, reuse_similar)
        for warning in found.warnings:
            say(f"warning: {warning}")
        report = {**found.report, "warnings": list(found.warnings)}
        if ablation:
            report["ablation"] = planner.ablation(target, table, options, found)
        reports.append(report)
        if not as_json:
            _print_plan(report)
    if as_json:
        print(json.dumps(reports[0] if batch_size is not None else {"buckets": reports}))


def _print_plan(report: dict[str, Any]) -> None:
    counts = ", ".join(f"{count} {name}" for name, count in report["num_nano_operations"].items())
    print(
        f"{report['plan']} ({report['collectives']}): {report['predicted_tokens_per_s_per_gpu']:.0f} tokens/s/GPU "
        f"predicted, {report['sequential_tokens_per_s_per_gpu']:.0f} sequential, "
        f"{report['share_of_optimal']:.1%} of the optimum; {report['seconds']:.1f} s"
    )
    print(f"  nano-operations: {counts}")
    for name, figure in report.get("ablation", {}).items():
        print(f"  {name}: {figure:.0f} tokens/s/GPU")


if __name__ == "__main__":
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)
    register(alone)
    alone()
