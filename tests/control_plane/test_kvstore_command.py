"""`nanoflow kvstore`: its options, its metrics, and errors in one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from control_plane.config import KVStoreOptions, OwnStoreConfig
from control_plane.kvstore_command import default_socket, listen_config, store_config
from control_plane.options import ConfigError, load
from kvstore.keys import StoreError

ROOT = Path(__file__).resolve().parents[2]


def command(*flags: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "control_plane.main", "kvstore", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environ},
    )


def test_without_a_port_it_listens_on_the_users_own_socket():
    assert listen_config(KVStoreOptions()).socket == default_socket()
    assert str(os.geteuid()) in str(default_socket())
    assert listen_config(KVStoreOptions(socket=Path("/run/kv.sock"))).socket == Path("/run/kv.sock")


def test_a_port_replaces_the_socket():
    config = listen_config(KVStoreOptions(store_port=7000, store_token="secret"))
    assert (config.socket, config.host, config.port, config.token) == (None, "127.0.0.1", 7000, "secret")
    with pytest.raises(StoreError, match="choose one"):
        listen_config(KVStoreOptions(store_port=7000, socket=Path("/run/kv.sock")))


def test_sizes_and_policies_reach_the_store(tmp_path):
    options = KVStoreOptions(cpu_bytes=1 << 20, ssd_dir=tmp_path, ssd_bytes=2 << 20, ssd_after_hits=1, store_lease=3.0)
    config = store_config(options)
    assert (config.cpu_bytes, config.ssd_dir, config.ssd_bytes) == (1 << 20, tmp_path, 2 << 20)
    assert (config.ssd_after_hits, config.lease_s) == (1, 3.0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--cpu-bytes", "1000"], "at least 65536"),
        (["--cpu-bytes", "1048576", "--store-port", "0"], "needs a token"),
        (["--cpu-bytes", "1048576", "--ssd-dir", "/proc/nowhere"], "cannot be used"),
        (["--cpu-bytes", "9000000000000000"], "fewer cpu-bytes"),
        (["--cpu-bytes", "1048576", "--ssd-bytes", "100000000"], "ssd-bytes is of the SSD tier: give ssd-dir too"),
        (["--cpu-bytes", str(10**30)], "at most 1152921504606846976"),
    ],
)
def test_what_cannot_be_is_one_message_and_exit_code_2(flags, message, tmp_path):
    process = command("--socket", str(tmp_path / "run" / "kv.sock"), *flags)
    if "--store-port" in flags:
        process.kill()
        process = command(*flags)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2, error
    assert message in " ".join(error.replace("│", " ").split())
    assert "Traceback" not in error


def test_slips_of_the_hand_are_refused_when_options_are_read():
    for name in ("cpu_bytes", "ssd_bytes", "slab_bytes", "kv_store_cpu_bytes", "kv_store_ssd_bytes"):
        with pytest.raises(ConfigError, match="must be at most"):
            load((KVStoreOptions, OwnStoreConfig), flags={name: str(10**30)}, environ={})
    with pytest.raises(ConfigError, match="must be at most"):
        load((KVStoreOptions,), flags={"ssd_bytes": str(10**18)}, environ={})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_metrics_until_it_is_told_to_end(tmp_path, number):
    flags = ["--cpu-bytes", "1048576", "--socket", str(tmp_path / "run" / "kv.sock"), "--store-metrics-port", "0"]
    with command(*flags, NANOFLOW_STORE_TOKEN="secret") as process:
        assert "ready on unix:" in process.stdout.readline()
        line = next(line for line in process.stderr if "metrics on" in line)
        with urllib.request.urlopen(f"http://{line.rpartition(' ')[2].strip()}/metrics", timeout=10) as answer:
            families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
        assert families["nanoflow_kvstore_puts"].type == "counter"
        assert families["nanoflow_kvstore_cpu_capacity_bytes"].samples[0].value == 1 << 20
        assert families["nanoflow_kvstore_cpu_used_bytes"].type == "gauge"
        process.send_signal(number)
        _, error = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "Traceback" not in error
    assert "secret" not in error
