"""What files hold becomes dataclasses only where every field is right."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosearch.pipeline import InvalidScheduleError, NanoOperation, PipelineSchedule
from autosearch.plain_data import PlainDataError, build, parse_json, read_text
from autosearch.profile_table import PROFILE_FOLDER, ProfileError, ProfileTable
from autosearch.schedule_store import INDEX, ScheduleStore, StoreError


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True)
class Part:
    size: int


@dataclass(frozen=True)
class Whole:
    name: str
    weight: float
    parts: tuple[Part, ...]
    pair: tuple[Colour, float] = (Colour.RED, 1.0)
    more: float | None = None
    notes: Mapping[str, str] = field(default_factory=dict)
    flag: bool = False


RIGHT = {"name": "x", "weight": 2, "parts": [{"size": 3}]}


def test_nested_dataclasses_tuples_enums_and_defaults():
    whole = build(Whole, RIGHT | {"pair": ["red", 0.5], "notes": {"a": "b"}})
    assert whole == Whole("x", 2, (Part(3),), (Colour.RED, 0.5), None, {"a": "b"})
    assert whole.pair[0] is Colour.RED


WRONG = {
    "no object": [1],
    "unknown": RIGHT | {"colour": 1},
    "lacks": {"name": "x", "weight": 1.0},
    "name must be a string": RIGHT | {"name": 3},
    "weight must be a number": RIGHT | {"weight": "3"},
    "weight must be a number, not True": RIGHT | {"weight": True},
    "finite": RIGHT | {"weight": float("nan")},
    "finite number, not inf": RIGHT | {"weight": float("inf")},
    "more must be": RIGHT | {"more": "x"},
    "parts must be a list": RIGHT | {"parts": 3},
    r"parts\[0\] must be an object": RIGHT | {"parts": [3]},
    r"parts\[1\]\.size must be a whole number": RIGHT | {"parts": [{"size": 1}, {"size": 1.5}]},
    "2 items": RIGHT | {"pair": ["red"]},
    "none of red": RIGHT | {"pair": ["blue", 1.0]},
    "none of red: ": RIGHT | {"pair": [["red"], 1.0]},
    r"notes\.a must be a string": RIGHT | {"notes": {"a": 1}},
    "notes must be an object": RIGHT | {"notes": [1]},
    "true or false": RIGHT | {"flag": 1},
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_fields_are_named(message):
    with pytest.raises(PlainDataError, match="object" if message == "no object" else message):
        build(Whole, WRONG[message])


@pytest.mark.parametrize("text", ["", "{", "NaN", '{"a": Infinity}', "[" * 100_000], ids=len)
def test_what_is_no_json_is_refused(text):
    with pytest.raises(PlainDataError):
        parse_json(text)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlainDataError, match="UTF-8"):
        read_text(path)
    with pytest.raises(ProfileError, match="UTF-8"):
        ProfileTable.from_file(path)
    with pytest.raises(InvalidScheduleError, match="UTF-8"):
        PipelineSchedule.from_file(path)
    (tmp_path / INDEX).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(StoreError, match="UTF-8"):
        ScheduleStore(tmp_path).plans()


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
PROFILE = json.loads((PROFILE_FOLDER / "h200-llama-3-8b.json").read_text(encoding="utf-8"))
SCHEDULE = json.loads(PipelineSchedule("plan", 128, (NanoOperation("qkv", 0, 128),)).to_json())


def places(value, path=()):
    """Where something may be put instead: every field and item, to the second of each list."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def put(value, path, new):
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = put(value[path[0]], path[1:], new)
    return copy


@given(st.sampled_from(list(places(PROFILE))), anything)
def test_a_profile_with_anything_in_it_is_refused_or_can_be_used(path, new):
    try:
        table = ProfileTable.from_json(json.dumps(put(PROFILE, path, new)))
        assert table.best("qkv", 700).time_us >= 0
    except ProfileError:
        return
    assert len(table.fingerprint) == 16


@given(st.sampled_from(list(places(SCHEDULE))), anything)
def test_a_schedule_with_anything_in_it_is_refused_or_comes_back(path, new):
    try:
        schedule = PipelineSchedule.from_json(json.dumps(put(SCHEDULE, path, new)))
    except InvalidScheduleError:
        return
    assert PipelineSchedule.from_json(schedule.to_json()) == schedule
