"""Live prewarming (Hermes section 3.4): adapters, system prompts and sleeping models.

What is likely is decided by `scheduling.applications.prewarming`; this carries it out once a second. A system prompt is
computed by a request for one token, where `scheduling.applications.system_prompts` says. That goes by the prefix index, so
it needs a router that considers prefixes: others would send the call anywhere. The text is the
gateway's (`controlplane.gateway.upstream.prewarming`); here a prompt is the hash of its last whole block.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Final, cast

from controlplane.dispatch import port
from controlplane.dispatch.live_fleet.topology import Endpoint, Replica, Request, Topology
from controlplane.dispatch.runs import ApplicationRuns
from controlplane.dispatch.stages import Arrival, Stage
from controlplane.dispatch.waiting_queue import WaitingQueue
from controlplane.fleet.lifecycle.states import PRESENT, InstanceState
from scheduling.applications.demand_graph import Backend
from scheduling.applications.prewarming import (
    AGAIN_S,
    HERMES,
    LRU,
    MOST_WAITING,
    OPEN_S,
    AdapterPrewarming,
    LikelyCall,
    Warmable,
    due,
    load_time_s,
    wakes,
)
from scheduling.applications.standings import Run, RunCall
from scheduling.applications.system_prompts import Prompt, PromptPrewarming
from scheduling.fleet.profile import USUAL
from scheduling.routing.routers import LEAST_DELAY, POLICY_CODES

WAKE_S: Final = 5.0
"""Taken for waking an instance that shares no GPUs; those that do have measured times."""
SLICE_S: Final = 0.002
"""Longest time at a stretch for likely calls, ten times a second: those of 1,000 runs in progress take 0.1 s in all."""
START_S: Final = 5.0
"""Taken for what another platform does to warm a backend (`controlplane.applications.warming`)."""


@dataclass(slots=True)
class Woken:
    """A model of which an instance was woken."""

    at_s: float
    serves: bool = False
    """It has served since."""
    unused: bool = True
    """No request has used it, and one may."""


class Prewarming(Stage):
    """*backends* are the names of backends of other units that are kept warm."""

    def __init__(
        self,
        topology: Topology,
        queue: WaitingQueue,
        runs: ApplicationRuns,
        clock: Callable[[], float],
        deliver: port.Deliver,
    ) -> None:
        self.topology, self.queue, self.runs, self.clock, self.deliver = topology, queue, runs, clock, deliver
        self.adapters, self.prompts = AdapterPrewarming(), PromptPrewarming()
        self.counts: dict[str, Counter[str]] = {kind: Counter() for kind in ("model", "container", "dnn")}
        self.counts |= {"adapter": self.adapters.counts, "prefix": self.prompts.time.counts}
        """By kind, what was `warmed` and what of it was `used` by a call afterwards."""
        self._likely: dict[int, list[LikelyCall]] = {}
        """By run, as of when it was last looked at,"""
        self._seen: dict[int, int] = {}
        """and its `Run.reports` then."""
        self._runs_left: list[Run] = []
        """Those not looked at since all were, the first one last."""
        self.backends: Collection[str] = ()
        self._wakes_s: dict[int, float] = {}
        """As of this look: times to wake a sleeping instance, by endpoint without one that is awake."""
        self._began: dict[int, float] = {}
        """By slot: since when the instance that last warmed a prompt has been in its state."""
        self._woken: dict[tuple[str, str], Woken] = {}
        """By model and region."""

    def figures(self) -> dict[str, list[int]]:
        """Return what was warmed and what of it was used, of kinds of which anything was."""
        return {kind: [of["warmed"], of["used"]] for kind, of in self.counts.items() if of["warmed"]}

    # What is likely

    def sweep(self) -> None:
        """Warm what waiting requests and likely calls need."""
        self._wakes_s = self._sleeping()
        self.prompts.begin()
        if not (self.topology.adapter_names or self.prompts.any_known or self.backends or self._wakes_s):
            self._likely, self._seen, self._runs_left = {}, {}, []
        elif not self._runs_left:
            runs = self.runs.standings.by_number
            self._likely = {number: calls for number, calls in self._likely.items() if number in runs}
            self._seen = {number: self._seen[number] for number in self._likely}
            self._runs_left = list(reversed(runs.values()))
            self.look_on()
        self._warm_adapters()
        self._warm_prefixes()
        self._look_at_models()

    def look_on(self) -> None:
        """Note the likely calls of the next runs, within `SLICE_S`. Call ten times a second."""
        until_s, known = self.clock() + SLICE_S, self.runs.standings.by_number
        while self._runs_left:
            run = self._runs_left.pop()
            if run.number in known:
                self._likely[run.number] = self.runs.likely_calls_of(run, self.needs)
                self._seen[run.number] = run.reports
            if self.clock() >= until_s:
                break

    @property
    def likely(self) -> list[LikelyCall]:
        """Return the likely calls of all runs, each as it was last looked at."""
        return [call for calls in self._likely.values() for call in calls]

    def due_now(self, *kinds: str) -> list[LikelyCall]:
        """Return the likely calls of runs in progress whose *kinds* of backends are to be warmed now.

        A run of which a call came or ended since it was looked at has none: what was likely may have come.
        """
        runs, seen = self.runs.standings.by_number, self._seen
        return [
            call for call in due(self.likely, *kinds) if call.run in runs and runs[call.run].reports == seen[call.run]
        ]

    def run_of(self, call: LikelyCall) -> tuple[str, str]:
        """Return the application and the run of *call*."""
        run = self.runs.standings.by_number[call.run]
        return cast("tuple[int, str]", run.application)[1], str(run.name)

    def needs(self, call: RunCall, unit: str, backend: Backend) -> Iterator[tuple[Warmable, float]]:
        """Yield what a call of *unit* that follows *call* at *backend* needs, with the seconds to warm it."""
        if backend.kind in ("container", "dnn"):
            if backend.name in self.backends:
                yield Warmable(backend.kind, backend.name), START_S
            return
        if backend.kind != "llm":
            return
        if call.adapter >= 0:
            load_s = load_time_s(self.topology.fleet, self.topology.arrays, call.endpoint)
            yield Warmable("adapter", call.adapter, call.endpoint), load_s
        endpoint = self._endpoint(call, backend.name)
        if endpoint is None:
            return
        wake_s = self._wakes_s.get(endpoint.index)
        if wake_s is not None:
            yield Warmable("model", endpoint.model, endpoint.index), wake_s
        elif _by_prefix(endpoint):
            prefix = self.prompts.of_unit((call.application, unit))
            if prefix is not None and self._is_cold(endpoint, prefix):
                prefill_s = self.prompts.known[prefix].prefill_s(endpoint.spec.profile or USUAL)
                yield Warmable("prefix", prefix, endpoint.index), prefill_s

    def _endpoint(self, call: RunCall, model: str) -> Endpoint | None:
        """Return the endpoint of *model* that the caller of *call* prefers; None without one."""
        own = self.topology.endpoints[call.endpoint] if call.endpoint >= 0 else None
        if own is not None and own.model == model:
            return own
        candidates = self.topology.candidates(model, own.region if own is not None else "")
        return self.topology.endpoints[int(candidates[0])] if candidates.size else None

    # Adapters

    def _warm_adapters(self) -> None:
        topology, fleet = self.topology, self.topology.fleet
        if not topology.adapter_names:
            return
        count = len(topology.endpoints)
        for each in self.adapters.look(
            fleet, topology.arrays, self.queue.arrays, lambda at: HERMES if at < count else LRU, self.likely
        ):
            replica, name = topology.by_slot[each.instance], topology.adapter_names[each.adapter]
            spec = replica.spec
            unload = (topology.adapter_names[each.leaves],) if each.leaves >= 0 else ()
            self.deliver(
                port.Warm(
                    spec.name,
                    spec.state_changed_at,
                    spec.url,
                    spec.api_key,
                    name,
                    topology.adapter_source(name),
                    unload,
                    each.again,
                )
            )

    # System prompts

    def admit(self, arrival: Arrival) -> None:
        """Note the system prompt of a request, and that its unit has it."""
        asked = arrival.asked
        if not asked.system_blocks:
            return
        adapter = self.topology.adapter_number(asked.adapter)
        blocks = asked.prefix_hashes[: asked.system_blocks]
        unit = ((asked.tenant_id, asked.application), asked.unit) if asked.application and asked.unit else None
        self.prompts.come(_prefix(asked), Prompt(blocks, asked.block_tokens, asked.model, adapter), unit)

    def _warm_prefixes(self) -> None:
        now_s, topology, prompts = self.clock(), self.topology, self.prompts
        for slot in prompts.overdue(now_s):
            self._give_up(slot)
        endpoint_of = {slot: one.endpoint.index for slot, one in topology.by_slot.items()}
        prompts.waste(topology.fleet, self.queue.affinity, endpoint_of, now_s)
        calls: dict[int, list[LikelyCall]] = {}
        for call in self.due_now("prefix"):
            calls.setdefault(call.target.endpoint, []).append(call)
        for endpoint in topology.endpoints:
            if not endpoint.spec.tuned.PREWARM_SHARE or not _by_prefix(endpoint):
                continue
            for request in self.queue.first(endpoint, MOST_WAITING):
                if request.asked.system_blocks:
                    self._warm(endpoint, _prefix(request.asked))
            for call in calls.get(endpoint.index, ()):
                self._warm(endpoint, cast("int", call.target.name))

    def _is_cold(self, endpoint: Endpoint, prefix: object) -> bool:
        """Whether no instance of *endpoint* with room has a system prompt, whose text is known."""
        topology = self.topology
        return self.prompts.is_cold(topology.fleet, topology.arrays, self.queue.affinity, endpoint.index, prefix)

    def _warm(self, endpoint: Endpoint, prefix: int) -> None:
        """Have one instance of *endpoint* compute a system prompt, where the rule says so."""
        known, topology = self.prompts.known.get(prefix), self.topology
        if known is None or known.model != endpoint.model:  # a fallback would be sent the text for another model
            return
        profile, share = endpoint.spec.profile or USUAL, endpoint.spec.tuned.PREWARM_SHARE
        slot = self.prompts.place(
            topology.fleet,
            topology.arrays,
            self.queue.affinity,
            endpoint.index,
            prefix,
            profile,
            share,
            self.clock(),
        )
        if slot < 0:
            return
        spec = topology.by_slot[slot].spec
        self._began[slot] = spec.state_changed_at
        self.deliver(port.WarmPrefix(spec.name, spec.state_changed_at, spec.url, spec.api_key, prefix))

    def warmed(self, record: port.PrefixWarmed) -> None:
        """Take in the end of a request that warmed a system prompt."""
        replica = self._replica(record.instance)
        warming = self.prompts.warming.get(replica.slot) if replica is not None else None
        if (
            replica is None
            or warming is None
            or (warming.prompt, self._began[replica.slot]) != (record.prefix, record.ready_at)
        ):
            return
        if record.failure or replica.spec.state_changed_at != record.ready_at:
            self._give_up(replica.slot)
            return
        fleet, endpoint = self.topology.fleet, replica.endpoint.index
        self.prompts.end(fleet, self.queue.affinity, endpoint, replica.slot, self.clock())

    def _give_up(self, slot: int) -> None:
        """Give up what is being warmed in *slot*."""
        self.prompts.end(self.topology.fleet, self.queue.affinity, -1, slot, self.clock(), failed=True)

    # Sleeping models

    def wakes(self, endpoint: Endpoint) -> LikelyCall | None:
        """Return the call for which an instance of *endpoint* should wake now; None to let it sleep."""
        one = self._woken.get((endpoint.model, endpoint.region))
        woken, again_s = (one.unused, one.at_s + AGAIN_S) if one is not None else (False, -math.inf)
        return wakes(self.due_now("model"), endpoint.index, self.clock(), again_s, woken=woken)

    def woken(self, endpoint: Endpoint, call: LikelyCall) -> str:
        """Take in that an instance of *endpoint* is being woken for *call*; return why."""
        self._woken[endpoint.model, endpoint.region] = Woken(self.clock())
        self.counts["model"]["warmed"] += 1
        return f"Prewarming: {call.unit} will probably follow."

    def _sleeping(self) -> dict[int, float]:
        """Return the time to wake an instance of each endpoint that has none awake, where one sleeps."""
        wakes_s, replicas = dict[int, float](), self.topology.replicas.values()
        for one in replicas:
            if one.spec.state == InstanceState.SLEEPING:
                wakes_s[one.endpoint.index] = WAKE_S
        for group in self.topology.swap_groups:
            for member in group.members:
                endpoint = self.topology.endpoint(member.model, member.region)
                if endpoint is not None:
                    wakes_s[endpoint.index] = member.swap_s
        for one in replicas if wakes_s else ():
            if one.spec.state in PRESENT:
                wakes_s.pop(one.endpoint.index, None)
        return wakes_s

    def _look_at_models(self) -> None:
        """Give up those that no request used: they sleep again, or are long awake."""
        for (model, region), one in self._woken.items():
            endpoint = self.topology.endpoint(model, region)
            serves = endpoint is not None and any(
                self.topology.fleet.accepting[each.slot] for each in self.topology.members(endpoint)
            )
            if self.clock() - one.at_s > OPEN_S or (one.serves and not serves):
                one.unused = False
            one.serves |= serves

    def placed(self, request: Request, replica: Replica) -> None:
        """Count what *request* uses at *replica* that was warmed early."""
        asked = request.asked
        one = self._woken.get((asked.model, replica.endpoint.region))
        if one is not None and one.unused:
            one.unused = False
            self.counts["model"]["used"] += 1
        if request.adapter >= 0:
            self.adapters.use(replica.slot, request.adapter)
        if asked.system_blocks and _by_prefix(replica.endpoint):
            self.prompts.time.use(replica.slot, _prefix(asked))

    def _replica(self, name: str) -> Replica | None:
        return next((one for one in self.topology.replicas.values() if one.name == name), None)


def _by_prefix(endpoint: Endpoint) -> bool:
    return POLICY_CODES[endpoint.spec.policy.routing] == LEAST_DELAY


def _prefix(asked: port.Asked) -> int:
    """Return the hash that stands for the system prompt of *asked*."""
    return asked.prefix_hashes[asked.system_blocks - 1]
