"""Suspects: requests that ran when an engine died. Each is tried alone; success clears it, a second death refuses it.

The evidence is in docs/operate/health.md. A request is known by its fingerprint, so a resent one is recognized.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from controlplane.dispatch.live_fleet.health import Notice
from controlplane.dispatch.live_fleet.topology import Replica, Request, Topology
from controlplane.dispatch.port import Refused, Submit
from controlplane.events.models import Severity
from controlplane.fleet.lifecycle.states import InstanceState

TRIAL_S: Final = 10.0
"""Longest trial; one suspect per model is tried at a time."""
CHECK_S: Final = 5.0
"""Longest time that a cut-off request is held while its server is checked."""
MOST_ENDS: Final = 1000
MOST: Final = 10_000
"""Fingerprints remembered; beyond that the oldest are dropped."""


@dataclass(slots=True)
class Deaths:
    """Engine deaths under one fingerprint."""

    instances: list[str] = field(default_factory=list)
    last_s: float = -math.inf
    refused_until_s: float = -math.inf


class Suspects:
    """Suspect requests and their trials; *enqueue* places a request again on another instance."""

    def __init__(self, topology: Topology, clock: Callable[[], float], enqueue: Callable[[Request], None]) -> None:
        self.topology = topology
        self.clock = clock
        self.enqueue = enqueue
        self._deaths: OrderedDict[int, Deaths] = OrderedDict()
        self._ends: OrderedDict[tuple[str, float], set[int]] = OrderedDict()
        """By instance and the start of its service: requests that have already been notified of its death."""
        self._line: dict[str, deque[Request]] = {}  # by model
        self._on_trial: dict[str, tuple[Request, float]] = {}  # by model: request, end of its trial
        self._cut: dict[int, tuple[float, set[int], list[Request]]] = {}
        """By id of the instance that cut requests off: since when, fingerprints of all that ran there, and requests held."""

    def is_suspect(self, asked: Submit) -> bool:
        """Whether an engine died while running *asked* and nothing has cleared it since."""
        if not asked.fingerprint or not self._deaths:
            return False
        deaths = self._deaths.get(asked.fingerprint)
        if deaths is None:
            return False
        now_s = self.clock()
        if now_s - deaths.last_s > self._refused_s and now_s >= deaths.refused_until_s:
            del self._deaths[asked.fingerprint]
            return False
        return bool(deaths.instances)

    def refusal(self, asked: Submit) -> Refused | None:
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
            f"This request ran each time when {len(deaths.instances)} instances ended, so it is refused for "
            f"{left_s:.0f} s. Sent again as it is, it stays refused: change it.",
            retry_after_s=None,
        )

    @property
    def trying(self) -> bool:
        """Whether any suspect is on trial."""
        return bool(self._on_trial)

    def tries(self, request: Request) -> bool:
        """Whether *request* is on trial."""
        trial = self._on_trial.get(request.asked.model)
        return trial is not None and trial[0] is request

    def waiting(self) -> list[Request]:
        """Return the suspects that wait for their trial."""
        return [request for line in self._line.values() for request in line]

    def wait_for_trial(self, request: Request) -> None:
        """Queue the suspect *request* for trial, after any other suspect of its model."""
        self._line.setdefault(request.asked.model, deque()).append(request)
        self._next(request.asked.model)

    def tried(self, request: Request, *, cleared: bool) -> None:
        """End the trial of *request*: it got a token, or leaves. *cleared*: it was answered completely."""
        fingerprint, model = request.asked.fingerprint, request.asked.model
        if cleared and self._deaths and fingerprint in self._deaths:
            del self._deaths[fingerprint]
        if self.tries(request):
            del self._on_trial[model]
            self._next(model)

    def gone(self, request: Request) -> None:
        """Forget *request*, which has ended."""
        self.tried(request, cleared=False)
        for line in (*self._line.values(), *(held for _, _, held in self._cut.values())):
            if request in line:
                line.remove(request)

    def died(self, replica: Replica, fingerprints: Iterable[int]) -> None:
        """Record that the engine of *replica* died while the requests of *fingerprints* ran there."""
        now_s = self.clock()
        known = self._ends.setdefault((replica.name, replica.spec.state_changed_at), set())
        ran = {each for each in fingerprints if each} - known
        known.update(ran)
        if len(self._ends) > MOST_ENDS:
            self._ends.popitem(last=False)
        for fingerprint in ran:
            deaths = self._deaths.setdefault(fingerprint, Deaths())
            if now_s - deaths.last_s > self._refused_s:
                deaths.instances = []
            deaths.instances.append(replica.name)
            deaths.last_s = now_s
            self._deaths.move_to_end(fingerprint)
        while len(self._deaths) > MOST:
            self._deaths.popitem(last=False)
        again = {each for each in ran if len(self._deaths[each].instances) > 1}
        trial = self._on_trial.get(replica.spec.model)
        if trial is not None and trial[0].asked.fingerprint in again:
            alone = trial[0].asked.fingerprint
            for each in again - {alone}:  # the others merely ran at the same time
                self._deaths[each].instances.pop()
            again = {alone}
        elif len(again) > 1:  # which of them it was is not known yet
            again = {each for each in again if len(self._deaths[each].instances) > 2}
        for fingerprint in again:
            self._refuse(replica.spec.model, self._deaths[fingerprint], now_s)

    def was_cut(self, request: Request, replica: Replica, again: bool) -> bool:
        """Record that *replica* cut *request* off. True if it is held until the server there is known to be alive or dead.

        An instance that is being stopped proves nothing.
        """
        if replica.spec.state != InstanceState.READY:
            return False
        _, fingerprints, held = self._cut.setdefault(replica.spec.instance_id, (self.clock(), set(), []))
        fingerprints.update(each.asked.fingerprint for each in replica.requests)
        fingerprints.add(request.asked.fingerprint)
        self.topology.doubt(replica)
        if again:
            held.append(request)
        return again

    def looked(self, replica: Replica, began_s: float, *, ended: bool) -> None:
        """Record that a heartbeat begun at *began_s* showed whether the server of *replica* has *ended*."""
        cut = self._cut.get(replica.spec.instance_id)
        if cut is None or (began_s < cut[0] and not ended):
            return
        _, fingerprints, held = self._cut.pop(replica.spec.instance_id)
        if ended:
            self.died(replica, fingerprints)
        for request in held:
            self.enqueue(request)

    def sweep(self) -> None:
        """End trials and holds that have lasted long enough. Call once a second."""
        now_s = self.clock()
        for model, (_, until_s) in list(self._on_trial.items()):
            if now_s >= until_s:
                del self._on_trial[model]
                self._next(model)
        for instance_id, (since_s, _, held) in list(self._cut.items()):
            if now_s - since_s >= CHECK_S:
                del self._cut[instance_id]
                for request in held:
                    self.enqueue(request)

    @property
    def _refused_s(self) -> float:
        return self.topology.tuned.QUARANTINE_S

    def _next(self, model: str) -> None:
        line = self._line.get(model)
        while line and model not in self._on_trial:
            request = line.popleft()
            self._on_trial[model] = request, self.clock() + TRIAL_S
            self.enqueue(request)  # may end it immediately
        if not line:
            self._line.pop(model, None)

    def _refuse(self, model: str, deaths: Deaths, now_s: float) -> None:
        if not self._refused_s:
            return
        deaths.refused_until_s = now_s + self._refused_s
        until = datetime.fromtimestamp(datetime.now(UTC).timestamp() + self._refused_s, UTC)
        self.topology.notices.append(
            Notice(
                "model.request_quarantined",
                model,
                f"One request ran each time when {' and '.join(deaths.instances)} ended; it is refused until "
                f"{until:%H:%M:%S} UTC. Others run.",
                Severity.CRITICAL,
                inputs={"instances": [*deaths.instances], "refused_s": self._refused_s},
            )
        )
