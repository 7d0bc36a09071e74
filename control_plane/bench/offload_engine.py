"""`bench offload engine`: conversations on a real engine with a KV store and without, in turns.

Two parts. *Rounds*: the committed conversations, each turn with an empty store and an empty engine: times to the first
and last token, prompt tokens computed, cached tokens by tier, whether the outputs are the same. *Return*: one long
conversation that comes back after the engine has forgotten it: time to the first token from the store's CPU tier (and
from SSD after the store was restarted, where it has one), beside computing it again and beside the engine's own
cache. Knows nothing of Ray or transport.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import torch

from autosearch.specs import ModelSpec
from control_plane.bench.offload_options import EngineOptions
from control_plane.bench.offload_player import Pace, Session, draw_prompt, play
from control_plane.bench.offload_report import (
    AGAIN,
    WITH,
    WITHOUT,
    Returns,
    Turn,
    answers_of,
    compare,
    return_row,
    show,
    turn_row,
)
from control_plane.bench.offload_rounds import Conversation, read
from control_plane.bench.offload_store_process import StoreProcess, StoreSize
from control_plane.bench.offload_work import scaled
from control_plane.config import EngineConfig
from control_plane.engine import device_of, open_engine, scheduler_config, single_rank_config
from control_plane.options import ConfigError
from control_plane.progress import ProgressLine
from scheduler.ports import Executor
from worker.backend import open_prefix_store
from worker.store_client import open_store

RETURN_OUTPUT = 16  # tokens of the answers in the return part
_CHECK_TRIES, _CHECK_PAUSE_S = 3, 0.25
_RECONNECT_TRIES, _RECONNECT_PAUSE_S = 40, 0.25
RETURN_PROMPT = 64  # new tokens with which a conversation returns


class Bench:
    """One executor, one store."""

    def __init__(self, engine: EngineConfig, options: EngineOptions, store: StoreProcess | None) -> None:
        """Load the model. Raises what the worker raises for one that it cannot load."""
        self._engine, self._options, self._store = engine, options, store
        self.spec = ModelSpec.from_folder(engine.model)
        self._num_asked = 0
        line = ProgressLine()
        self.executor: Executor = open_engine(engine, line.share)
        line.done()

    def close(self) -> None:
        """Free the executor."""
        self.executor.close()

    @contextmanager
    def session(self, label: str) -> Iterator[Session]:
        """A fresh scheduler, with an empty store or without any."""
        config, worker = scheduler_config(self._engine), single_rank_config(self._engine)
        prefixes = None
        if label == WITH:
            with closing(open_store(worker)) as client:
                if not client.flush():
                    raise ConfigError(f"kv-store={self._engine.kv_store}: there is no store, or it does not answer")
            prefixes = open_prefix_store(worker)
        try:
            with Session(self.executor, config, prefixes, self._engine.step_timeout) as session:
                yield session
                session.settle()
        finally:
            if prefixes is not None:
                prefixes.close()

    def play(self, label: str, conversations: Sequence[Conversation]) -> Turn:
        """The rounds, once."""
        pace = Pace(self._options.at_once, self._options.time_scale)
        with self.session(label) as session:
            total_s = play(session, conversations, pace, self.spec.vocab_size)
        return Turn(label, session.answers, session.num_computed, session.num_dropped, total_s)

    def returns(self, found: Returns, label: str, first: int, count: int) -> None:
        """A long conversation comes back, `count` times, each time another one."""
        tokens = self._options.return_len
        with self.session(label) as session:
            for number in range(first, first + count):
                prompt = draw_prompt(tokens, self.spec.vocab_size, f"return-{number}")
                prompt += session.answer(f"first-{label}-{number}", prompt, RETURN_OUTPUT).token_ids
                session.settle()
                if label == WITHOUT:
                    session.forget()
                    self._come_back(session, found, AGAIN, number, prompt)
                    continue
                self._come_back(session, found, "engine's own cache", number, prompt)
                session.forget()
                self._come_back(session, found, "store, CPU", number, prompt)
                if self._store is not None and self._options.ssd_dir is not None:
                    self._store.restart()
                    self._reconnect(session)
                    session.forget()
                    self._come_back(session, found, "store, SSD", number, prompt)

    def _reconnect(self, session: Session) -> None:
        """Ask short things until one is loaded: the store is in use again after its restart. Raises TimeoutError."""
        prompt = draw_prompt(2 * self.executor.capacity.page_size + 1, self.spec.vocab_size, "short")
        for _ in range(_RECONNECT_TRIES):
            session.forget()
            self._num_asked += 1
            end = session.answer(f"short-{self._num_asked}", prompt, 1).end
            session.settle()
            if end is not None and end.num_cpu_cached_tokens:
                return
            time.sleep(_RECONNECT_PAUSE_S)
        raise TimeoutError("the restarted store is not used again")

    def _come_back(self, session: Session, found: Returns, label: str, number: int, said: Sequence[int]) -> None:
        """With a prompt of its own: only what was said can be cached."""
        name = f"{label}-{number}"
        new = draw_prompt(RETURN_PROMPT, self.spec.vocab_size, name)
        found.add(label, session.answer(name, [*said, *new], RETURN_OUTPUT))
        session.settle()


def run(engine: EngineConfig, options: EngineOptions) -> dict[str, Any]:
    """Measure; prints tables and, last, one JSON line, which is returned.

    Raises ConfigError, and what open_engine does.
    """
    if options.plot is not None:
        from control_plane.bench.offload_plot import check_writable

        check_writable(options.plot)
    engine = _fitted(engine, options)
    store = None
    if engine.kv_store is None:
        store = StoreProcess(StoreSize(options.cpu_bytes, options.ssd_dir, options.ssd_bytes))
        engine = replace(engine, kv_store=store.address)
    try:
        _check_answers(engine)
        with closing(Bench(engine, options, store)) as bench:
            result = _measure(bench, engine, options)
    finally:
        if store is not None:
            store.close()
    print(json.dumps(result), flush=True)
    return result


def _check_answers(engine: EngineConfig) -> None:
    """Raise ConfigError where the store does not: before a model is loaded."""
    with closing(open_store(single_rank_config(engine))) as client:
        for _ in range(_CHECK_TRIES):
            if client.stats() is not None:
                return
            time.sleep(_CHECK_PAUSE_S)
    raise ConfigError(f"kv-store={engine.kv_store}: there is no store, or it does not answer")


def _measure(bench: Bench, engine: EngineConfig, options: EngineOptions) -> dict[str, Any]:
    conversations = _conversations(options, bench.executor.capacity.max_model_len)
    setting = _setting(bench, engine, options, conversations)
    print(f"offload, on an engine: {setting}", file=sys.stderr, flush=True)
    turns: list[Turn] = []
    for repeat in range(options.repeats):
        for label in (WITHOUT, WITH) if repeat % 2 == 0 else (WITH, WITHOUT):
            turns.append(bench.play(label, conversations))
            print(f"  {label}: {turns[-1].total_s:.1f} s", file=sys.stderr, flush=True)
    returns = Returns()
    for number in range(options.return_repeats):
        for label in (WITHOUT, WITH) if number % 2 == 0 else (WITH, WITHOUT):
            bench.returns(returns, label, number, 1)
    rows = [turn_row(label, turns) for label in (WITHOUT, WITH)] if turns else []
    back = [return_row(label, returns) for label in sorted(returns.ttft_s)]
    show(rows, back, options.return_len)
    if options.plot is not None and turns:
        from control_plane.bench.offload_plot import save_times

        times = {label: [answer.ttft_s for answer in answers_of(label, turns)] for label in (WITHOUT, WITH)}
        title = f"{setting['model']}: {len(conversations)} conversations on {setting['device']}"
        save_times(times, options.plot, title)
    return {**setting, "rounds": rows, "outputs": compare(turns), "returns": back}


def _fitted(engine: EngineConfig, options: EngineOptions) -> EngineConfig:
    """With a KV cache that does not hold much more than what runs, where the user did not say how large it is."""
    if not engine.enable_prefix_caching:
        raise ConfigError("a KV store needs prefix caching: leave enable-prefix-caching on")
    if engine.num_gpu_blocks_override or engine.kv_cache_memory_bytes:
        return engine
    page_size = single_rank_config(engine).page_size
    tokens = max(options.return_len + 512, 512 * (options.at_once or 64), engine.max_model_len or 0)
    return replace(engine, num_gpu_blocks_override=-(-tokens // page_size))


def _conversations(options: EngineOptions, max_model_len: int) -> list[Conversation]:
    longest = options.return_len + 2 * RETURN_OUTPUT + RETURN_PROMPT
    if options.return_repeats and max_model_len < longest:
        raise ConfigError(
            f"return-len is {options.return_len}, and one request can have {max_model_len} tokens: lower it, "
            "or raise --num-gpu-blocks-override or --max-model-len"
        )
    return scaled(read(options.rounds)[: options.limit], options.length_scale, max_model_len - 1)


def _setting(
    bench: Bench, engine: EngineConfig, options: EngineOptions, conversations: Sequence[Conversation]
) -> dict[str, Any]:
    capacity = bench.executor.capacity
    on_gpu = device_of(engine) == "cuda"
    return {
        "benchmark": "offload-engine",
        "model": engine.model.resolve().name,
        "load_format": engine.load_format,
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
        "num_cpus": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "work": options.rounds.name,
        "num_conversations": len(conversations),
        "num_requests": sum(len(each.rounds) for each in conversations),
        "length_scale": options.length_scale,
        "at_once": options.at_once,
        "time_scale": options.time_scale,
        "repeats": options.repeats,
        "batch_tokens": capacity.max_batch_tokens,
        "max_slots": capacity.max_slots,
        "num_pages": capacity.num_pages,
        "page_size": capacity.page_size,
        "cpu_bytes": options.cpu_bytes,
        "ssd_bytes": options.ssd_bytes if options.ssd_dir else 0,
        "kv_store_policy": engine.kv_store_policy,
        "return_len": options.return_len,
    }
