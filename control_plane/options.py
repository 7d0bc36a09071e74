"""Declaring an option once, and reading it from flags, the environment, a YAML file or its default.

An option is a field of a frozen dataclass (a group), made with `option()`. Its flag (`--max-model-len`), its
variable (`NANOFLOW_MAX_MODEL_LEN`) and its key in the file (`max-model-len` or `max_model_len`) all follow from
the field's name. Precedence: flag > variable > file > default. Knows nothing of the options that there are
(`config`), nor of the command line's library (`flags`).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_type_hints

import yaml

PREFIX = "NANOFLOW_"
CONFIG_ENV = PREFIX + "CONFIG"  # names the file, as --config does
_TEST_DATA_ENV = PREFIX + "SHARED"  # names what the tests read
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")

Group = TypeVar("Group")


class ConfigError(ValueError):
    """A setting that cannot be used. The message names its source and value, and says what would do."""


@dataclass(frozen=True, slots=True)
class Option:
    """One thing that a user can set."""

    name: str  # the field's name, for example max_model_len
    kind: type  # int, float, bool, str or Path
    optional: bool  # whether None is a value (then it is the default)
    default: Any  # dataclasses.MISSING when it must be given
    help: str  # one sentence for --help and the documentation
    low: float | None  # smallest number allowed
    high: float | None  # largest number allowed
    choices: tuple[str, ...]  # the only texts allowed; empty: any
    secret: bool  # never shown
    positional: bool  # an argument rather than a --flag
    unset: str  # what None stands for, for example "from the model"

    @property
    def flag(self) -> str:
        """As written on the command line."""
        return self.name.upper() if self.positional else "--" + self.key

    @property
    def env(self) -> str:
        """The environment variable."""
        return PREFIX + self.name.upper()

    @property
    def key(self) -> str:
        """The key in the configuration file; underscores do as well."""
        return self.name.replace("_", "-")

    @property
    def required(self) -> bool:
        """Whether it has no default."""
        return self.default is MISSING

    @property
    def description(self) -> str:
        """The help with choices and default, for --help and the documentation."""
        choices = f" One of {', '.join(self.choices)}." if self.choices else ""
        return self.help + choices + ("" if self.required else f" Default: {self.show(self.default)}.")

    def show(self, value: object) -> str:
        """The value as a user reads it, secrets masked."""
        if value is None:
            return self.unset or "none"
        if self.secret:
            return "****"
        if self.kind is bool:
            return str(value).lower()
        return f"{value:g}" if self.kind is float else str(value)


def option(
    help: str,  # noqa: A002 - the word that every command line library uses
    *,
    default: Any = MISSING,
    low: float | None = None,
    high: float | None = None,
    choices: Iterable[str] = (),
    secret: bool = False,
    positional: bool = False,
    unset: str = "",
) -> Any:
    """A dataclass field that users can set; the arguments are those of `Option`."""
    facts = {"help": help, "low": low, "high": high, "choices": tuple(choices)}
    facts |= {"secret": secret, "positional": positional, "unset": unset}
    return field(default=default, repr=not secret, metadata={"option": facts})


def default_of(config: type, name: str) -> Any:
    """The default of a field in another package's config dataclass, so that it is written down once."""
    found = next(f for f in fields(config) if f.name == name)
    assert found.default is not MISSING, f"{config.__name__}.{name} has no default"
    return found.default


def title_of(group: type) -> str:
    """The first sentence of a group's docstring, as a heading."""
    return (group.__doc__ or group.__name__).splitlines()[0].split(". ")[0].rstrip(".")


def options_of(*groups: type) -> tuple[Option, ...]:
    """All options of the groups in their order."""
    found = []
    for group in groups:
        hints = get_type_hints(group)
        for each in fields(group):
            if "option" in each.metadata:
                kind, optional = _kind(hints[each.name])
                found.append(Option(each.name, kind, optional, each.default, **each.metadata["option"]))
    names = [each.name for each in found]
    assert len(set(names)) == len(names), f"an option is declared twice in {names}"
    return tuple(found)


def _kind(hint: Any) -> tuple[type, bool]:
    if isinstance(hint, UnionType):
        (kind,) = (each for each in get_args(hint) if each is not type(None))
        return kind, True
    return hint, False


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and where it came from."""

    option: Option
    value: Any
    source: str  # "--port", "NANOFLOW_PORT", "port in nanoflow.yaml", or "default"

    def __str__(self) -> str:
        return f"{self.option.key} = {self.option.show(self.value)} ({self.source})"


@dataclass(frozen=True, slots=True)
class Settings:
    """Every option of a command with its final value."""

    by_name: Mapping[str, Setting]

    def group(self, group: type[Group]) -> Group:
        """The dataclass filled in. Raises ConfigError where its options contradict each other."""
        return group(**{each.name: self.by_name[each.name].value for each in options_of(group)})

    def changed(self) -> list[Setting]:
        """Those that are not at their default, to be printed at the start; secrets are masked by str()."""
        return [each for each in self.by_name.values() if each.source != "default"]


def load(
    groups: Sequence[type],
    *,
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    config_file: str | Path | None = None,
    known: Sequence[type] = (),
) -> Settings:
    """Read the options of the groups from all four sources.

    `flags` maps field names to what was given on the command line: text, or already a bool; None is not given.
    `config_file` defaults to the variable NANOFLOW_CONFIG. A file may be shared by several commands: keys of the
    groups in `known` are accepted, and ignored where this command does not take them. An empty variable counts as
    not set. Raises ConfigError.
    """
    path, source = config_file, "--config"
    if path is None and environ.get(CONFIG_ENV):
        path, source = environ[CONFIG_ENV], CONFIG_ENV
    from_file = _read_file(Path(path), source, options_of(*known) or options_of(*groups)) if path is not None else {}
    found = {each.name: _find(each, flags, environ, from_file, path) for each in options_of(*groups)}
    return Settings(found)


def unknown_variables(environ: Mapping[str, str], known: Sequence[type]) -> list[str]:
    """Warnings for NANOFLOW_* variables that look like a misspelt option."""
    names = [each.env for each in options_of(*known)] + [CONFIG_ENV]
    found = []
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in [*names, _TEST_DATA_ENV]:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.85)
            found += [f"{name} is not an option and has no effect: did you mean {near[0]}?"] if near else []
    return found


def _find(
    option: Option,
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    from_file: Mapping[str, object],
    path: object,
) -> Setting:
    given = flags.get(option.name)
    if given is not None:
        return Setting(option, _check(option, option.flag, given, text=True), option.flag)
    if environ.get(option.env):
        return Setting(option, _check(option, option.env, environ[option.env], text=True), option.env)
    if option.name in from_file:
        source = f"{option.key} in {path}"
        return Setting(option, _check(option, source, from_file[option.name], text=False), source)
    if option.required:
        raise ConfigError(
            f"{option.flag} is missing: give it on the command line, as {option.env}, "
            f"or as `{option.key}` in the --config file"
        )
    return Setting(option, option.default, "default")


def _read_file(path: Path, source: str, known: Sequence[Option]) -> dict[str, object]:
    """The file's values by field name. Raises ConfigError for an unreadable file, an unknown or a repeated key."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{source}={path}: cannot be read: {reason}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}={path}: not valid YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{source}={path}: must be a mapping, one `option: value` a line")
    names = {each.name for each in known}
    found: dict[str, object] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in names:
            near = difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.0)
            raise ConfigError(f"{key} in {path}: no such option: did you mean {near[0].replace('_', '-')}?")
        if name in found:
            raise ConfigError(f"{key} in {path}: given twice")
        found[name] = value
    return found


def _check(option: Option, source: str, given: object, *, text: bool) -> Any:
    """The given thing as the option's kind and within its bounds; text=False demands YAML's own type."""
    where = f"{source}={'****' if option.secret else given}"
    if given is None:
        if option.optional:
            return None
        raise ConfigError(f"{source} has no value: leave it out or give one")
    try:
        value = _parse(option.kind, str(given)) if text else _convert(option.kind, given)
    except ValueError:
        raise ConfigError(f"{where}: must be {_EXPECTED[option.kind]}") from None
    if option.choices and value not in option.choices:
        raise ConfigError(f"{where}: must be one of {', '.join(option.choices)}")
    if option.low is not None and value < option.low:
        raise ConfigError(f"{where}: must be at least {_number(option.low)}")
    if option.high is not None and value > option.high:
        raise ConfigError(f"{where}: must be at most {_number(option.high)}")
    return value


def _number(value: float) -> str:
    """In full where it is whole: bytes are compared digit by digit."""
    return str(value) if isinstance(value, int) else f"{value:g}"


_EXPECTED = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text (quote it in the file), not empty",
    Path: "a path (quote it in the file), not empty",
}


def _parse(kind: type, text: str) -> Any:
    """Text from a flag or a variable. Raises ValueError."""
    text = text.strip()
    if kind is bool:
        if text.lower() not in _TRUE + _FALSE:
            raise ValueError
        return text.lower() in _TRUE
    return _convert(kind, text if kind in (str, Path) else kind(text))


def _convert(kind: type, value: object) -> Any:
    """A value of a YAML type as the option's kind, without guessing. Raises ValueError."""
    if kind is Path and isinstance(value, str) and value:
        return Path(value).expanduser()
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind or value == "" or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError
    return value
