"""Traces of a layer: use of the card from made-up times, and the picture of it."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosearch.layer_trace import (
    LayerTrace,
    Peaks,
    TracedOperation,
    TraceError,
    measured_utilisation,
    work_spans,
)
from autosearch.operator_costs import Cost
from autosearch.operators import Resource
from autosearch.plot import PlotError
from autosearch.plot_trace import mean_use, save_traces

PNG = b"\x89PNG\r\n\x1a\n"
PEAKS = Peaks(1e15, 5e12, 1e12)  # 1 GFLOP, 5 MB and 1 MB a microsecond


def operation(name, begin_us, end_us, cost, lane=0, share=1.0, **more):
    return TracedOperation(name, 0, 128, lane, share, more.pop("layer", 0), begin_us, end_us, cost, **more)


def trace(*operations, begin_us=0.0, end_us=100.0):
    return LayerTrace("made-up", "tiny", "card", 128, begin_us, end_us, 3.2, 3.3, PEAKS, operations)


def means(of):
    return {Resource(name): value for name, value in mean_use(of).items()}


def test_use_is_work_over_time_against_the_peak():
    layer = trace(
        operation("qkv", 0, 50, Cost(25e9, 50e6)),  # half of the peak FLOP/s and a fifth of the memory's for 50 us
        operation("decode_attention", 50, 100, Cost(0, 200e6)),  # 4 of 5 MB/us
    )
    use = measured_utilisation(layer, 100)
    assert use[Resource.COMPUTE][:50] == pytest.approx([0.5] * 50)
    assert use[Resource.COMPUTE][50:] == [0.0] * 50
    assert use[Resource.MEMORY] == pytest.approx([0.2] * 50 + [0.8] * 50)
    assert set(use[Resource.NETWORK]) == {0.0}
    assert means(layer)[Resource.MEMORY] == pytest.approx(0.5)


def test_what_runs_at_once_adds_up_and_neighbouring_layers_count_where_they_reach_in():
    layer = trace(
        operation("up_gate", 0, 100, Cost(60e9), share=0.5),
        operation("decode_attention", 20, 80, Cost(0, 240e6), lane=1, share=0.5),
        operation("down", -30, 10, Cost(40e9), layer=-1),
        operation("qkv", 100, 120, Cost(20e9), layer=1),
    )
    use = measured_utilisation(layer, 10)
    assert use[Resource.COMPUTE] == pytest.approx([1.6] + [0.6] * 9)
    assert use[Resource.MEMORY] == pytest.approx([0, 0] + [0.8] * 6 + [0, 0])


def test_a_helper_counts_with_what_it_helps():
    work = Cost(0, 120e6)
    operations = (
        operation("decode_attention", 0, 50, work, lane=1, share=0.25),
        operation("decode_attention", 40, 60, work, share=0.75, helps=True),
        operation("o", 0, 40, Cost(1e9), share=0.75),
    )
    assert work_spans(operations) == [(work, 0, 60), (Cost(1e9), 0, 40)]
    use = measured_utilisation(trace(*operations), 10)[Resource.MEMORY]
    assert use == pytest.approx([0.4] * 6 + [0.0] * 4)


@given(
    st.lists(
        st.tuples(st.floats(0, 90), st.floats(0.5, 10), st.floats(0, 1e9), st.floats(0, 1e8)), min_size=1, max_size=8
    ),
    st.integers(1, 300),
)
def test_however_fine_the_bins_all_work_of_the_layer_is_in_them(parts, num_bins):
    layer = trace(
        *(
            replace(operation("o", begin, begin + length, Cost(flops, moved)), start=number)
            for number, (begin, length, flops, moved) in enumerate(parts)
        )
    )
    use = measured_utilisation(layer, num_bins)
    us = 100 / num_bins
    assert sum(use[Resource.COMPUTE]) * us * 1e9 == pytest.approx(sum(part[2] for part in parts), abs=1)
    assert sum(use[Resource.MEMORY]) * us * 5e6 == pytest.approx(sum(part[3] for part in parts), abs=1)


def test_unknown_peaks_give_no_use_instead_of_an_error():
    layer = replace(trace(operation("qkv", 0, 50, Cost(1e9, 1e6, 1e6))), peaks=Peaks(0, 0))
    assert set(means(layer).values()) == {0.0}


def test_a_trace_survives_its_file(tmp_path):
    layer = trace(operation("qkv", 0, 50, Cost(25e9, 50e6)), operation("o", 50, 100, Cost(1e9), helps=True))
    (tmp_path / "trace.json").write_text(layer.to_json())
    assert LayerTrace.from_file(tmp_path / "trace.json") == layer


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"name": 3}'])
def test_files_that_are_no_traces_are_named(tmp_path, text):
    (tmp_path / "no.json").write_text(text)
    with pytest.raises(TraceError, match=r"no\.json"):
        LayerTrace.from_file(tmp_path / "no.json")


def test_a_layer_that_takes_no_time_is_no_trace(tmp_path):
    (tmp_path / "no.json").write_text(trace(operation("o", 0, 1, Cost()), end_us=0.0).to_json())
    with pytest.raises(TraceError, match="takes no time"):
        LayerTrace.from_file(tmp_path / "no.json")
    with pytest.raises(TraceError, match="cannot be read"):
        LayerTrace.from_file(tmp_path / "absent.json")


def test_pictures_hold_several_traces(tmp_path):
    one = trace(operation("qkv", 0, 50, Cost(25e9, 50e6)), operation("o", 50, 100, Cost(1e9)))
    two = trace(
        operation("qkv", 0, 50, Cost(25e9, 50e6), share=0.5),
        operation("decode_attention", 0, 80, Cost(0, 90e6), lane=1, share=0.5),
    )
    save_traces([one], tmp_path / "one.png")
    save_traces([one, two], tmp_path / "two.png")
    sizes = [(tmp_path / name).stat().st_size for name in ("one.png", "two.png")]
    assert (tmp_path / "two.png").read_bytes().startswith(PNG)
    assert sizes[0] < sizes[1]
    with pytest.raises(PlotError):
        save_traces([one], tmp_path)
