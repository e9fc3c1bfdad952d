"""What the floor decides for an endpoint: an instance more, one fewer, or nothing, and why.

Beneath a strategy that is alive it acts only where that has failed (`scheduling.scaling.floor_move`). Alone it is the
compiled trigger of SageServe's reactive heuristic, with patience. The minimum is kept in both cases.
"""

from dataclasses import replace

from controlplane.dispatch.floor.observation import EndpointMemory
from controlplane.dispatch.live_fleet.topology import Endpoint, Replica, Topology
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.tunable import Tunable
from scheduling.scaling import EndpointView, Floor, floor_move, reactive_trigger
from scheduling.scaling.endpoint import GRACE_S, percent


class Decision:
    """*began_s* is when the gateway started."""

    def __init__(self, topology: Topology, began_s: float) -> None:
        self.topology = topology
        self._began_s = began_s

    def decide(
        self,
        endpoint: Endpoint,
        view: EndpointView,
        members: list[Replica],
        memory: EndpointMemory,
        now_s: float,
        *,
        strategy_alive: bool,
    ) -> tuple[int, str]:
        """The move that the floor wants of *endpoint* now: 1, -1 or 0, and why."""
        tuned = endpoint.spec.tuned
        easy = view.use < tuned.FLOOR_IN_BELOW and not view.waiting
        memory.easy_since_s = (memory.easy_since_s or now_s) if easy else None
        if memory.busy:
            return 0, ""
        if self.below_minimum(endpoint, view, members, memory):
            reason = f"Floor: {endpoint.spec.missing_instances} fewer than the {view.min_instances} it must have."
            return (1, reason) if now_s >= memory.retry_s else (0, "")
        if view.ready == 0:
            return self._from_nothing(endpoint, view) if now_s >= memory.retry_s else (0, "")
        if strategy_alive:
            least = min(view.min_instances, view.instances)  # what is missing is waited for
            beneath = Floor(tuned.FLOOR_BENEATH_ABOVE, tuned.FLOOR_COOLDOWN_S)
            wanted = floor_move(0, replace(view, min_instances=least), beneath)
            return (1, wanted.reason) if wanted is not None else (0, "")
        topology = self.topology
        delta = reactive_trigger(
            topology.fleet,
            topology.arrays,
            endpoint.index,
            view.waiting,
            view.instances,
            float(view.since_change_s),
            float(tuned.FLOOR_OUT_ABOVE),
            float(tuned.FLOOR_IN_BELOW),
            float(tuned.FLOOR_COOLDOWN_S),
            min(view.min_instances, view.instances),
            view.max_instances,
        )
        return self._with_patience(int(delta), endpoint.spec.tuned, view, members, memory, now_s)

    def below_minimum(
        self, endpoint: Endpoint, view: EndpointView, members: list[Replica], memory: EndpointMemory
    ) -> bool:
        """Whether an instance of the minimum is to be brought back now, under any strategy or none.

        At once where one failed or requests wait. After a stop by hand there is a moment to lower the minimum.
        """
        if not endpoint.spec.missing_instances or not endpoint.spec.launches:
            memory.restoring = False
            return False
        failed = any(replica.spec.state == InstanceState.FAILED and replica.spec.launched for replica in members)
        if failed or view.waiting > 0 or view.since_change_s >= endpoint.spec.tuned.FLOOR_COOLDOWN_S:
            memory.restoring = True
        return memory.restoring

    def _from_nothing(self, endpoint: Endpoint, view: EndpointView) -> tuple[int, str]:
        """Nothing is ready here. If nobody serves the model and it is asked for, one has to come."""
        settled = view.since_change_s >= endpoint.spec.tuned.FLOOR_COOLDOWN_S
        if view.coming or not (view.waiting or (view.tokens_per_s > 0 and settled)):
            return 0, ""
        topology = self.topology
        of_model = [endpoint for endpoint in topology.endpoints if endpoint.model == view.model]
        slots = [replica.slot for endpoint in of_model for replica in topology.members(endpoint)]
        if topology.fleet.accepting[slots].any():
            return 0, ""  # another region serves it, and grows when it is full
        return 1, f"Floor: {view.model} is asked for and no instance of it is ready anywhere."

    def _with_patience(
        self,
        delta: int,
        tuned: Tunable,
        view: EndpointView,
        members: list[Replica],
        memory: EndpointMemory,
        now_s: float,
    ) -> tuple[int, str]:
        """*delta* of the trigger, unless what is on the way is enough, or it is too early to take one away."""
        if delta > 0:
            soon = view.use * view.ready / view.instances
            if soon <= tuned.FLOOR_OUT_ABOVE:
                return 0, ""
            coming = f", {percent(soon)} with the {view.coming} on the way" if view.coming else ""
            waiting = f" with {view.waiting} waiting" if view.waiting else ""
            return 1, f"Floor: use is {percent(view.use)}{waiting}{coming}, above {percent(tuned.FLOOR_OUT_ABOVE)}."
        if delta < 0:
            easy_s = now_s - memory.easy_since_s if memory.easy_since_s is not None else 0.0
            if (
                easy_s < tuned.FLOOR_EASE_S
                or view.since_change_s < tuned.FLOOR_EASE_S
                or view.since_ready_s < GRACE_S
                or now_s - self._began_s < tuned.FLOOR_SETTLE_S
                or view.coming
                or view.draining
                or not any(replica.spec.launched and replica.spec.state == InstanceState.READY for replica in members)
                # the others must have room for what runs on it
                or view.use * view.ready / max(view.ready - 1, 1) > tuned.FLOOR_OUT_ABOVE
            ):
                return 0, ""
            return -1, f"Floor: use is {percent(view.use)}, below {percent(tuned.FLOOR_IN_BELOW)} for {easy_s:.0f} s."
        return 0, ""
