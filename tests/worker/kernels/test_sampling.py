"""The sampling kernel against worker.sampler: any mix of parameters, ties, faults, sizes; alone or among others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from worker import sampler
from worker.kernel_set import MAX_VOCAB
from worker.kernels import reference

pytestmark = pytest.mark.gpu

# The kernel's weights are fp32 numbers: shares that are closer than this to a border may fall on its other side.
HAIR = 4e-6
PARAMETERS = st.tuples(
    st.sampled_from([1e-300, 1e-9, 0.3, 1.0, 1e6, 1e300]),
    st.sampled_from([0, 1, 2, 40, 1000, 2**31 - 1]),
    st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999999, 1.0]),
    st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 1 - 2.0**-53])),
)


class Batch:
    """Rows of (temperature, top_k, top_p, noise) for logits, on the device, with the buffers of one launch."""

    def __init__(self, logits: torch.Tensor, rows: list[tuple]) -> None:
        self.logits, self.count = logits, len(rows)
        self.temperature, top_k, self.top_p, self.noise = (np.array(column, np.float64) for column in zip(*rows))
        self.top_k = top_k.astype(np.int64)

    def run(
        self, kernel, *, first: int = 0, num_rows: int | None = None, **options
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens by sample and by slot; sample i is row count - 1 - i and has slot i + 1."""
        device = self.logits.device
        order = torch.arange(self.count, dtype=torch.int32, device=device)
        sampled = torch.full((self.count,), -7, dtype=torch.int32, device=device)
        last_tokens = torch.full((self.count + 1,), -7, dtype=torch.int32, device=device)
        doubles = [torch.from_numpy(a).to(device) for a in (self.temperature, self.top_p, self.noise)]
        top_k = torch.from_numpy(self.top_k.astype(np.int32)).to(device)
        live = torch.tensor([self.count if num_rows is None else num_rows], dtype=torch.int32, device=device)
        kernel(
            self.logits,
            order.flip(0),
            doubles[0],
            top_k,
            *doubles[1:],
            first,
            live,
            order + 1,
            sampled,
            last_tokens,
            **options,
        )
        return sampled.cpu(), last_tokens.cpu()

    def tokens(self, **options) -> list[int]:
        """The kernel's tokens by row."""
        from worker.kernels.sampling import sample

        return self.run(sample, **options)[0].flip(0).tolist()

    def allowed(self) -> list[set[int]]:
        """What worker.sampler draws for each row, a hair to both sides of its noise and its top-p included."""
        logits = self.logits.float().cpu()
        drawn, can_be_drawn = [], torch.zeros(logits.shape, dtype=torch.bool)
        for wider in (0.0, HAIR, -HAIR):
            # A share of exactly 1 is no limit, and stays none.
            top_p = np.where(self.top_p < 1, np.minimum(self.top_p * (1 + wider), 1 - 2.0**-53), 1.0)
            for later in (0.0, HAIR, -HAIR):
                noise = (self.noise + later).clip(0, 1 - 2.0**-53)
                drawn.append(sampler.draw(logits, self.temperature, self.top_k, top_p, noise).tolist())
            can_be_drawn |= self._with_weight(logits, top_p)
        return [
            {first + place for place in can_be_drawn[row, first : last + 1].nonzero()[:, 0].tolist()}
            for row, (first, last) in enumerate((min(tokens), max(tokens)) for tokens in zip(*drawn))
        ]

    def _with_weight(self, logits: torch.Tensor, top_p: np.ndarray) -> torch.Tensor:
        """Which tokens are kept and have weight: [rows, vocab] of bool."""
        temperature = torch.from_numpy(self.temperature.clip(sampler.MIN_TEMPERATURE))[:, None]
        weights = ((logits.double() - logits.amax(dim=-1, keepdim=True)) / temperature).exp()
        return (weights > 0) & sampler._kept(logits, weights, self.top_k, top_p)


def random_logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.fixture(params=["fp32", "fp16", "bf16"])
def logits_dtype(request, device) -> torch.dtype:
    if request.param == "bf16" and device.type == "cpu":
        pytest.skip("Triton's interpreter computes bf16 wrongly")
    return {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[request.param]


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(seed=0, vocab=63, ties=False, rows=[(0.3, 0, 1.0, 0.0)])  # the first tokens weigh less than the kernel counts
@given(
    seed=st.integers(0, 1000),
    vocab=st.sampled_from([1, 2, 7, 63, 300, 513]),
    ties=st.booleans(),
    rows=st.lists(PARAMETERS, min_size=1, max_size=4),
)
def test_draws_what_the_sampler_draws(seed, vocab, ties, rows, logits_dtype, device):
    logits = random_logits(len(rows), vocab, seed)
    batch = Batch((logits.round() if ties else logits).to(device, logits_dtype), rows)
    tokens = batch.tokens(block=64)
    for token, allowed, row in zip(tokens, batch.allowed(), rows):
        assert token in allowed, row


def test_of_equals_the_lower_ids_are_kept(logits_dtype, device):
    logits = torch.zeros(1, 150)
    logits[0, 40:] = 1.0
    logits[0, 70:140] = -0.0  # as large as 0.0
    ends = [0.0, 1 - 2.0**-53]
    # First and last of: three highest of 40 equals; the same by their share; as many, and zeros of both kinds.
    rows = [(1.0, 3, 1.0, noise) for noise in ends]
    rows += [(1.0, 40, 0.074, noise) for noise in ends]
    rows += [(1.0, 80, 1.0, noise) for noise in ends]
    expected = [40, 42, 40, 42, 0, 149]
    batch = Batch(logits.expand(len(rows), -1).contiguous().to(device, logits_dtype), rows)
    assert batch.tokens(block=64) == expected
    # The zeros before id 40 are kept, none of those from 70 on.
    middle = Batch(batch.logits[:1].contiguous(), [(1e6, 80, 1.0, noise) for noise in [0.999999]])
    assert middle.tokens(block=64)[0] >= 140


def test_what_is_not_finite_faults_its_own_row_only(logits_dtype, device):
    logits = random_logits(7, 100)
    rows = [(1.0, 10, 0.9, 0.3 + 0.1 * i) for i in range(7)]
    clean = Batch(logits.to(device, logits_dtype), rows).tokens(block=64)
    logits[1, 5], logits[3, 0], logits[4, 99] = float("nan"), float("inf"), float("-inf")
    logits[6] = float("-inf")
    batch = Batch(logits.to(device, logits_dtype), rows)
    faulty = [1, 3, 4, 6]
    assert batch.tokens(block=64) == [-1 if i in faulty else token for i, token in enumerate(clean)]


@pytest.mark.parametrize("name", ["kernel", "reference"])
def test_writes_the_counted_rows_as_results_and_as_next_tokens(name, device):
    from worker.kernels.sampling import sample

    logits = random_logits(6, 50)
    logits[1, 3] = float("nan")
    batch = Batch(logits.to(device), [(0.7, 5, 0.9, 0.1 * i) for i in range(6)])
    sampled, last_tokens = batch.run(sample if name == "kernel" else reference.sample, first=20, num_rows=24)
    by_row = sampled.flip(0).tolist()
    assert by_row[4:] == [-7, -7]
    assert by_row[1] == -1
    assert [token in allowed for token, allowed in zip(by_row, batch.allowed())] == [
        True,
        False,
        True,
        True,
        False,
        False,
    ]
    assert last_tokens.tolist() == [-7, *(max(token, 0) if token != -7 else -7 for token in sampled.tolist())]


def test_a_row_depends_on_nothing_but_itself(logits_dtype, device):
    logits = random_logits(5, 400).to(device, logits_dtype)
    rows = [(1.0, 0, 0.95, 0.2), (0.8, 50, 0.9, 0.7), (2.0, 0, 1.0, 0.5), (1.0, 30, 1.0, 0.9), (1.3, 399, 0.3, 0.6)]
    together = Batch(logits, rows).tokens()
    assert Batch(logits.flip(0).contiguous(), rows[::-1]).tokens() == together[::-1]
    assert [Batch(logits[i : i + 1], rows[i : i + 1]).tokens()[0] for i in range(5)] == together
    # Sums are exact: not even the order of summing counts.
    assert Batch(logits, rows).tokens(block=32) == together


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (6, 1.0), (0, 0.8), (7, 0.9)])
def test_frequencies_are_the_probabilities(top_k, top_p, device):
    draws = 60 if device.type == "cpu" else 50000
    noise = sampler.uniform(np.full(draws, 11, np.uint64), np.arange(draws))
    logits = (random_logits(1, 10, seed=4) / 3).half()
    tokens = Batch(logits.expand(draws, 10).contiguous().to(device), [(0.8, top_k, top_p, u) for u in noise]).tokens()
    weights = np.exp(logits[0].double().numpy() / 0.8)
    order = np.argsort(-weights)[: top_k or 10]
    reached = np.cumsum(weights[order]) >= top_p * weights[order].sum()
    kept = order[: int(reached.argmax()) + 1] if top_p < 1 else order
    counts, expected = np.bincount(tokens, minlength=10), np.zeros(10)
    expected[kept] = draws * weights[kept] / weights[kept].sum()
    assert counts[expected == 0].sum() == 0
    chi_square = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    freedom = len(kept) - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5


def test_sums_of_the_largest_vocabulary_do_not_overflow(device):
    logits = torch.zeros(1, MAX_VOCAB, dtype=torch.float16, device=device)  # the heaviest rows are those of equals
    assert Batch(logits, [(1.0, 0, 1.0, 0.5)]).tokens() == [MAX_VOCAB // 2]


def test_a_whole_vocabulary(device, logits_dtype):
    if device.type == "cpu":
        pytest.skip("too large for Triton's interpreter")
    vocab, kinds = (
        128256,
        [(1.0, 0, 1.0), (0.7, 50, 1.0), (1.0, 0, 0.9), (0.8, 1000, 0.95), (1e6, 0, 0.5), (1e-9, 0, 1.0)],
    )
    logits = random_logits(48, vocab)
    logits[24:, ::1000] += 12  # half of the rows as peaked as a model's
    noise = sampler.uniform(np.arange(48, dtype=np.uint64), np.arange(48))
    batch = Batch(logits.to(device, logits_dtype), [(*kinds[i % 6], noise[i]) for i in range(48)])
    tokens = batch.tokens()
    wrong = [(i, kinds[i % 6]) for i, allowed in enumerate(batch.allowed()) if tokens[i] not in allowed]
    assert not wrong
