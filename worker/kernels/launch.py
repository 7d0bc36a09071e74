"""Launches a compiled kernel by the driver's own call, chained to the one before it (worker.kernels.chain) or not.

CuPy compiles and keeps kernels, but has no chained launch, and wants a stream of its own for each launch on torch's.
Knows nothing of what a kernel computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Argument = tuple[int | float, Any]  # a value and its ctypes type


class LaunchError(RuntimeError):
    """The driver did not take a launch."""


def launch(
    function: int, blocks: int, threads: int, arguments: Sequence[Argument], stream: int, chained: bool = False
) -> None:
    """Queue a one-dimensional grid on a stream. function, stream: CUfunction and CUstream.

    A chained kernel may begin before the one before it has ended: it must wait for that itself (griddepcontrol.wait)
    before it touches what others write.
    """
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes, config.hStream = 0, driver.CUstream(stream)
    if chained:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [attribute], 1
    values, types = zip(*arguments)
    (code,) = driver.cuLaunchKernelEx(config, driver.CUfunction(function), (values, types), 0)
    if int(code):
        raise LaunchError(f"a kernel could not be launched: the driver says {code!r}")
