"""Conversations for `bench offload`, and the program that made the committed file of them.

    python -m control_plane.bench.offload_rounds control_plane/bench/data/rounds.csv

The file is LMSYS-like. Lengths of a round are drawn from the quantiles of LMSYS-Chat-1M (100,000 rows as NanoFlow's
authors published them), interpolated between those in `PROMPT_QUANTILES` and `OUTPUT_QUANTILES`; the means come out as
107 prompt and 221 output tokens (the paper says 102 and 222). The number of rounds is geometric with mean 3.3: someone
who has got an answer asks on with the same chance each time, the least that can be assumed when only a mean is known.
Counted with the decodes, such conversations need 3.3 times as many tokens without a cache as with an ideal one, which
goes with the paper's figure of 3.02 times less compute on multi-round conversations; if all had three or four rounds it
would be 2.2. Conversations begin as a Poisson process of 20 a second, 66 requests a second in all: a load that one H200
carries with an 8B model. Pauses between an answer and the next prompt are lognormal with a median of 20 s, the time in
which an answer can be skimmed and a prompt typed. Knows nothing of engines or stores.
"""

from __future__ import annotations

import argparse
import csv
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from control_plane.options import ConfigError

ROUNDS_FILE = Path(__file__).parent / "data" / "rounds.csv"
SEED = 20261130
NUM_CONVERSATIONS = 1000
MEAN_ROUNDS = 3.3
ARRIVALS_PER_S = 20.0
MEDIAN_PAUSE_S, PAUSE_SIGMA = 20.0, 1.0
MAX_TOKENS = 8192  # of a conversation: one that would grow longer ends before
_MOST_READ = 1 << 20  # tokens of a conversation in a file: no model has more, and all of them are made

_SHARES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
PROMPT_QUANTILES = (2, 3, 5, 12, 28, 82, 302, 432, 750, 3894)  # tokens at these shares
OUTPUT_QUANTILES = (2, 8, 15, 39, 140, 339, 512, 520, 850, 4819)
_COLUMNS = ("conversation", "round", "wait_s", "prompt_tokens", "output_tokens")


@dataclass(frozen=True, slots=True)
class Round:
    """One prompt and its answer."""

    wait_s: float  # of a first round from the start of the play, else from the end of the answer before
    prompt_tokens: int  # new ones: what was said before stands in front of them
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """Rounds in order; each repeats all tokens of those before."""

    number: int
    rounds: tuple[Round, ...]

    @property
    def num_tokens(self) -> int:
        """After the last answer."""
        return sum(each.prompt_tokens + each.output_tokens for each in self.rounds)


def make(num_conversations: int = NUM_CONVERSATIONS, seed: int = SEED) -> list[Conversation]:
    """The same conversations for the same arguments."""
    rng = random.Random(seed)
    nums_rounds = _geometric(num_conversations, MEAN_ROUNDS)
    rng.shuffle(nums_rounds)
    made, now = [], 0.0
    for number, num_rounds in enumerate(nums_rounds):
        now += rng.expovariate(ARRIVALS_PER_S)
        rounds: list[Round] = []
        num_tokens = 0
        for index in range(num_rounds):
            wait_s = now if index == 0 else rng.lognormvariate(math.log(MEDIAN_PAUSE_S), PAUSE_SIGMA)
            lengths = _draw(PROMPT_QUANTILES, rng), _draw(OUTPUT_QUANTILES, rng)
            num_tokens += sum(lengths)
            if num_tokens > MAX_TOKENS:
                break
            rounds.append(Round(round(wait_s, 2), *lengths))
        made.append(Conversation(number, tuple(rounds)))
    return made


def _geometric(count: int, mean: float) -> list[int]:
    """Values at evenly spaced shares of the distribution, so that a small sample has its mean and its tail."""
    stop = 1.0 / mean
    shares = ((index + 0.5) / count for index in range(count))
    return [1 + int(math.log(1.0 - share) / math.log(1.0 - stop)) for share in shares]


def _draw(quantiles: Sequence[int], rng: random.Random) -> int:
    """A length, by geometric interpolation between quantiles."""
    share = rng.random()
    above = next(index for index, each in enumerate(_SHARES) if each > share)
    part = (share - _SHARES[above - 1]) / (_SHARES[above] - _SHARES[above - 1])
    low, high = quantiles[above - 1], quantiles[above]
    return max(1, round(low * math.pow(high / low, part)))


def write(path: Path, conversations: Iterable[Conversation], made_by: str) -> None:
    """As CSV, one round a line, after a line that says where it comes from."""
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(f"# {made_by}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_COLUMNS)
        for conversation in conversations:
            for number, each in enumerate(conversation.rounds):
                writer.writerow((conversation.number, number, each.wait_s, each.prompt_tokens, each.output_tokens))


def read(path: Path) -> list[Conversation]:
    """Raises ConfigError for a file that cannot be read or is not of this kind."""
    found: dict[int, list[Round]] = {}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(line for line in file if not line.startswith("#")):
                rounds = found.setdefault(int(row["conversation"]), [])
                each = Round(float(row["wait_s"]), int(row["prompt_tokens"]), int(row["output_tokens"]))
                if int(row["round"]) != len(rounds) or min(each.prompt_tokens, each.output_tokens) < 1:
                    raise ValueError(f"round {row['round']} of conversation {row['conversation']} is out of place")
                if not 0 <= each.wait_s < math.inf:
                    raise ValueError(f"conversation {row['conversation']} waits {row['wait_s']} s")
                if int(row["conversation"]) < 0:
                    raise ValueError(f"conversation {row['conversation']} has a negative number")
                rounds.append(each)
                if sum(each.prompt_tokens + each.output_tokens for each in rounds) > _MOST_READ:
                    raise ValueError(f"conversation {row['conversation']} has more than {_MOST_READ} tokens")
    except (OSError, UnicodeDecodeError, csv.Error, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"rounds={path}: columns {', '.join(_COLUMNS)} are expected: {error}") from None
    if not found:
        raise ConfigError(f"rounds={path}: there is no conversation in it")
    return [Conversation(number, tuple(rounds)) for number, rounds in found.items()]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line of `python -m control_plane.bench.offload_rounds`."""
    parser = argparse.ArgumentParser(description="Make a file of conversations for `nanoflow bench offload`.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--num-conversations", type=int, default=NUM_CONVERSATIONS)
    parser.add_argument("--seed", type=int, default=SEED)
    given = parser.parse_args(arguments)
    made_by = (
        f"made by python -m control_plane.bench.offload_rounds FILE --num-conversations {given.num_conversations} "
        f"--seed {given.seed}"
    )
    write(given.file, make(given.num_conversations, given.seed), made_by)


if __name__ == "__main__":
    main()
