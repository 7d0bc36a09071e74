"""The `nanoflow` command. Each subcommand is a few lines: parse, call, say how it ended.

Errors that a user can mend end in one line on stderr and exit code 2; Python's traceback is for our own faults.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from autosearch.pipeline import InvalidScheduleError
from autosearch.specs import UnsupportedModelError
from control_plane import (
    ablation_command,
    kvstore_command,
    offload_command,
    profile_command,
    ray_environment,
    schedules_command,
    search_commands,
)
from control_plane.config import ALL_GROUPS, EngineConfig, LogConfig, OwnStoreConfig, ServerConfig
from control_plane.flags import configured
from control_plane.interrupts import ends_at_once
from control_plane.options import ConfigError
from control_plane.progress import ProgressLine
from control_plane.release import release
from control_plane.validation import Limits

app = typer.Typer(
    name="nanoflow",
    rich_markup_mode=None,
    help="Serve large language models. `nanoflow serve MODEL` starts a server, `nanoflow doctor` checks the machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(help="Benchmarks. Each prints its setting and ends in one JSON line.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
search_commands.register(app)
profile_command.register(app)
schedules_command.register(app)
kvstore_command.register(app)
offload_command.register(bench_app)
ablation_command.register(app, bench_app)

errors = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


@app.command()
@configured(ALL_GROUPS)
def serve(
    engine: EngineConfig, server: ServerConfig, limits: Limits, own_store: OwnStoreConfig, log: LogConfig
) -> None:
    """Serve a model by gRPC, with metrics for Prometheus, until SIGTERM."""
    ray_environment.prepare(os.environ)
    with ends_at_once():
        from control_plane.exit_watchdog import exit_at_once
        from control_plane.serve import run  # Ray and torch are slow to import, and other commands do without

    _set_up_logging(log)
    exit_at_once(asyncio.run(run(engine, server, limits, own_store)))


@app.command()
@configured(ALL_GROUPS)
def generate(
    engine: EngineConfig,
    log: LogConfig,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Text to go on from.")] = None,
    token_ids: Annotated[str | None, typer.Option(metavar="IDS", help="Token ids to go on from, as 1,2,3.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Output tokens at most. Default: what the context holds.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(metavar="X", help="0 is greedy. Default: the model's own.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after end-of-sequence tokens.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON object on the last line.")] = False,
) -> None:
    """Generate once in this process, without Ray, and print the answer as it comes."""
    with ends_at_once():
        from control_plane.generate import Question, run

    _set_up_logging(log, of_interest=logging.WARNING)
    question = Question(prompt, token_ids, max_tokens, temperature, ignore_eos)
    raise typer.Exit(asyncio.run(run(engine, question, as_json)))


@app.command("convert-gguf")
def convert_gguf(
    gguf_file: Annotated[Path, typer.Argument(metavar="FILE", help="A GGUF file of a LLaMA model.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder to write, in Hugging Face's layout.")],
    dtype: Annotated[str, typer.Option(metavar="TEXT", help="float32 or bfloat16.")] = "float32",
    replace: Annotated[bool, typer.Option("--replace", help="Replace the folder if it exists.")] = False,
) -> None:
    """Convert a GGUF file once into a folder of safetensors, config and tokenizer."""
    with ends_at_once():
        from worker.gguf_conversion import convert_gguf as convert

    line = ProgressLine()
    try:
        convert(gguf_file, folder, dtype, replace=replace, progress=line.share)
    finally:
        line.done()
    typer.echo(f"wrote {folder}")


@app.command()
@configured(ALL_GROUPS)
def doctor(
    server: ServerConfig,
    model: Annotated[Path | None, typer.Argument(metavar="MODEL", help="A model folder to check as well.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Check Ray, GPUs, ports, disk and memory: what is wrong, and how to mend it."""
    from control_plane import doctor as checks
    from control_plane.host_facts import gather

    facts = gather(
        host=server.host,
        ports=[("gRPC", "--port", server.port), ("metrics", "--metrics-port", server.metrics_port)],
        folders={"current folder": Path.cwd(), "Ray's files": Path(tempfile.gettempdir())},
        environ=os.environ,
        model=model,
    )
    findings = checks.diagnose(facts)
    if as_json:
        typer.echo(checks.to_json(findings))
    else:
        checks.show(findings, Console())
    raise typer.Exit(checks.exit_code(findings))


@app.command()
@configured(ALL_GROUPS)
def tune(
    engine: EngineConfig,
    log: LogConfig,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the schedules go, for --schedules.")],
    batch_sizes: Annotated[str, typer.Option(metavar="N,N", help="Batch sizes to measure.")] = "2048",
    decode_shares: Annotated[str, typer.Option(metavar="X,X", help="Shares of their rows that decode.")] = "0.5",
    num_decodes: Annotated[
        str | None, typer.Option(metavar="N,N", help="Decodes of each batch, instead of shares of its rows.")
    ] = None,
    mean_contexts: Annotated[str, typer.Option(metavar="N,N", help="Mean KV tokens of a decode.")] = "768",
    prompt_len: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of a prefill chunk.")] = 512,
    candidates: Annotated[
        list[Path] | None, typer.Option(metavar="PATH", help="Schedules to measure too: a file or a folder.")
    ] = None,
) -> None:
    """Measure schedules on this machine's GPU and keep the fastest of each batch."""
    from control_plane import tune_command
    from control_plane.planning_options import numbers

    _set_up_logging(log)
    tune_command.check(engine)
    sizes, shares, contexts = numbers(batch_sizes, int), numbers(decode_shares, float), numbers(mean_contexts, int)
    decodes = tuple(numbers(num_decodes, int)) if num_decodes else ()
    batches = tune_command.Batches(tuple(sizes), tuple(shares), tuple(contexts), prompt_len, decodes)
    tune_command.run(engine, batches, out, candidates or ())


@bench_app.command()
@configured(ALL_GROUPS)
def throughput(
    engine: EngineConfig,
    log: LogConfig,
    input_len: Annotated[int, typer.Option(metavar="N", help="Prompt tokens of each request.")] = 512,
    output_len: Annotated[int, typer.Option(metavar="N", help="Output tokens of each request.")] = 512,
    num_prompts: Annotated[int, typer.Option(metavar="N", help="Requests, all submitted at once.")] = 64,
    lengths_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="CSV whose last two columns are prompt and output tokens, to draw lengths from."
        ),
    ] = None,
    synchronous: Annotated[
        bool, typer.Option("--synchronous", help="Plan an iteration only after the one before has ended.")
    ] = False,
    breakdown: Annotated[
        bool, typer.Option("--breakdown", help="On a GPU: time each operator by itself afterwards, a minute or so.")
    ] = False,
) -> None:
    """Tokens per second of one engine in this process, everything submitted at once."""
    from control_plane.bench.throughput import Mode, run
    from control_plane.bench.workload import Workload

    _set_up_logging(log)
    run(engine, Workload(num_prompts, input_len, output_len, lengths_file), Mode(synchronous, breakdown))


@bench_app.command()
def planning(
    num_live: Annotated[int, typer.Option(min=1, metavar="N", help="Live decodes.")] = 1024,
    batch_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="B_dense.")] = 2048,
    num_steps: Annotated[int, typer.Option(min=1, metavar="N", help="Measured iterations.")] = 1000,
) -> None:
    """What the scheduler costs per iteration, without a model."""
    from control_plane.bench.planning import run

    run(num_live=num_live, batch_tokens=batch_tokens, num_steps=num_steps)


@bench_app.command("cpu-reference")
def cpu_reference(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Model folder.")],
    output_len: Annotated[int, typer.Option(min=1, metavar="N", help="Output tokens of each request.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Measurements of each side.")] = 3,
) -> None:
    """The engine beside transformers' generate on the CPU, at 1 and 16 requests."""
    from control_plane.bench.cpu_reference import Setting, run

    typer.echo(json.dumps(run(Setting(model, output_len=output_len, repeats=repeats))))


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    """Options of the command itself."""
    if show:
        typer.echo(release())
        raise typer.Exit


def main() -> None:
    """Run the command line."""
    try:
        app()
    except user_errors() as error:
        errors.print(f"nanoflow: {error}")
        raise SystemExit(2) from None


def user_errors() -> tuple[type[Exception], ...]:
    """Errors whose message tells a user what to mend. Only those whose module is loaded can have been raised."""
    found: list[type[Exception]] = [ConfigError, UnsupportedModelError, InvalidScheduleError]
    by_module = {
        "kvstore.keys": ("StoreError",),
        "worker.executor": ("CapacityError",),
        "worker.weights": ("ModelLoadError",),
        "worker.sharding": ("ShardingError",),
        "worker.steady_batch": ("SteadyBatchError",),
        "worker.profile_cuda": ("ProfilingError",),
        "worker.power_meter": ("MeterError",),
        "worker.streams": ("PartitionError",),
        "worker.gguf_conversion": ("ConversionError",),
        "control_plane.errors": ("ApiError", "ListenError", "StartError"),
        "control_plane.tokenizer": ("TokenizerError",),
    }
    for module, names in by_module.items():
        if module in sys.modules:
            found += [getattr(sys.modules[module], name) for name in names]
    return tuple(found)


def _set_up_logging(config: LogConfig, of_interest: int = logging.INFO) -> None:
    """For a command whose user wants to hear of `of_interest` and worse unless --log-level asks for debug."""
    level = getattr(logging, config.log_level.upper())
    logging.basicConfig(
        level=level if level < logging.INFO else max(level, of_interest),
        format="%(asctime)s %(levelname).1s %(name)s: %(message)s",
        force=True,
    )


if __name__ == "__main__":
    main()
