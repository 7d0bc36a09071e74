"""Profile tables: the files of the package, their schema, and what is read out of them."""

import json
from dataclasses import replace

import jsonschema
import pytest
from planning import A100_PROFILE, H200_PROFILE, made_up_profile

from autosearch.operators import Resource
from autosearch.profile_table import (
    PROFILE_FOLDER,
    IsolatedTime,
    ProfileError,
    ProfileTable,
    StaleProfileError,
    profile_names,
)
from autosearch.published_profiles import a100, h200

SCHEMA = json.loads((PROFILE_FOLDER / "schema.json").read_text(encoding="utf-8"))


MEASURED = "h200-llama-3-8b-measured"


def test_the_package_has_the_published_profiles_and_a_measured_one():
    assert set(profile_names()) == {A100_PROFILE, H200_PROFILE, MEASURED}


@pytest.mark.parametrize("table", [a100(), h200()], ids=lambda table: table.name)
def test_files_are_what_the_published_numbers_give(table):
    assert ProfileTable.from_file(table.name) == ProfileTable.from_json(table.to_json())


@pytest.mark.parametrize("name", [A100_PROFILE, H200_PROFILE, MEASURED])
def test_files_keep_the_schema(name):
    jsonschema.validate(json.loads((PROFILE_FOLDER / f"{name}.json").read_text(encoding="utf-8")), SCHEMA)


def test_a_profile_with_everything_keeps_the_schema_and_comes_back():
    table = made_up_profile({"qkv": 10.0}, 256)
    entry = IsolatedTime("qkv", 128, 3.0, 0.5, "128x128", 0.1)
    text = replace(table, isolated=(*table.isolated, entry)).to_json()
    jsonschema.validate(json.loads(text), SCHEMA)
    assert ProfileTable.from_json(text).to_json() == text


def test_a100_is_table_2():
    table = a100()
    layer_ms = sum(
        table.best(name, 2048).time_us for name in ("qkv", "o", "up_gate", "down", "o_all_reduce", "ffn_all_reduce")
    )
    layer_ms += sum(table.best(name, 2048).time_us for name in ("decode_attention", "prefill_attention"))
    assert layer_ms * 80 / 1e3 == pytest.approx(225.05)
    assert table.best("o_all_reduce", 2048).time_us == 2 * table.best("o_all_gather", 2048).time_us


def test_a100_gemms_pay_for_256_rows_more():
    table = a100()
    assert table.best("up_gate", 768).time_us / table.best("up_gate", 2048).time_us == pytest.approx(1024 / 2304)


def test_rates_are_the_authors_complete_table():
    rates = dict(a100().rates(Resource.MEMORY))
    assert (rates[0.2], rates[0.4], rates[0.8], rates[1.0]) == (0.40, 0.60, 0.90, 1.0)
    assert dict(a100().rates(Resource.NETWORK))[0.1] == 0.40
    assert all(share == rate for share, rate in a100().rates(Resource.COMPUTE))


def test_h200_rates_are_of_shares_of_132_sms():
    rates = h200().rates(Resource.MEMORY)
    assert rates[0] == (24 / 132, 0.28)
    assert dict(h200().rates(Resource.COMPUTE))[68 / 132] == 0.46


def test_between_sizes_times_go_straight_and_past_the_last_one_too():
    table = made_up_profile({"qkv": 20.0}, 256)
    assert table.best("qkv", 192).time_us == pytest.approx(15.0)
    assert table.best("qkv", 512).time_us == pytest.approx(40.0)


def test_pareto_keeps_what_nothing_beats():
    table = replace(
        made_up_profile({}, 128),
        isolated=(
            IsolatedTime("qkv", 128, 10.0, 1.0, "fast", 2.0),
            IsolatedTime("qkv", 128, 12.0, 0.5, "small", 2.0),
            IsolatedTime("qkv", 128, 11.0, 1.0, "frugal", 1.0),
            IsolatedTime("qkv", 128, 13.0, 1.0, "beaten", 2.5),
        ),
    )
    assert [entry.kernel for entry in table.pareto("qkv", 128)] == ["fast", "frugal", "small"]
    assert table.best("qkv", 128).kernel == "fast"


def test_unknown_joules_beat_nobody():
    times = (IsolatedTime("qkv", 128, 10.0, 1.0, "unknown"), IsolatedTime("qkv", 128, 10.0, 1.0, "known", 2.0))
    table = replace(made_up_profile({}, 128), isolated=times)
    assert [entry.kernel for entry in table.pareto("qkv", 128)] == ["known"]


def test_a_change_of_version_invalidates():
    table = h200()
    table.check_current("h200", {"torch": "2.11"})
    with pytest.raises(StaleProfileError, match=r"torch 2\.11, not 2\.12"):
        table.check_current("h200", {"torch": "2.12"})
    with pytest.raises(StaleProfileError, match="not of a100-80gb"):
        table.check_current("a100-80gb", {})
    newer = replace(table, measured_on=replace(table.measured_on, versions={"torch": "2.12"}))
    assert newer.fingerprint != table.fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"schema_version": 2},
        {"isolated": [{"operator": "qkv", "tokens": 0, "time_us": 1.0}]},
        {"isolated": [{"operator": "qkv", "tokens": 1, "time_us": 1.0, "sm_share": 1.5}]},
        {"concurrent": [{"resources": ["compute"], "sm_shares": [1.0], "rates": [1.0]}]},
        {"concurrent": [{"resources": ["compute", "x"], "sm_shares": [0.5, 0.5], "rates": [0.5, 0.5]}]},
        {"concurrent": [{"resources": ["compute", "memory"], "sm_shares": [0.5, 0.5], "rates": [0.5, 0]}]},
        {"concurrent": [{"resources": ["compute", "memory"], "sm_shares": [0.5, 0.5], "rates": [0.5, 1e-300]}]},
        {"triples": [{"sm_shares": [0.5, 0.3, 0.3], "rates": [0.5, 0.5, 0]}]},
        {"triples": [{"sm_shares": [0.5, 0.3], "rates": [0.5, 0.5]}]},
        {"isolated": [{"operator": "qkv", "tokens": 128, "time_us": 1e300}]},
        {"isolated": [{"operator": "qkv", "tokens": 128, "time_us": 1e-300}]},
        {"isolated": [{"operator": "qkv", "tokens": 128, "time_us": 0}]},
        {"isolated": [{"operator": "qkv", "tokens": 128.5, "time_us": 1.0}]},
        {"isolated": [{"operator": "qkv", "tokens": 128, "time_us": 1.0, "joules": -1.0}]},
        {"isolated": [{"operator": "qkv", "tokens": 128, "time_us": 1.0, "kernel": "cuda"}]},
        {"measured_on": {"gpu": "h200", "num_gpus": 0, "num_sms": 132}},
        {"measured_on": {"gpu": "h200", "num_gpus": 1, "num_sms": 132, "versions": ["torch"]}},
        {"spread": -0.1},
        {"spread": 1.0},
        {"spread": float("nan")},
        {"unknown": 1},
        {"workload": None},
    ],
)
def test_impossible_tables_are_refused(change):
    fields = json.loads(made_up_profile({"qkv": 1.0}, 128).to_json()) | change
    del fields["num_rows"]
    with pytest.raises(ProfileError):
        ProfileTable.from_json(json.dumps(fields))


@pytest.mark.parametrize("rows", ["isolated", "concurrent"])
@pytest.mark.parametrize("name", [A100_PROFILE, H200_PROFILE, MEASURED])
def test_a_profile_that_was_cut_is_refused_with_a_remedy(tmp_path, name, rows):
    fields = json.loads((PROFILE_FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    whole = fields["num_rows"]
    fields[rows] = fields[rows][: len(fields[rows]) // 3]
    (tmp_path / "cut.json").write_text(json.dumps(fields), encoding="utf-8")
    with pytest.raises(ProfileError, match=rf"cut\.json.*of {whole} rows .* are there: .*nanoflow profile"):
        ProfileTable.from_file(tmp_path / "cut.json")


def test_a_profile_from_before_rows_were_counted_is_read():
    fields = json.loads(h200().to_json())
    del fields["num_rows"]
    assert ProfileTable.from_json(json.dumps(fields)) == h200()


def test_an_unknown_kernel_is_refused_with_the_known_ones():
    table = made_up_profile({"decode_attention": 1.0}, 128)
    table = replace(table, isolated=(replace(table.isolated[0], kernel="cuda-wid"),))
    with pytest.raises(ProfileError, match=r"decode_attention of 128 tokens: kernel 'cuda-wid' .* 4x4, .*cuda-wide"):
        ProfileTable.from_json(table.to_json())


def test_missing_files_and_operators_are_refused_with_a_remedy():
    with pytest.raises(ProfileError, match=H200_PROFILE):
        ProfileTable.from_file("nowhere")
    with pytest.raises(ProfileError, match="no time for experts"):
        a100().best("experts", 128)
