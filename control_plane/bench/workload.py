"""The work of the throughput benchmarks, fixed so that figures of different days and engines can stand side by side.

Prompts of random token ids, greedy, end-of-sequence ids ignored. Knows nothing of engines or of how they are timed.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from control_plane.options import ConfigError
from scheduler.request import NewRequest, SamplingParams

FIRST_TOKEN_ID, LAST_TOKEN_ID = 100, 29_999  # prompts are drawn from these, or from what the vocabulary has of them
STEADY = (0.3, 0.7)  # the steady middle, as shares of the run's time
_MOST_TOKENS = 10**8  # prompt tokens of all requests: drawn as Python's numbers they take gigabytes already
_MAX_PROMPT, _MAX_OUTPUT, _MIN_LEN = 2048, 1024, 4  # rows of a lengths file outside of these are left out


@dataclass(frozen=True, slots=True)
class Workload:
    """What is submitted at t = 0."""

    num_prompts: int
    input_len: int  # prompt tokens of each request
    output_len: int  # output tokens of each request
    lengths_file: Path | None = None  # CSV with columns of prompt and output tokens, used instead of the two lengths

    def lengths(self) -> list[tuple[int, int]]:
        """Prompt and output tokens of each request. Raises ConfigError."""
        if min(self.num_prompts, self.input_len, self.output_len) < 1:
            raise ConfigError("num-prompts, input-len and output-len must be at least 1")
        if self.lengths_file is None:
            if self.num_prompts * self.input_len > _MOST_TOKENS:
                raise ConfigError(
                    f"num-prompts times input-len is {self.num_prompts * self.input_len}: lower them, "
                    f"{_MOST_TOKENS} is the most"
                )
            return [(self.input_len, self.output_len)] * self.num_prompts
        found = [
            (prompt, output)
            for prompt, output in _read_lengths(self.lengths_file)
            if _MIN_LEN <= prompt <= _MAX_PROMPT and _MIN_LEN <= output <= _MAX_OUTPUT
        ]
        if len(found) < self.num_prompts:
            raise ConfigError(
                f"{self.lengths_file} has {len(found)} rows of {_MIN_LEN} to {_MAX_PROMPT} prompt and {_MIN_LEN} to "
                f"{_MAX_OUTPUT} output tokens, fewer than --num-prompts {self.num_prompts}"
            )
        return random.Random(1).sample(found, self.num_prompts)

    def requests(self, vocab_size: int) -> list[NewRequest]:
        """The same requests for the same workload and vocabulary. Raises ConfigError."""
        return draw_requests(self.lengths(), vocab_size)

    def __str__(self) -> str:
        if self.lengths_file is not None:
            return f"{self.num_prompts} requests with lengths of {self.lengths_file.name}"
        return f"{self.num_prompts} requests of {self.input_len} in and {self.output_len} out"


def _read_lengths(path: Path) -> list[tuple[int, int]]:
    """The last two columns of each row that has numbers there."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [row[-2:] for row in csv.reader(file) if len(row) >= 2]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"lengths-file={path}: cannot be read: {error}") from None
    return [(int(prompt), int(output)) for prompt, output in rows if prompt.isdecimal() and output.isdecimal()]


def draw_requests(lengths: Iterable[tuple[int, int]], vocab_size: int) -> list[NewRequest]:
    """A request for each (prompt, output) length in tokens; the same for the same arguments."""
    draw = random.Random(0)
    first, last = min(FIRST_TOKEN_ID, vocab_size - 1), min(LAST_TOKEN_ID, vocab_size - 1)
    return [
        NewRequest(
            f"request-{number}",
            tuple(draw.randint(first, last) for _ in range(prompt_len)),
            SamplingParams(max_tokens=output_len, temperature=0.0),
        )
        for number, (prompt_len, output_len) in enumerate(lengths)
    ]
