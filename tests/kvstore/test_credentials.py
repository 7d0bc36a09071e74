"""Secrets come from files that others cannot read."""

from __future__ import annotations

import pytest

from kvstore.client import ClientConfig, KVClient
from kvstore.credentials import read_secret, read_token
from kvstore.keys import StoreError


def secret_file(folder, contents: bytes = b"secret\n", mode: int = 0o600):
    path = folder / "token"
    path.write_bytes(contents)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_token_is_the_files_one_line(tmp_path, mode):
    assert read_token(secret_file(tmp_path, mode=mode)) == "secret"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644, 0o660])
def test_a_file_that_others_can_read_or_change_is_refused(tmp_path, mode):
    with pytest.raises(StoreError, match="chmod 600"):
        read_secret(secret_file(tmp_path, mode=mode))


@pytest.mark.parametrize("contents", [b"", b"\n", b"two words\n", b"two\nlines\n", "tökén".encode(), b"\x00\x01"])
def test_what_is_no_token_is_refused_without_being_shown(tmp_path, contents):
    with pytest.raises(StoreError, match="no token file") as caught:
        read_token(secret_file(tmp_path, contents))
    assert "words" not in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(StoreError, match="nowhere cannot be read: No such file"):
        read_token(tmp_path / "nowhere")


def test_a_client_refuses_a_key_that_others_can_read(tmp_path):
    for name in ("ca", "cert", "key"):
        (tmp_path / name).write_bytes(b"not looked at")
    (tmp_path / "key").chmod(0o644)
    config = ClientConfig(
        "localhost:1",
        ssl_ca_certs=tmp_path / "ca",
        ssl_certfile=tmp_path / "cert",
        ssl_keyfile=tmp_path / "key",
    )
    with pytest.raises(StoreError, match="chmod 600"):
        KVClient(config)
