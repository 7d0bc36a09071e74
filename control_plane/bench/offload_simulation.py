"""Plays conversations on simulated engines with a real store: what is hit where, beside what an LRU at its best hits.

An event at a time, on a clock that is turned here: arrivals, and ends of iterations. The scheduler, the look-ups
(`worker.store_prefixes`), the store's service, tiers, leases and records are the product's own; only model and
transport are not. Knows nothing of files, tables or pictures.
"""

from __future__ import annotations

import heapq
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from control_plane.bench.offload_device import FakeDevice, FakeEngine, Punctual, Timing, Traffic, capacity_of
from control_plane.bench.offload_ideal import Use, ideal_hits
from control_plane.bench.offload_local_store import LocalStore, service_of
from control_plane.bench.offload_work import Session, Turn
from kvstore.keys import KVKey
from kvstore.service import KVService
from scheduler.kv_pages import page_digest, root_digest
from scheduler.plan import OutputBatch, RequestEnd
from scheduler.request import NewRequest, SamplingParams
from scheduler.scheduler import Scheduler
from scheduler.scheduler_config import PrefetchPolicy, SchedulerConfig, StoreConfig
from worker.kv_cache import KVCacheShape
from worker.store_keys import PageIdentity
from worker.store_prefixes import StorePrefixes


@dataclass(frozen=True, slots=True)
class Node:
    """What is simulated: engines of one node and their store. Sizes in pages."""

    page_size: int = 64  # tokens
    gpu_pages: int = 2048  # of each engine
    cpu_pages: int = 32768  # of the store, or of all stores together; 0: no store
    ssd_pages: int = 0
    ssd_after_hits: int = 0  # hits after which a page goes to SSD; 0: all do
    num_engines: int = 1  # requests go to them at random
    is_shared: bool = True  # one store for all of them; else one each, with an equal part of the pages
    batch_tokens: int = 2048
    max_slots: int = 1024
    timing: Timing = field(default_factory=Timing)


@dataclass(slots=True)
class Outcome:
    """What a play came to; pages and tokens of prompts unless it says otherwise."""

    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_computed_tokens: int = 0  # prefilled, recomputed ones too
    num_repeated_tokens: int = 0  # a cache that never forgets, of single tokens, need not compute these
    num_cached_tokens: int = 0
    asked_pages: int = 0  # whole pages of prompts before the last token
    gpu_hits: int = 0  # pages
    cpu_hits: int = 0
    ssd_hits: int = 0
    ideal_gpu_hits: int = 0  # LRUs of the engines' sizes, which see what the engines see
    ideal_hits: int = 0  # an LRU of the largest tier's size
    endless_hits: int = 0  # a cache that never forgets
    distinct_pages: int = 0
    num_preemptions: int = 0
    simulated_s: float = 0.0
    traffic: Traffic = field(default_factory=Traffic)
    pages_on_both: int = 0  # at the end, in the CPU tier and on SSD
    pages_in_stores: int = 0  # at the end, each counted as often as it is kept in CPU memory
    distinct_in_stores: int = 0  # of these, different ones

    @property
    def hits(self) -> int:
        """On all tiers."""
        return self.gpu_hits + self.cpu_hits + self.ssd_hits

    @property
    def saved_share(self) -> float:
        """Prefill saved, of what a cache that never forgets would save."""
        saved = self.num_prompt_tokens - self.num_computed_tokens
        return saved / self.num_repeated_tokens if self.num_repeated_tokens else 1.0

    def points_below_ideal(self) -> float:
        """Hits missing to the LRU of the same size, as percentage points of all pages asked for."""
        return 100 * (self.ideal_hits - self.hits) / max(self.asked_pages, 1)


class _PlainIdentity(PageIdentity):
    """Pages of one model only: the digest is the key."""

    def __init__(self) -> None:
        super().__init__(b"", "float32", KVCacheShape(1, 1, 1, 1, 1), 0, 1)

    def key(self, digest: bytes) -> KVKey:
        return KVKey(digest)


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    session: Session
    turn: Turn
    engine: int
    chain: list[bytes]  # digests of its whole pages, answer included
    num_asked: int  # of the prompt before its last token


class Simulation:
    """One play. Use it as a context, once."""

    def __init__(self, node: Node, sessions: Sequence[Session], max_model_len: int, seed: int = 0) -> None:
        self.outcome = Outcome()
        self._node, self._sessions = node, sessions
        self._rng = random.Random(seed)
        self._now = 0.0
        self._folder = tempfile.TemporaryDirectory(prefix="nanoflow-bench-")
        self._services = [self._open_service(number) for number in range(self._num_stores)]
        self._prefixes: list[StorePrefixes] = []
        self._engines = [self._open_engine(number, max_model_len) for number in range(node.num_engines)]
        self._open: dict[str, _Open] = {}
        self._events: list[tuple[float, int, str, Any]] = []
        self._num_events = 0
        self._uses: list[Use] = []
        self._uses_of: list[list[Use]] = [[] for _ in self._engines]

    def __enter__(self) -> Simulation:
        return self

    def __exit__(self, *_: object) -> None:
        for prefixes in self._prefixes:
            prefixes.close()
        for service in self._services:
            service.close()
        self._folder.cleanup()

    def run(self) -> Outcome:
        """Play everything to its end."""
        for session in self._sessions:
            self._at(session.turns[0].wait_s, "ask", (session, 0))
        while self._events:
            self._now, _, kind, what = heapq.heappop(self._events)
            if kind == "ask":
                self._ask(*what)
            else:
                batch, end_s = self._engines[what].step_ended(self._now)
                self._take(batch)
                self._follow(what, end_s)
        assert not self._open, "requests without an end"
        self._sum_up()
        return self.outcome

    @property
    def _num_stores(self) -> int:
        if not self._node.cpu_pages:
            return 0
        return 1 if self._node.is_shared else self._node.num_engines

    def _open_service(self, number: int) -> KVService:
        node, part = self._node, self._num_stores
        folder = Path(self._folder.name) / f"ssd-{number}"
        return service_of(node.cpu_pages // part, node.ssd_pages // part, node.ssd_after_hits, folder, self._clock)

    def _open_engine(self, number: int, max_model_len: int) -> FakeEngine:
        node, store = self._node, None
        sizes = [*(size for size in (64, 256, 1024) if size < node.batch_tokens), node.batch_tokens]
        capacity = capacity_of(node.gpu_pages, node.page_size, node.max_slots, max_model_len, sizes)
        policy = StoreConfig(policy=PrefetchPolicy.WAIT)
        config = SchedulerConfig(store=policy, max_waiting=1 << 20)
        prefixes = None
        if self._services:
            store = LocalStore(self._services[number % self._num_stores], self._clock)
            inner = StorePrefixes(store, [_PlainIdentity()])
            self._prefixes.append(inner)
            prefixes = Punctual(inner)
        return FakeEngine(Scheduler(config, capacity, prefixes), FakeDevice(node.timing, node.page_size, store))

    def _clock(self) -> float:
        return self._now

    def _at(self, when_s: float, kind: str, what: Any) -> None:
        heapq.heappush(self._events, (when_s, self._num_events, kind, what))
        self._num_events += 1

    def _follow(self, engine: int, end_s: float | None) -> None:
        if end_s is not None:
            self._at(end_s, "step", engine)

    def _ask(self, session: Session, number: int) -> None:
        turn, engine = session.turns[number], self._rng.randrange(len(self._engines))
        request_id = f"{session.number}-{number}"
        sampling = SamplingParams(max_tokens=len(turn.output), temperature=0.0)
        request = NewRequest(request_id, turn.prompt, sampling)
        chain = list(_chain((*turn.prompt, *turn.output[:-1]), self._node.page_size))
        num_asked = (len(turn.prompt) - 1) // self._node.page_size
        self._open[request_id] = _Open(session, turn, engine, chain, num_asked)
        for uses in (self._uses, self._uses_of[engine]):
            uses.append(Use(chain[:num_asked]))
        self._engines[engine].submit(request, turn.output, self._now)
        self._follow(engine, self._engines[engine].wake(self._now))

    def _take(self, batch: OutputBatch) -> None:
        if batch.stats is not None:
            self.outcome.num_computed_tokens += batch.stats.num_prompt_tokens
            self.outcome.num_preemptions += batch.stats.num_preemptions
        for end in batch.ends:
            self._end(end)

    def _end(self, end: RequestEnd) -> None:
        assert end.finish_reason == "length", end.error
        ended = self._open.pop(end.request_id)
        # An engine lets go of all pages now; the store has been given those that the answer filled.
        self._uses_of[ended.engine].append(Use(ended.chain, is_question=False))
        self._uses.append(Use(ended.chain[ended.num_asked :], is_question=False))
        outcome, page_size = self.outcome, self._node.page_size
        outcome.num_requests += 1
        outcome.num_prompt_tokens += len(ended.turn.prompt)
        outcome.num_output_tokens += len(ended.turn.output)
        outcome.num_repeated_tokens += ended.turn.num_repeated
        outcome.num_cached_tokens += end.num_cached_tokens
        outcome.asked_pages += ended.num_asked
        outcome.cpu_hits += end.num_cpu_cached_tokens // page_size
        outcome.ssd_hits += end.num_ssd_cached_tokens // page_size
        on_gpu = end.num_cached_tokens - end.num_cpu_cached_tokens - end.num_ssd_cached_tokens
        outcome.gpu_hits += on_gpu // page_size
        number = int(end.request_id.partition("-")[2]) + 1
        if number < len(ended.session.turns):
            self._at(self._now + ended.session.turns[number].wait_s, "ask", (ended.session, number))

    def _sum_up(self) -> None:
        outcome, node = self.outcome, self._node
        outcome.simulated_s = self._now
        outcome.ideal_gpu_hits = sum(ideal_hits(uses, node.gpu_pages) for uses in self._uses_of)
        outcome.ideal_hits = outcome.ideal_gpu_hits
        if max(node.cpu_pages, node.ssd_pages) > node.gpu_pages:
            outcome.ideal_hits = ideal_hits(self._uses, max(node.cpu_pages, node.ssd_pages))
        outcome.endless_hits = ideal_hits(self._uses, None)
        outcome.distinct_pages = len({key for use in self._uses for key in use.keys})
        for engine in self._engines:
            for name in engine.device.traffic.__slots__:
                total = getattr(outcome.traffic, name) + getattr(engine.device.traffic, name)
                setattr(outcome.traffic, name, total)
        kept: set[bytes] = set()
        for service in self._services:
            keys = service.tiers.cpu.lru.keys_oldest_first()
            kept.update(keys)
            outcome.pages_in_stores += len(keys)
            ssd = service.tiers.ssd
            outcome.pages_on_both += sum(ssd.payload_bytes(key) is not None for key in keys) if ssd else 0
            service.check_integrity()
        outcome.distinct_in_stores = len(kept)


def simulate(node: Node, sessions: Sequence[Session], max_model_len: int) -> Outcome:
    """Play sessions once."""
    with Simulation(node, sessions, max_model_len) as simulation:
        return simulation.run()


def _chain(tokens: Sequence[int], page_size: int) -> Iterator[bytes]:
    """Digests of the whole pages of a sequence, as the scheduler makes them."""
    digest, data = root_digest(""), np.array(tokens, np.int32).tobytes()
    page_bytes = 4 * page_size
    for start in range(0, len(data) - page_bytes + 1, page_bytes):
        digest = page_digest(digest, data[start : start + page_bytes])
        yield digest
