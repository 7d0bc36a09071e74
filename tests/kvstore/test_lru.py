"""The order against a plain list that does the same slowly."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.lru import Lru

KEYS = st.sampled_from([bytes([number]) for number in range(8)])


class AgainstAList(RuleBasedStateMachine):
    """`order` holds unpinned keys, oldest first; `pins` counts; `held` are passed over."""

    def __init__(self) -> None:
        super().__init__()
        self.lru = Lru()
        self.order: list[bytes] = []
        self.pins: dict[bytes, int] = {}
        self.held: set[bytes] = set()

    @rule(key=KEYS)
    def insert_or_touch(self, key):
        handle = self.lru.get(key)
        if handle is None:
            self.lru.insert(key)
            self.order.append(key)
            self.pins[key] = 0
            return
        self.lru.touch(handle)
        if not self.pins[key]:
            self.order.remove(key)
            self.order.append(key)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def pin(self, data):
        key = data.draw(st.sampled_from(sorted(self.pins)))
        self.lru.pin(self.lru.get(key))
        self.pins[key] += 1
        if self.pins[key] == 1:
            self.order.remove(key)

    @precondition(lambda self: any(self.pins.values()))
    @rule(data=st.data())
    def unpin(self, data):
        key = data.draw(st.sampled_from(sorted(key for key, pins in self.pins.items() if pins)))
        self.lru.unpin(self.lru.get(key))
        self.pins[key] -= 1
        if not self.pins[key]:
            self.order.append(key)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def hold_or_let_go(self, data):
        key = data.draw(st.sampled_from(sorted(self.pins)))
        handle = self.lru.get(key)
        if self.lru.hold(handle):
            assert key not in self.held
            self.held.add(key)
        else:
            self.lru.unhold(handle)
            self.held.remove(key)

    @rule()
    def remove_the_oldest(self):
        handle = next(self.lru.oldest_first(), None)
        expected = next((key for key in self.order if key not in self.held), None)
        assert (handle is None) == (expected is None)
        if handle is not None:
            assert self.lru.key_of(handle) == expected
            self.lru.remove(handle)
            self.order.remove(expected)
            del self.pins[expected]

    @invariant()
    def same_order(self):
        found = [self.lru.key_of(handle) for handle in self.lru.oldest_first()]
        assert found == [key for key in self.order if key not in self.held]
        assert len(self.lru) == len(self.pins)
        self.lru.check_integrity()


TestAgainstAList = AgainstAList.TestCase
TestAgainstAList.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_forgotten_key_can_come_back_while_its_old_handle_lives():
    lru = Lru()
    old = lru.insert(b"key")
    lru.pin(old)
    lru.forget(old)
    assert lru.get(b"key") is None
    new = lru.insert(b"key")
    assert new != old
    lru.unpin(old)
    lru.remove(old)
    assert lru.get(b"key") == new
    lru.check_integrity()
