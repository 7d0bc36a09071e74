"""A model in plain numbers, from its Hugging Face config.json.

Knows nothing of weights, tensors or devices. Unknown architectures and rope kinds are refused here, once,
so that nothing later can run a model it does not understand.
"""

from __future__ import annotations

import json
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
        hidden_size = _int(config, "hidden_size")
        num_heads = _int(config, "num_attention_heads")
        head_dim = config.get("head_dim") or hidden_size // num_heads
        if config.get("hidden_act", "silu") not in ("silu", "swish"):
            raise UnsupportedModelError(f"hidden_act {config['hidden_act']!r} is not supported: only silu is")
        _refuse_sliding_window(config, architecture)
        num_experts = 0
        if architecture == "mixtral":
            # Renamed in transformers 5; both are read.
            num_experts = _int(config, "num_local_experts", "num_experts")
        attention_bias = bool(config.get("attention_bias", False))
        eos = config.get("eos_token_id")
        return cls(
            architecture=architecture,
            num_layers=_int(config, "num_hidden_layers"),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=int(head_dim),
            intermediate_size=_int(config, "intermediate_size"),
            vocab_size=_int(config, "vocab_size"),
            max_position=_int(config, "max_position_embeddings"),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope=_rope(config),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=architecture == "qwen2" or attention_bias,
            o_bias=architecture != "qwen2" and attention_bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            num_experts=num_experts,
            experts_per_token=_int(config, "num_experts_per_tok") if num_experts else 0,
            bos_token_id=config.get("bos_token_id"),
            eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),),
        )

    @property
    def kv_elements_per_token_per_layer(self) -> int:
        """K and V elements of one token in one layer (times the dtype's size: bytes)."""
        return 2 * self.num_kv_heads * self.head_dim


_ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "MixtralForCausalLM": "mixtral"}
_MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "mixtral": "mixtral"}


def _architecture(config: dict[str, Any]) -> str:
    for name in config.get("architectures") or ():
        if name in _ARCHITECTURES:
            return _ARCHITECTURES[name]
    if not config.get("architectures") and config.get("model_type") in _MODEL_TYPES:
        return _MODEL_TYPES[config["model_type"]]
    found = config.get("architectures") or config.get("model_type")
    raise UnsupportedModelError(f"architecture {found!r} is not supported: {', '.join(sorted(_ARCHITECTURES))} are")


def _int(config: dict[str, Any], *names: str) -> int:
    """The first of the given spellings of a key, as a positive whole number."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UnsupportedModelError(f"config.json: {name} must be a positive whole number, not {value!r}")
        return value
    raise UnsupportedModelError(f"config.json lacks {' / '.join(names)}")


def _refuse_sliding_window(config: dict[str, Any], architecture: str) -> None:
    window = config.get("sliding_window")
    uses = config.get("use_sliding_window", architecture == "mixtral")
    if window and uses and window < _int(config, "max_position_embeddings"):
        raise UnsupportedModelError(f"sliding_window {window} is not supported: only full attention is")


def _rope(config: dict[str, Any]) -> RopeSpec:
    """Both spellings: `rope_theta` + `rope_scaling` (with `type` or `rope_type`), and `rope_parameters`."""
    params: dict[str, Any] = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = params.get("rope_type", params.get("type", "default"))
    theta = float(params.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if config.get("partial_rotary_factor", params.get("partial_rotary_factor", 1.0)) not in (None, 1.0):
        raise UnsupportedModelError("partial_rotary_factor is not supported: the whole head must be rotated")
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind not in ("linear", "llama3", "yarn"):
        raise UnsupportedModelError(f"rope type {kind!r} is not supported: default, linear, llama3 and yarn are")
    if "factor" not in params:
        raise UnsupportedModelError(f"config.json: rope type {kind!r} needs a factor")
    original = params.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    optional = {"low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"}
    return RopeSpec(
        theta=theta,
        kind=kind,
        factor=float(params["factor"]),
        original_max_position=int(original or config.get("max_position_embeddings") or 0),
        attention_factor=params.get("attention_factor"),
        mscale=params.get("mscale"),
        mscale_all_dim=params.get("mscale_all_dim"),
        truncate=bool(params.get("truncate", True)),
        **{name: float(params[name]) for name in optional if params.get(name) is not None},
    )
