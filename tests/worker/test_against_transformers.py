"""The proof that models are computed rightly: transformers in fp32, token by token.

An output is greedy if each of its tokens is the argmax of transformers' logits after all before it, so one
forward pass over prompt and output checks 64 steps. The worker's own logits are compared at the same places.
"""

import numpy as np
import pytest
import torch

from worker.config import WorkerConfig
from worker.executor import Worker
from worker.models.decoder import Decoder

PAGE = 8
CHUNK = 24
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 1)
NUM_TOKENS = 64

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 32, "rope_theta": 500.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 500.0},
    "yarn with mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 500.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
        "truncate": False,
        "beta_fast": 16.0,
    },
}

CASES = {
    **{
        f"llama, {8 // kv} queries per KV head": ("llama", {"num_key_value_heads": kv, "vocab_size": 101 + kv})
        for kv in (8, 4, 2, 1)
    },
    "llama, tied": ("llama", {"tie_word_embeddings": True, "vocab_size": 131}),
    "llama, all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": ("llama", {"head_dim": 24, "num_attention_heads": 4, "num_key_value_heads": 2}),
    **{f"llama, rope {name}": ("llama", {"rope_parameters": rope}) for name, rope in ROPES.items()},
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 2}),
    "qwen2, untied, yarn": ("qwen2", {"rope_parameters": ROPES["yarn"], "num_key_value_heads": 1}),
    "mixtral": ("mixtral", {"num_key_value_heads": 2, "vocab_size": 127}),
    "mixtral, one of five": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 1}),
    "mixtral, three of eight": ("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 16}),
}


@pytest.fixture
def seen_logits(monkeypatch):
    """All logits that decoders give while the test runs, in order."""
    seen = []
    logits = Decoder.logits

    def spy(self, rows):
        result = logits(self, rows)
        seen.extend(result.clone())
        return result

    monkeypatch.setattr(Decoder, "logits", spy)
    return seen


def load(folder, **changes):
    defaults = {"max_batch_tokens": CHUNK + len(LENGTHS), "max_slots": 16, "page_size": PAGE, "num_pages": 256}
    worker = Worker(WorkerConfig(folder, **{**defaults, "num_threads": 1, **changes}))
    worker.load()
    return worker


def assert_greedy(ask, logits):
    """Each output token is the argmax of the reference's logits after the tokens before it."""
    expected = logits(ask.prompt + ask.output)[len(ask.prompt) - 1 : -1].argmax(-1).tolist()
    assert ask.output == expected


@pytest.mark.parametrize("case", CASES)
def test_random_models_are_greedy_like_transformers(case, random_model, reference, planner, ask):
    family, changes = CASES[case]
    folder = random_model(family, **changes)
    worker = load(folder)
    draw = np.random.default_rng(1)
    asks = [ask(draw.integers(0, worker.spec.vocab_size, n).tolist(), NUM_TOKENS) for n in LENGTHS]
    planner(worker).run(asks, max_chunk=CHUNK)
    for one in asks:
        assert_greedy(one, reference(folder))
    assert len({tuple(one.output) for one in asks}) == len(asks), "the outputs should differ, or little is proven"


@pytest.mark.parametrize("case", CASES)
def test_logits_of_random_models_are_within_a_thousandth(case, random_model, reference, planner, ask, seen_logits):
    family, changes = CASES[case]
    folder = random_model(family, **changes)
    worker = load(folder)
    one = ask(np.random.default_rng(2).integers(0, worker.spec.vocab_size, 2 * CHUNK + 3).tolist(), 16)
    planner(worker).run([one], max_chunk=CHUNK)
    expected = reference(folder)(one.prompt + one.output)[len(one.prompt) - 1 : -1]
    assert len(seen_logits) == 16
    torch.testing.assert_close(torch.stack(seen_logits), expected, atol=1e-3, rtol=0)


def test_the_whole_prompt_has_the_right_logits(random_model, reference, seen_logits, planner, ask):
    """A prompt fed token by token samples, and so shows its logits, at every length."""
    folder = random_model("llama")
    prompt = np.random.default_rng(3).integers(0, 101, 40).tolist()
    worker = load(folder)
    planner(worker).run([ask(prompt[:n], 1) for n in range(1, 17)])
    expected = reference(folder)(prompt[:16])
    torch.testing.assert_close(torch.stack(seen_logits), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 64, 100])
def test_every_chunk_size_gives_the_same_tokens(chunk, random_model, reference, planner, ask):
    folder = random_model("llama")
    draw = np.random.default_rng(4)
    asks = [ask(draw.integers(0, 101, n).tolist(), 6) for n in (1, PAGE, 2 * PAGE + 1, 50, chunk, 2 * chunk + 1)]
    planner(load(folder, max_batch_tokens=128)).run(asks, max_chunk=chunk)
    for one in asks:
        assert_greedy(one, reference(folder))


@pytest.mark.parametrize("cached_pages", [1, 3, 5])
def test_cached_prefix_pages_give_the_same_tokens(cached_pages, random_model, reference, planner, ask):
    folder = random_model("qwen2", num_key_value_heads=2)
    worker = load(folder)
    prompt = np.random.default_rng(5).integers(0, 101, 5 * PAGE).tolist()
    plans = planner(worker)
    plans.run([ask(prompt, 4)])
    cached = cached_pages * PAGE
    later = [ask([*prompt[:cached], 7, 9, slot], 8) for slot in range(1, 4)]
    plans.run(later, cached=cached, slots=[1, 2, 3])
    for one in later:
        assert_greedy(one, reference(folder))


def test_a_slot_and_its_pages_are_clean_for_the_next_request(random_model, reference, planner, ask):
    folder = random_model("llama")
    worker = load(folder, num_pages=16)
    for seed in range(4):
        one = ask(np.random.default_rng(seed).integers(0, 101, 60 - 10 * seed).tolist(), 5)
        plans = planner(worker, seed)
        plans.run([one])
        assert_greedy(one, reference(folder))


def test_the_trained_small_model(stories_model, reference, planner, ask, seen_logits):
    prompts = [[1, 403, 407], [1, *range(300, 340)], [1]]
    asks = [ask(prompt, NUM_TOKENS) for prompt in prompts]
    planner(load(stories_model)).run(asks, max_chunk=16)
    for one in asks:
        assert_greedy(one, reference(stories_model))
    seen_logits.clear()
    one = ask(prompts[1], 16)
    planner(load(stories_model)).run([one], max_chunk=16)
    expected = reference(stories_model)(one.prompt + one.output)[len(one.prompt) - 1 : -1]
    torch.testing.assert_close(torch.stack(seen_logits), expected, atol=1e-3, rtol=0)


def test_the_default_model(smollm2_model, reference, planner, ask, seen_logits):
    """SmolLM2; "Once upon a time, there was a little girl named" goes on with Emma."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2_model / "tokenizer.json"))
    story, sum_ = "Once upon a time, there was a little girl named", "What is 12 + 30? Answer:"
    asks = [ask(tokenizer.encode(text).ids, NUM_TOKENS) for text in (story, sum_)]
    planner(load(smollm2_model, num_pages=64)).run(asks, max_chunk=7)
    for one in asks:
        assert_greedy(one, reference(smollm2_model))
    assert tokenizer.decode(asks[0].output).startswith(" Emma who loved to play in the sun.")
    first = reference(smollm2_model)(asks[0].prompt)[-1]
    torch.testing.assert_close(seen_logits[0], first, atol=1e-3, rtol=0)
