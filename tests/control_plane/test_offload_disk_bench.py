"""`bench offload disk` on little data: what is read is whole, and what reads it is said."""

from __future__ import annotations

import json
import shutil

import pytest

from control_plane.bench.offload_disk import DiskBench, run
from control_plane.bench.offload_options import DiskOptions
from control_plane.options import ConfigError
from kvstore.record import is_whole, slot_bytes_for


@pytest.mark.parametrize("with_fio", [True, False])
def test_a_run_ends_in_one_json_line_and_leaves_nothing(tmp_path, capsys, monkeypatch, with_fio):
    if not with_fio:
        monkeypatch.setenv("PATH", "")
    elif shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    result = run(DiskOptions(tmp_path / "disk", record_bytes=50_000, total_bytes=3_000_000, repeats=2))
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
    ways = [row["way"] for row in result["rows"]]
    of_store, of_fio = ["store", "store, in order", "stand-in"], ["fio", "fio, in order"]
    assert ways == of_store + of_fio * with_fio
    assert result["reference"] == ("fio" if with_fio else "stand-in")
    shares = {row["way"]: row["share"] for row in result["rows"]}
    assert all(shares[way] == 1.0 for way in (of_fio if with_fio else ["stand-in"]))
    assert all(0 < row["min_mb_s"] <= row["median_mb_s"] <= row["max_mb_s"] for row in result["rows"])
    assert not list((tmp_path / "disk").iterdir())


def test_every_record_lies_whole_where_all_ways_look_for_it(tmp_path):
    bench = DiskBench(DiskOptions(tmp_path, 50_000, 2_000_000), tmp_path / "store")
    slot_bytes = slot_bytes_for(50_000)
    found = set()
    for path in (tmp_path / "store").glob("segment-*.kv"):
        data = path.read_bytes()
        for start in range(0, len(data), slot_bytes):
            key = next(
                key for key in bench._keys if is_whole(memoryview(data)[start : start + slot_bytes], key, 50_000)
            )
            found.add(key)
    assert found == set(bench._keys)
    assert bench.num_bytes == len(found) * slot_bytes
    bench.forget()
    assert bench.store() > 0
    assert bench.store(in_order=True) > 0
    assert bench.stand_in() > 0


def test_what_cannot_be_measured_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="ssd-dir"):
        run(DiskOptions(tmp_path / "file" / "folder"))
    with pytest.raises(ConfigError, match="record-bytes"):
        run(DiskOptions(tmp_path, record_bytes=10))
