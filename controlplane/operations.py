"""Operations endpoints that answer from memory and never wait for the database: `/healthz`, `/readyz`, `/metrics`, and
vLLM's `/health`, `/ping` and `/version`, which its clients call before anything else. Only the figures of capacity in
`/metrics` are the database's; where they take long, a scrape has the last ones."""

import asyncio
import contextlib
import hmac
import ipaddress
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import orjson
from channels.db import database_sync_to_async
from django.conf import settings
from django.db import Error
from django.utils import timezone
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector

from controlplane import __version__, background
from controlplane.batches import selectors as batches
from controlplane.dispatch.lease import BATCHES
from controlplane.dispatch.monitoring.measures import FLEET, Measures, promised_in
from controlplane.dispatch.monitoring.windows import Latency
from controlplane.dispatch.process import Dispatching
from controlplane.fleet import selectors as fleet
from controlplane.gateway.process import Gateway
from controlplane.jobs.parts import PartState
from controlplane.jobs.record import JobState
from controlplane.planning.capacity import EndpointLoad, endpoint_loads, total
from controlplane.planning.sizing.selectors import newest_loss
from scheduling.routing.adapters import TIERS

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

JSON_TYPE = b"application/json"
NOT_READY = b'{"status":"not ready"}'
PROMETHEUS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
QUANTILES, PERCENTS = ("0.5", "0.95", "0.99"), (50, 95, 99)
CAPACITY_WAIT_S: Final = 1.0
"""Longest wait of a scrape for figures from the database; after that it has the last ones."""
CAPACITY_KEPT_S: Final = 60.0
"""Age of figures from the database beyond which a scrape leaves them out."""


@dataclass(frozen=True, slots=True)
class CapacityFigures:
    """Figures of rows: what the console and REST show of capacity and cost."""

    loads: tuple[EndpointLoad, ...]
    gpus: dict[tuple[str, str, str], int]
    """GPUs by (region, GPU type, state): used, free or cordoned."""
    total: EndpointLoad
    """Of the whole fleet."""
    deferred_lines: int
    """Lines of batches that are not answered yet."""
    slack_s: float | None
    """Least time that a running batch has left when its last line is answered at its pace; below 0 it will be late."""
    losses: tuple[dict[str, Any], ...] = ()
    """By region, the newest verdict on its loss."""


def read_capacity() -> CapacityFigures:
    gpus: Counter[tuple[str, str, str]] = Counter()
    for node in cast(Iterable[Any], fleet.nodes().filter(active=True)):  # with annotations
        for state, count in fleet.gpus_of(node).items():
            gpus[node.region.name, node.gpu_type.name, state] += count
    left, loads = batches.left(batches.running()), tuple(endpoint_loads(timezone.now()).values())
    return CapacityFigures(
        loads=loads,
        total=total(loads),
        gpus=dict(gpus),
        deferred_lines=left["lines_left"],
        slack_s=left["slack_s"],
        losses=tuple(loss.regions) if (loss := newest_loss()) else (),
    )


class Operations:
    health = frozenset({"/health", "/v1/health", "/ping"})
    paths = frozenset({"/healthz", "/readyz", "/metrics", "/version", *health})

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.registry = CollectorRegistry()
        self.collector = GatewayCollector(gateway)
        self.registry.register(self.collector)
        ProcessCollector(registry=self.registry)
        self._reading: asyncio.Task[None] | None = None
        self._read_s = -math.inf

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["path"]:
            case path if path in self.health:
                ready = self.serves(self.checks())
                status, kind, body = (200, JSON_TYPE, b'{"status":"ok"}') if ready else (503, JSON_TYPE, NOT_READY)
            case "/version":
                status, kind, body = 200, JSON_TYPE, orjson.dumps({"version": __version__})
            case "/healthz":
                status, kind, body = 200, JSON_TYPE, b'{"status":"ok"}'
            case "/readyz":
                status, kind, body = self.ready()
            case _:
                status, kind, body = await self.metrics(scope)
        headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body)), (b"cache-control", b"no-store")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def checks(self) -> dict[str, str]:
        """Return "ok" or the problem, by part."""
        gateway = self.gateway
        return {
            "gateway": "ok" if gateway.ready and not gateway.stopping else "starting or stopping",
            "lease": "ok" if gateway.serves() else f"standing by for {gateway.lease.first.name or 'the database'}",
            "database": "ok" if gateway.database_job.ok else gateway.database_job.last_error,
            "writes": f"{failure}; serving continues" if (failure := gateway.parts.no_writes) else "ok",
            "redis": "ok" if gateway.redis_job.ok else "does not answer; serving continues",
            "ledger": gateway.ledger.trouble or "ok",
            "tasks": f"died: {deaths}" if (deaths := background.summary()) else "ok",
        }

    @staticmethod
    def serves(checks: dict[str, str]) -> bool:
        """Return whether requests can be served. Without Redis, or writes, they still are: these do not count."""
        return all(checks[name] == "ok" for name in ("gateway", "lease", "database"))

    def ready(self) -> tuple[int, bytes, bytes]:
        """Return whether this process should receive tenants' requests, and the problem if not."""
        checks = self.checks()
        ready = self.serves(checks)
        return (
            200 if ready else 503,
            JSON_TYPE,
            orjson.dumps({"status": "ready" if ready else "not ready", "checks": checks, "jobs": self.jobs()}),
        )

    def jobs(self) -> dict[str, dict[str, object]]:
        """Return the state of periodic jobs; a late or failing job does not take this process out of rotation."""
        shown = ("state", "last_success_at", "due_at", "failures_in_a_row")
        return {job["name"]: {name: job[name] for name in shown} for job in self.gateway.monitor.report()["jobs"]}

    async def metrics(self, scope: Scope) -> tuple[int, bytes, bytes]:
        """Serve the Prometheus page: with the token if one is set, else to loopback clients only."""
        token = settings.METRICS_TOKEN
        given = dict(scope["headers"]).get(b"authorization", b"")
        if token:
            allowed = hmac.compare_digest(given, b"Bearer " + token.encode())
        else:
            allowed = _is_loopback(scope)
        if not allowed:
            why = (
                "send the metrics token as a bearer token"
                if token
                else "set PILOTHOUSE_METRICS_TOKEN to read it from afar"
            )
            return 401, JSON_TYPE, orjson.dumps({"error": why})
        reads = self.gateway.dispatching is not None and self.gateway.database_job.ok
        if reads:
            if self._reading is None or self._reading.done():
                self._reading = background.spawn(self._read_capacity(), "figures of capacity")
            await asyncio.wait([self._reading], timeout=CAPACITY_WAIT_S)
        if not reads or time.monotonic() - self._read_s > CAPACITY_KEPT_S:
            self.collector.capacity = None
        return 200, PROMETHEUS_TYPE, generate_latest(self.registry)

    async def _read_capacity(self) -> None:
        with contextlib.suppress(Error):
            self.collector.capacity = await database_sync_to_async(read_capacity)()
            self._read_s = time.monotonic()


def _is_loopback(scope: Scope) -> bool:
    client = scope.get("client")
    if not client or any(name == b"x-forwarded-for" for name, _ in scope["headers"]):
        return False  # behind a proxy every client appears local
    try:
        return ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False


Rows = Iterable[tuple[Sequence[str], float | None]]
MODEL, ENDPOINT, SERIES = ("model",), ("model", "region"), ("model", "region", "slo_class")


def gauge(name: str, about: str, labels: Sequence[str], rows: Rows) -> Metric:
    """Return the family `pilothouse_NAME`; rows without a value are left out."""
    return _filled(GaugeMetricFamily(f"pilothouse_{name}", about, labels=labels), rows)


def counter(name: str, about: str, labels: Sequence[str], rows: Rows) -> Metric:
    return _filled(CounterMetricFamily(f"pilothouse_{name}", about, labels=labels), rows)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, rows: Rows) -> Metric:
    for values, number in rows:
        if number is not None:
            family.add_metric([str(value) for value in values], number)
    return family


def counted(counts: dict[Any, int]) -> Rows:
    """Return a copy of what other threads count meanwhile."""
    return counts.copy().items()


class GatewayCollector:
    """Collector that reads the gateway's counters at scrape time: counting costs the data path only a dictionary entry."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.capacity: CapacityFigures | None = None

    def collect(self) -> Iterator[Metric]:
        yield gauge("info", "Version of this process.", ("version",), [((__version__,), 1)])
        if (dispatching := self.gateway.dispatching) is not None:
            yield from self._requests(dispatching)
        errors = self.gateway.records.errors
        yield counter("errors", "Error answers of the gateway.", ("status", "code"), counted(errors))
        if dispatching is not None:
            yield from self._endpoints()
            yield from self._capacity(dispatching)
            yield from self._service_levels(dispatching)
            yield from self._relays(dispatching.measures)
        yield from self._lengths()
        yield from self._system()
        yield from self._process()

    @staticmethod
    def _requests(dispatching: Dispatching) -> Iterator[Metric]:
        measures, dispatcher = dispatching.measures, dispatching.dispatcher
        yield counter("requests", "Requests ended.", (*SERIES, "outcome"), counted(measures.totals))
        about = "Requests whose promise was unreachable on arrival."
        yield counter("unreachable", about, (*SERIES, "decision"), counted(measures.at_door))
        about = "Requests that another model served than they asked for: weighted targets and fallbacks, by rule."
        yield counter("other_model_requests", about, ("asked", "model", "rule"), counted(measures.other_models))
        adapters = [((was,), dispatcher.adapters.tiers[was]) for was in TIERS]
        yield counter("adapter_requests", "Requests with a LoRA adapter, by where it was.", ("was",), adapters)
        warmed = [((kind,), counts) for kind, counts in dispatcher.prewarming.counts.items()]
        about = "Backends warmed early, by kind."
        yield counter("prewarmed", about, ("kind",), [(kind, each["warmed"]) for kind, each in warmed])
        about = "Those of them that a call used afterwards, by kind."
        yield counter("prewarmed_used", about, ("kind",), [(kind, each["used"]) for kind, each in warmed])
        yield counter("tokens", "Tokens served.", (*SERIES, "kind"), counted(measures.tokens))
        about = (
            "Prompt tokens in prefix caches, where router and instance say so: expected from KV events or an estimate, "
            "reported, and by how much these differ (wrong)."
        )
        yield counter("cached_prompt_tokens", about, ("model", "by", "kind"), counted(measures.cache_tokens))

    def _endpoints(self) -> Iterator[Metric]:
        """Yield what Overview shows, of this process's endpoints."""
        assert self.gateway.publisher is not None, "a process with a dispatcher has one"
        summary = self.gateway.publisher.summary
        rows = [((row["model"], row["region"]), row) for row in summary.endpoints()]
        for name, about, field in (
            ("running", "Requests that instances run, donated ones included.", "running"),
            ("waiting", "Requests that wait in the queue for an instance.", "waiting"),
            ("oldest_wait_seconds", "Age of the oldest that waits.", "oldest_wait_s"),
            ("instances_ready", "Instances that take requests.", "instances_ready"),
            ("output_tokens_per_second", "Tokens that instances generate, over ten seconds.", "output_tokens_per_s"),
            ("prompt_tokens_per_second", "Prompt tokens that they read meanwhile.", "prompt_tokens_per_s"),
        ):
            yield gauge(name, about, ENDPOINT, [(key, row[field]) for key, row in rows])
        table = summary.sections["held"]()
        for name, about, field in (
            ("held", "Requests held until there is room or time; queues do not count them.", "count"),
            ("announced_lines", "Lines of batches that are not held yet.", "announced"),
        ):
            counts = dict.fromkeys((model for (model, _), _ in rows), 0)
            counts.update(zip(table.get("model", ()), table.get(field, ()), strict=True))
            yield gauge(name, about, MODEL, [((model,), count) for model, count in counts.items()])

    def _capacity(self, dispatching: Dispatching) -> Iterator[Metric]:
        """Yield figures of this process's endpoints, and those of the whole fleet from the owner of batches alone."""
        read = self.capacity
        own = {(endpoint.model, endpoint.region) for endpoint in dispatching.topology.own_endpoints}
        loads = [(key, load) for load in (read.loads if read else ()) if (key := (load.model, load.region)) in own]
        for name, about, field in (
            ("demand_tokens_per_second", "Prompt and output tokens that callers ask for, over ten minutes.",
             "demand_tokens_per_s"),
            ("capacity_tokens_per_second", "Tokens that ready instances serve, by the newest plan.",
             "capacity_tokens_per_s"),
            ("endpoint_gpus", "GPUs of instances that serve or start.", "gpus"),
            ("cost_usd_per_hour", "On-demand price of these GPUs.", "usd_per_hour"),
        ):  # fmt: skip
            yield gauge(name, about, ENDPOINT, [(key, getattr(load, field)) for key, load in loads])
        whole = [read] if read and self.gateway.lease.holds(BATCHES) else []
        for name in ("demand", "capacity"):
            about = f"Its {name} over all endpoints, without models that give no output where others do."
            sums = [((), getattr(each.total, f"{name}_tokens_per_s")) for each in whole]
            yield gauge(f"fleet_{name}_tokens_per_second", about, (), sums)
        gpus = [row for each in whole for row in each.gpus.items()]
        yield gauge("gpus", "GPUs of nodes, by what they do.", ("region", "gpu_type", "state"), gpus)
        about = "Lines of batches that are not answered yet."
        yield gauge("deferred_lines", about, (), [((), each.deferred_lines) for each in whole])
        about = "Least time that a running batch has to spare at its pace; below 0 it will be late."
        yield gauge("deadline_slack_seconds", about, (), [((), each.slack_s) for each in whole])
        for name, about, field in (
            ("slo_met_ratio", "Attainment, simulated, after the region's loss.", "slo_met_ratio"),
            ("below_target_seconds", "For how long: 0 if the fleet survives its loss.", "below_target_s"),
        ):
            losses = [((one["region"], one["slo_class"]), one[field]) for each in whole for one in each.losses]
            yield gauge(f"region_loss_{name}", about, ("region", "slo_class"), losses)

    @staticmethod
    def _service_levels(dispatching: Dispatching) -> Iterator[Metric]:
        """Yield attainment, what burn rates over any time are computed from, and the latency of the last minute."""
        measures = dispatching.measures
        models = sorted({model for model, *_ in measures.totals.copy()})
        scopes = {"": FLEET} | {model: f"model {model}" for model in models}
        of_class = [
            ((model, one.slo_class), one)
            for model, scope in scopes.items()
            for one in measures.service_levels.of(scope)
        ]
        labels = ("model", "slo_class")
        yield gauge(
            "slo_met_ratio",
            "Attainment over five minutes; without a model: the fleet's.",
            labels,
            [(key, one.ratio) for key, one in of_class],
        )
        about = "Misses over those that the objective allows; without a model: the fleet's."
        yield gauge("slo_burn", about, labels, [(key, one.burn) for key, one in of_class])
        judged = [
            ((model, name, str(met).lower()), count) for (model, name, met), count in measures.judged.copy().items()
        ]
        yield counter("slo_requests", "Requests judged by their SLO class.", (*labels, "met"), judged)
        promised = [((name,), ratio) for name, ratio in measures.service_levels.objectives.copy().items()]
        yield gauge("slo_objective_ratio", "Promised share.", ("slo_class",), promised)
        groups = [(model, "", name, tuple(Latency)) for model, name in scopes.items()]
        groups += [
            (model, slo_class, promised_in(scope, slo_class), (Latency.TTFT,))
            for model, scope in scopes.items()
            for slo_class in measures.ttft_targets_ms.copy()
        ]
        latencies = [
            ((model, what.name.lower(), slo_class, quantile), None if value is None else value / 1000)
            for model, slo_class, name, shown in groups
            if (group := measures.windows.known(name)) is not None
            for what in shown
            for quantile, value in zip(QUANTILES, measures.windows.percentiles(group, what, PERCENTS), strict=True)
        ]
        about = "Of requests in the last minute; TTFT also by class that promises it. Without a model: the fleet's."
        yield gauge("latency_seconds", about, ("model", "of", "slo_class", "quantile"), latencies)

    @staticmethod
    def _relays(measures: Measures) -> Iterator[Metric]:
        """Yield what every relay reports of itself."""
        relays = [((one.name,), one) for one, _ in measures.relays]
        for kind, name, about, field in (
            (gauge, "active_requests", "Requests that each relay answers.", "active"),
            (gauge, "streams", "Those of them that get tokens.", "streaming"),
            (gauge, "draining", "1 if a relay takes no more requests.", "draining"),
            (gauge, "event_loop_busy_ratio", "Share of its time that a relay's event loop computes.", "busy_ratio"),
            (gauge, "start_time_seconds", "When each relay was started.", "started_at"),
            (gauge, "ledger_held_rows", "Ledger rows that a relay has not yet written.", "ledger_held"),
            (counter, "ledger_written_rows", "Ledger rows that a relay wrote.", "ledger_written"),
            (counter, "ledger_lost_rows", "Ledger rows that a relay gave up.", "ledger_given_up"),
            (counter, "ledger_refused_rows", "Ledger rows of a relay that the database refused.", "ledger_refused"),
        ):
            yield kind(f"relay_{name}", about, ("relay",), [(key, getattr(one, field)) for key, one in relays])
        errors = [((*key, str(status), code), count) for key, one in relays for status, code, count in one.errors]
        yield counter("relay_errors", "Error answers of each relay.", ("relay", "status", "code"), errors)

    def _lengths(self) -> Iterator[Metric]:
        service = self.gateway.lengths
        now = service.snapshot()
        answered = [((source,), count) for source, count in now["answered"].items()]
        failed = [((str(why),), count) for why, count in service.failed.copy().items()]
        yield counter("length_answers", "Predicted output lengths.", ("source",), answered)
        yield counter("length_failures", "Without the length model's answer.", ("why",), failed)
        yield gauge("length_seconds", "Time of the last predictions.", ("quantile",), _times((), now))
        yield counter("length_late", "Predictions over the time budget.", (), [((), now["late"])])

    def _system(self) -> Iterator[Metric]:
        report = self.gateway.monitor.report()
        jobs = [((job["name"],), job) for job in report["jobs"]]
        parts = [((part["name"],), part) for part in report["parts"]]
        about = "When each job was last done."
        yield gauge(
            "job_last_success_timestamp_seconds", about, ("job",), [(key, job["last_success_at"]) for key, job in jobs]
        )
        about = "Runs of each job that failed."
        yield counter("job_failures", about, ("job",), [(key, job["failures_total"]) for key, job in jobs])
        for name, state, about in (
            ("job_stale", JobState.LATE, "1 if a job is late: not done for two periods."),
            ("job_failing", JobState.FAILING, "1 if a job's last runs failed."),
        ):
            yield gauge(name, about, ("job",), [(key, job["state"] == state) for key, job in jobs])
        about = "0 if a part of the stack is down."
        yield gauge("part_up", about, ("part",), [(key, part["state"] != PartState.DOWN) for key, part in parts])
        about = "Starts after the first."
        yield counter("part_restarts", about, ("part",), [(key, part["restarts"]) for key, part in parts])

    def _process(self) -> Iterator[Metric]:
        gateway, ledger = self.gateway, self.gateway.ledger
        since_s = ledger.job.failing_since
        failing_s = 0.0 if since_s is None else time.time() - since_s
        for kind, name, about, value in (
            (gauge, "active_requests", "Requests being answered.", gateway.active),
            (gauge, "event_loop_busy_ratio", "Share of its time that the event loop computes.",
             gateway.http.completions.load.share),
            (gauge, "lease_held", "1 if this process owns the regions.", gateway.lease.held),
            (gauge, "heartbeat_round_seconds", "Time of the last round of heartbeats.",
             gateway.dispatching.heartbeats.lag_ms / 1000 if gateway.dispatching is not None else None),
            (gauge, "ledger_held_rows", "Ledger rows not yet written.", ledger.held),
            (counter, "ledger_written_rows", "Ledger rows written.", ledger.written),
            (counter, "ledger_lost_rows", "Ledger rows given up.", ledger.given_up),
            (counter, "ledger_refused_rows", "Ledger rows that the database refused, kept in a file.", ledger.refused),
            (gauge, "ledger_failing_seconds",
             "Since when ledger rows wait because the database writes none; 0: they do not.", failing_s),
        ):  # fmt: skip
            yield kind(name, about, (), [((), value)])
        died = [((name,), count) for name, count in background.dead.copy().items()]
        yield counter("dead_tasks", "Background tasks that died.", ("task",), died)


def _times(key: Sequence[str], report: dict[str, Any]) -> list[tuple[Sequence[str], float | None]]:
    names = (("0.5", "p50_ms"), ("0.99", "p99_ms"))
    return [((*key, quantile), None if report[name] is None else report[name] / 1000) for quantile, name in names]
