"""A walk along the output of one request, as a transport does it for its client.

Knows nothing of what follows when the reader leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from control_plane.generation import Delta, Final
from control_plane.live_request import LiveRequest


class Reader:
    """Any number of Delta, then one Final.

    Use at once as an async context manager; leaving it is the reader's going away, wherever that happens.
    """

    def __init__(
        self, live: LiveRequest, on_delta: Callable[[LiveRequest], None], on_leave: Callable[[LiveRequest], None]
    ) -> None:
        """on_delta is told of every Delta that is handed out, on_leave of the reader's end."""
        self._live = live
        live.has_reader = True
        self._on_delta = on_delta
        self._on_leave = on_leave
        self._had_final = False

    @property
    def request_id(self) -> str:
        """As the client knows it."""
        return self._live.request_id

    async def __aenter__(self) -> Reader:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.has_reader = False
        self._on_leave(self._live)

    def __aiter__(self) -> Reader:
        return self

    async def __anext__(self) -> Delta | Final:
        if self._had_final:  # asking for more means that it has been passed on
            self._live.delivered = True
            raise StopAsyncIteration
        event = await self._live.next_event()
        self._had_final = isinstance(event, Final)
        if not self._had_final:
            self._on_delta(self._live)
        return event
