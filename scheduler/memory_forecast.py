"""How many KV pages the live requests will need at most, if things go as they mostly did.

A request's output is bounded by a known maximum, but most end earlier. The lengths seen so far give each live
request an expected remaining output, and from these follow the pages at every later moment: requests grow by
one token per iteration until they end. Admission asks whether the peak still fits with one more request
(paper, section 4.1.1: peak memory predicted from decode length). Pure: no clock, no requests, arrays only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.integer[Any]]

_NUM_EDGES = 64
_MEMORY = 1024.0  # an output this many ends ago counts 1/e


def horizon(max_len: int) -> Floats:
    """Edges of time bins, in iterations from now: 0, 1, 2, ... and ever wider up to max_len."""
    edges = np.unique(np.round(np.geomspace(1, max(max_len, 2), _NUM_EDGES)))
    return np.concatenate(([0.0], edges))


class OutputLengths:
    """The distribution of output lengths, learned from requests that ended and those that still run.

    A survival curve by hazards per length bin (Kaplan and Meier's estimator): running requests count as
    "longer than this", so that the short ones, which end first after a start, do not mislead it.
    """

    def __init__(self, max_len: int) -> None:
        self.edges = horizon(max_len)  # of the length bins
        self._ended = np.zeros(len(self.edges))  # [bins] bin k: lengths in (edges[k], edges[k + 1]]

    def record(self, length: int) -> None:
        """A request ended by itself after this many output tokens (>= 1)."""
        self._ended *= 1.0 - 1.0 / _MEMORY
        self._ended[np.searchsorted(self.edges, length, side="left") - 1] += 1.0

    def curve(self, live: Ints) -> SurvivalCurve:
        """The distribution as known now; `live` are the outputs so far of all that run."""
        bins = np.searchsorted(self.edges, live, side="right") - 1
        running = np.bincount(bins, minlength=len(self.edges)).astype(np.float64)
        # At risk in bin k: ended in it or later, or still running beyond it.
        at_risk = _suffix_sums(self._ended + running) - running
        hazard = np.divide(self._ended, at_risk, out=np.zeros_like(at_risk), where=at_risk > 0)
        return SurvivalCurve(self.edges, np.concatenate(([1.0], np.cumprod(1.0 - hazard[:-1]))))


class SurvivalCurve:
    """[edges] share of requests whose output is longer than each edge."""

    def __init__(self, edges: Floats, survival: Floats) -> None:
        self._edges = edges
        self._survival = survival
        self._area = np.concatenate(([0.0], np.cumsum(np.diff(edges) * (survival[:-1] + survival[1:]) / 2)))

    def expected_remaining(self, generated: Ints, max_remaining: Ints) -> Floats:
        """Expected output tokens to come, in [0, max_remaining], for requests with so many generated."""
        area = np.interp(generated + max_remaining, self._edges, self._area)
        ahead = area - np.interp(generated, self._edges, self._area)
        alive = np.interp(generated, self._edges, self._survival)
        remaining: Floats = np.minimum(ahead / np.maximum(alive, 1e-9), max_remaining)
        return remaining


class PageForecast:
    """Pages at every later time bin, and what one more request would add."""

    def __init__(
        self, edges: Floats, page_size: int, num_shared_pages: int, own_tokens: Ints, remaining: Floats
    ) -> None:
        """edges: time bins, from horizon(). Of each live request, own_tokens: KV tokens outside of shared pages;
        remaining: expected output to come.

        Errs on the side of too many pages: a bin counts everyone who is alive at its start, at the size they
        have at its end, rounded up to pages; shared pages stay for good.
        """
        self._edges = edges
        self._ends = np.append(edges[1:], edges[-1])  # remaining never exceeds the last edge
        self._page_size = page_size
        num_bins = len(self._edges)
        bins = np.searchsorted(self._edges, remaining, side="right") - 1
        ending: Floats = np.bincount(bins, minlength=num_bins).astype(np.float64)
        own = _suffix_sums(np.bincount(bins, own_tokens.astype(np.float64), num_bins).astype(np.float64))
        alive = _suffix_sums(ending)
        last = np.bincount(bins, weights=remaining, minlength=num_bins)
        growth = last + (alive - ending) * self._ends
        self._pages: Floats = num_shared_pages + (own + growth + alive * (page_size - 1)) / page_size

    @property
    def peak_pages(self) -> float:
        """Most pages at any time."""
        return float(self._pages.max())

    def with_request(self, own_tokens: int, remaining: float) -> Floats:
        """[bins] pages when one more request runs beside the others."""
        added = (own_tokens + np.minimum(self._ends, remaining) + self._page_size - 1) / self._page_size
        return self._pages + np.where(self._edges <= remaining, added, 0.0)

    def admit(self, own_tokens: int, remaining: float, num_pages: float) -> bool:
        """Whether it fits into num_pages; if so, it is part of the forecast from now on."""
        pages = self.with_request(own_tokens, remaining)
        if pages.max() > num_pages:
            return False
        self._pages = pages
        return True


def _suffix_sums(values: Floats) -> Floats:
    """[k] sum of values[k:]."""
    return np.cumsum(values[::-1])[::-1]
