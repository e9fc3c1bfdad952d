"""The queues of every region as published: groups in order, instances, totals, recent changes."""

import math
from dataclasses import asdict
from typing import Any, Final

import numpy as np

from controlplane.dispatch.dispatcher import Dispatcher
from controlplane.dispatch.live_fleet.topology import Endpoint, Replica
from controlplane.dispatch.wire import GROUP_COLUMNS, LANE_COLUMNS, QUEUE_COLUMNS, REORDER_COLUMNS
from scheduling.queueing.reordering.evaluate import Score
from scheduling.queueing.served import fcfs_attainment, worth
from scheduling.queueing.snapshot import Snapshot

EVERY_S: Final = 1.0
RISK_S: Final = 15.0
"""Slack below which a group is at risk."""
SHOWN_CHANGES: Final = 12
FCFS_GROUPS: Final = 256
"""Most groups for which the FCFS attainment is computed: it takes time on the event loop."""

Row = dict[str, Any]
Tables = dict[str, dict[str, list[Any]]]


def risk_of(slack_s: float) -> str:
    return "late" if slack_s < 0 else "risk" if slack_s < RISK_S else ""


class QueuesView:
    """Published queues, read again once a second."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self._tables: Tables = {}
        self._read_s = -math.inf

    def __call__(self) -> Tables:
        """Return the columns of `groups`, `lanes`, `queues` and `reorders` (`dispatch.wire`)."""
        now_s = self.dispatcher.clock()
        if now_s - self._read_s >= EVERY_S:
            self._tables, self._read_s = self._read(), now_s
        queues = self._tables["queues"]
        queues["waiting"] = [self._waiting(region) for region in queues["region"]]  # of now, as that of the fleet
        return self._tables

    def _waiting(self, region: str) -> int:
        dispatcher = self.dispatcher
        here = (endpoint for endpoint in dispatcher.topology.own_endpoints if endpoint.region == region)
        return sum(map(dispatcher.queue.count, here))

    def _read(self) -> Tables:
        seen = self.dispatcher.reordering.control.read(pinned=True)
        score = worth(seen) if seen else None
        groups = group_rows(self.dispatcher, seen, score) if seen and score else []
        lanes = self._lanes(groups)
        reorders = self._reorders()
        return {
            "groups": _columns(groups, GROUP_COLUMNS),
            "lanes": _columns(lanes, LANE_COLUMNS),
            "queues": _columns(self._queues(groups, seen, score), QUEUE_COLUMNS),
            "reorders": _columns(reorders, REORDER_COLUMNS),
        }

    def _lanes(self, groups: list[Row]) -> list[Row]:
        """Return rows of the instances that serve or hold groups."""
        topology, queue = self.dispatcher.topology, self.dispatcher.queue
        waiting: dict[str, int] = {}
        service_s: dict[str, float] = {}
        for row in groups:
            waiting[row["instance"]] = waiting.get(row["instance"], 0) + row["count"]
            service_s[row["instance"]] = service_s.get(row["instance"], 0.0) + (row["service_s"] or 0.0)
        rows = []
        for replica in sorted(topology.replicas.values(), key=lambda each: (each.spec.model, each.name)):
            if not topology.fleet.accepting[replica.slot] and replica.name not in waiting and not replica.requests:
                continue
            endpoint, metrics = replica.endpoint, replica.metrics
            grouped = queue.grouped(endpoint)
            rows.append(
                {
                    "instance": replica.name,
                    "region": endpoint.region,
                    "model": endpoint.model,
                    "order": endpoint.spec.policy.ordering,
                    "state": str(replica.spec.state) if replica.reachable else "unreachable",
                    "running": len(replica.requests),
                    "kv_ratio": round(metrics.kv_usage_ratio, 3) if metrics else None,
                    "waiting": waiting.get(replica.name, 0) if grouped else None,
                    "service_s": round(service_s.get(replica.name, 0.0), 1) if grouped else None,
                }
            )
        return rows

    def _queues(self, groups: list[Row], seen: Snapshot | None, score: Score | None) -> list[Row]:
        dispatcher, reordering = self.dispatcher, self.dispatcher.reordering
        solved = next((change for change in reversed(reordering.changes) if change.took_ms is not None), None)
        by_region: dict[str, list[Endpoint]] = {}
        for endpoint in dispatcher.topology.own_endpoints:
            by_region.setdefault(endpoint.region, []).append(endpoint)
        fcfs = (
            fcfs_attainment(seen, dispatcher.queue.lost(seen))
            if seen and 1 < seen.numbers.size <= FCFS_GROUPS
            else None
        )
        # Of all regions, like the FCFS one.
        late_ratio = sum(row["count"] for row in groups if row["risk"] == "late") / max(
            1, sum(row["count"] for row in groups)
        )
        rows = []
        for region, endpoints in sorted(by_region.items()):
            here = [row for row in groups if row["region"] == region]
            requests = sum(row["count"] for row in here)
            late = [row for row in here if row["risk"] == "late"]
            missed = sum(row["count"] for row in late)
            rows.append(
                {
                    "region": region,
                    "waiting": self._waiting(region),
                    "groups": len(here),
                    "queues": len({row["instance"] for row in here}),
                    "at_risk": sum(row["risk"] == "risk" for row in here),
                    "late": len(late),
                    "late_requests": missed,
                    "oldest_wait_s": round(max(map(dispatcher.oldest_wait_s, endpoints), default=0.0), 1),
                    "attainment_ratio": round(1.0 - late_ratio, 4) if requests and score else None,
                    "fcfs_ratio": None if fcfs is None or not requests else round(fcfs, 4),
                    "solved_ms": round(solved.took_ms, 2) if solved and solved.took_ms is not None else None,
                    "solved_at": solved.at if solved else None,
                    "pending_s": reordering.pending_s,
                    "fallbacks": reordering.fallbacks,
                }
            )
        return rows

    def _reorders(self) -> list[Row]:
        return [
            {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(change).items()}
            for change in list(self.dispatcher.reordering.changes)[: -SHOWN_CHANGES - 1 : -1]
        ]


def group_rows(dispatcher: Dispatcher, seen: Snapshot, score: Score) -> list[Row]:
    """Return a row per group of *seen*, in queue order."""
    problem, arrays = seen.problem, dispatcher.queue.arrays.groups
    instances = _pulling(dispatcher)
    groups = arrays.groups[seen.places]
    lost = dispatcher.queue.lost(seen).tolist()
    first, tokens = groups["first"].tolist(), (groups["prompt_tokens"] + groups["output_tokens"]).tolist()
    endpoint_of, pinned, counts = groups["endpoint"].tolist(), groups["pinned"].tolist(), groups["count"].tolist()
    rows = []
    for queue, members in enumerate(seen.previous.queues()):
        kind = int(problem.queue_type[queue])
        for place, at in enumerate(members, 1):
            endpoint = dispatcher.topology.endpoints[endpoint_of[at]]
            replica = instances.get((int(seen.queues[queue]), endpoint.index))
            slack_s, service_s = -float(score.late_s[at]), float(problem.service_s[at, kind])
            if lost[at]:  # it has another due time, not another promise
                request = dispatcher.queue.at(first[at]).asked
                slack_s = min(slack_s, request.arrived_s + request.allowed_s - dispatcher.clock(), -0.1)
            slack_known = math.isfinite(slack_s)
            rows.append(
                {
                    "number": int(seen.numbers[at]),
                    "region": endpoint.region,
                    "instance": replica.name if replica else "",
                    "model": endpoint.model,
                    "place": place,
                    "slo_class": dispatcher.queue.at(first[at]).asked.slo_class,
                    "count": counts[at],
                    "tokens": round(tokens[at]),
                    "start_s": _finite(float(score.start_s[at])),
                    "service_s": _finite(service_s),
                    "due_s": _finite(float(problem.due_s[at])),
                    "slack_s": round(slack_s, 1) if slack_known else None,
                    "pinned": bool(pinned[at]),
                    "risk": risk_of(slack_s) if slack_known else "",
                }
            )
    return rows


def _pulling(dispatcher: Dispatcher) -> dict[tuple[int, int], Replica]:
    """Return the instance that serves each (queue, endpoint) of virtual queues, preferring one that accepts work."""
    topology, queue_of = dispatcher.topology, dispatcher.queue.arrays.groups.queue_of
    replicas: dict[tuple[int, int], Replica] = {}
    for slot in np.argsort(-topology.fleet.accepting.astype(np.int64), kind="stable").tolist():
        replica = topology.by_slot.get(slot)
        if replica is not None:
            replicas.setdefault((int(queue_of[slot]), replica.endpoint.index), replica)
    return replicas


def _finite(value: float) -> float | None:
    return round(value, 1) if math.isfinite(value) else None


def _columns(rows: list[Row], names: tuple[str, ...]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in names}
