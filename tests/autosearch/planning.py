"""Shared by the tests of the search: targets on the package's profiles, and made-up profiles."""

from autosearch.blocks import Layer, build_layer
from autosearch.catalog import find_gpu, find_model
from autosearch.operator_times import OperatorTimes, Target
from autosearch.operators import Collectives, Resource
from autosearch.profile_table import ConcurrentRate, IsolatedTime, MeasuredOn, ProfileTable
from autosearch.workload import RequestLengths, Workload, from_lengths

A100_PROFILE = "a100-80gb-llama-2-70b-tp8"
H200_PROFILE = "h200-llama-3-8b"


def a100_times(
    model: str = "llama-2-70b",
    num_gpus: int = 8,
    batch_tokens: int = 2048,
    lengths: RequestLengths | None = None,
) -> OperatorTimes:
    """A model on A100s by the paper's profile."""
    table = ProfileTable.from_file(A100_PROFILE)
    work = from_lengths(batch_tokens, lengths) if lengths else table.workload.resized(batch_tokens)
    return OperatorTimes(table, Target(find_model(model), find_gpu("a100-80gb"), num_gpus, work))


def a100_layer(collectives: Collectives = Collectives.ALL_REDUCE, **given) -> Layer:
    """The same as blocks."""
    return build_layer(a100_times(**given), collectives)


def made_up_profile(times_us: dict[str, float], batch_tokens: int, fixed_rows: float = 0.0) -> ProfileTable:
    """A profile of llama-2-70b on 8 GPUs: time of the whole batch by operator, GEMMs paying for `fixed_rows` more."""
    isolated = []
    for tokens in range(128, batch_tokens + 1, 128):
        for name, time_us in times_us.items():
            extra = 0.0 if name.endswith(("attention", "reduce", "gather")) else fixed_rows
            scaled = time_us * (tokens + extra) / (batch_tokens + extra)
            isolated.append(IsolatedTime(name, tokens, scaled))
    pairs = [
        ConcurrentRate((Resource.COMPUTE, other), (1 - share, share), (1 - share, rate))
        for other in (Resource.MEMORY, Resource.NETWORK)
        for share, rate in ((0.25, 0.5), (0.5, 0.75))
    ]
    work = Workload(batch_tokens, batch_tokens / 2, 512.0 * batch_tokens, 512.0 * batch_tokens)
    return ProfileTable(
        name="made-up",
        source="a test",
        model="llama-2-70b",
        measured_on=MeasuredOn("a100-80gb", 8, 108),
        workload=work,
        spread=0.01,
        isolated=tuple(isolated),
        concurrent=tuple(pairs),
    )


def made_up_times(table: ProfileTable) -> OperatorTimes:
    """Its own model on its own set-up."""
    return OperatorTimes(table, Target(find_model("llama-2-70b"), find_gpu("a100-80gb"), 8, table.workload))
