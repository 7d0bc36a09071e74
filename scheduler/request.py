"""What a client asks for, in numbers: sampling parameters, a new request, how a request can end.

Knows nothing of text, tokenizers, stop strings or transport: those are the control plane's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a request ended. Every request ends exactly once, with one of these."""

    STOP = "stop"  # a stop or end-of-sequence token was sampled
    LENGTH = "length"  # max_tokens, or the model's context, was reached
    CANCELLED = "cancelled"  # the client (or the front end for it) asked for the end
    EXPIRED = "expired"  # its deadline passed while it was queued or running
    FAILED = "failed"  # a fault in this request alone, for example non-finite logits


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How output tokens are chosen. Validated by the control plane before it gets here."""

    max_tokens: int  # output tokens at most, >= 1
    temperature: float = 1.0  # 0 means greedy: the argmax, ties to the lowest id
    top_k: int = 0  # keep the k likeliest tokens; 0 keeps all
    top_p: float = 1.0  # keep the smallest set with at least this probability, in (0, 1]
    seed: int = 0  # in [0, 2**63); noise is a function of (seed, position) only
    stop_token_ids: tuple[int, ...] = ()  # each ends the output; holds the model's EOS ids unless ignored


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request as it enters the scheduler."""

    request_id: str  # made by the server, unique for the life of the instance
    prompt_token_ids: tuple[int, ...]  # at least one, all within the vocabulary
    sampling: SamplingParams
    cache_salt: str = ""  # requests with different salts never share cached pages
    timeout_s: float | None = None  # seconds from arrival at the scheduler until it expires; None never
