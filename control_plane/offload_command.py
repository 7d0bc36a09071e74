"""`nanoflow bench offload`: what a KV store saves, simulated and on a real engine; how fast its disk and link are.

Each command parses and calls; `register` adds them to an app. Knows nothing of how anything is measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from control_plane.bench.offload_options import DiskOptions, EngineOptions, LinkOptions, SimulationOptions, Sweep
from control_plane.config import ALL_GROUPS, EngineConfig
from control_plane.flags import configured

_DEFAULTS, _ENGINE, _DISK, _LINK = SimulationOptions(), EngineOptions(), DiskOptions(Path(".")), LinkOptions()


def register(app: typer.Typer) -> None:
    """Add `offload` to the benchmarks; alone, it is `offload simulate`."""
    offload = typer.Typer(help="Multi-round conversations with and without a KV store.", invoke_without_command=True)
    offload.callback()(alone)
    offload.command()(simulate)
    offload.command()(configured(ALL_GROUPS)(engine))
    offload.command()(disk)
    offload.command()(link)
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
        int, typer.Option(min=0, max=255, metavar="N", help="Hits after which a page is copied to SSD.")
    ] = _DEFAULTS.ssd_after_hits,
    num_engines: Annotated[
        int,
        typer.Option(min=1, max=1024, metavar="N", help="Engines that share the store; requests go to them at random."),
    ] = _DEFAULTS.num_engines,
    timed: Annotated[
        bool, typer.Option("--timed", help="Play a trace at a GPU's speed; by default its order alone counts.")
    ] = False,
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
            timed=timed,
            sweeps=tuple(sweep or ()),
            plot=plot,
        )
    )


def engine(
    engine: EngineConfig,
    rounds: Annotated[
        Path, typer.Option(metavar="FILE", help="CSV of conversations.", show_default="the committed ones")
    ] = _ENGINE.rounds,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="Conversations at most.")] = _ENGINE.limit,
    length_scale: Annotated[
        float, typer.Option(min=0.001, metavar="X", help="Of the lengths of prompts and answers.")
    ] = _ENGINE.length_scale,
    at_once: Annotated[
        int, typer.Option(min=0, metavar="N", help="Conversations in play; 0: they begin when the file says.")
    ] = _ENGINE.at_once or 0,
    time_scale: Annotated[float, typer.Option(min=0, metavar="X", help="Of arrivals and pauses.")] = _ENGINE.time_scale,
    repeats: Annotated[
        int, typer.Option(min=0, metavar="N", help="Turns with the store and as many without.")
    ] = _ENGINE.repeats,
    return_len: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens of the conversation that returns.")
    ] = _ENGINE.return_len,
    return_repeats: Annotated[
        int, typer.Option(min=0, metavar="N", help="Times that one returns; 0: none.")
    ] = _ENGINE.return_repeats,
    cpu_bytes: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="CPU tier of the store that is started without --kv-store."),
    ] = _ENGINE.cpu_bytes,
    ssd_dir: Annotated[Path | None, typer.Option(metavar="PATH", help="Folder for its SSD tier.")] = None,
    ssd_bytes: Annotated[int, typer.Option(min=0, metavar="N", help="Its SSD tier.")] = _ENGINE.ssd_bytes,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="PNG of times to the first token.")] = None,
) -> None:
    """A real engine with a KV store and without, in turns: times to first and last token, tokens computed, outputs."""
    from control_plane.bench.offload_engine import run

    options = EngineOptions(
        rounds=rounds,
        limit=limit,
        length_scale=length_scale,
        at_once=at_once or None,
        time_scale=time_scale,
        repeats=repeats,
        return_len=return_len,
        return_repeats=return_repeats,
        cpu_bytes=cpu_bytes,
        ssd_dir=ssd_dir,
        ssd_bytes=ssd_bytes,
        plot=plot,
    )
    run(engine, options)


def disk(
    ssd_dir: Annotated[Path, typer.Option(metavar="PATH", help="A folder on the disk; what is written there goes.")],
    record_bytes: Annotated[
        int, typer.Option(min=1, metavar="N", help="Of a record: 64 tokens of LLaMA-3-8B by default.")
    ] = _DISK.record_bytes,
    total_bytes: Annotated[int, typer.Option(min=1, metavar="N", help="Of all records.")] = _DISK.total_bytes,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Runs of each way.")] = _DISK.repeats,
) -> None:
    """How fast the store's SSD tier reads, beside fio on the same files."""
    from control_plane.bench.offload_disk import run

    run(DiskOptions(ssd_dir, record_bytes, total_bytes, repeats))


def link(
    device: Annotated[str, typer.Option(metavar="cuda|cpu", help="Where the cache is.")] = _LINK.device,
    tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Of a conversation.")] = _LINK.tokens,
    page_size: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of a KV page.")] = _LINK.page_size,
    num_layers: Annotated[
        int, typer.Option("--layers", min=1, metavar="N", help="Of a model like LLaMA-3-8B, by default as many.")
    ] = _LINK.num_layers,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Runs of each way.")] = _LINK.repeats,
    in_a_row: Annotated[
        int, typer.Option(min=1, metavar="N", help="Loads that are asked for at once.")
    ] = _LINK.in_a_row,
) -> None:
    """How fast pages move between an engine's cache and the store, beside the bare link."""
    from control_plane.bench.offload_link import run

    run(LinkOptions(device, tokens, page_size, num_layers, repeats=repeats, in_a_row=in_a_row))
