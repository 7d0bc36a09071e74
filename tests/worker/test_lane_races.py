"""Lanes run for real, in any order that streams and events leave open: what comes out is what comes of issue order.

Each place's launches are queued, and a seed chooses which queue goes on: so what may run too early does, on the
model's own buffers. An oracle that knows nothing of operators, rows or waits.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch

from autosearch.decode_beside import decode_beside
from autosearch.operators import ATTENTION, layer_operators
from autosearch.pipeline import InvalidScheduleError, NanoOperation, PipelineSchedule
from worker.config import WorkerConfig
from worker.cuda_loading import load_model
from worker.cuda_model import CudaModel, GraphKey
from worker.folded_norms import NO_PASS, fold_norms
from worker.steady_batch import SteadyMix, fill_pages, pack_steady, steady_plan
from worker.streams import WHOLE

ROWS, DECODES = 48, 18
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
TRIES = 3  # orders of each schedule
NUM_DRAWN = 40


@dataclass
class Launch:
    """A kernel in a queue: waits for those before it there, but a helper not for the last of them."""

    run: Callable[[], None]
    helps: bool
    has_run: bool = False


@dataclass
class Mark:
    """All that a place was given so far."""

    before: tuple
    is_over: bool = False


class LateStreams:
    """Queues; `drain` runs them in an order that a seed chooses."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._queues: dict[object, list] = {}  # of launches and of events to wait for
        self._place = WHOLE

    @contextmanager
    def at(self, place):
        self._place = place
        yield

    def mark(self, place):
        return Mark(tuple(self._queues.setdefault(place, [])))

    def wait(self, place, event):
        self._queues.setdefault(place, []).append(event)

    def launch(self, run, helps: bool) -> None:
        self._queues.setdefault(self._place, []).append(Launch(run, helps))

    def drain(self) -> None:
        waiting = {place: deque(queue) for place, queue in self._queues.items()}
        while any(waiting.values()):
            ready = [launch for queue in waiting.values() for launch in self._ready(queue)]
            assert ready or not any(waiting.values()), "everything waits for everything"
            if ready:
                launch = self._random.choice(ready)
                launch.run()
                launch.has_run = True
        self._queues.clear()

    def _ready(self, queue):
        """What the place may run now: its next kernel, and the helper right behind that."""
        while queue and self._is_over(queue[0]):
            queue.popleft()
        if not queue or not isinstance(queue[0], Launch):
            return
        yield queue[0]
        # A helper is launched once the kernel before it runs. It does not wait for that to end, nor for events between.
        helper = next((each for each in list(queue)[1:] if isinstance(each, Launch)), None)
        if helper is not None and helper.helps and not helper.has_run:
            yield helper

    def _is_over(self, each) -> bool:
        if isinstance(each, Launch):
            return each.has_run
        each.is_over = each.is_over or all(map(self._is_over, each.before))
        return each.is_over


def run_late(model: CudaModel, key: GraphKey, seed: int, monkeypatch) -> None:
    """One iteration in another order; the work of what is helped is done by one of the two."""
    streams, dice = LateStreams(seed), random.Random(seed)
    helped = {(op.operator, op.start, op.end) for op in model.schedule(key).operations if op.helps}
    chosen: dict[tuple, int] = {}  # by layer and work: whether the first or the second launch does it
    launched: Counter[tuple] = Counter()

    def queued(name, operator):
        def run(layer, rows):
            if rows.how.kernel == NO_PASS and (name == "ffn_norm" or layer):
                return  # launches nothing
            work = (layer, name, rows.start, rows.stop)
            number = launched[work]
            launched[work] += 1

            def now():
                if work[1:] not in helped or number == chosen.setdefault(work, dice.randint(0, 1)):
                    operator.run(layer, rows)

            streams.launch(now, rows.how.helps and name == "decode_attention")  # prefill's kernel always waits

        return replace(operator, run=run)

    run_layers = model._run_layers

    def run_and_drain(schedule, operators, num_layers):
        run_layers(schedule, {name: queued(name, operator) for name, operator in operators.items()}, num_layers)
        streams.drain()

    with monkeypatch.context() as patch:
        patch.setattr(model, "_streams", streams)
        patch.setattr(model, "_run_layers", run_and_drain)
        model.run(key)


@pytest.fixture(scope="module")
def loaded(random_model):
    torch.set_num_threads(1)
    folder = random_model("llama", **SHAPE, num_hidden_layers=4, max_position_embeddings=128)
    limits = {"max_batch_tokens": ROWS, "max_slots": 32, "page_size": 16, "num_pages": 200}
    loaded = load_model(WorkerConfig(folder, device="cpu", dtype="float32", **limits), lambda what, share: None)
    fill_pages(loaded.cache)
    return loaded


def check(loaded, schedule: PipelineSchedule, seeds, monkeypatch) -> None:
    """Raises where an order gives anything else than issue order does."""
    model, layers = loaded.model, loaded.model.layers
    mix = SteadyMix(ROWS, DECODES, 30, 14)
    plan = steady_plan(loaded.limits, mix, num_pages=200, vocab_size=model.spec.vocab_size)
    model.use_schedules([schedule])
    key = GraphKey(ROWS, True, schedule.name)
    batch = pack_steady(model, plan, model.cuts(key))
    buffers = (layers.residual, layers.delta, layers._normed, layers._qkv, layers._attention, layers._gated)

    def result(run):
        fill_pages(loaded.cache)
        with torch.inference_mode():
            for buffer in (*buffers, layers._both, layers._squares):
                buffer.fill_(float("nan"))
            batch.put_on(model)
            run()
        return [
            *(each.clone() for each in loaded.cache.layers),
            model.logits(batch.num_samples),
            layers.residual.clone(),
        ]

    expected = result(lambda: model.run(key))
    assert all(each.isfinite().all() for each in expected)
    for seed in seeds:
        found = result(lambda seed=seed: run_late(model, key, seed, monkeypatch))
        assert all(map(torch.equal, found, expected)), f"{schedule}, order {seed}"
    model.forget(schedule.name)


@pytest.mark.parametrize("num_before", range(5))
@pytest.mark.parametrize("num_beside", range(1, 5))
def test_the_family_runs_the_same_in_any_order(loaded, num_before, num_beside, monkeypatch):
    dice = random.Random(num_before * 10 + num_beside)
    for cut in (dice.randint(1, DECODES - 1), DECODES, dice.randint(DECODES + 1, ROWS - 1)):
        share = dice.choice((48, 60, 64, 68, 72)) / 132
        plain = decode_beside(layer_operators(loaded.spec), ROWS, cut, share, num_beside, "cuda", num_before)
        for schedule in (plain, fold_norms(plain)):
            check(loaded, schedule, range(TRIES), monkeypatch)


def drawn(operators, dice: random.Random) -> PipelineSchedule:
    """Some schedule: ranges, order, lanes, shares, waits and helpers as they come."""
    cuts = sorted(dice.sample(range(1, ROWS), dice.randint(1, 3)))
    left = []
    for operator in operators:
        ends = [cut for cut in cuts if dice.random() < 0.7] + [ROWS]
        left += [(operator.name, start, end) for start, end in zip([0, *ends], ends)]
    by_name = {operator.name: operator for operator in operators}
    operations: list[NanoOperation] = []

    def may_come(name: str, start: int, end: int) -> bool:
        needs = [(source, start) for source in by_name[name].inputs] + [
            (source, 0) for source in by_name[name].earlier_rows
        ]
        return not any(n == source and e > first and s < end for source, first in needs for n, s, e in left)

    while left:
        name, start, end = dice.choice([each for each in left if may_come(*each)])
        left.remove((name, start, end))
        lane = dice.randint(0, 1)
        share = 1.0 if dice.random() < 0.3 else (64 if lane else 68) / 132
        index = len(operations)
        after = tuple(dice.sample(range(index), 1)) if index and dice.random() < 0.15 else ()
        before = tuple(dice.sample(range(20), 1)) if dice.random() < 0.05 else ()
        operations.append(NanoOperation(name, start, end, lane, share, after=after, after_previous=before))
        for op in [op for op in operations if op.operator in ATTENTION and not op.helps]:
            is_read = any(each.operator == "o" and each.start < op.end and op.start < each.end for each in operations)
            if dice.random() < 0.3 and not is_read:
                other = 1 - op.lane
                operations.append(replace(op, lane=other, sm_share=(64 if other else 68) / 132, helps=True, after=()))
    return PipelineSchedule("drawn", ROWS, tuple(operations), decodes_first=dice.random() < 0.5)


def test_whatever_is_valid_runs_the_same_in_any_order(loaded, monkeypatch):
    dice, operators, num_checked = random.Random(0), layer_operators(loaded.spec), 0
    while num_checked < NUM_DRAWN:
        schedule = drawn(operators, dice)
        try:
            schedule.validate(operators)
        except InvalidScheduleError:
            continue
        num_checked += 1
        check(loaded, fold_norms(schedule) if dice.random() < 0.5 else schedule, range(3), monkeypatch)
