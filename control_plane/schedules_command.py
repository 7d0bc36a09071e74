"""`nanoflow schedules`: has a running server exchange the schedules that it serves by.

The folder is one of the server's machine, which reads it. Knows nothing of how the server does it.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer
from google.protobuf.json_format import MessageToDict

from control_plane.config import ServerConfig
from control_plane.options import ConfigError, default_of
from control_plane.pb import admin_pb2, admin_pb2_grpc

_TIMEOUT_S = 600.0  # for kernels that must be compiled
_SERVER = f"{default_of(ServerConfig, 'host')}:{default_of(ServerConfig, 'port')}"
_KEYS = ("NANOFLOW_ADMIN_API_KEY", "NANOFLOW_API_KEY")  # as the server has them: the first that is set is sent


def register(app: typer.Typer) -> None:
    """Add the commands to an app."""
    schedules_app = typer.Typer(help="The schedules that a running server serves by.", no_args_is_help=True)
    schedules_app.command("reload")(reload)
    app.add_typer(schedules_app, name="schedules")


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files of a client; with none of them there is no TLS."""

    ca: Path | None = None  # of the server's certificate
    cert: Path | None = None  # the client's own, for mTLS
    key: Path | None = None


def reload(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="[FOLDER]", help="On the server's machine. Default: the one that it read last."),
    ] = None,
    server: Annotated[str, typer.Option(metavar="HOST:PORT", help="The server.")] = _SERVER,
    tls_ca: Annotated[Path | None, typer.Option(metavar="FILE", help="CA of the server's certificate: TLS.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(metavar="FILE", help="Own certificate, for mTLS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its private key.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Serve by the schedules of a folder from now on, without a restart; where one is not fit, all stays as it is.

    The key is taken from NANOFLOW_ADMIN_API_KEY, or NANOFLOW_API_KEY where the server has no key for Admin.
    """
    answer = ask(server, folder, Tls(tls_ca, tls_cert, tls_key))
    if as_json:
        typer.echo(json.dumps(answer))
        return
    for line in table(answer["schedules"]):
        typer.echo(line)


def ask(server: str, folder: Path | None, tls: Tls = Tls()) -> dict[str, Any]:
    """The server's answer. Raises ConfigError where it refuses or cannot be reached."""
    request = admin_pb2.ReloadSchedulesRequest(folder="" if folder is None else str(folder.absolute()))
    key = next((os.environ[name] for name in _KEYS if os.environ.get(name)), None)
    metadata = [] if key is None else [("authorization", f"Bearer {key}")]
    try:
        with _channel(server, tls) as channel:
            stub = admin_pb2_grpc.AdminStub(channel)
            answer = stub.ReloadSchedules(request, metadata=metadata, timeout=_TIMEOUT_S)
    except grpc.RpcError as error:
        raise ConfigError(f"{server} says {error.code().name}: {error.details()}") from None
    fields: dict[str, Any] = MessageToDict(
        answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return fields


def table(schedules: list[dict[str, Any]]) -> list[str]:
    """A line for each schedule, under a line of headings."""
    lines = [f"{'schedule':<40}{'rows':>6}{'decodes':>9}{'context':>9}{'gain':>8}"]
    for each in schedules:
        batch = f"{each['batch_tokens']:>6}{each['decode_share']:>9.2f}{each['mean_context']:>9.0f}"
        note = "" if each["is_chosen"] else "  the sequential one is served"
        lines.append(f"{each['name']:<40}{batch}{each['gain']:>8.3f}{note}")
    return lines


def _channel(server: str, tls: Tls) -> grpc.Channel:
    if tls.ca is None:
        if tls.cert or tls.key:
            raise ConfigError("tls-cert and tls-key need tls-ca, the CA of the server's certificate")
        return grpc.insecure_channel(server)
    if (tls.cert is None) != (tls.key is None):
        raise ConfigError("tls-cert and tls-key belong together: give both or neither")
    try:
        ca, cert, key = (None if path is None else path.read_bytes() for path in (tls.ca, tls.cert, tls.key))
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from None
    return grpc.secure_channel(server, grpc.ssl_channel_credentials(ca, key, cert))
