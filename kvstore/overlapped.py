"""Several reads of one thread that are under way at once, by Linux's asynchronous I/O (io_submit).

With preadv each read wants a thread of its own, which takes Python's lock back when the read is done: with eight of
them that costs more than reading 64 KiB. Here it is once for all of them. They overlap where the files are open for
direct I/O; others are read one after the other when they are handed over. Knows nothing of paths.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass

_PREADV = 7  # the operation


@dataclass(frozen=True, slots=True)
class _Calls:
    """Numbers of the system calls, as the C library has no functions for them."""

    setup: int
    destroy: int
    submit: int
    get_events: int


_CALLS = {"x86_64": _Calls(206, 207, 209, 208), "aarch64": _Calls(0, 1, 2, 4)}


class _Vector(ctypes.Structure):
    """struct iovec"""

    _fields_ = (("address", ctypes.c_uint64), ("num_bytes", ctypes.c_uint64))


class _Request(ctypes.Structure):
    """struct iocb"""

    _fields_ = (
        ("number", ctypes.c_uint64),  # comes back in the event
        ("key", ctypes.c_uint32),
        ("rw_flags", ctypes.c_uint32),
        ("operation", ctypes.c_uint16),
        ("priority", ctypes.c_int16),
        ("descriptor", ctypes.c_uint32),
        ("vectors", ctypes.c_uint64),  # address
        ("num_vectors", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("reserved", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("event_descriptor", ctypes.c_uint32),
    )


class _Event(ctypes.Structure):
    """struct io_event"""

    _fields_ = (
        ("number", ctypes.c_uint64),
        ("request", ctypes.c_uint64),
        ("result", ctypes.c_int64),  # bytes, or an errno below zero
        ("result2", ctypes.c_int64),
    )


class Overlapped:
    """For one thread at a time; `close` when done."""

    def __init__(self, max_reads: int) -> None:
        """max_reads: at once. Raises OSError where there is no such thing, or none left."""
        calls = _CALLS.get(platform.machine())
        if calls is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        self._max_reads = max_reads
        self._calls = calls
        self._context = ctypes.c_ulong(0)
        self._events = (_Event * max_reads)()
        _call(calls.setup, ctypes.c_ulong(max_reads), ctypes.byref(self._context))

    def read(self, wanted: Sequence[tuple[int, int, Sequence[memoryview]]]) -> list[int]:
        """Fill what belongs to each descriptor and offset; bytes read of each, or an errno below zero.

        A read may end early or be refused where preadv would go on. Nothing is written to any more when this returns
        or raises, after which it cannot be used again.
        """
        assert len(wanted) <= self._max_reads
        try:
            return self._read(wanted)
        except BaseException:  # an interrupt, too: the kernel would go on writing
            self.close()
            raise

    def close(self) -> None:
        """Waits for what is still under way."""
        _call(self._calls.destroy, self._context)

    def _read(self, wanted: Sequence[tuple[int, int, Sequence[memoryview]]]) -> list[int]:
        vectors = [(_Vector * len(into))(*map(_vector, into)) for _, _, into in wanted]
        requests = [
            _Request(number, 0, 0, _PREADV, 0, descriptor, ctypes.addressof(filled), len(filled), offset)
            for number, ((descriptor, offset, _), filled) in enumerate(zip(wanted, vectors))
        ]
        addresses = (ctypes.c_void_p * len(requests))(*map(ctypes.addressof, requests))
        results = [-errno.EAGAIN] * len(requests)
        try:
            num_left = _call(self._calls.submit, self._context, ctypes.c_long(len(requests)), addresses)
        except OSError as error:
            return [-(error.errno or errno.EIO)] * len(requests)
        while num_left:
            for event in self._events[: self._wait(num_left)]:
                results[event.number] = event.result
                num_left -= 1
        return results

    def _wait(self, num_events: int) -> int:
        """How many have come, mostly all of them."""
        number = ctypes.c_long(num_events)
        try:
            return _call(self._calls.get_events, self._context, number, number, self._events, None)
        except InterruptedError:
            return 0


_system_call = ctypes.CDLL(None, use_errno=True).syscall
_system_call.restype = ctypes.c_long


def _call(number: int, *arguments: object) -> int:
    result: int = _system_call(ctypes.c_long(number), *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _vector(into: memoryview) -> _Vector:
    return _Vector(ctypes.addressof(ctypes.c_char.from_buffer(into)), len(into))
