"""The tuner on a bench whose times are made up: noise, drift, and candidates that are worse than nothing."""

import random
from dataclasses import replace

import pytest

from autosearch.catalog import find_model
from autosearch.decode_beside import DecodeBeside, decode_beside
from autosearch.operators import layer_operators
from autosearch.pipeline import InvalidScheduleError, nanobatch_only, sequential
from autosearch.workload import Workload
from worker.folded_norms import fold_norms
from worker.schedule_choice import ScheduleChoice
from worker.streams import LaneOrder
from worker.tuner import Effort, Reading, measure_in_turns, tune

OPERATORS = layer_operators(find_model("llama-3-8b").spec)
WORK = Workload(2048, 1024.0, 1024 * 768.0, 1024 * 512.0)
SEQUENTIAL = sequential(OPERATORS, 2048)
WAYS = [SEQUENTIAL, fold_norms(SEQUENTIAL)]
FAMILY = [decode_beside(OPERATORS, 2048, 1024, share) for share in (0.25, 0.4, 0.5, 0.6, 0.75)]


NOTHING = DecodeBeside(OPERATORS, 2048, 0, 132)  # a family without schedules


class FakeBench:
    """True milliseconds by name, with noise and a card that gets slower as it warms up."""

    def __init__(self, ms: dict[str, float], noise: float = 0.004, drift: float = 0.0, folding: float = 1.03) -> None:
        self._ms, self._noise, self._drift, self._folding = ms, noise, drift, folding
        self._draw = random.Random(0)
        self.runs: list[str] = []

    def run(self, schedule, settle_s, seconds):
        self.runs.append(schedule.name)
        slower = 1 + self._drift * len(self.runs)
        plain = schedule.name.removesuffix("-folded")
        folding = self._folding if plain != schedule.name else 1.0
        return Reading(self._ms[plain] * folding * slower * (1 + self._draw.gauss(0, self._noise)), 45.0)


def times(best: float) -> dict[str, float]:
    """The third of the family takes `best`, the others are slower and slower; sequential takes 70."""
    return {SEQUENTIAL.name: 70.0} | {s.name: best + 2 * abs(i - 2) for i, s in enumerate(FAMILY)}


def test_the_fastest_is_kept_with_its_figures():
    tuned = tune(FakeBench(times(67.0)), WAYS, NOTHING, FAMILY, WORK, 32)
    assert tuned.best.name == FAMILY[2].name
    assert tuned.best.measured.tokens_per_s_per_gpu == pytest.approx(2048 / 67e-3, rel=0.01)
    assert tuned.best.measured.sequential_tokens_per_s_per_gpu == pytest.approx(2048 / 70e-3, rel=0.01)
    assert tuned.best.measured.layer_us == pytest.approx(67e3 / 32, rel=0.01)
    assert tuned.gain == pytest.approx(70 / 67, rel=0.01)
    assert tuned.best.planned_for == WORK
    assert ScheduleChoice([tuned.best]).choose(2048, 1000, 760_000).name == FAMILY[2].name


def test_what_is_not_faster_than_the_sequential_schedule_is_not_kept():
    tuned = tune(FakeBench(times(73.0)), WAYS, NOTHING, FAMILY, WORK, 32)
    assert tuned.best.name == SEQUENTIAL.name
    assert tuned.gain == 1
    choice = ScheduleChoice([tuned.best]).choose(2048, 1000, 760_000)
    assert choice.is_known
    assert choice.name == ""


def test_folded_norms_count_for_both_sides():
    """Where they help, the best sequential schedule has them too, and the gain is over that one."""
    tuned = tune(FakeBench(times(67.0), folding=0.98), WAYS, NOTHING, FAMILY, WORK, 32)
    assert tuned.best.name == f"{FAMILY[2].name}-folded"
    assert tuned.sequential.schedule.name == f"{SEQUENTIAL.name}-folded"
    assert tuned.gain == pytest.approx(70 / 67, rel=0.01)
    assert tuned.best.measured.sequential_tokens_per_s_per_gpu == pytest.approx(2048 / 70e-3, rel=0.01)
    alone = tune(FakeBench(times(72.0), folding=0.98), WAYS, NOTHING, FAMILY, WORK, 32)
    assert alone.gain == 1
    assert ScheduleChoice([alone.best]).choose(2048, 1000, 760_000).name == f"{SEQUENTIAL.name}-folded"


def test_what_is_folded_already_is_measured_once():
    bench = FakeBench(times(67.0), folding=0.98)
    tuned = tune(bench, WAYS, NOTHING, [fold_norms(schedule) for schedule in FAMILY], WORK, 32)
    assert tuned.best.name == f"{FAMILY[2].name}-folded"
    assert sorted(name for name, _ in tuned.screened) == sorted(f"{schedule.name}-folded" for schedule in FAMILY)


def test_what_cannot_run_here_is_left_out_unless_nothing_can():
    class Picky(FakeBench):
        def run(self, schedule, settle_s, seconds):
            if schedule.name in cannot:
                raise InvalidScheduleError("no such part of the SMs")
            return super().run(schedule, settle_s, seconds)

    cannot, said = {FAMILY[2].name}, []
    tuned = tune(Picky(times(67.0)), WAYS, NOTHING, FAMILY, WORK, 32, say=said.append)
    assert tuned.best.name in {FAMILY[1].name, FAMILY[3].name}
    assert f"{FAMILY[2].name} is left out: no such part of the SMs" in said
    cannot = {schedule.name for schedule in FAMILY}
    with pytest.raises(InvalidScheduleError, match="no such part"):
        tune(Picky(times(67.0)), WAYS, NOTHING, FAMILY, WORK, 32)


def test_a_card_that_slows_down_on_the_way_harms_all_alike():
    bench = FakeBench({"a": 50.0, "b": 50.0, "c": 50.0}, noise=0.0, drift=0.01)
    named = [type(SEQUENTIAL)(name, 2048, SEQUENTIAL.operations) for name in "abc"]
    measured = measure_in_turns(bench, named, Effort(num_repeats=4))
    assert bench.runs == list("abccbaabccba")
    assert len({round(sum(one.ms), 6) for one in measured}) == 1


def test_the_search_climbs_to_the_best_of_the_family():
    family = DecodeBeside(OPERATORS, 2048, 1016, 132)

    class Landscape:
        """Fastest at 72 SMs, a cut at 1,152, prefill attention and all four behind it beside, in the second kernel."""

        runs = 0

        def run(self, schedule, settle_s, seconds):
            self.runs += 1
            name = schedule.name.removesuffix("-folded")
            if name == "mine":
                name = start.name
            if name == SEQUENTIAL.name:
                return Reading(70.0, 45.0)
            _, _, _, cut, share, steps, kernel = name.split("-", 6)
            before, _, beside = steps.rpartition("+")
            sms = float(share) * 132
            ms = 65 + abs(sms - 72) / 8 + abs(int(cut) - 1152) / 128 + (4 - int(beside)) + (kernel != "cuda-wide")
            ms += abs(int(before or 0) - 1)
            return Reading(ms + 2 * schedule.name.endswith("-folded"), 45.0)

    bench = Landscape()
    tuned = tune(bench, WAYS, family, (), WORK, 32)
    assert tuned.best.name == "decode-beside-2048-1152-0.545-1+4-cuda-wide"
    assert bench.runs < 100
    start = decode_beside(OPERATORS, 2048, 1152, 72 / 132, 3, "cuda-wide", 1)
    again, from_there = Landscape(), replace(start, name="mine")
    tuned = tune(again, WAYS, family, [from_there, replace(start, name="the same")], WORK, 32)
    assert tuned.best.name == "decode-beside-2048-1152-0.545-1+4-cuda-wide"
    assert again.runs < bench.runs
    assert "the same" not in {name for name, _ in tuned.screened}


def test_the_family_is_valid_everywhere_and_empty_where_nothing_can_be_cut():
    family = DecodeBeside(OPERATORS, 2048, 1016, 132)
    found = family.start()
    assert {schedule.ranges("decode_attention")[0][1] for schedule in found} == {512, 768, 1024}
    for schedule in [*found, *(near for point in found for near in family.near(point))]:
        schedule.validate(OPERATORS)
        LaneOrder(schedule, OPERATORS, 132)
    assert family.near(SEQUENTIAL) == []
    only_decodes = DecodeBeside(OPERATORS, 1280, 1280, 132).start()
    assert {schedule.ranges("decode_attention")[0][1] for schedule in only_decodes} == {640, 1024}
    assert DecodeBeside(OPERATORS, 100, 60, 132).start() == []  # not a whole tile beside them
    assert DecodeBeside(OPERATORS, 2048, 0, 132).start() == []


class ByWork:
    """Milliseconds by what an operation does, whatever the schedule is called."""

    def __init__(self, ms) -> None:
        self._ms, self.runs = ms, []

    def run(self, schedule, settle_s, seconds):
        self.runs.append((schedule.name, schedule.operations))
        return Reading(self._ms(schedule), 45.0)


def test_the_climb_goes_on_where_the_fastest_one_is_not_of_the_family():
    """From the fastest of the family: it may come to be faster than the other."""
    family, foreign = DecodeBeside(OPERATORS, 2048, 1016, 132), replace(nanobatch_only(OPERATORS, 2048, 2), name="x")

    def ms(schedule):
        share = next((op.sm_share for op in schedule.operations if op.lane == 1), None)
        slower = 5 * schedule.name.endswith("-folded")
        return slower + (60.0 if share is None else 59.0 + abs(share * 132 - 96) / 8)

    tuned = tune(ByWork(ms), WAYS, family, [foreign], WORK, 32)
    assert tuned.best.name.split("-")[4] == f"{96 / 132:.3f}"


def test_the_climb_from_folded_norms_keeps_them():
    family = DecodeBeside(OPERATORS, 2048, 1016, 132)
    start = fold_norms(decode_beside(OPERATORS, 2048, 1024, 64 / 132, 3, "cuda"))

    def ms(schedule):
        share = next((op.sm_share for op in schedule.operations if op.lane == 1), 0.0)
        return 60.0 + abs(share * 132 - 96) / 8 + 10 * (not schedule.name.endswith("-folded"))

    tuned = tune(ByWork(ms), WAYS, family, [start], WORK, 32)
    assert tuned.best.name.startswith("decode-beside-2048-1024-0.727")
    assert tuned.best.name.endswith("-folded")


def test_candidates_with_others_names_are_measured_as_what_they_are():
    """One called as the sequential schedule, one as a member of the family that differs: an earlier version of it."""
    named = replace(FAMILY[0], name=SEQUENTIAL.name)
    old = replace(nanobatch_only(OPERATORS, 2048, 3), name=FAMILY[1].name)
    dealt = replace(FAMILY[1], name="dealt", decodes_first=False)
    bench = ByWork(lambda schedule: 70.0 + schedule.operations.__hash__() % 7)
    tuned = tune(bench, WAYS, NOTHING, [named, old, FAMILY[1], dealt, replace(SEQUENTIAL, name="copy")], WORK, 32)
    assert all(len({work for each, work in bench.runs if each == name}) == 1 for name, _ in bench.runs)
    names = {f"{SEQUENTIAL.name} (2)", FAMILY[1].name, f"{FAMILY[1].name} (2)", "dealt"}
    assert {name for name, _ in tuned.screened if not name.endswith("-folded")} == names  # the copy is not one
