"""Telling silent from busy, with scripted answers."""

from __future__ import annotations

import asyncio
import time

import pytest

from control_plane import pulse
from control_plane.pulse import first_done, until_silent


@pytest.fixture(autouse=True)
def short_slices(monkeypatch):
    monkeypatch.setattr(pulse, "SLICE_S", 0.02)


async def test_whoever_answers_in_time_is_asked_again_and_silence_ends_it():
    num_asked = 0

    async def answer():
        nonlocal num_asked
        num_asked += 1
        await asyncio.sleep(0.05 if num_asked < 4 else 60)

    started = time.monotonic()
    async with asyncio.timeout(5):
        await until_silent(answer, period_s=0.01, silence_s=0.2)
    assert num_asked == 4
    assert 0.35 <= time.monotonic() - started < 2


async def test_an_answer_that_fails_is_raised():
    async def answer():
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        await until_silent(answer, 0.01, 0.2)


async def test_first_done_gives_what_is_done_or_nothing():
    quick, slow = (asyncio.ensure_future(asyncio.sleep(s)) for s in (0.03, 60))
    assert await first_done([slow, quick], 1) == {quick}
    assert await first_done([slow], 0.1) == set()
    slow.cancel()


async def test_a_pause_of_this_process_is_not_taken_for_anothers_silence():
    loop = asyncio.get_running_loop()
    answer = loop.create_future()
    waiting = asyncio.create_task(first_done([answer], 0.2))
    await asyncio.sleep(0.01)
    time.sleep(0.4)  # noqa: ASYNC251 - as if it were stopped: the answer comes in afterwards only
    loop.call_later(0.03, answer.set_result, None)
    assert await waiting == {answer}
