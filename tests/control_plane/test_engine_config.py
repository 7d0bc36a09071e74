"""From options to what each rank and Ray are asked for, by device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from control_plane.cluster import InstanceConfig
from control_plane.config import EngineConfig
from control_plane.engine import check_device, device_of, scheduler_config, worker_config
from control_plane.options import ConfigError
from scheduler.scheduler_config import SchedulerConfig, WritePolicy
from worker.config import StoreAccess


@pytest.mark.parametrize(
    ("has_gpu", "device", "expected"),
    [(True, "auto", "cuda"), (False, "auto", "cpu"), (True, "cpu", "cpu"), (False, "cuda", "cuda")],
)
def test_auto_is_a_gpu_where_there_is_one(tmp_path, monkeypatch, has_gpu, device, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert device_of(EngineConfig(tmp_path, device=device)) == expected


def test_defaults_follow_the_device_and_what_is_given_wins(tmp_path):
    cpu, gpu = (worker_config(EngineConfig(tmp_path, device=device)) for device in ("cpu", "cuda"))
    assert (cpu.max_batch_tokens, cpu.max_slots, cpu.page_size) == (256, 64, 16)
    assert (gpu.max_batch_tokens, gpu.max_slots, gpu.page_size) == (2048, 1536, 64)
    given = EngineConfig(tmp_path, device="cuda", max_num_batched_tokens=7, max_num_seqs=3, block_size=8)
    assert (worker_config(given).max_batch_tokens, worker_config(given).max_slots) == (7, 3)
    assert worker_config(given).page_size == 8


def test_the_way_to_the_store_and_its_policies_reach_ranks_and_scheduler(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = {"ca": Path("ca.pem"), "cert": Path("cert.pem"), "key": Path("/etc/key.pem")}
    engine = EngineConfig(
        tmp_path,
        kv_store="127.0.0.1:7000",
        kv_store_token_file=Path("token"),
        kv_store_write_policy="write_back",
        **{f"kv_store_tls_{name}": path for name, path in files.items()},
    )
    assert worker_config(engine).kv_store_access == StoreAccess(
        tmp_path / "token", tmp_path / "ca.pem", tmp_path / "cert.pem", Path("/etc/key.pem")
    )
    assert scheduler_config(engine).store.write_policy is WritePolicy.WRITE_BACK
    assert scheduler_config(EngineConfig(tmp_path)).store.write_policy is WritePolicy.WRITE_THROUGH


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kv_store": "h:1", "kv_store_tls_ca": Path("ca"), "kv_store_tls_cert": Path("cert")}, "belong together"),
        ({"kv_store": "unix:/s", "kv_store_token_file": Path("t")}, "on a TCP port"),
        ({"kv_store_token_file": Path("t")}, "on a TCP port"),
    ],
)
def test_credentials_that_no_store_would_want_are_refused(tmp_path, given, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(tmp_path, **given)


@pytest.mark.parametrize(("device", "gpus"), [("cpu", None), ("cuda", 1.0)])
def test_each_rank_of_a_gpu_instance_asks_ray_for_one_gpu(tmp_path, device, gpus):
    worker = worker_config(EngineConfig(tmp_path, device=device, tensor_parallel_size=2))
    scheduler, *ranks = InstanceConfig(worker, SchedulerConfig(), 1.0).bundles
    assert "GPU" not in scheduler
    assert [rank.get("GPU") for rank in ranks] == [gpus, gpus]


@pytest.mark.parametrize("has_gpu", [True, False])
def test_a_gpu_that_is_not_here_is_refused_before_ray_is_asked(tmp_path, monkeypatch, has_gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    if has_gpu:
        check_device(EngineConfig(tmp_path, device="cuda"))
    else:
        with pytest.raises(ConfigError, match="no CUDA GPU"):
            check_device(EngineConfig(tmp_path, device="cuda"))
    check_device(EngineConfig(tmp_path, device="cpu"))


@pytest.mark.parametrize("address", ["nonsense", "http://localhost:7000", "localhost:99999"])
def test_what_is_no_address_of_a_store_is_refused_at_once(tmp_path, address):
    with pytest.raises(ConfigError, match="kv-store"):
        EngineConfig(tmp_path, kv_store=address)
