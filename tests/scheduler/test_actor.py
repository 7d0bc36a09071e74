"""The ranks of an instance as the scheduler's actor drives them, with scripted handles."""

from __future__ import annotations

from types import SimpleNamespace

from scheduler.actor import RayExecutor


class Rank:
    """Notes calls in the order of sending, which is the order that an actor runs them in."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, object]] = []
        self.execute = self._method("execute")
        self.result = self._method("result")
        self.use_schedules = self._method("use_schedules")

    def _method(self, name):
        return SimpleNamespace(remote=lambda *args: self.sent.append((name, *args)))


def test_all_ranks_exchange_schedules_between_the_same_two_plans():
    ranks = [Rank(), Rank()]
    executor = RayExecutor(ranks, None)
    executor.submit("plan 0")
    executor.submit("plan 1")
    executor.use_schedules(7)
    executor.submit("plan 2")
    for rank in ranks:
        calls = [call for call in rank.sent if call[0] != "result"]
        assert calls == [("execute", "plan 0"), ("execute", "plan 1"), ("use_schedules", 7), ("execute", "plan 2")]
