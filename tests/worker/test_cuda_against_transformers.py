"""The GPU executor against transformers: logits within the rounding of the type, greedy tokens wherever it is clear.

The reference has the same rounded weights and computes in fp32. On a CPU the same executor runs on the reference
kernels in fp32. Batch composition, chunking and prefix hits must change nothing beyond the tolerance.
"""

from __future__ import annotations

import pytest
import torch
from near_ties import TOLERANCE, assert_same_choices
from transformers import AutoModelForCausalLM

from scheduler.loop import EngineLoop
from scheduler.request import NewRequest, SamplingParams
from scheduler.scheduler import Scheduler, SchedulerConfig
from worker.config import WorkerConfig
from worker.cuda_executor import CudaExecutor

PAGE = 16
NUM_TOKENS = 24
SHAPE = {"hidden_size": 256, "intermediate_size": 384, "max_position_embeddings": 1024, "vocab_size": 211}
CASES = {
    "llama, 1 query per KV head of 64": ("llama", {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}),
    "llama, 2 of 96": ("llama", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 96}),
    "llama, 4 of 128": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}),
    "llama, 8 of 32, narrow FFN": (
        "llama",
        {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 80},
    ),
    "llama, tied, biases of attention": (
        "llama",
        {"tie_word_embeddings": True, "attention_bias": True, "num_attention_heads": 4, "num_key_value_heads": 2},
    ),
    "qwen2": ("qwen2", {"num_attention_heads": 4, "num_key_value_heads": 2}),
}
# Widths and heads of LLaMA-3-8B, four of its layers.
LLAMA_3_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "num_hidden_layers": 4,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
}
PLACES = [
    pytest.param("cpu", torch.float32, id="cpu"),
    pytest.param("cuda", torch.bfloat16, id="bf16", marks=pytest.mark.gpu),
    pytest.param("cuda", torch.float16, id="fp16", marks=pytest.mark.gpu),
]


class Tapped:
    """An executor that waits for each step and keeps the logits of its sampled rows, per request."""

    def __init__(self, inner: CudaExecutor) -> None:
        self._inner, self._owner = inner, {}
        self.logits: dict[str, list[torch.Tensor]] = {}
        self.cached: dict[str, int] = {}  # prompt tokens that came from the prefix cache

    @property
    def capacity(self):
        return self._inner.capacity

    def submit(self, plan):
        for start in plan.slot_starts:
            self._owner[start.slot] = start.request_id
        step = self._inner.submit(plan)
        step.result(60.0)
        slots = plan.slots[plan.samples.nonzero()[0]].tolist()
        for slot, row in zip(slots, self._inner.model.logits(len(slots)).cpu()):
            self.logits.setdefault(self._owner[slot], []).append(row)
        return step

    def close(self) -> None:
        self._inner.close()


def open_executor(folder, device: str, dtype: torch.dtype, **changes) -> CudaExecutor:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    limits = {"max_batch_tokens": 640, "max_slots": 16, "page_size": PAGE, "num_pages": 400, **changes}
    return CudaExecutor(WorkerConfig(folder, device=device, dtype=str(dtype).removeprefix("torch."), **limits))


def generate(
    executor: CudaExecutor, prompts: dict[str, list[int]], scheduler: Scheduler | None = None
) -> tuple[dict[str, list[int]], Tapped]:
    """Greedy tokens per request, and what was tapped."""
    tapped, tokens, left = Tapped(executor), {name: [] for name in prompts}, set(prompts)

    def emit(batch) -> None:
        for name, token in zip(batch.request_ids, batch.token_ids.tolist()):
            tokens[name].append(token)
        for end in batch.ends:
            assert end.finish_reason == "length", end
            tapped.cached[end.request_id] = end.num_cached_tokens
            left.discard(end.request_id)
        if not left:
            loop.stop()

    loop = EngineLoop(scheduler or Scheduler(SchedulerConfig(), executor.capacity), tapped, emit, 60.0)
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    loop.submit([NewRequest(name, tuple(prompt), sampling) for name, prompt in prompts.items()])
    loop.run()
    return tokens, tapped


def make_prompts(lengths) -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(1)
    return {f"r{n}": torch.randint(0, 211, (n,), generator=generator).tolist() for n in lengths}


def output_logits(model, texts: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    """A model's logits before each output token, in fp32."""
    with torch.inference_mode():
        inputs = {name: torch.tensor([ids], device=model.device) for name, ids in texts.items()}
        return {name: model(ids).logits[0, -NUM_TOKENS - 1 : -1].float().cpu() for name, ids in inputs.items()}


def assert_close(logits: torch.Tensor, expected: torch.Tensor, tokens: list[int], tolerance: float) -> int:
    """[tokens, vocab] against [tokens, vocab]; each token is the reference's choice where that is clear: how often."""
    allowed = tolerance * expected.std()
    difference = (logits - expected).abs().max()
    assert difference < allowed, f"{difference} > {allowed}"
    top = expected.topk(2)
    clear = top.values[:, 0] - top.values[:, 1] > 2 * allowed
    assert (torch.tensor(tokens) == top.indices[:, 0])[clear].all()
    return int(clear.sum())


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("case", CASES)
def test_logits_and_tokens_equal_transformers(random_model, case, device, dtype):
    family, changes = CASES[case]
    compare(random_model(family, **{**SHAPE, **changes}), device, dtype, reference_on="cpu", clear_share=0.3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layers_of_llama_3_8b_equal_transformers(random_model, dtype):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    compare(random_model("llama", **LLAMA_3_8B), "cuda", dtype, reference_on="cuda", clear_share=0.1)


def compare(folder, device: str, dtype: torch.dtype, reference_on: str, clear_share: float) -> None:
    """The executor's logits and greedy tokens against those of transformers, for prompts around a page's borders.

    clear_share: of the tokens, at least so many must be clear choices; of many tokens more nearly tie.
    """
    executor = open_executor(folder, device, dtype)
    prompts = make_prompts((1, PAGE - 1, PAGE, PAGE + 1, 63, 64, 65, 130, 300, 301))
    tokens, tapped = generate(executor, prompts)
    executor.close()
    texts = {name: prompt + tokens[name] for name, prompt in prompts.items()}
    rounding = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(reference_on).eval()
    rounded = output_logits(rounding, texts)
    expected = output_logits(rounding.float(), texts)
    # What transformers itself loses by computing in this type; nothing in fp32, where order alone differs.
    lost = max(float((rounded[name] - expected[name]).abs().max() / expected[name].std()) for name in prompts)
    tolerance = max(2 * lost, TOLERANCE[torch.float32])
    clear = [
        assert_close(torch.stack(tapped.logits[name][:NUM_TOKENS]), expected[name], tokens[name], tolerance)
        for name in prompts
    ]
    assert sum(clear) > clear_share * NUM_TOKENS * len(prompts), f"hardly a choice was clear: {clear}"


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_composition_chunks_and_prefix_hits_change_nothing(random_model, device, dtype):
    folder = random_model("llama", **SHAPE, num_attention_heads=8, num_key_value_heads=2, head_dim=64)
    prompts = make_prompts((5, 40, 90, 200))
    hit = {"hit": [*prompts["r200"][: 5 * PAGE], 7, 8, 9]}
    seen = {}
    for way, limits in {"together": {}, "small chunks": {"max_batch_tokens": 24, "max_slots": 6}}.items():
        executor = open_executor(folder, device, dtype, **limits)
        scheduler = Scheduler(SchedulerConfig(), executor.capacity)
        seen[way] = generate(executor, prompts, scheduler)
        seen[f"{way}, then a hit"] = generate(executor, hit, scheduler)
        assert seen[f"{way}, then a hit"][1].cached["hit"] == 5 * PAGE
        executor.close()
    executor = open_executor(folder, device, dtype)
    alone = {name: generate(executor, {name: prompt}) for name, prompt in {**prompts, **hit}.items()}
    executor.close()
    for tokens, tapped in seen.values():
        for name in tokens:
            own_tokens, own = alone[name]
            found, expected = (torch.stack(each.logits[name][:NUM_TOKENS]) for each in (tapped, own))
            assert_same_choices(tokens[name], found, own_tokens[name], expected, TOLERANCE[dtype])
