"""Writes docs/configuration.md from the options declared in control_plane/config.py.

Run it after changing an option: .venv/bin/python docs/make_configuration.py
"""

from __future__ import annotations

from pathlib import Path

from control_plane.config import ALL_GROUPS
from control_plane.options import Option, options_of, title_of

TARGET = Path(__file__).with_name("configuration.md")

INTRODUCTION = """\
# Configuration

<!-- Made by docs/make_configuration.py from control_plane/config.py; a test fails where they differ. -->

Every option can be given in three ways. The first that speaks wins, and what none names has its default:

1. as a flag: `nanoflow serve MODEL --max-num-seqs 32`
2. as an environment variable: `NANOFLOW_MAX_NUM_SEQS=32` (an empty one counts as not set)
3. in a YAML file named by `--config` or `NANOFLOW_CONFIG`: `max-num-seqs: 32` (or `max_num_seqs`)

Names are vLLM's where the meaning is the same. A value that cannot be used stops the start with exit code 2 and a
message that names its source: `NANOFLOW_PORT=abc: must be a whole number`. An unknown key in the file is an error
too, and names the nearest known one. One file may serve all commands: each takes the options that concern it.
What differs from the defaults is logged at the start, secrets masked. The file in
[deploy/nanoflow.yaml](../deploy/nanoflow.yaml) is an example.
"""


def render() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for group in ALL_GROUPS:
        rows = "\n".join(_row(each) for each in options_of(group))
        parts.append(f"## {title_of(group)}\n\n| flag | variable | default | meaning |\n|---|---|---|---|\n{rows}\n")
    return "\n".join(parts)


def _row(option: Option) -> str:
    flag = f"`{option.flag}`" + (f", `--no-{option.key}`" if option.kind is bool else "")
    default = "must be given" if option.required else option.show(option.default)
    choices = f" One of {', '.join(f'`{each}`' for each in option.choices)}." if option.choices else ""
    return f"| {flag} | `{option.env}` | {default} | {option.help}{choices}{_bounds(option)} |"


def _bounds(option: Option) -> str:
    words = [f"at least {option.low:g}"] if option.low is not None else []
    words += [f"at most {option.high:g}"] if option.high is not None and option.high < 2**50 else []
    return f" {' and '.join(words).capitalize()}." if words else ""


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
