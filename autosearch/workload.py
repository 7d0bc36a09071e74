"""What one iteration of constant size works on: rows, and how much context their attention reads.

Knows nothing of models or devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autosearch.errors import AutosearchError

BATCH_STEP = 128  # fitted batch sizes are multiples of it: whole tiles of the GEMM kernels
ROW_TILE = 64  # rows that attention kernels take at a time; estimates of row counts are whole tiles


_LARGEST_BATCH, _LONGEST, _LARGEST_SUM = 10**9, 1e9, 1e18  # far beyond what any machine holds


class WorkloadError(AutosearchError):
    """Numbers that no iteration can have."""


def _check_batch(batch_tokens: int) -> None:
    if not 1 <= batch_tokens <= _LARGEST_BATCH:
        raise WorkloadError(f"batch size {batch_tokens} must lie between 1 and {_LARGEST_BATCH}")


def _check_sums(decode_context_tokens: float, prefill_pairs: float) -> None:
    if not (0 <= decode_context_tokens <= _LARGEST_SUM and 0 <= prefill_pairs <= _LARGEST_SUM):  # false for NaN
        raise WorkloadError(
            f"context tokens {decode_context_tokens} and prefill pairs {prefill_pairs} must lie between 0 and "
            f"{_LARGEST_SUM:.0e}"
        )


@dataclass(frozen=True, slots=True)
class RequestLengths:
    """Mean tokens of a request."""

    input_len: float
    output_len: float

    def __post_init__(self) -> None:
        possible = 0 <= self.input_len <= _LONGEST and 0 <= self.output_len <= _LONGEST  # false for NaN
        if not possible or self.input_len + self.output_len <= 0:
            raise WorkloadError(
                f"input length {self.input_len} and output length {self.output_len} must lie between 0 and "
                f"{_LONGEST:.0e}, and not both be 0"
            )

    @property
    def decode_share(self) -> float:
        """Share of a steady batch's rows that decode: each request brings its prompt once and its output once."""
        return self.output_len / (self.input_len + self.output_len)

    @property
    def mean_context(self) -> float:
        """Tokens of KV that a decode reads on average: the prompt and half of the output."""
        return self.input_len + self.output_len / 2

    def steady_rows(self, kv_tokens: float) -> float:
        """Rows of the constant batch that so much KV keeps full.

        It holds the requests that fit at their mean context. Each decodes one row a step, and prefill adds its
        share of rows.
        """
        requests = kv_tokens / max(1.0, self.mean_context)
        return requests / self.decode_share if self.decode_share else requests * self.input_len


@dataclass(frozen=True, slots=True)
class Workload:
    """One iteration of B_dense rows. Rows may be fractions: they are means."""

    batch_tokens: int  # B_dense
    decode_rows: float
    decode_context_tokens: float  # context summed over the decodes
    prefill_pairs: float  # query-key pairs of the prefill rows

    def __post_init__(self) -> None:
        _check_batch(self.batch_tokens)
        if not 0 <= self.decode_rows <= self.batch_tokens:
            raise WorkloadError(f"{self.decode_rows} decodes do not fit a batch of {self.batch_tokens} rows")
        _check_sums(self.decode_context_tokens, self.prefill_pairs)

    @property
    def prefill_rows(self) -> float:
        """Rows that are no decodes."""
        return self.batch_tokens - self.decode_rows

    @property
    def decode_share(self) -> float:
        """Decode rows over all rows."""
        return self.decode_rows / self.batch_tokens

    @property
    def mean_context(self) -> float:
        """Context per decode; 0 without decodes."""
        return self.decode_context_tokens / self.decode_rows if self.decode_rows else 0.0

    def resized(self, batch_tokens: int) -> Workload:
        """The same mix in another batch size."""
        _check_batch(batch_tokens)
        factor = batch_tokens / self.batch_tokens
        return Workload(
            batch_tokens,
            self.decode_rows * factor,
            self.decode_context_tokens * factor,
            self.prefill_pairs * factor,
        )


def from_lengths(batch_tokens: int, lengths: RequestLengths) -> Workload:
    """The steady mix of a workload. A prefill row is paired with its whole prompt, as the paper's Table 2 counts."""
    _check_batch(batch_tokens)
    decode_rows = batch_tokens * lengths.decode_share
    return Workload(
        batch_tokens,
        decode_rows,
        decode_rows * lengths.mean_context,
        (batch_tokens - decode_rows) * lengths.input_len,
    )


def fitted_batch_tokens(kv_tokens: int, input_len: int, output_len: int, at_most: int) -> int:
    """B_dense for requests of these mean lengths on an engine that holds kv_tokens tokens of KV, in [1, at_most].

    A larger one could not be kept full: its iterations would wait for memory, not for work. Whole multiples of
    BATCH_STEP, unless less than one of them fits.
    """
    rows = int(RequestLengths(input_len, output_len).steady_rows(kv_tokens))
    whole = rows // BATCH_STEP * BATCH_STEP
    return max(1, min(whole or rows, at_most))


def from_bucket(batch_tokens: int, decode_share: float, mean_context: float) -> Workload:
    """A bucket of the schedule grid; prompts are taken to be as long as the mean context of its decodes."""
    if not 0 <= decode_share <= 1:
        raise WorkloadError(f"decode share {decode_share} must be within [0, 1]")
    _check_batch(batch_tokens)
    decode_rows = batch_tokens * decode_share
    return Workload(batch_tokens, decode_rows, decode_rows * mean_context, (batch_tokens - decode_rows) * mean_context)


def from_sums(batch_tokens: int, decode_context_tokens: float, prefill_pairs: float) -> Workload:
    """From the two sums alone; how many rows decode follows from the steady mix that has these sums.

    With p prompt and d output tokens a request, context is N (p + d/2) and pairs are M p with N : M = d : p, so
    x = N/M solves x + x²/2 = context / pairs. The paper does not print its row counts; in whole tiles of 64 rows
    the estimate for Table 2 is 1,344 decodes, which reproduces both of its attention cells.
    """
    _check_batch(batch_tokens)
    _check_sums(decode_context_tokens, prefill_pairs)
    if prefill_pairs < 1 or decode_context_tokens == 0:
        decode_rows = float(batch_tokens if decode_context_tokens else 0)
    else:
        x = math.sqrt(1 + 2 * decode_context_tokens / prefill_pairs) - 1
        exact = batch_tokens * x / (1 + x)
        decode_rows = float(round(exact / ROW_TILE) * ROW_TILE) if batch_tokens >= 2 * ROW_TILE else exact
        decode_rows = min(decode_rows, float(batch_tokens))
    return Workload(batch_tokens, decode_rows, decode_context_tokens, prefill_pairs)
