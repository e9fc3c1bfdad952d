"""Operations endpoints that answer from memory and never wait for the database: `/healthz`, `/readyz`, `/metrics`, and
vLLM's `/health`, `/ping` and `/version`, which its clients call before anything else."""

import hmac
import ipaddress
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

import orjson
from django.conf import settings
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector

from controlplane import __version__, background
from controlplane.gateway.monitoring.windows import Latency
from controlplane.gateway.process import Gateway
from controlplane.jobs.parts import PartState
from controlplane.jobs.record import JobState
from scheduling.routing.adapters import TIERS

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

JSON_TYPE = b"application/json"
NOT_READY = b'{"status":"not ready"}'
PROMETHEUS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
QUANTILES, PERCENTS = ("0.5", "0.95", "0.99"), (50, 95, 99)


class Operations:
    health = frozenset({"/health", "/v1/health", "/ping"})
    paths = frozenset({"/healthz", "/readyz", "/metrics", "/version", *health})

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.registry = CollectorRegistry()
        self.registry.register(GatewayCollector(gateway))
        ProcessCollector(registry=self.registry)

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
                status, kind, body = self.metrics(scope)
        headers = [
            (b"content-type", kind),
            (b"content-length", b"%d" % len(body)),
            (b"cache-control", b"no-store"),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def checks(self) -> dict[str, str]:
        """Return "ok" or the problem, by part."""
        gateway = self.gateway
        return {
            "gateway": "ok" if gateway.ready and not gateway.stopping else "starting or stopping",
            "lease": "ok" if gateway.lease.held else f"standing by for {gateway.lease.holder or 'the database'}",
            "database": "ok" if gateway.inventory_job.ok else gateway.inventory_job.last_error,
            "writes": "ok" if gateway.write_job.ok else f"{gateway.write_job.last_error}; serving continues",
            "redis": "ok" if gateway.publisher.job.ok else "does not answer; serving continues",
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

    def metrics(self, scope: Scope) -> tuple[int, bytes, bytes]:
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
        return 200, PROMETHEUS_TYPE, generate_latest(self.registry)


def _is_loopback(scope: Scope) -> bool:
    client = scope.get("client")
    if not client or any(name == b"x-forwarded-for" for name, _ in scope["headers"]):
        return False  # behind a proxy every client appears local
    try:
        return ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False


class GatewayCollector:
    """Collector that reads the gateway's counters at scrape time: counting costs the data path only a dictionary entry."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway

    def collect(self) -> Iterator[Metric]:
        gateway = self.gateway
        records = gateway.records
        labels = ["model", "region", "slo_class"]

        info = GaugeMetricFamily("pilothouse_info", "Version of this process.", labels=["version"])
        info.add_metric([__version__], 1)
        yield info

        requests = CounterMetricFamily("pilothouse_requests", "Requests ended.", labels=[*labels, "outcome"])
        for key, count in records.totals.copy().items():
            requests.add_metric(list(key), count)
        yield requests

        at_door = CounterMetricFamily(
            "pilothouse_unreachable", "Requests whose promise was unreachable on arrival.", labels=[*labels, "decision"]
        )
        for key, count in records.at_door.copy().items():
            at_door.add_metric(list(key), count)
        yield at_door

        others = CounterMetricFamily(
            "pilothouse_other_model_requests",
            "Requests that another model served than they asked for: weighted targets and fallbacks, by rule.",
            labels=["asked", "model", "rule"],
        )
        for names, count in records.other_models.copy().items():
            others.add_metric(list(names), count)
        yield others

        adapters = CounterMetricFamily(
            "pilothouse_adapter_requests", "Requests with a LoRA adapter, by where it was.", labels=["was"]
        )
        for was in TIERS:
            adapters.add_metric([was], gateway.dispatcher.adapters.tiers[was])
        yield adapters
        for word, about in (("warmed", "Backends warmed early"), ("used", "Those of them that a call used afterwards")):
            name = "pilothouse_prewarmed" if word == "warmed" else "pilothouse_prewarmed_used"
            prewarmed = CounterMetricFamily(name, f"{about}, by kind.", labels=["kind"])
            for kind, counts in gateway.dispatcher.prewarming.counts.items():
                prewarmed.add_metric([kind], counts[word])
            yield prewarmed

        tokens = CounterMetricFamily("pilothouse_tokens", "Tokens served.", labels=[*labels, "kind"])
        for key, count in records.tokens.copy().items():
            tokens.add_metric(list(key), count)
        yield tokens

        cached = CounterMetricFamily(
            "pilothouse_cached_prompt_tokens",
            "Prompt tokens in prefix caches, where router and instance say so: expected from KV events or an estimate, "
            "reported, and by how much these differ (wrong).",
            labels=["model", "by", "kind"],
        )
        for names, count in records.cache_tokens.copy().items():
            cached.add_metric(list(names), count)
        yield cached

        errors = CounterMetricFamily("pilothouse_errors", "Error answers of the gateway.", labels=["status", "code"])
        for (status, code), count in records.errors.copy().items():
            errors.add_metric([str(status), code], count)
        yield errors

        yield from self._endpoints()
        yield from self._lengths()
        yield from self._system()
        yield from self._scalars()

    def _endpoints(self) -> Iterator[Metric]:
        topology, dispatcher = self.gateway.topology, self.gateway.dispatcher
        running = GaugeMetricFamily("pilothouse_running", "Requests given to an instance.", labels=["model", "region"])
        waiting = GaugeMetricFamily("pilothouse_waiting", "Requests held in the queue.", labels=["model", "region"])
        oldest = GaugeMetricFamily(
            "pilothouse_oldest_wait_seconds", "Age of the oldest held.", labels=["model", "region"]
        )
        ready = GaugeMetricFamily("pilothouse_instances_ready", "Instances that take work.", labels=["model", "region"])
        for endpoint in topology.own_endpoints:
            key = [endpoint.model, endpoint.region]
            slots = [replica.slot for replica in topology.members(endpoint)]
            running.add_metric(key, int(topology.fleet.running[slots].sum()))
            waiting.add_metric(key, dispatcher.queue.count(endpoint))
            oldest.add_metric(key, dispatcher.oldest_wait_s(endpoint))
            ready.add_metric(key, int(topology.fleet.accepting[slots].sum()))
        held = GaugeMetricFamily(
            "pilothouse_held", "Requests held until there is room or time; queues do not count them.", labels=["model"]
        )
        by_model = Counter(dict.fromkeys(topology.models, 0))
        for (_, model), count in dispatcher.holding.by_tenant.items():
            by_model[model] += count
        for model, count in by_model.items():
            held.add_metric([model], count)
        yield from (running, waiting, held, oldest, ready)
        names = ["model", "slo_class"]
        met = GaugeMetricFamily("pilothouse_slo_met_ratio", "Attainment over five minutes.", labels=names)
        burn = GaugeMetricFamily("pilothouse_slo_burn", "Misses over those that the objective allows.", labels=names)
        for model in topology.models:
            for one in self.gateway.records.service_levels.of(f"model {model}"):
                for family, value in ((met, one.ratio), (burn, one.burn)):
                    if value is not None:
                        family.add_metric([model, one.slo_class], value)
        yield from (met, burn, *self._service_levels())

    def _service_levels(self) -> Iterator[Metric]:
        """Yield what burn rates over any time are computed from, and the latency of the last minute."""
        records = self.gateway.records
        judged = CounterMetricFamily(
            "pilothouse_slo_requests", "Requests judged by their SLO class.", labels=["model", "slo_class", "met"]
        )
        for (model, slo_class, met), count in records.judged.copy().items():
            judged.add_metric([model, slo_class, str(met).lower()], count)
        objective = GaugeMetricFamily("pilothouse_slo_objective_ratio", "Promised share.", labels=["slo_class"])
        for slo_class, promised in records.service_levels.objectives.copy().items():
            objective.add_metric([slo_class], promised)
        latency = GaugeMetricFamily(
            "pilothouse_latency_seconds", "Of requests in the last minute.", labels=["model", "of", "quantile"]
        )
        for model in self.gateway.topology.models:
            if (group := records.windows.known(f"model {model}")) is None:
                continue
            for what in Latency:
                for quantile, value in zip(QUANTILES, records.windows.percentiles(group, what, PERCENTS), strict=True):
                    if value is not None:
                        latency.add_metric([model, what.name.lower(), quantile], value / 1000)
        yield from (judged, objective, latency)

    def _lengths(self) -> Iterator[Metric]:
        service = self.gateway.lengths
        now = service.snapshot()
        answers = CounterMetricFamily("pilothouse_length_answers", "Predicted output lengths.", labels=["source"])
        for source, count in now["answered"].items():
            answers.add_metric([source], count)
        failed = CounterMetricFamily("pilothouse_length_failures", "Without the length model's answer.", labels=["why"])
        for why, count in service.failed.copy().items():
            failed.add_metric([str(why)], count)
        times = GaugeMetricFamily("pilothouse_length_seconds", "Time of the last predictions.", labels=["quantile"])
        for quantile, name in (("0.5", "p50_ms"), ("0.99", "p99_ms")):
            if now[name] is not None:
                times.add_metric([quantile], now[name] / 1000)
        yield from (answers, failed, times, *_length_models(now["models"]))
        yield CounterMetricFamily("pilothouse_length_late", "Predictions over the time budget.", value=now["late"])
        yield CounterMetricFamily("pilothouse_length_restarts", "Restarts of its process.", value=now["restarts"])
        yield GaugeMetricFamily("pilothouse_length_cache_entries", "Prompts remembered.", value=now["cache_entries"])
        yield GaugeMetricFamily("pilothouse_length_drifts", "Drift alarms that are up.", value=len(now["drift"]))

    def _system(self) -> Iterator[Metric]:
        report = self.gateway.monitor.report()
        success = GaugeMetricFamily(
            "pilothouse_job_last_success_timestamp_seconds", "When each job was last done.", labels=["job"]
        )
        failures = CounterMetricFamily("pilothouse_job_failures", "Runs of each job that failed.", labels=["job"])
        stale = GaugeMetricFamily(
            "pilothouse_job_stale", "1 if a job is late: not done for two periods.", labels=["job"]
        )
        failing = GaugeMetricFamily("pilothouse_job_failing", "1 if a job's last runs failed.", labels=["job"])
        for job in report["jobs"]:
            key = [job["name"]]
            if job["last_success_at"] is not None:
                success.add_metric(key, job["last_success_at"])
            failures.add_metric(key, job["failures_total"])
            stale.add_metric(key, job["state"] == JobState.LATE)
            failing.add_metric(key, job["state"] == JobState.FAILING)
        up = GaugeMetricFamily("pilothouse_part_up", "0 if a part of the stack is down.", labels=["part"])
        restarts = CounterMetricFamily("pilothouse_part_restarts", "Starts after the first.", labels=["part"])
        for part in report["parts"]:
            up.add_metric([part["name"]], part["state"] != PartState.DOWN)
            if part["restarts"] is not None:
                restarts.add_metric([part["name"]], part["restarts"])
        yield from (success, failures, stale, failing, up, restarts)

    def _scalars(self) -> Iterator[Metric]:
        gateway = self.gateway
        yield GaugeMetricFamily("pilothouse_active_requests", "Requests being answered.", value=gateway.active)
        yield GaugeMetricFamily(
            "pilothouse_event_loop_busy_ratio",
            "Share of its time that the event loop computes.",
            value=gateway.http.completions.load.share,
        )
        yield GaugeMetricFamily(
            "pilothouse_lease_held", "1 if this process owns the regions.", value=gateway.lease.held
        )
        yield GaugeMetricFamily(
            "pilothouse_heartbeat_round_seconds",
            "Time of the last round of heartbeats.",
            value=gateway.heartbeats.lag_ms / 1000,
        )
        yield GaugeMetricFamily(
            "pilothouse_ledger_held_rows", "Ledger rows not yet written.", value=gateway.ledger.held
        )
        yield CounterMetricFamily(
            "pilothouse_ledger_written_rows", "Ledger rows written.", value=gateway.ledger.written
        )
        yield CounterMetricFamily("pilothouse_ledger_lost_rows", "Ledger rows given up.", value=gateway.ledger.given_up)
        yield CounterMetricFamily(
            "pilothouse_ledger_refused_rows",
            "Ledger rows that the database refused, kept in a file.",
            value=gateway.ledger.refused,
        )
        since_s = gateway.ledger.job.failing_since
        yield GaugeMetricFamily(
            "pilothouse_ledger_failing_seconds",
            "Since when ledger rows wait because the database writes none; 0: they do not.",
            value=0.0 if since_s is None else time.time() - since_s,
        )
        deaths = CounterMetricFamily("pilothouse_dead_tasks", "Background tasks that died.", labels=["task"])
        for name, count in background.dead.copy().items():
            deaths.add_metric([name], count)
        yield deaths


def _length_models(reports: Iterable[dict[str, Any]]) -> Iterator[Metric]:
    """Yield calls, answers in time and latency of each length model."""
    labels = ["version", "kind"]
    asked = CounterMetricFamily("pilothouse_length_model_asked", "Requests that a model was asked for.", labels=labels)
    in_time = CounterMetricFamily("pilothouse_length_model_in_time", "Its answers within the budget.", labels=labels)
    restarts = CounterMetricFamily("pilothouse_length_model_restarts", "Restarts of its process.", labels=labels)
    times = GaugeMetricFamily(
        "pilothouse_length_model_seconds", "Time of its last answers, late ones too.", labels=[*labels, "quantile"]
    )
    for report in reports:
        key = [report["version"], report["kind"]]
        asked.add_metric(key, report["asked"])
        in_time.add_metric(key, report["in_time"])
        restarts.add_metric(key, report["restarts"])
        for quantile, name in (("0.5", "p50_ms"), ("0.99", "p99_ms")):
            if report[name] is not None:
                times.add_metric([*key, quantile], report[name] / 1000)
    yield from (asked, in_time, restarts, times)
