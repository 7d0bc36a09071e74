"""Partitions as the driver makes them, on a driver that only counts SMs: whole groups first, what is left last."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from autosearch.catalog import find_model
from autosearch.decode_beside import DecodeBeside, decode_beside
from autosearch.operators import layer_operators
from worker.streams import GROUP_SMS, WHOLE, CudaStreams, LaneOrder, PartitionError, Place

OPERATORS = layer_operators(find_model("llama-3-8b").spec)
ROWS = 2048


class FakeDriver:
    """The calls that divide a device. A resource is the SMs that it has, in the driver's order."""

    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1)
    CUgreenCtxCreate_flags = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)

    def __init__(self, num_sms: int, group: int = GROUP_SMS) -> None:
        self._num_sms, self._group = num_sms, group
        self.parts: list[frozenset[int]] = []  # of each stream, by its handle

    def cuDeviceGet(self, ordinal):
        return 0, ordinal

    def cuDeviceGetDevResource(self, device, kind):
        return 0, _resource(range(self._num_sms))

    def cuDevSmResourceSplitByCount(self, num_groups, resource, flags, least):
        size = -(-least // self._group) * self._group
        if num_groups != 1 or not 0 < size <= len(resource.ids):
            return 1, None, 0, None
        return 0, [_resource(resource.ids[:size])], 1, _resource(resource.ids[size:])

    def cuDevResourceGenerateDesc(self, resources, count):
        assert len(resources) == count
        return 0, resources[0]

    def cuGreenCtxCreate(self, description, device, flags):
        return 0, description

    def cuGreenCtxStreamCreate(self, context, flags, priority):
        self.parts.append(frozenset(context.ids))
        return 0, len(self.parts) - 1


def _resource(ids) -> SimpleNamespace:
    return SimpleNamespace(ids=tuple(ids), sm=SimpleNamespace(smCount=len(ids)))


@pytest.fixture
def divided(monkeypatch):
    """divided(driver) -> streams on it."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: handle)

    def streams(driver: FakeDriver) -> CudaStreams:
        monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace())
        monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
        return CudaStreams(torch.device("cuda"))

    return streams


def sms_of(streams: CudaStreams, driver: FakeDriver, places) -> list[frozenset[int]]:
    streams.prepare(places)
    return [driver.parts[streams._stream(place)] for place in places]


@pytest.mark.parametrize("num_sms", [78, 114, 128, 132, 144, 148])
def test_lanes_have_the_sms_that_they_ask_for_and_none_in_common(divided, num_sms):
    """All sizes that a tuner may come to, on one CudaStreams, as it asks for them."""
    family, driver = DecodeBeside(OPERATORS, ROWS, ROWS // 2, num_sms), FakeDriver(num_sms)
    streams, seen, sizes = divided(driver), family.start(), set()
    for schedule in seen:
        attention, others = LaneOrder(schedule, OPERATORS, num_sms).partitions
        parts = sms_of(streams, driver, (attention, others))
        assert [len(part) for part in parts] == [attention.sms, others.sms]
        assert attention.sms + others.sms == num_sms  # nothing lies idle
        assert not parts[0] & parts[1]
        if attention.sms not in sizes:
            sizes.add(attention.sms)
            seen += family.near(schedule)
    left = num_sms % GROUP_SMS
    assert {size % GROUP_SMS for size in sizes} == {0, left}
    assert len(driver.parts) == 2 * len(sizes)  # each made once


def test_lanes_that_ask_for_less_than_all_have_none_in_common_either(divided):
    driver = FakeDriver(132)
    for share, rest in ((0.3, 0.5), (60 / 132, 68 / 132), (0.5, 0.25)):
        schedule = decode_beside(OPERATORS, ROWS, ROWS // 2, share)
        operations = [
            op if op.sm_share in (share, 1.0) else type(op)(op.operator, op.start, op.end, op.lane, rest)
            for op in schedule.operations
        ]
        places = LaneOrder(type(schedule)("less", ROWS, tuple(operations)), OPERATORS, 132).partitions
        first, second = sms_of(divided(driver), driver, places)
        assert not first & second


def test_what_the_driver_rounds_up_is_refused(divided):
    streams = divided(FakeDriver(132, group=16))
    streams.prepare([WHOLE, Place(1, 64), Place(0, 68)])
    for place in (Place(1, 72), Place(0, 60)):
        with pytest.raises(PartitionError, match=r"the driver gives \d+ of 132 SMs where (72|60) are asked for"):
            streams.prepare([place])


def test_what_the_driver_cannot_split_is_refused_with_its_code(divided):
    with pytest.raises(PartitionError, match="the driver says 1"):
        divided(FakeDriver(132)).prepare([Place(1, 136)])
