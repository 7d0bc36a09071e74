"""The GPU executor's batches at their edges: hundreds of decodes, full buckets, more random rows than a piece, faults.

All in fp16 with pages of 64 tokens, so that the kernels are compiled once. Without a GPU the same code runs on the
reference kernels in fp32.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from near_ties import TOLERANCE, assert_same_choices
from safetensors.torch import load_file, save_file

from scheduler.plan import IterationPlan, StepResult
from worker import sampler
from worker.config import WorkerConfig
from worker.cuda_executor import CudaExecutor
from worker.device_batch import RANDOM_ROWS
from worker.triton_kernels import FEW_ROWS

SHAPE = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
LIMITS = {"max_batch_tokens": 448, "max_slots": 400, "page_size": 64, "num_pages": 1000}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# The kernel's weights are fp32 numbers: a share that is closer than this to a border may fall on its other side.
HAIR = 4e-6
Look = Callable[[IterationPlan, StepResult], None]


def open_executor(folder, device: str, **changes) -> CudaExecutor:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    torch.set_num_threads(1)
    dtype = "float32" if device == "cpu" else "float16"
    return CudaExecutor(WorkerConfig(folder, device=device, dtype=dtype, **{**LIMITS, **changes}))


@pytest.fixture(scope="module", params=DEVICES)
def executor(request, random_model):
    """One for all tests: they leave nothing behind but pages and slots that the next one fills anew."""
    executor = open_executor(random_model("llama", **SHAPE, max_position_embeddings=512), request.param)
    yield executor
    executor.close()


class Driven:
    """What the planner runs its plans on: each is waited for, and then looked at."""

    def __init__(self, executor: CudaExecutor, look: Look = lambda plan, result: None) -> None:
        self._executor, self._look, self.capacity = executor, look, executor.capacity

    def execute(self, plan: IterationPlan) -> StepResult:
        result = self._executor.submit(plan).result(60.0)
        self._look(plan, result)
        return result


def sampled_slots(plan: IterationPlan) -> list[int]:
    return plan.slots[plan.samples].tolist()


def test_hundreds_of_decodes_compute_what_fewer_at_a_time_do(executor, planner, ask):
    """Above FEW_ROWS rows another kernel of decode attention runs; contexts end in, at and behind a page's border."""
    lengths = [63, 64, 65, 130, *([1, 5, 30, 2, 62, 3, 8, 50] * 37)]
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 101, (length,), generator=draw).tolist() for length in lengths]

    def run(batch_tokens: int) -> tuple[list[list[int]], list[torch.Tensor], int]:
        """Tokens and the logits before them, by request, and the most decodes of an iteration."""
        logits: list[list[torch.Tensor]] = [[] for _ in prompts]
        most = 0

        def look(plan: IterationPlan, result: StepResult) -> None:
            nonlocal most
            most = max(most, plan.num_decodes)
            slots = sampled_slots(plan)
            for slot, row in zip(slots, executor.model.logits(len(slots)).cpu()):
                logits[slot].append(row)

        asks = [ask(prompt, 28) for prompt in prompts]
        tokens = planner(Driven(executor, look)).run(asks, batch_tokens)
        return tokens, [torch.stack(rows) for rows in logits], most

    tokens, logits, most = run(LIMITS["max_batch_tokens"])
    few_tokens, few_logits, few = run(200)
    assert few <= FEW_ROWS < most
    for found in zip(tokens, logits, few_tokens, few_logits):
        assert_same_choices(*found, TOLERANCE[executor.dtype])


@pytest.mark.parametrize("rows", [64, 65, 128, 129])
def test_a_graph_computes_what_launch_by_launch_is(executor, planner, ask, rows):
    """Iterations that fill a bucket, or are one row too large for it: prefills among decodes, and decodes alone."""
    model, seen, clear = executor.model, set(), []
    tokens_before = model.last_tokens.clone()  # what the rows of the next iteration read

    def outcome(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return model.sampled[:count].cpu(), model.logits(count).cpu()

    def look(plan: IterationPlan, result: StepResult) -> None:
        if plan.num_tokens == rows and plan.samples.any():
            compare(plan, len(sampled_slots(plan)))
        tokens_before.copy_(model.last_tokens)

    def compare(plan: IterationPlan, count: int) -> None:
        has_prefill = len(plan.slots) > plan.num_decodes
        seen.add(has_prefill)
        key = model.sequential_key(executor.capacity.buckets[plan.bucket].batch_tokens, has_prefill)
        assert key in model._graphs or not executor.is_cuda
        tokens, logits = outcome(count)
        with torch.inference_mode():
            model.last_tokens.copy_(tokens_before)
            model.sampled.fill_(-7)
            model.run_watched(key, lambda streams: streams)
        tokens_again, logits_again = outcome(count)
        allowed = TOLERANCE[executor.dtype] * logits.std()
        assert (logits_again - logits).abs().max() < allowed
        top = logits.topk(2).values
        clear.append(top[:, 0] - top[:, 1] > 2 * allowed)
        assert (tokens_again == tokens)[clear[-1]].all()

    with torch.inference_mode():
        lengths = [70, 64, *(1 + n % 3 for n in range(2, rows))]
        asks = [ask([(7 * n + i) % 101 for i in range(length)], 14) for n, length in enumerate(lengths)]
        planner(Driven(executor, look)).run(asks, batch_tokens=rows)
    assert seen == {True, False}
    assert torch.cat(clear).float().mean() > 0.7


def test_random_rows_of_two_pieces_among_greedy_ones(executor, planner, ask, monkeypatch):
    """Each row draws what the reference sampler draws from the same logits with the same noise."""
    kinds = [(0.8, 0, 1.0), (0.0, 0, 1.0), (1.0, 40, 0.9), (1.2, 0, 0.7), (1.0, 1, 1.0)]
    kinds += [(0.9, 0, 0.99), (2.0, 5, 1.0), (0.5, 0, 0.5), (1.0, 100, 1.0), (1.5, 20, 0.8)]
    asks = [ask([1 + n % 100], 3, *kinds[n % 10], seed=n) for n in range(340)]
    pieces: list[tuple[int, torch.Tensor]] = []  # first random row and logits of each
    draw = executor.model._kernels.sample

    def spy(logits: torch.Tensor, *others) -> None:
        pieces.append((others[5], logits.to("cpu", torch.float32, copy=True)))
        draw(logits, *others)

    monkeypatch.setattr(executor.model._kernels, "sample", spy)

    def look(plan: IterationPlan, result: StepResult) -> None:
        slots = sampled_slots(plan)
        positions = (plan.starts + plan.counts)[plan.samples].tolist()
        is_random = [asks[slot].temperature > 0 and asks[slot].top_k != 1 for slot in slots]
        rows = [
            (asks[slot], position, token)
            for slot, position, token, wanted in zip(slots, positions, result.sampled.tolist(), is_random)
            if wanted
        ]
        assert [first for first, _ in pieces] == [0, RANDOM_ROWS]
        logits = torch.cat([part for _, part in pieces])[: len(rows)]
        for row, allowed in enumerate(drawn(logits, [(each, position) for each, position, _ in rows])):
            assert rows[row][2] in allowed, (row, rows[row])
        assert_greedy(executor.model.logits(len(slots)).cpu(), result, is_random)
        assert executor.model.last_tokens[slots].tolist() == result.sampled.tolist()
        pieces.clear()

    planner(Driven(executor, look)).run(asks)
    assert sum(each.temperature > 0 and each.top_k != 1 for each in asks) > RANDOM_ROWS


def drawn(logits: torch.Tensor, rows: list[tuple]) -> list[set[int]]:
    """What the reference sampler draws from each row of logits, a hair to both sides of its top-p and noise included.

    rows: (request, position of the token).
    """
    temperature, top_p = (np.array([getattr(each, name) for each, _ in rows]) for name in ("temperature", "top_p"))
    top_k = np.array([each.top_k for each, _ in rows])
    noise = sampler.uniform(
        np.array([each.seed for each, _ in rows], np.uint64), np.array([position for _, position in rows])
    )
    found = []
    for wider in (0.0, HAIR, -HAIR):
        share = np.where(top_p < 1, np.minimum(top_p * (1 + wider), 1 - 2.0**-53), 1.0)
        for later in (0.0, HAIR, -HAIR):
            moved = (noise + later).clip(0, 1 - 2.0**-53)
            found.append(sampler.draw(logits, temperature, top_k, share, moved).tolist())
    return [set(tokens) for tokens in zip(*found)]


def assert_greedy(logits: torch.Tensor, result: StepResult, is_random: list[bool]) -> None:
    """Rows that are not random got a largest logit, as far as rounding tells."""
    greedy = ~torch.tensor(is_random)
    assert greedy.any()
    chosen = logits.gather(1, torch.from_numpy(result.sampled).long()[:, None])[:, 0]
    assert (logits.amax(-1) - chosen)[greedy].max() < 1e-3 * logits.std()


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_that_is_not_finite_changes_no_other(device, random_model, planner, ask, tmp_path):
    """Greedy and random ones, beside it, and later in pages that it has left full of what is not finite."""
    sound = random_model("llama", **SHAPE, max_position_embeddings=512)
    limits = {"max_batch_tokens": 64, "max_slots": 4, "num_pages": 8}

    def run(executor: CudaExecutor, other: int) -> tuple[list[list[int]], dict[int, str]]:
        """Four requests, of which the second and the last read the other token."""
        prompts = [list(range(20, 31)), [4, other, *range(20, 40)], list(range(50, 64)), [other, 2, 3]]
        asks = [ask(prompt, 20, temperature=0.7 * (n > 1), seed=n) for n, prompt in enumerate(prompts)]
        plans = planner(Driven(executor))
        return plans.run(asks), plans.faults

    executor = open_executor(sound, device, **limits)
    expected, faults = run(executor, 14)
    executor.close()
    assert not faults
    bad = next(token for token in range(64, 101) if not any(token in output for output in expected))
    weights = load_file(sound / "model.safetensors")
    weights["model.embed_tokens.weight"][bad] = float("inf")  # what fp16 makes of numbers from 65,520 on
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((sound / "config.json").read_text())
    executor = open_executor(tmp_path, device, **limits)
    outputs, faults = run(executor, bad)
    assert [outputs[0], outputs[2]] == [expected[0], expected[2]]
    assert set(faults) == {1, 3}
    assert all("finite" in message for message in faults.values())
    filler = planner(Driven(executor))
    filler.run([ask([bad] * 500, 4)])  # all eight pages
    assert set(filler.faults) == {0}
    assert run(executor, 14) == (expected, {})
    executor.close()
