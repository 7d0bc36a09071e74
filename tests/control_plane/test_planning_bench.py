"""The planning benchmark runs, says its setting and ends in one JSON line."""

import json

import pytest

from control_plane.bench.planning import run
from control_plane.options import ConfigError


@pytest.mark.parametrize("kv_share", [1.0, 0.6])
def test_it_ends_in_a_json_line_with_its_setting(kv_share: float, capsys: pytest.CaptureFixture[str]) -> None:
    report = run(num_live=64, batch_tokens=128, input_len=64, output_len=64, num_steps=200, kv_share=kv_share)
    first, *_, last = capsys.readouterr().out.splitlines()
    assert "64 live decodes, B_dense 128" in first
    assert json.loads(last) == report
    assert report["benchmark"] == "planning"
    decodes = report["mean_decodes"]
    assert isinstance(decodes, float)
    assert decodes > (56 if kv_share == 1.0 else 30)
    parts = [report["plan_ms_mean"], report["finish_ms_mean"]]
    assert report["total_ms_mean"] == pytest.approx(sum(parts), abs=0.002)


def test_planning_a_thousand_decodes_costs_little() -> None:
    """The limit is 1.5 ms; five times that, for a busy machine in CI."""
    report = run(num_live=1024, batch_tokens=2048, input_len=128, output_len=128, num_steps=100)
    cpu_ms = report["cpu_ms_mean"]
    assert isinstance(cpu_ms, float)
    assert cpu_ms < 5 * 1.5


def test_a_batch_too_small_for_its_decodes_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 8192"):
        run(num_live=4096, batch_tokens=4096)
