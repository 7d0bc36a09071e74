"""Text to token ids and back, from a model folder's tokenizer.json.

Code in a model folder is never run (`auto_map` and tokenizer classes are not looked at). Knows nothing of
requests; stop conditions and chat rendering are elsewhere (`chat_template`).
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.decoders import DecodeStream

log = logging.getLogger(__name__)

CONTEXT_TOKENS = 8  # of the prompt, so that the first output token is decoded in its place, not at a text's start
MAX_HELD_TOKENS = 8  # no character needs more; what is still incomplete then is not going to become one


class TokenizerError(ValueError):
    """The tokenizer files of a model folder cannot be used."""


class Tokenizer:
    """A fast tokenizer. Its methods may be called from any thread."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
        """`config` is the parsed tokenizer_config.json; its special tokens and add_bos_token are used."""
        self._tokenizer = tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._config = config
        self._bos_id = self._special_id("bos_token")
        self._add_bos: bool | None = config.get("add_bos_token")  # None: as tokenizer.json has it

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Raises TokenizerError, naming the file."""
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{folder} has no tokenizer.json: only models with a fast tokenizer can take text")
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # batches of one gain nothing from more threads
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{path} cannot be read: {error}") from None
        return cls(tokenizer, read_config(folder))

    def encode(self, text: str) -> list[int]:
        """A prompt's ids, with the model's special tokens around it."""
        ids = self._encode(text, add_special_tokens=True)
        if self._bos_id is None or self._add_bos is None:
            return ids
        has_bos = ids[:1] == [self._bos_id]
        if self._add_bos and not has_bos:
            return [self._bos_id, *ids]
        return ids[1:] if has_bos and not self._add_bos and not text.startswith(self._special("bos_token")) else ids

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of a rendered chat, whose template has put the special tokens in already."""
        return self._encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids, without special tokens."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def detokenizer(self, prompt_token_ids: Sequence[int]) -> Detokenizer:
        """For the output that follows the prompt."""
        return Detokenizer(self._tokenizer, prompt_token_ids)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """As a batch of one, which lets other threads run meanwhile; the library's encode() does not."""
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def _special(self, key: str) -> str:
        return special_token(self._config, key) or ""

    def _special_id(self, key: str) -> int | None:
        text = self._special(key)
        return self._tokenizer.token_to_id(text) if text else None


class Detokenizer:
    """Turns one request's output tokens into text as they come, whole characters only.

    For output that is text, all pieces together are decode(prompt + output) without the part that is
    decode(prompt). Bytes that are no character come out as U+FFFD, at the latest when the output ends.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._before = list(prompt_token_ids[-CONTEXT_TOKENS:])  # what the held tokens are decoded after
        self._held: list[int] = []  # tokens that have given no text yet
        self._stream = DecodeStream(ids=self._before, skip_special_tokens=True)

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; "" while a character is incomplete."""
        self._held.append(token_id)
        try:
            piece = self._stream.step(self._tokenizer, token_id)
        except Exception:  # bare in the library: bytes that looked like a character turned out to be none
            return self._give_up()
        if piece is None:
            return "" if len(self._held) < MAX_HELD_TOKENS else self._give_up()
        self._before, self._held = self._held, []
        return str(piece)

    def finish(self) -> str:
        """What is still held, at the output's end."""
        return self._give_up() if self._held else ""

    def _give_up(self) -> str:
        """Decode the held tokens as they are and start afresh behind them."""
        before = self._decode(self._before)
        text = self._decode(self._before + self._held)
        piece = text[len(before) :] if text.startswith(before) else self._decode(self._held)
        self._before, self._held = self._held, []
        self._stream = DecodeStream(ids=self._before, skip_special_tokens=True)
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text


def read_config(folder: str | Path) -> dict[str, Any]:
    """tokenizer_config.json, {} when there is none. Raises TokenizerError."""
    path = Path(folder) / "tokenizer_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise TokenizerError(f"{path} must hold a JSON object")
    return config


def special_token(config: dict[str, Any], key: str) -> str | None:
    """The text of a special token, for example "bos_token": in the file a string or an object with `content`."""
    value = config.get(key)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
