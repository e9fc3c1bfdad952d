"""The live summary, published several times a second for consoles and metrics, and an hour of its history.

`snapshot` is built from memory alone. The publisher writes it to Redis (`pilothouse:summary`, `pilothouse:history`);
while Redis is away the gateway continues to serve and queues nothing.
"""

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import orjson
import redis.asyncio as aioredis
from django.conf import settings
from redis.exceptions import RedisError

from controlplane.background import spawn
from controlplane.dispatch import wire
from controlplane.dispatch.dispatcher import Dispatcher
from controlplane.dispatch.lease import Lease
from controlplane.dispatch.live_fleet.topology import Endpoint, Replica, Request
from controlplane.dispatch.monitoring.measures import FLEET, Measures, promised_in
from controlplane.dispatch.monitoring.windows import (
    LATENCY_WINDOW_S,
    SLO_WINDOW_S,
    Count,
    Latency,
)
from controlplane.fleet.attainment import worst
from controlplane.fleet.lifecycle.states import PRESENT, InstanceState
from controlplane.fleet.services import INVENTORY_CHANNEL
from controlplane.jobs.record import Job

WANTED = PRESENT | {InstanceState.FAILED}
"""States of instances that serve, or should: one that drains, sleeps or is donated is not short."""
OF_SHARDS = ("queues", "held", "work", "outcomes")
"""Sections in which each shard has its own rows."""
MAX_WAITING = 500  # listed per queue
AT_A_STRETCH = 100
RATE_WINDOW_S = 10


def _rounded(value: float | None, digits: int = 1) -> float | None:
    return None if value is None else round(value, digits)


def _columns(rows: list[dict[str, Any]], names: tuple[str, ...]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in names}


def merged(one: Any, other: Any) -> Any:
    """Return two parts of a summary as one: rows and columns of both, and numbers of either added up."""
    if isinstance(one, dict) and isinstance(other, dict):
        both = one.keys() & other.keys()
        return {**one, **other, **{name: merged(one[name], other[name]) for name in both}}
    if isinstance(one, list) and isinstance(other, list):
        return one + other
    numbers = isinstance(one, int | float) and isinstance(other, int | float)
    return one + other if numbers and not isinstance(one, bool) else other if one is None else one


class Summary:
    """Builder of snapshots. *owner* names this process; *sections* are read unchanged, by name."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        measures: Measures,
        owner: str,
        sections: Mapping[str, Callable[[], Any]],
    ) -> None:
        self.dispatcher, self.topology = dispatcher, dispatcher.topology
        self.windows, self.service_levels = measures.windows, measures.service_levels
        self.ttft_targets_ms = measures.ttft_targets_ms
        self.owner = owner
        self.sections = sections
        self.started_at = time.time()
        self.sequence = 0

    def part(self) -> dict[str, Any]:
        """Return what this process adds to the summary of the owner of the first shard."""
        present = (one for one in self.topology.replicas.values() if one.spec.state != InstanceState.STOPPED)
        replicas = sorted(present, key=lambda replica: replica.name)
        instances = [self._instance(replica) for replica in replicas]
        sections = {name: self.sections[name]() for name in OF_SHARDS if name in self.sections}
        return {"instances": instances, "endpoints": self.endpoints()} | sections

    def endpoints(self) -> list[dict[str, Any]]:
        """Return the rows of this process's endpoints."""
        rows = [self._endpoint(endpoint) for endpoint in self.topology.own_endpoints]
        return sorted(rows, key=lambda row: (row["model"], row["region"]))

    def snapshot(self, parts: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """Return the summary of the fleet: of this process and of *parts*, those of other shards."""
        self.windows.advance(self.dispatcher.clock())
        self.sequence += 1
        whole = reduce(merged, parts, self.part())
        instances = sorted(map(self._with_latencies, whole.pop("instances")), key=lambda row: str(row["name"]))
        endpoints = sorted(
            map(self._with_rate, whole.pop("endpoints")), key=lambda row: (str(row["model"]), str(row["region"]))
        )
        held = Counter[str]()
        for model, count in zip(*(whole["held"][name] for name in ("model", "count")), strict=True):
            held[model] += count
        models = {
            model: self._tile(
                f"model {model}",
                [row for row in instances if row["model"] == model],
                [row for row in endpoints if row["model"] == model],
                held[model],
            )
            for model in sorted({row["model"] for row in endpoints})
        }
        return (
            {
                "seq": self.sequence,
                "ts": round(time.time(), 3),
                "owner": self.owner,
                "started_at": self.started_at,
                "fleet": self._tile(FLEET, instances, endpoints, held.total()),
                "models": models,
                "endpoints": _columns(endpoints, wire.ENDPOINT_COLUMNS),
                "instances": _columns(instances, wire.INSTANCE_COLUMNS),
            }
            | {name: read() for name, read in self.sections.items() if name not in OF_SHARDS}
            | whole
        )

    def _with_rate(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the row of an endpoint with what only the owner of the first shard counts."""
        group = self.windows.group(f"endpoint {row['model']} {row['region']}")
        return row | {"requests_per_s": _rounded(self.windows.rate(group, Count.FINISHED, RATE_WINDOW_S), 2)}

    def _with_latencies(self, row: dict[str, Any]) -> dict[str, Any]:
        windows, group = self.windows, self.windows.group(f"instance {row['name']}")
        (ttft_p95,) = windows.percentiles(group, Latency.TTFT, (95,))
        (itl_p95,) = windows.percentiles(group, Latency.ITL, (95,))
        return row | {"ttft_p95_ms": _rounded(ttft_p95), "itl_p95_ms": _rounded(itl_p95)}

    def _tile(
        self, group_name: str, instances: list[dict[str, Any]], endpoints: list[dict[str, Any]], held: int
    ) -> dict[str, Any]:
        windows = self.windows
        group = windows.group(group_name)
        ttft_class, ttft, ttft_slo_ms = self._ttft(group_name)
        (ttft_all,) = windows.percentiles(group, Latency.TTFT, (95,))
        itl = windows.percentiles(group, Latency.ITL, (50, 95))
        (e2e_p95,) = windows.percentiles(group, Latency.E2E, (95,))
        classes = self.service_levels.of(group_name)
        headline = worst(classes)
        failed, ended = (windows.total(group, what, LATENCY_WINDOW_S) for what in (Count.FAILED, Count.FINISHED))
        kv = [row["kv_ratio"] for row in instances if row["kv_ratio"] is not None]
        return {
            "requests_per_s": _rounded(windows.rate(group, Count.REQUESTS, RATE_WINDOW_S), 2),
            "output_tokens_per_s": _rounded(sum(row["output_tokens_per_s"] for row in endpoints)),
            "prompt_tokens_per_s": _rounded(sum(row["prompt_tokens_per_s"] for row in endpoints)),
            "failed_ratio": _rounded(failed / ended, 6) if ended else None,
            "slo_class": headline.slo_class if headline else None,
            "slo_met_ratio": _rounded(headline.ratio, 6) if headline else None,
            "slo_objective_ratio": headline.objective if headline else None,
            "slo_burn": _rounded(headline.burn, 4) if headline else None,
            "slo_classes": [one.as_dict() for one in classes],
            "slo_judged": sum(one.judged for one in classes),
            "slo_ended": windows.total(group, Count.FINISHED, SLO_WINDOW_S),
            "ttft_p50_ms": _rounded(ttft[0]),
            "ttft_p95_ms": _rounded(ttft[1]),
            "ttft_p99_ms": _rounded(ttft[2]),
            "ttft_class": ttft_class,
            "ttft_all_p95_ms": _rounded(ttft_all),
            "itl_p50_ms": _rounded(itl[0]),
            "itl_p95_ms": _rounded(itl[1]),
            "e2e_p95_ms": _rounded(e2e_p95),
            "waiting": sum(row["waiting"] for row in endpoints),
            "held": held,
            "running": sum(row["running"] for row in endpoints),
            "kv_max_ratio": max(kv, default=None),
            "instances_ready": sum(row["instances_ready"] for row in endpoints),
            "instances": sum(row["state"] in WANTED for row in instances),
            "ttft_slo_ms": ttft_slo_ms,
        }

    def _ttft(self, scope: str) -> tuple[str | None, list[float | None], float | None]:
        """Return the class whose p95 is worst against its promise, its p50, p95 and p99, and its target, in milliseconds.

        Classes are never mixed: a batch line may wait for hours. Where no request of a class with a promise ended in the
        last minute, those of all others together, without a class and a target.
        """
        worst_of: tuple[float, str, list[float | None], float] | None = None
        for slo_class, target_ms in self.ttft_targets_ms.items():
            if (group := self.windows.known(promised_in(scope, slo_class))) is None:
                continue
            values = self.windows.percentiles(group, Latency.TTFT, (50, 95, 99))
            p95_ms = values[1]
            if p95_ms is not None and (worst_of is None or p95_ms / target_ms > worst_of[0]):
                worst_of = p95_ms / target_ms, slo_class, values, target_ms
        if worst_of is None:
            return None, self.windows.percentiles(self.windows.group(scope), Latency.TTFT, (50, 95, 99)), None
        return worst_of[1:]

    def _endpoint(self, endpoint: Endpoint) -> dict[str, Any]:
        dispatcher, fleet = self.dispatcher, self.topology.fleet
        members = [one for one in self.topology.members(endpoint) if one.spec.state != InstanceState.STOPPED]
        slots = [replica.slot for replica in members]
        present = self.topology.present(endpoint)
        answering = [replica for replica in present if replica.reachable]
        capacity = int(fleet.kv_capacity_tokens[slots].sum())
        wait_s = dispatcher.estimated_wait_s(endpoint)
        return {
            "model": endpoint.model,
            "region": endpoint.region,
            "running": sum(map(self.topology.running, present)),
            "prompt_tokens_per_s": _rounded(sum(replica.prompt_tokens_per_s for replica in answering)),
            "output_tokens_per_s": _rounded(sum(replica.output_tokens_per_s for replica in answering)),
            "waiting": dispatcher.queue.count(endpoint),
            "oldest_wait_s": _rounded(dispatcher.oldest_wait_s(endpoint)),
            "estimated_wait_s": _rounded(wait_s),
            "kv_ratio": _rounded(int(fleet.kv_tokens[slots].sum()) / capacity, 4) if capacity else None,
            "instances_ready": int(fleet.accepting[slots].sum()),
            "instances": len(slots),
        }

    def _instance(self, replica: Replica) -> dict[str, Any]:
        fleet, spec, metrics = self.topology.fleet, replica.spec, replica.metrics
        running, ahead = self.topology.running(replica), self.topology.requests_ahead(replica)
        room = self.topology.at_once(replica)
        answered = spec.state not in (InstanceState.PROVISIONING, InstanceState.STOPPED) and metrics is not None
        kv_ratio = metrics.kv_usage_ratio if answered and metrics is not None else None
        return {
            "id": spec.instance_id,
            "name": spec.name,
            "model": spec.model,
            "region": spec.region,
            "gpu_type": spec.gpu_type,
            "state": spec.state,
            "reachable": replica.reachable,
            "trouble": replica.trouble,
            "running": running,
            "waiting": int(fleet.observed_waiting[replica.slot]),
            "requests_ahead": ahead,
            "round_trip_ms": _rounded(self.topology.round_trip_ms(replica), 2),
            "max_num_seqs": room,
            "kv_ratio": _rounded(kv_ratio, 4),
            "use_ratio": _rounded(max(running / room, kv_ratio), 4) if kv_ratio is not None else None,
            "output_tokens_per_s": _rounded(replica.output_tokens_per_s) if replica.reachable else 0.0,
            "preemptions_per_min": _rounded(replica.preemptions_per_min),
            "prefix_hit_ratio": _rounded(replica.prefix_hit_ratio, 4),
            "cached_blocks": replica.cached_blocks,
            "cache_unknown": replica.cache_unknown,
            "heartbeat_at": _rounded(replica.heartbeat_at, 3),
            "state_since": _rounded(spec.state_changed_at, 3),
            "failures": spec.failures,
        }


async def waiting_requests(dispatcher: Dispatcher) -> dict[str, Any]:
    """Return waiting and held requests for tenants: the first `MAX_WAITING` of each queue, counts by tenant and model.

    Other work of the loop runs after each `AT_A_STRETCH`: a wait takes 30 us to estimate.
    """
    rows, waits = [], dispatcher.waits.control
    for at, (request, estimate) in enumerate(dispatcher.waiting_now(MAX_WAITING)):
        if at % AT_A_STRETCH == AT_A_STRETCH - 1:
            await asyncio.sleep(0)
        wait = estimate.wait
        mean_s, p99_s = (wait.mean_s, waits.quantile_s(request.row, wait)) if wait else (None, None)
        rows.append(_waiting_row(request, estimate.position, mean_s, p99_s))
    rows += [
        _waiting_row(held.request, held.position, held.wait_s, held.most_s, held.reason)
        for held in dispatcher.held_now(MAX_WAITING)
    ]
    by_tenant = dispatcher.queue.by_tenant + dispatcher.holding.by_tenant
    counts = [[*key, count] for key, count in sorted(by_tenant.items()) if count]
    return {"at": time.time(), "requests": rows, "by_tenant": counts}


def _waiting_row(
    request: Request, position: int, mean_s: float | None, p99_s: float | None, reason: str = ""
) -> dict[str, Any]:
    asked = request.asked
    return {
        "request_id": asked.request_id,
        "tenant_id": asked.tenant_id,
        "model": asked.model,
        "region": request.endpoint.region,
        "slo_class": asked.slo_class,
        "arrived_at": asked.arrived_at,
        "position": position,
        "estimated_wait_s": _rounded(mean_s, 3),
        "estimated_wait_p99_s": _rounded(p99_s, 3),
        "reason": reason,
    }


def history_sample(snapshot: dict[str, Any]) -> dict[str, Any]:
    """Return the part of *snapshot* that is kept for the charts."""
    instances = snapshot["instances"]
    return {
        "ts": snapshot["ts"],
        "fleet": snapshot["fleet"],
        "models": snapshot["models"],
        "kv": dict(zip(instances["name"], instances["kv_ratio"], strict=True)),
        "load": _by_name(instances, "running", "waiting"),
        "pace": _by_name(instances, "ttft_p95_ms", "itl_p95_ms", "output_tokens_per_s"),
    }


def _by_name(instances: dict[str, list[Any]], *columns: str) -> dict[str, list[Any]]:
    values = zip(*(instances[column] for column in columns), strict=True)
    return dict(zip(instances["name"], map(list, values), strict=True))


class Publisher:
    """Publisher of the summary where this process owns the first shard, of its part of it where it owns others.

    *lease* has its roles; *refresh* requests an inventory read.
    """

    def __init__(self, summary: Summary, *, job: Job, lease: Lease, refresh: Callable[[], None]) -> None:
        self.summary = summary
        self.job = job
        self.lease, self._refresh, self._clock = lease, refresh, summary.dispatcher.clock
        self.held: deque[bytes] = deque(maxlen=wire.HISTORY_LENGTH)  # history that Redis does not have yet
        self._redis = aioredis.from_url(settings.REDIS_URL, socket_timeout=1.0, socket_connect_timeout=1.0)

    async def run(self) -> None:
        listener = spawn(self._listen(), "inventory notices")
        next_sample_s = 0.0
        try:
            while True:
                await asyncio.sleep(settings.SUMMARY_S)
                with self.job:
                    if not self.lease.held:
                        await self._publish_part()
                        continue
                    parts = await self._parts()
                    snapshot = self.summary.snapshot([part["summary"] for part in parts])
                    now_s = self._clock()
                    if now_s >= next_sample_s:
                        next_sample_s = now_s + wire.HISTORY_EVERY_S
                        self.held.append(orjson.dumps(history_sample(snapshot)))
                    waiting = await waiting_requests(self.summary.dispatcher)
                    for part in parts:
                        waiting["requests"] += part["waiting"]["requests"]
                        waiting["by_tenant"] += part["waiting"]["by_tenant"]
                    await self._publish(orjson.dumps(snapshot), orjson.dumps(waiting))
        finally:
            listener.cancel()

    async def stop(self) -> None:
        await self._redis.aclose()

    async def _parts(self) -> list[dict[str, Any]]:
        """Return the parts of shards that other processes own."""
        keys = [wire.PART_KEY + role for role in self.lease.shards if role not in self.lease.owned]
        parts = await self._redis.mget(keys) if keys else []
        return [orjson.loads(part) for part in parts if part is not None]

    async def _publish_part(self) -> None:
        """Publish under the first of the shards that this process owns what it adds; nothing where it owns none."""
        if self.lease.owned and self.lease.holds_shards:
            part = {"summary": self.summary.part(), "waiting": await waiting_requests(self.summary.dispatcher)}
            key = wire.PART_KEY + min(self.lease.owned)
            await self._redis.set(key, orjson.dumps(part), ex=wire.PART_EXPIRES_S)

    async def _publish(self, message: bytes, waiting: bytes) -> None:
        samples = list(self.held)
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.set(wire.SUMMARY_KEY, message, ex=wire.SUMMARY_EXPIRES_S)
            pipe.set(wire.WAITING_KEY, waiting, ex=wire.SUMMARY_EXPIRES_S)
            if samples:
                pipe.rpush(wire.HISTORY_KEY, *samples)
                pipe.ltrim(wire.HISTORY_KEY, -wire.HISTORY_LENGTH, -1)
            await pipe.execute()
        self.held.clear()

    async def _listen(self) -> None:
        """Read the inventory again at each change notice."""
        while True:
            with contextlib.suppress(RedisError, OSError):
                async with self._redis.pubsub() as messages:
                    await messages.subscribe(INVENTORY_CHANNEL)
                    while True:
                        if await messages.get_message(ignore_subscribe_messages=True, timeout=30.0):
                            self._refresh()
            await asyncio.sleep(1.0)
