"""What a server's log says of a store that is of no use."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest

from control_plane.store_notice import StoreNotice
from scheduler.plan import LoadReport, MoveCounts, OutputBatch, StepStats

NO_TOKENS = np.zeros(0, np.int32)
STATS = StepStats(1, 0, 0, 0, 0, 0, 0, 0, 0, 0, False, 0.0, 0.0, 0.0)
OFF = replace(LoadReport(0, 0, 0, 0, 0, 0, 0), store_is_off=True)
ON = LoadReport(0, 0, 0, 0, 0, 0, 0)


@pytest.fixture
def notice(caplog):
    caplog.set_level(logging.INFO)
    return StoreNotice("instance-0")


def batch(load: LoadReport = ON, **moves: int) -> OutputBatch:
    return OutputBatch((), NO_TOKENS, NO_TOKENS, (), replace(STATS, moves=MoveCounts(**moves)), load)


def said(caplog) -> list[str]:
    return [record.levelname for record in caplog.records]


def test_that_it_is_not_asked_is_said_once_each_time(notice, caplog):
    for load in (ON, OFF, OFF, ON, ON, OFF):
        notice.note(batch(load))
    assert said(caplog) == ["WARNING", "INFO", "WARNING"]
    assert "--kv-store-token-file" in caplog.messages[0]


def test_a_rank_that_does_not_ask_is_told_until_pages_are_taken_again(notice, caplog):
    for moves in ({"num_rank_trips": 1}, {"num_rank_trips": 1}, {"num_stored": 3}, {"num_rank_trips": 2}):
        notice.note(batch(**moves))
    assert said(caplog) == ["WARNING", "WARNING"]
    assert "a rank of instance-0" in caplog.messages[0]


def test_a_store_that_takes_nothing_from_the_start_is_told_once(notice, caplog):
    for _ in range(20):
        notice.note(batch(num_store_failed=16))
    assert said(caplog) == ["WARNING"]
    assert "none of 64 pages" in caplog.messages[0]
    assert "--slab-bytes" in caplog.messages[0]


@pytest.mark.parametrize("moves", [{"num_stored": 1}, {"num_rank_trips": 1}])
def test_refusals_are_no_matter_of_size_where_pages_were_taken_or_nobody_asked(notice, caplog, moves):
    notice.note(batch(**moves))
    for _ in range(20):
        notice.note(batch(num_store_failed=16))
    assert not any("--slab-bytes" in message for message in caplog.messages)
