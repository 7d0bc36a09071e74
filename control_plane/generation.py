"""The words of the serving API, free of any transport: what a client asks for and what it gets back.

gRPC and HTTP translate to and from these. Knows nothing of how requests are checked, run or sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from control_plane.errors import ApiError
from scheduler.request import FinishReason


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text to go on from; the tokenizer adds the model's special tokens (for example BOS)."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids to go on from, taken as they are."""

    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation, rendered with the model's chat template."""

    messages: Sequence[ChatMessage]
    add_generation_prompt: bool = True  # open the assistant's turn


class OnDisconnect(Enum):
    """What becomes of a live request when its reader goes away."""

    CANCEL = "cancel"
    DETACH = "detach"  # it goes on; a reader may attach again for Limits.detached_ttl_s


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A client's request, not yet checked: its sequences may be of any length.

    None means absent: defaults are the model's (see validation).
    """

    prompt: TextPrompt | TokenPrompt | ChatPrompt
    request_id: str | None = None  # the client's name for it
    max_tokens: int | None = None  # absent: as many as the context holds
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None  # absent: drawn at random, and told in Final
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    cache_salt: str = ""
    timeout_s: float | None = None  # from acceptance
    on_disconnect: OnDisconnect = OnDisconnect.CANCEL


@dataclass(frozen=True, slots=True)
class Accepted:
    """The answer to a submitted request."""

    request_id: str
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """New output: everything that came since the reader last asked."""

    token_ids: tuple[int, ...]
    text: str  # whole characters only
    num_output_tokens: int  # all so far, these included


@dataclass(frozen=True, slots=True)
class Final:
    """The end of a request; every stream has exactly one, as its last event."""

    finish_reason: FinishReason
    error: ApiError | None  # the status that the transport must end with; None: OK
    matched_stop_token: int | None  # set when STOP
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int  # prompt tokens found in the engine's prefix cache or in the KV store
    seed: int  # the one used
    queue_s: float  # from acceptance to its first iteration, or to the end when it never ran
    ttft_s: float | None  # from acceptance to the first token; None: there was none
    total_s: float  # from acceptance to the end
    num_preemptions: int
    num_cpu_cached_tokens: int = 0  # of num_cached_tokens, loaded from the KV store's memory
    num_ssd_cached_tokens: int = 0  # of num_cached_tokens, loaded from the KV store's SSD


class CancelOutcome(Enum):
    """What a cancel found."""

    CANCELLED = "cancelled"
    ALREADY_FINISHED = "already_finished"
    NOT_FOUND = "not_found"  # unknown, forgotten, or another owner's
