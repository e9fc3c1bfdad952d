"""What prewarming starts next, as published: of runs in progress, what their likely calls need and is not warm yet."""

import math
from typing import Any, Final, cast

from controlplane.dispatch import kernels
from controlplane.dispatch.prewarming import Prewarming, name_of_prefix
from controlplane.dispatch.wire import NEXT_TO_WARM_COLUMNS, NextToWarm
from scheduling.applications.prewarming import LRU, LikelyCall
from scheduling.routing.adapters import ON_GPU

EVERY_S: Final = 1.0
SHOWN: Final = 50


class NextToWarmView:
    """Columns of `wire.NextToWarm`, the first to start first, read again once a second."""

    def __init__(self, prewarming: Prewarming) -> None:
        self.prewarming = prewarming
        self._columns: dict[str, list[Any]] = {}
        self._read_s = -math.inf

    def __call__(self) -> dict[str, list[Any]]:
        now_s = self.prewarming.clock()
        if now_s - self._read_s >= EVERY_S:
            rows = self.rows()
            self._columns = {name: [getattr(row, name) for row in rows] for name in NEXT_TO_WARM_COLUMNS}
            self._read_s = now_s
        return self._columns

    def rows(self) -> list[NextToWarm]:
        """Return what starts next, once for each backend and place: for the run that needs it first."""
        known = self.prewarming.runs.standings.by_number
        likely = sorted(self.prewarming.likely, key=lambda call: (call.start_in_s, call.run))
        shown: dict[object, NextToWarm] = {}
        for call in likely:
            if call.target in shown or call.run not in known or self._is_warm(call):
                continue
            shown[call.target] = self._row(call)
            if len(shown) == SHOWN:
                break
        return list(shown.values())

    def _is_warm(self, call: LikelyCall) -> bool:
        """Whether it is warm or being warmed, or its endpoint does not prewarm."""
        prewarming, topology = self.prewarming, self.prewarming.topology
        kind, _, at = call.target
        if at >= 0:
            endpoint = topology.endpoints[at]
            if endpoint.spec.tuned.PREWARM_BY == LRU:
                return True
            if kind == "adapter":
                slots = [one.slot for one in topology.members(endpoint)]
                return any(
                    kernels.tier_of(topology.fleet, slot, cast(int, call.target.name)) == ON_GPU for slot in slots
                )
        return any(one.backend == self._name(call) for one in prewarming.log.open(kind))

    def _name(self, call: LikelyCall) -> str:
        kind, name, _ = call.target
        if kind == "adapter":
            return self.prewarming.topology.adapter_names[cast(int, name)]
        return name_of_prefix(int(str(name))) if kind == "prefix" else str(name)

    def _row(self, call: LikelyCall) -> NextToWarm:
        prewarming, at = self.prewarming, call.target.endpoint
        endpoint = prewarming.topology.endpoints[at] if at >= 0 else None
        caller, run = prewarming.called_by(call), prewarming.runs.standings.by_number[call.run]
        return NextToWarm(
            in_s=round(call.start_in_s, 1),
            kind=call.target.kind,
            backend=self._name(call),
            model=endpoint.model if endpoint is not None else "",
            region=endpoint.region if endpoint is not None else "",
            tenant_id=caller.tenant_id,
            application=caller.application,
            run=caller.run,
            unit=call.unit,
            probability=round(call.probability, 3),
            k=round(min(1.0, prewarming.topology.tuned.PREWARM_K / run.weight), 3),
            why=f"{call.unit} follows with {call.probability:.0%}"
            + (f", {call.calls} at once" if call.calls > 1 else ""),
        )
