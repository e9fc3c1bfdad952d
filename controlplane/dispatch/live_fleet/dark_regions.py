"""Dark regions of the live fleet: the rule is `scheduling.control.dark_regions`, the evidence is of heartbeats and tokens.

A dark region's instances stay what they are in their rows: none fails for the silence of its region, and none is replaced.
"""

from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime

from controlplane.dispatch.dispatcher import Dispatcher
from controlplane.dispatch.live_fleet.health import Notice
from controlplane.dispatch.live_fleet.topology import Replica
from controlplane.events.models import Severity
from controlplane.fleet.lifecycle.states import SERVING
from scheduling.control import dark_regions
from scheduling.control.dark_regions import SILENT_S, UNANSWERED_S, Sight

DARK, ANSWERS = "region.dark", "region.answers"
CHECKED = 8
"""Silent instances of a region whose `/health` is checked before it is dark."""


class DarkRegions:
    def __init__(self, dispatcher: Dispatcher, clock: Callable[[], float]) -> None:
        self.dispatcher, self.topology, self.clock = dispatcher, dispatcher.topology, clock
        self.rule = dark_regions.DarkRegions()
        self.suspects: list[Replica] = []
        """A few instances of regions that may be about to go dark: their `/health` is checked before the next look."""
        self._suspected_s = 0.0

    def remember(self) -> None:
        """Take over the regions that are dark by their rows, from the process that owned them before."""
        self.rule = dark_regions.DarkRegions()
        for region in self.topology.dark_rows:
            self.rule.remember(region)
        self.topology.shares = dict.fromkeys(self.topology.dark_rows, 0.0)
        self.topology.settle_regions(self.topology.dark_rows)

    def look(self) -> None:
        """Leave regions that went dark, and let those that answer return. Call every `LOOK_S`."""
        now_s, topology = self.clock(), self.topology
        counts, silent = Counter[str](), dict[str, list[Replica]]()
        for one in topology.replicas.values():
            if one.spec.state in SERVING and one.spec.url:
                counts[one.spec.region] += 1
                if self._is_silent(one, now_s):
                    silent.setdefault(one.spec.region, []).append(one)
        for one in self.suspects:
            if one.health.heard_s >= self._suspected_s:  # so the others may be heard too: the gateway is behind
                silent.pop(one.spec.region, None)
        seen = {name: Sight(count, len(silent.get(name, ()))) for name, count in counts.items()}
        changed = self.rule.look(seen, now_s)
        shares = {name: share for name in (*seen, *changed) if (share := self.rule.share(name, now_s)) < 1.0}
        altered = {
            name for name in shares.keys() | topology.shares.keys() if shares.get(name) != topology.shares.get(name)
        }
        topology.shares = shares
        self._suspected_s = now_s
        self.suspects = [one for name in seen if self.rule.is_suspect(name) for one in silent[name][:CHECKED]]
        for name, dark in changed.items():
            self._leave(name, seen[name], now_s) if dark else self._return(name, now_s)
        if altered:
            topology.settle_regions(altered)
        for name in (name for name, dark in changed.items() if dark):
            self.dispatcher.leave_region(name)

    @staticmethod
    def _is_silent(one: Replica, now_s: float) -> bool:
        health = one.health
        return now_s - health.unanswered_s >= UNANSWERED_S and now_s - health.heard_s >= SILENT_S

    def _leave(self, name: str, sight: Sight, now_s: float) -> None:
        for one in self.topology.replicas.values():
            if one.spec.region == name and self._is_silent(one, now_s):
                one.reachable = False  # until its next heartbeat
        reason = (
            f"{sight.silent} of its {sight.instances} instances are silent while others answer: it gets no requests, and "
            f"nothing is started there, until it has answered for {self.rule.return_wait_s(name):g} s"
        )
        inputs = {"instances": sight.instances, "silent": sight.silent, "at": datetime.now(UTC).isoformat()}
        self.topology.notices.append(Notice(DARK, name, reason, Severity.CRITICAL, inputs))

    def _return(self, name: str, now_s: float) -> None:
        for one in self.topology.replicas.values():
            if one.spec.region == name and not one.reachable:  # from now on each is judged alone
                one.health.heard(now_s)
        reason = f"it answers again: it gets {dark_regions.FIRST_SHARE:.0%} of its requests, twice as many every "
        reason += f"{dark_regions.DOUBLED_S:g} s"
        self.topology.notices.append(Notice(ANSWERS, name, reason, Severity.INFO))
