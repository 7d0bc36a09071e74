"""The breakdown of a run, on a card that takes as long as the test says."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from autosearch.catalog import find_model
from control_plane.bench import waterfall
from control_plane.bench.record import Record
from control_plane.bench.waterfall import PARTS, Reading, Snapshots
from scheduler.plan import StepStats

FIGURES = {
    "tokens_per_s": 1250.0,
    "steady_tokens_per_s": 1600.0,
    "total_s": 1.0,
    "idle_share": 0.01,
    "busy_share": 0.99,
    "steady_batch_tokens": 36.4,
    "steady_decodes": 20.6,
    "mean_batch_tokens": 30.0,
}


def stats(step: int, tokens: int, decodes: int) -> StepStats:
    return StepStats(step, tokens, 64, 64, decodes, tokens - decodes, 0, 0, 0, 0, False, 1e-3, 1e-4, 0.02)


def break_down(monkeypatch, steps: list[StepStats], **changes):
    monkeypatch.setattr(waterfall, "NvmlCard", lambda: None)
    one = {"whole": 15.0, "gemms": 4.0}

    def sustained(executor, card, snapshot, parts, rows=None, seconds=1.0):
        return Reading(one["whole"] if parts == PARTS else one["gemms"] if parts == waterfall.GEMMS else 1.0, 0.5)

    monkeypatch.setattr(waterfall, "_sustained", sustained)
    snapshots = Snapshots(SimpleNamespace(snapshot=lambda step: step, spec=find_model("llama-3-8b").spec))
    record = Record(1)
    for each in steps:
        snapshots.on_step(each)
        record.steps.append((float(each.step), each))
    return waterfall.waterfall(snapshots, record, FIGURES | changes, 6e14, 100), snapshots.latest


@pytest.mark.parametrize(
    ("steps", "kept"),
    [
        ([stats(0, 64, 0), stats(50, 64, 20), stats(100, 64, 64), stats(150, 64, 10)], 50),  # full, beside a prefill
        ([stats(0, 64, 0), stats(50, 8, 8), stats(100, 3, 3)], 50),  # few requests: decodes alone
        ([stats(0, 64, 0), stats(50, 64, 0), stats(100, 30, 0)], 50),  # one output token each: nothing decodes
    ],
)
def test_every_workload_has_a_breakdown(monkeypatch, steps, kept):
    result, latest = break_down(monkeypatch, steps)
    assert latest == kept
    assert result["breakdown"]["whole iteration"]["ms"] == 15.0


def test_the_waterfall_comes_to_the_iteration_of_the_run_idle_time_included_and_ends_at_the_run(monkeypatch, capsys):
    result, _ = break_down(monkeypatch, [stats(0, 64, 20)])
    *iteration, steady, whole = result["waterfall"]
    assert sum(ms for _, ms, _ in iteration) == pytest.approx(20.0 / 0.99, abs=0.01)
    # What average iterations owe is time too, for as many tokens as the full one has: 64 of them at 1,600 a second.
    added_ms = pytest.approx(40 - 20.202, abs=0.01)
    assert steady == ("steady middle: 36 rows on average, 21 of them decodes", added_ms, 1600)
    assert whole == ("fill and drain (whole run): 30 rows on average", pytest.approx(51.2 - 40), 1250)
    shown = capsys.readouterr().err
    assert "from the bound to what was reached, always for 64 tokens:" in shown
    assert re.search(r"21 of them decodes +19\.798 ms +1600 tokens/s", shown)


def test_every_step_of_the_waterfall_adds_up_to_its_rate(monkeypatch):
    # A whole run faster than its middle: fill and drain owe less than nothing.
    for rate in (1250.0, 1700.0):
        total = 0.0
        for _, ms, reached in break_down(monkeypatch, [stats(0, 64, 20)], tokens_per_s=rate)[0]["waterfall"]:
            total += ms
            assert reached == pytest.approx(64 / total * 1e3, rel=1e-3)
        assert reached == rate


def test_steps_that_only_moved_pages_have_no_gemms(monkeypatch):
    alone, _ = break_down(monkeypatch, [stats(0, 64, 20)])
    beside_moves, _ = break_down(monkeypatch, [stats(0, 64, 20), stats(1, 0, 0), stats(2, 0, 0)])
    assert beside_moves["gemm_bound_tokens_per_s"] == alone["gemm_bound_tokens_per_s"]


def test_a_run_too_short_for_a_steady_middle_is_shown_without_it(monkeypatch):
    result, _ = break_down(monkeypatch, [stats(0, 64, 20)], steady_tokens_per_s=None)
    assert "steady" not in str(result["waterfall"])
    assert sum(ms for _, ms, _ in result["waterfall"]) == pytest.approx(64 / 1.25, abs=0.01)
    assert break_down(monkeypatch, [])[0] == {"breakdown": None}
