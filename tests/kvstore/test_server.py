"""Who may call, and what calls can never be right."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from pathlib import Path

import grpc
import pytest
import trustme
from store_calls import put

from kvstore.client import ClientConfig, KVClient
from kvstore.files import Files
from kvstore.keys import StoreError
from kvstore.pb import kvstore_pb2 as pb
from kvstore.pb import kvstore_pb2_grpc as rpc
from kvstore.server import StoreServer
from kvstore.service import KVService
from kvstore.settings import KVServiceConfig, ListenConfig

METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["KVStore"].methods]


@pytest.fixture
def service():
    service = KVService(KVServiceConfig(cpu_bytes=1 << 16))
    yield service
    assert service.close()


@pytest.fixture
async def serve(service):
    """Starts a server; its address."""
    servers = []

    async def start(**listen) -> str:
        server = StoreServer(service, ListenConfig(**listen))
        servers.append(server)
        return await server.start()

    yield start
    for server in servers:
        await server.stop(0)


async def codes(channel, metadata=()) -> dict[str, str]:
    """The status of each method, called with an empty request."""
    found = {}
    for name in METHODS:
        call = channel.unary_unary(f"/nanoflow.kvstore.v1.KVStore/{name}", response_deserializer=bytes)
        try:
            await call(b"", timeout=5, metadata=metadata)
            found[name] = "OK"
        except grpc.aio.AioRpcError as error:
            found[name] = error.code().name
    return found


@pytest.mark.parametrize(
    ("metadata", "status"),
    [
        ((), "UNAUTHENTICATED"),
        ((("authorization", "Bearer wrong"),), "UNAUTHENTICATED"),
        ((("authorization", "Basic secret"),), "UNAUTHENTICATED"),
        ((("authorization", ""),), "UNAUTHENTICATED"),
        ((("authorization", "Bearer secret"),), "OK"),
    ],
)
async def test_with_a_token_every_method_wants_it(serve, metadata, status):
    address = await serve(token="secret")
    async with grpc.aio.insecure_channel(address) as channel:
        found = await codes(channel, metadata)
        if status == "OK":
            assert found.pop("Reserve") == "INVALID_ARGUMENT"  # no payload_bytes
        assert set(found.values()) == {status}


def tls_files(authority: trustme.CA, folder: Path) -> dict[str, Path]:
    mine = authority.issue_cert("localhost")
    key, chain, roots = (folder / name for name in ("key.pem", "chain.pem", "roots.pem"))
    mine.private_key_pem.write_to_path(str(key))
    key.chmod(0o600)
    mine.cert_chain_pems[0].write_to_path(str(chain))
    authority.cert_pem.write_to_path(str(roots))
    return {"ssl_keyfile": key, "ssl_certfile": chain, "ssl_ca_certs": roots}


async def test_with_certificates_every_client_needs_one(serve, tmp_path):
    authority = trustme.CA()
    clients = authority.issue_cert("client")
    files = tls_files(authority, tmp_path)
    roots = files["ssl_ca_certs"]
    address = await serve(**files)
    port = address.rpartition(":")[2]
    pair = (clients.private_key_pem.bytes(), clients.cert_chain_pems[0].bytes())
    for given, status in (((None, None), "UNAVAILABLE"), (pair, "OK")):
        credentials = grpc.ssl_channel_credentials(roots.read_bytes(), *given)
        async with grpc.aio.secure_channel(f"localhost:{port}", credentials) as channel:
            assert (await codes(channel))["Stats"] == status


async def test_a_tls_key_that_others_can_read_is_refused(serve, tmp_path):
    files = tls_files(trustme.CA(), tmp_path)
    files["ssl_keyfile"].chmod(0o640)
    with pytest.raises(StoreError, match=r"key\.pem holds a secret and must be .* chmod 600"):
        await serve(**files)
    files["ssl_keyfile"].chmod(0o600)
    assert await serve(**files)


@pytest.mark.parametrize(
    ("listen", "message"),
    [
        ({}, "needs a token or certificates"),
        ({"token": ""}, "needs a token or certificates"),
        ({"token": "secret", "host": "0.0.0.0"}, "in clear"),
        ({"token": "secret", "host": "::"}, "in clear"),
        ({"token": "secret", "host": "node-7"}, "in clear"),
        ({"token": "secret", "ssl_keyfile": "key.pem"}, "TLS needs all of"),
        ({"socket": "/tmp/" + "x" * 120}, "longer than"),
    ],
)
def test_listening_openly_or_impossibly_is_refused(service, listen, message):
    listen = {name: Path(value) if name in ("socket", "ssl_keyfile") else value for name, value in listen.items()}
    with pytest.raises(StoreError, match=message):
        StoreServer(service, ListenConfig(**listen))


async def test_a_socket_in_a_folder_open_to_others_is_refused(serve, tmp_path):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(StoreError, match="chmod 700"):
        await serve(socket=folder / "kv.sock")


async def test_a_port_that_is_taken_is_a_users_error(serve):
    address = await serve(token="secret")
    with pytest.raises(StoreError, match="cannot listen"):
        await serve(token="secret", port=int(address.rpartition(":")[2]))


async def test_a_dead_ones_socket_is_replaced(serve, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "kv.sock"))
    address = await serve(socket=folder / "kv.sock")
    async with grpc.aio.insecure_channel(address) as channel:
        assert (await codes(channel))["Stats"] == "OK"


async def test_a_file_where_the_socket_should_be_is_not_replaced(serve, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match="no socket"):
        await serve(socket=folder / "notes.txt")
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("keys", [[b""], [b"x" * 129], [b"k"] * 16385], ids=["empty", "too long", "too many"])
async def test_impossible_keys_are_invalid_arguments(serve, keys):
    address = await serve(token="secret")
    async with grpc.aio.insecure_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rpc.KVStoreStub(channel).Lookup(
                pb.LookupRequest(keys=keys), metadata=(("authorization", "Bearer secret"),)
            )
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details()


async def test_bytes_that_are_no_message_leave_it_serving(serve):
    address = await serve(token="secret")
    metadata = (("authorization", "Bearer secret"),)
    async with grpc.aio.insecure_channel(address) as channel:
        for name in METHODS:
            call = channel.unary_unary(f"/nanoflow.kvstore.v1.KVStore/{name}", response_deserializer=bytes)
            with pytest.raises(grpc.aio.AioRpcError):
                await call(b"\xff" + os.urandom(50), timeout=5, metadata=metadata)
        assert (await codes(channel, metadata))["Stats"] == "OK"


async def test_a_client_without_the_token_gets_misses(serve):
    address = await serve(token="secret")
    stranger = KVClient(ClientConfig(address, call_timeout_s=2.0))
    friend = KVClient(ClientConfig(address, call_timeout_s=2.0, token="secret"))
    assert not await asyncio.to_thread(stranger.put, b"key", b"payload")
    assert stranger.counters["errors"] == 1
    assert await asyncio.to_thread(friend.put, b"key", b"payload")
    assert await asyncio.to_thread(friend.get, b"key") == b"payload"
    assert await asyncio.to_thread(stranger.get, b"key") is None
    stranger.close()
    friend.close()


class SlowFiles(Files):
    """A disk that waits until it is let go."""

    def __init__(self):
        super().__init__()
        self.let_go = threading.Event()

    def read(self, path, offset, *into):
        assert self.let_go.wait(20)
        return super().read(path, offset, *into)


async def test_a_get_that_is_cancelled_while_it_loads_keeps_nothing(tmp_path):
    files = SlowFiles()
    config = KVServiceConfig(16 * 4096, tmp_path / "ssd", 1 << 20, slab_bytes=4 * 4096, ssd_after_hits=0)
    service = KVService(config, files=files)
    server = StoreServer(service, ListenConfig(token="secret"))
    metadata = (("authorization", "Bearer secret"),)
    for number in range(20):
        put(service, b"key-%02d" % number, b"payload")
        service.tiers.finish()
    keys = [b"key-19", b"key-00"]  # one in memory, one on SSD
    async with grpc.aio.insecure_channel(await server.start()) as channel:
        stub = rpc.KVStoreStub(channel)
        call = stub.Acquire(pb.AcquireRequest(keys=keys, wait_ms=30_000), metadata=metadata)
        await asyncio.sleep(0.3)
        assert (await stub.Lookup(pb.LookupRequest(keys=keys), metadata=metadata)).tiers == [1, 2], "others are served"
        assert not call.done()
        call.cancel()
        await asyncio.sleep(0.3)
        assert service.stats()["leases"] == 0
        files.let_go.set()
        service.tiers.finish()
        answer = await stub.Acquire(pb.AcquireRequest(keys=keys, wait_ms=5000), metadata=metadata)
        assert [block.tier for block in answer.blocks] == [1, 1]
        await stub.Release(pb.ReleaseRequest(lease_ids=[answer.lease_id]), metadata=metadata)
    assert sum(service.tiers.cpu.lru.is_free(handle) for handle in service.tiers.cpu.oldest_first()) == 16
    await server.stop(0)
    service.check_integrity()
    assert service.close()


async def test_keys_that_are_there_are_told_from_those_without_room(serve, tmp_path):
    address = await serve(socket=tmp_path / "run" / "kv.sock")

    def calls() -> None:
        client = KVClient(ClientConfig(f"unix:{tmp_path / 'run' / 'kv.sock'}", call_timeout_s=2.0))
        assert client.arena() is not None
        assert client.put(b"a", bytes(100))
        assert not client.put(b"a", bytes(100))
        for payload_bytes, num_placed, wanted in [(100, 3, (1, 2)), (1 << 20, None, None)]:
            lease = client.reserve([b"a", b"b", b"c"], payload_bytes)
            assert (lease and lease.num_placed, lease and lease.wanted) == (num_placed, wanted)
            if lease is not None:
                lease.release()
        there = client.reserve([b"a"], 100)
        assert (there.num_placed, there.wanted) == (1, ())
        there.release()
        client.close()

    assert address
    await asyncio.to_thread(calls)
