"""The output buffer against a plain list."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from control_plane.output_buffer import BufferFullError, OutputBuffer

LIMIT = 5


class Buffer(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.buffer = OutputBuffer(LIMIT)
        self.tokens: list[int] = []
        self.position = 0
        self.taken = 0

    @rule()
    def append(self):
        if len(self.tokens) - self.taken >= LIMIT:
            with pytest.raises(BufferFullError):
                self.buffer.append(0, "")
        else:
            self.buffer.append(len(self.tokens), f"<{len(self.tokens)}>")
            self.tokens.append(len(self.tokens))

    @rule()
    def take(self):
        if self.buffer.has_news:
            delta = self.buffer.take()
            expected = self.tokens[self.position :]
            assert list(delta.token_ids) == expected
            assert delta.text == "".join(f"<{token}>" for token in expected)
            assert delta.num_output_tokens == len(self.tokens)
            self.position = self.taken = len(self.tokens)

    @rule(position=st.integers(0, 40))
    def seek(self, position):
        kept = self.buffer.first_kept <= position <= len(self.tokens)
        assert self.buffer.seek(position) is kept
        if kept:
            self.position = position

    @invariant()
    def agrees(self):
        assert self.buffer.num_tokens == len(self.tokens)
        assert self.buffer.has_news == (self.position < len(self.tokens))
        assert self.buffer.was_read == (self.taken > 0)
        assert self.buffer.first_kept <= max(0, len(self.tokens) - LIMIT)  # the latest can always be had again
        assert len(self.tokens) - self.buffer.first_kept <= 3 * LIMIT


def test_a_reader_that_comes_back_to_the_beginning_again_and_again_fills_no_memory():
    buffer = OutputBuffer(LIMIT)
    for token in range(20 * LIMIT):
        buffer.append(token, "x")
        if token % LIMIT == LIMIT - 1:
            buffer.take()
            assert buffer.seek(buffer.first_kept)
        assert buffer.num_tokens - buffer.first_kept <= 3 * LIMIT


TestBuffer = Buffer.TestCase
