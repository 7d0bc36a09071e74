"""What the drift compares: the parts of a trace, each with its share of decodes, and the plans that serve them.

Knows nothing of how anything is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autosearch.pipeline import PipelineSchedule
from control_plane.bench.ablation_plan import Load
from control_plane.bench.workload import FIRST_TOKEN_ID, LAST_TOKEN_ID
from control_plane.options import ConfigError
from scheduler.request import NewRequest, SamplingParams
from worker.steady_batch import SteadyMix

SPREAD = 0.5  # of the lengths of a served part's requests around their mean: else all would end together, in waves


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of the trace in which requests are of one kind."""

    share: float  # of a full batch's rows that decode
    load: Load  # means of its requests: each brings its prompt once and its output once

    @classmethod
    def of(cls, share: float, request_tokens: int) -> Part:
        """Requests of so many tokens in all. Raises ConfigError."""
        outputs = round(share * request_tokens)
        if not 0 < outputs < request_tokens:
            raise ConfigError(f"shares={share}: no request of {request_tokens} tokens has prompts and such a share")
        return cls(share, Load(request_tokens - outputs, outputs))

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.share:.0%}"

    @property
    def longest(self) -> int:
        """Tokens that a request of it has at most."""
        return sum(_most(mean) for mean in (self.load.input_len, self.load.output_len)) + 1

    def full_mix(self, rows: int, num_slots: int, num_pages: int, page_size: int) -> SteadyMix:
        """Its full batch. Raises ConfigError where slots or memory keep a smaller one full at most."""
        mix = self.load.steady_mix(rows, num_slots, num_pages, page_size)
        if mix.rows < rows:
            raise ConfigError(
                f"{self.name} decodes of {rows} rows do not fit {num_slots} slots and {num_pages} KV pages of "
                f"{page_size}: raise --max-num-seqs, or lower --request-tokens"
            )
        return mix


class RequestSource:
    """Endless requests of one part; the same ones for the same arguments."""

    def __init__(self, part: Part, prefix: str, vocab_size: int) -> None:
        """prefix: of the request ids."""
        self._load, self._prefix, self._count = part.load, prefix, 0
        self._first, self._last = (min(token, vocab_size - 1) for token in (FIRST_TOKEN_ID, LAST_TOKEN_ID))
        self._random = np.random.default_rng(0)

    def draw(self) -> NewRequest:
        """Greedy, end-of-sequence ids ignored; the first output token comes with the prompt, so there is one more."""
        prompt_len, output_len = self._len(self._load.input_len), self._len(self._load.output_len) + 1
        prompt = self._random.integers(self._first, self._last, prompt_len, endpoint=True)
        self._count += 1
        name = f"{self._prefix}-{self._count}"
        return NewRequest(name, tuple(prompt.tolist()), SamplingParams(max_tokens=output_len, temperature=0.0))

    def _len(self, mean: int) -> int:
        return int(self._random.integers(2 * mean - _most(mean), _most(mean), endpoint=True))


def _most(mean: int) -> int:
    return mean + int(SPREAD * mean)


def fixed_plans(sequential: PipelineSchedule, schedules: Sequence[PipelineSchedule]) -> list[PipelineSchedule]:
    """The sequential schedule and those of its batch size, each once by what it runs. Raises ConfigError."""
    rows = sequential.batch_tokens
    own = [schedule for schedule in schedules if schedule.batch_tokens == rows]
    if not own:
        raise ConfigError(
            f"none of the schedules is for full batches of {rows} rows: nanoflow tune --batch-sizes {rows}"
        )
    found: dict[object, PipelineSchedule] = {}
    for schedule in (sequential, *own):
        found.setdefault(schedule.what_runs, schedule)
    return list(found.values())


def forced(schedule: PipelineSchedule) -> PipelineSchedule:
    """The same for all batches of its size, whatever it was measured for."""
    return replace(schedule, decode_share=None, mean_context=None, prefill_pairs=None)
