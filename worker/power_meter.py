"""What a card draws while it is kept busy: from its energy counter, between two of the counter's own steps.

The counter moves in steps, of about a tenth of a second of power: a difference between two arbitrary moments is wrong
by up to a step at each end, 6 % of a second and a half. Right after a step it is exact, so a reading begins and ends
there, whenever that is. Knows nothing of what keeps the card busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

_PATIENCE_S = 0.5  # for the counter's next step


class MeterError(RuntimeError):
    """The card's instruments cannot be read; the message says what is missing."""


class Card(Protocol):
    """A GPU's instruments."""

    def joules(self) -> float:
        """Energy so far, from some moment in the past."""

    def sm_mhz(self) -> float:
        """The clock now."""


def nvml() -> Any:
    """NVML's Python module. Raises MeterError where there is none: to be asked before anything long begins."""
    try:
        import pynvml
    except ModuleNotFoundError:
        raise MeterError(
            "watts, joules and clocks of a GPU are read by nvidia-ml-py: pip install nvidia-ml-py"
        ) from None
    return pynvml


class NvmlCard:
    """The current CUDA device by NVML."""

    def __init__(self) -> None:
        """Raises MeterError."""
        pynvml = nvml()
        pynvml.nvmlInit()
        self._nvml = pynvml
        # By identity: NVML numbers all cards of the machine, CUDA those of CUDA_VISIBLE_DEVICES.
        number = torch.cuda.current_device()
        try:
            uuid = torch.cuda.get_device_properties(number).uuid
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except pynvml.NVMLError:  # a part of a card has another kind of identity
            self._handle = pynvml.nvmlDeviceGetHandleByIndex(number)

    def joules(self) -> float:
        return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / 1e3

    def sm_mhz(self) -> float:
        return float(self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM))

    def watts(self) -> float:
        """What the card draws, as it reports it."""
        return float(self._nvml.nvmlDeviceGetPowerUsage(self._handle)) / 1e3

    def power_limit_watts(self) -> float:
        """What the card may draw."""
        return float(self._nvml.nvmlDeviceGetEnforcedPowerLimit(self._handle)) / 1e3

    def memory_bytes_per_s(self) -> float:
        """The memory's rate by its clock and width; 0 where the driver does not tell."""
        nvml = self._nvml
        try:
            hertz = 1e6 * nvml.nvmlDeviceGetMaxClockInfo(self._handle, nvml.NVML_CLOCK_MEM)
            return float(2 * hertz * nvml.nvmlDeviceGetMemoryBusWidth(self._handle) / 8)  # two transfers a clock
        except (nvml.NVMLError, AttributeError):
            return 0.0

    def driver(self) -> str:
        """Version of the driver."""
        return str(self._nvml.nvmlSystemGetDriverVersion())


def next_step(
    card: Card, keep_busy: Callable[[], None], clock: Callable[[], float] = time.perf_counter
) -> tuple[float, float] | None:
    """(seconds by the clock, joules) right after the counter has moved; None where it does not."""
    first, until = card.joules(), clock() + _PATIENCE_S
    while clock() < until:
        keep_busy()
        joules = card.joules()
        if joules != first:
            return clock(), joules
    return None


def watts_between(begin: tuple[float, float] | None, end: tuple[float, float] | None) -> float | None:
    """Mean power from one step of the counter to another."""
    if begin is None or end is None or end[0] <= begin[0]:
        return None
    return (end[1] - begin[1]) / (end[0] - begin[0])
