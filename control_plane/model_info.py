"""The served model as the front end knows it: name, vocabulary, end-of-sequence ids, sampling defaults.

Knows nothing of weights or devices. `generation_config.json` is honoured as vLLM does by default: its
temperature, top_k and top_p are the defaults of requests that set none (its do_sample is not looked at), and
its end-of-sequence ids are added to those of config.json.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autosearch.specs import ModelSpec, UnsupportedModelError


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values for what a request leaves out."""

    temperature: float = 1.0
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts of the model that validation and the Admin service need."""

    name: str  # as served
    architecture: str
    vocab_size: int  # ids are in [0, vocab_size)
    eos_token_ids: tuple[int, ...]  # each ends an output unless the request ignores them
    sampling_defaults: SamplingDefaults = SamplingDefaults()

    @classmethod
    def from_folder(
        cls, folder: str | Path, spec: ModelSpec, name: str | None = None, use_generation_config: bool = True
    ) -> ModelInfo:
        """Of a Hugging Face model folder whose config.json is `spec`.

        With use_generation_config false only its end-of-sequence ids are read. Raises UnsupportedModelError when
        generation_config.json is broken.
        """
        config = _read_generation_config(Path(folder) / "generation_config.json")
        eos = config.get("eos_token_id")
        more = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
        if not all(isinstance(token, int) and 0 <= token < spec.vocab_size for token in more):
            raise UnsupportedModelError(f"generation_config.json: eos_token_id {eos!r} is not within the vocabulary")
        return cls(
            name=name or Path(folder).resolve().name,
            architecture=spec.architecture,
            vocab_size=spec.vocab_size,
            eos_token_ids=tuple(dict.fromkeys((*spec.eos_token_ids, *more))),
            sampling_defaults=_sampling_defaults(config) if use_generation_config else SamplingDefaults(),
        )


def _read_generation_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UnsupportedModelError(f"{path.name} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise UnsupportedModelError(f"{path.name} must hold a JSON object")
    return config


def _sampling_defaults(config: dict[str, Any]) -> SamplingDefaults:
    temperature = _number(config, "temperature", 1.0)
    top_k = _number(config, "top_k", 0)
    top_p = _number(config, "top_p", 1.0)
    if temperature < 0 or top_k < 0 or not 0 < top_p <= 1:
        raise UnsupportedModelError(
            f"generation_config.json: temperature {temperature}, top_k {top_k}, top_p {top_p} are not all valid; "
            "mend the file, or start without it"
        )
    return SamplingDefaults(temperature=temperature, top_k=int(top_k), top_p=top_p)


def _number(config: dict[str, Any], key: str, default: float) -> float:
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UnsupportedModelError(f"generation_config.json: {key} must be a number, not {value!r}")
    return float(value)
