"""What the planning commands share: options, workloads, and how they end when the user is wrong.

Knows nothing of what a command does.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Annotated, Any, ParamSpec

import typer

from autosearch.catalog import MODEL_NAMES
from autosearch.errors import AutosearchError
from autosearch.pipeline import InvalidScheduleError
from autosearch.specs import UnsupportedModelError
from autosearch.workload import RequestLengths, Workload, from_lengths, from_sums

DEFAULT_LENGTHS = RequestLengths(512, 1024)  # the workload of the paper's Table 2

ModelOption = Annotated[
    str, typer.Option("--model", help=f"A Hugging Face folder, or one of {', '.join(MODEL_NAMES)}.")
]
GpuOption = Annotated[str, typer.Option("--gpu", help="A built-in GPU, as a100-80gb or h200, or a YAML file.")]
NumGpusOption = Annotated[int, typer.Option("--num-gpus", min=1, help="Tensor parallel ranks.")]
ProfileOption = Annotated[str, typer.Option("--profile", help="A profile file, or one of the package by name.")]
InputOption = Annotated[float | None, typer.Option("--input-len", help="Mean prompt tokens of a request.")]
OutputOption = Annotated[float | None, typer.Option("--output-len", help="Mean output tokens of a request.")]
ContextOption = Annotated[
    float | None, typer.Option("--decode-context-tokens", help="Context summed over the batch's decodes.")
]
PairsOption = Annotated[float | None, typer.Option("--prefill-pairs", help="Query-key pairs of the batch's prefill.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
SolverOption = Annotated[str, typer.Option("--solver", help="glpk or highs.")]

P = ParamSpec("P")


def ends_in_one_line(command: Callable[P, None]) -> Callable[P, None]:
    """What a user can mend ends in one line on stderr and exit code 2."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except (AutosearchError, UnsupportedModelError, InvalidScheduleError) as error:
            print(f"nanoflow: {' '.join(str(error).split())}", file=sys.stderr)
            raise typer.Exit(2) from None

    return run


def mean_lengths(input_len: float | None, output_len: float | None) -> RequestLengths | None:
    if input_len is None and output_len is None:
        return None
    return RequestLengths(
        DEFAULT_LENGTHS.input_len if input_len is None else input_len,
        DEFAULT_LENGTHS.output_len if output_len is None else output_len,
    )


def batch_work(batch_size: int, context: float | None, pairs: float | None, lengths: RequestLengths | None) -> Workload:
    """Sums where they are given, else the steady mix of the lengths."""
    steady = from_lengths(batch_size, lengths or DEFAULT_LENGTHS)
    if context is None and pairs is None:
        return steady
    context = steady.decode_context_tokens if context is None else context
    pairs = steady.prefill_pairs if pairs is None else pairs
    if lengths is None:
        return from_sums(batch_size, context, pairs)
    return Workload(batch_size, steady.decode_rows, context, pairs)


def search_options(solver: str, time_limit: float, gap: float, candidates: int, collectives: str, overlap: str) -> Any:
    from autosearch.operators import Collectives
    from autosearch.placement import Overlap
    from autosearch.search import SearchOptions
    from autosearch.solvers import SolverOptions

    alternatives = tuple(Collectives) if collectives == "both" else (one_of(Collectives, collectives),)
    return SearchOptions(SolverOptions(solver, time_limit, gap), one_of(Overlap, overlap), alternatives, candidates)


def one_of(kind: Any, name: str) -> Any:
    try:
        return kind(name)
    except ValueError:
        raise AutosearchError(f"{name!r} is none of {', '.join(each.value for each in kind)}") from None


def numbers(text: str, kind: type[int] | type[float]) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise AutosearchError(f"{text!r} must be numbers with commas between them") from None


def say(text: str) -> None:
    """To whoever watches; results go to stdout."""
    print(text, file=sys.stderr, flush=True)
