"""`nanoflow profile`: measures a model's operators on this machine's device, for `nanoflow search --profile FILE`.

Parses, loads, calls the profiler and prints: a table on stderr, one JSON line at the end. Knows nothing of how
anything is measured.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autosearch.catalog import GPUS, MODEL_NAMES, find_model
from autosearch.profile_table import MeasuredOn, ProfileTable
from autosearch.specs import ModelSpec
from control_plane.interrupts import ends_at_once
from control_plane.options import ConfigError
from control_plane.planning_options import ends_in_one_line, numbers
from control_plane.progress import ProgressLine
from control_plane.release import version_of

if TYPE_CHECKING:
    from worker.profile_points import Scope
    from worker.profiler import Device, Measurements
    from worker.steady_batch import SteadyMix

_SIZES = {"cuda": "128,256,512,768,1024,1536,2048", "cpu": "32,64"}
_FORMATS = ("auto", "safetensors", "dummy")
_LIBRARIES = ("torch", "triton", "cupy-cuda13x", "nanoflow-runtime")


def register(app: typer.Typer) -> None:
    """Add the command to an app."""
    app.command()(ends_in_one_line(profile))


def profile(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Model folder in Hugging Face's layout.")],
    output: Annotated[Path, typer.Option("--output", metavar="FILE", help="The profile to write.")],
    load_format: Annotated[str, typer.Option(help="auto or safetensors; dummy: random weights.")] = "auto",
    batch_sizes: Annotated[
        str | None,
        typer.Option(help="Rows to measure with, the largest is B_dense.", show_default=" or ".join(_SIZES.values())),
    ] = None,
    max_seconds: Annotated[float, typer.Option(min=1, help="Seconds at most, loading included.")] = 300.0,
    decode_share: Annotated[float, typer.Option(help="Share of the rows that decode.")] = 0.5,
    mean_context: Annotated[int, typer.Option(min=1, help="Mean KV tokens that a decode reads.")] = 768,
    prompt_len: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 512,
    device: Annotated[str, typer.Option(help="cuda; cpu: a dry run on reference kernels.")] = "cuda",
    dtype: Annotated[str, typer.Option(help="Type of weights, activations and KV.")] = "auto",
) -> None:
    """Measure a model's operators, alone and beside each other, on one GPU: five minutes at most."""
    began = time.monotonic()
    for flag, value, known in (("device", device, _SIZES), ("load-format", load_format, _FORMATS)):
        if value not in known:
            raise ConfigError(f"--{flag} {value!r} is none of {', '.join(known)}")
    sizes = tuple(sorted(set(numbers(batch_sizes or _SIZES[device], int))))
    if not 0 < decode_share < 1 or sizes[0] < 2:
        raise ConfigError(f"--decode-share {decode_share} must lie between 0 and 1, and --batch-sizes be at least 2")
    if not output.parent.is_dir():
        raise ConfigError(f"--output: there is no folder {output.parent}")
    with ends_at_once():
        from worker.profiler import measure
        from worker.steady_batch import SteadyMix

    mix = SteadyMix(sizes[-1], max(1, round(decode_share * sizes[-1])), mean_context, prompt_len)
    line = ProgressLine()
    try:
        on, measured_on, scope, spec = _open(model, load_format, dtype, device, sizes, mix, line)
        load_s = time.monotonic() - began
        found = measure(on, scope, began + max_seconds, progress=line.share)
    finally:
        line.done()
    table = _table(found, scope, mix, measured_on, model, spec)
    text = table.to_json() + "\n"
    output.write_text(text, encoding="utf-8")
    _show(found, scope)
    figures = _figures(found, scope, table)
    seconds = {"seconds": round(time.monotonic() - began, 1), "load_s": round(load_s, 1), "bytes": len(text.encode())}
    print(json.dumps({"profile": str(output), **figures, **seconds}), flush=True)


def _open(
    model: Path, load_format: str, dtype: str, device: str, sizes: tuple[int, ...], mix: SteadyMix, line: ProgressLine
) -> tuple[Device, MeasuredOn, Scope, ModelSpec]:
    """The model on the device, ready to be measured."""
    from worker.config import DEVICE_DEFAULTS, WorkerConfig
    from worker.cuda_loading import load_model
    from worker.profile_device import Bench, HostDevice
    from worker.profile_points import Scope, bursts

    defaults = DEVICE_DEFAULTS[device]
    sequences = mix.num_decodes + -(-(mix.rows - mix.num_decodes) // mix.prompt_len)
    config = WorkerConfig(
        model_dir=model.resolve(),
        load_format=load_format,
        dtype=dtype,
        device=device,
        max_batch_tokens=sizes[-1],
        max_slots=max(defaults.max_slots, sequences),
        page_size=defaults.page_size,
    )
    loaded = load_model(config, line.share, sizes[-1:])
    bench = Bench(loaded, mix)
    scope = Scope(bench.operators, bench.model.num_sms, sizes)
    bench.prepare(bursts(scope))
    if device == "cpu":
        measured_on = MeasuredOn("cpu", 1, scope.num_sms, versions=_versions())
        return HostDevice(bench), measured_on, scope, loaded.spec
    import torch

    from worker.power_meter import NvmlCard
    from worker.profile_cuda import CudaDevice

    card = NvmlCard()
    versions = {"driver": card.driver(), "cuda": str(torch.version.cuda), **_versions()}
    name = gpu_name(torch.cuda.get_device_name())
    measured_on = MeasuredOn(name, 1, scope.num_sms, power_limit_w=card.power_limit_watts(), versions=versions)
    return CudaDevice(bench, card), measured_on, scope, loaded.spec


def gpu_name(device_name: str) -> str:
    """The catalog's name for what the driver calls the device; else the driver's, for a YAML file of that name."""
    words = device_name.lower().replace("-", " ").split()
    fitting = [name for name in GPUS if all(any(part in word for word in words) for part in name.split("-"))]
    return max(fitting, key=len, default="-".join(words))


def model_name(spec: ModelSpec, folder: Path) -> str:
    """A built-in model's name where the shapes are its, so that the profile serves everywhere; else the folder."""

    def shapes(of: ModelSpec) -> ModelSpec:
        """Without what no operator depends on."""
        return replace(of, bos_token_id=None, eos_token_ids=(), rope=spec.rope, max_position=0, norm_eps=0.0)

    return next((name for name in MODEL_NAMES if shapes(find_model(name).spec) == shapes(spec)), str(folder.resolve()))


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    return found | {library: number for library in _LIBRARIES if (number := version_of(library))}


def _table(
    found: Measurements, scope: Scope, mix: SteadyMix, measured_on: MeasuredOn, model: Path, spec: ModelSpec
) -> ProfileTable:
    from worker.profile_assembly import assemble

    clocks = [reading.sm_mhz for reading in found.layers if reading.sm_mhz is not None]
    measured_on = replace(
        measured_on, clock_mhz=clocks[-1] if clocks else None, static_power_w=_rounded(found.static_watts)
    )
    known = model_name(spec, model)
    return assemble(found, scope, f"{measured_on.gpu}-{Path(known).name}", known, measured_on, mix.workload)


def _figures(found: Measurements, scope: Scope, table: ProfileTable) -> dict[str, Any]:
    from worker.profile_assembly import whole_us

    alone = [whole_us(found, operator.name, scope.largest) for operator in scope.operators]
    known = [time for time in alone if time is not None]
    return {
        "name": table.name,
        "gpu": table.measured_on.gpu,
        "model": table.model,
        "batch_sizes": list(scope.batch_sizes),
        "num_bursts": len(found.bursts),
        "num_sustained": found.num_sustained,
        "num_pairs": len(found.pairs),
        "num_skipped_bursts": found.num_skipped_bursts,
        "num_skipped_points": found.num_skipped_points,
        # Of the largest batch: operators one by one, each by itself, and one after the other.
        "sum_of_operators_us": round(sum(known), 2) if len(known) == len(alone) else None,
        "layer_us": [round(reading.time_us, 2) for reading in found.layers],
        "layer_watts": [_rounded(reading.watts) for reading in found.layers],
        "around_layers_us": None if found.around is None else round(found.around.time_us, 2),
        "static_watts": _rounded(found.static_watts),
        "spread": table.spread,
        "versions": dict(table.measured_on.versions),
        "fingerprint": table.fingerprint,
    }


def _show(found: Measurements, scope: Scope) -> None:
    """What was read, on stderr."""
    from worker.profile_assembly import pair_rates

    lines = ["alone, sustained: operator, tokens, SMs, kernel, µs of a layer, burst, W, MHz"]
    for launch, reading in found.alone.items():
        sms = launch.place.sms or scope.num_sms
        burst = found.bursts[launch]
        lines.append(
            f"  {launch.operator:<18}{launch.tokens:>6}{sms:>5} {launch.kernel or 'default':<9}"
            f"{reading.time_us:>9.1f}{burst:>9.1f}{_field(reading.watts)}{_field(reading.sm_mhz)}"
        )
    lines.append("beside each other: GEMM, its SMs and kernel, attention's, rates R and P, their sum, W, MHz")
    for pair, (reading, _) in found.pairs.items():
        rates, compute, memory = pair_rates(found, pair), pair.compute, pair.memory
        told = f"{rates[0]:>7.3f}{rates[1]:>7.3f}{sum(rates):>7.3f}" if rates else " not read alone"
        lines.append(
            f"  {compute.operator:<10}{compute.place.sms:>4} {compute.kernel or 'default':<9}{memory.place.sms:>4} "
            f"{memory.kernel or 'default':<9}{told}{_field(reading.watts)}{_field(reading.sm_mhz)}"
        )
    print("\n".join(lines), file=sys.stderr, flush=True)


def _field(value: float | None) -> str:
    return f"{'-':>7}" if value is None else f"{value:>7.0f}"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
