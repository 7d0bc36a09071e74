"""Which release this is. Knows nothing else."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def release() -> str:
    """The installed distribution's version; `source` where the code runs without having been installed."""
    try:
        return version("nanoflow-runtime")
    except PackageNotFoundError:
        return "source"
