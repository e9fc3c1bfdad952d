"""Puts the state of a live fleet on the cluster of a scenario: the start of a forked simulation.

A gateway sees which tokens have streamed, but not what engines compute of prompts: one without a token begins again. The
scenario's policies may differ from those of the live fleet: queue keys are computed again, and request groups where the
endpoints that order by them are others. Each instance takes a place of its model, region and GPU type in the cluster; the
requests of an instance for which there is no place wait again.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import inf, nan

import numpy as np
from numpy.typing import NDArray

from scheduling.applications.standings import follows_runs, key_in_run
from scheduling.fleet.profile import Profile
from scheduling.fleet.state import (
    NEVER_S,
    Condition,
    FleetState,
    GroupsState,
    InstanceState,
    PromptState,
    RequestState,
    RunningRequest,
    WaitingRequest,
)
from scheduling.policy import EndpointPolicy
from scheduling.queueing.groups import GROUP_ORDERS
from scheduling.queueing.held import OPPORTUNISTIC
from scheduling.queueing.ordering import (
    BY_RUN,
    FAIR,
    HERMES,
    ORDERINGS,
    QLM,
    SLACK,
    Standing,
    due_in_run,
    engine_priority,
    first_due_s,
    queue_key,
    run_due_s,
)
from scheduling.routing.models import RULES, ModelRule
from scheduling.routing.prefix_affinity import filled
from scheduling.routing.requests_ahead import ROUND_TRIP_S
from scheduling.scaling.spot import spot_policy
from scheduling.simulation.cluster.description import Cluster
from scheduling.simulation.cluster.world import OUTCOME, Outcome, State
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.staging.requests import requests_of
from scheduling.simulation.state.placing import (
    Fork,
    ForkedEndpoint,
    ForkedGroup,
    ForkedGroups,
    ForkedInstance,
    ForkedRequest,
    Queued,
    Where,
)
from scheduling.simulation.workload.columns import Coded, Workload
from scheduling.simulation.workload.requests import Requests

OVERRUN: float = 1.2
"""Expected length of an output that exceeds all known ratios, over what it has; as look-ahead maps have it."""
FIRST_PLACED = (Condition.READY, Condition.DRAINING, Condition.LOADING)


def fork(state: FleetState, scenario: Scenario, cluster: Cluster, tenants: list[str], seed: int) -> Fork:
    """Put *state* on *cluster*, that of *scenario*. Appends to *tenants* those that are not in it."""
    return _Forking(state, scenario, cluster, tenants, seed).fork()


class _Forking:
    def __init__(self, state: FleetState, scenario: Scenario, cluster: Cluster, tenants: list[str], seed: int) -> None:
        self.state, self.scenario, self.cluster = state, scenario, cluster
        self.endpoint_of = {key: at for at, key in enumerate(cluster.endpoints)}
        self.place_of = self._places()
        self.random = np.random.default_rng([seed, 3])
        known = [one for one in state.requests if (one.model, one.served_in) in self.endpoint_of]
        known.sort(key=lambda one: one.arrival_s)
        self.rows = {id(one): at for at, one in enumerate(known)}
        self.adapters: dict[str, int] = {}
        """Numbers of adapters by name."""
        self.block_tokens = min(sizes) if len(sizes := cluster.cached_block_sizes()) == 1 else 0
        """Of the prefix caches, 0 for none."""
        self.prompts = [self._blocks(one) for one in state.prompts] if self.block_tokens else []
        self.holders: defaultdict[int, dict[bytes, int]] = defaultdict(dict)
        """By instance of the fleet: blocks of the starts of prompts that it has, with the tokens given since."""
        for blocks, prompt in zip(self.prompts, state.prompts if self.prompts else (), strict=True):
            for one in prompt.holders:
                start, mine = blocks[: one.tokens // self.block_tokens].tobytes(), self.holders[one.instance]
                mine[start] = min(one.age_tokens, mine.get(start, one.age_tokens))
        self.requests = self._requests(known, tenants, seed)
        self.outcomes = np.zeros(len(known), OUTCOME)
        for name in ("ttft_s", "e2e_s", "queue_s"):
            self.outcomes[name] = np.nan
        self.outcomes["instance"] = self.outcomes["endpoint"] = -1
        self.outcomes["model_rule"] = [
            RULES.index(ModelRule(one.model_rule) if one.model_rule else None) for one in known
        ]
        self.falls_back = np.array([one.falls_back for one in known], bool)
        expected_s = [one.expected_wait_s if isinstance(one, WaitingRequest) else 0.0 for one in known]
        self.expected_wait_s = np.array(expected_s, np.float64)

    def _places(self) -> dict[int, int]:
        """Return the cluster's instance for each of the fleet's that has one."""
        free: defaultdict[tuple[str, str, str, bool], list[int]] = defaultdict(list)
        for at, spec in enumerate(self.cluster.instances):
            free[spec.model, spec.region, spec.gpu_type, spec.sharing is not None].append(at)
        rank = {condition: at for at, condition in enumerate(FIRST_PLACED)}
        taken = {}
        for at, one in sorted(enumerate(self.state.instances), key=lambda each: rank.get(each[1].state, len(rank))):
            places = free[one.model, one.region, one.gpu, bool(one.swap_group)]
            if places:
                taken[at] = places.pop(0)
        return taken

    def _requests(self, known: Sequence[RequestState], tenants: list[str], seed: int) -> Requests:
        """Return columns of *known*, with lengths that fit their instances."""
        longest = dict(zip(self.cluster.models, self.cluster.longest_tokens(), strict=True))
        outputs = np.array([self._output(one) for one in known], np.int64)
        least = np.array([_emitted(one) + 1 for one in known], np.int64)
        limits = np.array([longest[one.model] for one in known], np.int64)
        outputs = np.maximum(np.minimum(outputs, limits - 1), least)
        outputs = np.minimum(outputs, np.maximum(limits - 1, 1))
        prompts = np.array([one.prompt_tokens for one in known], np.int64)
        prompts = np.clip(prompts, 1, np.maximum(limits - outputs, 1))
        tenants += [name for name in dict.fromkeys(one.tenant for one in known) if name not in tenants]

        def coded(values: Sequence[str], names: list[str]) -> Coded:
            codes = {name: at for at, name in enumerate(names)}
            return Coded(np.array([codes.get(value, 0) for value in values], np.int32), names)

        workload = Workload(
            arrival_s=np.array([one.arrival_s for one in known], np.float64),
            prompt_tokens=prompts.astype(np.int32),
            output_tokens=outputs.astype(np.int32),
            model=coded([one.model for one in known], list(self.cluster.models)),
            region=coded([one.region for one in known], list(self.scenario.regions)),
            slo_class=coded([one.slo_class for one in known], list(self.scenario.classes)),
            tenant=coded([one.tenant for one in known], tenants),
            predicted_tokens=np.array([max(1, one.predicted_tokens) for one in known], np.int32),
        )
        requests = requests_of(self.scenario, self.cluster, workload, seed)
        serve = {spec.model for spec in self.cluster.instances} - {
            spec.model for spec in self.cluster.instances if not spec.engine.max_loras
        }
        adapters = [self._adapter(one.adapter) if one.model in serve else -1 for one in known]
        names = {name: at for at, name in enumerate(self.scenario.names)}
        asked = np.array([names.get(one.asked_model, -1) for one in known], np.int16)
        requests = requests._replace(adapter=np.array(adapters, np.int32), asked=asked)
        if self.prompts:
            requests = self._with_prompts(requests, known)
        released = [(at, one.priority) for at, one in enumerate(known) if one.priority is not None]
        if released:
            requests = requests._replace(priority=np.array(requests.priority))
            for at, priority in released:
                requests.priority[at] = priority
        return requests

    def _blocks(self, prompt: PromptState) -> NDArray[np.int64]:
        """Return hashes of the full blocks of *prompt* as engines have them, those of its tokens where they are known."""
        if prompt.tokens and prompt.tokens_block == self.block_tokens:
            return np.frombuffer(prompt.tokens, np.int64).copy()
        return filled(np.frombuffer(prompt.recorded, np.int64), prompt.block_tokens, self.block_tokens)

    def _with_prompts(self, requests: Requests, known: Sequence[RequestState]) -> Requests:
        none = np.zeros(0, np.int64)
        most = (requests.prompt_tokens // self.block_tokens).tolist()
        blocks = [
            (none if one.prompt is None else self.prompts[one.prompt])[:count]
            for one, count in zip(known, most, strict=True)
        ]
        first = np.cumsum([0, *(each.size for each in blocks)], dtype=np.int64)
        return requests._replace(prefix_first=first, prefix_hashes=np.concatenate([none, *blocks]))

    def _fill_cache(self, instance: ForkedInstance, at: int) -> None:
        """Give *instance* what instance *at* of the fleet has cached."""
        to_come, holders = self._to_come(at), sorted(self.holders[at].items(), key=lambda each: -each[1])
        instance.given = [(np.frombuffer(start, np.int64).copy(), age_tokens) for start, age_tokens in holders]
        instance.cached = [blocks[: _before(blocks, to_come)] for blocks, _ in instance.given]

    def _to_come(self, at: int) -> NDArray[np.int64]:
        """Return hashes of the blocks that instance *at* has still to compute for the requests that it was given."""
        none = np.zeros(0, np.int64)
        mine = [one for one in self.state.running if one.instance == at and one.prompt is not None]
        blocks = [self.prompts[one.prompt] for one in mine if one.prompt is not None]
        begun = [each for one, each in zip(mine, blocks, strict=True) if one.output_tokens]
        still = [
            each[one.cached_tokens // self.block_tokens :]
            for one, each in zip(mine, blocks, strict=True)
            if not one.output_tokens
        ]
        return np.setdiff1d(np.concatenate([none, *still]), np.concatenate([none, *begun]))

    def _adapter(self, name: str) -> int:
        """Return the number of an adapter, -1 for none; beyond those that the scenario draws for requests to come."""
        drawn = sum(model.adapters.count for model in self.scenario.models.values() if model.adapters)
        return self.adapters.setdefault(name, drawn + len(self.adapters)) if name else -1

    def _output(self, one: RequestState) -> int:
        """Return output tokens of *one*: known, or drawn from recent ratios to the prediction, beyond those emitted."""
        if one.true_output is not None:
            return one.true_output
        emitted, predicted = _emitted(one), max(1, one.predicted_tokens)
        ratios = np.asarray(self.state.lengths.get(one.model, ()), np.float64)
        ratios = ratios[ratios * predicted > emitted]
        if ratios.size:
            return int(max(emitted + 1, round(float(self.random.choice(ratios)) * predicted)))
        return int(predicted if predicted > emitted else max(emitted + 1, round(OVERRUN * emitted)))

    def fork(self) -> Fork:
        instances = [ForkedInstance(int(spec.state), loading_s=spec.start_s) for spec in self.cluster.instances]
        for at, place in self.place_of.items():
            self._fill_instance(instances[place], self.state.instances[at], place)
            if self.block_tokens:
                self._fill_cache(instances[place], at)
        waiting = [self._queued(one, one.expected_output) for one in self.state.waiting if id(one) in self.rows]
        lost = self._place_running(instances)
        waiting += [self._queued(one, one.expected_output) for one in lost]
        swap_targets = self._swap_targets(instances)
        for at, place in self.place_of.items():
            self._begin_iteration(instances[place], self.state.instances[at], place)
        return Fork(
            requests=self.requests,
            outcomes=self.outcomes,
            instances=instances,
            endpoints=self._endpoints(),
            waiting=waiting,
            groups=self._groups(self.state.groups) if self.state.groups and not lost else None,
            swept_s=self.state.swept_s,
            swap_targets=swap_targets,
            asked_tokens=self._asked_tokens(),
            held=sorted(self.rows[id(one)] for one in self.state.held if id(one) in self.rows),
            backlogs=self.state.backlogs,
            look_s=self.state.look_s,
            falls_back=self.falls_back,
            expected_wait_s=self.expected_wait_s,
        )

    def _fill_instance(self, instance: ForkedInstance, seen: InstanceState, place: int) -> None:
        instance.state, instance.since_s = int(State[seen.state]), min(seen.since_s, -1e-9)
        instance.spot = seen.spot
        instance.ends_s = inf if seen.ends_s is None else max(0.0, seen.ends_s)
        if seen.state is Condition.DRAINING:
            instance.goal, instance.goal_s = int(State.EMPTY), inf
            sharing = self.cluster.instances[place].sharing
            if seen.leaves and sharing is not None:
                instance.goal, instance.goal_s = int(State.FALLING_ASLEEP), sharing.sleep_s
        instance.adapters = [self._adapter(name) for name in seen.adapters]
        instance.round_trips = np.array(seen.round_trips, np.float64)
        instance.round_trips[ROUND_TRIP_S] = self._round_trip_s(place)
        instance.given_tokens = seen.given_tokens

    def _round_trip_s(self, place: int) -> float:
        spec = self.cluster.instances[place]
        return float(self.cluster.policy((spec.model, spec.region)).round_trip_s)

    def _swap_targets(self, instances: list[ForkedInstance]) -> list[int]:
        """Return by swap group the instance that wakes once the leaving one, at once without work, sleeps; -1: none."""
        targets = dict.fromkeys(self.cluster.swap_groups(), -1)
        leaving: dict[str, int] = {}
        for at, place in self.place_of.items():
            seen, sharing = self.state.instances[at], self.cluster.instances[place].sharing
            if sharing is not None and seen.waits:
                targets[sharing.group] = place
            elif sharing is not None and seen.leaves:
                leaving[sharing.group] = place
        for group, place in leaving.items():
            if targets[group] >= 0 and not instances[place].requests:
                instances[place].state = int(State.FALLING_ASLEEP)
                instances[place].ends_s = instances[targets[group]].ends_s = instances[place].goal_s
        return [place if group in leaving else -1 for group, place in targets.items()]

    def _place_running(self, instances: list[ForkedInstance]) -> list[RunningRequest]:
        """Give *instances* the requests that they run; returns those without an instance."""
        lost = []
        # Requests whose tokens are estimated fill no batch beyond its size.
        decoding = Counter(one.instance for one in self.state.running if one.streamed and one.output_tokens)
        for number, one in enumerate(sorted(self.state.running, key=lambda each: each.placed_s)):
            if (request := self.rows.get(id(one))) is None:
                continue
            if (place := self.place_of.get(one.instance)) is None:
                lost.append(one)
                continue
            spec, round_trip_s = self.cluster.instances[place], self._round_trip_s(place)
            key = spec.model, spec.region
            produced = _produced(one, spec.engine.profile, round_trip_s)
            if produced and not one.streamed:
                produced = produced if decoding[one.instance] < spec.engine.max_num_seqs else 0
                decoding[one.instance] += 1
            reaches_s = one.placed_s + round_trip_s
            queue_key_s = self._key(
                request, self.endpoint_of[key], one.expected_prompt, one.expected_output, one.standing
            )
            ordering = ORDERINGS[self.cluster.policy(key).ordering]
            instances[place].requests.append(
                ForkedRequest(
                    request,
                    Where.RUNNING if produced else Where.SENT if reaches_s > 0 else Where.WAITING,
                    expected_prompt=one.expected_prompt,
                    expected_tokens=one.expected_tokens,
                    produced_tokens=min(produced, int(self.requests.output_tokens[request]) - 1),
                    computed_tokens=int(self.requests.prompt_tokens[request]) if produced else 0,
                    priority=int(engine_priority(ordering, int(self.requests.priority[request]), queue_key_s)),
                    number=number,
                    ahead=_ahead(one, produced),
                    reaches_s=reaches_s,
                )
            )
            outcome = self.outcomes[request]
            outcome["state"], outcome["instance"], outcome["endpoint"] = Outcome.RUNNING, place, self.endpoint_of[key]
            outcome["attempts"] = max(1, one.attempts)
            outcome["queue_s"] = one.placed_s - one.arrival_s
        return lost

    def _begin_iteration(self, instance: ForkedInstance, seen: InstanceState, place: int) -> None:
        """Set when the iteration in progress at *instance* began: when the last one ended, if that was seen, or else at a
        random moment. Without requests that have a token it began when the first prompt came, at the earliest.

        Engines do not report chunks of prompts, so a prompt without a token is computed from its beginning.
        """
        engine = self.cluster.instances[place].engine
        running = [one for one in instance.requests if one.where is Where.RUNNING]
        pending = [one for one in instance.requests if one.where is Where.WAITING]
        if not running and not pending:
            return
        instance.requests.sort(key=lambda one: (one.where is not Where.RUNNING, one.where is Where.SENT))
        context = sum(self._prompt_tokens(one) + one.produced_tokens for one in running)
        begins_s = -inf if seen.iteration_s is None else seen.iteration_s
        if not running:
            begins_s = max(begins_s, min(one.reaches_s for one in pending))
        elif seen.iteration_s is None:
            begins_s = -float(self.random.uniform(0.0, 1.0)) * engine.profile.step_time_s(0, len(running), context)
        # The iteration is not over: one that should be ends at once.
        left = sum(self._prompt_tokens(one) for one in pending if one.reaches_s <= begins_s)
        budget = engine.max_num_batched_tokens - len(running)
        step_s = engine.profile.step_time_s(min(left, budget), len(running), context)
        instance.begins_s = float(np.clip(begins_s, -0.999 * step_s, -1e-6))

    def _prompt_tokens(self, one: ForkedRequest) -> int:
        return int(self.requests.prompt_tokens[one.request])

    def _queued(self, one: RequestState, output_tokens: int) -> Queued:
        request, endpoint = self.rows[id(one)], self.endpoint_of[one.model, one.served_in]
        if isinstance(one, WaitingRequest) and one.spot and self.requests.held[request] & OPPORTUNISTIC:
            endpoint += len(self.cluster.endpoints)
        self.outcomes[request]["endpoint"] = endpoint
        self.outcomes[request]["attempts"] = one.attempts
        key = self._key(request, endpoint, one.expected_prompt, output_tokens, one.standing)
        ordering = self._policy(endpoint).ordering
        if ORDERINGS[ordering] in FAIR:
            was = {(each.model, each.region): each.ordering for each in self.state.endpoints}
            start = one.virtual_start if isinstance(one, WaitingRequest) else None
            key = nan if start is None or was.get((one.model, one.served_in)) != ordering else start
        rank, put_off_s = self._rank(request, endpoint, one.expected_prompt, output_tokens, one.standing), None
        if isinstance(one, WaitingRequest) and one.put_off_s is not None and ORDERINGS[ordering] == QLM:
            put_off_s = one.put_off_s
            key = float(self.requests.arrival_s[request]) + put_off_s
        return Queued(request, endpoint, key, one.expected_prompt, output_tokens, rank, put_off_s)

    def _rank(
        self, request: int, endpoint: int, prompt_tokens: int, output_tokens: int, standing: Standing | None
    ) -> float:
        """Return the rank of *request* inside a request group at *endpoint*."""
        policy = self._policy(endpoint)
        if standing is not None:
            return key_in_run(HERMES, standing, 0, policy.ordering_stretch)
        profile = self.cluster.reference_profile(self.cluster.endpoints[endpoint % len(self.cluster.endpoints)])
        service_s, arrival_s = profile.service_time_s(prompt_tokens, output_tokens), self.requests.arrival_s[request]
        return float(queue_key(HERMES, float(arrival_s), inf, 0, service_s, policy.ordering_stretch))

    def _policy(self, endpoint: int) -> EndpointPolicy:
        own = endpoint % len(self.cluster.endpoints)
        policy = self.cluster.policy(self.cluster.endpoints[own])
        return policy if endpoint == own else spot_policy(policy)

    def _key(
        self, request: int, endpoint: int, prompt_tokens: int, output_tokens: int, standing: Standing | None
    ) -> float:
        """Queue key of *request*, whose run has that *standing*, at *endpoint*."""
        key = self.cluster.endpoints[endpoint % len(self.cluster.endpoints)]
        policy = self._policy(endpoint)
        arrival_s, profile = float(self.requests.arrival_s[request]), self.cluster.reference_profile(key)
        ordering = ORDERINGS[policy.ordering]
        ttft_s, end_s = float(self.requests.deadline_s[request]), float(self.requests.end_s[request])
        priority = int(self.requests.priority[request])
        if standing is not None:
            standing = standing._replace(due_s=inf if standing.due_s >= NEVER_S else standing.due_s)
            if ordering in BY_RUN:
                return key_in_run(ordering, standing, priority, policy.ordering_stretch)
        due_s = first_due_s(ttft_s, end_s, profile.decode_time_s(prompt_tokens, output_tokens))
        if ordering in BY_RUN:
            due_s = run_due_s(ttft_s, end_s, profile.service_time_s(prompt_tokens, output_tokens))
        own = float(
            queue_key(
                ordering,
                arrival_s,
                arrival_s + due_s,
                priority,
                profile.service_time_s(prompt_tokens, 1 if ordering == SLACK else output_tokens),
                policy.ordering_stretch,
            )
        )
        if standing is not None and follows_runs(ordering, GROUP_ORDERS[policy.group_order]):
            return float(due_in_run(own, arrival_s, standing.due_s, standing.worst_s))
        return own

    def _endpoints(self) -> list[ForkedEndpoint]:
        known = {(one.model, one.region, one.spot): one for one in self.state.endpoints}
        forked = []
        for key in [(*each, spot) for spot in (False, True) for each in self.cluster.endpoints]:
            if (one := known.get(key)) is None:
                forked.append(ForkedEndpoint(-1, 0.0, 0.0, -inf, 0))
                continue
            cursor = -1 if one.cursor is None else self.place_of.get(one.cursor, -1)
            forked.append(ForkedEndpoint(cursor, one.asked_work_s, one.backlog_s, one.changed_s, one.changed_delta))
        return forked

    def _asked_tokens(self) -> NDArray[np.float64]:
        known = {(one.model, one.region): one.asked_tokens for one in self.state.endpoints if not one.spot}
        none = [0.0] * max((len(each) for each in known.values()), default=1)
        return np.array([known.get(key, none) for key in self.cluster.endpoints], np.float64)

    def _groups(self, groups: GroupsState) -> ForkedGroups | None:
        """Return the present request groups; None where other endpoints order by groups."""
        cluster, seen = self.cluster, [one for one in self.state.endpoints if not one.spot]
        ordered = {key for key in cluster.endpoints if ORDERINGS[cluster.policy(key).ordering] == QLM}
        was = {(one.model, one.region) for one in seen if ORDERINGS[one.ordering] == QLM}
        if ordered != was & set(self.endpoint_of):
            return None
        kept = (at for at, one in enumerate(self.state.waiting) if id(one) in self.rows)
        places = {at: place for place, at in enumerate(kept)}
        mean_tokens, mean_output = [0.0] * len(cluster.endpoints), [0.0] * len(cluster.endpoints)
        limit, token_s = [0] * len(cluster.endpoints), [(0.0, 0.0)] * len(cluster.endpoints)
        numbers, shared = {}, cluster.shared_queues(ordered)
        for at, one in enumerate(seen):
            if (endpoint := self.endpoint_of.get((one.model, one.region))) is not None:
                numbers[at] = endpoint
                mean_tokens[endpoint], mean_output[endpoint] = groups.mean_tokens[at], groups.mean_output[at]
                limit[endpoint], token_s[endpoint] = groups.limit[at], groups.token_s[at]

        def queue_of(instance: int | None) -> int:
            place = -1 if instance is None else self.place_of.get(instance, -1)
            return shared.get(place, place)

        return ForkedGroups(
            groups=[
                ForkedGroup(
                    one, numbers[one.endpoint], queue_of(one.instance), [places[member] for member in one.members]
                )
                for one in groups.groups
                if one.endpoint in numbers
            ],
            mean_tokens=mean_tokens,
            mean_output=mean_output,
            limit=limit,
            token_s=token_s,
            classes=groups.classes,
            next_number=groups.next_number,
            tried=groups.tried or (-1, -1),
            tried_s=groups.tried_s,
            short_instances={numbers[at]: count for at, count in groups.short_instances if at in numbers},
        )


def _before(blocks: NDArray[np.int64], others: NDArray[np.int64]) -> int:
    """Return how many of *blocks* come before the first that is one of *others*."""
    among = np.isin(blocks, others)
    return int(among.argmax()) if among.any() else blocks.size


def _emitted(one: RequestState) -> int:
    return one.output_tokens if isinstance(one, RunningRequest) else 0


def _ahead(one: RunningRequest, produced: int) -> int | None:
    """Return iterations of *one* in its look-ahead map, which a request enters with its first token; None before that.

    A gateway has answers that do not stream in the map from the start, since it does not see their first token.
    """
    if not produced:
        return None
    return produced - 1 if one.ahead is None else one.ahead


def _produced(one: RunningRequest, profile: Profile, round_trip_s: float) -> int:
    """Return output tokens of *one* so far; for an answer that does not stream, an estimate by its profile."""
    if one.streamed:
        return one.output_tokens // max(1, one.sequences)
    left_s = -one.placed_s - round_trip_s - profile.service_time_s(one.prompt_tokens, 1)
    step_s = profile.decode_a_s + profile.decode_b_s_per_sequence + profile.decode_c_s_per_token * one.prompt_tokens
    return 0 if left_s < 0 else min(1 + int(left_s / step_s), max(1, one.predicted_tokens))
