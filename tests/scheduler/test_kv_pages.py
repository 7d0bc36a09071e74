"""The page pool: references, contents, order of giving up."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from scheduler.kv_pages import PagePool, page_digest, root_digest


def test_digests_depend_on_salt_parent_and_tokens() -> None:
    root = root_digest("")
    digests = {
        root_digest("a"),
        root,
        page_digest(root, b"1234"),
        page_digest(root, b"1235"),
        page_digest(root_digest("a"), b"1234"),
        page_digest(page_digest(root, b"1234"), b"1234"),
    }
    assert len(digests) == 6
    assert all(len(digest) == 32 for digest in digests)


def test_no_salt_can_pose_as_a_page() -> None:
    """A salt that spells a page's parent and tokens must not give that page's digest."""
    parent = b"p" * 32
    assert root_digest((parent + b"1234").decode()) != page_digest(parent, b"1234")


@pytest.mark.parametrize("salt", ["", "\0", "../x", "ü" * 5000, "\ud800"])
def test_any_salt_works(salt: str) -> None:
    assert len(root_digest(salt)) == 32


@given(st.tuples(st.text(max_size=3), st.binary(max_size=8)), st.tuples(st.text(max_size=3), st.binary(max_size=8)))
@settings(max_examples=50)
def test_equal_chains_only_for_equal_content(a: tuple[str, bytes], b: tuple[str, bytes]) -> None:
    digest_a, digest_b = (page_digest(root_digest(salt), tokens) for salt, tokens in (a, b))
    assert (digest_a == digest_b) == (a == b)


def test_a_released_page_is_kept_while_others_are_free() -> None:
    pool = PagePool(3)
    (page,) = pool.allocate(1)
    pool.publish([page], [b"x"])
    pool.release([page])
    assert (pool.num_free, pool.num_cached, pool.num_live) == (2, 1, 0)
    pool.allocate(2)
    assert pool.find(b"x") == page
    assert pool.allocate(1) == [page]
    assert pool.find(b"x") is None


def test_a_hit_page_is_shared_until_the_last_release() -> None:
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    pool.publish([page], [b"x"])
    pool.acquire([page])
    assert pool.num_sole([page]) == 0
    assert pool.num_hit == 1
    pool.release([page])
    assert pool.num_live == 1
    pool.release([page])
    assert (pool.num_live, pool.num_cached, pool.num_hit) == (0, 1, 0)


def test_a_second_page_with_equal_content_is_freed_not_cached() -> None:
    pool = PagePool(2)
    first, second = pool.allocate(2)
    pool.publish([first, second], [b"x", b"x"])
    pool.release([first])
    pool.release([second])
    assert pool.find(b"x") == first
    assert (pool.num_free, pool.num_cached) == (1, 1)


def test_more_than_available_is_our_own_fault() -> None:
    with pytest.raises(AssertionError, match="wanted"):
        PagePool(2).allocate(3)


class PoolMachine(RuleBasedStateMachine):
    """Holders take and drop pages; what a page holds is known to a model of it."""

    @initialize(num_pages=st.integers(1, 8))
    def start(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages)
        self.holders: list[list[int]] = []
        self.content: dict[int, bytes] = {}  # of published pages

    @rule(num_pages=st.integers(0, 4))
    def allocate(self, num_pages: int) -> None:
        pages = self.pool.allocate(min(num_pages, self.pool.num_available))
        assert not {page for holder in self.holders for page in holder} & set(pages)
        for page in pages:
            self.content.pop(page, None)
        self.holders.append(pages)
        self.check()

    @precondition(lambda self: self.holders)
    @rule(pick=st.integers(0, 100), digest=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def publish(self, pick: int, digest: bytes) -> None:
        for page in self.holders[pick % len(self.holders)]:
            if page not in self.content and digest not in self.content.values():
                self.content[page] = digest
            self.pool.publish([page], [digest])
        self.check()

    @rule(digest=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def hit(self, digest: bytes) -> None:
        page = self.pool.find(digest)
        assert (page is None) == (digest not in self.content.values())
        if page is not None:
            assert self.content[page] == digest
            self.pool.acquire([page])
            self.holders.append([page])
        self.check()

    @precondition(lambda self: self.holders)
    @rule(pick=st.integers(0, 100))
    def release(self, pick: int) -> None:
        self.pool.release(self.holders.pop(pick % len(self.holders)))
        self.check()

    @rule()
    def flush(self) -> None:
        assert self.pool.flush() == len(self.content)
        self.content.clear()
        self.check()

    def check(self) -> None:
        self.pool.check_integrity(Counter(page for holder in self.holders for page in holder))


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
