"""Who may call what: every method of every service, found from the descriptors."""

from __future__ import annotations

import datetime
import ipaddress
import socket

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from harness import running_frontend, running_service

from control_plane.errors import ListenError
from control_plane.grpc_admin import ServerInfo
from control_plane.grpc_auth import ApiKeys
from control_plane.grpc_server import GrpcConfig, GrpcServer, channel_options
from control_plane.pb import admin_pb2, generation_pb2
from control_plane.validation import Limits

Code = grpc.StatusCode
KEY, OTHER_KEY, ADMIN_KEY = "key-one", "key-two", "key-admin"


def methods_of(*modules):
    return [
        (service.full_name, method)
        for module in modules
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]


OURS = methods_of(generation_pb2, admin_pb2)
GUARDED = OURS + methods_of(reflection_pb2)


async def code_of(channel, service, method, *credentials):
    """How a call with an empty message ends. OK stands for any answer of a method that was reached."""
    kind = ("stream" if method.client_streaming else "unary") + ("_stream" if method.server_streaming else "_unary")
    call = getattr(channel, kind)(f"/{service}/{method.name}")
    metadata = tuple(("authorization", value) for value in credentials)
    argument = iter([b""]) if method.client_streaming else b""
    try:
        if method.server_streaming:
            async for _ in call(argument, metadata=metadata, timeout=5):
                pass
        else:
            await call(argument, metadata=metadata, timeout=5)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return Code.OK


WRONG_CREDENTIALS = {
    "none": (),
    "another key": ("Bearer wrong",),
    "no scheme": (KEY,),
    "another scheme": (f"Basic {KEY}",),
    "empty": ("Bearer ",),
    "part of the key": (f"Bearer {KEY[:-1]}",),
    "more than the key": (f"Bearer {KEY}x",),
}


@pytest.mark.parametrize("credentials", WRONG_CREDENTIALS.values(), ids=WRONG_CREDENTIALS)
async def test_every_method_wants_a_key(credentials):
    config = GrpcConfig(port=0, api_keys=(KEY, OTHER_KEY), admin_keys=(ADMIN_KEY,), reflection=True)
    async with running_service(grpc_config=config) as service:
        for name, method in GUARDED:
            assert await code_of(service.channel, name, method, *credentials) is Code.UNAUTHENTICATED, method.name
        for name, method in methods_of(health_pb2):
            if method.name == "Check":  # Watch never ends, and the library has no List
                assert await code_of(service.channel, name, method, *credentials) is Code.OK


async def test_keys_open_their_own_service_only():
    config = GrpcConfig(port=0, api_keys=(KEY, OTHER_KEY), admin_keys=(ADMIN_KEY,), reflection=True)
    async with running_service(grpc_config=config) as service:
        for name, method in OURS:
            admin = name.endswith("Admin")
            for key in (KEY, OTHER_KEY, ADMIN_KEY):
                code = await code_of(service.channel, name, method, f"bearer {key}")
                assert (code is Code.UNAUTHENTICATED) == (admin != (key == ADMIN_KEY)), (method.name, key)


async def test_without_an_admin_key_admin_wants_an_api_key_and_a_loopback_peer():
    async with running_service(grpc_config=GrpcConfig(port=0, api_keys=(KEY,))) as service:
        name, method = methods_of(admin_pb2)[0]
        assert await code_of(service.channel, name, method) is Code.UNAUTHENTICATED
        assert await code_of(service.channel, name, method, f"Bearer {KEY}") is Code.OK


def own_address() -> str:
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            if each.family is socket.AF_INET and not ipaddress.ip_address(each.address).is_loopback:
                return each.address
    pytest.skip("this machine has no address but the loopback interface's")


async def test_admin_refuses_callers_from_elsewhere():
    address = own_address()
    async with running_frontend() as (frontend, _, _):
        server = GrpcServer(frontend, ServerInfo(), GrpcConfig(host="0.0.0.0", port=0))
        port = await server.start()
        async with grpc.aio.insecure_channel(f"{address}:{port}") as channel:
            for name, method in methods_of(admin_pb2):
                assert await code_of(channel, name, method) is Code.PERMISSION_DENIED
            for name, method in methods_of(generation_pb2):
                assert await code_of(channel, name, method) is not Code.PERMISSION_DENIED
        await server.stop(0)


async def test_reflection_is_off_when_keys_travel_without_tls():
    async with running_service(grpc_config=GrpcConfig(port=0, api_keys=(KEY,))) as service:
        for name, method in methods_of(reflection_pb2):
            assert await code_of(service.channel, name, method, f"Bearer {KEY}") is Code.UNIMPLEMENTED


async def test_ids_of_other_keys_are_unknown():
    config = GrpcConfig(port=0, api_keys=(KEY, OTHER_KEY))
    async with running_service(grpc_config=config, auto=False) as service:
        mine, others = ((("authorization", f"Bearer {key}"),) for key in (KEY, OTHER_KEY))
        request = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[20]), request_id="it")
        await service.generation.Submit(generation_pb2.SubmitRequest(request=request), metadata=mine)
        cancel = generation_pb2.CancelRequest(request_id="it")
        outcome = (await service.generation.Cancel(cancel, metadata=others)).outcome
        assert outcome == generation_pb2.CancelResponse.OUTCOME_NOT_FOUND
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(
                aiter(service.generation.Stream(generation_pb2.StreamRequest(request_id="it"), metadata=others))
            )
        assert caught.value.code() is Code.NOT_FOUND
        outcome = (await service.generation.Cancel(cancel, metadata=mine)).outcome
        assert outcome == generation_pb2.CancelResponse.OUTCOME_CANCELLED


def test_owners_names_tell_keys_apart_and_do_not_contain_them():
    keys = ApiKeys((KEY, OTHER_KEY))
    owners = [keys.owner([("authorization", f"Bearer {key}")]) for key in (KEY, OTHER_KEY)]
    assert len(set(owners)) == 2
    assert all(owner and KEY not in owner for owner in owners)
    assert ApiKeys(()).owner([]) == ""


# TLS


def certificate(tmp_path, name, issuer=None):
    """Write NAME.pem and NAME.key; signed by the issuer (certificate, key), or by itself as a CA."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer[0].subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
    )
    made = builder.sign(issuer[1] if issuer else key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    (tmp_path / f"{name}.pem").write_bytes(made.public_bytes(pem))
    plain = serialization.NoEncryption()
    (tmp_path / f"{name}.key").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return made, key


@pytest.mark.parametrize("mutual", [False, True])
async def test_tls_and_mutual_tls(tmp_path, mutual):
    authority = certificate(tmp_path, "ca")
    certificate(tmp_path, "server", authority)
    certificate(tmp_path, "client", authority)
    certificate(tmp_path, "stranger")
    read = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    config = GrpcConfig(
        port=0,
        ssl_keyfile=tmp_path / "server.key",
        ssl_certfile=tmp_path / "server.pem",
        ssl_ca_certs=tmp_path / "ca.pem" if mutual else None,
    )
    pairs = {"no certificate": (None, None), "client": (read["client.key"], read["client.pem"])}
    pairs["stranger"] = (read["stranger.key"], read["stranger.pem"])
    name, method = methods_of(admin_pb2)[0]
    async with running_frontend() as (frontend, _, _):
        server = GrpcServer(frontend, ServerInfo(), config)
        port = await server.start()
        for who, pair in pairs.items():
            credentials = grpc.ssl_channel_credentials(read["ca.pem"], *pair)
            async with grpc.aio.secure_channel(f"localhost:{port}", credentials) as channel:
                code = await code_of(channel, name, method)
            assert (code is Code.OK) == (not mutual or who == "client"), who
        async with grpc.aio.insecure_channel(f"localhost:{port}") as channel:
            assert await code_of(channel, name, method) is not Code.OK
        await server.stop(0)


async def test_what_cannot_be_served_is_said(tmp_path):
    async with running_service() as service:
        taken = int(service.address.rpartition(":")[2])
        wrong = {
            "listen": GrpcConfig(port=taken),
            "both": GrpcConfig(ssl_certfile=tmp_path / "missing.pem"),
        }
        (tmp_path / "key").write_bytes(b"")
        wrong[r"missing\.pem cannot be read"] = GrpcConfig(
            ssl_keyfile=tmp_path / "key", ssl_certfile=tmp_path / "missing.pem"
        )
        for message, config in wrong.items():
            server = GrpcServer(service.frontend, ServerInfo(), config)
            with pytest.raises(ListenError, match=message):
                await server.start()
            await server.stop(0)


def test_transport_settings_are_the_documented_ones():
    options = dict(channel_options(GrpcConfig(max_connection_age_s=60, max_connection_age_grace_s=5), Limits()))
    assert options["grpc.keepalive_permit_without_calls"] == 1
    assert options["grpc.http2.min_recv_ping_interval_without_data_ms"] == 10_000
    assert options["grpc.max_receive_message_length"] == options["grpc.max_send_message_length"] == 16 * 2**20
    assert options["grpc.max_concurrent_streams"] == 1024
    assert options["grpc.max_connection_age_ms"] == 60_000
    assert options["grpc.max_connection_age_grace_ms"] == 5_000
    assert "grpc.max_connection_age_ms" not in dict(channel_options(GrpcConfig(), Limits()))


async def test_only_the_configured_port_listens():
    def listening():
        connections = psutil.Process().net_connections(kind="tcp")
        return {each.laddr for each in connections if each.status == psutil.CONN_LISTEN}

    before = listening()
    async with running_service() as service:
        metrics_server = service.metrics.listen("127.0.0.1", 0)
        opened = listening() - before
        metrics_server.close()
        assert {address.ip.removeprefix("::ffff:") for address in opened} == {"127.0.0.1"}
        assert {address.port for address in opened} == {int(service.address.split(":")[1]), metrics_server.port}
