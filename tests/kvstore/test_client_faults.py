"""Clients of servers that are no stores: whatever is answered, it is a miss, in time, and counted."""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import grpc._channel
import pytest

from kvstore.arena import Arena
from kvstore.breaker import BreakerConfig
from kvstore.client import ClientConfig, KVClient
from kvstore.keys import StoreError
from kvstore.pb import kvstore_pb2 as pb
from kvstore.pb import kvstore_pb2_grpc as rpc
from kvstore.record import payload_of, seal

PAYLOAD = 1000
NEVER = BreakerConfig(failures=1_000_000)
KEYS = [b"key-%d" % number for number in range(8)]


def payload_for(key: bytes) -> bytes:
    return random.Random(key).randbytes(PAYLOAD)


@pytest.fixture
def arena(tmp_path):
    """Eight records, one after the other."""
    arena = Arena(16 * 4096, Path("/dev/shm"))
    for number, key in enumerate(KEYS):
        slot = arena.slot(number * 4096, 4096)
        payload_of(slot, PAYLOAD)[:] = payload_for(key)
        seal(slot, key, PAYLOAD)
    yield arena
    arena.close()


class Liar(rpc.KVStoreServicer):
    """Answers well formed, except for what a test makes of them."""

    def __init__(self, arena):
        self.arena = arena
        self.attach = {}
        self.blocks = lambda keys: [
            pb.Block(offset=KEYS.index(key) * 4096, payload_bytes=PAYLOAD, tier=pb.TIER_CPU) for key in keys
        ]
        self.offsets = lambda keys: [(8 + number) * 4096 for number in range(len(keys))]
        self.delay_s = 0.0

    def Attach(self, request, context):
        fields = {"boot_id": "boot", "arena_path": str(self.arena.path), "arena_bytes": self.arena.num_bytes}
        return pb.AttachResponse(**{**fields, "lease_s": 10.0, "max_payload_bytes": 4000, **self.attach})

    def Acquire(self, request, context):
        time.sleep(self.delay_s)
        return pb.AcquireResponse(boot_id="boot", lease_id=1, blocks=self.blocks(list(request.keys)))

    def Reserve(self, request, context):
        return pb.ReserveResponse(boot_id="boot", lease_id=2, offsets=self.offsets(list(request.keys)))

    def Commit(self, request, context):
        return pb.CommitResponse(boot_id="boot", num_visible=1)

    def Lookup(self, request, context):
        return pb.LookupResponse(boot_id="boot", tiers=[3] * len(request.keys))

    def Release(self, request, context):
        return pb.ReleaseResponse(boot_id="boot")

    def ReportCorrupt(self, request, context):
        return pb.ReportCorruptResponse(boot_id="boot")


@pytest.fixture
def liar(arena, tmp_path):
    servicer = Liar(arena)
    server = grpc.server(ThreadPoolExecutor(4))
    rpc.add_KVStoreServicer_to_server(servicer, server)
    server.add_insecure_port(f"unix:{tmp_path}/liar.sock")
    server.start()
    servicer.client = KVClient(ClientConfig(f"unix:{tmp_path}/liar.sock", call_timeout_s=2.0, breaker=NEVER))
    yield servicer
    servicer.client.close()
    server.stop(0)


def test_a_truthful_one_is_believed(liar):
    assert liar.client.get(KEYS[3]) == payload_for(KEYS[3])
    assert liar.client.put(b"new", payload_for(b"new"))


def test_threads_that_ask_at_once_share_one_mapping(liar):
    at_once = threading.Barrier(4)

    def acquire(key):
        at_once.wait(10)
        return liar.client.acquire([key])

    with ThreadPoolExecutor(4) as threads:
        leases = list(threads.map(acquire, KEYS[:4]))
    assert len({id(lease.arena) for lease in leases}) == 1
    assert liar.client.counters["attached"] == 1


def test_another_records_place_is_a_miss(liar):
    liar.blocks = lambda keys: [
        pb.Block(offset=(KEYS.index(key) + 1) % 8 * 4096, payload_bytes=PAYLOAD, tier=pb.TIER_CPU) for key in keys
    ]
    assert all(liar.client.get(key) is None for key in KEYS)
    assert liar.client.counters["corrupt"] == 8


@pytest.mark.parametrize(
    "block",
    [
        {"offset": 1 << 60},
        {"offset": 16 * 4096},
        {"offset": 17},
        {"payload_bytes": 1 << 62},
        {"payload_bytes": 0},
        {"payload_bytes": 16 * 4096},
        {"tier": 0},
        {"tier": 99},
    ],
)
def test_places_outside_the_arena_and_unknown_tiers_are_garbage(liar, block):
    fields = {"offset": 0, "payload_bytes": PAYLOAD, "tier": pb.TIER_CPU, **block}
    liar.blocks = lambda keys: [pb.Block(**fields)]
    assert liar.client.get(KEYS[0]) is None
    assert liar.client.counters["garbage"] == 1


def test_wrong_sizes_within_the_arena_are_misses(liar):
    liar.blocks = lambda keys: [pb.Block(offset=0, payload_bytes=PAYLOAD - 1, tier=pb.TIER_CPU)]
    assert liar.client.get(KEYS[0]) is None


def test_more_blocks_than_keys_are_garbage(liar):
    blocks = liar.blocks
    liar.blocks = lambda keys: blocks(KEYS)
    assert liar.client.get(KEYS[0]) is None
    assert liar.client.counters["garbage"] == 1


@pytest.mark.parametrize("offsets", [[], [0, 0], [1], [1 << 40], [16 * 4096]])
def test_offsets_that_cannot_be_are_not_written_to(liar, offsets):
    before = bytes(liar.arena.view)
    liar.offsets = lambda keys: offsets
    assert not liar.client.put(b"new", payload_for(b"new"))
    assert bytes(liar.arena.view) == before
    assert liar.client.counters["garbage"] == 1


def test_unknown_tiers_in_a_lookup_are_garbage(liar):
    assert liar.client.lookup(KEYS) == []
    assert liar.client.counters["garbage"] == 1


@pytest.mark.parametrize(
    "attach",
    [
        {"arena_path": "/etc/passwd"},
        {"arena_path": "/dev/shm/nanoflow-kv-not-there"},
        {"arena_bytes": 8 * 4096},
        {"arena_bytes": 1 << 62},
        {"arena_bytes": 0},
        {"lease_s": float("nan")},
        {"lease_s": -1.0},
        {"boot_id": ""},
    ],
)
def test_arenas_that_cannot_be_are_not_mapped(liar, attach):
    liar.attach = attach
    assert liar.client.get(KEYS[0]) is None
    assert not liar.client.put(b"new", payload_for(b"new"))
    assert liar.client.counters["garbage"] == 2


def test_a_store_whose_arena_cannot_be_mapped_is_not_used_for_a_while_and_that_is_said(tmp_path, liar, caplog):
    liar.attach = {"arena_path": "/dev/shm/nanoflow-kv-not-there"}
    client = KVClient(ClientConfig(f"unix:{tmp_path}/liar.sock", call_timeout_s=2.0))
    assert not any(client.put(key, payload_for(key)) for key in KEYS)
    assert client.is_off
    assert client.counters["calls"] == client.counters["garbage"] == BreakerConfig().failures
    client.close()
    (warning,) = caplog.records
    assert "must share /dev/shm" in warning.getMessage()


def test_a_link_instead_of_an_arena_is_not_followed(liar, tmp_path):
    link = tmp_path / "nanoflow-kv-link"
    link.symlink_to(liar.arena.path)
    liar.attach = {"arena_path": str(link)}
    assert liar.client.get(KEYS[0]) is None


def test_slow_it_is_a_bounded_wait(liar):
    liar.client.get(KEYS[0])
    liar.delay_s = 30.0
    slow = KVClient(ClientConfig(liar.client._config.address, call_timeout_s=0.2, breaker=BreakerConfig(open_s=60.0)))
    began = time.monotonic()
    assert [slow.get(KEYS[0], 0.1) for _ in range(20)] == [None] * 20
    assert time.monotonic() - began < 5.0
    assert slow.counters["timeouts"] == 3
    assert slow.counters["refused"] == 17
    liar.delay_s = 0.0
    slow.close()


def test_an_answer_of_another_run_is_a_miss_and_its_arena_is_asked_for_anew(liar):
    assert liar.client.get(KEYS[0])
    liar.attach = {"boot_id": "other"}
    liar.Acquire = lambda request, context: None
    other = pb.AcquireResponse(boot_id="other", lease_id=9, blocks=liar.blocks([KEYS[1]]))
    liar.client._stub.Acquire = lambda *given, **named: other
    assert liar.client.get(KEYS[1]) is None
    assert liar.client.counters["restarts_noticed"] == 1
    assert liar.client.get(KEYS[1]) == payload_for(KEYS[1])
    assert liar.client.counters["attached"] == 2


@pytest.mark.parametrize("noise", ["random", "empty", "huge"])
def test_bytes_that_are_no_messages(tmp_path, noise):
    answers = {"random": lambda: os.urandom(200), "empty": lambda: b"", "huge": lambda: b"\x0a" * (8 << 20)}

    class Noise(grpc.GenericRpcHandler):
        def service(self, details):
            return grpc.unary_unary_rpc_method_handler(lambda request, context: answers[noise]())

    server = grpc.server(ThreadPoolExecutor(2), handlers=[Noise()])
    server.add_insecure_port(f"unix:{tmp_path}/noise.sock")
    server.start()
    client = KVClient(ClientConfig(f"unix:{tmp_path}/noise.sock", call_timeout_s=2.0, breaker=NEVER))
    for key in KEYS:
        assert client.get(key) is None
        assert not client.put(key, b"payload")
        client.lookup([key])
        client.prefetch([key])
    if noise != "empty":  # an empty message is a valid one
        assert client.counters["errors"] + client.counters["garbage"] == 32
    client.close()
    server.stop(0)


@pytest.mark.parametrize("manner", ["hangs up", "says nothing", "talks HTTP"])
def test_sockets_that_speak_no_grpc(tmp_path, manner):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "odd.sock"))
    listener.listen()
    open_ones = []

    def serve():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            if manner == "talks HTTP":
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            if manner == "hangs up":
                connection.close()
            open_ones.append(connection)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    client = KVClient(ClientConfig(f"unix:{tmp_path}/odd.sock", call_timeout_s=0.3))
    began = time.monotonic()
    for _ in range(10):
        assert client.get(KEYS[0]) is None
    assert time.monotonic() - began < 5.0
    assert client.breaker.times_opened >= 1
    client.close()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(5)
    for connection in open_ones:
        connection.close()


def test_certificates_that_cannot_be_read_are_a_users_error(tmp_path):
    with pytest.raises(StoreError, match="cannot be read"):
        KVClient(ClientConfig("localhost:1", ssl_ca_certs=tmp_path / "missing.pem"))


# --- what is logged ---


def test_that_it_is_not_used_is_said_once_and_that_it_answers_again(tmp_path, caplog):
    class Truthful(rpc.KVStoreServicer):
        def Lookup(self, request, context):
            return pb.LookupResponse(boot_id="boot", tiers=[pb.TIER_CPU] * len(request.keys))

    caplog.set_level(logging.INFO, "kvstore.client")
    now = 0.0
    client = KVClient(ClientConfig(f"unix:{tmp_path}/late.sock", call_timeout_s=2.0), lambda: now)
    for _ in range(10):
        assert client.lookup(KEYS) == []
        now += 20.0  # later than the breaker lets a trial through
    (warning,) = caplog.records
    assert warning.levelname == "WARNING"
    assert f"unix:{tmp_path}/late.sock" in warning.getMessage()
    assert "does `nanoflow kvstore` run there" in warning.getMessage()
    server = grpc.server(ThreadPoolExecutor(1))
    rpc.add_KVStoreServicer_to_server(Truthful(), server)
    server.add_insecure_port(f"unix:{tmp_path}/late.sock")
    server.start()
    deadline = time.monotonic() + 10
    while len(client.lookup(KEYS)) < len(KEYS) and time.monotonic() < deadline:
        now += 20.0
        time.sleep(0.05)
    client.close()
    server.stop(0)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "answers again" in caplog.records[1].getMessage()


def test_a_closed_client_is_not_watched_any_more(tmp_path, monkeypatch):
    """gRPC's thread would end with a traceback where it goes on with a channel that is closed."""
    raised, watching, ended = [], threading.Event(), threading.Event()

    class Slow:
        """A channel whose watcher gets no processor for a moment, as on a busy machine."""

        def __init__(self, channel):
            self.check_connectivity_state = channel.check_connectivity_state
            self._watch = channel.watch_connectivity_state

        def watch_connectivity_state(self, *args):
            watching.set()
            time.sleep(0.1)
            return self._watch(*args)

    def poll(state, channel, try_to_connect, poll=grpc._channel._poll_connectivity):
        try:
            poll(state, Slow(channel), try_to_connect)
        except ValueError as error:
            raised.append(error)
        finally:
            ended.set()

    monkeypatch.setattr(grpc._channel, "_poll_connectivity", poll)
    client = KVClient(ClientConfig(f"unix:{tmp_path}/none.sock"))
    assert watching.wait(10)
    client.close()
    assert ended.wait(10)
    assert raised == []


def test_a_wrong_token_is_said(tmp_path, caplog):
    class Refusing(rpc.KVStoreServicer):
        def Lookup(self, request, context):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no")

    server = grpc.server(ThreadPoolExecutor(1))
    rpc.add_KVStoreServicer_to_server(Refusing(), server)
    server.add_insecure_port(f"unix:{tmp_path}/s.sock")
    server.start()
    client = KVClient(ClientConfig(f"unix:{tmp_path}/s.sock", call_timeout_s=2.0))
    for _ in range(10):
        client.lookup(KEYS)
    client.close()
    server.stop(0)
    (warning,) = caplog.records
    assert "check --kv-store-token-file" in warning.getMessage()


def test_a_page_larger_than_any_record_is_said_once(liar, caplog):
    for _ in range(3):
        assert not liar.client.put(KEYS[0], bytes(4001))
    (warning,) = caplog.records
    assert "4001 bytes" in warning.getMessage()
    assert "--slab-bytes 8192" in warning.getMessage()
