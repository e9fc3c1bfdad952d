"""Suspects: requests that ran when an engine died, known by their fingerprints. After two deaths a request is refused.

The evidence is in docs/operate/health.md.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from controlplane.dispatch.live_fleet.health import Notice
from controlplane.dispatch.live_fleet.topology import Replica, Request, Topology
from controlplane.dispatch.port import CUT, Asked, Left, Refused
from controlplane.dispatch.stages import Arrival, Retry, Stage
from controlplane.events.models import Severity
from controlplane.fleet.lifecycle.states import InstanceState

OUTAGE_S: Final = 30.0
"""Time within which the deaths of all instances of an endpoint are one outage, of which no request is guilty."""
MAX_FINGERPRINTS: Final = 10_000
"""Beyond that the oldest are dropped."""

End = tuple[str, float]
"""An instance, and the start of the service that ended."""


@dataclass(slots=True)
class Deaths:
    """Engine deaths under one fingerprint."""

    ends: list[End] = field(default_factory=list)
    last_s: float = -math.inf
    refused_until_s: float = -math.inf


class Suspects(Stage):
    def __init__(self, topology: Topology, clock: Callable[[], float]) -> None:
        self.topology, self.clock = topology, clock
        self._deaths: OrderedDict[int, Deaths] = OrderedDict()
        self._cut: dict[int, tuple[float, End, set[int]]] = {}
        """By id of an instance that broke connections off: since when, and what ran there, until a heartbeat shows whether
        it has ended."""

    def is_suspect(self, asked: Asked) -> bool:
        """Whether an engine died while running *asked*, and it has not been answered since."""
        deaths = self._deaths.get(asked.fingerprint) if self._deaths and asked.fingerprint else None
        if deaths is None:
            return False
        now_s = self.clock()
        if now_s - deaths.last_s > self._refused_s and now_s >= deaths.refused_until_s:
            del self._deaths[asked.fingerprint]
            return False
        return True

    def refusal(self, asked: Asked) -> Refused | None:
        """Return the refusal of a request under which two engines died; None for any other."""
        if not self.is_suspect(asked):
            return None
        deaths = self._deaths[asked.fingerprint]
        left_s = deaths.refused_until_s - self.clock()
        if left_s <= 0:
            return None
        return Refused(
            asked.number,
            422,
            "request_ends_engines",
            f"This request ran each time when {len(deaths.ends)} instances ended, so it is refused for {left_s:.0f} s. Sent "
            "again as it is, it stays refused: change it.",
            retry_after_s=None,
        )

    def admit(self, arrival: Arrival) -> Refused | None:
        return self.refusal(arrival.asked)

    def again(self, request: Request, retry: Retry) -> Refused | None:
        """Avoid instances with other suspects: whose death one of them caused could not be seen."""
        if self.may_end_engines(request.asked):
            retry.avoid += self.instances()
        return self.refusal(request.asked)

    def ended(self, request: Request, output_tokens: int | None) -> None:
        """Forget the deaths under *request* if it was answered completely."""
        if self._deaths and output_tokens is not None:
            self._deaths.pop(request.asked.fingerprint, None)

    def instances(self) -> set[Replica]:
        """Return the instances on which suspects run."""
        replicas = self.topology.replicas.values() if self._deaths or self._cut else ()
        return {one for one in replicas if any(self.may_end_engines(each.asked) for each in one.requests)}

    def may_end_engines(self, asked: Asked) -> bool:
        """Whether *asked* is a suspect, or ran where a connection broke off and no heartbeat has shown yet why."""
        since_s, cut = self.clock() - OUTAGE_S, self._cut.values() if asked.fingerprint else ()
        return self.is_suspect(asked) or any(at_s >= since_s and asked.fingerprint in ran for at_s, _, ran in cut)

    def died(self, replica: Replica) -> None:
        """Record that the engine of *replica* died under its requests."""
        end = (replica.name, replica.spec.state_changed_at)
        self._count(replica, end, (each.asked.fingerprint for each in replica.requests))

    def failed(self, request: Request, replica: Replica, left: Left) -> None:
        """Record that *replica* broke off the connection of *request*. One that is being stopped proves nothing."""
        if left.failure == CUT and replica.spec.state == InstanceState.READY:
            end = (replica.name, replica.spec.state_changed_at)
            _, _, ran = self._cut.setdefault(replica.spec.instance_id, (self.clock(), end, set()))
            ran.update((request.asked.fingerprint, *(each.asked.fingerprint for each in replica.requests)))

    def checked(self, replica: Replica, began_s: float, *, ended: bool) -> None:
        """Record that a heartbeat begun at *began_s* showed whether the server of *replica* has *ended*."""
        cut = self._cut.get(replica.spec.instance_id)
        if cut is not None and (began_s >= cut[0] or ended):
            del self._cut[replica.spec.instance_id]
            if ended:
                self._count(replica, *cut[1:])

    def _count(self, replica: Replica, end: End, fingerprints: Iterable[int]) -> None:
        """Count the *end* of *replica* for each of *fingerprints*, unless the whole endpoint is down."""
        now_s, ran = self.clock(), set[int]()
        others = [one for one in self.topology.members(replica.endpoint) if one is not replica]
        if others and not any(map(_is_up, others)):
            for deaths in self._deaths.values():
                if now_s - deaths.last_s < OUTAGE_S:
                    deaths.ends, deaths.refused_until_s = deaths.ends[:1], -math.inf
            return
        for fingerprint in {each for each in fingerprints if each}:
            deaths = self._deaths.setdefault(fingerprint, Deaths())
            if now_s - deaths.last_s > self._refused_s:
                deaths.ends = []
            if end not in deaths.ends:
                deaths.ends.append(end)
                deaths.last_s = now_s
                self._deaths.move_to_end(fingerprint)
                ran.add(fingerprint)
        while len(self._deaths) > MAX_FINGERPRINTS:
            self._deaths.popitem(last=False)
        again = [self._deaths[each] for each in ran if len(self._deaths[each].ends) > 1]
        for deaths in again:
            if len(again) == 1 or len(deaths.ends) > 2:  # which of several it was is not known before the third
                self._refuse(replica.spec.model, deaths, now_s)

    @property
    def _refused_s(self) -> float:
        return self.topology.tuned.QUARANTINE_S

    def _refuse(self, model: str, deaths: Deaths, now_s: float) -> None:
        if not self._refused_s or deaths.refused_until_s > now_s:
            return
        deaths.refused_until_s = now_s + self._refused_s
        until = datetime.fromtimestamp(datetime.now(UTC).timestamp() + self._refused_s, UTC)
        instances = [name for name, _ in deaths.ends]
        self.topology.notices.append(
            Notice(
                "model.request_quarantined",
                model,
                f"One request ran each time when {' and '.join(instances)} ended; it is refused until {until:%H:%M:%S} UTC. "
                "Others run.",
                Severity.CRITICAL,
                inputs={"instances": instances, "refused_s": self._refused_s},
            )
        )


def _is_up(one: Replica) -> bool:
    return one.reachable and not one.lost and one.spec.state == InstanceState.READY
