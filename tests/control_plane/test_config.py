"""The options that there are, and commands that take them as flags."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from control_plane.config import ALL_GROUPS, EngineConfig, LogConfig, ServerConfig
from control_plane.engine import scheduler_config, worker_config
from control_plane.flags import configured
from control_plane.options import ConfigError, options_of
from control_plane.validation import Limits


def make_app(seen: list[object]) -> typer.Typer:
    app = typer.Typer(rich_markup_mode=None)

    @app.command()
    @configured(ALL_GROUPS)
    def serve(engine: EngineConfig, server: ServerConfig, limits: Limits, log: LogConfig) -> None:
        seen.extend([engine, server, limits, log])

    @app.command()
    @configured(ALL_GROUPS)
    def generate(engine: EngineConfig, prompt: Annotated[str, typer.Option()] = "hello") -> None:
        if prompt == "refused":
            raise ConfigError("not this prompt")
        seen.extend([engine, prompt])

    return app


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for each in options_of(*ALL_GROUPS):
        monkeypatch.delenv(each.env, raising=False)
    monkeypatch.delenv("NANOFLOW_CONFIG", raising=False)


def run(*args: str) -> tuple[int, str, list[object]]:
    seen: list[object] = []
    result = CliRunner().invoke(make_app(seen), list(args))
    return result.exit_code, result.output, seen


def test_flags_fill_the_groups_that_a_command_takes(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("max-model-len: 64\nport: 7777\nmax_num_seqs: 5\nmax_num_queued_reqs: 3")
    flags = ("m", "--max-num-seqs", "9", "--no-enable-prefix-caching", "--config", str(config))
    code, output, (engine, server, limits, _log) = run("serve", *flags)
    assert code == 0, output
    assert isinstance(engine, EngineConfig)
    assert isinstance(server, ServerConfig)
    assert (engine.max_num_seqs, engine.max_model_len, engine.enable_prefix_caching) == (9, 64, False)
    assert server.port == 7777
    assert limits == Limits(max_num_queued_reqs=3)
    assert run("generate", *flags, "--prompt", "hi")[2] == [engine, "hi"]


def test_usage_errors_have_exit_code_2_and_name_the_source(monkeypatch):
    monkeypatch.setenv("NANOFLOW_PORT", "abc")
    code, output, seen = run("serve", "m")
    assert (code, seen) == (2, [])
    assert "NANOFLOW_PORT=abc: must be a whole number" in output
    assert run("generate", "m")[0] == 0  # takes no port
    for args in (("serve",), ("generate", "m", "--port", "1"), ("generate", "m", "--prompt", "refused")):
        assert run(*args)[0] == 2


def test_help_names_every_option_of_the_command_with_its_default():
    code, output, _ = run("serve", "--help")
    text = " ".join(output.split())
    assert code == 0
    for each in options_of(EngineConfig, ServerConfig, Limits, LogConfig):
        assert each.flag in text
        assert " ".join(each.description.split()) in text
    assert "--port" not in run("generate", "--help")[1]


def test_options_that_contradict_each_other_are_refused(tmp_path):
    for flags, message in (
        (("--ssl-keyfile", "k"), "ssl-keyfile and ssl-certfile"),
        (("--ssl-ca-certs", "c"), "ssl-ca-certs needs TLS"),
        (("--port", "9", "--metrics-port", "9"), "both 9"),
    ):
        code, output, _ = run("serve", "m", *flags)
        assert code == 2
        assert message in " ".join(output.split())


def test_groups_are_frozen_and_every_option_is_explained():
    with pytest.raises((FrozenInstanceError, TypeError)):
        LogConfig().log_level = "debug"  # type: ignore[misc]
    for each in options_of(*ALL_GROUPS):
        assert each.help.endswith("."), each.name
        assert each.required or each.default is None or isinstance(each.default, each.kind), each.name
        assert each.default is not None or each.unset, f"{each.name} must say what leaving it out means"


def test_expected_lengths_are_given_both_or_neither():
    with pytest.raises(ConfigError, match="expected-output-len belong together"):
        EngineConfig(Path("m"), expected_input_len=512)
    found = worker_config(EngineConfig(Path("m"), device="cpu", expected_input_len=512, expected_output_len=128))
    assert (found.expected_input_len, found.expected_output_len) == (512, 128)


def test_a_target_for_latency_reaches_the_scheduler_in_seconds():
    assert scheduler_config(EngineConfig(Path("m"))).target_itl_s is None
    assert scheduler_config(EngineConfig(Path("m"), target_itl_ms=25.0)).target_itl_s == pytest.approx(0.025)
