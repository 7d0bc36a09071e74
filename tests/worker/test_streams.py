"""Lanes keep every order that a schedule's rows, lanes and waits ask for, with no more events than they need."""

from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autosearch.catalog import find_model
from autosearch.decode_beside import decode_beside
from autosearch.operators import layer_operators
from autosearch.pipeline import NanoOperation, PipelineSchedule, nanobatch_only, sequential
from autosearch.precedence import ChainedLayers
from worker.folded_norms import fold_norms
from worker.streams import WHOLE, LaneOrder, PartitionError, Place

OPERATORS = layer_operators(find_model("llama-3-8b").spec)
SMS, ROWS, LAYERS = 132, 64, 4


class FakeStreams:
    """Keeps what comes after what, as streams and events would."""

    def __init__(self) -> None:
        self.now = {}  # place -> all that it comes after, itself included
        self.place = None

    @contextmanager
    def at(self, place):
        self.place = place
        yield

    def mark(self, place):
        return frozenset(self.now.get(place, frozenset()))

    def wait(self, place, event):
        self.now[place] = self.now.get(place, frozenset()) | event

    def launch(self, node):
        before = self.now.get(self.place, frozenset())
        self.now[self.place] = before | {node}
        return before


@st.composite
def schedules(draw):
    """Two ranges, two lanes that share the SMs or not, in operator order."""
    cut = draw(st.integers(1, ROWS - 1))
    share = draw(st.sampled_from([0.25, 0.5, 0.75]))
    operations = []
    for operator in OPERATORS:
        ranges = [(0, ROWS)] if draw(st.booleans()) else [(0, cut), (cut, ROWS)]
        for start, end in ranges:
            lane = draw(st.integers(0, 1))
            own = share if lane else 1 - share
            operations.append(NanoOperation(operator.name, start, end, lane, draw(st.sampled_from([own, 1.0]))))
    after = draw(st.lists(st.tuples(*[st.integers(0, len(operations) - 1)] * 2), max_size=3))
    for first, then in after:
        if first < then:
            fields = {field: getattr(operations[then], field) for field in ("operator", "start", "end", "lane")}
            share_of_then = operations[then].sm_share
            operations[then] = NanoOperation(**fields, sm_share=share_of_then, after=(first,))
    return PipelineSchedule("drawn", ROWS, tuple(operations))


@settings(max_examples=150, deadline=None)
@given(schedules())
def test_everything_comes_after_what_it_waits_for(schedule):
    order, streams = LaneOrder(schedule, OPERATORS, SMS), FakeStreams()
    before = {}

    def launch(layer, index):
        before[layer, index] = streams.launch((layer, index))

    order.run(LAYERS, streams, launch)
    waits = ChainedLayers(schedule.operations, OPERATORS).waits
    for (layer, index), done in before.items():
        for other, back in waits[index]:
            if layer >= back:
                assert (layer - back, other) in done
    assert len(streams.now[WHOLE]) == LAYERS * len(schedule.operations), "the end does not join everything"


@settings(max_examples=100, deadline=None)
@given(schedules(), st.data())
def test_no_event_is_there_in_vain(schedule, data):
    """Without any one of the waits, something would come too early."""
    order = LaneOrder(schedule, OPERATORS, SMS)
    waited = [(index, wait) for index, waits in enumerate(order.waits) for wait in waits]
    if not waited:
        return
    index, dropped = data.draw(st.sampled_from(waited))
    order.waits = tuple(
        tuple(wait for wait in waits if (place, wait) != (index, dropped)) for place, waits in enumerate(order.waits)
    )
    streams, before = FakeStreams(), {}

    def launch(layer, at):
        before[layer, at] = streams.launch((layer, at))

    order.run(LAYERS, streams, launch)
    layer = LAYERS - 1
    assert (layer - dropped[1], dropped[0]) not in before[layer, index]


def test_one_lane_needs_no_events():
    for schedule in (sequential(OPERATORS, ROWS), nanobatch_only(OPERATORS, ROWS, 3)):
        order = LaneOrder(schedule, OPERATORS, SMS)
        assert order.num_events == 0
        assert order.partitions == ()


def test_shares_become_disjoint_groups_of_sms():
    for share in (8 / 132, 0.3, 0.5, 64 / 132, 0.9):
        attention, gemms = LaneOrder(on_two_lanes(share, 1 - share), OPERATORS, SMS).partitions
        assert (attention.lane, gemms.lane) == (1, 0)
        assert SMS - 16 < attention.sms + gemms.sms <= SMS
    assert LaneOrder(on_two_lanes(64 / 132, 68 / 132), OPERATORS, SMS).partitions == (Place(1, 64), Place(0, 68))
    # What whole groups leave is the attention's where its share says so.
    assert LaneOrder(on_two_lanes(68 / 132, 64 / 132), OPERATORS, SMS).partitions == (Place(1, 68), Place(0, 64))
    assert LaneOrder(on_two_lanes(60 / 132, 1 - 60 / 132), OPERATORS, SMS).partitions == (Place(1, 60), Place(0, 72))
    assert LaneOrder(on_two_lanes(60 / 132, 68 / 132), OPERATORS, SMS).partitions == (Place(1, 56), Place(0, 68))
    assert LaneOrder(on_two_lanes(0.5, 0.5), OPERATORS, 128).partitions == (Place(1, 64), Place(0, 64))


def on_two_lanes(attention: float, gemms: float) -> PipelineSchedule:
    """Decode attention on a share of its own beside the other half's projections."""
    whole = [NanoOperation(name, 0, ROWS) for name in ("attn_norm", "qkv", "rope_append", "prefill_attention")]
    half = ROWS // 2
    first = [NanoOperation(name, 0, half) for name in ("o", "ffn_norm", "up_gate")]
    second = [NanoOperation(name, half, ROWS, 0, gemms) for name in ("decode_attention", "o", "ffn_norm", "up_gate")]
    decode = NanoOperation("decode_attention", 0, half, 1, attention, after=(3,))
    return PipelineSchedule("two lanes", ROWS, (*whole, decode, *second, *first, NanoOperation("down", 0, ROWS)))


@pytest.mark.parametrize("num_before", [0, 1, 4])
@pytest.mark.parametrize("num_beside", [1, 2, 3])
def test_what_helps_may_overtake_projections(num_beside, num_before):
    plain = decode_beside(OPERATORS, ROWS, ROWS // 2, 0.5, num_beside, num_before=num_before)
    for schedule in (plain, fold_norms(plain)):
        order = LaneOrder(schedule, OPERATORS, SMS)
        overtaking = [op for index, op in enumerate(order.operations) if order.may_overtake(index)]
        assert overtaking == [op for op in order.operations if op.helps]


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_nothing_overtakes_what_it_reads(share):
    """On its own part of the SMs, or on all of them, where only an event tells that it has ended."""
    half = ROWS // 2
    before = [NanoOperation(name, 0, ROWS) for name in ("attn_norm", "qkv")]
    appended = NanoOperation("rope_append", 0, ROWS, 0, share)
    begun = NanoOperation("decode_attention", 0, half, 1, 0.5)
    helper = NanoOperation("decode_attention", 0, half, 0, 0.5, helps=True)
    other = NanoOperation("decode_attention", half, ROWS, 0, 0.5)
    after = [NanoOperation("prefill_attention", 0, ROWS, after=(3,))]
    after += [NanoOperation(name, 0, ROWS) for name in ("o", "ffn_norm", "up_gate", "down")]
    schedule = PipelineSchedule("s", ROWS, (*before, appended, begun, helper, other, *after))
    schedule.validate(OPERATORS)
    order = LaneOrder(schedule, OPERATORS, SMS)
    assert not any(map(order.may_overtake, range(len(order.operations))))
    waiting = PipelineSchedule("t", ROWS, (*before, appended, begun, other, helper, *after))
    waiting.validate(OPERATORS)
    order = LaneOrder(waiting, OPERATORS, SMS)
    assert order.may_overtake(5) == (share == 1.0)


def test_a_norm_without_a_pass_is_nothing_to_overtake():
    """What waits for an event but launches nothing leaves the event right before the helper."""
    half = ROWS // 2
    early = [NanoOperation(name, 0, half) for name in ("attn_norm", "qkv", "rope_append")]
    begun = NanoOperation("decode_attention", 0, half, 1, 0.5)
    norm, helper = NanoOperation("attn_norm", half, ROWS, 0, 0.5), replace(begun, lane=0, helps=True)
    late = [NanoOperation(name, half, ROWS, 0, 0.5) for name in ("qkv", "rope_append", "decode_attention")]
    late += [NanoOperation("prefill_attention", 0, ROWS, 0, 0.5)]
    late += [NanoOperation(name, 0, ROWS) for name in ("o", "ffn_norm", "up_gate", "down")]
    plain = PipelineSchedule("s", ROWS, (*early, begun, norm, helper, *late))
    plain.validate(OPERATORS)
    assert LaneOrder(plain, OPERATORS, SMS).may_overtake(5)
    assert not LaneOrder(fold_norms(plain), OPERATORS, SMS).may_overtake(5)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([(0, 0.3), (1, 0.3), (2, 0.3)], "two can be told apart"),
        ([(0, 0.98), (1, 0.02)], "at least 8"),
    ],
)
def test_what_the_device_cannot_give_is_refused(parts, message):
    operations = tuple(NanoOperation("qkv", 0, ROWS, lane, share) for lane, share in parts)
    with pytest.raises(PartitionError, match=message):
        LaneOrder(PipelineSchedule("s", ROWS, operations), OPERATORS, SMS)


def test_two_lanes_meet_where_one_needs_the_other():
    order = LaneOrder(on_two_lanes(64 / 132, 68 / 132), OPERATORS, SMS)
    assert order.num_events == 4  # attention and projections after the first part, both before the rest


def test_layers_follow_each_other_in_issue_order():
    launched = []
    schedule = sequential(OPERATORS, ROWS)
    LaneOrder(schedule, OPERATORS, SMS).run(2, FakeStreams(), lambda layer, index: launched.append((layer, index)))
    assert launched == [(layer, index) for layer in range(2) for index in range(len(OPERATORS))]
    assert all(first < then for first, then in pairwise(launched))
