"""`nanoflow generate`: one answer in this process, through the same front end and engine as a server's.

Knows nothing of Ray or transport.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from dataclasses import dataclass

from control_plane.config import EngineConfig
from control_plane.engine import model_info, start_local_instance
from control_plane.frontend import Frontend, FrontendConfig
from control_plane.generation import Delta, Final, GenerationRequest, TextPrompt, TokenPrompt
from control_plane.intake import Intake
from control_plane.metrics import Metrics
from control_plane.options import ConfigError
from control_plane.progress import ProgressLine
from control_plane.validation import Limits


@dataclass(frozen=True, slots=True)
class Question:
    """The command's own flags, as given."""

    prompt: str | None
    token_ids: str | None  # "1,2,3"
    max_tokens: int | None
    temperature: float | None
    ignore_eos: bool

    def request(self) -> GenerationRequest:
        """Raises ConfigError where the flags contradict each other or do not parse."""
        if (self.prompt is None) == (self.token_ids is None):
            raise ConfigError("give either --prompt or --token-ids")
        return GenerationRequest(
            prompt=TextPrompt(self.prompt)
            if self.prompt is not None
            else TokenPrompt(_parse_ids(self.token_ids or "")),
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            ignore_eos=self.ignore_eos,
        )


async def run(engine: EngineConfig, question: Question, as_json: bool) -> int:
    """Print the answer as it comes, with as_json one JSON object instead; the exit code.

    Raises ApiError or ConfigError where the request cannot be run.
    """
    request = question.request()
    limits = Limits()
    intake = Intake.from_folder(engine.model, model_info(engine), limits)
    if isinstance(request.prompt, TextPrompt) and intake.tokenizer is None:
        raise ConfigError(f"{engine.model} has no tokenizer.json: give --token-ids instead of --prompt")
    began = time.perf_counter()
    show = ProgressLine()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, _leave, show)
    try:
        instance = await start_local_instance(engine, show.share)
    finally:
        show.done()
    load_s = time.perf_counter() - began
    capacity = instance.capacity
    metrics = Metrics(intake.model.name, capacity.max_model_len, capacity.max_batch_tokens)
    frontend = Frontend(intake, metrics, FrontendConfig(reattach_timeout_s=0.0))  # nobody brings another instance
    try:
        frontend.attach(instance)
        text, token_ids, final = await _read(frontend, request, show=not as_json)
    finally:
        await frontend.close()
        await instance.close()
    if as_json:
        print(json.dumps(_summary(text, token_ids, final, load_s)))
    return 0 if final.error is None else 1


def _leave(show: ProgressLine) -> None:
    """On Ctrl-C: at once, for the thread that loads the model cannot be interrupted, and nothing is left behind."""
    show.done()
    os._exit(128 + signal.SIGINT)


async def _read(frontend: Frontend, request: GenerationRequest, show: bool) -> tuple[str, list[int], Final]:
    pieces: list[str] = []
    token_ids: list[int] = []
    final = None
    async with await frontend.generate(request) as reader:
        async for event in reader:
            if isinstance(event, Delta):
                pieces.append(event.text)
                token_ids += event.token_ids
                if show:
                    print(event.text, end="", flush=True)
            else:
                final = event
    assert final is not None, "every stream ends with a Final"
    if show:
        print()
        print(_footer(final), file=sys.stderr)
    return "".join(pieces), token_ids, final


def _footer(final: Final) -> str:
    if final.error is not None:
        return f"nanoflow: {final.error.message}"
    rate = final.num_output_tokens / max(final.total_s, 1e-9)
    return f"[{final.num_output_tokens} tokens, {final.finish_reason}, {final.total_s:.2f} s, {rate:.1f} tokens/s]"


def _summary(text: str, token_ids: list[int], final: Final, load_s: float) -> dict[str, object]:
    return {
        "text": text,
        "token_ids": token_ids,
        "finish_reason": str(final.finish_reason),
        "error": None if final.error is None else final.error.message,
        "matched_stop_token": final.matched_stop_token,
        "prompt_tokens": final.num_prompt_tokens,
        "completion_tokens": final.num_output_tokens,
        "cached_tokens": final.num_cached_tokens,
        "cpu_cached_tokens": final.num_cpu_cached_tokens,
        "ssd_cached_tokens": final.num_ssd_cached_tokens,
        "seed": final.seed,
        "load_s": round(load_s, 4),
        "ttft_s": None if final.ttft_s is None else round(final.ttft_s, 4),
        "total_s": round(final.total_s, 4),
        "tokens_per_s": round(final.num_output_tokens / max(final.total_s, 1e-9), 2),
    }


def _parse_ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"--token-ids={text}: must be whole numbers with commas between, as 1,2,3") from None
