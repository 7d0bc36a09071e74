"""What loading, saving and computing KV cost, by the measurements so far, and which of them is the cheaper.

Running means, with the weight of older measurements falling. As long as nothing was measured of the one side, pages
are moved: only so it is ever measured. Pure: no clock, no pages.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.plan import StoreTier

_FORGETTING = 1 / 16  # share that each new measurement takes from the weight of all before it
_MAX_SKIPS = 32  # loads that are passed over before what was measured is forgotten, and one is tried again
_MIN_SPREAD = 1e-3  # of sizes, variance over squared mean: with less, no fixed part can be told from them


class CostLine:
    """Seconds of a job by its size: a fixed part and one per unit, both at least 0, by weighted least squares."""

    def __init__(self) -> None:
        self._weight = self._size = self._seconds = self._squares = self._products = 0.0

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return self._weight > 0

    def record(self, size: float, seconds: float) -> None:
        """One job took so long."""
        keep = 1 - _FORGETTING
        self._weight = keep * self._weight + 1
        self._size = keep * self._size + size
        self._seconds = keep * self._seconds + seconds
        self._squares = keep * self._squares + size * size
        self._products = keep * self._products + size * seconds

    def forget(self) -> None:
        """As if nothing had been measured."""
        self._weight = self._size = self._seconds = self._squares = self._products = 0.0

    def seconds(self, size: float) -> float:
        """What a job of this size will take; 0 while nothing was measured."""
        if not self._weight:
            return 0.0
        mean_size, mean_s = self._size / self._weight, self._seconds / self._weight
        if not mean_size:
            return mean_s
        variance = self._squares / self._weight - mean_size**2
        per_unit = most_per_unit = mean_s / mean_size
        if variance > _MIN_SPREAD * mean_size**2:
            covariance = self._products / self._weight - mean_size * mean_s
            per_unit = min(max(covariance / variance, 0.0), most_per_unit)
        return max(0.0, mean_s + per_unit * (size - mean_size))


class MoveCosts:
    """Loads by tier, saves, and prefill."""

    def __init__(self, page_size: int) -> None:
        """page_size: tokens."""
        self._page_size = page_size
        self._loads = {tier: CostLine() for tier in StoreTier}
        self._skips = dict.fromkeys(StoreTier, 0)
        self._save = CostLine()
        self._prompt_tokens = 0.0  # of steps that prefilled, the older the less
        self._prompt_s = 0.0  # their part of these steps

    def computed(self, num_tokens: int, num_prompt_tokens: int, run_s: float) -> None:
        """A step of num_tokens rows took so long; of these, num_prompt_tokens prefilled, which share it equally."""
        if num_prompt_tokens:
            keep = 1 - _FORGETTING
            self._prompt_tokens = keep * self._prompt_tokens + num_prompt_tokens
            self._prompt_s = keep * self._prompt_s + run_s * num_prompt_tokens / num_tokens

    def loaded(self, tiers: Sequence[StoreTier], num_pages: int, run_s: float) -> None:
        """A load of pages from these tiers has brought the first num_pages. Failed ones cost time too."""
        if run_s > 0:
            self._loads[max(tiers)].record(num_pages, run_s)

    def saved(self, num_pages: int, run_s: float) -> None:
        """So many pages were given to the store."""
        if run_s > 0:
            self._save.record(num_pages, run_s)

    def compute_s(self, num_pages: int) -> float:
        """Seconds to compute so many pages; 0 while no prefill was measured."""
        per_token = self._prompt_s / self._prompt_tokens if self._prompt_tokens else 0.0
        return num_pages * self._page_size * per_token

    def num_worth_loading(self, tiers: Sequence[StoreTier]) -> int:
        """Of a request's next pages, which lie in these tiers, how many leading ones are cheaper to load.

        All costs are linear, so that it is all of them, those in memory before the first one on SSD, or none.
        """
        num_pages, num_cpu = len(tiers), _num_before_ssd(tiers)
        best, gain_s = 0, 0.0
        for count, tier in ((num_cpu, StoreTier.CPU), (num_pages, StoreTier.SSD)):
            if not count or (tier is StoreTier.SSD and num_cpu == num_pages):
                continue
            cost_s, instead_s = self._loads[tier].seconds(count), self.compute_s(count)
            if not cost_s or not instead_s or instead_s - cost_s > gain_s:
                best, gain_s = count, instead_s - cost_s
        return best

    def skipped(self, tiers: Sequence[StoreTier]) -> None:
        """A request computes pages that lie in these tiers, by num_worth_loading(). After some of these, try anew."""
        self._skip(max(tiers))

    def is_worth_moving(self, num_saves: int, num_loads: int) -> bool:
        """Whether saving num_saves pages now and loading num_loads later is cheaper than to compute these."""
        save, load = self._save, self._loads[StoreTier.CPU]
        instead_s = self.compute_s(num_loads)
        if not instead_s or not load.is_known or (num_saves and not save.is_known):
            return True
        return (save.seconds(num_saves) if num_saves else 0.0) + load.seconds(num_loads) < instead_s

    def not_moved(self) -> None:
        """A preempted request's pages are computed again, by is_worth_moving(). After some of these, try anew."""
        if self._skip(StoreTier.CPU):
            self._save.forget()

    def _skip(self, tier: StoreTier) -> bool:
        self._skips[tier] += 1
        is_over = self._skips[tier] % _MAX_SKIPS == 0
        if is_over:
            self._loads[tier].forget()
        return is_over


def _num_before_ssd(tiers: Sequence[StoreTier]) -> int:
    return next((i for i, tier in enumerate(tiers) if tier is StoreTier.SSD), len(tiers))
