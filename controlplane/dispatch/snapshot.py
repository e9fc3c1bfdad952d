"""Everything that the owner of the queues knows at one moment, as plain values: what a simulation is forked from.

Only this process has it: what waits and in which order, what runs where and how far it has come, look-ahead maps, request
groups, round trips. It is asked for over Redis (`queues.commands`). All times are seconds from the moment on: what was is
negative.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from controlplane.dispatch.dispatcher import Dispatcher
from controlplane.dispatch.floor.observation import Observation
from controlplane.dispatch.live_fleet.topology import Endpoint, Replica
from controlplane.dispatch.requests.request import Request
from scheduling.queueing.groups import KNOWN_CLASSES, NEXT_NUMBER
from scheduling.queueing.swapping.sharing import COMES, LEAVES, STAYS, WAITS
from scheduling.queueing.waiting_set import in_order
from scheduling.routing.regions import asked_work_s, backlog_s
from scheduling.scaling.view import DEMAND_WINDOW_S


class Snapshot:
    """Call it for the snapshot. *report* has the dispatcher hear how far streams have come, and says when each was heard of
    last, by number of the request on the dispatcher's clock."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        observation: Observation,
        report: Callable[[], Mapping[int, float]],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.dispatcher, self.observation, self.report = dispatcher, observation, report
        self.wall_clock = wall_clock

    def __call__(self) -> dict[str, Any]:
        """Some 10 ms for a thousand requests."""
        heard = self.report()
        dispatcher, topology = self.dispatcher, self.dispatcher.topology
        now_s = dispatcher.clock()
        replicas = sorted(topology.replicas.values(), key=lambda one: one.name)
        numbers = {one.slot: at for at, one in enumerate(replicas)}
        waiting, places = self._waiting(now_s)
        return {
            "at": self.wall_clock(),
            "instances": [self._instance(one, heard, now_s) for one in replicas],
            "running": [
                self._running(request, at, now_s)
                for at, one in enumerate(replicas)
                for request in sorted(one.requests, key=_placed)
            ],
            "waiting": waiting,
            "endpoints": [self._endpoint(each, numbers, now_s) for each in topology.endpoints],
            "groups": self._groups(numbers, places, now_s),
            "swept_s": dispatcher.swept_s - now_s,
        }

    def _instance(self, replica: Replica, heard: Mapping[int, float], now_s: float) -> dict[str, Any]:
        fleet, wall_s = self.dispatcher.topology.fleet, self.wall_clock()
        spec = replica.spec
        return {
            "name": spec.name,
            "model": spec.model,
            "region": spec.region,
            "gpu_type": spec.gpu_type,
            "state": spec.state,
            "since_s": spec.state_changed_at - wall_s,
            "swap_group": spec.swap_group,
            **self._swap(replica, now_s),
            "reachable": replica.reachable,
            "heartbeat_s": None if replica.heartbeat_at is None else replica.heartbeat_at - wall_s,
            "max_num_seqs": int(fleet.max_num_seqs[replica.slot]),
            "kv_tokens": int(fleet.kv_capacity_tokens[replica.slot]),
            "round_trips": self._round_trips(replica, now_s),
            "iteration_s": self._iteration_s(replica, heard, now_s),
            "ended": self._ended(replica, now_s),
        }

    def _iteration_s(self, replica: Replica, heard: Mapping[int, float], now_s: float) -> float | None:
        """When an iteration ended last at *replica*, None if unknown: all that decodes there gets a token at its end."""
        ended_s = [heard[number] for number in (each.asked.number for each in replica.requests) if number in heard]
        if replica.ended:
            ended_s.append(replica.ended[-1].ended_s)
        return max(ended_s) - now_s if ended_s else None

    def _ended(self, replica: Replica, now_s: float) -> list[tuple[float, float, int, int]]:
        """What ended at *replica* since the first of those that have no token came there."""
        first_s = min((one.placed_s for one in replica.requests if not one.output_tokens), default=now_s)
        return [
            (one.placed_s - now_s, one.ended_s - now_s, one.prompt_tokens, one.output_tokens)
            for one in replica.ended
            if one.ended_s > first_s
        ]

    def _swap(self, replica: Replica, now_s: float) -> dict[str, Any]:
        """Whether *replica* leaves its GPUs for another, is the one that waits for that, or when it is up on them."""
        arrays, slot = self.dispatcher.queue.arrays.groups, replica.slot
        phase = int(arrays.phase[slot]) if slot < arrays.phase.size else STAYS
        up_s = float(arrays.up_s[slot]) + self.dispatcher.began_s - now_s if phase == COMES else None
        return {"leaves": phase == LEAVES, "waits": phase == WAITS, "up_s": up_s}

    def _round_trips(self, replica: Replica, now_s: float) -> list[float]:
        """Its row of `FleetArrays.round_trips`, with the moment in it from now on."""
        row = self.dispatcher.topology.fleet.round_trips[replica.slot].tolist()
        row[1] += self.dispatcher.began_s - now_s
        return list(row)

    def _asked(self, request: Request, now_s: float) -> dict[str, Any]:
        asked = request.asked
        return {
            "request_id": asked.request_id,
            "model": asked.model,
            "region": self.dispatcher.topology.own_region(asked.model, asked.region) or request.endpoint.region,
            "served_in": request.endpoint.region,
            "slo_class": asked.slo_class,
            "tenant_id": asked.tenant_id,
            "arrival_s": asked.arrived_s - now_s,
            "prompt_tokens": asked.prompt_tokens,
            "predicted_tokens": request.predicted_tokens,
            "sequences": asked.sequences,
            "attempts": request.attempts,
        }

    def _running(self, request: Request, instance: int, now_s: float) -> dict[str, Any]:
        maps, ahead = self.dispatcher.anticipation.maps, None
        if request.ahead >= 0:
            ahead = int(maps.clock[maps.instance[request.ahead]] - maps.began[request.ahead])
        return self._asked(request, now_s) | {
            "instance": instance,
            "placed_s": request.placed_s - now_s,
            "streamed": request.asked.streamed,
            "output_tokens": request.output_tokens,
            "expected_prompt": request.expected_prompt,
            "expected_tokens": request.expected_tokens,
            "ahead": ahead,
        }

    def _waiting(self, now_s: float) -> tuple[list[dict[str, Any]], dict[int, int]]:
        """What waits, in order of arrival at its queue, and the place of each there by slot of the waiting set."""
        queue = self.dispatcher.queue
        slots = [
            int(slot)
            for endpoint in self.dispatcher.topology.endpoints
            if queue.count(endpoint)
            for slot in in_order(queue.arrays, endpoint.index)
        ]
        slots.sort(key=lambda slot: int(queue.arrays.sequence[slot]))
        rows = [
            self._asked(queue.at(slot), now_s)
            | {
                "expected_prompt": int(queue.arrays.prompt_tokens[slot]),
                "expected_output": int(queue.arrays.output_tokens[slot]),
            }
            for slot in slots
        ]
        return rows, {slot: at for at, slot in enumerate(slots)}

    def _endpoint(self, endpoint: Endpoint, numbers: dict[int, int], now_s: float) -> dict[str, Any]:
        topology, memory = self.dispatcher.topology, self.observation.memory(endpoint.index)
        asked = np.zeros(DEMAND_WINDOW_S)
        for second, tokens in memory.demand:
            before = int(now_s) - 1 - second
            if 0 <= before < DEMAND_WINDOW_S:
                asked[DEMAND_WINDOW_S - 1 - before] += tokens
        return {
            "model": endpoint.model,
            "region": endpoint.region,
            "ordering": endpoint.spec.policy.ordering,
            "cursor": numbers.get(int(topology.arrays.cursor[endpoint.index])),
            "changed_s": memory.changed_s - now_s,
            "changed_by": memory.last.by,
            "changed_delta": memory.last.delta,
            "asked_tokens": asked.tolist(),
            "asked_work_s": float(asked_work_s(topology.arrays, endpoint.index, now_s)),
            "backlog_s": float(backlog_s(topology.arrays, endpoint.index, now_s)),
        }

    def _groups(self, numbers: dict[int, int], places: dict[int, int], now_s: float) -> dict[str, Any] | None:
        """Request groups where they stand, the classes that their kinds count by, and mean lengths; None without any."""
        arrays = self.dispatcher.queue.arrays.groups
        if not arrays.limit.any():
            return None
        shift_s = self.dispatcher.began_s - now_s
        endpoints = self.dispatcher.topology.fleet.endpoint
        pulling = {
            (int(arrays.queue_of[slot]), int(endpoints[slot])): at
            for slot, at in numbers.items()
            if slot < arrays.queue_of.size
        }
        groups = []
        for place in np.flatnonzero(arrays.groups["endpoint"] >= 0).tolist():
            this: Any = arrays.groups[place]
            members, slot = [], int(this.first)
            while slot >= 0:
                members.append(places[slot])
                slot = int(arrays.members[slot]["following"])
            before, rank = int(this.preceding), 0
            while before >= 0:
                before, rank = int(arrays.groups[before]["preceding"]), rank + 1
            groups.append(
                {
                    "endpoint": int(this.endpoint),
                    "kind": int(this.kind),
                    "number": int(this.number),
                    "joined": int(this.joined),
                    "prompt_tokens": float(this.prompt_tokens),
                    "output_tokens": float(this.output_tokens),
                    "opened_s": float(this.opened_s) + shift_s,
                    "hold_until_s": max(float(this.hold_until_s) + shift_s, -1e9),
                    "pinned": bool(this.pinned),
                    "is_open": int(arrays.open[this.endpoint, this.kind]) == place,
                    "instance": pulling.get((int(this.queue), int(this.endpoint))),
                    "rank": rank,
                    "members": members,
                }
            )
        known, scheduler = int(arrays.counters[KNOWN_CLASSES]), self.dispatcher.reordering.scheduler
        made, left = scheduler.tried
        classes = zip(arrays.class_priority[:known].tolist(), arrays.class_due_ms[:known].tolist(), strict=True)
        return {
            "groups": groups,
            "classes": list(classes),
            "mean_tokens": arrays.mean_tokens[: len(self.dispatcher.topology.endpoints)].tolist(),
            "mean_output": arrays.mean_output[: len(self.dispatcher.topology.endpoints)].tolist(),
            "next_number": int(arrays.counters[NEXT_NUMBER]),
            "tried": [made, arrays.groups.size - left] if made >= 0 else None,
            "tried_s": max(scheduler.tried_s + shift_s, -1e9),
            "short_instances": list(scheduler.short_instances.items()),
        }


def _placed(request: Request) -> tuple[float, float, int]:
    """The order in which requests were given out: those of one moment by what their queue orders them by."""
    return request.placed_s, request.queue_key_s, request.asked.number
