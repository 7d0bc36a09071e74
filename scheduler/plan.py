"""What crosses the scheduler's borders: plans to the workers, results back, outputs to the control plane.

Plain frozen data, numbers and numpy arrays, never a tensor or a live object. New things are sent whole,
known things as changes. Knows nothing of how a plan is made or run.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

import numpy as np
from numpy.typing import NDArray

from scheduler.request import FinishReason

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class EngineCapacity:
    """What the executor can hold, after it has fitted itself into memory. The one source of every limit."""

    num_pages: int  # KV pages
    page_size: int  # tokens per page
    max_slots: int  # live requests at most
    max_model_len: int  # prompt + output tokens of one request at most, fitted to the pages
    buckets: tuple[ScheduleBucket, ...]  # ascending in batch_tokens; the last one's is B_dense

    @property
    def max_batch_tokens(self) -> int:
        """B_dense: the constant batch size that a full iteration has."""
        return self.buckets[-1].batch_tokens


@dataclass(frozen=True, slots=True)
class ScheduleBucket:
    """A pipeline schedule that the executor holds, as the scheduler sees it."""

    id: int
    batch_tokens: int  # token rows that it runs


@dataclass(frozen=True, slots=True)
class SlotStart:
    """A slot is given to a request: all that a rank must know of it from now on."""

    slot: int  # in [0, max_slots)
    request_id: str
    token_ids: Int32  # [known tokens]: the prompt, and after a preemption the output so far
    num_cached: int  # leading tokens whose KV already lies in the slot's pages, < len(token_ids)
    temperature: float
    top_k: int
    top_p: float
    seed: int


class StoreTier(IntEnum):
    """Where the KV store keeps a page."""

    CPU = 1
    SSD = 2


@dataclass(frozen=True, slots=True)
class PrefixAnswer:
    """What the KV store holds of a page chain that it was asked for."""

    ticket: int
    tiers: tuple[StoreTier, ...]  # [leading pages that every rank has] where each lies, the slowest of all ranks


class MoveKind(StrEnum):
    """Which way pages go."""

    LOAD = "load"  # from the KV store into pages of the GPU
    STORE = "store"  # from pages of the GPU to the KV store


@dataclass(frozen=True, slots=True)
class KVMove:
    """Pages to copy between the GPU and the KV store, beside the iterations. Every move gets one KVMoveResult.

    The pages of a load are touched by no row until its result has come. Those of a store are full, computed by a step
    that has finished, and only read until its result has come. So copying need not wait for any step in flight.
    """

    number: int  # consecutive from 0
    kind: MoveKind
    page_ids: tuple[int, ...]  # at least one
    digests: tuple[bytes, ...]  # [page_ids] chain digest of each page's contents (kv_pages), the same on all ranks


@dataclass(frozen=True, slots=True)
class KVMoveResult:
    """A move has ended on all ranks: nothing of it reads or writes a page any more, whatever came of it."""

    number: int  # KVMove.number
    num_pages: int  # leading pages that all ranks have copied, in [0, pages of the move]
    run_s: float = 0.0  # seconds that it took the slowest rank, waits for the store included, its turn not; 0: unknown
    num_faults: int = 0  # calls of the ranks that the store did not answer in time, or wrongly, since the move before
    num_trips: int = 0  # times since then that a rank stopped asking the store for a while, after faults in a row


@dataclass(frozen=True, slots=True)
class IterationPlan:
    """One iteration of constant batch size. All ranks get the same plan, and run plans in step order.

    Row r computes tokens [starts[r], starts[r] + counts[r]) of the sequence in slots[r]. Rows are the decodes
    first (count 1), then prefill chunks. A token that no SlotStart has sent is the one sampled for that
    position by an earlier step: ranks keep it, the scheduler need not know it yet.

    With a KV store a plan may have no rows: its executor starts the moves, if there are any, and answers when a move
    has ended or after a wait of about a millisecond, so that the loop neither spins nor is late for newcomers.
    """

    step: int  # consecutive from 0
    bucket: int  # ScheduleBucket.id to run
    slot_starts: tuple[SlotStart, ...]  # applied before the rows
    page_slots: Int32  # [changes] page table changes, applied before the rows:
    page_indexes: Int32  # [changes] page_table[page_slots[i], page_indexes[i]] = page_ids[i]
    page_ids: Int32  # [changes]
    slots: Int32  # [rows]
    starts: Int32  # [rows]
    counts: Int32  # [rows]
    num_decodes: int  # rows [0, num_decodes) are decodes
    samples: NDArray[np.bool_]  # [rows] whether a token is sampled after the row's last one
    moves: tuple[KVMove, ...] = ()  # to start with this step; they may take longer than it

    @property
    def num_tokens(self) -> int:
        """Token rows of the batch; the bucket's batch_tokens when it is full."""
        return int(self.counts.sum())


@dataclass(frozen=True, slots=True)
class SlotFault:
    """A row that could not be computed; its neighbours could."""

    slot: int
    message: str  # for the client: no paths, no prompt text


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of one plan."""

    step: int
    sampled: Int32  # [rows with samples] in row order; undefined for a faulty row
    faults: tuple[SlotFault, ...]
    idle_s: float  # the device waited this long for the plan after its last step ended; 0 for the first
    run_s: float  # from the step's start to its end on the device
    moves: tuple[KVMoveResult, ...] = ()  # of this plan's or earlier ones' moves: those that have ended since
    overlapped: bool = False  # it ran by a schedule other than the sequential one
    unmeasured: bool = False  # there are measured schedules, and none for batches like it


@dataclass(frozen=True, slots=True)
class RequestStart:
    """A request has been given a slot; again after each preemption."""

    request_id: str
    num_cached_tokens: int  # prompt tokens that it need not compute at its first start: from GPU, CPU and SSD
    queue_s: float  # from arrival to its first start
    num_preemptions: int  # before this start
    num_cpu_cached_tokens: int = 0  # of num_cached_tokens, loaded from the KV store's CPU tier
    num_ssd_cached_tokens: int = 0  # of num_cached_tokens, loaded from the KV store's SSD tier


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """A request's last news. Every request that was submitted gets exactly one."""

    request_id: str
    finish_reason: FinishReason
    num_output_tokens: int  # sent in all, a stop token included
    num_cached_tokens: int  # prompt tokens that it need not compute at its first start: from GPU, CPU and SSD
    queue_s: float  # from arrival to its first start, or to its end when it never ran
    num_preemptions: int
    error: str = ""  # when FAILED: what went wrong, for the client
    num_cpu_cached_tokens: int = 0  # of num_cached_tokens, loaded from the KV store's CPU tier
    num_ssd_cached_tokens: int = 0  # of num_cached_tokens, loaded from the KV store's SSD tier


@dataclass(frozen=True, slots=True)
class MoveCounts:
    """What became of pages that were to go to or come from the KV store, since the step before."""

    num_loaded: int = 0
    num_load_failed: int = 0  # computed instead
    num_stored: int = 0
    num_store_failed: int = 0
    num_dropped: int = 0  # never given to the store: too many at once, or their page was needed before their turn
    num_skipped: int = 0  # in the store, and computed all the same: to load them costs more
    num_requests_moved: int = 0  # preempted requests whose pages the store keeps until they come back
    num_faults: int = 0  # calls of the scheduler's own that the store did not answer, or wrongly
    num_rank_faults: int = 0  # calls of the ranks
    num_rank_trips: int = 0  # times that a rank stopped asking the store for a while, after faults in a row


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one iteration did, for metrics. One without tokens has only moved pages."""

    step: int
    num_tokens: int  # token rows computed
    batch_tokens: int  # rows of the bucket that ran
    max_batch_tokens: int  # rows that iterations may have now: B_dense, or less to keep to a target for latency
    num_decodes: int
    num_prompt_tokens: int  # of num_tokens, prompt tokens computed (recomputed ones too)
    num_wasted_tokens: int  # computed for requests that had already ended
    num_preemptions: int
    prefix_queries: int  # prompt tokens looked up in the prefix cache in this plan
    prefix_hits: int  # of those, found on the GPU
    late: bool  # the executor had to wait for this plan
    plan_s: float  # time to make the plan
    idle_s: float  # StepResult.idle_s
    run_s: float  # StepResult.run_s
    cpu_hits: int = 0  # of prefix_queries, loaded from the KV store's CPU tier
    ssd_hits: int = 0  # of prefix_queries, loaded from the KV store's SSD tier
    moves: MoveCounts = MoveCounts()
    overlapped: bool = False  # StepResult.overlapped
    unmeasured: bool = False  # StepResult.unmeasured


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The state of one instance between two iterations."""

    num_running: int  # requests that hold a slot
    num_waiting: int
    num_waiting_tokens: int  # prompt tokens of waiting requests
    live_pages: int  # referenced by running requests
    cached_pages: int  # only kept for later prefix hits
    free_pages: int
    total_pages: int
    store_is_off: bool = False  # the KV store is not asked for a while, after faults in a row


@dataclass(frozen=True, slots=True)
class OutputBatch:
    """All that happened in one iteration, one message for all streams.

    Tokens are columns, because a thousand streams get one each in every step. Read the starts first, then the
    tokens, then the ends: a request's first token and its end may come in the same batch.
    """

    request_ids: tuple[str, ...]  # [tokens] requests that got a token, each at most once
    token_ids: Int32  # [tokens] that token; a stop token is sent too, as the request's last
    num_output_tokens: Int32  # [tokens] of that request so far, this one included: 1, 2, 3, ... without gaps
    ends: tuple[RequestEnd, ...]
    stats: StepStats | None  # None when no iteration ran (for example a cancel while idle)
    load: LoadReport
    starts: tuple[RequestStart, ...] = ()  # of this iteration; those of requests that have ended before are left out


@dataclass(frozen=True, slots=True)
class Cancel:
    """Ask for the end of a request; unknown and ended ids are ignored."""

    request_id: str
    reason: FinishReason = FinishReason.CANCELLED
