"""An engine with a KV store on a TCP port: token and certificates from files, and nothing without them."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

ROOT = Path(__file__).parents[2]
PROMPT = ",".join(str(7 * i % 101) for i in range(100))  # 6 full pages of 16, and 4 tokens
TOKEN = "correct-horse-battery-staple"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Of two authorities, the second of which the store does not know, and two tokens."""
    folder = tmp_path_factory.mktemp("files")
    for name in ("good", "other"):
        authority = trustme.CA()
        pair = authority.issue_cert("127.0.0.1", "localhost")
        authority.cert_pem.write_to_path(str(folder / f"{name}.ca"))
        pair.cert_chain_pems[0].write_to_path(str(folder / f"{name}.cert"))
        pair.private_key_pem.write_to_path(str(folder / f"{name}.key"))
    (folder / "good.token").write_text(TOKEN + "\n")
    (folder / "other.token").write_text("wrong\n")
    for path in folder.iterdir():
        path.chmod(0o600)
    return folder


@pytest.fixture(scope="module")
def address(files) -> Iterator[str]:
    """Of a store that wants a token and a certificate."""
    command = [sys.executable, "-m", "control_plane.main", "kvstore", "--cpu-bytes", str(32 << 20), "--slab-bytes"]
    command += [str(1 << 20), "--store-port", "0", "--store-token-file", str(files / "good.token")]
    for flag, name in (("keyfile", "key"), ("certfile", "cert"), ("ca-certs", "ca")):
        command += [f"--store-ssl-{flag}", str(files / f"good.{name}")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], 60)
        line = process.stdout.readline() if ready else ""
        assert "ready on 127.0.0.1:" in line
        yield line.rpartition(" ")[2].strip()
    finally:
        process.kill()
        process.wait(20)


def generate(model: Path, address: str, files: Path, **names: str) -> tuple[int, dict]:
    """Exit code and answer of an engine that shows these: token, and ca, cert and key."""
    command = [sys.executable, "-m", "control_plane.main", "generate", str(model), "--token-ids", PROMPT, "--json"]
    command += ["--max-tokens", "120", "--temperature", "0", "--ignore-eos", "--num-threads", "1"]
    command += ["--kv-cache-memory-bytes", str(8 << 20), "--kv-store", address, "--kv-store-policy", "wait"]
    for kind, name in names.items():
        flag = "--kv-store-token-file" if kind == "token" else f"--kv-store-tls-{kind}"
        command += [flag, str(files / f"{name}.{kind}")]
    assert TOKEN not in " ".join(command)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=dict(os.environ))
    return done.returncode, json.loads(done.stdout) if done.returncode == 0 else {"error": done.stderr}


def test_pages_go_only_to_engines_with_token_and_certificate(model, address, files):
    good = {"token": "good", "ca": "good", "cert": "good", "key": "good"}
    _, first = generate(model, address, files, **good)
    assert first["cached_tokens"] == 0
    for _ in range(4):  # a store on a busy machine may not answer in time
        _, second = generate(model, address, files, **good)
        if second["cached_tokens"]:
            break
    assert (second["cached_tokens"], second["token_ids"]) == (96, first["token_ids"])
    strangers = [{**good, "token": "other"}, {**good, "ca": "other"}, {**good, "cert": "other", "key": "other"}]
    for shown in (*strangers, {"token": "good"}):
        code, answer = generate(model, address, files, **shown)
        assert code == 0, answer
        assert (answer["cached_tokens"], answer["token_ids"]) == (0, first["token_ids"]), shown


@pytest.mark.parametrize("kind", ["token", "key"])
def test_a_secret_that_others_can_read_is_refused_at_the_start(model, address, files, tmp_path, kind):
    for name in ("ca", "cert", "key", "token"):
        (tmp_path / f"my.{name}").write_bytes((files / f"good.{name}").read_bytes())
        (tmp_path / f"my.{name}").chmod(0o644 if name == kind else 0o600)
    code, answer = generate(model, address, tmp_path, token="my", ca="my", cert="my", key="my")
    assert code == 2
    assert "chmod 600" in answer["error"]
    assert "Traceback" not in answer["error"]
