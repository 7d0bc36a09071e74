"""Files of which one thread reads several spans at once, where the kernel can do that: the same bytes, and errors.

Knows nothing of records.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvstore.files import MAX_OPEN, Files, Span
from kvstore.open_files import OpenFile
from kvstore.overlapped import Overlapped

log = logging.getLogger(__name__)

_MAX_READS = 32  # of one thread at once; each may have a file of its own open


class OverlappedFiles(Files):
    """What does not come back whole is read again by itself: there it ends as it should, or raises."""

    def __init__(self, max_open: int = MAX_OPEN, make: Callable[[int], Overlapped] = Overlapped) -> None:
        """make: is given the number of reads; raises OSError where they cannot overlap: EAGAIN if only for now."""
        super().__init__(max_open)
        self._make: Callable[[int], Overlapped] | None = make  # None: that is not tried again
        self._is_told = False  # in the log
        self._idle: list[Overlapped] = []  # one for each thread that has read, but those that are reading

    def read_all(self, spans: Sequence[Span]) -> list[OSError | None]:
        """`read` each of them, at once; what was wrong with those that could not be read."""
        errors: list[OSError | None] = []
        for start in range(0, len(spans), _MAX_READS):
            part = spans[start : start + _MAX_READS]
            for span, num_bytes in zip(part, self._read_at_once(part)):
                is_read = num_bytes == sum(map(len, span.into))
                errors.append(None if is_read else self._error_of(span))
        return errors

    def close(self) -> None:
        """Let go of all."""
        super().close()
        while self._idle:
            self._idle.pop().close()

    def _read_at_once(self, spans: Sequence[Span]) -> list[int]:
        """Bytes read of each; another number than was asked for where one is to be read by itself."""
        if len(spans) == 1:
            return [-1]
        files: list[OpenFile] = []
        try:
            for span in spans:
                files.append(self._open.take(span.path))
            overlapped = self._take()
            wanted = [(file.descriptor, span.offset, span.into) for file, span in zip(files, spans)]
            done = overlapped.read(wanted)
            self._idle.append(overlapped)  # not after an error
            return done
        except OSError:
            return [-1] * len(spans)
        finally:
            for file in files:
                self._open.give_back(file)

    def _take(self) -> Overlapped:
        with suppress(IndexError):
            return self._idle.pop()
        make = self._make
        if make is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        try:
            return make(_MAX_READS)
        except OSError as error:
            if error.errno != errno.EAGAIN:  # else others have all that there are (fs.aio-max-nr)
                self._make = None
            if not self._is_told:
                self._is_told = True
                log.info("reads do not overlap: %s", error.strerror)
            raise
