"""The view of every endpoint that scaling strategies get, of what is observed of a fleet, and the last change of each."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from scheduling.compiled import direct
from scheduling.fleet.arrays import EndpointArrays, FleetArrays
from scheduling.scaling.endpoint import EndpointView
from scheduling.scaling.view import Stage, use_now

UNSEEN = -1


Stages = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]
"""By instance: its own endpoint, while it is donated too; `Stage`; since when, minus infinity for before time began."""


class Observed(Protocol):
    """What views are made of. Endpoints and instances are numbers of the arrays."""

    def stages(self) -> Stages: ...
    def loads(self) -> Iterator[tuple[int, EndpointView]]:
        """Yield each endpoint that gets requests, in order, with its terms and load, but without instances and use."""


class Views:
    """Call it at every check. A change is a move (`moved`), or what the fleet shows of an operator, a plan, a swap, or a
    restart; the first view of an endpoint is none.
    """

    def __init__(
        self,
        observed: Observed,
        clock: Callable[[], float],
        arrays: Callable[[], tuple[FleetArrays, EndpointArrays]],
        changes: Sequence[tuple[float, int]] = (),
    ) -> None:
        """*arrays* returns those that are in use. *changes*: when and by how many instances endpoints changed last."""
        self.observed, self._clock, self._arrays = observed, clock, arrays
        self._use_now = direct(use_now)
        rows = [(*change, UNSEEN, 0) for change in changes]
        self._changes: Any = np.array(rows, [("s", "f8"), ("delta", "i8"), ("serving", "i8"), ("draining", "i8")])

    def __call__(self) -> dict[int, EndpointView]:
        """Return the view of every endpoint that gets requests, by number."""
        now_s, (fleet, members) = self._clock(), self._arrays()
        endpoint, stage, since_s = self.observed.stages()
        views = dict(self.observed.loads())
        count, is_ready = max([*views, *endpoint.tolist()], default=-1) + 1, stage == Stage.READY
        counts = np.bincount(endpoint * len(Stage) + stage, minlength=count * len(Stage)).reshape(count, len(Stage))
        ready_s = np.full(count, -math.inf)
        np.maximum.at(ready_s, endpoint[is_ready], since_s[is_ready])
        for at, view in views.items():
            this, (_, coming, ready, draining, spare) = self._of(at), counts[at].tolist()
            serving = ready + coming
            if this["serving"] != UNSEEN and (serving > this["serving"] or draining > this["draining"]):
                own = endpoint == at
                moving = own & ((stage == Stage.COMING) | (stage == Stage.DRAINING))
                # When the last one began to start or drain; without any, when the last one changed.
                moved_s = min(now_s, since_s[moving if moving.any() else own].max())
                if moved_s >= this["s"]:  # else it was there before, and was heard from only now
                    this["s"], this["delta"] = moved_s, 1 if serving > this["serving"] else -1
            this["serving"], this["draining"] = serving, draining
            use, kv_use = self._use_now(fleet, members, at, view.waiting, now_s)
            views[at] = view._replace(
                ready=ready,
                coming=coming,
                draining=draining,
                spot=spare,
                use=use,
                kv_use=kv_use,
                since_change_s=now_s - float(this["s"]),
                since_ready_s=now_s - float(ready_s[at]),
                changed_delta=int(this["delta"]),
            )
        return views

    def moved(self, endpoint: int, delta: int) -> None:
        """Record that scaling changes *endpoint* by *delta*, before its instances show it."""
        this = self._of(endpoint)
        this["s"], this["delta"] = self._clock(), delta
        this["serving" if delta > 0 else "draining"] += abs(delta)

    def changed_s(self) -> NDArray[np.float64]:
        """Return when each endpoint changed last."""
        return self._changes["s"]  # type: ignore[no-any-return]

    def changed(self, endpoint: int) -> tuple[float, int]:
        """Return when *endpoint* changed last, and by how many instances; 0 if unknown."""
        this = self._of(endpoint)
        return float(this["s"]), int(this["delta"])

    def _of(self, endpoint: int) -> Any:
        """Return the record of *endpoint*; one that is new changes as it is seen first."""
        known = self._changes.size
        if endpoint >= known:
            more = np.zeros(endpoint + 1 - known, self._changes.dtype)
            more["s"], more["serving"] = self._clock(), UNSEEN
            self._changes = np.concatenate([self._changes, more])
        return self._changes[endpoint]
