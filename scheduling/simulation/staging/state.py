"""What is known of a living fleet at a moment, as the begin of a simulation: `Forked` becomes a `FleetState`.

Who knows a fleet from outside knows how far requests have streamed, not what engines compute. So an engine begins an
iteration at the time at which it is most likely to have begun one; by then it has what had reached it. Policies may be
others than those of the living fleet: queue keys are made anew, and groups where another order is asked for.

Instances are those of the scenario: of each model, region and GPU type as many as there are slots for; what an instance
without a slot had waits again.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduling.fleet.profile import Profile
from scheduling.queueing.ordering import ORDERINGS, QLM, SLACK, engine_priority, first_due_s, queue_key
from scheduling.routing.regions import SWEEP_S
from scheduling.routing.requests_ahead import ROUND_TRIP_S
from scheduling.scaling.owner import UNCHANGED, Change
from scheduling.simulation.cluster.description import Cluster
from scheduling.simulation.cluster.world import OUTCOME, Outcome, State
from scheduling.simulation.scenario import Scenario
from scheduling.simulation.staging.going import set_going
from scheduling.simulation.staging.requests import requests_of
from scheduling.simulation.state.records import (
    EndpointState,
    FleetState,
    Groups,
    GroupState,
    Held,
    InstanceState,
    Running,
    Where,
)
from scheduling.simulation.workload.columns import Coded, Workload
from scheduling.simulation.workload.requests import Requests

RUNS_ON: float = 1.2
"""An output that is longer than all that is known is expected to be so many times what it has, as look-ahead maps do."""
GROWING = (State.STARTING, State.LOADING, State.WAKING, State.RECLAIMING)


@dataclass(frozen=True, slots=True)
class Forked:
    """The rows of a start's state; all times are seconds from the moment on."""

    instances: Sequence[Mapping[str, Any]]
    """name, model, region, gpu (`instance_gpu`), state (a name of `State`), since_s, ends_s (None: until somebody decides),
    swap_group, round_trips, iteration_s (when an iteration ended there last, None: nobody knows), ended (placed_s, ended_s,
    prompt and output of what ended since the first of those without a token came); of a swap in progress: leaves (it gives
    way), waits (it is the next)."""
    running: Sequence[Mapping[str, Any]]
    """What `_request` reads, and instance (a place in `instances`), placed_s, streamed, output_tokens, expected_prompt,
    expected_tokens, ahead."""
    waiting: Sequence[Mapping[str, Any]]
    """What `_request` reads, and expected_prompt, expected_output; in order of arrival at their queues."""
    endpoints: Sequence[Mapping[str, Any]]
    """model, region, ordering, cursor (a place in `instances` or None), changed_s, changed_by, changed_delta,
    asked_tokens, asked_work_s, backlog_s."""
    groups: Mapping[str, Any] | None = None
    """groups, classes, mean_tokens, mean_output, next_number, by places in the others; and of the global scheduler tried,
    tried_s and short_instances (`state.records.Groups`)."""
    swept_s: float = 0.0
    """When what waits was looked at last."""
    lengths: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """By model: true over predicted output of requests that ended, from which what is still to come is drawn."""
    memory: Mapping[str, float] = field(default_factory=dict)
    """What strategies remember."""


def forked_state(forked: Forked, scenario: Scenario, cluster: Cluster, tenants: list[str], seed: int) -> FleetState:
    """*forked* on *cluster*, that of *scenario*; *tenants* is made longer by those that are not in it."""
    return _Placing(forked, scenario, cluster, tenants, seed).state()


class _Placing:
    def __init__(self, forked: Forked, scenario: Scenario, cluster: Cluster, tenants: list[str], seed: int) -> None:
        self.forked, self.scenario, self.cluster = forked, scenario, cluster
        self.endpoint_of = {key: at for at, key in enumerate(cluster.endpoints)}
        self.slot_of = self._slots()
        self.random = np.random.default_rng([seed, 3])
        known = [row for row in (*forked.running, *forked.waiting) if self._endpoint_at(row) is not None]
        known.sort(key=lambda row: row["arrival_s"])
        self.rows = {id(row): at for at, row in enumerate(known)}
        self.requests = self._requests(known, tenants, seed)
        self.outcomes = np.zeros(len(known), OUTCOME)
        for name in ("ttft_s", "e2e_s", "queue_s"):
            self.outcomes[name] = np.nan
        self.outcomes["instance"] = self.outcomes["endpoint"] = -1
        self.guessed: set[int] = set()
        """Requests of which nobody knows how many tokens they have, since their answers are not streamed."""

    def _slots(self) -> dict[int, int]:
        """The instance of the cluster that each of the fleet's is, as far as there are enough."""
        free: defaultdict[tuple[str, str, str, bool], list[int]] = defaultdict(list)
        for at, spec in enumerate(self.cluster.instances):
            free[spec.model, spec.region, spec.gpu_type, spec.sharing is not None].append(at)
        order = [State.READY, State.DRAINING, *GROWING]
        rank = {state.name: at for at, state in enumerate(order)}
        taken = {}
        for at, row in sorted(enumerate(self.forked.instances), key=lambda one: rank.get(one[1]["state"], len(rank))):
            places = free[row["model"], row["region"], row["gpu"], bool(row.get("swap_group"))]
            if places:
                taken[at] = places.pop(0)
        return taken

    def _endpoint_at(self, row: Mapping[str, Any]) -> int | None:
        """The endpoint at which *row* is; None if the cluster has none for it."""
        return self.endpoint_of.get((row["model"], row["served_in"]))

    def _requests(self, rows: Sequence[Mapping[str, Any]], tenants: list[str], seed: int) -> Requests:
        """*rows* with lengths that fit their instances."""
        longest = dict(zip(self.cluster.models, self.cluster.longest_tokens(), strict=True))
        outputs = np.array([self._output(row) for row in rows], np.int64)
        least = np.array([row.get("output_tokens", 0) + 1 for row in rows], np.int64)
        limits = np.array([longest[row["model"]] for row in rows], np.int64)
        outputs = np.maximum(np.minimum(outputs, limits - 1), least)
        outputs = np.minimum(outputs, np.maximum(limits - 1, 1))
        prompts = np.array([row["prompt_tokens"] for row in rows], np.int64)
        prompts = np.clip(prompts, 1, np.maximum(limits - outputs, 1))
        regions, classes = list(self.scenario.regions), list(self.scenario.classes)
        for row in rows:
            if row["tenant"] not in tenants:
                tenants.append(row["tenant"])

        def coded(values: Sequence[str], names: list[str]) -> Coded:
            known = {name: at for at, name in enumerate(names)}
            return Coded(np.array([known.get(value, 0) for value in values], np.int32), names)

        workload = Workload(
            arrival_s=np.array([row["arrival_s"] for row in rows], np.float64),
            prompt_tokens=prompts.astype(np.int32),
            output_tokens=outputs.astype(np.int32),
            model=coded([row["model"] for row in rows], list(self.cluster.models)),
            region=coded([row["region"] for row in rows], regions),
            slo_class=coded([row["slo_class"] for row in rows], classes),
            tenant=coded([row["tenant"] for row in rows], tenants),
            predicted_tokens=np.array([max(1, row["predicted_tokens"]) for row in rows], np.int32),
        )
        return requests_of(self.scenario, self.cluster, workload, seed)

    def _output(self, row: Mapping[str, Any]) -> int:
        """The true output of *row*: known, or drawn from what predictions came to, given that it has come so far."""
        if row.get("true_output") is not None:
            return int(row["true_output"])
        emitted, predicted = row.get("output_tokens", 0), max(1, row["predicted_tokens"])
        ratios = np.asarray(self.forked.lengths.get(row["model"], ()), np.float64)
        ratios = ratios[ratios * predicted > emitted]
        if ratios.size:
            return int(max(emitted + 1, round(float(self.random.choice(ratios)) * predicted)))
        return int(predicted if predicted > emitted else max(emitted + 1, round(RUNS_ON * emitted)))

    def state(self) -> FleetState:
        specs = self.cluster.instances
        instances = [
            InstanceState(int(spec.state), self.endpoint_of[spec.model, spec.region], loading_s=spec.start_s)
            for spec in specs
        ]
        for at, slot in self.slot_of.items():
            self._instance(instances[slot], self.forked.instances[at], slot)
        waiting = [self._held(row) for row in self.forked.waiting if id(row) in self.rows]
        lost = self._run(instances)
        waiting += [self._held(row) for row in lost]
        swap_targets = self._swap_targets(instances)
        for at, slot in self.slot_of.items():
            engine, trip_s = self.cluster.instances[slot].engine, self._round_trip_s(instances[slot])
            row, prompts = self.forked.instances[at], self.requests.prompt_tokens
            set_going(instances[slot], engine, row, prompts, trip_s, self.random, self.guessed)
        return FleetState(
            now_s=0.0,
            requests=self.requests,
            outcomes=self.outcomes,
            instances=instances,
            endpoints=self._endpoints(),
            waiting=waiting,
            groups=self._groups() if not lost else None,
            asked_tokens=self._asked(),
            sweep_s=max(0.0, self.forked.swept_s + SWEEP_S) if waiting else inf,
            swap_targets=swap_targets,
        )

    def _instance(self, instance: InstanceState, row: Mapping[str, Any], slot: int) -> None:
        state = State[row["state"]]
        instance.state, instance.since_s = int(state), min(float(row["since_s"]), -1e-9)
        instance.ends_s = inf if row.get("ends_s") is None else max(0.0, float(row["ends_s"]))
        if state is State.DRAINING:
            instance.goal, instance.goal_s = int(State.EMPTY), inf
            sharing = self.cluster.instances[slot].sharing
            if row.get("leaves") and sharing is not None:
                instance.goal, instance.goal_s = int(State.FALLING_ASLEEP), sharing.sleep_s
        trips = np.array(row["round_trips"], np.float64)
        trips[ROUND_TRIP_S] = self._round_trip_s(instance)
        instance.round_trips = trips

    def _round_trip_s(self, instance: InstanceState) -> float:
        return float(self.cluster.policy(self.cluster.endpoints[instance.endpoint]).round_trip_s)

    def _swap_targets(self, instances: list[InstanceState]) -> list[int]:
        """By swap group: who wakes once the one that leaves sleeps; -1 where nobody does, or the one that leaves is not
        there. One that runs nothing falls asleep already."""
        targets = dict.fromkeys(self.cluster.swap_groups(), -1)
        leaving: dict[str, int] = {}
        for at, slot in self.slot_of.items():
            row, sharing = self.forked.instances[at], self.cluster.instances[slot].sharing
            if sharing is not None and row.get("waits"):
                targets[sharing.group] = slot
            elif sharing is not None and row.get("leaves"):
                leaving[sharing.group] = slot
        for group, slot in leaving.items():
            if targets[group] >= 0 and not instances[slot].requests:
                instances[slot].state = int(State.FALLING_ASLEEP)
                instances[slot].ends_s = instances[targets[group]].ends_s = instances[slot].goal_s
        return [slot if group in leaving else -1 for group, slot in targets.items()]

    def _run(self, instances: list[InstanceState]) -> list[Mapping[str, Any]]:
        """Give *instances* what they run; the rows of those that have no instance any more."""
        lost = []
        # Of the places of a batch, those that nobody is seen in: guesses do not fill an engine beyond them.
        seen = Counter(row["instance"] for row in self.forked.running if row["streamed"] and row["output_tokens"])
        for number, row in enumerate(sorted(self.forked.running, key=lambda one: one["placed_s"])):
            if (request := self.rows.get(id(row))) is None:
                continue
            if (slot := self.slot_of.get(row["instance"])) is None:
                lost.append(row)
                continue
            instance, outcome = instances[slot], self.outcomes[request]
            spec = self.cluster.instances[slot]
            policy = self.cluster.policy((spec.model, spec.region))
            round_trip_s = policy.round_trip_s
            produced = self._produced(row, spec.engine.profile, round_trip_s)
            if produced and not row["streamed"]:
                produced = produced if seen[row["instance"]] < spec.engine.max_num_seqs else 0
                seen[row["instance"]] += 1
                self.guessed.add(request)
            reaches_s = row["placed_s"] + round_trip_s
            where = Where.RUNNING if produced else Where.SENT if reaches_s > 0 else Where.WAITING
            output = int(self.requests.output_tokens[request])
            prompt = int(row["expected_prompt"])
            key = self._key(request, instance.endpoint, prompt, int(row["expected_tokens"]) - prompt)
            code = ORDERINGS[policy.ordering]
            instance.requests.append(
                Running(
                    request,
                    where,
                    expected_prompt=prompt,
                    expected_tokens=int(row["expected_tokens"]),
                    produced_tokens=min(produced, output - 1),
                    computed_tokens=int(self.requests.prompt_tokens[request]) if produced else 0,
                    decoding=produced > 0,
                    streaming=produced > 0,
                    priority=int(engine_priority(code, int(self.requests.priority[request]), key)),
                    number=number,
                    ahead=self._ahead(row, produced),
                    reaches_s=reaches_s,
                )
            )
            outcome["state"], outcome["instance"], outcome["endpoint"] = Outcome.RUNNING, slot, instance.endpoint
            outcome["attempts"] = max(1, row["attempts"])
            outcome["queue_s"] = row["placed_s"] - row["arrival_s"]
        return lost

    def _ahead(self, row: Mapping[str, Any], produced: int) -> int | None:
        """How far *row* is in its look-ahead map; None if it has no token yet: it enters the map with its first one.

        A gateway has answers that are not streamed in the map from the start, of which it does not see the first token.
        """
        if not produced:
            return None
        return produced - 1 if row["ahead"] is None else int(row["ahead"])

    def _produced(self, row: Mapping[str, Any], profile: Profile, round_trip_s: float) -> int:
        """Output tokens of *row* so far; of an answer that is not streamed, as many as its profile would have made."""
        if row["streamed"]:
            return int(row["output_tokens"]) // max(1, int(row["sequences"]))
        prompt = int(row["prompt_tokens"])
        left_s = -float(row["placed_s"]) - round_trip_s - profile.service_time_s(prompt, 1)
        step_s = profile.decode_a_s + profile.decode_b_s_per_sequence + profile.decode_c_s_per_token * prompt
        most = max(1, int(row["predicted_tokens"]))
        return 0 if left_s < 0 else min(1 + int(left_s / step_s), most)

    def _held(self, row: Mapping[str, Any]) -> Held:
        """*row* as it waits, with the queue key that its endpoint gives it."""
        request, endpoint = self.rows[id(row)], self._endpoint_at(row)
        assert endpoint is not None
        prompt = int(row["expected_prompt"])
        output = int(row["expected_output"] if "expected_output" in row else row["expected_tokens"] - prompt)
        queue = self._key(request, endpoint, prompt, output)
        self.outcomes[request]["endpoint"] = endpoint
        self.outcomes[request]["attempts"] = row["attempts"]
        return Held(request, endpoint, queue, prompt, output)

    def _key(self, request: int, endpoint: int, prompt_tokens: int, output_tokens: int) -> float:
        """The queue key of *request* at *endpoint*."""
        key = self.cluster.endpoints[endpoint]
        policy = self.cluster.policy(key)
        arrival_s, profile = float(self.requests.arrival_s[request]), self.cluster.reference_profile(key)
        ordering = ORDERINGS[policy.ordering]
        end_s, decode_s = float(self.requests.end_s[request]), profile.decode_time_s(prompt_tokens, output_tokens)
        return float(
            queue_key(
                ordering,
                arrival_s,
                arrival_s + first_due_s(float(self.requests.deadline_s[request]), end_s, decode_s),
                int(self.requests.priority[request]),
                profile.service_time_s(prompt_tokens, 1 if ordering == SLACK else output_tokens),
                policy.ordering_stretch,
            )
        )

    def _endpoints(self) -> list[EndpointState]:
        known = {(row["model"], row["region"]): row for row in self.forked.endpoints}
        states = []
        for key in self.cluster.endpoints:
            row = known.get(key)
            cursor = -1 if row is None or row["cursor"] is None else self.slot_of.get(row["cursor"], -1)
            states.append(
                EndpointState(
                    cursor,
                    float(row["asked_work_s"]) if row else 0.0,
                    float(row["backlog_s"]) if row else 0.0,
                    changed_s=float(row["changed_s"]) if row else -inf,
                    last=Change(row["changed_by"], row["changed_delta"]) if row else UNCHANGED,
                )
            )
        return states

    def _asked(self) -> NDArray[np.float64]:
        known = {(row["model"], row["region"]): row["asked_tokens"] for row in self.forked.endpoints}
        none = [0.0] * max((len(values) for values in known.values()), default=1)
        return np.array([known.get(key, none) for key in self.cluster.endpoints], np.float64)

    def _groups(self) -> Groups | None:
        """The request groups as they stand; None where they are to be made anew, because another order is asked for."""
        given, endpoints = self.forked.groups, self.forked.endpoints
        if given is None:
            return None
        ordered = {key for key in self.cluster.endpoints if ORDERINGS[self.cluster.policy(key).ordering] == QLM}
        was = {(row["model"], row["region"]) for row in endpoints if ORDERINGS[row["ordering"]] == QLM}
        if ordered != was & set(self.endpoint_of):
            return None
        kept = (at for at, row in enumerate(self.forked.waiting) if id(row) in self.rows)
        places = {at: place for place, at in enumerate(kept)}
        mean_tokens, mean_output = [0.0] * len(self.cluster.endpoints), [0.0] * len(self.cluster.endpoints)
        outputs = given.get("mean_output") or [0.5 * tokens for tokens in given["mean_tokens"]]
        numbers, shared = {}, self.cluster.shared_queues(ordered)
        for at, row in enumerate(endpoints):
            if (endpoint := self.endpoint_of.get((row["model"], row["region"]))) is not None:
                numbers[at], mean_tokens[endpoint] = endpoint, given["mean_tokens"][at]
                mean_output[endpoint] = outputs[at]

        def queue_of(row: Mapping[str, Any]) -> int:
            slot = -1 if row["instance"] is None else self.slot_of.get(row["instance"], -1)
            return shared.get(slot, slot)

        groups = [
            GroupState(
                place=place,
                queue=queue_of(row),
                members=[places[at] for at in row["members"]],
                endpoint=numbers[row["endpoint"]],
                **{name: row[name] for name in _GROUP},
            )
            for place, row in enumerate(one for one in given["groups"] if one["endpoint"] in numbers)
        ]
        return Groups(
            groups,
            mean_tokens,
            [tuple(each) for each in given["classes"]],
            given["next_number"],
            [],
            mean_output=mean_output,
            looked_s=self.forked.swept_s,
            tried=tuple(given.get("tried") or (-1, -1)),
            tried_s=float(given.get("tried_s", -inf)),
            short_instances={numbers[at]: count for at, count in given.get("short_instances", ()) if at in numbers},
        )


_GROUP = (
    "kind", "number", "joined", "prompt_tokens", "output_tokens", "opened_s", "hold_until_s", "pinned", "is_open", "rank",
)  # fmt: skip
