"""The one table of limits, and the checks of everything that a client sends. Used by every API.

A request that passes here can harm nobody: ids are within the vocabulary, numbers finite and in range, sizes
bounded, and prompt plus output fit the engine's own fitted context. Knows nothing of transport or tokenizers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from control_plane.errors import InvalidRequestError
from control_plane.generation import ChatPrompt, GenerationRequest, TextPrompt, TokenPrompt
from control_plane.model_info import ModelInfo
from control_plane.options import option
from scheduler.request import SamplingParams

GREEDY_BELOW = 1e-5  # a temperature under this is 0: dividing by it would overflow
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]+")
_PRINTABLE = re.compile(r"[\x20-\x7e]*")


@dataclass(frozen=True, slots=True)
class Limits:
    """Everything that a client can make large. The context itself (max_model_len) comes from the engine."""

    max_prompt_bytes: int = option(
        "UTF-8 bytes of a prompt's text, or of a chat's roles and contents together.", default=4 * 2**20, low=1
    )
    max_chat_messages: int = option("Messages of one chat.", default=1024, low=1)
    max_chat_role_len: int = option("Characters of a chat message's role.", default=64, low=1)
    chat_template_timeout_s: float = option("Seconds that rendering a chat may take.", default=2.0, low=0.01)
    max_rendered_bytes: int = option("UTF-8 bytes of a rendered chat.", default=8 * 2**20, low=1)
    max_stop_token_ids: int = option("Stop token ids of one request.", default=64, low=0)
    max_temperature: float = option("Sampling temperature.", default=100.0, low=0)
    max_request_id_len: int = option("Characters of a client's request id.", default=128, low=1)
    max_cache_salt_len: int = option("Characters of a cache salt.", default=128, low=0)
    max_timeout_s: float = option("Seconds of a request's own time limit.", default=86_400.0, low=0)
    max_num_queued_reqs: int = option(
        "Requests accepted and still without their first token; more are refused.", default=1024, low=1
    )
    max_num_queued_tokens: int = option("Prompt tokens of those requests together.", default=1_000_000, low=1)
    max_buffered_tokens: int = option(
        "Output tokens of a request that its reader has not taken; then it is cancelled. As many are kept for a "
        "reader that comes back.",
        default=16_384,
        low=1,
    )
    detached_ttl_s: float = option("Seconds that a request waits for a reader.", default=30.0, low=0)
    max_kept_requests: int = option("Ended requests kept for readers to come.", default=1024, low=0)
    max_message_bytes: int = option("Bytes of one message, either way.", default=16 * 2**20, low=1024)
    max_metadata_bytes: int = option("Bytes of a call's metadata.", default=16 * 2**10, low=1024)
    max_connections: int = option("Connections at a time; more are closed as they come.", default=1024, low=1)
    max_concurrent_streams: int = option("Calls at a time on one connection.", default=1024, low=1)
    max_concurrent_rpcs: int = option("Calls at a time on the whole server.", default=4096, low=1)


def check_request(request: GenerationRequest, limits: Limits, model: ModelInfo) -> None:
    """Everything that can be checked before the prompt is tokenized. Raises InvalidRequestError."""
    if request.request_id is not None:
        check_request_id(request.request_id, limits)
    _check_prompt_size(request.prompt, limits)
    _check_sampling(request, limits, model)
    if len(request.cache_salt) > limits.max_cache_salt_len:
        raise InvalidRequestError("cache_salt", f"has more than {limits.max_cache_salt_len} characters")
    if not _PRINTABLE.fullmatch(request.cache_salt):
        raise InvalidRequestError("cache_salt", "must consist of printable ASCII characters")
    timeout_s = request.timeout_s
    if timeout_s is not None and not 0 < timeout_s <= limits.max_timeout_s:
        raise InvalidRequestError("timeout_s", f"must be above 0 and at most {limits.max_timeout_s:g}, not {timeout_s}")


def check_request_id(request_id: str, limits: Limits) -> None:
    """Raises InvalidRequestError."""
    if len(request_id) > limits.max_request_id_len:
        raise InvalidRequestError("request_id", f"has more than {limits.max_request_id_len} characters")
    if not _REQUEST_ID.fullmatch(request_id):
        raise InvalidRequestError("request_id", "must consist of one or more of A-Z a-z 0-9 . _ : -")


def sampling_params(
    request: GenerationRequest, num_prompt_tokens: int, max_model_len: int, model: ModelInfo, seed: int
) -> SamplingParams:
    """The parameters of a checked request, with every default filled in. `seed` is used when it has none.

    Raises InvalidRequestError when prompt and output do not fit the context.
    """
    check_prompt_len(num_prompt_tokens, max_model_len)
    room = max_model_len - num_prompt_tokens
    max_tokens = room if request.max_tokens is None else request.max_tokens
    if max_tokens > room:
        raise InvalidRequestError(
            "max_tokens",
            f"{num_prompt_tokens} prompt tokens and {max_tokens} output tokens are more than the {max_model_len} "
            f"that one request can have: ask for at most {room}, or leave it out",
        )
    defaults = model.sampling_defaults
    temperature = defaults.temperature if request.temperature is None else request.temperature
    top_k = defaults.top_k if request.top_k is None else request.top_k
    eos = () if request.ignore_eos else model.eos_token_ids
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_k=top_k if 0 < top_k < model.vocab_size else 0,
        top_p=defaults.top_p if request.top_p is None else request.top_p,
        seed=seed if request.seed is None else request.seed,
        stop_token_ids=tuple(dict.fromkeys((*request.stop_token_ids, *eos))),
    )


def check_prompt_len(num_prompt_tokens: int, max_model_len: int) -> None:
    """At least one token, and room for one more. Raises InvalidRequestError."""
    if num_prompt_tokens == 0:
        raise InvalidRequestError("prompt", "has no tokens: give at least one")
    if num_prompt_tokens >= max_model_len:
        raise InvalidRequestError(
            "prompt",
            f"{num_prompt_tokens} tokens are too many: at most {max_model_len - 1} fit, with one token of output",
        )


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequestError when an id is not in [0, vocab_size)."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise InvalidRequestError(field, f"{wrong} is not a token id: they are 0 to {vocab_size - 1}")


def _check_prompt_size(prompt: TextPrompt | TokenPrompt | ChatPrompt, limits: Limits) -> None:
    """Sizes only; token ids are checked against the context before anything walks over them."""
    if isinstance(prompt, TextPrompt):
        num_bytes = _utf8_len("text", prompt.text)
    elif isinstance(prompt, ChatPrompt):
        if not prompt.messages:
            raise InvalidRequestError("chat.messages", "has no messages: give at least one")
        if len(prompt.messages) > limits.max_chat_messages:
            raise InvalidRequestError("chat.messages", f"has more than {limits.max_chat_messages} messages")
        for index, message in enumerate(prompt.messages):
            if not 1 <= len(message.role) <= limits.max_chat_role_len:
                field = f"chat.messages[{index}].role"
                raise InvalidRequestError(field, f"must have 1 to {limits.max_chat_role_len} characters")
        texts = (text for message in prompt.messages for text in (message.role, message.content))
        num_bytes = sum(_utf8_len("chat.messages", text) for text in texts)
    else:
        return
    if num_bytes > limits.max_prompt_bytes:
        raise InvalidRequestError("prompt", f"has {num_bytes} bytes: at most {limits.max_prompt_bytes} are allowed")


def _utf8_len(field: str, text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise InvalidRequestError(field, "is not valid Unicode: it has a lone surrogate") from None


def _check_sampling(request: GenerationRequest, limits: Limits, model: ModelInfo) -> None:
    temperature, top_p, top_k = request.temperature, request.top_p, request.top_k
    # Written so that NaN, for which every comparison is false, is refused.
    if temperature is not None and not 0 <= temperature <= limits.max_temperature:
        raise InvalidRequestError("temperature", f"must be 0 to {limits.max_temperature:g}, not {temperature:g}")
    if top_p is not None and not (0 < top_p <= 1 and math.isfinite(top_p)):
        raise InvalidRequestError("top_p", f"must be above 0 and at most 1, not {top_p:g}")
    if top_k is not None and top_k < -1:
        raise InvalidRequestError("top_k", f"must be at least 1, or 0 or -1 for all tokens, not {top_k}")
    if request.seed is not None and not 0 <= request.seed < 2**63:
        raise InvalidRequestError("seed", "must be at least 0 and below 2^63")
    if request.max_tokens is not None and request.max_tokens < 1:
        raise InvalidRequestError("max_tokens", f"must be at least 1, not {request.max_tokens}")
    if len(request.stop_token_ids) > limits.max_stop_token_ids:
        raise InvalidRequestError("stop_token_ids", f"has more than {limits.max_stop_token_ids} ids")
    check_token_ids("stop_token_ids", request.stop_token_ids, model.vocab_size)
