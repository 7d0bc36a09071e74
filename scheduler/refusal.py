"""Which requests can never run here. The control plane's validation makes them rare. Pure."""

from __future__ import annotations

from scheduler.plan import EngineCapacity
from scheduler.request import NewRequest

_MAX_TOKEN_ID = 2**31 - 1


def token_limit(request: NewRequest, capacity: EngineCapacity) -> int:
    """Prompt and output tokens with which it ends."""
    return min(len(request.prompt_token_ids) + request.sampling.max_tokens, capacity.max_model_len)


def refusal(request: NewRequest, capacity: EngineCapacity) -> str:
    """Why it can never run, for the client; empty if it can."""
    prompt_len, max_len = len(request.prompt_token_ids), capacity.max_model_len
    num_tokens, needed = capacity.num_pages * capacity.page_size, token_limit(request, capacity) - 1
    if not prompt_len:
        return "the prompt has no tokens"
    if request.sampling.max_tokens < 1:
        return f"max_tokens is {request.sampling.max_tokens}, it must be at least 1"
    if prompt_len >= max_len:
        return f"the prompt has {prompt_len} tokens, at most {max_len - 1} fit into the context"
    ids = (*request.prompt_token_ids, *request.sampling.stop_token_ids)
    if min(ids) < 0 or max(ids) > _MAX_TOKEN_ID:
        return "a token id is out of range"
    if needed > num_tokens:
        return f"prompt and output need KV for {needed} tokens, the cache holds {num_tokens}"
    return ""
