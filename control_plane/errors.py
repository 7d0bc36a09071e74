"""Errors that a client may see, and the status codes that they map to in every API.

Messages are for clients: what is wrong, where, how to mend it; never paths, never prompt text. Whatever is
raised in serving and is not one of these is our own fault: INTERNAL, its text kept from the client.
"""

from __future__ import annotations

from enum import Enum


class ErrorKind(Enum):
    """What went wrong, with its gRPC status name and HTTP status. The value's first part names it in metrics."""

    INVALID_ARGUMENT = ("invalid_argument", "INVALID_ARGUMENT", 400)
    OUT_OF_RANGE = ("out_of_range", "OUT_OF_RANGE", 416)
    UNAUTHENTICATED = ("unauthenticated", "UNAUTHENTICATED", 401)
    PERMISSION_DENIED = ("permission_denied", "PERMISSION_DENIED", 403)
    NOT_FOUND = ("not_found", "NOT_FOUND", 404)
    ALREADY_EXISTS = ("already_exists", "ALREADY_EXISTS", 409)
    OVERLOADED = ("overloaded", "RESOURCE_EXHAUSTED", 429)
    CANCELLED = ("cancelled", "CANCELLED", 499)
    INTERNAL = ("internal", "INTERNAL", 500)
    UNAVAILABLE = ("unavailable", "UNAVAILABLE", 503)
    EXPIRED = ("expired", "DEADLINE_EXCEEDED", 504)

    @property
    def label(self) -> str:
        """As a metric's label value."""
        return str(self.value[0])

    @property
    def grpc_status(self) -> str:
        """Name of the grpc.StatusCode."""
        return str(self.value[1])

    @property
    def http_status(self) -> int:
        return int(self.value[2])


class ApiError(Exception):
    """An error to be told to a client."""

    def __init__(self, kind: ErrorKind, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.retry_after_s = retry_after_s  # a hint for when to try again; None: trying again will not help


class InvalidRequestError(ApiError):
    """The request itself is wrong, and will be however often it is sent."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(ErrorKind.INVALID_ARGUMENT, f"{field}: {message}")
        self.field = field  # its name in the API, for example "sampling.top_p"


class OverloadedError(ApiError):
    """A limit on what the server holds at a time is reached."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(ErrorKind.OVERLOADED, message, retry_after_s)


class UnavailableError(ApiError):
    """No engine can take or finish the request now: starting, lost or draining."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(ErrorKind.UNAVAILABLE, message, retry_after_s)


class ListenError(RuntimeError):
    """A port could not be opened. For the operator, not for clients."""


class StartError(RuntimeError):
    """Ray or an instance could not be started. The message says what is missing and how to mend it."""
