"""`nanoflow bench drift` on a small model, step by step on the CPU, and on scheduler and clock alone."""

import json
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import save_config

from autosearch.catalog import find_model
from autosearch.decode_beside import decode_beside
from autosearch.operators import layer_operators
from autosearch.pipeline import Figures, PipelineSchedule, sequential
from autosearch.specs import ModelSpec
from control_plane.bench.ablation_table import Row
from control_plane.bench.drift import Options, run
from control_plane.bench.drift_plan import Part, RequestSource, fixed_plans, forced
from control_plane.bench.drift_served import CHOICE, DriftTrace, part_result
from control_plane.bench.drift_table import PartResult, summary, table
from control_plane.bench.throughput import run_until_done
from control_plane.config import EngineConfig
from control_plane.options import ConfigError
from scheduler.loop import EngineLoop
from scheduler.plan import EngineCapacity, IterationPlan, ScheduleBucket, SlotFault, StepResult
from scheduler.scheduler import Scheduler
from scheduler.scheduler_config import SchedulerConfig
from worker.cuda_executor import CudaExecutor
from worker.schedule_choice import ScheduleChoice
from worker.tuner import Effort

OPERATORS = layer_operators(find_model("llama-3-8b").spec)
SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
QUICK = Effort(0, 0, settle_s=0, measure_s=0, num_repeats=2)


def measured_at(schedule, name, share, gain, context=384.0):
    """As `nanoflow tune` writes it."""
    figures = Figures(2000, 30_000 * gain, 30_000)
    return replace(schedule, name=name, decode_share=share, mean_context=context, prefill_pairs=1e5, measured=figures)


def result(choice, *fixed):
    rows = tuple(Row("fixed", f"plan-{number}", speeds) for number, speeds in enumerate(fixed))
    return PartResult("30%", "2048 rows", 0.301, Row(CHOICE, "choice", choice), rows, 0.9, 0.05)


def test_the_verdict_is_over_the_best_fixed_plan_by_medians():
    # The first has the fastest run, the second the best median; 2 % is still within.
    found = result((98.0,), (90.0, 95.0, 200.0), (99.0, 100.0, 101.0), (10.0,))
    assert found.best.schedule == "plan-1"
    assert found.behind == pytest.approx(0.02)
    assert found.is_within
    missed = result((97.9,), (100.0,))
    assert not missed.is_within
    ahead = result((101.0,), (100.0,))
    assert ahead.behind < 0
    assert ahead.is_within
    assert summary([found, missed])[-1] == "more than 2% behind in: 30%"
    assert summary([found, ahead])[-1] == "within 2% in every part"
    assert "2.10% behind" in summary([missed])[1]
    assert "ahead" in summary([ahead])[1]


def test_a_parts_table_and_its_plain_data():
    found = result((98.0,), (100.0,), (50.0,))
    lines = table(found)
    assert lines[0] == "part 30%: 2048 rows; measured with 30.1% decodes"
    assert [line.split()[0] for line in lines[2:5]] == ["fixed", "fixed", "choice"]
    assert "2.00% behind (plan-0); overlapped in 90% of its iterations, unmeasured in 5%" in lines[-1]
    data = json.loads(json.dumps(found.to_json()))
    assert (data["best"], data["behind"], data["is_within"]) == ("plan-0", 0.02, True)
    assert (data["choice"]["gain"], data["fixed"][1]["gain"]) == (0.98, 0.5)


@given(st.floats(0.01, 0.99), st.integers(2, 4096))
def test_a_parts_lengths_have_its_share(share, request_tokens):
    try:
        part = Part.of(share, request_tokens)
    except ConfigError:
        assert round(share * request_tokens) in (0, request_tokens)
        return
    assert part.load.input_len + part.load.output_len == request_tokens
    # A request decodes as often as it has outputs: the scheduler's batches have the same share, see below.
    assert part.load.output_len / request_tokens == pytest.approx(share, abs=0.5 / request_tokens + 1e-9)


def test_requests_vary_around_their_means_and_come_again():
    part = Part.of(0.25, 64)
    source, again = RequestSource(part, "3", 99), RequestSource(part, "3", 99)
    drawn = [source.draw() for _ in range(2000)]
    assert drawn[:9] == [again.draw() for _ in range(9)]
    assert len({request.request_id for request in drawn}) == 2000
    prompts = [len(request.prompt_token_ids) for request in drawn]
    outputs = [request.sampling.max_tokens - 1 for request in drawn]
    assert (min(prompts), max(prompts)) == (24, 72)
    assert (min(outputs), max(outputs)) == (8, 24)
    assert np.mean(prompts) == pytest.approx(48, rel=0.03)
    assert np.mean(outputs) == pytest.approx(16, rel=0.03)
    assert max(prompts) + max(outputs) + 1 == part.longest
    assert max(max(request.prompt_token_ids) for request in drawn) == 98


def test_each_plan_is_compared_once_and_forced_upon_every_batch():
    beside = decode_beside(OPERATORS, 2048, 1024, 0.5)
    tuned = [
        measured_at(beside, "a", 0.5, 1.05),
        measured_at(beside, "b", 0.7, 1.02),
        measured_at(sequential(OPERATORS, 2048), "c", 0.9, 1.0),
        measured_at(decode_beside(OPERATORS, 1024, 512, 0.5), "small", 0.5, 1.05),
    ]
    assert [plan.name for plan in fixed_plans(sequential(OPERATORS, 2048), tuned)] == ["sequential-2048", "a"]
    with pytest.raises(ConfigError, match="--batch-sizes 512"):
        fixed_plans(sequential(OPERATORS, 512), tuned)
    assert ScheduleChoice([tuned[0]]).choose(2048, 100, 100 * 9).name == ""
    assert ScheduleChoice([forced(tuned[0])]).choose(2048, 100, 100 * 9).name == "a"


class SimulatedEngine:
    """Runs plans in no time, by a clock that a rule moves on."""

    def __init__(self, capacity, ms):
        """ms: of an iteration, by the schedule's name and the share of decodes."""
        self.capacity, self._ms = capacity, ms
        self.now, self.choice, self.order, self.faulty_step = 0.0, None, [], -1

    def use(self, choice):
        self.choice = choice
        self.order.append(choice)

    def submit(self, plan):
        rows, decodes = self.capacity.buckets[plan.bucket].batch_tokens, plan.num_decodes
        if self.choice is None:
            return SimulatedStep(self, plan, "", False)
        chosen = self.choice.choose(rows, decodes, int(plan.starts[:decodes].sum()) + decodes)
        return SimulatedStep(self, plan, chosen.name, not chosen.is_known)

    def run(self, name, plan):
        self.now += self._ms(name, plan.num_decodes / plan.num_tokens) / 1e3

    def close(self):
        pass


@dataclass
class SimulatedStep:
    engine: SimulatedEngine
    plan: IterationPlan
    name: str
    unmeasured: bool

    def done(self):
        return False

    def result(self, timeout_s=None):
        self.engine.run(self.name, self.plan)
        fault = self.plan.step == self.engine.faulty_step
        faults = (SlotFault(int(self.plan.slots[0]), "a fault"),) if fault else ()
        sampled = np.zeros(int(self.plan.samples.sum()), np.int32)
        return StepResult(self.plan.step, sampled, faults, 0.0, 0.0, (), bool(self.name), self.unmeasured)


ROWS, REQUEST_TOKENS, MEASURE_S = 512, 128, 1.0


def serve(engine, parts, choices, num_repeats=4, settle_s=0.3, meter=None):
    effort = Effort(settle_s=settle_s, measure_s=MEASURE_S, num_repeats=num_repeats)
    trace = DriftTrace(
        parts, choices, engine.use, rows=ROWS, vocab_size=99, effort=effort, meter=meter, clock=lambda: engine.now
    )
    config = SchedulerConfig(enable_prefix_caching=False)
    loop = EngineLoop(Scheduler(config, engine.capacity), engine, trace, 60.0)
    trace.begin(loop.submit)
    run_until_done(loop, trace)
    return trace


def capacity(rows=ROWS):
    buckets = tuple(ScheduleBucket(number, size) for number, size in enumerate(range(128, rows + 1, 128)))
    return EngineCapacity(4000, 16, rows, 1024, buckets)


def plans_of(*measured):
    """As drift.py makes them: the choice, the sequential schedule, and each one forced."""
    choices = {CHOICE: ScheduleChoice(measured), "sequential": None}
    return choices | {schedule.name: ScheduleChoice([forced(schedule)]) for schedule in measured}


def ms_by_share(name, share):
    """`few` gains while few decode, `many` while many do; each loses 10 % elsewhere."""
    faster = {"few": share < 0.5, "many": share >= 0.5, "": None}[name]
    return 65.0 if faster is None else 60.0 if faster else 71.5


def overlapping(name, share, gain):
    return measured_at(PipelineSchedule("", ROWS, ()), name, share, gain, context=96.0)


def test_the_served_share_of_decodes_is_the_parts_and_batches_are_full():
    engine = SimulatedEngine(capacity(), ms_by_share)
    parts = [Part.of(share, REQUEST_TOKENS) for share in SHARES]
    trace = serve(engine, parts, plans_of(overlapping("few", 0.3, 65 / 60)))
    for part in parts:
        found = part_result(part, "", trace.turns[part.name], ["sequential", "few"])
        assert found.decode_share == pytest.approx(part.share, abs=0.01)
        steps = [stats for turn in trace.turns[part.name] for stats in turn.steps]
        assert all(stats.num_tokens == ROWS for stats in steps)
        for turn in trace.turns[part.name]:
            assert sum(stats.num_decodes for stats in turn.steps) / turn.num_tokens == pytest.approx(
                part.share, abs=0.03
            )


def test_a_part_waits_for_the_last_request_of_the_one_before():
    engine = SimulatedEngine(capacity(), ms_by_share)
    most, least = Part.of(0.9, REQUEST_TOKENS), Part.of(0.1, REQUEST_TOKENS)
    trace = serve(engine, [most, least], {CHOICE: None})
    first = trace.turns[least.name][0]
    assert sum(stats.num_decodes for stats in first.steps) / first.num_tokens == pytest.approx(0.1, abs=0.03)


@pytest.mark.parametrize("settle_s", [0.0, 0.3])
def test_turns_count_their_own_plans_iterations_alone(settle_s):
    ms = {"": 65.0, "few": 60.0, "many": 71.5}
    engine = SimulatedEngine(capacity(), lambda name, share: ms[name])
    choices = plans_of(overlapping("few", 0.3, 1.08), overlapping("many", 0.7, 1.08))
    trace = serve(engine, [Part.of(0.3, REQUEST_TOKENS)], choices, settle_s=settle_s)
    (turns,) = trace.turns.values()
    assert [turn.plan for turn in turns] == [*choices, *reversed(choices)] * 2
    for turn in turns:
        expected = ms[{CHOICE: "few", "sequential": ""}.get(turn.plan, turn.plan)]
        assert turn.tokens_per_s == pytest.approx(ROWS / expected * 1e3)
        assert turn.began_s >= turn.settled_s
        assert turn.ended_s - turn.began_s >= MEASURE_S
    assert all(before.ended_s + max(settle_s, 0.05) <= after.began_s for before, after in pairwise(turns))


def test_a_choice_that_was_measured_everywhere_is_within_the_limit_and_one_that_was_not_is_told_of():
    parts = [Part.of(share, REQUEST_TOKENS) for share in SHARES]
    few, many = overlapping("few", 0.1, 65 / 60), overlapping("many", 0.9, 65 / 60)
    everywhere = [replace(few, decode_share=share) for share in SHARES[:2]]
    everywhere += [replace(many, decode_share=share) for share in SHARES[2:]]
    # The middle part is left out: its batches swing around the share at which the two change places.
    names = ["sequential", "few", "many"]
    engine = SimulatedEngine(capacity(), ms_by_share)
    choices = plans_of(few, many) | {CHOICE: ScheduleChoice(everywhere)}
    trace = serve(engine, parts, choices, num_repeats=2)
    found = [part_result(part, "", trace.turns[part.name], names) for part in parts if part.share != 0.5]
    assert [each.best.schedule for each in found] == ["few", "few", "many", "many"]
    assert all(each.is_within for each in found)
    assert all(each.overlapped == 1 and each.unmeasured == 0 for each in found)
    engine = SimulatedEngine(capacity(), ms_by_share)
    trace = serve(engine, parts, plans_of(few, many), num_repeats=2)
    found = [part_result(part, "", trace.turns[part.name], names) for part in parts if part.share != 0.5]
    assert [each.is_within for each in found] == [True, False, False, True]
    assert found[1].behind == pytest.approx(1 - 60 / 65, abs=0.01)
    assert found[1].unmeasured > 0.9
    assert found[1].overlapped < 0.1


def test_each_turn_has_the_power_of_its_own_time():
    engine = SimulatedEngine(capacity(), ms_by_share)

    class Meter:
        """Watts by the plan in use; the time that it ran."""

        def start(self):
            self.began, self.choice = engine.now, engine.choice

        def stop(self, num_tokens):
            assert self.choice is engine.choice, "read over two plans"
            seconds = engine.now - self.began
            return {"watts": 500.0 if engine.choice is None else 600.0, "sm_mhz": 1000 + num_tokens / seconds}

    part = Part.of(0.3, REQUEST_TOKENS)
    trace = serve(engine, [part], plans_of(overlapping("few", 0.3, 65 / 60)), meter=Meter)
    found = part_result(part, "", trace.turns[part.name], ["sequential", "few"])
    sequentials, few = found.fixed
    assert (sequentials.watts, few.watts, found.choice.watts) == (500, 600, 600)
    assert sequentials.joules_per_token == pytest.approx(500 / (ROWS / 65e-3))
    assert few.joules_per_token == pytest.approx(600 / (ROWS / 60e-3))
    assert few.sm_mhz == pytest.approx(1000 + few.median)


def test_a_request_that_fails_ends_the_trace():
    engine = SimulatedEngine(capacity(), ms_by_share)
    engine.faulty_step = 40
    with pytest.raises(RuntimeError, match="a fault"):
        serve(engine, [Part.of(0.3, REQUEST_TOKENS)], plans_of())


@pytest.fixture
def engine(tmp_path):
    save_config(tmp_path)
    folder = tmp_path / "schedules"
    folder.mkdir()
    operators = layer_operators(ModelSpec.from_folder(tmp_path))
    beside = decode_beside(operators, 256, 128, 0.5)
    (folder / "quarter.json").write_text(measured_at(beside, "", 0.25, 1.5, context=28).to_json())
    # One that lost where it was measured is no choice, and a fixed plan all the same.
    slow = decode_beside(operators, 256, 64, 0.5)
    (folder / "slow.json").write_text(measured_at(slow, "", 0.25, 0.9, context=28).to_json())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield EngineConfig(
        tmp_path,
        device="cpu",
        load_format="dummy",
        max_num_batched_tokens=256,
        max_num_seqs=256,
        num_threads=1,
        schedules=folder,
    )
    torch.set_num_threads(threads)


def check_shape(found, out):
    assert json.loads(out.splitlines()[-1]) == found
    assert [part["part"] for part in found["parts"]] == ["25%", "75%"]
    for part in found["parts"]:
        assert [row["schedule"].partition("-")[0] for row in part["fixed"]] == ["sequential", "quarter", "slow"]
        assert all(len(row["tokens_per_s"]) == 2 for row in [part["choice"], *part["fixed"]])
    assert found["worst_behind"] == max(part["behind"] for part in found["parts"])
    assert found["is_within"] == all(part["is_within"] for part in found["parts"])


def test_steady_iterations_of_each_part_end_in_one_json_line(engine, capsys):
    found = run(engine, Options((0.25, 0.75), 32, effort=QUICK))
    captured = capsys.readouterr()
    check_shape(found, captured.out)
    quarter, most = found["parts"]
    # What is chosen is one of the plans, with its figures.
    assert quarter["choice"]["tokens_per_s"] == quarter["fixed"][1]["tokens_per_s"]
    assert (quarter["overlapped"], quarter["unmeasured"]) == (1, 0)
    assert most["choice"]["tokens_per_s"] == most["fixed"][0]["tokens_per_s"]
    assert (most["overlapped"], most["unmeasured"]) == (0, 1)
    assert "part 75%: 256 rows, 192 of them decodes" in captured.err


def test_a_trace_is_served_by_all_plans_in_one_engine(engine, capsys):
    opened = []

    def open_executor(config, progress=None):
        opened.append(CudaExecutor(config))
        return opened[-1]

    found = run(engine, Options((0.25, 0.75), 32, served=True, effort=QUICK), open_executor)
    assert len(opened) == 1
    check_shape(found, capsys.readouterr().out)
    quarter, most = found["parts"]
    assert quarter["overlapped"] > 0
    assert (most["overlapped"], most["unmeasured"]) == (0, 1)
    assert all(
        part["decode_share"] == pytest.approx(share, abs=0.1) for part, share in zip(found["parts"], (0.25, 0.75))
    )


def test_what_cannot_be_compared_is_refused(engine):
    with pytest.raises(ConfigError, match="tune"):
        run(replace(engine, schedules=None), Options())
    with pytest.raises(ConfigError, match="at least one share"):
        run(engine, Options((0.5, 0.501)))
    with pytest.raises(ConfigError, match=r"shares=1\.0"):
        run(engine, Options((0.5, 1.0)))
    with pytest.raises(ConfigError, match="raise --max-num-seqs"):
        run(replace(engine, max_num_seqs=64), Options((0.5,), 32))
    with pytest.raises(ConfigError, match="lower --request-tokens"):
        run(engine, Options((0.5,), 120, served=True), lambda config, progress: CudaExecutor(config))
    with pytest.raises(ConfigError, match="full batches of 128 rows"):
        run(replace(engine, max_num_batched_tokens=128), Options((0.5,), 32))
