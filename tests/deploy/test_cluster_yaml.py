"""The cluster files: Ray accepts them, and their head commands start a service that outlives the connection."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from control_plane.config import ALL_GROUPS, EngineConfig, ServerConfig
from control_plane.options import load

ROOT = Path(__file__).parents[2]
CLUSTERS = ("cluster.yaml", "cluster-aws.yaml")


def read(name: str) -> dict:
    return yaml.safe_load((ROOT / "deploy" / name).read_text())


@pytest.mark.parametrize("name", CLUSTERS)
def test_ray_accepts_it(name):
    prepared = prepare_config(read(name))  # what `ray up` does before it touches any machine
    validate_config(prepared)
    assert any("nanoflow serve" in command for command in prepared["head_start_ray_commands"])


def test_ray_refuses_a_broken_one():
    with pytest.raises(Exception, match="head_start"):
        validate_config(prepare_config(read("cluster.yaml") | {"head_start_commands": []}))


@pytest.mark.parametrize("name", CLUSTERS)
def test_ray_is_started_with_tokens_and_its_dashboard_on_loopback(name):
    config = read(name)
    head, workers = config["head_start_ray_commands"], config["worker_start_ray_commands"]
    starts = [command for command in head + workers if "ray start" in command or "nanoflow serve --config" in command]
    assert len(starts) == 3
    assert all("RAY_AUTH_MODE=token" in command for command in starts)
    (head_start,) = (command for command in head if "ray start" in command)
    assert "--dashboard-host=127.0.0.1" in head_start
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in head_start
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert head.index(head_start) < next(i for i, command in enumerate(head) if "nanoflow serve --config" in command)


@pytest.mark.parametrize("name", CLUSTERS)
def test_what_it_copies_is_there(name):
    for local in read(name)["file_mounts"].values():
        assert local.startswith("~") or (ROOT / local).exists(), local


def test_the_services_options_are_valid():
    settings = load(
        (EngineConfig, ServerConfig), flags={}, environ={}, config_file=ROOT / "deploy/nanoflow.yaml", known=ALL_GROUPS
    )
    assert settings.group(ServerConfig).host == "127.0.0.1"
    makefile = (ROOT / "Makefile").read_text()
    model = settings.group(EngineConfig).model
    assert f"$(CACHE)/models/{model.name}" in makefile  # the setup commands make it
    assert model.parts[-3:-1] == (".cache", "models")


FAKE_RAY = '#!/bin/bash\necho "ray $* $RAY_AUTH_MODE" >> ~/calls\n'
FAKE_NANOFLOW = """#!/bin/bash
echo "nanoflow $* $RAY_AUTH_MODE $RAY_ADDRESS" >> ~/calls
trap 'echo drained >> ~/calls; exit 0' TERM
while :; do sleep 0.05; done
"""


@pytest.fixture
def home(tmp_path):
    """A home folder with a `ray` and a `nanoflow` that only write down their calls."""
    (tmp_path / "bin").mkdir()
    for name, text in (("ray", FAKE_RAY), ("nanoflow", FAKE_NANOFLOW)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    yield tmp_path
    pid = tmp_path / "nanoflow.pid"
    if pid.exists() and running(int(pid.read_text())):
        os.kill(int(pid.read_text()), signal.SIGKILL)


def running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0]
    except FileNotFoundError:
        return False


def wait_for(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in 20 s"
        time.sleep(0.02)


def run_head_commands(home: Path, commands: list[str]) -> None:
    """As `ray up` runs them, each in a shell of its own over ssh, which hangs up afterwards."""
    environ = {"HOME": str(home), "PATH": f"{home / 'bin'}:{os.environ['PATH']}"}
    for command in commands:
        shell = subprocess.Popen(["bash", "-c", f"({command})"], env=environ, start_new_session=True)
        assert shell.wait(timeout=60) == 0, command
        if command.endswith("&"):
            wait_for(lambda: "nanoflow serve" in calls(home)[-1])
        with contextlib.suppress(ProcessLookupError):  # nothing was left behind in that session
            os.killpg(shell.pid, signal.SIGHUP)


def calls(home: Path) -> list[str]:
    path = home / "calls"
    return path.read_text().splitlines() if path.exists() else [""]


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_head_commands_start_ray_then_a_service_that_outlives_the_connection(home, name):
    commands = read(name)["head_start_ray_commands"]
    run_head_commands(home, commands)
    first = int((home / "nanoflow.pid").read_text())
    stop, start, serve = calls(home)
    assert stop.startswith("ray stop")
    assert start.startswith("ray start --head")
    assert start.endswith(" token")
    assert serve == "nanoflow serve --config ~/nanoflow.yaml token auto".replace("~", str(home))
    time.sleep(0.2)
    assert running(first)

    run_head_commands(home, commands)  # `ray up` again: the old service drains before Ray is stopped
    assert not running(first)
    assert calls(home)[3] == "drained"
    assert running(int((home / "nanoflow.pid").read_text()))
