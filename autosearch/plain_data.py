"""Frozen dataclasses from what JSON or YAML files hold: every field is there, known, of its type, and finite.

Knows nothing of what the fields mean: impossible values are the dataclass's own affair.
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Hashable, Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")


class PlainDataError(ValueError):
    """What a file holds is not what it should be; the message names the field."""


def read_text(path: Path) -> str:
    """A UTF-8 file. Raises OSError where it cannot be read, PlainDataError where it holds something else."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise PlainDataError("it is not UTF-8 text") from None


def parse_json(text: str) -> Any:
    """Strict JSON: no NaN, no Infinity. Raises PlainDataError."""

    def refuse(name: str) -> Any:
        raise PlainDataError(f"{name} is no number of JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise PlainDataError("it is nested too deeply") from None
    except ValueError as error:  # JSONDecodeError, and whole numbers of thousands of digits
        raise PlainDataError(f"it is not JSON: {error}") from None


def build(kind: type[T], value: Any, where: str = "it") -> T:
    """A dataclass from a mapping of its fields. Raises PlainDataError, and what the dataclass itself raises."""
    if not isinstance(value, dict):
        raise PlainDataError(f"{where} must be an object, not {_shown(value)}")
    known: dict[str, dataclasses.Field[Any]] = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name in value:
        if name not in known:
            raise PlainDataError(f"{where} has an unknown field {name!r}")
    for name, field in known.items():
        if name not in value and field.default is field.default_factory is dataclasses.MISSING:
            raise PlainDataError(f"{where} lacks the field {name!r}")
    prefix = "" if where == "it" else f"{where}."
    hints = _hints(cast(Hashable, kind))
    return kind(**{name: _of(hints[name], given, f"{prefix}{name}") for name, given in value.items()})


@cache
def _hints(kind: Hashable) -> dict[str, Any]:
    return get_type_hints(kind)


def _of(hint: Any, value: Any, where: str) -> Any:
    """The value as an annotation wants it."""
    if get_origin(hint) in (Union, types.UnionType):
        (inner,) = (each for each in get_args(hint) if each is not types.NoneType)
        return None if value is None else _of(inner, value, where)
    if get_origin(hint) is tuple:
        return _items(get_args(hint), value, where)
    if get_origin(hint) is Mapping:
        if not isinstance(value, dict):
            raise PlainDataError(f"{where} must be an object, not {_shown(value)}")
        return {str(key): _of(get_args(hint)[1], given, f"{where}.{key}") for key, given in value.items()}
    if dataclasses.is_dataclass(hint):
        return build(hint, value, where)  # type: ignore[arg-type]
    return value if hint is Any else _scalar(hint, value, where)


def _items(hints: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise PlainDataError(f"{where} must be a list, not {_shown(value)}")
    if hints[-1] is Ellipsis:
        hints = (hints[0],) * len(value)
    if len(value) != len(hints):
        raise PlainDataError(f"{where} must have {len(hints)} items, not {len(value)}")
    return tuple(_of(hint, given, f"{where}[{index}]") for index, (hint, given) in enumerate(zip(hints, value)))


def _scalar(hint: type, value: Any, where: str) -> Any:
    if issubclass(hint, Enum):
        try:
            return hint(value)
        except ValueError:
            known = ", ".join(each.value for each in hint)
            raise PlainDataError(f"{where} is none of {known}: {_shown(value)}") from None
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not -1e300 < value < 1e300:  # also false for NaN
            raise PlainDataError(f"{where} must be a finite number, not {_shown(value)}")
        return value
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise PlainDataError(f"{where} must be {_NAMES[hint]}, not {_shown(value)}")
    return value


_NAMES: Mapping[type, str] = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}…"
