"""The dense decoder on one GPU: its layers by any schedule, tokens chosen on the device, one CUDA graph per batch size.

Every array that changes between iterations lies in one device block (`worker.device_batch`), so a graph is replayed
as it is. Sampled ids stay in a table by slot, which the next iteration's embedding reads. On a CPU the same code
runs on the reference kernels, without graphs. Knows nothing of plans or requests.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from autosearch.operators import ATTENTION, Operator, layer_operators
from autosearch.pipeline import InvalidScheduleError, PipelineSchedule, sequential
from autosearch.specs import ModelSpec
from worker.cuda_layers import CudaLayers, Rows, nothing, why_not_folded
from worker.device_batch import MAX_RANGES, RANDOM_ROWS, AttentionCuts, BatchLimits, BlockView
from worker.folded_norms import fold_norms, is_folded
from worker.kernel_set import How, KernelSet
from worker.kv_cache import KVCache
from worker.models.layer_operator import LayerOperator
from worker.models.parameters import EMBEDDING, FINAL_NORM, LM_HEAD
from worker.streams import CudaStreams, LaneOrder, OneStream, Streams

NO_PREFILL_ROWS = 128  # up to here batches of decodes alone have a graph of their own


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What a captured graph depends on."""

    rows: int
    has_prefill: bool
    schedule: str = ""  # by name; empty: sequential
    folded: bool = False  # the sequential one with folded norms


class CudaModel:
    """Weights, buffers and operators of one rank."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: dict[str, torch.Tensor],
        limits: BatchLimits,
        kernels: KernelSet,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        """weights: those of a loaded model, with interleave_gates() behind them."""
        self.spec, self.limits, self._kernels, self._weights = spec, limits, kernels, weights
        self._device, self._max_model_len = device, max_model_len
        like, num_samples = weights[EMBEDDING], min(limits.rows, limits.slots)
        self.view = BlockView(limits, torch.zeros(BlockView.size(limits), dtype=torch.int32, device=device))
        # One more slot and one more table row than there are: padding is written there.
        self.last_tokens = torch.zeros(limits.slots + 1, dtype=torch.int32, device=device)
        self.page_table = torch.zeros(limits.slots + 1, limits.pages_per_slot, dtype=torch.int32, device=device)
        self.layers = CudaLayers(spec, weights, limits, kernels, self.view, self.page_table, max_model_len)
        self._gemms = [_sizes(weights[f"layers.0.{name}"]) for name in ("qkv", "o", "gate_up", "down")]
        self._why_not_folded = why_not_folded(spec, like.dtype)
        self._sampled_hidden = like.new_zeros(num_samples, spec.hidden_size)
        self._random_hidden = like.new_zeros(RANDOM_ROWS, spec.hidden_size)
        self._random_logits = like.new_zeros(RANDOM_ROWS, self._head().shape[0])
        self.sampled = torch.zeros(num_samples, dtype=torch.int32, device=device)
        self._schedules: dict[str, PipelineSchedule] = {}
        self._cuts: dict[str, AttentionCuts] = {}
        self.num_sms = num_sms_of(device)
        self._streams: Streams = OneStream()
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        self._capture_stream = torch.cuda.Stream(device) if like.is_cuda else None

    def twin(self, kernels: KernelSet) -> CudaModel:
        """The same weights with buffers and streams of its own: to run beside this one. kernels: with their own too."""
        return CudaModel(self.spec, self._weights, self.limits, kernels, self._max_model_len, self._device)

    def sequential_key(self, rows: int, has_prefill: bool) -> GraphKey:
        """What runs a batch of this size where no schedule is chosen: with folded norms where these are faster.

        Above NO_PREFILL_ROWS an idle prefill launch costs less than another graph.
        """
        folded = self.can_fold and self._kernels.folds_norms(rows, self._gemms)
        return GraphKey(rows, has_prefill or rows > NO_PREFILL_ROWS, folded=folded)

    @property
    def can_fold(self) -> bool:
        """Whether any schedule may have folded norms."""
        return not self._why_not_folded

    def use_cache(self, cache: KVCache) -> None:
        """Run on this KV cache from now on; graphs of another one are dropped."""
        self._graphs.clear()
        self.layers.cache = cache

    def use_schedules(self, schedules: Sequence[PipelineSchedule]) -> None:
        """Let graph keys name these, from any thread. Raises InvalidScheduleError or PartitionError."""
        operators = layer_operators(self.spec)
        for schedule in schedules:
            check_schedule(schedule, operators, self._why_not_folded)
            known = self._schedules.get(schedule.name, schedule)
            if known.what_runs != schedule.what_runs:
                raise InvalidScheduleError(f"two schedules are named {schedule.name!r}: give one of them another name")
            order = LaneOrder(schedule, operators, self.num_sms)
            if self._device.type == "cuda" and order.partitions:
                if not isinstance(self._streams, CudaStreams):
                    self._streams = CudaStreams(self._device)
                self._streams.prepare(order.partitions)
            self._schedules[schedule.name] = schedule
            ends = (tuple(end for _, end in schedule.ranges(name)) for name in ATTENTION)
            decode, prefill = (part if len(part) > 1 else () for part in ends)
            self._cuts[schedule.name] = AttentionCuts(decode, prefill, _dealt_ends(schedule))

    def forget(self, name: str) -> None:
        """Free a schedule's graphs, and let no key name it any more. No iteration by it is left on the device."""
        self._schedules.pop(name, None)
        self._cuts.pop(name, None)
        for key in [key for key in list(self._graphs) if key.schedule == name]:
            self._graphs.pop(key).reset()

    def cuts(self, key: GraphKey) -> AttentionCuts:
        """Where the key's schedule cuts the rows of attention."""
        return self._cuts[key.schedule] if key.schedule else AttentionCuts()

    def run(self, key: GraphKey) -> None:
        """One iteration of what the block holds: a graph where one was captured, else launch by launch."""
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
        else:
            self._iteration(key)

    def capture(self, key: GraphKey, pool: Any) -> None:
        """Capture the iteration of a batch size. All its kernels must have run once.

        Another thread may launch iterations meanwhile: neither the device nor it is waited for, as `torch.cuda.graph`
        would. Captures follow each other; all are of one stream, so that graphs of a pool share their memory.
        """
        graph = torch.cuda.CUDAGraph()
        with no_collection(), torch.cuda.stream(self._capture_stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self._iteration(key)
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        self._graphs[key] = graph

    def warm_up(self, key: GraphKey) -> None:
        """Run what the schedule's layers launch, on the first ones: a graph of it needs its kernels compiled."""
        self._iteration(key, {"embed", *self.layers.operators(key.has_prefill)}, min(2, self.spec.num_layers))
        self._gather_samples(min(key.rows, self.limits.slots), self._last_delta(key))

    def sample(self, first: int, size: int) -> None:
        """Draw the tokens of the last iteration's random rows [first, first + size), as many of them as there are.

        At most RANDOM_ROWS at a time. Their greedy choices are replaced, as results and as next tokens.
        """
        view, part = self.view, slice(first, first + size)
        rows = view["random_rows"][part]
        hidden, logits = self._random_hidden[:size], self._random_logits[:size]
        torch.index_select(self._sampled_hidden, 0, rows, out=hidden)
        self._kernels.linear(hidden, self._head(), None, logits)
        self._kernels.sample(
            logits,
            rows,
            view.doubles("temperature")[part],
            view["top_k"][part],
            view.doubles("top_p")[part],
            view.doubles("noise")[part],
            first,
            view["counts"][1:2],
            view["sample_slots"],
            self.sampled,
            self.last_tokens,
        )

    def _head(self) -> torch.Tensor:
        return self._weights.get(LM_HEAD, self._weights[EMBEDDING])

    def capture_parts(
        self, key: GraphKey, parts: Collection[str], num_layers: int | None = None
    ) -> torch.cuda.CUDAGraph:
        """A graph of what run_parts() runs."""
        graph = torch.cuda.CUDAGraph()
        self.run_parts(key, parts, num_layers)
        with no_collection(), torch.cuda.graph(graph):
            self.run_parts(key, parts, num_layers)
        return graph

    def run_parts(self, key: GraphKey, parts: Collection[str], num_layers: int | None = None) -> None:
        """An iteration with these operators only, `embed` and `lm_head` among them, of the first layers: to measure.

        One without attention may run beside one with it.
        """
        self._iteration(key, parts, num_layers)

    def run_watched(self, key: GraphKey, watch: Callable[[Streams], Streams]) -> None:
        """One iteration, launch by launch, on what `watch` makes of the streams: to see when operations run."""
        streams = self._streams
        self._streams = watch(streams)
        try:
            self._iteration(key)
        finally:
            self._streams = streams

    def logits(self, num_samples: int) -> torch.Tensor:
        """Logits of the last iteration's sampled rows, [samples, vocab] fp32: for checks."""
        return self._sampled_hidden[:num_samples].float() @ self._head().float().t()

    def _iteration(self, key: GraphKey, parts: Collection[str] | None = None, num_layers: int | None = None) -> None:
        view, rows = self.view, key.rows
        samples = min(rows, self.limits.slots)
        self.page_table.view(-1)[view["table_cells"].long()] = view["table_pages"]
        if parts is None or not set(ATTENTION).isdisjoint(parts):
            self.layers.tickets.zero_()
        if parts is None or "embed" in parts:
            table = self._weights[EMBEDDING]
            self._kernels.embed(view["tokens"][:rows], self.last_tokens, table, self.layers.residual[:rows])
        operators = self.layers.operators(key.has_prefill)
        if parts is not None:
            operators = {name: o if name in parts else replace(o, run=nothing) for name, o in operators.items()}
        self._run_layers(self.schedule(key), operators, num_layers or self.spec.num_layers)
        if parts is None or "lm_head" in parts:
            self._choose_tokens(samples, self._last_delta(key))

    def schedule(self, key: GraphKey) -> PipelineSchedule:
        """What the iteration's layers run by."""
        if key.schedule:
            return self._schedules[key.schedule]
        plain = sequential(layer_operators(self.spec), key.rows)
        return fold_norms(plain) if key.folded else plain

    def _run_layers(
        self, schedule: PipelineSchedule, operators: Mapping[str, LayerOperator[Rows]], num_layers: int
    ) -> None:
        order = LaneOrder(schedule, layer_operators(self.spec), self.num_sms)
        numbers = {name: schedule.ranges(name) for name in ATTENTION}

        def launch(layer: int, index: int) -> None:
            operation = schedule.operations[index]
            span = (operation.start, operation.end)
            ranges = numbers.get(operation.operator)
            number = ranges.index(span) if ranges else 0
            rows = Rows(*span, number, How(order.places[index].sms, operation.kernel, order.may_overtake(index)))
            operators[operation.operator].run(layer, rows)

        order.run(num_layers, self._streams, launch)

    def _choose_tokens(self, samples: int, delta: torch.Tensor | None) -> None:
        """The greedy choice of the sampled rows, as results and as next tokens. delta: not in the residual yet."""
        view, hidden = self.view, self._gather_samples(samples, delta)
        self.sampled[:samples] = self._kernels.argmax(hidden, self._head(), view["counts"][0:1])
        self.last_tokens[view["sample_slots"][:samples].long()] = self.sampled[:samples].clamp(min=0)

    def _gather_samples(self, samples: int, delta: torch.Tensor | None) -> torch.Tensor:
        """The sampled rows behind the last norm."""
        view, hidden = self.view, self._sampled_hidden[:samples]
        self._kernels.gather_norm(
            self.layers.residual,
            delta,
            view["sample_rows"][:samples],
            view["counts"][0:1],
            self._weights[FINAL_NORM],
            hidden,
            self.spec.norm_eps,
        )
        return hidden

    def _last_delta(self, key: GraphKey) -> torch.Tensor | None:
        """What the last layer has left to add to the residual."""
        return None if is_folded(self.schedule(key)) else self.layers.delta


def num_sms_of(device: torch.device) -> int:
    """SMs that schedules share; for tests on a CPU, those of an H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def _sizes(weight: torch.Tensor) -> tuple[int, int]:
    """Columns and depth."""
    return weight.shape[0], weight.shape[1]


def _dealt_ends(schedule: PipelineSchedule) -> tuple[int, ...]:
    """Of the ranges that get their shares of the decodes."""
    return () if schedule.decodes_first else schedule.boundaries()[:-1]


def check_schedule(schedule: PipelineSchedule, operators: Sequence[Operator], why_not_folded: str) -> None:
    """Raises InvalidScheduleError for what a GPU model of these operators cannot run.

    why_not_folded: as cuda_layers.why_not_folded().
    """
    schedule.validate(operators)
    if is_folded(schedule) and why_not_folded:
        raise InvalidScheduleError(f"{schedule.name}: norms cannot be folded: {why_not_folded}")
    if len(schedule.boundaries()) > MAX_RANGES:
        raise InvalidScheduleError(f"{schedule.name}: rows are cut into more than {MAX_RANGES} ranges")


def parameter_bytes(weights: Mapping[str, torch.Tensor]) -> int:
    """Device memory of the weights."""
    return sum(tensor.numel() * tensor.element_size() for tensor in weights.values())


@contextmanager
def no_collection() -> Iterator[None]:
    """Garbage stays for a while: freeing another model's graphs would end the capture that this thread is in."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
