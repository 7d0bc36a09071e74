"""A steady batch is a plan like the scheduler's, and a model runs on it with nothing run before."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.config import WorkerConfig
from worker.cuda_loading import load_model
from worker.cuda_model import GraphKey
from worker.device_batch import AttentionCuts, BatchLimits
from worker.steady_batch import SteadyBatchError, SteadyMix, fill_pages, pack_steady, steady_plan

torch.set_num_threads(1)
LIMITS = BatchLimits(rows=256, slots=200, page_size=16, pages_per_slot=20, prefill_tokens=16, decode_target=8)
VOCAB = 101


@st.composite
def mixes(draw):
    rows = draw(st.integers(1, LIMITS.rows))
    decodes = draw(st.integers(0, min(rows, 150)))
    return SteadyMix(rows, decodes, draw(st.integers(1, 200)), draw(st.integers(8, 250)))


@settings(max_examples=200, deadline=None)
@given(mixes(), st.integers(0, 9))
def test_a_plan_fills_the_batch_and_shares_no_page(mix, seed):
    plan = steady_plan(LIMITS, mix, num_pages=5000, vocab_size=VOCAB, seed=seed)
    assert plan.num_tokens == mix.rows
    assert plan.num_decodes == mix.num_decodes
    assert (plan.counts[: mix.num_decodes] == 1).all()
    assert len(set(plan.page_ids.tolist())) == len(plan.page_ids)
    for start, row_start, count in zip(plan.slot_starts, plan.starts, plan.counts):
        assert row_start + count == len(start.token_ids), "every token must be known"
        indexes = plan.page_indexes[plan.page_slots == start.slot]
        assert indexes.tolist() == list(range(-(-len(start.token_ids) // LIMITS.page_size)))
    contexts = plan.starts[: mix.num_decodes] + 1
    assert (abs(contexts - mix.mean_context) <= mix.mean_context / 3).all()
    keys = [np.arange(start, start + count) + 1 for start, count in zip(plan.starts, plan.counts)][mix.num_decodes :]
    if keys:
        assert abs(np.concatenate(keys).mean() - mix.prompt_len / 2) <= 1
    again = steady_plan(LIMITS, mix, num_pages=5000, vocab_size=VOCAB, seed=seed)
    assert np.array_equal(plan.page_ids, again.page_ids)


def test_the_mix_counts_as_the_search_does():
    work = SteadyMix(2048, 1024, 768, 512).workload
    assert (work.decode_rows, work.mean_context, work.prefill_pairs) == (1024, 768, 1024 * 512)
    half = SteadyMix(2048, 1016, 768, 512).resized(1024)
    assert (half.rows, half.num_decodes) == (1024, 508)


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        (SteadyMix(257, 1, 10, 10), "257 rows"),
        (SteadyMix(256, 0, 10, 1), "256 sequences"),
        (SteadyMix(256, 10, 300, 300), "tokens does not fit 320"),
        (SteadyMix(256, 150, 200, 100), "KV pages are needed"),
        (SteadyMix(10, 11, 10, 10), "no batch is like this"),
    ],
)
def test_what_does_not_fit_is_refused(mix, message):
    with pytest.raises(SteadyBatchError, match=message):
        steady_plan(LIMITS, mix, num_pages=1000, vocab_size=VOCAB)


def test_a_model_runs_on_it_at_once(random_model, reference):
    folder = random_model()
    config = WorkerConfig(folder, max_batch_tokens=96, max_slots=64, page_size=16, num_pages=400, dtype="float32")
    loaded = load_model(config, lambda what, share: None)
    model = loaded.model
    mix = SteadyMix(96, 40, 60, 24)
    plan = steady_plan(loaded.limits, mix, num_pages=400, vocab_size=VOCAB)
    fill_pages(loaded.cache, 1)
    whole = pack_steady(model, plan)
    cut = pack_steady(model, plan, AttentionCuts((48, 96), (48, 96)))
    other = pack_steady(model, steady_plan(loaded.limits, mix.resized(48), num_pages=400, vocab_size=VOCAB, seed=5))

    def run(batch, rows=96):
        batch.put_on(model)
        with torch.inference_mode():
            model.run(GraphKey(rows, batch.has_prefill))
        return model.sampled[: batch.num_samples].tolist()

    first = run(whole)
    assert len(first) == whole.num_samples == 42  # 40 decodes, two of three chunks reach their end
    assert all(0 <= token < VOCAB for token in first)
    run(other, 48)
    fill_pages(loaded.cache, 1)
    assert run(whole) == first, "another batch in between has changed the pages that this one reads"
    # Chunks need nothing of what is random in the pages.
    expected = [reference(folder)(plan.slot_starts[slot].token_ids.tolist())[-1].argmax().item() for slot in (40, 41)]
    assert first[40:] == expected
    fill_pages(loaded.cache, 2)
    assert run(whole)[:40] != first[:40], "decodes do not read the pages"
    assert len(cut.block) == len(whole.block)
    assert not torch.equal(cut.block, whole.block)
