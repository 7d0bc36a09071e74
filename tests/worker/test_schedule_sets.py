"""Sets of schedules are taken as a whole or not at all, and nothing is freed that an iteration may still run by."""

import sys
import threading
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from autosearch.catalog import find_model
from autosearch.decode_beside import decode_beside
from autosearch.operators import layer_operators
from autosearch.pipeline import Figures, InvalidScheduleError, PipelineSchedule
from worker.schedule_choice import SEQUENTIAL
from worker.schedule_sets import ScheduleRules, ScheduleSets, SchedulesRefusedError

OPERATORS = layer_operators(find_model("llama-3-8b").spec)
ROWS = 256
GPU = "NVIDIA H200"


def measured(name: str, decodes: int = 128, gain: float = 1.04, rows: int = ROWS) -> PipelineSchedule:
    """Another number of decodes is another schedule."""
    return replace(
        decode_beside(OPERATORS, rows, decodes, 0.5),
        name=name,
        model="llama",
        gpu=GPU,
        decode_share=decodes / rows,
        mean_context=700.0,
        prefill_pairs=1e5,
        measured=Figures(100.0, 1000.0 * gain, 1000.0),
    )


class FakeRunner:
    """Keeps what is prepared; iterations end when they are told to."""

    def __init__(self) -> None:
        self.prepared: dict[str, PipelineSchedule] = {}
        self.all_ended = threading.Event()
        self.all_ended.set()
        self.broken: set[str] = set()
        self.prepare_calls: list[str] = []

    def prepare(self, schedule):
        self.prepare_calls.append(schedule.name)
        assert schedule.name not in self.prepared
        self.prepared[schedule.name] = schedule  # half, where it is broken
        if schedule.name in self.broken:
            raise InvalidScheduleError(f"{schedule.name}: lanes share more than the device has")

    def release(self, name):
        self.prepared.pop(name, None)

    def mark(self):
        return lambda: None if self.all_ended.wait(10) else pytest.fail("iterations never end")


def sets_of(*first: PipelineSchedule, room: int = 8) -> tuple[ScheduleSets, FakeRunner]:
    runner = FakeRunner()
    runner.prepared = {schedule.name: schedule for schedule in first}
    return ScheduleSets(ScheduleRules("llama", GPU, frozenset({64, ROWS}), room), runner, first), runner


def chosen(sets: ScheduleSets, decodes: int) -> str:
    return SEQUENTIAL if sets.choice is None else sets.choice.choose(ROWS, decodes, 700 * decodes).name


def test_a_set_serves_from_its_use_on_and_the_old_one_is_freed():
    sets, runner = sets_of(measured("old"))
    sets.prepare(1, [measured("new", 64)])
    assert chosen(sets, 128) == "old"
    assert set(runner.prepared) == {"old", "new"}
    sets.use(1)
    assert (chosen(sets, 128), chosen(sets, 64)) == (SEQUENTIAL, "new")
    sets.free()
    assert set(runner.prepared) == {"new"}


def test_what_iterations_in_flight_run_by_is_kept_until_they_have_ended():
    sets, runner = sets_of(measured("old"))
    sets.prepare(1, [measured("new", 64)])
    runner.all_ended.clear()
    sets.use(1)  # returns although iterations are in flight
    assert set(runner.prepared) == {"old", "new"}
    runner.all_ended.set()
    sets.free()
    assert set(runner.prepared) == {"new"}


def test_schedules_that_stay_are_not_prepared_again_even_under_another_name():
    sets, runner = sets_of(measured("a"), measured("b", 64))
    sets.prepare(1, [measured("a", gain=1.1), measured("moved", 64)])
    sets.use(1)
    sets.free()
    assert runner.prepare_calls == []
    assert set(runner.prepared) == {"a", "b"}
    assert (chosen(sets, 128), chosen(sets, 64)) == ("a", "b")


def test_batches_with_the_same_schedule_share_it():
    sets, runner = sets_of()
    elsewhere = replace(measured("b", 64), decode_share=0.9)
    sets.prepare(1, [measured("a", 64), elsewhere])
    sets.use(1)
    assert runner.prepare_calls == ["a"]
    assert (chosen(sets, 64), chosen(sets, 230)) == ("a", "a")


def test_another_schedule_of_a_name_that_serves_is_told_apart():
    sets, runner = sets_of(measured("best"))
    sets.prepare(1, [measured("best", 64)])
    assert len(runner.prepared) == 2
    sets.use(1)
    sets.free()
    assert [each.boundaries() for each in runner.prepared.values()] == [measured("best", 64).boundaries()]
    assert chosen(sets, 64) in runner.prepared


def test_schedules_slower_than_the_sequential_one_are_known_and_never_prepared():
    sets, runner = sets_of(measured("old"))
    sets.prepare(1, [measured("slow", gain=0.97)])
    sets.use(1)
    assert sets.choice is not None
    assert sets.choice.choose(ROWS, 128, 128 * 700).name == SEQUENTIAL
    assert sets.choice.choose(ROWS, 128, 128 * 700).is_known
    assert runner.prepare_calls == []


def test_another_choice_serves_until_a_set_does():
    sets, runner = sets_of(measured("old"))
    assert chosen(sets, 128) == "old"
    sets.use_choice(None)
    assert chosen(sets, 128) == SEQUENTIAL
    sets.prepare(1, [measured("new", 64)])
    sets.use(1)
    assert chosen(sets, 64) == "new"
    sets.free()
    assert list(runner.prepared) == ["new"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "qwen"}, "x: it was made for model qwen, and llama is served here"),
        ({"batch_tokens": 128}, "x: it is for batches of 128 rows, and those of this engine have 64, 256"),
        ({"measured": None}, "x: nothing says how fast it was"),
        ({"decode_share": None}, "x: nothing says how fast it was, and on which batch"),
        ({"gpu": "NVIDIA A100"}, "x: it was measured on NVIDIA A100, and this engine runs on NVIDIA H200"),
        ({"gpu": ""}, "x: it was measured on an unknown GPU"),
        ({"name": "broken"}, "lanes share more than the device has"),
        ({"name": "good"}, "2 schedules are named good"),
    ],
)
def test_one_that_is_not_fit_and_none_is_taken(change, message):
    sets, runner = sets_of(measured("old"))
    runner.broken.add("broken")
    with pytest.raises(SchedulesRefusedError, match=message):
        sets.prepare(1, [measured("good", 64), replace(measured("x", 32), **change)])
    assert set(runner.prepared) == {"old"}
    assert chosen(sets, 128) == "old"
    sets.prepare(2, [measured("good", 64)])
    assert set(runner.prepared) == {"old", "good"}


def test_no_more_than_there_is_room_for_are_held_at_a_time():
    sets, runner = sets_of(measured("old"), measured("older", 64), room=3)
    with pytest.raises(SchedulesRefusedError, match=r"2 new .* beside the 2 .* 4, .* reserved for 3: .*-schedules 4"):
        sets.prepare(1, [measured("a", 32), measured("b", 96)])
    assert runner.prepare_calls == []
    sets.prepare(2, [measured("a", 32), measured("older", 64), measured("slow", 96, gain=0.9)])
    sets.use(2)
    sets.prepare(3, [measured("c", 16), measured("older", 64)])  # the first set has gone
    assert len(runner.prepared) == 3


def test_a_thread_that_serves_gets_the_interpreter_soon_while_others_are_prepared():
    sets, runner = sets_of(measured("old"))
    before, seen = sys.getswitchinterval(), []
    prepare = runner.prepare
    runner.prepare = lambda schedule: (seen.append(sys.getswitchinterval()), prepare(schedule))
    runner.broken.add("broken")
    with pytest.raises(SchedulesRefusedError):
        sets.prepare(1, [measured("new", 64), measured("broken", 32)])
    assert len(seen) == 2
    assert max(seen) < before / 10
    assert sys.getswitchinterval() == before


def test_without_room_only_those_that_are_held_can_serve():
    sets, _ = sets_of(measured("old"), measured("older", 64), room=0)
    with pytest.raises(SchedulesRefusedError, match="no room was kept for other schedules"):
        sets.prepare(1, [measured("new", 32)])
    sets.prepare(2, [measured("old")])
    sets.use(2)
    assert (chosen(sets, 128), chosen(sets, 64)) == ("old", SEQUENTIAL)


def test_a_set_that_is_dropped_leaves_nothing():
    sets, runner = sets_of(measured("old"))
    sets.prepare(1, [measured("new", 64)])
    sets.drop(1)
    sets.drop(1)
    assert set(runner.prepared) == {"old"}


def test_after_the_close_nothing_is_prepared():
    sets, runner = sets_of(measured("old"))
    sets.close()
    with pytest.raises(SchedulesRefusedError, match="being closed"):
        sets.prepare(1, [measured("new", 64)])
    assert set(runner.prepared) == {"old"}


class Exchanges(RuleBasedStateMachine):
    """Whatever is prepared, refused, used and dropped: what may be chosen is runnable, and nothing else is kept."""

    @initialize()
    def start(self):
        self.sets, self.runner = sets_of(measured("16", 16), room=4)
        self.number, self.ready = 0, {}

    @rule(decodes=st.sets(st.sampled_from([16, 32, 48, 64, 96]), min_size=1), breaks=st.booleans())
    def prepare(self, decodes, breaks):
        self.number += 1
        self.runner.broken = {str(max(decodes))} if breaks else set()
        try:
            self.sets.prepare(self.number, [measured(str(each), each) for each in sorted(decodes)])
            self.ready[self.number] = decodes
        except SchedulesRefusedError:
            pass

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def use(self, data):
        number = data.draw(st.sampled_from(sorted(self.ready)))
        self.sets.use(number)
        self.sets.free()
        decodes = self.ready.pop(number)
        served = {chosen(self.sets, each) for each in (16, 32, 48, 64, 96)} - {SEQUENTIAL}
        assert served <= {str(each) for each in decodes}

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def drop(self, data):
        number = data.draw(st.sampled_from(sorted(self.ready)))
        self.sets.drop(number)
        del self.ready[number]

    @invariant()
    def what_may_be_chosen_is_there(self):
        names = {chosen(self.sets, each) for each in (16, 32, 48, 64, 96)} - {SEQUENTIAL}
        assert names <= set(self.runner.prepared)
        assert len(self.runner.prepared) <= 4

    @precondition(lambda self: not self.ready)
    @invariant()
    def nothing_else_is_kept(self):
        self.sets.free()
        assert set(self.runner.prepared) == self.sets._serving.names


TestExchanges = Exchanges.TestCase
TestExchanges.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)
