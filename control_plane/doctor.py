"""`nanoflow doctor`: whether this machine can serve, what is wrong, and how to mend it.

Pure: each check is a function of plain facts, which `host_facts` gathers. Knows nothing of how facts are found
and starts nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial

from rich.console import Console
from rich.table import Table

from control_plane.host_facts import DiskFacts, GpuFacts, HostFacts, ModelFacts, PortFacts

_GIB = 2**30
_OLDEST_PYTHON = (3, 11)
_OLDEST_RAY = (2, 52)  # the first with token authentication
_LEAST_MEMORY = 1 * _GIB
_ENOUGH_MEMORY = 3 * _GIB  # the demo's server is under 2.5 GB
_LEAST_DISK = 1 * _GIB
_ENOUGH_DISK = 5 * _GIB
_ENOUGH_SHM = 256 * 2**20
_ENOUGH_FILES = 4096
_RAY_FULL_DISK = 0.95  # Ray makes no more objects above this


class Status(StrEnum):
    """How bad it is; only BROKEN makes the command fail."""

    OK = "ok"
    INFO = "info"
    WARNING = "warning"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check."""

    check: str
    status: Status
    found: str  # what is there
    remedy: str = ""  # what to do about it; empty when nothing need be done


def diagnose(facts: HostFacts) -> list[Finding]:
    """All checks in the order in which they are shown."""
    findings = [
        check_system(facts.system),
        check_python(facts.python),
        check_ray(facts.ray_version),
        check_ray_auth(facts.ray_auth_mode),
        check_torch(facts.torch_version),
        check_gpus(facts.gpus),
        check_memory(facts.available_memory_bytes, facts.num_cpus),
        check_shm(facts.shm_bytes),
        check_open_files(facts.max_open_files),
        *(check_disk(disk) for disk in facts.disks),
        *(check_port(port) for port in facts.ports),
    ]
    if facts.model is not None:
        findings.append(check_model(facts.model, facts.available_memory_bytes))
    findings.append(check_optional(facts.optional_libraries, has_gpu=bool(facts.gpus.names)))
    return findings


def _finding(check: str) -> tuple[Callable[..., Finding], Callable[..., Finding], Callable[..., Finding]]:
    """Makers of an OK, a WARNING and a BROKEN finding of a check."""
    ok, warning, broken = (partial(Finding, check, status) for status in (Status.OK, Status.WARNING, Status.BROKEN))
    return ok, warning, broken


def check_system(system: str) -> Finding:
    """Linux is what is tested."""
    ok, warning, _ = _finding("system")
    return ok(system) if system == "linux" else warning(system, "only Linux is tested: expect trouble elsewhere")


def check_python(version: tuple[int, ...]) -> Finding:
    """The interpreter's version."""
    ok, _, broken = _finding("python")
    shown = ".".join(map(str, version))
    if version < _OLDEST_PYTHON:
        return broken(shown, "install Python 3.11 or newer and make the environment anew: make clean setup")
    return ok(shown)


def check_ray(version: str) -> Finding:
    """Ray is installed, and new enough to have token authentication."""
    ok, _, broken = _finding("ray")
    oldest = ".".join(map(str, _OLDEST_RAY))
    if not version:
        return broken("not installed", f'pip install "ray[default]>={oldest}"')
    if _numbers(version) < _OLDEST_RAY:
        return broken(version, f'older than {oldest}: pip install -U "ray[default]"')
    return ok(version)


def check_ray_auth(mode: str) -> Finding:
    """Whoever reaches Ray's ports can run code, unless tokens are asked for."""
    ok, _, broken = _finding("ray authentication")
    if mode and mode.lower() not in ("token", "disabled"):
        return broken(f"RAY_AUTH_MODE={mode}", "set RAY_AUTH_MODE to token or disabled, the same on every machine")
    if mode.lower() == "token":
        return ok("tokens (RAY_AUTH_MODE=token)")
    return Finding(
        "ray authentication",
        Status.INFO,
        f"RAY_AUTH_MODE={mode or 'not set'}",
        "on a network that others reach, set RAY_AUTH_MODE=token on every machine: Ray's ports run anyone's code",
    )


def check_torch(version: str) -> Finding:
    """PyTorch is installed."""
    ok, _, broken = _finding("torch")
    return ok(version) if version else broken("not installed", "pip install torch, or make setup")


def check_gpus(gpus: GpuFacts) -> Finding:
    """GPUs that torch can use; none is fine, unless there is one that it cannot use."""
    ok, warning, broken = _finding("gpu")
    if gpus.names:
        shown = (f"{name} ({_size(size)})" for name, size in zip(gpus.names, gpus.total_bytes, strict=True))
        return ok(f"{', '.join(shown)}; CUDA {gpus.torch_cuda}")
    if not gpus.driver_loaded:
        return Finding("gpu", Status.INFO, "no GPU: the CPU backend is used")
    if not gpus.torch_cuda:
        return warning(
            "an NVIDIA driver, but torch was built for CPUs: the CPU backend is used",
            "install torch with CUDA: make clean setup TORCH=torch",
        )
    return broken(
        f"an NVIDIA driver, but torch cannot use it: {gpus.error or 'no device visible'}",
        f"check nvidia-smi and CUDA_VISIBLE_DEVICES; the driver must be new enough for CUDA {gpus.torch_cuda}",
    )


def check_memory(available_bytes: int, num_cpus: int) -> Finding:
    """Memory for weights, KV cache and Ray's own processes."""
    ok, warning, broken = _finding("memory")
    shown = f"{_size(available_bytes)} available, {num_cpus} CPU cores"
    if available_bytes < _LEAST_MEMORY:
        return broken(shown, f"stop other programs or raise the limit: at least {_size(_LEAST_MEMORY)} is needed")
    if available_bytes < _ENOUGH_MEMORY:
        return warning(shown, f"enough for tiny models only; the default model wants {_size(_ENOUGH_MEMORY)}")
    return ok(shown)


def check_shm(size_bytes: int | None) -> Finding:
    """Ray's object store lives in shared memory, and falls back to files when it is small."""
    ok, warning, _ = _finding("shared memory")
    if size_bytes is None:
        return warning("no /dev/shm", "mount a tmpfs there: Ray puts its objects on the disk without it")
    if size_bytes < _ENOUGH_SHM:
        return warning(f"/dev/shm of {_size(size_bytes)}", "make it larger: docker run --shm-size=2g")
    return ok(f"/dev/shm of {_size(size_bytes)}")


def check_open_files(limit: int) -> Finding:
    """Each process and each connection takes descriptors."""
    ok, warning, _ = _finding("open files")
    return ok(str(limit)) if limit >= _ENOUGH_FILES else warning(f"limit of {limit}", f"ulimit -n {_ENOUGH_FILES * 16}")


def check_disk(disk: DiskFacts) -> Finding:
    """Space where models, caches and Ray's logs go."""
    ok, warning, broken = _finding(f"disk ({disk.what})")
    shown = f"{_size(disk.free_bytes)} of {_size(disk.total_bytes)} free at {disk.path}"
    if not disk.writable:
        return broken(f"{disk.path} cannot be written", "change its permissions, or choose another folder")
    if disk.free_bytes < _LEAST_DISK:
        return broken(shown, f"free some: at least {_size(_LEAST_DISK)} is needed")
    if disk.free_bytes < _ENOUGH_DISK or disk.free_bytes < (1 - _RAY_FULL_DISK) * disk.total_bytes:
        return warning(shown, f"free some: Ray stops making objects on a disk that is {_RAY_FULL_DISK:.0%} full")
    return ok(shown)


def check_port(port: PortFacts) -> Finding:
    """The server can listen there."""
    ok, _, broken = _finding(f"port ({port.what})")
    shown = f"{port.host}:{port.port}"
    if port.in_use:
        return broken(
            f"{shown} is in use", f"see who listens: ss -ltnp 'sport = :{port.port}'; stop it, or give {port.flag}"
        )
    if port.problem:
        return broken(f"{shown}: {port.problem}", f"give another {port.flag} or --host")
    return ok(f"{shown} is free" if port.port else f"{port.host}, any free port")


def check_model(model: ModelFacts, available_bytes: int) -> Finding:
    """A model folder that can be served."""
    ok, warning, broken = _finding("model")
    if model.config_error:
        return broken(model.config_error, "give a folder with a supported config.json (README: models)")
    shown = f"{model.description}; weights {_size(model.weight_bytes)}"
    if not model.weight_bytes:
        pickled = " (*.bin and *.pt are never read: they can run code)" if model.has_pickled_weights else ""
        return broken(
            f"{model.path} has no *.safetensors{pickled}",
            "convert the weights, or use --load-format dummy to benchmark",
        )
    if model.weight_bytes > available_bytes:
        return broken(shown, f"the weights alone exceed the {_size(available_bytes)} of memory available")
    if not model.has_tokenizer:
        return warning(f"{shown}; no tokenizer.json", "only requests by token ids will work: add tokenizer.json")
    return ok(shown)


def check_optional(libraries: Iterable[tuple[str, str]], *, has_gpu: bool) -> Finding:
    """Libraries that only GPUs use."""
    found = [f"{name} {version}" for name, version in libraries if version]
    missing = [name for name, version in libraries if not version]
    shown = ", ".join(found + [f"no {name}" for name in missing])
    remedy = f"pip install {' '.join(missing)}" if missing and has_gpu else ""
    return Finding("optional libraries", Status.INFO, f"{shown} (used on GPUs only)", remedy)


def exit_code(findings: Iterable[Finding]) -> int:
    """1 when something is broken, else 0."""
    return int(any(each.status is Status.BROKEN for each in findings))


def to_json(findings: Sequence[Finding]) -> str:
    """One JSON object: `ok`, and `findings` as shown in the table."""
    return json.dumps({"ok": exit_code(findings) == 0, "findings": [asdict(each) for each in findings]})


_STYLES = {Status.OK: "green", Status.INFO: "blue", Status.WARNING: "yellow", Status.BROKEN: "bold red"}


def show(findings: Sequence[Finding], console: Console) -> None:
    """Print a table and a verdict."""
    table = Table("check", "status", "found", "how to mend it", title="nanoflow doctor", title_justify="left")
    for each in findings:
        style = _STYLES[each.status]
        table.add_row(each.check, f"[{style}]{each.status}[/]", _plain(each.found), _plain(each.remedy))
    console.print(table)
    broken = sum(each.status is Status.BROKEN for each in findings)
    console.print(f"[bold red]{broken} broken[/]" if broken else "[green]ready to serve[/]")


def _plain(text: str) -> str:
    return text.replace("[", r"\[")


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 2.60.0rc1 is (2, 60)."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / 2**20:.0f} MiB"
