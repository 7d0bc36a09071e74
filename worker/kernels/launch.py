"""Launches a compiled kernel that is chained to the one before it (worker.kernels.chain), by the driver's own call.

CuPy compiles and keeps kernels, and has no launch with this attribute. Knows nothing of what a kernel computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Argument = tuple[int | float, Any]  # a value and its ctypes type


class LaunchError(RuntimeError):
    """The driver did not take a launch."""


def launch_chained(function: int, blocks: int, threads: int, arguments: Sequence[Argument], stream: int) -> None:
    """Queue a one-dimensional grid on a stream. function, stream: CUfunction and CUstream.

    The kernel must wait for the one before it itself (griddepcontrol.wait) before it touches what others write.
    """
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes, config.hStream = 0, driver.CUstream(stream)
    config.attrs, config.numAttrs = [attribute], 1
    values, types = zip(*arguments)
    (code,) = driver.cuLaunchKernelEx(config, driver.CUfunction(function), (values, types), 0)
    if int(code):
        raise LaunchError(f"a kernel could not be launched: the driver says {code!r}")
