"""Plays conversations on a real engine: each prompt is all that was said, the engine's own answers included.

Prompts come from the clock or, with `at_once`, from so many conversations that are kept going. What came when is kept
by request. Knows nothing of stores.
"""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from control_plane.bench.offload_rounds import Conversation
from control_plane.bench.workload import FIRST_TOKEN_ID, LAST_TOKEN_ID
from scheduler.loop import EngineLoop
from scheduler.plan import OutputBatch, RequestEnd
from scheduler.ports import Executor, PrefixStore
from scheduler.request import NewRequest, SamplingParams
from scheduler.scheduler import Scheduler
from scheduler.scheduler_config import SchedulerConfig

_IDLE_S = 30.0  # for moves to end after the last request
_POLL_S = 2e-3


@dataclass(slots=True)
class Answer:
    """One request: when it was asked and what came."""

    prompt_len: int
    asked_s: float
    token_ids: list[int] = field(default_factory=list)
    first_s: float = 0.0
    last_s: float = 0.0
    end: RequestEnd | None = None

    @property
    def ttft_s(self) -> float:
        """From asking to the first token."""
        return self.first_s - self.asked_s

    @property
    def latency_s(self) -> float:
        """From asking to the last token."""
        return self.last_s - self.asked_s


class Session:
    """An engine's loop in a thread, to be asked and listened to. Use it as a context; the executor is not closed."""

    def __init__(
        self, executor: Executor, config: SchedulerConfig, store: PrefixStore | None, step_timeout_s: float
    ) -> None:
        self.answers: dict[str, Answer] = {}
        self.num_computed = 0  # prompt tokens, recomputed ones too
        self.num_dropped = 0  # pages that the store was not given
        self._news = threading.Condition()
        self._ended: list[str] = []
        self._failure: BaseException | None = None
        self._scheduler = Scheduler(config, executor.capacity, store)
        self._loop = EngineLoop(self._scheduler, executor, self._take, step_timeout_s)
        self._thread = threading.Thread(target=self._run, name="engine")

    def __enter__(self) -> Session:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.stop()
        self._thread.join()

    def ask(self, request_id: str, prompt: Sequence[int], num_tokens: int) -> None:
        """Hand in a request, greedy and of fixed length."""
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0)
        self.answers[request_id] = Answer(len(prompt), time.perf_counter())
        self._loop.submit([NewRequest(request_id, tuple(prompt), sampling)])

    def take_ended(self, wait_s: float | None) -> list[str]:
        """Requests that have ended since the last call; waits so long for a first one. Raises RuntimeError."""
        with self._news:
            self._news.wait_for(lambda: self._ended or self._failure, wait_s)
            ended, self._ended = self._ended, []
            if self._failure is not None:
                raise RuntimeError(f"the engine stopped: {self._failure}") from self._failure
        for request_id in ended:
            end = self.answers[request_id].end
            if end is not None and end.finish_reason != "length":
                raise RuntimeError(f"{request_id} did not end as it should: {end.error or end.finish_reason}")
        return ended

    def answer(self, request_id: str, prompt: Sequence[int], num_tokens: int) -> Answer:
        """Ask, and wait for the end: nothing else may be asked meanwhile."""
        self.ask(request_id, prompt, num_tokens)
        while request_id not in self.take_ended(None):
            pass
        return self.answers[request_id]

    def settle(self) -> None:
        """Wait until the pages that are on their way have arrived. Raises TimeoutError."""
        deadline = time.monotonic() + _IDLE_S
        while not self._scheduler.is_idle:
            if time.monotonic() > deadline:
                raise TimeoutError(f"pages are still being moved after {_IDLE_S} s")
            time.sleep(_POLL_S)

    def forget(self) -> int:
        """Empty the engine's own prefix cache."""
        return self._loop.flush_cache()

    def _run(self) -> None:
        try:
            self._loop.run()
        except Exception as error:
            with self._news:
                self._failure = error
                self._news.notify()

    def _take(self, batch: OutputBatch) -> None:
        now = time.perf_counter()
        for request_id, token_id in zip(batch.request_ids, batch.token_ids.tolist()):
            answer = self.answers[request_id]
            if not answer.token_ids:
                answer.first_s = now
            answer.token_ids.append(token_id)
            answer.last_s = now
        if batch.stats is not None:
            self.num_computed += batch.stats.num_prompt_tokens
            self.num_dropped += batch.stats.moves.num_dropped
        for end in batch.ends:
            self.answers[end.request_id].end = end
        if batch.ends:
            with self._news:
                self._ended += [end.request_id for end in batch.ends]
                self._news.notify()


@dataclass(frozen=True, slots=True)
class Pace:
    """When prompts come."""

    at_once: int | None = None  # conversations in play, pauses included; None: they begin when the file says
    time_scale: float = 1.0  # of arrivals and pauses


def play(session: Session, conversations: Sequence[Conversation], pace: Pace, vocab_size: int) -> float:
    """Play them all to the end; seconds that it took. Raises RuntimeError where a request fails."""
    player = _Player(session, conversations, pace, vocab_size)
    began = time.perf_counter()
    player.run()
    took_s = time.perf_counter() - began
    session.settle()
    return took_s


class _Player:
    def __init__(self, session: Session, conversations: Sequence[Conversation], pace: Pace, vocab_size: int) -> None:
        self._session, self._pace, self._vocab_size = session, pace, vocab_size
        self._by_number = {each.number: each for each in conversations}
        self._said: dict[int, list[int]] = {number: [] for number in self._by_number}
        self._due: list[tuple[float, int, int]] = []  # heap of when, conversation, round
        self._to_begin = list(self._by_number)[::-1]
        self._num_open = len(conversations)

    def run(self) -> None:
        began = time.perf_counter()
        if self._pace.at_once is None:
            for number in self._to_begin:
                wait_s = self._by_number[number].rounds[0].wait_s * self._pace.time_scale
                heapq.heappush(self._due, (began + wait_s, number, 0))
            self._to_begin.clear()
        else:
            for _ in range(min(self._pace.at_once, len(self._to_begin))):
                heapq.heappush(self._due, (began, self._to_begin.pop(), 0))
        while self._num_open:
            now = time.perf_counter()
            while self._due and self._due[0][0] <= now:
                _, number, index = heapq.heappop(self._due)
                self._ask(number, index)
            nap_s = max(0.0, self._due[0][0] - time.perf_counter()) if self._due else None
            for request_id in self._session.take_ended(nap_s):
                self._end(*map(int, request_id.split("-")))

    def _ask(self, number: int, index: int) -> None:
        each, said = self._by_number[number].rounds[index], self._said[number]
        said += draw_prompt(each.prompt_tokens, self._vocab_size, f"{number}-{index}")
        self._session.ask(f"{number}-{index}", said, each.output_tokens)

    def _end(self, number: int, index: int) -> None:
        now, rounds = time.perf_counter(), self._by_number[number].rounds
        self._said[number] += self._session.answers[f"{number}-{index}"].token_ids
        if index + 1 < len(rounds):
            pause_s = rounds[index + 1].wait_s * self._pace.time_scale
            heapq.heappush(self._due, (now + pause_s, number, index + 1))
            return
        self._num_open -= 1
        if self._to_begin:
            heapq.heappush(self._due, (now, self._to_begin.pop(), 0))


def draw_prompt(num_tokens: int, vocab_size: int, seed: str) -> list[int]:
    """Random token ids, the same for the same seed."""
    rng = random.Random(seed)
    first, last = min(FIRST_TOKEN_ID, vocab_size - 1), min(LAST_TOKEN_ID, vocab_size - 1)
    return [rng.randint(first, last) for _ in range(num_tokens)]
