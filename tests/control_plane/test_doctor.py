"""The doctor's judgements on made-up facts, and the facts that it finds on this machine."""

from __future__ import annotations

import io
import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from control_plane import doctor, host_facts
from control_plane.doctor import Status, diagnose, exit_code
from control_plane.host_facts import DiskFacts, GpuFacts, HostFacts, ModelFacts, PortFacts

GIB = 2**30
NO_GPU = GpuFacts((), (), driver_loaded=False, torch_cuda="")
GOOD_MODEL = ModelFacts("/m", "", GIB, has_pickled_weights=False, has_tokenizer=True, description="llama")
GOOD = HostFacts(
    system="linux",
    python=(3, 11, 2),
    ray_version="2.60.0",
    ray_auth_mode="token",
    torch_version="2.13.0",
    optional_libraries=(("triton", "3.9"),),
    num_cpus=2,
    available_memory_bytes=16 * GIB,
    shm_bytes=8 * GIB,
    max_open_files=65536,
    gpus=GpuFacts(("H200",), (140 * GIB,), driver_loaded=True, torch_cuda="13.0"),
    ports=(PortFacts("gRPC", "--port", "127.0.0.1", 50051),),
    disks=(DiskFacts("cache", "/c", 100 * GIB, 200 * GIB),),
    model=GOOD_MODEL,
)

BROKEN, WARNING, INFO, OK = Status.BROKEN, Status.WARNING, Status.INFO, Status.OK


def test_a_good_machine_has_nothing_to_mend():
    findings = diagnose(GOOD)
    assert {each.status for each in findings} == {OK, INFO}
    assert exit_code(findings) == 0
    assert not [each for each in findings if each.remedy]


@pytest.mark.parametrize(
    ("change", "check", "status", "words"),
    [
        ({"system": "darwin"}, "system", WARNING, "only Linux"),
        ({"python": (3, 10, 9)}, "python", BROKEN, "Python 3.11"),
        ({"ray_version": ""}, "ray", BROKEN, "pip install"),
        ({"ray_version": "2.51.2"}, "ray", BROKEN, "2.52"),
        ({"ray_version": "2.52.0rc1"}, "ray", OK, ""),
        ({"ray_version": "3.0.0"}, "ray", OK, ""),
        ({"ray_auth_mode": ""}, "ray authentication", INFO, "RAY_AUTH_MODE=token"),
        ({"ray_auth_mode": "on"}, "ray authentication", BROKEN, "token or disabled"),
        ({"torch_version": ""}, "torch", BROKEN, "make setup"),
        ({"gpus": NO_GPU}, "gpu", INFO, "CPU backend"),
        ({"gpus": replace(NO_GPU, driver_loaded=True)}, "gpu", WARNING, "TORCH=torch"),
        ({"gpus": GpuFacts((), (), True, "13.0", "driver too old")}, "gpu", BROKEN, "driver too old"),
        ({"available_memory_bytes": GIB - 1}, "memory", BROKEN, "at least 1.0 GiB"),
        ({"available_memory_bytes": GIB}, "memory", WARNING, "tiny models"),
        ({"shm_bytes": None}, "shared memory", WARNING, "tmpfs"),
        ({"shm_bytes": 64 * 2**20}, "shared memory", WARNING, "--shm-size"),
        ({"max_open_files": 1024}, "open files", WARNING, "ulimit"),
        ({"disks": (DiskFacts("cache", "/c", GIB - 1, 9 * GIB),)}, "disk (cache)", BROKEN, "at least 1.0 GiB"),
        ({"disks": (DiskFacts("cache", "/c", 9 * GIB, 200 * GIB),)}, "disk (cache)", WARNING, "95%"),
        ({"disks": (DiskFacts("cache", "/c", 90 * GIB, 200 * GIB, False),)}, "disk (cache)", BROKEN, "permissions"),
        (
            {"ports": (PortFacts("gRPC", "--port", "127.0.0.1", 80, "Permission denied"),)},
            "port (gRPC)",
            BROKEN,
            "Permission denied",
        ),
        ({"model": replace(GOOD_MODEL, config_error="no config.json")}, "model", BROKEN, "no config.json"),
        ({"model": replace(GOOD_MODEL, weight_bytes=0)}, "model", BROKEN, "--load-format dummy"),
        ({"model": replace(GOOD_MODEL, weight_bytes=17 * GIB)}, "model", BROKEN, "16.0 GiB of memory"),
        ({"model": replace(GOOD_MODEL, has_tokenizer=False)}, "model", WARNING, "tokenizer.json"),
        ({"optional_libraries": (("triton", ""),)}, "optional libraries", INFO, "pip install triton"),
    ],
)
def test_each_fault_is_found_with_its_remedy(change, check, status, words):
    findings = diagnose(replace(GOOD, **change))
    (finding,) = (each for each in findings if each.check == check)
    assert finding.status is status
    assert words in finding.found + finding.remedy
    assert exit_code(findings) == (status is BROKEN)
    assert finding.remedy or status in (OK, INFO)


def test_pickled_weights_are_explained():
    finding = doctor.check_model(replace(GOOD_MODEL, weight_bytes=0, has_pickled_weights=True), GIB)
    assert "never read" in finding.found


def test_table_and_json_say_the_same():
    findings = diagnose(replace(GOOD, ray_version="", gpus=NO_GPU))
    out = io.StringIO()
    doctor.show(findings, Console(file=out, width=200))
    assert 'pip install "ray[default]>=2.52"' in out.getvalue()  # brackets are not markup
    assert "1 broken" in out.getvalue()
    said = json.loads(doctor.to_json(findings))
    assert said["ok"] is False
    assert [each["check"] for each in said["findings"]] == [each.check for each in findings]
    assert {"check": "gpu", "status": "info", "found": "no GPU: the CPU backend is used", "remedy": ""} in said[
        "findings"
    ]


def test_a_listening_port_is_in_use_and_a_free_one_is_not():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        taken = host_facts.port_facts("gRPC", "--port", "127.0.0.1", port)
        assert taken.in_use
        assert f"ss -ltnp 'sport = :{port}'" in doctor.check_port(taken).remedy
    assert doctor.check_port(host_facts.port_facts("gRPC", "--port", "127.0.0.1", port)).status is OK


def test_an_address_of_another_machine_cannot_be_bound():
    facts = host_facts.port_facts("gRPC", "--port", "192.0.2.1", 0)  # reserved for documentation
    assert doctor.check_port(facts).status is BROKEN
    assert not facts.in_use


def test_the_facts_of_this_machine(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    facts = host_facts.gather(
        host="127.0.0.1",
        ports=[("gRPC", "--port", 0)],
        folders={"cache": tmp_path / "not" / "yet"},
        environ={"RAY_AUTH_MODE": "token"},
        model=tmp_path,
    )
    assert facts.python >= (3, 11)
    assert facts.num_cpus >= 1
    assert facts.disks[0].path == str(tmp_path / "not" / "yet")
    assert facts.disks[0].writable
    assert facts.model is not None
    assert facts.model.has_pickled_weights
    assert "config.json" in facts.model.config_error
    assert exit_code(diagnose(facts)) == 1  # for the model alone
    assert not Path(facts.disks[0].path).exists()  # nothing is made
