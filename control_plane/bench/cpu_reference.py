"""The engine on a CPU beside transformers' generate, in turns in one process: output tokens per second.

The same model folder in fp32, the same random prompts, greedy, without end-of-sequence; the engine runs with its
scheduler, one iteration ahead. Transport, tokenizer and Ray are left out on both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autosearch.specs import ModelSpec
from control_plane.config import EngineConfig
from control_plane.engine import make_loop, open_engine
from scheduler.plan import OutputBatch
from scheduler.request import NewRequest, SamplingParams

STEP_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured."""

    model_dir: Path
    batch_sizes: tuple[int, ...] = (1, 16)
    input_len: int = 32
    output_len: int = 64
    repeats: int = 3
    engine_threads: int | None = None  # None: as when serving
    transformers_threads: int | None = None  # None: torch's choice


class _Engine:
    """Scheduler, loop and worker in this process."""

    def __init__(self, setting: Setting) -> None:
        # No prefix hits: transformers has none either.
        config = EngineConfig(
            setting.model_dir,
            device="cpu",
            enable_prefix_caching=False,
            num_threads=setting.engine_threads,
            step_timeout=STEP_TIMEOUT_S,
        )
        self._executor = open_engine(config, lambda what, share: None)
        self.num_threads = torch.get_num_threads()
        self.vocab_size = ModelSpec.from_folder(setting.model_dir).vocab_size
        self._loop = make_loop(config, self._executor, self._take)
        self._thread = threading.Thread(target=self._loop.run, daemon=True)
        self._thread.start()
        self._ended = threading.Semaphore(0)
        self._num_tokens = 0
        self._num_requests = 0
        self.generate([[1]], 1)

    def generate(self, prompts: list[list[int]], output_len: int) -> int:
        """Run the prompts together; the number of output tokens."""
        self._num_tokens = 0
        first = self._num_requests
        self._num_requests += len(prompts)
        sampling = SamplingParams(max_tokens=output_len, temperature=0.0)
        self._loop.submit([NewRequest(str(first + i), tuple(prompt), sampling) for i, prompt in enumerate(prompts)])
        for _ in prompts:
            if not self._ended.acquire(timeout=STEP_TIMEOUT_S * 10):
                raise TimeoutError("the engine did not finish")
        return self._num_tokens

    def close(self) -> None:
        self._loop.stop()
        self._thread.join()
        self._executor.close()

    def _take(self, batch: OutputBatch) -> None:
        self._num_tokens += len(batch.token_ids)
        for _ in batch.ends:
            self._ended.release()


class _Reference:
    """transformers' model and generate()."""

    def __init__(self, setting: Setting) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(setting.model_dir, dtype=torch.float32).eval()
        torch.set_num_threads(setting.transformers_threads or len(os.sched_getaffinity(0)))
        self._model.generation_config.eos_token_id = None

    def generate(self, prompts: list[list[int]], output_len: int) -> int:
        """Run the prompts as one batch; the number of output tokens."""
        tokens = torch.tensor(prompts)
        with torch.inference_mode():
            output = self._model.generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=output_len, do_sample=False
            )
        return int(output.numel() - tokens.numel())


def _rate(generate: Callable[[list[list[int]], int], int], prompts: list[list[int]], output_len: int) -> float:
    start_s = time.perf_counter()
    num_tokens = generate(prompts, output_len)
    elapsed_s = time.perf_counter() - start_s
    if num_tokens != len(prompts) * output_len:
        raise RuntimeError(f"{num_tokens} tokens came out instead of {len(prompts) * output_len}")
    return num_tokens / elapsed_s


def run(setting: Setting) -> dict[str, Any]:
    """Measure both sides in the order A B B A; rates are output tokens per second, prefill included."""
    # The engine first: its thread keeps the number of threads that it finds.
    engine, reference = _Engine(setting), _Reference(setting)
    draw = random.Random(0)

    def prompts_for(batch_size: int) -> list[list[int]]:
        return [draw.choices(range(100, engine.vocab_size), k=setting.input_len) for _ in range(batch_size)]

    results: dict[str, Any] = {}
    try:
        for batch_size in setting.batch_sizes:
            rates: dict[str, list[float]] = {"engine": [], "transformers": []}
            sides = [("engine", engine.generate), ("transformers", reference.generate)]
            for _, generate in sides:
                generate(prompts_for(batch_size), 2)
            for repeat in range(setting.repeats):
                prompts = prompts_for(batch_size)
                for name, generate in sides if repeat % 2 == 0 else reversed(sides):
                    rates[name].append(_rate(generate, prompts, setting.output_len))
            results[f"batch_{batch_size}"] = _summary(rates)
    finally:
        engine.close()
    return {
        "benchmark": "cpu_reference",
        "model": setting.model_dir.name,
        "dtype": "float32",
        "input_len": setting.input_len,
        "output_len": setting.output_len,
        "repeats": setting.repeats,
        "engine_threads": engine.num_threads,
        "transformers_threads": torch.get_num_threads(),
        "cpu": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        **results,
    }


def _summary(rates: dict[str, list[float]]) -> dict[str, Any]:
    summary: dict[str, Any] = {
        f"{name}_tokens_per_s": {
            "min": round(min(values), 2),
            "median": round(statistics.median(values), 2),
            "max": round(max(values), 2),
        }
        for name, values in rates.items()
    }
    ratio = statistics.median(rates["engine"]) / statistics.median(rates["transformers"])
    return {**summary, "engine_over_transformers": round(ratio, 3)}


def main() -> None:
    """`python -m control_plane.bench.cpu_reference MODEL_DIR`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engine-threads", type=int)
    parser.add_argument("--transformers-threads", type=int)
    args = parser.parse_args()
    setting = Setting(
        model_dir=args.model_dir,
        batch_sizes=tuple(args.batch_sizes),
        input_len=args.input_len,
        output_len=args.output_len,
        repeats=args.repeats,
        engine_threads=args.engine_threads,
        transformers_threads=args.transformers_threads,
    )
    print(setting)
    print(json.dumps(run(setting)))


if __name__ == "__main__":
    main()
