"""`nanoflow bench ablation`, `nanoflow bench drift` and `nanoflow plot`: parse, call, say how it ended.

Knows nothing of how anything is measured or drawn.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from control_plane.config import ALL_GROUPS, EngineConfig
from control_plane.flags import configured
from control_plane.planning_options import JsonOption, ends_in_one_line, numbers

_LOADS = "512/0x2048,512/512x2048,512/1024x1024"  # the paper's three, with the contract's requests


def register(app: typer.Typer, bench_app: typer.Typer) -> None:
    """Add `plot` to the commands, `ablation` and `drift` to the benchmarks."""
    app.command()(ends_in_one_line(plot))
    bench_app.command()(configured(ALL_GROUPS)(ends_in_one_line(ablation)))
    bench_app.command()(configured(ALL_GROUPS)(ends_in_one_line(drift)))


def ablation(
    engine: EngineConfig,
    loads: Annotated[
        str, typer.Option(metavar="IN/OUT[xN],…", help="Tokens in and out of a request, and requests of a whole run.")
    ] = _LOADS,
    nano_batches_swept: Annotated[
        str, typer.Option("--nano-batch-counts", metavar="N,N", help="Swept; the first is the nano-batch-only mode's.")
    ] = "2,3,4,5,6",
    attention_sms: Annotated[
        str | None,
        typer.Option(metavar="N,N", help="SMs of the overlapping lane to sweep.", show_default="all that can be"),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Runs of each mode, there and back.")] = 4,
    whole_runs: Annotated[
        bool, typer.Option("--whole-runs", help="All requests of each load, instead of a steady iteration.")
    ] = False,
    plot_file: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="PNG of modes and sweeps.")] = None,
    traces: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Also trace a layer of each mode, for `nanoflow plot`.")
    ] = None,
) -> None:
    """Non-overlap, nano-batches only and overlap (--schedules, as `nanoflow tune` wrote them), in turns."""
    from control_plane.bench.ablation import Options, run
    from control_plane.bench.ablation_plan import Load
    from control_plane.bench.ablation_plot import check_writable
    from control_plane.bench.ablation_steady import SteadyOptions

    if plot_file is not None:
        check_writable(plot_file)
    steady = SteadyOptions(
        tuple(numbers(nano_batches_swept, int)), tuple(numbers(attention_sms, int)) if attention_sms else ()
    )
    asked = tuple(Load.parse(load) for load in loads.split(","))
    run(engine, Options(asked, steady, whole_runs, repeats, plot_file, traces))


def drift(
    engine: EngineConfig,
    shares: Annotated[
        str, typer.Option(metavar="X,X", help="Shares of decodes in a full batch, a part of the drift each.")
    ] = "0.1,0.3,0.5,0.7,0.9",
    request_tokens: Annotated[
        int, typer.Option(min=2, metavar="N", help="Mean tokens of a request, prompt and output together.")
    ] = 512,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Runs of each plan in a part, there and back.")] = 4,
    served: Annotated[
        bool, typer.Option("--served", help="A trace through scheduler and engine, instead of steady iterations.")
    ] = False,
) -> None:
    """The choice among --schedules beside each of them and none, while the share of decodes drifts."""
    from control_plane.bench.drift import Options, run
    from worker.tuner import Effort

    run(engine, Options(tuple(numbers(shares, float)), request_tokens, served, Effort(num_repeats=repeats)))


def plot(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Traces of `nanoflow bench ablation`, or its JSON line.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The PNG to write.")],
    as_json: JsonOption = False,
) -> None:
    """Draw what a layer kept busy, as measured: SMs, memory and network over its time. Or the ablation's bars."""
    from autosearch.layer_trace import LayerTrace
    from autosearch.plot_trace import mean_use, save_traces
    from control_plane.bench.ablation_plot import read_result, save_bars

    result = read_result(files[0]) if len(files) == 1 else None
    if result is not None:
        save_bars(result[0], out, result[1])
        print(json.dumps({"png": str(out)}) if as_json else f"plot in {out}")
        return
    traces = [LayerTrace.from_file(file) for file in files]
    save_traces(traces, out)
    use = [{"schedule": trace.name, "layer_us": round(trace.length_us, 1), **mean_use(trace)} for trace in traces]
    if as_json:
        print(json.dumps({"png": str(out), "traces": use}))
        return
    for each, trace in zip(use, traces):
        shares = ", ".join(f"{name} {share:.0%}" for name, share in mean_use(trace).items())
        print(f"{each['schedule']}: {each['layer_us']} us a layer; {shares}")
    print(f"plot in {out}")
