"""Turns a client's prompt into checked token ids: chat to text, text to ids.

Knows nothing of instances, queues or transport.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from control_plane.chat_template import ChatRenderer, read_template
from control_plane.errors import InvalidRequestError
from control_plane.generation import ChatPrompt, GenerationRequest, TextPrompt
from control_plane.live_request import Detokenizer, TokensOnly
from control_plane.model_info import ModelInfo
from control_plane.tokenizer import Tokenizer
from control_plane.validation import Limits, check_prompt_len, check_request, check_token_ids

INLINE_CHARS = 1024  # longer text is tokenized in a thread, so that others need not wait
CHARS_PER_TOKEN = 4  # roughly, in most languages and tokenizers


class Intake:
    """The way in for prompts of one model."""

    def __init__(
        self, model: ModelInfo, limits: Limits, tokenizer: Tokenizer | None = None, renderer: ChatRenderer | None = None
    ) -> None:
        """Without a tokenizer only token ids are taken, without a renderer no chats."""
        self.model = model
        self.limits = limits
        self.tokenizer = tokenizer
        self.renderer = renderer

    @classmethod
    def from_folder(cls, folder: str | Path, model: ModelInfo, limits: Limits) -> Intake:
        """With what the model folder has. Raises TokenizerError when that is broken."""
        if not (Path(folder) / "tokenizer.json").is_file():
            return cls(model, limits)
        template = read_template(folder)
        renderer = None
        if template is not None:
            renderer = ChatRenderer(folder, template, limits.chat_template_timeout_s, limits.max_rendered_bytes)
        return cls(model, limits, Tokenizer.from_folder(folder), renderer)

    async def start(self) -> None:
        """Start the chat renderer, if there is one. Raises TokenizerError."""
        if self.renderer is not None:
            await self.renderer.start()

    async def close(self) -> None:
        """Idempotent."""
        if self.renderer is not None:
            await self.renderer.close()

    async def token_ids(self, request: GenerationRequest, max_model_len: int) -> tuple[int, ...]:
        """Check the request and return its prompt's ids, 1 to max_model_len - 1. Raises ApiError."""
        check_request(request, self.limits, self.model)
        prompt = request.prompt
        if isinstance(prompt, TextPrompt):
            tokenizer = self._need_tokenizer("text")
            token_ids = tuple(await _off_loop(tokenizer.encode, prompt.text))
        elif isinstance(prompt, ChatPrompt):
            tokenizer = self._need_tokenizer("chat")
            if self.renderer is None:
                raise InvalidRequestError("chat", "this model has no chat template: send text or token_ids")
            token_ids = tuple(await _off_loop(tokenizer.encode_rendered, await self.renderer.render(prompt)))
        else:
            check_prompt_len(len(prompt.token_ids), max_model_len)  # before millions of them are copied
            token_ids = tuple(prompt.token_ids)
        check_prompt_len(len(token_ids), max_model_len)
        check_token_ids("prompt", token_ids, self.model.vocab_size)
        return token_ids

    def estimated_tokens(self, request: GenerationRequest) -> int:
        """About as many as the prompt has, found in no time: it bounds what waits to be tokenized."""
        prompt = request.prompt
        if isinstance(prompt, TextPrompt):
            return len(prompt.text) // CHARS_PER_TOKEN
        if isinstance(prompt, ChatPrompt):
            return sum(len(message.content) for message in prompt.messages) // CHARS_PER_TOKEN
        return 0  # they are there already, and need not wait

    def detokenizer(self, prompt_token_ids: tuple[int, ...]) -> Detokenizer:
        """For the output that follows the prompt."""
        return TokensOnly() if self.tokenizer is None else self.tokenizer.detokenizer(prompt_token_ids)

    def _need_tokenizer(self, field: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequestError(field, "this server has no tokenizer: send token_ids")
        return self.tokenizer


async def _off_loop(encode: Callable[[str], list[int]], text: str) -> list[int]:
    return encode(text) if len(text) <= INLINE_CHARS else await asyncio.to_thread(encode, text)
