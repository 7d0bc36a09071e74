"""Pictures: that they show what the timeline holds."""

from dataclasses import replace

import pytest
from planning import a100_times

from autosearch.interference import Pairwise
from autosearch.operators import Collectives, Resource
from autosearch.pipeline import nanobatch_only, sequential
from autosearch.planner import SweepPoint
from autosearch.plot import (
    PlotError,
    check_writable,
    crossover,
    save_gantt,
    save_sweep,
    steady_window,
    text_gantt,
    utilisation,
)
from autosearch.simulate import activities, simulate

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def played():
    times = a100_times(batch_tokens=512)
    plan = sequential(times.operators(Collectives.ALL_REDUCE), 512)
    return simulate(plan, times, Pairwise(times.table), 8), activities(plan, times)


def test_utilisation_is_each_resources_part_of_the_time(played):
    timeline, work = played
    use = utilisation(timeline, work, steady_window(timeline), 50)
    means = {resource: sum(values) / 50 for resource, values in use.items()}
    assert sum(means.values()) == pytest.approx(1.0)  # one after the other, each at full rate
    network = sum(a.time_us for a in work if a.resource is Resource.NETWORK) / sum(a.time_us for a in work)
    assert means[Resource.NETWORK] == pytest.approx(network, abs=0.02)


def test_utilisation_counts_slowed_operations_by_their_rate():
    times = a100_times(batch_tokens=512)
    plan = sequential(times.operators(Collectives.ALL_REDUCE), 512)
    half = replace(plan, operations=tuple(replace(operation, sm_share=0.5) for operation in plan.operations))
    timeline, work = simulate(half, times, Pairwise(times.table), 8), activities(half, times)
    use = utilisation(timeline, work, steady_window(timeline), 50)
    rates = {Resource.COMPUTE: 0.5, Resource.MEMORY: 0.7, Resource.NETWORK: 0.9}  # by the authors' table
    for resource, values in use.items():
        alone = sum(each.time_us for each in work if each.resource is resource)
        assert sum(values) / 50 == pytest.approx(alone / timeline.layer_us, abs=0.01)
        assert max(values) == pytest.approx(rates[resource])


def test_text_has_a_row_per_lane_and_resource_and_a_legend(played):
    text = text_gantt(*played, width=80)
    lines = text.splitlines()
    assert lines[0].startswith("compute lane ")
    assert len(lines[0]) == 13 + 80
    assert [line.split()[0] for line in lines[1:4]] == ["compute", "memory", "network"]
    for name in ("qkv", "decode_attention", "ffn_all_reduce"):
        assert name in text


def test_pngs_are_written(played, tmp_path):
    save_gantt(*played, tmp_path / "new" / "gantt.png", "title")
    assert (tmp_path / "new" / "gantt.png").read_bytes()[:8] == PNG
    points = [SweepPoint(128, 90, 100, False), SweepPoint(256, 120, 110, True)]
    save_sweep(points, tmp_path / "sweep.png", "title", 0.05)
    assert (tmp_path / "sweep.png").read_bytes()[:8] == PNG


def test_paths_that_cannot_be_written_are_refused(played, tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    for path in (tmp_path, tmp_path / "file" / "gantt.png"):
        with pytest.raises(PlotError, match="cannot be written"):
            save_gantt(*played, path, "title")
    check_writable(tmp_path / "new" / "sweep.png")
    assert not (tmp_path / "new" / "sweep.png").exists()


def test_more_lanes_are_all_drawn():
    times = a100_times(batch_tokens=256)
    plan = nanobatch_only(times.operators(Collectives.ALL_REDUCE), 256, 2)
    timeline = simulate(plan, times, Pairwise(times.table), 4)
    assert text_gantt(timeline, activities(plan, times)).count("|") > 10


@pytest.mark.parametrize(
    ("kept", "where"), [((False, False, True), 3), ((False, True, False), None), ((True, True, True), 1), ((), None)]
)
def test_crossover_is_from_where_on_pipelines_are_always_kept(kept, where):
    assert crossover([SweepPoint(size, 1, 1, each) for size, each in enumerate(kept, start=1)]) == where
