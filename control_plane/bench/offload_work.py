"""What is played in simulation: sessions of prompts and settled answers, out of a rounds file or a trace of blocks.

Knows nothing of engines or stores.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from control_plane.bench.offload_rounds import Conversation, Round
from control_plane.options import ConfigError

_VOCAB = 29_900
BLOCK_TOKENS = 512  # that one hash id of a Mooncake trace stands for
_MAX_TIMESTAMP_MS = 10**12  # 30 years
_MAX_BLOCK = 2**31 - 1  # what a token can be
BLOCK_PAGE = 2  # tokens that stand for such a block here: a page of its own


@dataclass(frozen=True, slots=True)
class Turn:
    """One request."""

    wait_s: float  # from the start, or from the end of the turn before
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    num_repeated: int  # leading prompt tokens that some request before has had, its answer included


class Session:
    """Turns that follow each other. They are made when they are wanted, as a long trace would fill the memory."""

    def __init__(self, conversation: Conversation) -> None:
        self.number = conversation.number
        self._conversation = conversation

    @cached_property
    def turns(self) -> Sequence[Turn]:
        """Random tokens; every prompt has what was said before in front."""
        rng = np.random.default_rng((7, self.number))
        turns: list[Turn] = []
        said: list[int] = []
        for each in self._conversation.rounds:
            new = rng.integers(0, _VOCAB, each.prompt_tokens + each.output_tokens, dtype=np.int32).tolist()
            prompt = (*said, *new[: each.prompt_tokens])
            turns.append(Turn(each.wait_s, prompt, tuple(new[each.prompt_tokens :]), len(said)))
            said += new
        return turns


class BlockSession(Session):
    """One request of a trace whose prompts are named by blocks; its answer is in no other's prompt."""

    def __init__(self, number: int, wait_s: float, blocks: Sequence[int], num_repeated: int) -> None:
        self.number = number
        self._wait_s, self._blocks, self._num_repeated = wait_s, blocks, num_repeated

    @cached_property
    def turns(self) -> Sequence[Turn]:
        """Each block is a page of tokens that say its name; one token follows that fills no page."""
        prompt = (*(token for block in self._blocks for token in [block] * BLOCK_PAGE), 0)
        return [Turn(self._wait_s, prompt, (0,), self._num_repeated)]


def sessions_of(conversations: Sequence[Conversation]) -> list[Session]:
    """All of them."""
    return [Session(conversation) for conversation in conversations]


def read_blocks(path: Path, limit: int | None = None) -> list[BlockSession]:
    """A trace as Mooncake's: a JSON object with `timestamp` (ms) and `hash_ids` a line. Raises ConfigError."""
    found = []
    seen: set[int] = set()
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file):
                if number == limit:
                    break
                row = json.loads(line)
                blocks = [int(block) for block in row["hash_ids"]]
                if not all(0 <= block <= _MAX_BLOCK for block in blocks):
                    raise ValueError(f"request {number}: hash_ids must be 0 to {_MAX_BLOCK}")
                if not 0 <= row["timestamp"] <= _MAX_TIMESTAMP_MS:
                    raise ValueError(f"request {number}: timestamp must be 0 to {_MAX_TIMESTAMP_MS}")
                num_leading = next((i for i, block in enumerate(blocks) if block not in seen), len(blocks))
                seen.update(blocks)
                found.append(BlockSession(number, row["timestamp"] / 1000, blocks, num_leading * BLOCK_PAGE))
    except OSError as error:
        raise ConfigError(f"mooncake={path}: {error}") from None
    except (UnicodeDecodeError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"mooncake={path}: timestamp and hash_ids are expected on every line: {error}") from None
    if not found:
        raise ConfigError(f"mooncake={path}: there is no request in it")
    return found


def select(
    conversations: Sequence[Conversation], max_rounds: int | None = None, multi_round_share: float | None = None
) -> list[Conversation]:
    """Conversations cut after so many rounds; or so many of them cut after one that this share has more."""
    chosen = [Conversation(each.number, each.rounds[:max_rounds]) for each in conversations]
    if multi_round_share is None:
        return chosen
    several = [each for each in chosen if len(each.rounds) > 1]
    single = [each for each in chosen if len(each.rounds) == 1]
    wanted = round(multi_round_share * len(chosen))
    if wanted <= len(several):
        cut = random.Random(3).sample(range(len(several)), len(several) - wanted)
        shortened = [Conversation(several[i].number, several[i].rounds[:1]) for i in cut]
        kept = [each for i, each in enumerate(several) if i not in set(cut)]
        return sorted([*single, *shortened, *kept], key=lambda each: each.number)
    num_single = round(len(several) / multi_round_share) - len(several)
    return sorted([*several, *single[:num_single]], key=lambda each: each.number)


def scaled(conversations: Sequence[Conversation], factor: float, most: int) -> list[Conversation]:
    """With all lengths times `factor`, cut off where one would have more than `most` tokens.

    Pauses too, as longer texts are read and written for longer; so the load stays the same.
    """
    made = []
    for conversation in conversations:
        rounds: list[Round] = []
        num_tokens = 0
        for each in conversation.rounds:
            prompt, output = (max(1, round(factor * n)) for n in (each.prompt_tokens, each.output_tokens))
            num_tokens += prompt + output
            if num_tokens > most:
                break
            rounds.append(Round(factor * each.wait_s, prompt, output))
        if rounds:
            made.append(Conversation(conversation.number, tuple(rounds)))
    return made
