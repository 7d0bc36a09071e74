"""A model in plain numbers, from its Hugging Face config.json.

Knows nothing of weights, tensors or devices. Unknown architectures and rope kinds are refused here, once,
so that nothing later can run a model it does not understand.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class UnsupportedModelError(ValueError):
    """The config.json asks for something this runtime does not do, or lacks something it needs."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding. Numbers as in config.json; unused ones keep their defaults."""

    theta: float = 10000.0
    kind: str = "default"  # default | linear | llama3 | yarn
    factor: float = 1.0
    original_max_position: int = 0  # llama3, yarn: context of the unscaled model
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: derived from factor (and the two below)
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: whether the correction range is rounded to whole dimensions


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shapes of a decoder-only transformer with grouped-query attention and a gated FFN."""

    architecture: str  # llama | qwen2 | mixtral
    num_layers: int
    hidden_size: int
    num_heads: int  # query heads
    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # of one expert where there are experts
    vocab_size: int
    max_position: int  # longest context that the model was made for
    norm_eps: float
    rope: RopeSpec
    tie_embeddings: bool  # lm_head is the embedding
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    num_experts: int = 0  # 0: dense FFN
    experts_per_token: int = 0
    norm_topk_prob: bool = True  # router weights of the chosen experts are scaled to sum to 1
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelSpec:
        """Read config.json in a model folder. Raises UnsupportedModelError, naming what is wrong."""
        path = Path(folder) / "config.json"
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UnsupportedModelError(f"{folder} has no config.json: give a Hugging Face model folder") from None
        except (OSError, ValueError) as error:
            raise UnsupportedModelError(f"{path} cannot be read as JSON: {error}") from None
        if not isinstance(config, dict):
            raise UnsupportedModelError(f"{path} must hold a JSON object")
        return cls.from_config(config)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ModelSpec:
        """From the parsed config.json. Raises UnsupportedModelError, naming the key that is wrong."""
        architecture = _architecture(config)
        config = {**_DEFAULTS[architecture], **config}
        hidden_size, num_heads = _int(config, "hidden_size"), _int(config, "num_attention_heads")
        num_kv_heads = num_heads if config.get("num_key_value_heads") is None else _int(config, "num_key_value_heads")
        _refuse_unknown_features(config, architecture)
        head_dim = _head_dim(config, hidden_size, num_heads, num_kv_heads)
        num_experts = 0
        if architecture == "mixtral":
            # Renamed in transformers 5; both are read.
            num_experts = _int(config, "num_local_experts", "num_experts")
        biased = architecture == "llama" and bool(config.get("attention_bias"))
        return cls(
            architecture=architecture,
            num_layers=_int(config, "num_hidden_layers"),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=_int(config, "intermediate_size"),
            vocab_size=_int(config, "vocab_size"),
            max_position=_int(config, "max_position_embeddings"),
            norm_eps=_number(config, "rms_norm_eps"),
            rope=_rope(config),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=architecture == "qwen2" or biased,
            o_bias=biased,
            mlp_bias=architecture == "llama" and bool(config.get("mlp_bias")),
            num_experts=num_experts,
            experts_per_token=_experts_per_token(config, num_experts),
            bos_token_id=next(iter(_token_ids(config, "bos_token_id")), None),
            eos_token_ids=_token_ids(config, "eos_token_id"),
        )

    @property
    def kv_elements_per_token_per_layer(self) -> int:
        """K and V elements of one token in one layer (times the dtype's size: bytes)."""
        return 2 * self.num_kv_heads * self.head_dim


_ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "MixtralForCausalLM": "mixtral"}
_MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "mixtral": "mixtral"}
# What an absent key means, as in transformers' configuration classes. Shapes have no defaults here.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "bos_token_id": 1, "eos_token_id": 2},
    "qwen2": {"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "num_key_value_heads": 32},
    "mixtral": {
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}


def _architecture(config: dict[str, Any]) -> str:
    names = config.get("architectures") or []
    found = names or config.get("model_type")
    if not isinstance(names, list) or not all(isinstance(each, str) for each in [*names, config.get("model_type", "")]):
        raise UnsupportedModelError(f"config.json: architectures and model_type must be names, not {found!r}")
    for name in names:
        if name in _ARCHITECTURES:
            return _ARCHITECTURES[name]
    if not names and config.get("model_type") in _MODEL_TYPES:
        return _MODEL_TYPES[config["model_type"]]
    raise UnsupportedModelError(f"architecture {found!r} is not supported: {', '.join(sorted(_ARCHITECTURES))} are")


def _int(config: dict[str, Any], *names: str, low: int = 1) -> int:
    """The first of the given spellings of a key, as a whole number, a positive one unless `low` is 0."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise UnsupportedModelError(f"config.json: {name} must be a positive whole number, not {value!r}")
        return value
    raise UnsupportedModelError(f"config.json lacks {' / '.join(names)}")


def _token_ids(config: dict[str, Any], name: str) -> tuple[int, ...]:
    """A token id, a list of them, or null."""
    value = config.get(name)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise UnsupportedModelError(f"config.json: {name} must be a token id or a list of them, not {value!r}")
    if any(token < 0 for token in ids):
        raise UnsupportedModelError(f"config.json: {name} {value!r} is below zero: give null where there is none")
    return tuple(ids)


def _head_dim(config: dict[str, Any], hidden_size: int, num_heads: int, num_kv_heads: int) -> int:
    if num_heads % num_kv_heads:
        raise UnsupportedModelError(
            f"config.json: num_key_value_heads {num_kv_heads} does not divide num_attention_heads {num_heads}"
        )
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise UnsupportedModelError(
            f"config.json: num_attention_heads {num_heads} does not divide hidden_size {hidden_size}, "
            "and there is no head_dim"
        )
    head_dim = hidden_size // num_heads if config.get("head_dim") is None else _int(config, "head_dim")
    if head_dim % 2:
        raise UnsupportedModelError(f"config.json: head_dim {head_dim} is odd, but rope turns pairs of dimensions")
    return head_dim


def _experts_per_token(config: dict[str, Any], num_experts: int) -> int:
    if not num_experts:
        return 0
    count = _int(config, "num_experts_per_tok")
    if count > num_experts:
        raise UnsupportedModelError(f"config.json: num_experts_per_tok {count} is more than the {num_experts} experts")
    return count


def _refuse_unknown_features(config: dict[str, Any], architecture: str) -> None:
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedModelError(f"hidden_act {config['hidden_act']!r} is not supported: only silu is")
    if config.get("quantization_config"):
        raise UnsupportedModelError("quantised weights (quantization_config) are not supported: use the plain model")
    if config.get("partial_rotary_factor") not in (None, 1.0):
        raise UnsupportedModelError("partial_rotary_factor is not supported: the whole head must be rotated")
    window = None if not config.get("sliding_window") else _int(config, "sliding_window")
    if architecture == "llama" or not window or window >= _int(config, "max_position_embeddings"):
        return
    if architecture == "qwen2":
        if not config.get("use_sliding_window", False):
            return
        layers = _int(config, "num_hidden_layers")
        full = _int({"max_window_layers": 28, **_given(config)}, "max_window_layers", low=0)
        kinds = config.get("layer_types") or ["full_attention"] * min(full, layers)
        if kinds == ["full_attention"] * layers:
            return
    raise UnsupportedModelError(f"sliding_window {window} is not supported: only full attention is")


def _rope(config: dict[str, Any]) -> RopeSpec:
    """Both spellings: `rope_theta` + `rope_scaling` (with `type` or `rope_type`), and `rope_parameters`.

    Where a config.json has both, `rope_scaling` counts, as in transformers.
    """
    params: dict[str, Any] = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(params, dict):
        raise UnsupportedModelError(f"config.json: rope scaling must be a JSON object, not {params!r}")
    kind = params.get("rope_type") or params.get("type") or "default"
    theta = _number(params, "rope_theta", config["rope_theta"])
    if params.get("partial_rotary_factor") not in (None, 1.0):
        raise UnsupportedModelError("partial_rotary_factor is not supported: the whole head must be rotated")
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind == "linear":
        return RopeSpec(theta=theta, kind=kind, factor=_number(params, "factor"))
    max_position = _int(config, "max_position_embeddings")
    # A key beside the rope parameters counts more than the one among them.
    original = _int(
        {"original_max_position_embeddings": max_position, **_given(params), **_given(config)},
        "original_max_position_embeddings",
    )
    if kind == "llama3":
        low, high = _number(params, "low_freq_factor"), _number(params, "high_freq_factor")
        if low >= high:
            raise UnsupportedModelError(
                f"config.json: high_freq_factor {high:g} must be more than low_freq_factor {low:g}"
            )
        return RopeSpec(
            theta=theta,
            kind=kind,
            factor=_number(params, "factor"),
            original_max_position=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    if kind == "yarn":
        return _yarn(params, theta, original, max_position)
    raise UnsupportedModelError(f"rope type {kind!r} is not supported: default, linear, llama3 and yarn are")


def _yarn(params: dict[str, Any], theta: float, original: int, max_position: int) -> RopeSpec:
    if theta <= 1:
        raise UnsupportedModelError(f"config.json: rope_theta must be more than 1 with yarn, not {theta:g}")

    def optional(name: str) -> float | None:
        return None if params.get(name) is None else _number(params, name)

    return RopeSpec(
        theta=theta,
        kind="yarn",
        factor=max_position / original if params.get("factor", 0) is None else _number(params, "factor"),
        original_max_position=original,
        beta_fast=_number(params, "beta_fast", 32.0),
        beta_slow=_number(params, "beta_slow", 1.0),
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        truncate=bool(params.get("truncate", True)),
    )


def _given(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if value is not None}


def _number(params: dict[str, Any], name: str, default: float | None = None) -> float:
    """A positive number; zero or null where there is a default count as absent."""
    value = params.get(name)
    if default is not None and not value:
        value = default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
        raise UnsupportedModelError(f"config.json: {name} must be a positive number, not {value!r}")
    return float(value)
