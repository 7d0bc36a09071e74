"""Choosing tokens: exact where it is exact, in distribution where it is random, alone or mixed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.sampler import SamplingRows, sample, uniform

VOCAB = 60


def rows_of(*rows):
    """Each row as (temperature, top_k, top_p, seed, position)."""
    columns = list(zip(*rows))
    types = (np.float64, np.int64, np.float64, np.uint64, np.int64)
    return SamplingRows(*(np.array(column, kind) for column, kind in zip(columns, types)))


def random_logits(rows, vocab=VOCAB, seed=0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def kept_tokens(logits, top_k, top_p, temperature=1.0):
    """The slow way: sort, cut at k, then at the smallest set with a share of at least p."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = order[: top_k if top_k > 0 else len(order)]
    weights = np.exp((np.array([logits[i] for i in order], np.float64) - max(logits)) / temperature)
    reached = np.cumsum(weights) >= top_p * weights.sum() if top_p < 1 else np.zeros(len(order), bool)
    return set(order[: int(np.argmax(reached)) + 1 if reached.any() else len(order)])


def test_greedy_takes_the_lowest_of_equals():
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [1.0, 1.0, 1.0, 1.0], [-9.0, -8.0, -7.0, -7.0]])
    logits = torch.cat((logits, torch.full((3, 5000), -20.0)), dim=1)
    greedy = rows_of(*[(0.0, 0, 1.0, 5, 1)] * 3)
    assert sample(logits, greedy).token_ids.tolist() == [1, 0, 2]
    top_one = rows_of(*[(1.5, 1, 1.0, 5, 1)] * 3)
    assert sample(logits, top_one).token_ids.tolist() == [1, 0, 2]


@pytest.mark.parametrize("temperature", [1e-300, 1e-9, 1e-3])
def test_a_vanishing_temperature_is_greedy(temperature):
    logits = random_logits(50)
    sampled = sample(logits, rows_of(*[(temperature, 0, 1.0, i, i) for i in range(50)]))
    assert torch.equal(sampled.token_ids, logits.argmax(-1))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.5, 0, 1.0), (3.0, 5, 1.0), (1.0, 0, 0.8), (2.0, 20, 0.5)]
)
def test_frequencies_are_the_probabilities(temperature, top_k, top_p):
    draws = 40000
    logits = random_logits(1)
    rows = rows_of(*[(temperature, top_k, top_p, 77, position) for position in range(draws)])
    counts = np.bincount(sample(logits.expand(draws, VOCAB), rows).token_ids, minlength=VOCAB)
    kept = sorted(kept_tokens(logits[0].tolist(), top_k, top_p, temperature))
    weights = np.zeros(VOCAB)
    weights[kept] = np.exp(logits[0, kept].numpy() / temperature)
    expected = weights / weights.sum()
    assert set(np.flatnonzero(counts)) <= set(kept)
    # Five standard deviations of a count, and one count for the rarest.
    assert (np.abs(counts - draws * expected) <= 5 * np.sqrt(draws * expected * (1 - expected)) + 1).all()


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 1000),
    vocab=st.sampled_from([1, 2, 7, 1023, 1024, 1025, 2500]),
    rows=st.lists(
        st.tuples(
            st.sampled_from([0.0, 1e-9, 0.3, 1.0, 1e6]),
            st.sampled_from([-1, 0, 1, 2, 40, 1024, 2000, 10**7]),
            st.sampled_from([1e-9, 0.1, 0.9, 0.999999, 1.0]),
            st.integers(0, 2**63 - 1),
            st.integers(0, 2**31),
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_a_row_depends_on_nothing_but_itself_and_keeps_its_limits(seed, vocab, rows):
    logits = random_logits(len(rows), vocab, seed).round()  # rounded: many ties
    together = sample(logits, rows_of(*rows)).token_ids.tolist()
    alone = [int(sample(logits[i : i + 1], rows_of(row)).token_ids) for i, row in enumerate(rows)]
    assert together == alone
    for token, line, (temperature, top_k, top_p, _, _) in zip(together, logits.tolist(), rows):
        if temperature == 0:
            assert token == line.index(max(line))
        else:
            # The share is compared with a hair of room: sums in another order end in other bits.
            assert token in kept_tokens(line, top_k, min(1.0, top_p + 1e-9), temperature)


def test_limits_beyond_the_vocabulary_keep_all_of_it():
    logits = random_logits(30)
    plain = sample(logits, rows_of(*[(1.0, 0, 1.0, i, 3) for i in range(30)])).token_ids
    for top_k in (-1, VOCAB, VOCAB + 1, 10**7):
        limited = sample(logits, rows_of(*[(1.0, top_k, 1.0, i, 3) for i in range(30)])).token_ids
        assert torch.equal(limited, plain)


def test_a_nucleus_wider_than_the_narrow_sort():
    """Almost equal logits over a large vocabulary, where top-p keeps thousands of tokens."""
    logits = torch.linspace(0, -0.01, 3000)[None].expand(400, 3000)
    tokens = sample(logits, rows_of(*[(1.0, 0, 0.5, 9, i) for i in range(400)])).token_ids
    assert tokens.max() < 1510
    assert tokens.max() > 1400
    tokens = sample(logits, rows_of(*[(1.0, 2000, 1.0, 9, i) for i in range(400)])).token_ids
    assert 1900 < tokens.max() < 2000


def test_logits_that_are_not_finite_fault_their_own_row_only():
    logits = random_logits(6)
    clean = sample(logits, rows_of(*[(1.0, 10, 0.9, i, 4) for i in range(6)]))
    assert not clean.faulty.any()
    bad = logits.clone()
    bad[1, 5], bad[3, 0], bad[4, 7] = float("nan"), float("inf"), float("-inf")
    sampled = sample(bad, rows_of(*[(1.0, 10, 0.9, i, 4) for i in range(6)]))
    assert sampled.faulty.tolist() == [False, True, False, True, True, False]
    assert sampled.token_ids[[0, 2, 5]].tolist() == clean.token_ids[[0, 2, 5]].tolist()
    assert ((sampled.token_ids >= 0) & (sampled.token_ids < VOCAB)).all()


@pytest.mark.parametrize(("noise", "expected"), [(0.0, 3), (1 - 2.0**-53, 7)])
def test_the_ends_of_the_noise_fall_on_kept_tokens(noise, expected, monkeypatch):
    monkeypatch.setattr("worker.sampler.uniform", lambda seed, position: np.full(len(seed), noise))
    logits = torch.zeros(1, 10)
    logits[0, 3:8] = 1.0
    assert sample(logits, rows_of((1.0, 5, 1.0, 0, 0))).token_ids.tolist() == [expected]


def test_noise_is_uniform_and_hangs_on_seed_and_position():
    seeds = np.arange(50000, dtype=np.uint64)
    values = uniform(seeds, np.full(50000, 3))
    assert 0 <= values.min() < values.max() < 1
    assert np.abs(np.histogram(values, 20, (0, 1))[0] - 2500).max() < 5 * np.sqrt(2500)
    along = uniform(np.full(50000, 7, np.uint64), np.arange(50000))
    assert len(np.unique(along)) == 50000
    assert abs(np.corrcoef(values, along)[0, 1]) < 0.02
    assert np.array_equal(uniform(seeds[:5], np.full(5, 3)), values[:5])
    assert uniform(np.array([2**63 - 1], np.uint64), np.array([2**31]))[0] < 1
