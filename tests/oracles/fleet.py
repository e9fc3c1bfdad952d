"""Reference fleet of engines behind a dispatcher, against which the compiled loop is checked.

Implements the same rules one iteration and one token at a time, over the plain twins of the kernels: every routing,
ordering and batching mode, regions and links, the reactive trigger, and instances that start, stop, fail, sleep and
change their model.
"""

from collections.abc import Sequence
from functools import partial
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from scheduling.routing.regions import BACKLOG_S, CACHED_WEIGHT, COMPUTE_S
from scheduling.simulation.cluster.description import Cluster
from scheduling.simulation.cluster.world import MAX_ATTEMPTS, OUTCOME, Outcome, State
from scheduling.simulation.engine.reference import EngineRequest
from scheduling.simulation.workload.requests import Requests
from tests.oracles.dispatch import (
    POLICIES,
    PlainFleet,
    PlainQueue,
    plain_engine_priority,
    plain_first_due_s,
    plain_queue_key,
)
from tests.oracles.lifecycle import NEVER, Held, ReferenceLives, Server
from tests.oracles.lookahead import PREDICTIVE, Sight

WORKS = (State.READY, State.DRAINING)


class Command(NamedTuple):
    """Timed command to the fleet: the name of a `Simulation` method, and its arguments."""

    time_s: float
    name: str
    arguments: tuple[float, ...]


class ReferenceFleet:
    """One run of *requests* on *cluster*."""

    def __init__(self, cluster: Cluster, requests: Requests, seed: int = 0) -> None:
        self.cluster, self.requests = cluster, requests
        self.outcomes: NDArray[np.void] = np.zeros(requests.arrival_s.size, OUTCOME)
        self.outcomes["ttft_s"] = self.outcomes["e2e_s"] = self.outcomes["queue_s"] = np.nan
        self.outcomes["instance"] = self.outcomes["endpoint"] = -1
        self.decisions: list[tuple[float, int, int, int]] = []
        """(time_s, request, endpoint, instance)."""
        self.refused: list[int] = []
        """Indices of commands that were invalid when they came."""
        self.lives = ReferenceLives(cluster, seed)
        self._fleet = PlainFleet([server.plain for server in self.lives.servers])
        self._sight = Sight(
            [server.ahead for server in self.lives.servers], block_tokens=min(cluster.cached_block_sizes(), default=0)
        )
        self._queues = [PlainQueue() for _ in cluster.endpoints]
        self._waiting: dict[int, Held] = {}
        self.kept_tokens: dict[int, int] = {}
        """Tokens that requests had emitted at their eviction."""
        self._latency_s = cluster.latency_s
        self._links: list[tuple[float, int, int, Held]] = []  # time, link, order, request
        self._sent: list[tuple[float, int, int, Server, EngineRequest]] = []  # time, endpoint, order, event and target
        self._opened_s = [NEVER] * len(cluster.endpoints)
        self._timeout_s = [NEVER] * len(cluster.endpoints)
        self._scaled_s = [-NEVER] * len(cluster.endpoints)
        self._sequence = self._ended = 0
        self._now_s = 0.0

    def run(self, commands: Sequence[Command] = ()) -> NDArray[np.void]:
        """Run to the end of the last request; return the outcomes as the compiled engine does.

        Events at the same time run in the order of the lines below, each kind by index.
        """
        arrivals, servers = self.requests.arrival_s, self.lives.servers
        arrived = commanded = 0
        while self._ended < arrivals.size:
            command_s = commands[commanded].time_s if commanded < len(commands) else NEVER
            arrival_s = float(arrivals[arrived]) if arrived < arrivals.size else NEVER
            working = min(servers, key=lambda server: server.event_s)
            living = min(servers, key=lambda server: server.until_s)
            link_s = self._links[0][0] if self._links else NEVER
            timeout_s = min(self._timeout_s)
            sent_s = self._sent[0][0] if self._sent else NEVER
            self._now_s = min(command_s, arrival_s, working.event_s, living.until_s, link_s, timeout_s, sent_s)
            if self._now_s == NEVER:
                raise RuntimeError(f"{arrivals.size - self._ended} requests wait for ever")
            if command_s == self._now_s:
                if not self._obey(commands[commanded]):
                    self.refused.append(commanded)
                commanded += 1
            elif arrival_s == self._now_s:
                self._arrive(arrived)
                arrived += 1
            elif working.event_s == self._now_s:
                self._work(working)
            elif living.until_s == self._now_s:
                self.lives.pass_on(living, self._now_s)
                if living.state == State.READY:
                    self._pump(living.plain.endpoint)
            elif link_s == self._now_s:
                held = heappop(self._links)[3]
                self._queue(held)
                self._pump(held.endpoint)
                self._scale(held.endpoint)
            elif timeout_s == self._now_s:
                self._pump(self._timeout_s.index(timeout_s))
            else:
                _, _, _, server, sent = heappop(self._sent)
                self._land(server, sent)
        return self.outcomes

    # The dispatcher

    def _arrive(self, number: int) -> None:
        region = int(self.requests.region[number])
        held = Held(number)
        held.endpoint = self._choose(number)
        if held.endpoint < 0:
            self._end(held, Outcome.REFUSED)
            return
        target = self.cluster.regions.index(self.cluster.endpoints[held.endpoint][1])
        latency_s = float(self._latency_s[region, target])
        self.outcomes[number]["endpoint"] = held.endpoint
        if latency_s:
            link = region * len(self.cluster.regions) + target
            heappush(self._links, (float(self.requests.arrival_s[number]) + latency_s, link, number, held))
        else:
            self._queue(held)
            self._pump(held.endpoint)
            self._scale(held.endpoint)

    def _choose(self, number: int) -> int:
        """Return the first endpoint under low pressure, else the one under the least, else one that will soon be up."""
        model, region = int(self.requests.model[number]), int(self.requests.region[number])
        candidates = self.cluster.candidates(self.cluster.models[model], self.cluster.regions[region])
        under_pressure = [(self._pressure(endpoint), at, endpoint) for at, endpoint in enumerate(candidates)]
        threshold = self.cluster.policy(self.cluster.endpoints[candidates[0]]).region_threshold if candidates else 0.0
        for use, _, endpoint in under_pressure:
            if use < threshold:
                return endpoint
        least, _, endpoint = min(under_pressure)
        if least < NEVER:
            return endpoint
        return next((endpoint for endpoint in candidates if self.lives.serving(endpoint)), -1)

    def _pressure(self, endpoint: int, with_backlog: bool = True) -> float:
        members = [server.plain for server in self.lives.of(endpoint) if server.plain.accepting]
        if not members:
            return NEVER
        sequences = sum(instance.at_once() for instance in members)
        memory = sum(each.kv_tokens for each in members) / sum(each.kv_capacity_tokens for each in members)
        waiting = len(self._queues[endpoint].entries)
        compute = self._fleet.asked_work_s(endpoint, self._now_s) / (COMPUTE_S * len(members))
        if with_backlog:
            compute = max(compute, (self._fleet.clear_at_s.get(endpoint, 0.0) - self._now_s) / BACKLOG_S)
        return max(memory, sum(instance.running for instance in members) / sequences, compute) + waiting / sequences

    def _prompt_tokens(self, number: int) -> int:
        return int(self.requests.prompt_tokens[number]) + self.kept_tokens.get(number, 0)

    def _queue(self, held: Held, bounded: bool = True) -> None:
        requests, number, kept_tokens = self.requests, held.number, self.kept_tokens.get(held.number, 0)
        key = self.cluster.endpoints[held.endpoint]
        outcome = self.outcomes[number]
        outcome["state"], outcome["endpoint"] = Outcome.WAITING, held.endpoint
        if (
            bounded
            and not outcome["attempts"]
            and self.cluster.policy(key).is_full(len(self._queues[held.endpoint].entries))
        ):
            self._end(held, Outcome.REFUSED)
            return
        prompt, output = self._prompt_tokens(number), max(1, int(requests.predicted_tokens[number]) - kept_tokens)
        room = max((server.plain.kv_capacity_tokens for server in self.lives.of(held.endpoint)), default=0)
        if prompt + output > room:
            prompt = min(prompt, room - 1)
            output = room - prompt
        held.expected_prompt, held.expected_output = prompt, output
        arrival_s, priority = float(requests.arrival_s[number]), int(requests.priority[number])
        ordering = self.cluster.policy(key).ordering
        known = int(requests.output_tokens[number]) - kept_tokens if ordering == "sjf" else output
        profile = self.cluster.reference_profile(key)
        due_s = plain_first_due_s(
            float(requests.deadline_s[number]), float(requests.end_s[number]), profile, prompt, output
        )
        key = plain_queue_key(
            ordering,
            arrival_s,
            arrival_s + due_s,
            priority,
            profile.service_time_s(prompt, 1 if ordering == "slack" else known),
            self.cluster.policy(key).ordering_stretch,
        )
        held.priority = plain_engine_priority(ordering, priority, key)
        self._waiting[number] = held
        self._queues[held.endpoint].push(number, key, self._sequence)
        self._sequence += 1

    def _pump(self, endpoint: int) -> None:
        if self.cluster.policy(self.cluster.endpoints[endpoint]).batching.mode == "dynamic":
            self._pump_batches(endpoint)
            return
        while (server := self._route(endpoint)) is not None:
            self._give(endpoint, server)

    def _route(self, endpoint: int) -> Server | None:
        """Return the server for the first request; None if none waits or none has room."""
        name = self.cluster.policy(self.cluster.endpoints[endpoint]).routing
        number = self._queues[endpoint].peek()
        if number < 0:
            return None
        held = self._waiting[number]
        size = held.expected_prompt, held.expected_output
        if name in PREDICTIVE:
            self._sight.hashes = self._hashes(number)
            router = partial(PREDICTIVE[name], self._fleet, self._sight, endpoint, *size)
        else:
            router = partial(POLICIES[name], self._fleet, endpoint, *size)
        instance = self._fleet.dispatch(router, endpoint)
        return None if instance < 0 else self.lives.servers[instance]

    def _hashes(self, number: int) -> tuple[int, ...]:
        """Return the hashes of the leading blocks of the request's prompt, if they are used."""
        if not self.requests.prefix_first.size:
            return ()
        first, last = self.requests.prefix_first[number : number + 2]
        return tuple(self.requests.prefix_hashes[first:last].tolist())

    def _pump_batches(self, endpoint: int) -> None:
        """Give whole batches to idle servers once they are full or the oldest has waited long enough."""
        batching, queue = (
            self.cluster.policy(self.cluster.endpoints[endpoint]).batching,
            self._queues[endpoint],
        )
        while True:
            accepting = [server for server in self.lives.of(endpoint) if server.plain.accepting]
            idle = [server for server in accepting if not server.held]
            self._timeout_s[endpoint] = NEVER
            if not idle or not queue.entries:
                self._opened_s[endpoint] = NEVER
                return
            self._opened_s[endpoint] = min(self._opened_s[endpoint], self._now_s)
            due_s = self._opened_s[endpoint] + batching.wait_timeout_s
            if len(queue.entries) < batching.max_batch_size and self._now_s < due_s:
                self._timeout_s[endpoint] = due_s
                return
            self._opened_s[endpoint] = NEVER
            for server in accepting:
                server.plain.accepting = server in idle
            chosen = self._route(endpoint)
            for server in accepting:
                server.plain.accepting = True
            if chosen is None:
                return
            for _ in range(batching.max_batch_size):
                self._give(endpoint, chosen)
                if not queue.entries:
                    break
                following = self._waiting[queue.peek()]
                if not chosen.plain.has_room(following.expected_prompt, following.expected_output):
                    break

    def _give(self, endpoint: int, server: Server) -> None:
        """Give the first request to *server*."""
        requests, number = self.requests, self._queues[endpoint].pop()
        held = self._waiting.pop(number)
        self._fleet.place(server.number, held.expected_prompt, held.expected_output)
        self._fleet.ask(server.number, held.expected_prompt, held.expected_output, self._now_s)
        outcome = self.outcomes[number]
        outcome["state"], outcome["instance"] = Outcome.RUNNING, server.number
        if outcome["attempts"] == 0:
            outcome["queue_s"] = self._now_s - requests.arrival_s[number]
        outcome["attempts"] += 1
        outcome["cached_tokens"] = 0
        self.decisions.append((self._now_s, number, held.endpoint, server.number))
        server.held[str(number)] = held
        hashes = self._hashes(number)
        if self.cluster.cached_block_sizes():
            self._sight.index.learn(self._fleet, held.endpoint, hashes, server.number)
        prompt, kept_tokens = self._prompt_tokens(number), self.kept_tokens.get(number, 0)
        output = int(requests.output_tokens[number]) - kept_tokens
        given = EngineRequest(str(number), prompt, output, held.priority, self._now_s, hashes)
        if server.plain.round_trip_s > 0:
            heappush(
                self._sent, (self._now_s + server.plain.round_trip_s, held.endpoint, len(self.decisions), server, given)
            )
        else:
            self._land(server, given)

    def _land(self, server: Server, given: EngineRequest) -> None:
        """Handle the arrival at *server* of a request given to it."""
        server.engine.add(given)
        if server.step is None:
            server.event_s = self._now_s

    # The instances

    def _work(self, server: Server) -> None:
        if server.step is not None:
            step, server.step = server.step, None
            # Look-ahead maps get continuing requests first, then new ones.
            for request_id in sorted(step.emitted, key=lambda name: server.held[name].produced_tokens == 0):
                self._count(server.held[request_id], server)
            for request_id in step.finished:
                held = server.held.pop(request_id)
                del server.admitted[request_id]
                self._latency(held, "e2e_s")
                server.plain.note_end(self._now_s)
                if self.cluster.cached_block_sizes():
                    cached = int(self.outcomes[held.number]["cached_tokens"]) / self._prompt_tokens(held.number)
                    server.plain.cached_share += CACHED_WEIGHT * (cached - server.plain.cached_share)
                self._release(held, server)
                self._end(held, Outcome.DONE)
                self._pump(server.plain.endpoint)
            for request_id in [*server.admitted, *server.engine._waiting, *server.engine._unread]:
                if server.held[request_id].evicted:
                    self._evict(request_id, server)
        server.step = server.engine.step(self._now_s)
        server.event_s = NEVER if server.step is None else server.step.ends_s
        if server.step is not None:
            for request_id in server.step.preempted:
                server.admitted.pop(request_id, None)
                server.held[request_id].preempted = True
                self.outcomes[server.held[request_id].number]["preemptions"] += 1
            for request_id, cached_tokens in server.step.cached_tokens.items():
                server.admitted[request_id] = None
                if not server.held[request_id].preempted:
                    self.outcomes[server.held[request_id].number]["cached_tokens"] = cached_tokens
        if server.state == State.DRAINING and not server.held:
            self.lives.settle(server, self._now_s)

    def _count(self, held: Held, server: Server) -> None:
        """Emit one more token of *held*."""
        if held.produced_tokens == 0:
            if not self.kept_tokens.get(held.number):
                self._latency(held, "ttft_s")
            server.plain.queued_prompt_tokens -= held.expected_prompt
            server.ahead.enter(held.number, self._prompt_tokens(held.number), held.expected_output)
        else:
            server.ahead.token(held.number, held.produced_tokens)
        held.produced_tokens += 1
        done = self._prompt_tokens(held.number) + held.produced_tokens
        tokens, expected = done - held.counted_tokens, held.expected_prompt + held.expected_output
        within = min(tokens, max(expected - held.counted_tokens, 0))
        server.plain.remaining_tokens -= within
        server.plain.kv_tokens += tokens - within
        held.counted_tokens = done

    def _evict(self, request_id: str, server: Server) -> None:
        """Take the request off *server* after an iteration and queue it again with its emitted tokens."""
        held = server.held.pop(request_id)
        server.admitted.pop(request_id, None)
        server.engine.abort(request_id)
        self._release(held, server)
        self.kept_tokens[held.number] = self.kept_tokens.get(held.number, 0) + held.produced_tokens
        self.outcomes[held.number]["evictions"] += 1
        self._pump(server.plain.endpoint)
        again = Held(held.number)
        again.endpoint = self._choose(held.number)
        if again.endpoint < 0:
            self._end(again, Outcome.REFUSED)
        else:
            self._queue(again, bounded=False)
            self._pump(again.endpoint)

    def _release(self, held: Held, server: Server) -> None:
        expected = held.expected_prompt + held.expected_output
        server.ahead.leave(held.number)
        if held.produced_tokens == 0:
            server.plain.queued_prompt_tokens -= held.expected_prompt
        server.plain.running -= 1
        server.plain.kv_tokens -= max(expected, held.counted_tokens)
        server.plain.remaining_tokens -= max(expected - held.counted_tokens, 0)

    def _latency(self, held: Held, name: str) -> None:
        origin = int(self.requests.region[held.number])
        target = self.cluster.regions.index(self.cluster.endpoints[held.endpoint][1])
        back_s = float(self._latency_s[target, origin])
        self.outcomes[held.number][name] = self._now_s - float(self.requests.arrival_s[held.number]) + back_s

    def _end(self, held: Held, outcome: Outcome) -> None:
        self.outcomes[held.number]["state"] = outcome
        self._ended += 1

    # Changes of the fleet

    def _scale(self, endpoint: int) -> None:
        """Run SageServe's reactive trigger for a request that reached *endpoint*."""
        rule = self.cluster.reactive
        if rule is None or self._now_s - self._scaled_s[endpoint] < rule.cooldown_s:
            return
        serving, use = self.lives.serving(endpoint), self._pressure(endpoint, with_backlog=False)
        if serving < rule.min_instances or (use > rule.out_above and serving < rule.max_instances):
            if self.lives.scale_out(endpoint, self._now_s):
                self._scaled_s[endpoint] = self._now_s
                self._pump(endpoint)
        elif use < rule.in_below and serving > rule.min_instances and self.lives.scale_in(endpoint, self._now_s):
            self._scaled_s[endpoint] = self._now_s

    def _obey(self, command: Command) -> bool:
        """Run *command*; return False if it is invalid now."""
        lives, now_s, at = self.lives, self._now_s, int(command.arguments[0])
        more = command.arguments[1:]
        if command.name in ("scale_out", "scale_in"):
            for _ in range(int(more[0])):
                if not getattr(lives, command.name)(at, now_s):
                    break
            if command.name == "scale_out":
                self._pump(at)
            return True
        if command.name == "evict":
            held = next((one.held[str(at)] for one in lives.servers if str(at) in one.held), None)
            if held is None or held.evicted:
                return False
            held.evicted = True
            return True
        server = lives.servers[at]
        if command.name in ("drain", "stop", "sleep") and server.state in WORKS:
            lasting = {
                "drain": [(State.SPOT, NEVER)],
                "stop": [(State.EMPTY, NEVER)],
            }
            if command.name == "sleep":
                lives.sleep(server, now_s)
            else:
                lives.drain(server, now_s, *lasting[command.name])
            return True
        if command.name == "stop" and server.state in (State.SPOT, State.ASLEEP):
            lives.put(server, now_s, (State.EMPTY, NEVER))
            return True
        if command.name == "start" and lives.start(server, now_s):
            self._pump(server.plain.endpoint)
            return True
        if command.name == "wake" and server.state == State.ASLEEP:
            return lives.start(server, now_s)
        if command.name == "swap_to":
            return lives.swap_to(server, now_s)
        if command.name in ("swap", "redeploy") and server.state in (*WORKS, State.SPOT) and not server.sharing:
            return self._change_model(server, int(more[0]), command.name, *more[1:])
        if command.name == "fail" and server.state not in (State.EMPTY, State.FAILED):
            self._fail(server, *more)
            return True
        return False

    def _change_model(self, server: Server, endpoint: int, how: str, remote: float = False) -> bool:
        model, region = self.cluster.endpoints[endpoint]
        if server.region != region or (model, server.gpu_type) not in self.lives.engines:
            return False
        if how == "swap":
            self.lives.drain(server, self._now_s, (State.SWAPPING, NEVER), endpoint=endpoint)
        else:
            self.lives.redeploy(server, endpoint, self._now_s, bool(remote))
        return True

    def _fail(self, server: Server, repair_s: float | None = None) -> None:
        """Requeue requests without a token, up to three times; the others fail."""
        lost = self.lives.fail(server, self._now_s, self.cluster.delays.repair_s if repair_s is None else repair_s)
        self._sent = [each for each in self._sent if each[3] is not server]
        heapify(self._sent)
        for held in lost:
            self._release(held, server)
        for held in lost:
            again = Held(held.number)
            outcome = self.outcomes[held.number]
            may = held.produced_tokens == 0 and outcome["attempts"] - outcome["evictions"] < MAX_ATTEMPTS
            again.endpoint = self._choose(held.number) if may else -1
            if again.endpoint < 0:
                self._end(held, Outcome.FAILED)
            else:
                self._queue(again)
                self._pump(again.endpoint)
        if server.goal is not None:
            self.lives.settle(server, self._now_s)
