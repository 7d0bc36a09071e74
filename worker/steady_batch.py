"""A full iteration as a steady load makes it, out of nothing: for profiling and for measuring schedules.

Decodes whose contexts are drawn uniformly, prefill chunks in the rest of the rows, random keys and values in the
pages: nothing need have run before. Knows nothing of schedules beyond where they cut the rows, nor of how long
anything takes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from autosearch.workload import Workload
from scheduler.plan import IterationPlan, SlotStart
from worker.cuda_model import CudaModel
from worker.device_batch import AttentionCuts, BatchLimits, BlockView, HostSlots
from worker.kv_cache import KVCache

Int32 = NDArray[np.int32]
_NO_CUTS = AttentionCuts()


class SteadyBatchError(ValueError):
    """A batch that the limits or the KV cache do not hold; the message says what to lower."""


@dataclass(frozen=True, slots=True)
class SteadyMix:
    """What a steady iteration consists of."""

    rows: int  # all of them; what does not decode are prefill chunks
    num_decodes: int
    mean_context: int  # KV tokens that a decode reads; drawn uniformly within a third of it
    prompt_len: int  # chunks are whole prompts of this many tokens, the last one the middle of one

    @property
    def workload(self) -> Workload:
        """As autosearch counts it: a prefill row is paired with its whole prompt."""
        prefill_rows = self.rows - self.num_decodes
        context = float(self.num_decodes * self.mean_context)
        return Workload(self.rows, self.num_decodes, context, float(prefill_rows * self.prompt_len))

    def resized(self, rows: int) -> SteadyMix:
        """The same mix in another number of rows."""
        return SteadyMix(rows, round(self.num_decodes * rows / self.rows), self.mean_context, self.prompt_len)


def steady_plan(
    limits: BatchLimits, mix: SteadyMix, *, num_pages: int, vocab_size: int, seed: int = 0
) -> IterationPlan:
    """Slots 0, 1, … with tokens that are all known, on pages in random order. Raises SteadyBatchError.

    Contexts count the decode's own token. Decodes and chunks that reach their prompt's end sample greedily.
    """
    random = np.random.default_rng(seed)
    contexts, chunks = _contexts(mix, random), _chunks(mix)
    lengths = np.concatenate([contexts, chunks.sum(0)])
    num_pages_of = -(-lengths // limits.page_size)
    _check(limits, mix, lengths, int(num_pages_of.sum()), num_pages)
    slots = np.arange(len(lengths), dtype=np.int32)
    counts = np.concatenate([np.ones_like(contexts), chunks[1]]).astype(np.int32)
    starts = tuple(
        SlotStart(slot, str(slot), random.integers(0, vocab_size, length).astype(np.int32), 0, 0.0, 0, 1.0, 0)
        for slot, length in enumerate(lengths.tolist())
    )
    page_slots = np.repeat(slots, num_pages_of)
    first_page = np.cumsum(num_pages_of) - num_pages_of
    return IterationPlan(
        step=0,
        bucket=0,
        slot_starts=starts,
        page_slots=page_slots,
        page_indexes=(np.arange(len(page_slots)) - first_page[page_slots]).astype(np.int32),
        page_ids=random.permutation(num_pages)[: len(page_slots)].astype(np.int32),
        slots=slots,
        starts=(lengths - counts).astype(np.int32),
        counts=counts,
        num_decodes=mix.num_decodes,
        samples=(slots < mix.num_decodes) | (lengths == mix.prompt_len),
    )


def fill_pages(cache: KVCache, seed: int = 0) -> None:
    """Keys and values of all pages become normally distributed."""
    with torch.inference_mode():
        generator = torch.Generator(cache.layers[0].device).manual_seed(seed)
        for layer in cache.layers:
            layer.normal_(generator=generator)


@dataclass(frozen=True, slots=True)
class SteadyBatch:
    """A packed plan on the device. One of several that take turns: the page table is written whole each time."""

    block: torch.Tensor
    cells: torch.Tensor  # of the page table, all that the plan uses
    pages: torch.Tensor
    num_samples: int
    has_prefill: bool

    def put_on(self, model: CudaModel) -> None:
        """What the model runs from now on; its graphs read it too."""
        with torch.inference_mode():
            model.view.block.copy_(self.block)
            model.page_table.view(-1)[self.cells] = self.pages


def pack_steady(model: CudaModel, plan: IterationPlan, cuts: AttentionCuts = _NO_CUTS) -> SteadyBatch:
    """Pack a steady plan for a schedule that cuts attention's rows there (CudaModel.cuts)."""
    limits, device = model.limits, model.view.block.device
    view = BlockView(limits, torch.zeros(BlockView.size(limits), dtype=torch.int32))
    packed = HostSlots(limits).pack(plan, view, cuts)
    cells = plan.page_slots.astype(np.int64) * limits.pages_per_slot + plan.page_indexes
    return SteadyBatch(
        view.block.to(device),
        torch.from_numpy(cells).to(device),
        torch.from_numpy(plan.page_ids).to(device),
        len(packed.sample_slots),
        len(plan.slots) > plan.num_decodes,
    )


def _contexts(mix: SteadyMix, random: np.random.Generator) -> NDArray[np.int64]:
    """[num_decodes]; 512 to 1,024 for a mean of 768."""
    least = max(1, mix.mean_context - mix.mean_context // 3)
    return random.integers(least, 2 * mix.mean_context - least, mix.num_decodes, endpoint=True)


def _chunks(mix: SteadyMix) -> NDArray[np.int64]:
    """[2, chunks]: tokens before each prefill chunk, and its own. Whole prompts, then the middle of one.

    The middle, so that a row has as many keys to read on average, half of a prompt, as in whole prompts.
    """
    if mix.mean_context < 1 or mix.prompt_len < 1 or not 0 <= mix.num_decodes <= mix.rows:
        raise SteadyBatchError(f"no batch is like this: {mix}; lengths are at least 1, decodes at most the rows")
    whole, rest = divmod(mix.rows - mix.num_decodes, mix.prompt_len)
    chunks = [(0, mix.prompt_len)] * whole + [((mix.prompt_len - rest) // 2, rest)] * (rest > 0)
    return np.array(chunks, np.int64).reshape(-1, 2).T


def _check(limits: BatchLimits, mix: SteadyMix, lengths: NDArray[np.int64], needed: int, num_pages: int) -> None:
    if mix.rows > limits.rows:
        raise SteadyBatchError(f"{mix.rows} rows do not fit batches of {limits.rows}: lower the batch size")
    if len(lengths) > limits.slots:
        raise SteadyBatchError(f"{len(lengths)} sequences do not fit {limits.slots} slots: lower the decodes")
    longest, most = int(lengths.max(initial=0)), limits.page_size * limits.pages_per_slot
    if longest > most:
        raise SteadyBatchError(f"a sequence of {longest} tokens does not fit {most}: lower context or prompts")
    if needed > num_pages:
        raise SteadyBatchError(f"{needed} KV pages are needed, there are {num_pages}: lower decodes or context")
