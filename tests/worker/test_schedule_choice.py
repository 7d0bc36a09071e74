"""Which of the measured schedules an iteration runs by."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from autosearch.catalog import find_model
from autosearch.decode_beside import decode_beside
from autosearch.operators import layer_operators
from autosearch.pipeline import Figures, sequential
from worker.schedule_choice import SEQUENTIAL, Choice, ScheduleChoice, may_be_chosen

OPERATORS = layer_operators(find_model("llama-3-8b").spec)
ROWS = 2048


def measured(name: str, share: float, context: float, gain: float, rows: int = ROWS):
    """A schedule that was `gain` times as fast as the sequential one on such a batch."""
    return replace(
        decode_beside(OPERATORS, rows, rows // 2, 0.5),
        name=name,
        decode_share=share,
        mean_context=context,
        prefill_pairs=1e6,
        measured=Figures(100.0, 1000.0 * gain, 1000.0),
    )


MEASURED = [
    measured("half", 0.5, 768, 1.04),
    measured("half, slower", 0.5, 768, 1.02),
    measured("many", 0.8, 768, 1.02),
    measured("few", 0.2, 768, 0.97),
    replace(measured("predicted", 0.3, 768, 9.0), measured=None, predicted=Figures(100.0, 9000.0, 1000.0)),
]


def choose(share: float, context: float, rows: int = ROWS) -> Choice:
    decodes = round(share * rows)
    return ScheduleChoice(MEASURED).choose(rows, decodes, round(decodes * context))


def test_the_fastest_that_was_measured_near_by_is_chosen():
    assert choose(0.5, 768) == Choice("half", True)
    assert choose(0.45, 1100) == Choice("half", True)
    assert choose(0.78, 700) == Choice("many", True)


def test_a_schedule_that_was_slower_than_the_sequential_one_is_never_served():
    assert choose(0.2, 768) == Choice(SEQUENTIAL, True)
    assert choose(0.3, 768) == Choice(SEQUENTIAL, True)  # predicted only


def test_batches_unlike_all_measured_ones_run_sequentially_and_are_told():
    assert choose(0.65, 768) == Choice(SEQUENTIAL, False)
    assert choose(0.5, 8000) == Choice(SEQUENTIAL, False)
    assert choose(0.5, 768, rows=1024) == Choice(SEQUENTIAL, False)
    assert ScheduleChoice([]).choose(ROWS, 1024, 10**6) == Choice(SEQUENTIAL, False)


def test_a_schedule_for_no_batch_in_particular_is_for_all_of_its_size():
    choice = ScheduleChoice([sequential(OPERATORS, 512), *MEASURED])
    assert choice.choose(512, 3, 100) == Choice("sequential-512", True)
    assert choice.choose(ROWS, 1024, 1024 * 768) == Choice("half", True)


def test_schedules_that_no_batch_may_run_by_are_known_beforehand():
    """They need no graphs."""
    assert [schedule.name for schedule in MEASURED if not may_be_chosen(schedule)] == ["few", "predicted"]
    assert may_be_chosen(sequential(OPERATORS, 512))


@given(decodes=st.integers(0, ROWS), context=st.floats(1, 1e5))
def test_nothing_slower_is_ever_chosen(decodes, context):
    name = ScheduleChoice(MEASURED).choose(ROWS, decodes, int(decodes * context)).name
    assert name in {SEQUENTIAL, "half", "many"}
