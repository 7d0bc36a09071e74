"""From target to files: cache, reuse, warnings, grid."""

import json
from dataclasses import replace

import pytest
from planning import A100_PROFILE

from autosearch import planner
from autosearch.catalog import find_gpu, find_model
from autosearch.operator_times import Target
from autosearch.operators import Collectives
from autosearch.profile_table import ProfileTable
from autosearch.schedule_store import INDEX, ScheduleStore, StoreError
from autosearch.search import SearchError, SearchOptions
from autosearch.solvers import SolverOptions
from autosearch.workload import Workload, from_bucket

TABLE = ProfileTable.from_file(A100_PROFILE)
QUICK = SearchOptions(SolverOptions("glpk", 2.0), collectives=(Collectives.ALL_REDUCE,), growth_budget_s=0.1)
WORK = TABLE.workload.resized(256)


def target(model: str = "llama-3-8b", num_gpus: int = 1, work: Workload = WORK) -> Target:
    return Target(find_model(model), find_gpu("a100-80gb"), num_gpus, work)


@pytest.fixture
def store(tmp_path):
    return ScheduleStore(tmp_path / "schedules")


def test_a_plan_is_found_once_and_then_read(store):
    first = planner.plan(target(), TABLE, QUICK, store)
    again = planner.plan(target(), TABLE, QUICK, store)
    assert (first.report["cached"], again.report["cached"]) == (False, True)
    assert again.schedules == first.schedules
    assert {path.name for path in store.folder.iterdir()} == {INDEX, *first.report["files"]}
    assert first.schedules[-1].name.startswith("sequential") or first.schedules[0].name.startswith("sequential")


@pytest.mark.parametrize("change", ["versions", "options", "work", "gpu"])
def test_a_change_of_anything_searches_anew(store, change):
    planner.plan(target(), TABLE, QUICK, store)
    table, options, aim = TABLE, QUICK, target()
    if change == "versions":
        table = replace(TABLE, measured_on=replace(TABLE.measured_on, versions={"torch": "9"}))
    elif change == "options":
        options = replace(QUICK, num_candidates=1)
    elif change == "work":
        aim = target(work=replace(WORK, prefill_pairs=1.0))
    else:
        aim = replace(aim, gpu=replace(aim.gpu, memory_gb=81.0))
    assert planner.fingerprint(aim, table, options) != planner.fingerprint(target(), TABLE, QUICK)
    assert planner.plan(aim, table, options, store).report["cached"] is False


def test_a_file_that_was_changed_or_lost_is_searched_anew(store):
    first = planner.plan(target(), TABLE, QUICK, store)
    (store.folder / first.report["files"][0]).unlink()
    assert planner.plan(target(), TABLE, QUICK, store).report["cached"] is False
    path = store.folder / first.report["files"][0]
    path.write_text(path.read_text(encoding="utf-8").replace(first.report["fingerprint"], "other"), encoding="utf-8")
    assert planner.plan(target(), TABLE, QUICK, store).report["cached"] is False


def test_a_similar_models_plan_is_reused_only_when_asked_and_with_a_warning(store):
    planner.plan(target("llama-2-70b", 8), TABLE, QUICK, store)
    borrowed = planner.plan(target("llama-3-70b", 8), TABLE, QUICK, store, reuse_similar=True)
    assert borrowed.report["reused_from"] == "llama-2-70b"
    assert any("llama-2-70b is reused" in warning for warning in borrowed.warnings)
    assert borrowed.schedules[0].model == "llama-3-70b"
    own = planner.plan(target("llama-3-70b", 8), TABLE, QUICK, store)
    assert "reused_from" not in own.report


def test_an_unlike_models_plan_is_not_reused(store):
    planner.plan(target("llama-2-70b", 8), TABLE, QUICK, store)
    other = planner.plan(target("llama-3-8b", 1), TABLE, QUICK, store, reuse_similar=True)
    assert "reused_from" not in other.report


def test_the_same_blocks_in_other_proportions_are_unlike(store):
    """Deepseek has Llama's operators, but a smaller FFN."""
    planner.plan(target("llama-2-70b", 8), TABLE, QUICK, store)
    other = planner.plan(target("deepseek-67b", 8), TABLE, QUICK, store, reuse_similar=True)
    assert "reused_from" not in other.report


def test_a_broken_index_is_refused_with_a_remedy(store):
    store.folder.mkdir()
    (store.folder / INDEX).write_text("[", encoding="utf-8")
    with pytest.raises(StoreError, match="remove it"):
        planner.plan(target(), TABLE, QUICK, store)


def test_weights_that_do_not_fit_are_refused():
    with pytest.raises(SearchError, match="812 GB of weights"):
        planner.plan(target("llama-3-405b", 8), TABLE, QUICK)


def test_context_that_does_not_fit_is_a_warning():
    assert planner.check_memory(target("llama-3-8b", 1, from_bucket(512, 0.5, 512))) == []
    (warning,) = planner.check_memory(target("llama-3-8b", 1, TABLE.workload))
    assert "smaller batch" in warning


def test_the_default_grid_has_twelve_buckets():
    works = list(planner.buckets())
    assert len(works) == 12
    assert len({(work.batch_tokens, work.decode_share, work.mean_context) for work in works}) == 12


def test_a_sweep_point_says_which_plan_is_kept():
    point = planner.sweep_point(target(work=TABLE.workload.resized(256)), TABLE, QUICK)
    assert point.batch_tokens == 256
    assert not point.kept_pipeline
    assert 0.8 < point.pipeline / point.sequential <= 1 + TABLE.spread


def test_reports_are_json():
    report = planner.plan(target(), TABLE, QUICK).report
    assert json.loads(json.dumps(report)) == report
    for field in ("share_of_optimal", "num_nano_operations", "solver", "seconds", "solves", "spread"):
        assert field in report
