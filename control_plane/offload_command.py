"""`nanoflow bench offload`: what a KV store saves, simulated, on a real engine, and how fast it reads a disk.

Each command parses and calls; `register` adds them to an app. Knows nothing of how anything is measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from control_plane.bench.offload_options import SimulationOptions, Sweep

_DEFAULTS = SimulationOptions()


def register(app: typer.Typer) -> None:
    """Add `offload` to the benchmarks; alone, it is `offload simulate`."""
    offload = typer.Typer(help="Multi-round conversations with and without a KV store.", invoke_without_command=True)
    offload.callback()(alone)
    offload.command()(simulate)
    app.add_typer(offload, name="offload")


def alone(context: typer.Context) -> None:
    """What a KV store saves on multi-round conversations. Without a command: `simulate` as it is by default."""
    if context.invoked_subcommand is None:
        simulate()


def simulate(
    rounds: Annotated[
        Path, typer.Option(metavar="FILE", help="CSV of conversations.", show_default="the committed ones")
    ] = _DEFAULTS.rounds,
    mooncake: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A trace with block identities, instead of the rounds.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Conversations (of a trace: requests) at most.")
    ] = None,
    page_size: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of a KV page.")] = _DEFAULTS.page_size,
    gpu_tokens: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens that an engine's own KV cache holds.")
    ] = _DEFAULTS.gpu_tokens,
    cpu_tokens: Annotated[
        int, typer.Option(min=0, metavar="N", help="Tokens that the store's CPU tier holds; 0: no store.")
    ] = _DEFAULTS.cpu_tokens,
    ssd_tokens: Annotated[
        int, typer.Option(min=0, metavar="N", help="Tokens that its SSD tier holds.")
    ] = _DEFAULTS.ssd_tokens,
    ssd_after_hits: Annotated[
        int, typer.Option(min=0, metavar="N", help="Hits after which a page is copied to SSD.")
    ] = _DEFAULTS.ssd_after_hits,
    num_engines: Annotated[
        int, typer.Option(min=1, metavar="N", help="Engines that share the store; requests go to them at random.")
    ] = _DEFAULTS.num_engines,
    sweep: Annotated[
        list[Sweep] | None, typer.Option(metavar="NAME", help=f"Also vary this: {', '.join(Sweep)}; may be repeated.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PNG of the hit rate over the CPU budget, ideal LRU beside.")
    ] = None,
) -> None:
    """The scheduler and the store alone, on a device that only counts: hit rates beside an ideal LRU, compute saved."""
    from control_plane.bench.offload_sweeps import run

    run(
        SimulationOptions(
            rounds=rounds,
            mooncake=mooncake,
            limit=limit,
            page_size=page_size,
            gpu_tokens=gpu_tokens,
            cpu_tokens=cpu_tokens,
            ssd_tokens=ssd_tokens,
            ssd_after_hits=ssd_after_hits,
            num_engines=num_engines,
            sweeps=tuple(sweep or ()),
            plot=plot,
        )
    )
