"""A fleet of reference engines behind a dispatcher, in plain Python: what the compiled loop is checked against.

It says the same rules in the shortest way, one iteration and one token at a time, over the plain twins of the kernels.
It knows every routing and ordering, regions and ways between them, and instances that are ready all the time.
"""

from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from scheduling.reference import POLICIES, PlainFleet, PlainInstance, PlainQueue
from scheduling.simulation.cluster import Cluster
from scheduling.simulation.engine import EngineRequest, ReferenceEngine, StepResult
from scheduling.simulation.requests import Requests
from scheduling.simulation.world import OUTCOME, Outcome, State
from scheduling.turns import PRIORITY_STEP_S

NEVER = float("inf")


@dataclass(slots=True)
class _Held:
    """A request: what it asks, and what the dispatcher knows of it."""

    number: int
    endpoint: int = -1
    expected_prompt: int = 0
    expected_output: int = 0
    counted_tokens: int = 0
    produced_tokens: int = 0


@dataclass(slots=True)
class _Server:
    """An instance: its engine, and the iteration in progress."""

    engine: ReferenceEngine
    step: StepResult | None = None
    event_s: float = NEVER
    held: dict[str, _Held] = field(default_factory=dict)


class ReferenceFleet:
    """One run of *requests* on *cluster*."""

    def __init__(self, cluster: Cluster, requests: Requests) -> None:
        if any(spec.state != State.READY for spec in cluster.instances) or cluster.reactive is not None:
            raise ValueError("the reference fleet knows instances that are ready all the time only")
        self.cluster, self.requests = cluster, requests
        self.outcomes: NDArray[np.void] = np.zeros(requests.arrival_s.size, OUTCOME)
        self.outcomes["ttft_s"] = self.outcomes["e2e_s"] = self.outcomes["queue_s"] = np.nan
        self.outcomes["instance"] = self.outcomes["endpoint"] = -1
        self.decisions: list[tuple[float, int, int, int]] = []
        """(time_s, request, endpoint, instance)."""
        self._servers = [_Server(ReferenceEngine(spec.engine)) for spec in cluster.instances]
        self._fleet = PlainFleet([self._plain(number) for number in range(len(cluster.instances))])
        self._queues = [PlainQueue() for _ in cluster.endpoints]
        self._waiting: dict[int, _Held] = {}
        self._latency_s = cluster.latencies()
        self._ways: list[tuple[float, int, int, _Held]] = []  # moment, way, order, request
        self._sequence = 0
        self._now_s = 0.0

    def _plain(self, number: int) -> PlainInstance:
        spec = self.cluster.instances[number]
        key = (spec.model, spec.region)
        one_by_one = self.cluster.of(self.cluster.batching, key).mode == "none"
        return PlainInstance(
            endpoint=self.cluster.endpoints.index(key),
            accepting=True,
            max_num_seqs=1 if one_by_one else spec.dispatch_max_num_seqs or spec.engine.max_num_seqs,
            kv_capacity_tokens=spec.dispatch_kv_tokens or spec.engine.kv_capacity_tokens,
        )

    def run(self) -> NDArray[np.void]:
        """Run to the end of the last request; the outcomes, as the compiled engine gives them."""
        arrivals = self.requests.arrival_s
        arrived = 0
        while True:
            arrival_s = float(arrivals[arrived]) if arrived < arrivals.size else NEVER
            server_s, instance = min((server.event_s, number) for number, server in enumerate(self._servers))
            way_s = self._ways[0][0] if self._ways else NEVER
            self._now_s = min(arrival_s, server_s, way_s)
            if self._now_s == NEVER:
                return self.outcomes
            if arrival_s == self._now_s:
                self._arrive(arrived)
                arrived += 1
            elif server_s == self._now_s:
                self._work(instance)
            else:
                self._queue(heappop(self._ways)[3])

    # The dispatcher

    def _arrive(self, number: int) -> None:
        model, region = int(self.requests.model[number]), int(self.requests.region[number])
        held = _Held(number)
        held.endpoint = self._choose(self.cluster.candidates(self.cluster.models[model], self.cluster.regions[region]))
        target = self.cluster.regions.index(self.cluster.endpoints[held.endpoint][1])
        latency_s = float(self._latency_s[region, target])
        if latency_s:
            way = region * len(self.cluster.regions) + target
            heappush(self._ways, (float(self.requests.arrival_s[number]) + latency_s, way, number, held))
        else:
            self._queue(held)

    def _choose(self, candidates: list[int]) -> int:
        under_pressure = [(self._pressure(endpoint), at, endpoint) for at, endpoint in enumerate(candidates)]
        for found, _, endpoint in under_pressure:
            if found < self.cluster.threshold:
                return endpoint
        return min(under_pressure)[2]

    def _pressure(self, endpoint: int) -> float:
        members = [instance for instance in self._fleet.instances if instance.endpoint == endpoint]
        sequences = sum(instance.max_num_seqs for instance in members)
        memory = sum(each.kv_tokens for each in members) / sum(each.kv_capacity_tokens for each in members)
        waiting = len(self._queues[endpoint].entries)
        return max(memory, sum(instance.running for instance in members) / sequences) + waiting / sequences

    def _queue(self, held: _Held) -> None:
        requests, number = self.requests, held.number
        key = self.cluster.endpoints[held.endpoint]
        if len(self._queues[held.endpoint].entries) >= self.cluster.bound(key):
            self.outcomes[number]["state"] = Outcome.REFUSED
            self.outcomes[number]["endpoint"] = held.endpoint
            return
        prompt, output = int(requests.prompt_tokens[number]), int(requests.predicted_tokens[number])
        room = max(each.kv_capacity_tokens for each in self._fleet.instances if each.endpoint == held.endpoint)
        if prompt + output > room:
            prompt = min(prompt, room - 1)
            output = room - prompt
        held.expected_prompt, held.expected_output = prompt, output
        arrival_s, priority = float(requests.arrival_s[number]), int(requests.priority[number])
        turn = {
            "fcfs": arrival_s,
            "priority": priority * PRIORITY_STEP_S + arrival_s,
            "shortest": float(output),
            "deadline": arrival_s + float(requests.deadline_s[number]),
        }[self.cluster.of(self.cluster.ordering, key)]
        self._waiting[number] = held
        self.outcomes[number]["endpoint"] = held.endpoint
        self._queues[held.endpoint].push(number, turn, self._sequence)
        self._sequence += 1
        self._pump(held.endpoint)

    def _pump(self, endpoint: int) -> None:
        policy = POLICIES[self.cluster.of(self.cluster.routing, self.cluster.endpoints[endpoint])]
        queue = self._queues[endpoint]
        while (number := queue.peek()) >= 0:
            held = self._waiting[number]
            instance = policy(self._fleet, endpoint, held.expected_prompt, held.expected_output)
            if instance < 0:
                return
            queue.pop()
            del self._waiting[number]
            self._fleet.place(instance, held.expected_prompt, held.expected_output)
            self._give(held, instance)

    def _give(self, held: _Held, instance: int) -> None:
        requests, number = self.requests, held.number
        outcome, server = self.outcomes[number], self._servers[instance]
        outcome["state"], outcome["instance"], outcome["attempts"] = Outcome.RUNNING, instance, 1
        outcome["queue_s"] = self._now_s - requests.arrival_s[number]
        self.decisions.append((self._now_s, number, held.endpoint, instance))
        server.held[str(number)] = held
        server.engine.add(
            EngineRequest(
                str(number),
                int(requests.prompt_tokens[number]),
                int(requests.output_tokens[number]),
                int(requests.priority[number]),
                self._now_s,
                tuple(
                    requests.prefix_hashes[requests.prefix_first[number] : requests.prefix_first[number + 1]].tolist()
                )
                if requests.prefix_first.size
                else (),
            )
        )
        if server.step is None:
            server.event_s = self._now_s

    # The instances

    def _work(self, instance: int) -> None:
        server = self._servers[instance]
        if server.step is not None:
            step, server.step = server.step, None
            for request_id in step.emitted:
                self._count(server.held[request_id], instance)
            for request_id in step.finished:
                held = server.held.pop(request_id)
                self._latency(held, "e2e_s")
                self.outcomes[held.number]["state"] = Outcome.DONE
                self._release(held, instance)
                self._pump(held.endpoint)
        server.step = server.engine.step(self._now_s)
        server.event_s = NEVER if server.step is None else server.step.ends_s
        for request_id in server.step.preempted if server.step else ():
            self.outcomes[server.held[request_id].number]["preemptions"] += 1

    def _count(self, held: _Held, instance: int) -> None:
        """One more token of *held* came out."""
        if held.produced_tokens == 0:
            self._latency(held, "ttft_s")
        held.produced_tokens += 1
        done = int(self.requests.prompt_tokens[held.number]) + held.produced_tokens
        tokens, expected = done - held.counted_tokens, held.expected_prompt + held.expected_output
        within = min(tokens, max(expected - held.counted_tokens, 0))
        self._fleet.instances[instance].remaining_tokens -= within
        self._fleet.instances[instance].kv_tokens += tokens - within
        held.counted_tokens = done

    def _release(self, held: _Held, instance: int) -> None:
        expected, plain = held.expected_prompt + held.expected_output, self._fleet.instances[instance]
        plain.running -= 1
        plain.kv_tokens -= max(expected, held.counted_tokens)
        plain.remaining_tokens -= max(expected - held.counted_tokens, 0)

    def _latency(self, held: _Held, name: str) -> None:
        origin = int(self.requests.region[held.number])
        target = self.cluster.regions.index(self.cluster.endpoints[held.endpoint][1])
        back_s = float(self._latency_s[target, origin])
        self.outcomes[held.number][name] = self._now_s - float(self.requests.arrival_s[held.number]) + back_s
