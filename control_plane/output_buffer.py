"""The latest output tokens of one request with their text, for one reader at a time.

Bounded: a reader that falls too far behind is an error, and what it has taken is kept only so long that it can
come back for it. Knows nothing of requests, time or asyncio.
"""

from __future__ import annotations

from control_plane.generation import Delta


class BufferFullError(Exception):
    """Too many tokens wait for a reader."""


class OutputBuffer:
    """Tokens are numbered from 0, kept or not. Holds at most three times its limit."""

    def __init__(self, limit: int, position: int = 0) -> None:
        """limit: tokens that nobody has taken yet, at most; about as many taken ones are kept.

        position: the first token that take() gives; it may be one to come.
        """
        self._limit = limit
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self.position = position  # the next token that take() gives
        self._num_taken = 0  # tokens before this one were given at some time
        self.first_kept = 0  # the oldest token that seek() can go back to

    @property
    def num_tokens(self) -> int:
        """All tokens of the output so far."""
        return self.first_kept + len(self._token_ids)

    @property
    def has_news(self) -> bool:
        """Whether take() has anything to give."""
        return self.position < self.num_tokens

    @property
    def was_read(self) -> bool:
        """Whether any token was ever given out."""
        return self._num_taken > 0

    def append(self, token_id: int, text: str) -> None:
        """Add the next token. Raises BufferFullError, without adding it, when the limit is reached."""
        if self.num_tokens - self._num_taken >= self._limit:
            raise BufferFullError(f"more than {self._limit} output tokens were waiting to be read")
        self._token_ids.append(token_id)
        self._texts.append(text)
        if len(self._token_ids) > 2 * self._limit:
            self._drop(min(len(self._token_ids) - self._limit, self.position - self.first_kept))

    def seek(self, position: int) -> bool:
        """Make take() go on with token `position`; False, and nothing changed, when it is not kept or not yet made."""
        if not self.first_kept <= position <= self.num_tokens:
            return False
        self.position = position
        return True

    def take(self) -> Delta:
        """Everything from the position on."""
        start = self.position - self.first_kept
        self.position = self._num_taken = self.num_tokens
        delta = Delta(tuple(self._token_ids[start:]), "".join(self._texts[start:]), self.num_tokens)
        # After a seek there may be more; from here on as many as the limit come before the next take.
        self._drop(max(len(self._token_ids) - 2 * self._limit, 0))
        return delta

    def _drop(self, num_tokens: int) -> None:
        del self._token_ids[:num_tokens], self._texts[:num_tokens]
        self.first_kept += num_tokens
