"""Which release this is, and which ones of libraries are installed. Knows nothing else."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def release() -> str:
    """The installed distribution's version; `source` where the code runs without having been installed."""
    return version_of("nanoflow-runtime") or "source"


def version_of(distribution: str) -> str | None:
    """Of an installed distribution; None where there is none of that name."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
