"""Options from four sources: precedence, parsing, and errors that name where a value came from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from control_plane.options import ConfigError, Settings, load, option, options_of, unknown_variables


@dataclass(frozen=True)
class Engine:
    """Engine: what runs."""

    batch_tokens: int = option("Tokens.", default=1, low=1, high=1000)
    share: float = option("Share.", default=0.5)
    cache: bool = option("Cache.", default=True)
    kind: str = option("Kind.", default="auto", choices=("auto", "fast"))
    max_len: int | None = option("Length.", default=None, unset="from the model")
    folder: Path | None = option("Folder.", default=None)
    key: str | None = option("Key.", default=None, secret=True)


@dataclass(frozen=True)
class Server:
    """Server: who calls."""

    port: int = option("Port.", default=2)


@dataclass(frozen=True)
class Needy:
    """Needy: an option without default."""

    model: Path = option("Model.", positional=True)


def read(tmp_path: Path, text: str = "", groups=(Engine,), known=(), flags=None, environ=None) -> Settings:
    config = tmp_path / "c.yaml"
    config.write_text(text)
    return load(groups, flags=flags or {}, environ=environ or {}, config_file=config, known=known)


VALUES = {
    "batch_tokens": st.integers(1, 1000),
    "share": st.floats(-1e6, 1e6),
    "cache": st.booleans(),
    "kind": st.sampled_from(["auto", "fast"]),
    "max_len": st.integers(),
    "key": st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), min_size=1),
}
SOME = st.fixed_dictionaries({}, optional=VALUES)


@given(flags=SOME, environ=SOME, in_file=SOME, dashes=st.booleans())
def test_the_strongest_source_that_speaks_wins(tmp_path_factory, flags, environ, in_file, dashes):
    config = tmp_path_factory.mktemp("config") / "c.yaml"
    config.write_text(yaml.safe_dump({k.replace("_", "-") if dashes else k: v for k, v in in_file.items()}))
    got = load(
        (Engine,),
        flags={name: value if isinstance(value, bool) else str(value) for name, value in flags.items()},
        environ={f"NANOFLOW_{name.upper()}": str(value) for name, value in environ.items()},
        config_file=config,
    )
    engine = got.group(Engine)
    for each in options_of(Engine):
        wanted, source = each.default, "default"
        for values, name in ((in_file, f"{each.key} in {config}"), (environ, each.env), (flags, each.flag)):
            if each.name in values:
                wanted, source = values[each.name], name
        assert getattr(engine, each.name) == wanted
        assert got.by_name[each.name].source == source
    assert {each.option.name for each in got.changed()} == flags.keys() | environ.keys() | in_file.keys()


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("BATCH_TOKENS", "abc", "NANOFLOW_BATCH_TOKENS=abc: must be a whole number"),
        ("BATCH_TOKENS", "1.0", "must be a whole number"),
        ("BATCH_TOKENS", "0", "NANOFLOW_BATCH_TOKENS=0: must be at least 1"),
        ("BATCH_TOKENS", "1001", "must be at most 1000"),
        ("SHARE", "nan", "must be a number"),
        ("SHARE", "inf", "must be a number"),
        ("CACHE", "maybe", "must be true or false"),
        ("KIND", "slow", "must be one of auto, fast"),
    ],
)
def test_a_bad_variable_is_named_with_its_value_and_what_would_do(tmp_path, variable, value, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, environ={f"NANOFLOW_{variable}": value})


def test_a_bad_flag_names_the_flag(tmp_path):
    with pytest.raises(ConfigError, match=r"^--batch-tokens=x: must be a whole number$"):
        read(tmp_path, flags={"batch_tokens": "x"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch-tokens: '7'", "batch-tokens in .*c.yaml=7: must be a whole number"),
        ("batch-tokens: true", "must be a whole number"),
        ("batch-tokens: 7.0", "must be a whole number"),
        ("batch-tokens:", "batch-tokens in .* has no value"),
        ("cache: 1", "must be true or false"),
        ("kind: 7", "must be text"),
        ("share: .nan", "must be a number"),
        ("share: [1]", "must be a number"),
        ("batch_token: 7", "batch_token in .*: no such option: did you mean batch-tokens?"),
        ("zzz: 7", "no such option: did you mean"),
        ("batch_tokens: 7\nbatch-tokens: 8", "given twice"),
        ("- batch-tokens", "must be a mapping"),
        ("{", "not valid YAML"),
    ],
)
def test_a_bad_file_is_refused_naming_the_key(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, text)


def test_a_secret_is_shown_nowhere(tmp_path):
    got = read(tmp_path, environ={"NANOFLOW_KEY": "hunter2"})
    assert got.group(Engine).key == "hunter2"
    assert "hunter2" not in f"{got.group(Engine)} {[str(each) for each in got.changed()]}"
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, "key: 12345")
    assert "12345" not in str(raised.value)


def test_yaml_numbers_and_nothing(tmp_path):
    engine = read(tmp_path, "share: 2\nmax_len:\nfolder: ~/m").group(Engine)
    assert (engine.share, engine.max_len, engine.folder) == (2.0, None, Path.home() / "m")
    assert read(tmp_path, "").group(Engine) == Engine()


def test_a_shared_file_may_hold_another_commands_options(tmp_path):
    text = "port: 5\nbatch-tokens: 7"
    with pytest.raises(ConfigError, match="port in"):
        read(tmp_path, text)
    got = read(tmp_path, text, known=(Engine, Server))
    assert got.group(Engine).batch_tokens == 7
    assert "port" not in got.by_name
    assert read(tmp_path, text, groups=(Engine, Server)).group(Server).port == 5


def test_the_file_can_be_named_by_a_variable_and_must_be_readable(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("batch-tokens: 9")
    assert load((Engine,), flags={}, environ={"NANOFLOW_CONFIG": str(config)}).group(Engine).batch_tokens == 9
    for flags, environ, name in (
        ("nowhere.yaml", {"NANOFLOW_CONFIG": str(config)}, "--config=nowhere.yaml"),
        (None, {"NANOFLOW_CONFIG": "nowhere.yaml"}, "NANOFLOW_CONFIG=nowhere.yaml"),
    ):
        with pytest.raises(ConfigError, match=f"{name}: cannot be read"):
            load((Engine,), flags={}, environ=environ, config_file=flags)


def test_an_empty_variable_is_not_set(tmp_path):
    got = read(tmp_path, "batch-tokens: 7", environ={"NANOFLOW_BATCH_TOKENS": ""})
    assert got.group(Engine).batch_tokens == 7


def test_a_required_option_that_is_missing_says_all_three_ways_to_give_it(tmp_path):
    with pytest.raises(ConfigError, match=r"MODEL is missing.*NANOFLOW_MODEL.*`model`"):
        read(tmp_path, groups=(Needy,))
    assert read(tmp_path, groups=(Needy,), flags={"model": "m"}).group(Needy).model == Path("m")


def test_a_misspelt_variable_is_pointed_out():
    assert unknown_variables({"NANOFLOW_PROT": "1", "NANOFLOW_PORT": "1", "PORT": "1"}, (Server,)) == [
        "NANOFLOW_PROT is not an option and has no effect: did you mean NANOFLOW_PORT?"
    ]
    assert unknown_variables({"NANOFLOW_SOMETHING_ELSE": "1"}, (Server,)) == []


def test_what_names_the_tests_data_is_no_misspelling():
    @dataclass(frozen=True, slots=True)
    class Near:
        shards: int = option("Shards.", default=1)

    assert unknown_variables({"NANOFLOW_SHARD": "1"}, (Near,))
    assert unknown_variables({"NANOFLOW_SHARED": "data"}, (Near,)) == []
