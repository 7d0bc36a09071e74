"""The facts of a machine that `doctor` judges: versions, devices, memory, disks, ports, a model folder.

Reads and probes only; nothing is started or changed. Knows nothing of what is good or bad.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autosearch.specs import ModelSpec, UnsupportedModelError
from control_plane.release import version_of
from worker.host_memory import available_memory_bytes

_OPTIONAL = ("triton", "flashinfer-python", "cuda-bindings")


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What torch sees of GPUs."""

    names: tuple[str, ...]  # one per usable device
    total_bytes: tuple[int, ...]  # [names] memory
    driver_loaded: bool  # the kernel has NVIDIA's driver
    torch_cuda: str  # CUDA version that torch was built for; empty for a CPU build
    error: str = ""  # what torch said when it could not use the GPU


@dataclass(frozen=True, slots=True)
class PortFacts:
    """An address that the server would listen on."""

    what: str  # for example gRPC
    flag: str  # for example --port
    host: str
    port: int
    problem: str = ""  # why it cannot be bound; empty when it can
    in_use: bool = False


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """A file system that is written to."""

    what: str
    path: str
    free_bytes: int
    total_bytes: int
    writable: bool = True


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model folder."""

    path: str
    config_error: str  # why config.json cannot be used; empty when it can
    weight_bytes: int  # of all *.safetensors
    has_pickled_weights: bool  # *.bin, *.pt, *.pth, which are never read
    has_tokenizer: bool
    description: str = ""  # for example llama, 30 layers, hidden 576


@dataclass(frozen=True, slots=True)
class HostFacts:
    """All that the checks look at."""

    system: str  # sys.platform
    python: tuple[int, ...]  # major, minor, micro
    ray_version: str  # empty when it is not installed
    ray_auth_mode: str  # RAY_AUTH_MODE
    torch_version: str  # empty when it is not installed
    optional_libraries: tuple[tuple[str, str], ...]  # name and version, empty when not installed
    num_cpus: int
    available_memory_bytes: int  # what the kernel and the control group leave
    shm_bytes: int | None  # size of /dev/shm; None when there is none
    max_open_files: int
    gpus: GpuFacts
    ports: tuple[PortFacts, ...]
    disks: tuple[DiskFacts, ...]
    model: ModelFacts | None = None


def gather(
    *,
    host: str,
    ports: Sequence[tuple[str, str, int]],
    folders: Mapping[str, Path],
    environ: Mapping[str, str],
    model: Path | None = None,
) -> HostFacts:
    """The facts of this machine.

    `ports` are (what, flag, port), for example ("gRPC", "--port", 50051); `folders` maps what is kept there to the
    folder, which need not exist yet. Takes seconds where torch is not imported yet.
    """
    return HostFacts(
        system=sys.platform,
        python=tuple(sys.version_info[:3]),
        ray_version=version_of("ray") or "",
        ray_auth_mode=environ.get("RAY_AUTH_MODE", ""),
        torch_version=version_of("torch") or "",
        optional_libraries=tuple((name, version_of(name) or "") for name in _OPTIONAL),
        num_cpus=len(os.sched_getaffinity(0)),
        available_memory_bytes=available_memory_bytes(),
        shm_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
        max_open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        gpus=gpu_facts(),
        ports=tuple(port_facts(what, flag, host, port) for what, flag, port in ports),
        disks=tuple(disk_facts(what, folder) for what, folder in folders.items()),
        model=model_facts(model) if model is not None else None,
    )


def gpu_facts() -> GpuFacts:
    """What torch can use."""
    driver_loaded = Path("/proc/driver/nvidia/version").exists()
    try:
        import torch  # slow to import, and may be missing: that is itself a finding

        if not torch.cuda.is_available():
            return GpuFacts((), (), driver_loaded, torch.version.cuda or "")
        devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    except (ImportError, RuntimeError) as error:
        return GpuFacts((), (), driver_loaded, "unknown", str(error).splitlines()[0])
    names, sizes = tuple(each.name for each in devices), tuple(each.total_memory for each in devices)
    return GpuFacts(names, sizes, driver_loaded, torch.version.cuda or "")


def port_facts(what: str, flag: str, host: str, port: int) -> PortFacts:
    """Whether a server could listen there, tried by listening for a moment."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections in TIME_WAIT do not count
            listener.bind(address)
            listener.listen()
    except OSError as error:
        return PortFacts(what, flag, host, port, error.strerror or str(error), error.errno == errno.EADDRINUSE)
    return PortFacts(what, flag, host, port)


def disk_facts(what: str, folder: Path) -> DiskFacts:
    """The file system that a folder is on, or will be on once it is made."""
    folder = folder.expanduser().absolute()
    there = next(each for each in (folder, *folder.parents) if each.exists())
    usage = shutil.disk_usage(there)
    return DiskFacts(what, str(folder), usage.free, usage.total, os.access(there, os.W_OK))


def model_facts(folder: Path) -> ModelFacts:
    """What lies in a model folder; weights are counted, not read."""
    weights = sum(each.stat().st_size for each in folder.glob("*.safetensors"))
    pickled = any(each.suffix in (".bin", ".pt", ".pth") for each in folder.glob("*"))
    tokenizer = (folder / "tokenizer.json").is_file()
    try:
        spec = ModelSpec.from_folder(folder)
    except UnsupportedModelError as error:
        return ModelFacts(str(folder), str(error), weights, pickled, tokenizer)
    description = f"{spec.architecture}, {spec.num_layers} layers, hidden {spec.hidden_size}, vocab {spec.vocab_size}"
    return ModelFacts(str(folder), "", weights, pickled, tokenizer, description)
