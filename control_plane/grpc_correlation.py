"""What callers send along so that logs of several services can be joined: ids and W3C trace context.

They only go into our log. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Iterable

HEADERS = ("x-request-id", "x-correlation-id", "traceparent")
MAX_LEN = 128


def correlation(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """For the end of a log line: `, x-request-id '...'` and so on for those that were sent, or nothing.

    Callers choose the values: what is not printable is escaped, and beyond MAX_LEN characters they are cut.
    """
    sent = {name: value for name, value in reversed(list(metadata)) if name in HEADERS}
    return "".join(f", {name} {_quoted(sent[name])}" for name in HEADERS if name in sent)


def _quoted(value: str | bytes) -> str:
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    return ascii(text[:MAX_LEN])
