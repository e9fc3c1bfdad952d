"""Live prewarming (Hermes section 3.4): adapters, system prompts and sleeping models, and what became of each.

What is likely is decided by `scheduling.applications.prewarming`; this carries it out once a second. A system prompt is
computed by a request for one token, where `scheduling.applications.system_prompts` says. That goes by the prefix index, so
it needs a router that considers prefixes: others would send the call anywhere. The text is the
gateway's (`controlplane.gateway.upstream.prewarming`); here a prompt is the hash of its last whole block.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Final, cast

from controlplane.dispatch import kernels, port
from controlplane.dispatch.live_fleet.topology import Endpoint, Replica, Request, Topology
from controlplane.dispatch.prewarming_log import CalledBy, Fate, PrewarmLog
from controlplane.dispatch.runs import ApplicationRuns
from controlplane.dispatch.waiting_queue import WaitingQueue
from controlplane.fleet.lifecycle.states import PRESENT, InstanceState
from scheduling.applications.demand_graph import Backend
from scheduling.applications.prewarming import (
    AGAIN_S,
    EPWQ,
    HERMES,
    LRU,
    MOST_WAITING,
    AdapterPrewarming,
    LikelyCall,
    Warmable,
    due,
    load_time_s,
    wakes,
)
from scheduling.applications.standings import Run, RunCall
from scheduling.applications.system_prompts import Prompt, PromptPrewarming
from scheduling.compiled import uncompiled
from scheduling.fleet.profile import USUAL
from scheduling.routing.adapters import NOT_LOADED
from scheduling.routing.prefix_affinity import covered
from scheduling.routing.routers import LEAST_DELAY, POLICY_CODES

WAKE_S: Final = 5.0
"""Taken for waking an instance that shares no GPUs; those that do have measured times."""
SLICE_S: Final = 0.002
"""Longest time at a stretch for likely calls, ten times a second: those of 1,000 runs in progress take 0.1 s in all."""


def name_of_prefix(prefix: int) -> str:
    """Return the digest that stands for a system prompt in records."""
    return f"{prefix & (1 << 64) - 1:016x}"


class Prewarming:
    """*starts_s* gives the usual times to start the backends of other units that are kept warm, by name."""

    def __init__(
        self,
        topology: Topology,
        queue: WaitingQueue,
        runs: ApplicationRuns,
        clock: Callable[[], float],
        deliver: port.Deliver,
    ) -> None:
        self.topology, self.queue, self.runs, self.clock, self.deliver = topology, queue, runs, clock, deliver
        self.adapters = AdapterPrewarming()
        self.log = PrewarmLog()
        self._likely: dict[int, list[LikelyCall]] = {}
        """By run, as of when it was last looked at,"""
        self._seen: dict[int, int] = {}
        """and its `Run.reports` then."""
        self._runs_left: list[Run] = []
        """Those not looked at since all were, the first one last."""
        self.starts_s: Callable[[], Mapping[str, float]] = dict
        self._starts_s: Mapping[str, float] = {}
        self._wakes_s: dict[int, float] = {}
        """As of this look: times to wake a sleeping instance, by endpoint without one that is awake."""
        self.prompts = PromptPrewarming()
        self._began: dict[int, float] = {}
        """By slot: since when the instance that last warmed a prompt has been in its state."""
        self._woken: dict[tuple[str, str], float] = {}
        """Until when no instance of a model in a region is woken again."""

    # What is likely

    def look(self) -> None:
        """Warm what waiting requests and likely calls need. Call every second."""
        self._starts_s, self._wakes_s = self.starts_s(), self._sleeping()
        self.prompts.begin()
        if not (self.topology.adapter_names or self.prompts.any_known or self._starts_s or self._wakes_s):
            self._likely, self._seen, self._runs_left = {}, {}, []
        elif not self._runs_left:
            runs = self.runs.standings.by_number
            self._likely = {number: calls for number, calls in self._likely.items() if number in runs}
            self._seen = {number: self._seen[number] for number in self._likely}
            self._runs_left = list(reversed(runs.values()))
            self.look_on()
        self.log.sweep()
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

    def called_by(self, call: LikelyCall) -> CalledBy:
        """Return whose call *call* will be."""
        run = self.runs.standings.by_number[call.run]
        tenant_id, application = cast("tuple[int, str]", run.application)
        return CalledBy(tenant_id, application, str(run.name))

    def needs(self, call: RunCall, unit: str, backend: Backend) -> Iterator[tuple[Warmable, float]]:
        """Yield what a call of *unit* that follows *call* at *backend* needs, with the seconds to warm it."""
        if backend.kind in ("container", "dnn"):
            start_s = self._starts_s.get(backend.name)
            if start_s is not None:
                yield Warmable(backend.kind, backend.name), start_s
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
        for one in self.log.open("adapter"):
            replica = self._replica(one.place)
            number = topology.adapter_number(one.backend)
            if replica is None or kernels.tier_of(fleet, replica.slot, number) == NOT_LOADED:
                self.log.settle(one, "waste")
        by = [each.spec.tuned.PREWARM_BY for each in topology.endpoints]
        warmed = self.adapters.look(
            fleet, topology.arrays, self.queue.arrays, lambda at: by[at] if at < len(by) else LRU, self.likely
        )
        calls = {(call.target.endpoint, call.target.name): call for call in reversed(self.due_now("adapter"))}
        for each in warmed:
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
            why, called_by = self._why(
                replica.endpoint, each.adapter, calls.get((replica.endpoint.index, each.adapter))
            )
            if called_by is not None:
                self.log.warm(self.log.begin("adapter", name, spec.name, why, called_by))

    def _why(self, endpoint: Endpoint, adapter: int, call: LikelyCall | None) -> tuple[str, CalledBy | None]:
        for request in self.queue.first(endpoint, MOST_WAITING):
            if request.adapter == adapter:
                return "A request with it waits.", _caller(request.asked)
        return ("", None) if call is None else (why_likely(call), self.called_by(call))

    # System prompts

    def come(self, asked: port.Submit) -> None:
        """Take in the system prompt of a request, and that its unit has it."""
        if not asked.system_blocks:
            return
        adapter = self.topology.adapter_number(asked.adapter)
        blocks = asked.prefix_hashes[: asked.system_blocks]
        unit = ((asked.tenant_id, asked.application), asked.unit) if asked.application and asked.unit else None
        self.prompts.come(_prefix(asked), Prompt(blocks, asked.block_tokens, asked.model, adapter), unit)

    def _warm_prefixes(self) -> None:
        now_s, topology, prompts = self.clock(), self.topology, self.prompts
        for slot in prompts.overdue(now_s):
            self._end(slot, "It did not answer.")
        endpoint_of = {slot: one.endpoint.index for slot, one in topology.by_slot.items()}
        for slot, prefix in prompts.waste(topology.fleet, self.queue.affinity, endpoint_of, now_s):
            name = topology.by_slot[slot].name if slot in topology.by_slot else ""
            self._settle(prefix, name, "waste")
        there = {one.name for one in topology.replicas.values()}
        for one in self.log.open("prefix"):
            if one.place not in there:
                self.log.settle(one, "waste")
        calls: dict[int, list[LikelyCall]] = {}
        for call in self.due_now("prefix"):
            calls.setdefault(call.target.endpoint, []).append(call)
        for endpoint in topology.endpoints:
            tuned = endpoint.spec.tuned
            if tuned.PREWARM_BY == LRU or not tuned.PREWARM_SHARE or not _by_prefix(endpoint):
                continue
            for request in self.queue.first(endpoint, MOST_WAITING):
                if request.asked.system_blocks:
                    self._warm(endpoint, _prefix(request.asked), "A request with it waits.", _caller(request.asked))
            for call in calls.get(endpoint.index, ()) if tuned.PREWARM_BY != EPWQ else ():
                self._warm(endpoint, cast("int", call.target.name), why_likely(call), self.called_by(call))

    def _is_cold(self, endpoint: Endpoint, prefix: Hashable) -> bool:
        """Whether no instance of *endpoint* with room has a system prompt, whose text is known."""
        topology = self.topology
        return self.prompts.is_cold(topology.fleet, topology.arrays, self.queue.affinity, endpoint.index, prefix)

    def _warm(self, endpoint: Endpoint, prefix: int, why: str, called_by: CalledBy) -> None:
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
        self.log.begin("prefix", name_of_prefix(prefix), spec.name, why, called_by)
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
            self._end(replica.slot, record.failure or "It was restarted.")
            return
        fleet, endpoint = self.topology.fleet, replica.endpoint.index
        self.prompts.end(fleet, self.queue.affinity, endpoint, replica.slot, self.clock())
        one = self.log.get("prefix", name_of_prefix(record.prefix), record.instance)
        if one is not None:
            self.log.warm(one)

    def _end(self, slot: int, why: str) -> None:
        """Give up what is being warmed in *slot*."""
        prefix, replica = self.prompts.warming[slot].prompt, self.topology.by_slot.get(slot)
        self.prompts.end(self.topology.fleet, self.queue.affinity, -1, slot, self.clock(), failed=True)
        if replica is not None:
            self._settle(prefix, replica.name, "failed", why)

    def _settle(self, prefix: Hashable, place: str, fate: Fate, why: str = "") -> None:
        one = self.log.get("prefix", name_of_prefix(cast("int", prefix)), place)
        if one is not None:
            self.log.settle(one, fate, why)

    # Sleeping models

    def wakes(self, endpoint: Endpoint) -> LikelyCall | None:
        """Return the call for which an instance of *endpoint* should wake now; None to let it sleep."""
        if endpoint.spec.tuned.PREWARM_BY != HERMES:
            return None
        key = endpoint.model, endpoint.region
        woken, again_s = self.log.get("model", *key) is not None, self._woken.get(key, -math.inf)
        return wakes(self.due_now("model"), endpoint.index, self.clock(), again_s, woken=woken)

    def woken(self, endpoint: Endpoint, call: LikelyCall) -> str:
        """Record that an instance of *endpoint* is being woken for *call*; return why."""
        why = why_likely(call)
        self._woken[endpoint.model, endpoint.region] = self.clock() + AGAIN_S
        self.log.begin("model", endpoint.model, endpoint.region, why, self.called_by(call))
        return f"Prewarming: {why}"

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
        for one in self.log.open("model"):
            endpoint = self.topology.endpoint(one.backend, one.place)
            serves = endpoint is not None and any(
                self.topology.fleet.accepting[each.slot] for each in self.topology.members(endpoint)
            )
            if serves and one.warm_at is None:
                self.log.warm(one)
            elif not serves and one.warm_at is not None:
                self.log.settle(one, "waste")

    # What became of it

    def placed(self, request: Request, replica: Replica, cached_tokens: float) -> None:
        """Record what *request* found warm at *replica*, which has *cached_tokens* of its prompt by the prefix index."""
        asked, log = request.asked, self.log
        log.use("model", asked.model, replica.endpoint.region, asked.arrived_at)
        if request.adapter >= 0:
            self.adapters.use(replica.slot, request.adapter)
            used = log.use("adapter", asked.adapter, replica.name, asked.arrived_at)
            if not used and request.adapter_tier == NOT_LOADED and asked.run:
                log.miss("adapter", asked.adapter, replica.name, "It was not loaded there.", _caller(asked))
        if asked.system_blocks and _by_prefix(replica.endpoint):
            name = name_of_prefix(_prefix(asked))
            tokens = min(int(uncompiled(covered)(asked.system_blocks)) * asked.block_tokens, asked.prompt_tokens - 1)
            used = log.use("prefix", name, replica.name, asked.arrived_at)
            self.prompts.time.use(replica.slot, _prefix(asked))
            if not used and asked.run and cached_tokens < tokens:
                log.miss("prefix", name, replica.name, "It was not cached there.", _caller(asked))

    def _replica(self, name: str) -> Replica | None:
        return next((one for one in self.topology.replicas.values() if one.name == name), None)


def _by_prefix(endpoint: Endpoint) -> bool:
    return POLICY_CODES[endpoint.spec.policy.routing] == LEAST_DELAY


def _prefix(asked: port.Submit) -> int:
    """Return the hash that stands for the system prompt of *asked*."""
    return asked.prefix_hashes[asked.system_blocks - 1]


def _caller(asked: port.Submit) -> CalledBy:
    return CalledBy(asked.tenant_id, asked.application, asked.run)


def why_likely(call: LikelyCall) -> str:
    """Return in words why what *call* needs is warmed."""
    return f"{call.unit} will probably follow."
