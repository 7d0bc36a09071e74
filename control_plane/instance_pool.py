"""The attached instances: which are healthy, and which one gets the next request.

Knows nothing of requests but how many each instance has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from control_plane.instance import Instance
from control_plane.instance_link import InstanceLink
from scheduler.plan import OutputBatch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Health:
    """What load balancers and process managers ask for."""

    ready: bool  # new requests are taken
    alive: bool  # no engine is lost or hangs; also before the first one is there, and while draining


class InstancePool(Generic[T]):
    """Links to all instances that can be used."""

    def __init__(
        self,
        stall_timeout_s: float,
        on_batch: Callable[[InstanceLink[T], OutputBatch], None],
        on_lost: Callable[[InstanceLink[T]], None],
    ) -> None:
        """stall_timeout_s: an instance with work that ends no iteration for this long is not healthy (see StepPace)."""
        self.ever_attached = False
        self._stall_timeout_s = stall_timeout_s
        self._on_batch = on_batch
        self._on_lost = on_lost
        self._links: list[InstanceLink[T]] = []

    def __iter__(self) -> Iterator[InstanceLink[T]]:
        return iter(list(self._links))

    def attach(self, instance: Instance) -> InstanceLink[T]:
        """Use an instance until it is lost."""
        link = InstanceLink(instance, self._stall_timeout_s, self._on_batch, self._remove)
        self._links.append(link)
        self.ever_attached = True
        return link

    def is_healthy(self, link: InstanceLink[T]) -> bool:
        return not link.is_stalled()

    def least_loaded(self) -> InstanceLink[T] | None:
        """The healthy instance with the fewest requests."""
        healthy = [link for link in self._links if self.is_healthy(link)]
        return min(healthy, key=lambda link: len(link.assigned), default=None)

    @property
    def max_model_len(self) -> int | None:
        """Prompt and output tokens that one request can have on every instance; None while there is none."""
        return min((link.instance.capacity.max_model_len for link in self._links), default=None)

    def health(self, draining: bool) -> Health:
        """As the engines have it: what the front end's own process does says nothing."""
        healthy = self.least_loaded() is not None
        return Health(ready=healthy and not draining, alive=healthy or not self.ever_attached)

    def close(self) -> None:
        """Use none of them any more. Idempotent."""
        for link in self._links:
            link.detach()
        self._links.clear()

    def _remove(self, link: InstanceLink[T]) -> None:
        self._links.remove(link)
        self._on_lost(link)
