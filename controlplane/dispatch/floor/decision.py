"""What the floor decides for an endpoint: an instance more, one fewer, or nothing, and why.

Beneath a strategy that is alive it acts only where that has failed (`scheduling.scaling.floor_move`), and so it does while
the gateway is new: what strategies need is not known yet, and means of use are of the few seconds that there were. Alone it
is SageServe's reactive heuristic with patience, the rule of the strategy `reactive`. The minimum is kept in both cases.
"""

from controlplane.dispatch.floor.observation import EndpointMemory
from controlplane.dispatch.live_fleet.topology import Endpoint, Replica, Topology
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.tuning.rules import alone, beneath
from scheduling.scaling import EndpointView, alone_move, floor_move
from scheduling.scaling.reactive import is_easy


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
        rule = alone(tuned)
        memory.easy_since_s = (memory.easy_since_s or now_s) if is_easy(view, rule) else None
        if memory.busy:
            return 0, ""
        if self.below_minimum(endpoint, view, members, memory):
            reason = f"Floor: {endpoint.spec.missing_instances} below its minimum of {view.min_instances}."
            return (1, reason) if now_s >= memory.retry_s else (0, "")
        if endpoint.spec.shares_gpus and view.ready == 0:
            return 0, ""  # a swap brings one up (`swapping`)
        view = view._replace(min_instances=min(view.min_instances, view.instances))  # what is missing is waited for
        settled = now_s - self._began_s >= tuned.FLOOR_SETTLE_S
        if view.ready == 0 or strategy_alive or not settled:
            if view.ready == 0 and now_s < memory.retry_s:
                return 0, ""
            wanted = floor_move(0, view, beneath(tuned), served_elsewhere=self._served(view.model))
            return (1, wanted.reason) if wanted is not None else (0, "")
        easy_s = now_s - memory.easy_since_s if memory.easy_since_s is not None else 0.0
        made = alone_move(0, view, rule, easy_s)
        # What could not be started again stays.
        startable = any(one.spec.launched and one.spec.state == InstanceState.READY for one in members)
        if made is None or (made.delta < 0 and not startable):
            return 0, ""
        return made.delta, made.reason

    def below_minimum(
        self, endpoint: Endpoint, view: EndpointView, members: list[Replica], memory: EndpointMemory
    ) -> bool:
        """Whether an instance of the minimum is to be brought back now, under any strategy or none.

        At once where one failed or requests wait. What an operator holds or has cordoned is not missing.
        """
        if not endpoint.spec.missing_instances or not endpoint.spec.launches:
            memory.restoring = False
            return False
        failed = any(replica.spec.state == InstanceState.FAILED and replica.spec.launched for replica in members)
        if failed or view.waiting > 0 or view.since_change_s >= endpoint.spec.tuned.SCALE_COOLDOWN_S:
            memory.restoring = True
        return memory.restoring

    def _served(self, model: str) -> bool:
        """Whether an instance of *model* is ready anywhere."""
        topology = self.topology
        of_model = [endpoint for endpoint in topology.endpoints if endpoint.model == model]
        slots = [replica.slot for endpoint in of_model for replica in topology.members(endpoint)]
        return bool(topology.fleet.accepting[slots].any())
