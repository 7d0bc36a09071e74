"""The store as its users see it: bounded waits, and every fault of the store a miss.

Nothing here raises for what the store does or fails to do: no answer, a late one, a wrong one, a restart in
between. What is copied out of the arena is verified against the record's own key and checksum, so not even an
answer made up from nothing can give wrong bytes. After some faults in a row nothing is asked for a while. Knows
nothing of what keys and bytes mean. Safe for threads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from kvstore.answers import acquire_problem, attach_problem, lookup_problem, reserve_problem
from kvstore.arena import Mapping
from kvstore.breaker import Breaker, BreakerConfig
from kvstore.client_leases import Arrival, ReadLease, WriteLease
from kvstore.counters import Counters
from kvstore.credentials import read_secret
from kvstore.keys import MAX_KEYS_PER_CALL, KVBlock, KVKey, StoreError, Tier
from kvstore.pb import kvstore_pb2, kvstore_pb2_grpc
from kvstore.record import slot_bytes_for

log = logging.getLogger(__name__)

_KINDS = {grpc.StatusCode.DEADLINE_EXCEEDED: "timeouts", grpc.StatusCode.UNAVAILABLE: "unavailable"}
_NO_ADVICE = "is it a `nanoflow kvstore` of this release?"
_ADVICE = {
    grpc.StatusCode.DEADLINE_EXCEEDED: "it is too slow, or this machine has no time",
    grpc.StatusCode.UNAVAILABLE: "does `nanoflow kvstore` run there, with TLS as here?",
    grpc.StatusCode.UNAUTHENTICATED: "it wants another token: check --kv-store-token-file",
}

COUNTERS = (
    "calls",
    "refused",  # not tried: the breaker was open
    "timeouts",
    "unavailable",
    "errors",  # other statuses
    "garbage",  # answers that cannot be right
    "attached",  # arenas mapped: 1, and one more after each restart of the store that was noticed
    "restarts_noticed",
    "corrupt",  # records that were not whole or not the ones asked for
    "leases_outlived",  # copies that took longer than the lease
)


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """Where the store is, and how long to wait for it."""

    address: str  # unix:/path, or host:port
    call_timeout_s: float = 0.1  # of a call, beside what it is told to wait
    token: str | None = None
    ssl_ca_certs: Path | None = None  # PEM; with the two below: mTLS
    ssl_keyfile: Path | None = None  # closed to others
    ssl_certfile: Path | None = None
    breaker: BreakerConfig = field(default_factory=BreakerConfig)


@dataclass(frozen=True, slots=True)
class _Attached:
    boot_id: str
    mapping: Mapping
    lease_s: float
    max_payload_bytes: int


class _GarbageError(Exception):
    """An answer that cannot be right."""


class KVClient:
    """One connection to one store; it need not be there yet, nor stay.

    Of very many keys the first MAX_KEYS_PER_CALL are asked for.
    """

    def __init__(self, config: ClientConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises StoreError if certificates cannot be read, or others could read the key."""
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()
        self._attached: _Attached | None = None
        self._too_large_for: str | None = None  # the run of the store that a warning was about
        self._sent: set[Any] = set()  # calls whose answers nobody waits for
        self._metadata = (("authorization", f"Bearer {config.token}"),) if config.token else ()
        self._channel = _channel(config)
        self.on_gone: Callable[[memoryview], None] = lambda arena: None  # told an arena whose store has ended
        self._is_connected = False
        self._channel.subscribe(self._connection_changed)
        self._stub = kvstore_pb2_grpc.KVStoreStub(self._channel)
        self.breaker = Breaker(config.breaker, clock)
        self.counters = Counters(COUNTERS)

    def arena(self) -> memoryview | None:
        """All of the store's memory, as its leases have it; None while no store answers."""
        attached = self._attach()
        return None if attached is None else attached.mapping.view

    @property
    def num_faults(self) -> int:
        """Calls so far that were not answered in time, or wrongly."""
        return sum(self.counters[name] for name in ("timeouts", "unavailable", "errors", "garbage"))

    @property
    def num_trips(self) -> int:
        """Times so far that calls began to be refused for a while."""
        return self.breaker.times_opened

    @property
    def is_off(self) -> bool:
        """Whether calls are refused for a while, after faults in a row."""
        return self.breaker.is_open

    def lookup(self, keys: Sequence[KVKey]) -> list[Tier]:
        """Tiers of the leading keys that are there."""
        keys = keys[:MAX_KEYS_PER_CALL]
        answer = self._call(self._stub.Lookup, kvstore_pb2.LookupRequest(keys=keys), lookup_problem(keys))
        return [] if answer is None else [Tier(tier) for tier in answer.tiers]

    def prefetch(self, keys: Sequence[KVKey]) -> int:
        """Start to load the leading keys that are on SSD; how many are in memory or on their way."""
        keys = keys[:MAX_KEYS_PER_CALL]
        answer = self._call(self._stub.Prefetch, kvstore_pb2.PrefetchRequest(keys=keys))
        return 0 if answer is None else min(answer.num_keys, len(keys))

    def acquire(self, keys: Sequence[KVKey], wait_s: float = 0.0) -> ReadLease | None:
        """A lease on the leading keys that are there, after waiting so long for SSD; None without any."""
        attached = self._attach()
        if attached is None or not keys:
            return None
        keys = keys[:MAX_KEYS_PER_CALL]
        began = self._clock()
        request = kvstore_pb2.AcquireRequest(keys=keys, wait_ms=round(wait_s * 1000))
        problem = acquire_problem(keys, attached.mapping.num_bytes)
        answer = self._call(self._stub.Acquire, request, problem, wait_s)
        if answer is None or not answer.blocks or not self._is_of(attached, answer):
            return None
        blocks = tuple(
            KVBlock(key, block.offset, block.payload_bytes, Tier(block.tier)) for key, block in zip(keys, answer.blocks)
        )
        return ReadLease(self._arrival(attached, answer.lease_id, began), blocks, self._corrupt)

    def reserve(self, keys: Sequence[KVKey], payload_bytes: int) -> WriteLease | None:
        """Room for records of these keys, payload_bytes each; None if nothing can be written or is there already."""
        attached = self._attach()
        if attached is None or not keys or payload_bytes <= 0:
            return None
        if payload_bytes > attached.max_payload_bytes:
            self._too_large(attached, payload_bytes)
            return None
        keys = keys[:MAX_KEYS_PER_CALL]
        began = self._clock()
        request = kvstore_pb2.ReserveRequest(keys=keys, payload_bytes=payload_bytes)
        problem = reserve_problem(keys, payload_bytes, attached.mapping.num_bytes)
        answer = self._call(self._stub.Reserve, request, problem)
        if answer is None or not self._is_of(attached, answer):
            return None
        arrival = self._arrival(attached, answer.lease_id, began)
        lease = WriteLease(arrival, tuple(keys), tuple(answer.offsets), payload_bytes, self._commit)
        return lease if lease.num_placed or lease.wanted else None

    def get(self, key: KVKey, wait_s: float = 0.0) -> bytes | None:
        """One record's bytes, verified."""
        lease = self.acquire([key], wait_s)
        if lease is None:
            return None
        with lease:
            into = bytearray(lease.blocks[0].payload_bytes)
            return bytes(into) if lease.copy(0, memoryview(into)) else None

    def put(self, key: KVKey, payload: bytes | memoryview) -> bool:
        """Keep one record; whether it was written just now."""
        lease = self.reserve([key], len(payload))
        if lease is None or not lease.wanted:
            return False
        with lease:
            return lease.write(0, payload) and lease.commit() == 1

    def flush(self) -> bool:
        """Have the store forget everything; whether it said so."""
        return self._call(self._stub.Flush, kvstore_pb2.FlushRequest()) is not None

    def stats(self) -> dict[str, int] | None:
        """The store's counters and gauges."""
        answer = self._call(self._stub.Stats, kvstore_pb2.StatsRequest())
        return None if answer is None else dict(answer.values)

    def close(self) -> None:
        """Hang up. Leases that are out end by themselves."""
        self._channel.unsubscribe(self._connection_changed)
        _wait_for_watcher(self._channel)
        self._channel.close()
        with self._lock:
            self._attached = None

    def _attach(self) -> _Attached | None:
        """The arena of the store that runs now, as far as known."""
        with self._lock:
            if self._attached is not None:
                return self._attached
        mapped: list[Mapping] = []

        def problem(answer: Any) -> str | None:
            wrong = attach_problem(answer)
            if wrong is None:
                try:
                    mapped.append(Mapping.open(answer.arena_path, answer.arena_bytes))
                except (OSError, ValueError) as error:
                    wrong = f"the arena cannot be mapped ({error}): engine and store must share /dev/shm"
            return wrong

        answer = self._call(self._stub.Attach, kvstore_pb2.AttachRequest(), problem)
        if answer is None:
            return None
        attached = _Attached(answer.boot_id, mapped[0], answer.lease_s, answer.max_payload_bytes)
        with self._lock:
            if self._attached is not None and self._attached.boot_id == attached.boot_id:
                return self._attached  # another thread was sooner: one mapping for all
            self._attached = attached
        self.counters.add("attached")
        return attached

    def _is_of(self, attached: _Attached, answer: Any) -> bool:
        """Whether a lease came from the run whose arena is mapped; one that did not is given back."""
        if answer.boot_id == attached.boot_id:
            return True
        self._release(answer.lease_id)
        return False

    def _connection_changed(self, state: grpc.ChannelConnectivity) -> None:
        """Give the mapping up when the store is gone, asked or not: its next run needs the memory."""
        was_connected, self._is_connected = self._is_connected, state is grpc.ChannelConnectivity.READY
        if was_connected and not self._is_connected:
            with self._lock:
                attached, self._attached = self._attached, None
            if attached is not None:
                self.on_gone(attached.mapping.view)

    def _notice(self, boot_id: str) -> None:
        """Give the mapping up if another run of the store answers; it goes when the last lease on it is gone."""
        with self._lock:
            if self._attached is not None and self._attached.boot_id != boot_id:
                self._attached = None
                self.counters.add("restarts_noticed")

    def _call(
        self,
        method: Any,
        request: Any,
        problem: Callable[[Any], str | None] = lambda answer: None,
        wait_s: float = 0.0,
    ) -> Any | None:
        """The answer; None for whatever fault, counted. `problem` says what about an answer cannot be right."""
        if not self.breaker.allows():
            self.counters.add("refused")
            return None
        self.counters.add("calls")
        try:
            answer = method(request, timeout=self._config.call_timeout_s + wait_s, metadata=self._metadata)
            wrong = problem(answer)
            if wrong is not None:
                raise _GarbageError(wrong)
        except grpc.RpcError as error:
            self._failed(_KINDS.get(error.code(), "errors"), error.details(), _ADVICE.get(error.code(), _NO_ADVICE))
        except _GarbageError as error:
            self._failed("garbage", str(error))
        except ValueError as error:  # the channel is closed
            self._failed("unavailable", str(error))
        else:
            if self.breaker.succeeded():
                log.info("the KV store at %s answers again", self._config.address)
            self._notice(answer.boot_id)
            return answer
        return None

    def _failed(self, kind: str, message: str | None, advice: str = _NO_ADVICE) -> None:
        self.counters.add(kind)
        log.debug("the KV store at %s: %s: %s", self._config.address, kind, message)
        if self.breaker.failed():
            problem = f"{kind}: {message}" if message else kind
            log.warning("the KV store at %s is not used for now (%s): %s", self._config.address, problem, advice)

    def _too_large(self, attached: _Attached, payload_bytes: int) -> None:
        """Say so, once for each run of the store: it will take none of these."""
        with self._lock:
            was_said, self._too_large_for = self._too_large_for == attached.boot_id, attached.boot_id
        if not was_said:
            log.warning(
                "a page has %d bytes, and the KV store at %s takes %d at most: no page is kept there. Start the store "
                "with --slab-bytes %d or more, or use smaller pages (--block-size)",
                payload_bytes,
                self._config.address,
                attached.max_payload_bytes,
                slot_bytes_for(payload_bytes),
            )

    def _arrival(self, attached: _Attached, lease_id: int, began: float) -> Arrival:
        return Arrival(attached.mapping.view, lease_id, began + attached.lease_s, self._clock, self._release)

    def _commit(self, lease_id: int) -> int:
        answer = self._call(self._stub.Commit, kvstore_pb2.CommitRequest(lease_id=lease_id))
        return 0 if answer is None else int(answer.num_visible)

    def _release(self, lease_id: int) -> None:
        """Without waiting: what does not arrive ends by itself."""
        if lease_id and not self.breaker.is_open:  # 0: there was nothing to lease
            self._send(self._stub.Release, kvstore_pb2.ReleaseRequest(lease_ids=[lease_id]))

    def _corrupt(self, key: KVKey, outlived: bool) -> None:
        """A copy was not whole. If its lease was over, that is no wonder, and not the store's fault."""
        self.counters.add("leases_outlived" if outlived else "corrupt")
        if not outlived:
            self._send(self._stub.ReportCorrupt, kvstore_pb2.ReportCorruptRequest(keys=[key]))

    def _send(self, method: Any, request: Any) -> None:
        try:
            sent = method.future(request, timeout=self._config.call_timeout_s, metadata=self._metadata)
        except ValueError:  # the channel is closed
            self.counters.add("unavailable")
            return
        self._sent.add(sent)  # one that nobody holds is cancelled
        sent.add_done_callback(self._sent.discard)


def _wait_for_watcher(channel: grpc.Channel) -> None:
    """Until gRPC's thread that watches the connection has ended, a fifth of a second after its last subscriber left.

    It must neither begin nor go on with a channel that is closed: it would end with a traceback. gRPC does not wait for
    it, and only its own state says whether it runs.
    """
    watched, deadline = getattr(channel, "_connectivity_state", None), time.monotonic() + 1.0
    while getattr(watched, "polling", False) and time.monotonic() < deadline:
        time.sleep(0.01)


def _channel(config: ClientConfig) -> grpc.Channel:
    options = [
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 500),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if config.ssl_ca_certs is None:
        return grpc.insecure_channel(config.address, options)
    try:
        key = read_secret(config.ssl_keyfile) if config.ssl_keyfile else None
        chain = config.ssl_certfile.read_bytes() if config.ssl_certfile else None
        credentials = grpc.ssl_channel_credentials(config.ssl_ca_certs.read_bytes(), key, chain)
    except OSError as error:
        raise StoreError(f"{error.filename} cannot be read: {error.strerror}") from None
    return grpc.secure_channel(config.address, credentials, options)
