"""Reference life cycle of instances, against which the compiled state changes are checked.

An instance is in one state at a time; some states are permanent, others pass into the next after a delay. A draining
instance takes no new work and enters its next state once empty. Rules: docs/plan/simulation.md.
"""

import math
from dataclasses import astuple, dataclass, field

import numpy as np

from scheduling.policy import array_value
from scheduling.simulation.cluster.description import Cluster, Sharing
from scheduling.simulation.cluster.world import State
from scheduling.simulation.engine.reference import EngineConfig, ReferenceEngine, StepResult
from tests.oracles.dispatch import PlainInstance
from tests.oracles.lookahead import FORGOTTEN_TOKENS, PlainMap

NEVER = float("inf")
SPOT_SPREAD = 0.6
"""Standard deviation of the logarithm of the reclaim time."""

WITHOUT_GPUS = {State.EMPTY, State.ASLEEP, State.FAILED}
SERVES_SOON = {State.READY, State.STARTING, State.LOADING, State.RECLAIMING, State.WAKING, State.SWAPPING}


@dataclass(slots=True)
class Held:
    """A request and what the dispatcher knows of it."""

    number: int
    endpoint: int = -1
    expected_prompt: int = 0
    expected_output: int = 0
    priority: int = 0
    """Input of its engine."""
    counted_tokens: int = 0
    produced_tokens: int = 0
    preempted: bool = False
    evicted: bool = False
    """Leaves its server at the end of an iteration."""
    order: int = 0


@dataclass(slots=True)
class Server:
    """An instance: its engine, the iteration in progress, and its state."""

    number: int
    region: str
    gpu_type: str
    plain: PlainInstance
    config: EngineConfig
    state: State
    models: list[str]
    """All engines so far, the current one first."""
    engine: ReferenceEngine
    step: StepResult | None = None
    event_s: float = NEVER
    held: dict[str, Held] = field(default_factory=dict)
    admitted: dict[str, None] = field(default_factory=dict)
    """Requests of `held` that hold blocks, in order of admission."""
    since_s: float = 0.0
    spent_s: dict[State, float] = field(default_factory=dict)
    ahead: PlainMap = field(default_factory=PlainMap)
    until_s: float = NEVER
    """End of its state,"""
    then: list[tuple[State, float]] = field(default_factory=list)
    """and the states that follow, each with its duration."""
    goal: tuple[list[tuple[State, float]], int] | None = None
    """State once drained, and its endpoint (-1: unchanged)."""
    sharing: Sharing | None = None
    in_memory: bool = False
    """Whether its weights stay in CPU memory while it sleeps."""


@dataclass(slots=True)
class SwapGroup:
    """Servers that share their GPUs."""

    memory_bytes: float
    members: list[Server] = field(default_factory=list)
    target: Server | None = None
    """Server to wake when the awake one sleeps."""

    @property
    def holder(self) -> Server | None:
        """Server that has the GPUs."""
        return next((each for each in self.members if each.state not in WITHOUT_GPUS), None)

    @property
    def taken(self) -> bool:
        return self.target is not None or self.holder is not None

    def keep(self, server: Server) -> None:
        """Put *server* to sleep: its weights stay in memory if there is room."""
        held = sum(each.sharing.weights_bytes for each in self.members if each.in_memory and each.sharing)
        server.in_memory = held + server.sharing.weights_bytes <= self.memory_bytes


class ReferenceLives:
    """States of all instances of *cluster*."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.delays = cluster.delays
        self.engines = cluster.engines()
        self.random = np.random.default_rng(seed)
        self.servers = [self._server(number) for number in range(len(cluster.instances))]
        self.groups: dict[str, SwapGroup] = {}
        self.swaps = 0
        for server in self.servers:
            if server.sharing is not None:
                name = server.sharing.group
                group = self.groups.setdefault(name, SwapGroup(server.sharing.memory_bytes))
                group.members.append(server)
                if server.state == State.ASLEEP:
                    group.keep(server)
        self.changes: list[tuple[float, int, int, State, State]] = []
        """(time_s, instance, endpoint, before, after)."""
        self.totals = {"prefix_queried_tokens": 0, "prefix_hit_tokens": 0, "preemptions": 0}
        """Of stopped engines."""

    def _server(self, number: int) -> Server:
        spec = self.cluster.instances[number]
        plain = PlainInstance(
            endpoint=self.cluster.endpoints.index((spec.model, spec.region)),
            accepting=spec.state == State.READY,
            max_num_seqs=spec.dispatch_max_num_seqs or spec.engine.max_num_seqs,
            kv_capacity_tokens=spec.dispatch_kv_tokens or spec.engine.kv_capacity_tokens,
            memory_tokens=spec.engine.kv_capacity_tokens,
            profile=astuple(spec.engine.profile),
        )
        self._limit_ahead(plain)
        if spec.dispatch_max_num_seqs is None:
            plain.front_end = self._front_end(plain.endpoint, spec.engine)
        if self._one_by_one(plain.endpoint):
            plain.max_num_seqs = 1
        return Server(
            number,
            spec.region,
            spec.gpu_type,
            plain,
            spec.engine,
            spec.state,
            [spec.model],
            ReferenceEngine(spec.engine),
            sharing=spec.sharing,
        )

    def _limit_ahead(self, plain: PlainInstance) -> None:
        key = self.cluster.endpoints[plain.endpoint]
        policy = self.cluster.policy(key)
        plain.ahead_limit, plain.round_trip_s = array_value(policy, "requests_ahead_limit"), policy.round_trip_s
        plain.trips = []

    def _front_end(self, endpoint: int, engine: EngineConfig) -> tuple[float, ...]:
        limits = engine.front_end
        if math.isinf(limits.requests_per_s) and math.isinf(limits.tokens_per_s):
            return ()
        margin = self.cluster.policy(self.cluster.endpoints[endpoint]).room_margin
        return limits.requests_per_s, limits.tokens_per_s, margin

    def _one_by_one(self, endpoint: int) -> bool:
        return self.cluster.policy(self.cluster.endpoints[endpoint]).batching.mode == "none"

    def of(self, endpoint: int) -> list[Server]:
        return [server for server in self.servers if server.plain.endpoint == endpoint]

    def serving(self, endpoint: int) -> int:
        """Return instances that serve *endpoint* or soon will."""
        shared = {State.DRAINING, State.FALLING_ASLEEP, State.ASLEEP, State.EMPTY}
        return sum(
            server.state in SERVES_SOON or (server.sharing is not None and server.state in shared)
            for server in self.of(endpoint)
        )

    def put(self, server: Server, now_s: float, *states: tuple[State, float]) -> None:
        """Move *server* through *states*, each with its duration; the last may be permanent."""
        (state, lasts_s), *then = states
        before = server.state
        server.spent_s[server.state] = server.spent_s.get(server.state, 0.0) + now_s - server.since_s
        self.changes.append((now_s, server.number, server.plain.endpoint, server.state, state))
        server.state, server.since_s, server.until_s, server.then = state, now_s, now_s + lasts_s, then
        server.plain.accepting = state == State.READY
        if server.sharing is not None:
            self._share(server, before, now_s)
        if state not in (State.READY, State.DRAINING):
            server.plain.placed_tokens += FORGOTTEN_TOKENS
            self._renew(server)

    def _share(self, server: Server, before: State, now_s: float) -> None:
        """Update the swap group after *server* left the state *before*."""
        group = self.groups[server.sharing.group]
        if server.state == State.FALLING_ASLEEP:
            group.keep(server)
        elif server.state != State.ASLEEP:
            server.in_memory = False
        if group.target is server:
            group.target = None
        elif group.target and before in (State.READY, State.DRAINING) and server.state != State.DRAINING:
            if server.state == State.FALLING_ASLEEP:
                group.target.until_s = server.until_s
            elif server.state in WITHOUT_GPUS:
                group.target.until_s = now_s
            else:
                group.target = None

    def _take_gpus(self, server: Server, now_s: float) -> None:
        sharing = server.sharing
        if server.state == State.EMPTY:
            self.put(server, now_s, (State.LOADING, self.delays.local_weights_s), (State.READY, NEVER))
        else:
            lasts_s = sharing.wake_s if server.in_memory else sharing.reload_s
            self.put(server, now_s, (State.WAKING, lasts_s), (State.READY, NEVER))

    def swap_to(self, server: Server, now_s: float) -> bool:
        """Give *server* the GPUs of its group; return False if that is impossible now."""
        if server.sharing is None or server.state not in (State.ASLEEP, State.EMPTY):
            return False
        group = self.groups[server.sharing.group]
        holder = group.holder
        if group.target or (holder and holder.state not in (State.READY, State.DRAINING)):
            return False
        self.swaps += 1
        if holder is None:
            self._take_gpus(server, now_s)
        else:
            group.target = server
            self.sleep(holder, now_s)
        return True

    def sleep(self, server: Server, now_s: float) -> None:
        lasts_s = server.sharing.sleep_s if server.sharing else self.delays.sleep_s
        self.drain(server, now_s, (State.FALLING_ASLEEP, lasts_s), (State.ASLEEP, NEVER))

    def _renew(self, server: Server) -> None:
        """Restart its engine with an empty cache."""
        for name in self.totals:
            self.totals[name] += getattr(server.engine, f"{name}_total")
        server.engine = ReferenceEngine(server.config)

    def total(self, name: str) -> int:
        return self.totals[name] + sum(int(getattr(server.engine, f"{name}_total")) for server in self.servers)

    def pass_on(self, server: Server, now_s: float) -> None:
        """End the current state of *server*."""
        if server.sharing is not None:
            if server.state in (State.EMPTY, State.ASLEEP):
                return self._take_gpus(server, now_s)
            if server.state == State.FAILED and self.groups[server.sharing.group].taken:
                server.then = [(State.EMPTY, NEVER)]
        self.put(server, now_s, *server.then)

    def drain(self, server: Server, now_s: float, *states: tuple[State, float], endpoint: int = -1) -> None:
        """Drain *server*, then move it through *states*, at another *endpoint* if one is given."""
        server.goal = list(states), endpoint
        if not server.held:
            self.settle(server, now_s)
        elif server.state != State.DRAINING:
            self.put(server, now_s, (State.DRAINING, NEVER))

    def settle(self, server: Server, now_s: float) -> None:
        """*server* is drained."""
        assert server.goal is not None
        (states, endpoint), server.goal = server.goal, None
        if endpoint >= 0:
            model, _ = self.cluster.endpoints[endpoint]
            if states[0][0] == State.SWAPPING:
                states = [(State.SWAPPING, self._swap_s(server, model)), (State.READY, NEVER)]
            server.models = [model, *(other for other in server.models if other != model)]
            server.config = self.engines[model, server.gpu_type]
            server.plain.endpoint = endpoint
            server.plain.max_num_seqs = 1 if self._one_by_one(endpoint) else server.config.max_num_seqs
            server.plain.kv_capacity_tokens = server.plain.memory_tokens = server.config.kv_capacity_tokens
            server.plain.profile = astuple(server.config.profile)
            server.plain.front_end, server.plain.given = self._front_end(endpoint, server.config), (0.0, 0.0)
            self._limit_ahead(server.plain)
        self.put(server, now_s, *states)

    def _swap_s(self, server: Server, model: str) -> float:
        """Return the tier *model* loads from: GPU for the last few models, host memory for those before."""
        on_gpu, in_memory = self.delays.gpu_models, self.delays.gpu_models + self.delays.cpu_models
        if model in server.models[:on_gpu]:
            return self.delays.swap_gpu_s
        return self.delays.swap_cpu_s if model in server.models[:in_memory] else self.delays.swap_storage_s

    def start(self, server: Server, now_s: float) -> bool:
        """Start *server*; return False if it is not at rest."""
        delays = self.delays
        if server.sharing is not None and server.state in (State.EMPTY, State.ASLEEP):
            if self.groups[server.sharing.group].taken:
                return False
            self._take_gpus(server, now_s)
        elif server.state == State.EMPTY:
            loading = State.LOADING, delays.remote_weights_s
            self.put(server, now_s, (State.STARTING, delays.start_s), loading, (State.READY, NEVER))
        elif server.state == State.SPOT:
            drawn_s = delays.spot_median_s * math.exp(SPOT_SPREAD * self.random.standard_normal())
            self.put(server, now_s, (State.RECLAIMING, min(drawn_s, delays.spot_max_s)), (State.READY, NEVER))
        elif server.state == State.ASLEEP:
            self.put(server, now_s, (State.WAKING, delays.wake_s), (State.READY, NEVER))
        elif server.state == State.DRAINING and server.goal is not None and server.goal[1] < 0:
            server.goal = None
            self.put(server, now_s, (State.READY, NEVER))
        else:
            return False
        return True

    def redeploy(self, server: Server, endpoint: int, now_s: float, remote: bool = False) -> None:
        weights_s = self.delays.remote_weights_s if remote else self.delays.local_weights_s
        self.drain(server, now_s, (State.LOADING, weights_s), (State.READY, NEVER), endpoint=endpoint)

    def fail(self, server: Server, now_s: float, repair_s: float) -> list[Held]:
        """Lose *server*; return its requests: running ones in order of admission, then the others by key."""
        there = (*server.admitted, *server.engine._waiting, *server.engine._unread)
        lost = [server.held[name] for name in (*there, *(name for name in server.held if name not in there))]
        goal = server.goal
        server.held, server.admitted, server.step, server.event_s, server.goal = {}, {}, None, NEVER, None
        if goal is not None and goal[1] >= 0 and goal[0][0][0] == State.LOADING:  # its GPUs are another model's
            server.goal = goal
            self.put(server, now_s, (State.FAILED, NEVER))
            return lost
        loading = State.LOADING, self.delays.local_weights_s
        self.put(server, now_s, (State.FAILED, repair_s), loading, (State.READY, NEVER))
        return lost

    def scale_out(self, endpoint: int, now_s: float) -> bool:
        """Add an instance to *endpoint* by the fastest route; return False if there is none."""
        members = [server for server in self.of(endpoint) if server.sharing is None]
        for state in (State.DRAINING, State.SPOT, State.ASLEEP):
            if any(server.state == state and self.start(server, now_s) for server in members):
                return True
        model, region = self.cluster.endpoints[endpoint]
        for server in self.servers:
            if server.sharing or not self.cluster.share_spot or server.state != State.SPOT or server.region != region:
                continue
            if (model, server.gpu_type) in self.engines:
                self.redeploy(server, endpoint, now_s)
                return True
        return any(server.state == State.EMPTY and self.start(server, now_s) for server in members)

    def scale_in(self, endpoint: int, now_s: float) -> bool:
        """Remove one: the one with the least work left drains and is lent out."""
        ready = [server for server in self.of(endpoint) if server.state == State.READY and not server.sharing]
        if not ready:
            return False
        least = min(ready, key=lambda server: server.plain.remaining_tokens)
        self.drain(least, now_s, (State.SPOT, NEVER))
        return True
