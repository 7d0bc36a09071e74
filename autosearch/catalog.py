"""Models and accelerators by name, in plain numbers.

GPU rows are the paper's Table 1 and the real H200; models are the paper's, with the exact parameter count that
follows from their shapes and the nominal one that the paper's published optima imply. Knows nothing of profiles.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from autosearch.errors import AutosearchError
from autosearch.parameters import ParameterCount, count_parameters
from autosearch.plain_data import PlainDataError, build, read_text
from autosearch.specs import ModelSpec


class CatalogError(AutosearchError):
    """An unknown model or GPU, or a GPU file that cannot be used; the message says how to mend it."""


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """One accelerator. GB and TB are decimal, rates are dense 16-bit."""

    name: str
    memory_gb: float
    memory_gb_per_s: float
    network_gb_per_s: float  # both directions together, as vendors print it
    compute_gflop_per_s: float
    gemm_gflop_per_s: float | None = None  # measured peak of a large GEMM; None: not known, the data sheet stands in
    max_power_w: float | None = None

    @property
    def one_way_network_gb_per_s(self) -> float:
        """What one direction carries; collectives are bound by it (paper, Table 2)."""
        return self.network_gb_per_s / 2

    @property
    def best_gemm_gflop_per_s(self) -> float:
        """The rate that the optimal throughput (Eq. 5) is taken at."""
        return self.gemm_gflop_per_s or self.compute_gflop_per_s


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model with both of its parameter counts."""

    name: str
    spec: ModelSpec
    exact: ParameterCount
    nominal_parameters: float | None = (
        None  # active parameters as the paper's published optima imply; None: not built in
    )

    @property
    def optimum_parameters(self) -> float:
        """The count that published optima use: the nominal one where there is one."""
        return self.nominal_parameters or float(self.exact.active)


_A100_GEMM = 260e3  # every optimum that the paper publishes implies 260 TFLOP/s
GPUS: dict[str, GpuSpec] = {
    gpu.name: gpu
    for gpu in (
        GpuSpec("v100", 16, 900, 300, 125e3),
        GpuSpec("a100-40gb", 40, 1555, 600, 312e3, _A100_GEMM),
        GpuSpec("a100-80gb", 80, 2000, 600, 312e3, _A100_GEMM, 400),
        GpuSpec("h100", 80, 3352, 900, 989e3),
        GpuSpec("h200-96gb", 96, 4800, 900, 989e3),  # as Table 1 prints it
        GpuSpec("h200", 141, 4800, 900, 989e3, 660e3, 700),  # the card one can buy; sustained GEMM rate
        GpuSpec("b100", 120, 8000, 1800, 1800e3),
        GpuSpec("b200", 120, 8000, 1800, 2250e3),
        GpuSpec("mi250", 128, 3352, 800, 362e3),
        GpuSpec("mi300", 192, 5300, 1024, 1307e3),
        GpuSpec("mi325x", 256, 6000, 1024, 1307e3),
        GpuSpec("gaudi2", 96, 2400, 600, 1000e3),
        GpuSpec("gaudi3", 128, 3700, 1200, 1800e3),
        GpuSpec("ada6000", 48, 960, 64, 182e3),
    )
}


_SMALLEST, _LARGEST = 1e-6, 1e15  # of a GPU file's numbers, in their units


def find_gpu(name_or_file: str) -> GpuSpec:
    """A built-in GPU by name, or one from a YAML file with GpuSpec's fields. Raises CatalogError."""
    if name_or_file.lower() in GPUS:
        return GPUS[name_or_file.lower()]
    path = Path(name_or_file)
    if path.suffix in (".yaml", ".yml"):
        return _gpu_from_yaml(path)
    raise CatalogError(f"unknown GPU {name_or_file!r}: give a .yaml file or one of {', '.join(sorted(GPUS))}")


def _gpu_from_yaml(path: Path) -> GpuSpec:
    try:
        loaded = yaml.safe_load(read_text(path))
    except (OSError, yaml.YAMLError, RecursionError, PlainDataError) as error:
        raise CatalogError(f"GPU file {path} cannot be read: {error}") from None
    known = [field.name for field in fields(GpuSpec)]
    if not isinstance(loaded, dict) or set(loaded) - set(known):
        raise CatalogError(f"GPU file {path} must be a mapping with the keys {', '.join(known)}")
    try:
        gpu = build(GpuSpec, {"name": path.stem} | {key: _yaml_number(key, value) for key, value in loaded.items()})
    except PlainDataError as error:
        raise CatalogError(f"GPU file {path}: {error}") from None
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._ -]*", gpu.name):  # it becomes part of file names
        raise CatalogError(f"GPU file {path}: name {gpu.name!r} may have letters, digits, dots, dashes and spaces")
    for key, value in asdict(gpu).items():
        if key != "name" and value is not None and not _SMALLEST <= value <= _LARGEST:
            raise CatalogError(f"GPU file {path}: {key} {value} must lie between {_SMALLEST:.0e} and {_LARGEST:.0e}")
    return gpu


def _yaml_number(key: str, value: Any) -> Any:
    """YAML 1.1 reads 1e5, without a dot, as a string."""
    try:
        return float(value) if key != "name" and isinstance(value, str) and value[:1].isdigit() else value
    except ValueError:
        return value


def _config(architecture: str, shape: tuple[int, ...], **more: Any) -> dict[str, Any]:
    layers, hidden, heads, kv_heads, intermediate, vocab, context = shape
    return {
        "architectures": [architecture],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        **more,
    }


_LLAMA, _QWEN2, _MIXTRAL = "LlamaForCausalLM", "Qwen2ForCausalLM", "MixtralForCausalLM"
# name: (config.json in short, nominal parameters)
_MODELS: dict[str, tuple[dict[str, Any], float]] = {
    "llama-2-70b": (_config(_LLAMA, (80, 8192, 64, 8, 28672, 32000, 4096)), 70.0e9),
    "llama-3-8b": (_config(_LLAMA, (32, 4096, 32, 8, 14336, 128256, 8192), rope_theta=5e5), 8.007e9),
    "llama-3-70b": (_config(_LLAMA, (80, 8192, 64, 8, 28672, 128256, 8192), rope_theta=5e5), 70.0e9),
    "llama-3-405b": (_config(_LLAMA, (126, 16384, 128, 8, 53248, 128256, 8192), rope_theta=5e5), 405.0e9),
    "qwen2-72b": (_config(_QWEN2, (80, 8192, 64, 8, 29568, 152064, 32768), rope_theta=1e6), 72.1e9),
    "deepseek-67b": (_config(_LLAMA, (95, 8192, 64, 8, 22016, 102400, 4096)), 66.87e9),
    "mixtral-8x7b": (
        _config(
            _MIXTRAL, (32, 4096, 32, 8, 14336, 32000, 32768), num_local_experts=8, num_experts_per_tok=2, rope_theta=1e6
        ),
        12.6e9,
    ),
}
MODEL_NAMES = tuple(sorted(_MODELS))


def find_model(name_or_folder: str) -> KnownModel:
    """A built-in model by name, or one from a Hugging Face folder or config.json.

    Raises CatalogError for an unknown name, UnsupportedModelError for a config.json that cannot be used.
    """
    if name_or_folder.lower() in _MODELS:
        config, nominal = _MODELS[name_or_folder.lower()]
        spec = ModelSpec.from_config(config)
        return KnownModel(name_or_folder.lower(), spec, count_parameters(spec), nominal)
    path = Path(name_or_folder)
    folder = path.parent if path.name == "config.json" else path
    if not folder.is_dir() or not name_or_folder:
        raise CatalogError(
            f"unknown model {name_or_folder!r}: give a folder with a config.json or one of {', '.join(MODEL_NAMES)}"
        )
    spec = ModelSpec.from_folder(folder)
    return KnownModel(folder.resolve().name, spec, count_parameters(spec))
