"""Figures of requests, of all relays: windows of rates and latency, attainment by SLO class, totals since the start.

And what relays report of themselves.
"""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from controlplane.dispatch import port
from controlplane.dispatch.monitoring.windows import Count, Latency, ServiceLevels, Windows

FLEET = "fleet"
DONE = "done"
FAILED = "failed"
"""Outcomes, as the ledger has them (`gateway.models.Outcome`)."""
RELAY_SILENT_S: Final = 5.0
"""Silence after which a relay is not shown: it reports every second."""


class Measures:
    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.windows = Windows()
        self.service_levels = ServiceLevels(clock)
        self.totals: Counter[tuple[str, str, str, str]] = Counter()  # requests by (model, region, class, outcome)
        self.tokens: Counter[tuple[str, str, str, str]] = Counter()  # tokens by (model, region, class, kind)
        self.at_door: Counter[tuple[str, str, str, str]] = Counter()
        """Requests whose promise was unreachable by (model, region, class asked for, decision), since the start."""
        self.cache_tokens: Counter[tuple[str, str, str]] = Counter()
        """Cached prompt tokens by (model, how the router knew, kind): expected, reported, and by how much these differ."""
        self.other_models: Counter[tuple[str, str, str]] = Counter()
        """Requests that another model served, by (name asked for, model or adapter that served, rule)."""
        self.judged: Counter[tuple[str, str, bool]] = Counter()  # verdicts by (model, class, met), since the start
        self.ttft_targets_ms: dict[str, int] = {}
        """By class that promises a first token and had requests, the latest target."""
        self._relays: dict[int, tuple[port.RelayFigures, float]] = {}  # by number, and when they came
        self._groups: dict[tuple[str, str, str], tuple[int, ...]] = {}
        self._promised: dict[tuple[str, str], tuple[int, ...]] = {}  # by model and class

    def take(self, record: port.ForFigures) -> None:
        match record:
            case port.Arrived():
                self._arrived(record.model)
            case port.Ended():
                self._ended(record)
            case port.RelayFigures():
                self._relays[record.relay] = record, self.clock()

    @property
    def relays(self) -> list[tuple[port.RelayFigures, float]]:
        """Return the last figures of each relay with seconds since, by its name; of none that is silent."""
        now_s = self.clock()
        self._relays = {
            each: (figures, seen_s)
            for each, (figures, seen_s) in self._relays.items()
            if now_s - seen_s < RELAY_SILENT_S
        }
        ages = [(figures, now_s - seen_s) for figures, seen_s in self._relays.values()]
        return sorted(ages, key=lambda each: (each[0].name, each[0].relay))

    def relay_rows(self) -> list[dict[str, Any]]:
        """Return `relays` as the summary has them."""
        now = time.time()
        return [
            {
                "name": one.name,
                "host": one.host,
                "pid": one.process_id,
                "state": "draining" if one.draining else "serving",
                "active": one.active,
                "streaming": one.streaming,
                "busy_ratio": round(one.busy_ratio, 4),
                "ledger_held": one.ledger_held,
                "started_at": round(one.started_at, 3),
                "seen_at": round(now - age_s, 3),
            }
            for one, age_s in self.relays
        ]

    def groups(self, model: str, region: str, instance: str) -> tuple[int, ...]:
        """Return the window groups of a request of *model* in *region*, with that of *instance*."""
        groups = self._groups.get((model, region, instance))
        if groups is None:
            names = list(scopes_of(model, region))
            if instance:
                names.append(f"instance {instance}")
            groups = self._groups[model, region, instance] = tuple(map(self.windows.group, names))
        return groups

    def _arrived(self, model: str) -> None:
        """Count an arrival for the fleet and its model; its region is not known yet."""
        self.windows.advance(self.clock())
        self.windows.count(self.groups(model, "", ""), Count.REQUESTS)

    def _ended(self, ended: port.Ended) -> None:
        model, region, slo_class, met = ended.model, ended.region, ended.slo_class, ended.slo_met
        self.totals[model, region, slo_class, ended.outcome] += 1
        if ended.at_door:
            self.at_door[model, region, ended.asked_class or slo_class, ended.at_door] += 1
        if ended.model_rule:
            self.other_models[ended.asked_model, ended.adapter or model, ended.model_rule] += 1
        tokens = {"prompt": ended.prompt_tokens, "output": ended.output_tokens}
        if (cached := ended.cached_tokens) is not None:
            tokens["cached_prompt"] = cached
            if (expected := ended.expected_cached_tokens) is not None:
                self.cache_tokens[model, ended.expected_by, "expected"] += expected
                self.cache_tokens[model, ended.expected_by, "reported"] += cached
                self.cache_tokens[model, ended.expected_by, "wrong"] += abs(expected - cached)
        for kind, count in tokens.items():
            self.tokens[model, region, slo_class, kind] += count
        windows = self.windows
        windows.advance(self.clock())
        counted = self.groups(model, region, "")
        windows.count(counted, Count.FINISHED)
        if ended.outcome == FAILED:
            windows.count(counted, Count.FAILED)
        if met is not None:
            self.judged[model, slo_class, met] += 1
            self.service_levels.judge(scopes_of(model, region), slo_class, ended.objective, met)
        done, ttft_ms = ended.outcome == DONE, ended.ttft_ms
        times_ms = {Latency.QUEUE: ended.queue_ms}
        if done:
            # A backlog that waits for a trough says nothing of how fast instances answer: TTFT counts from its release.
            times_ms[Latency.TTFT] = None if ttft_ms is None else max(0.0, ttft_ms - ended.held_ms)
            times_ms |= {Latency.ITL: ended.itl_ms, Latency.E2E: ended.e2e_ms}
        groups = self.groups(model, region, ended.instance)
        for what, value in times_ms.items():
            if value is not None:
                windows.latency(groups, what, value)
        if ended.ttft_target_ms is not None and done and ttft_ms is not None:
            self.ttft_targets_ms[slo_class] = ended.ttft_target_ms
            of_class = self._promised.get((model, slo_class))
            if of_class is None:
                scopes = FLEET, f"model {model}"
                of_class = tuple(windows.group(promised_in(one, slo_class)) for one in scopes)
                self._promised[model, slo_class] = of_class
            windows.latency(of_class, Latency.TTFT, ttft_ms)


def promised_in(scope: str, slo_class: str) -> str:
    """Return the window group of the requests of *scope* in *slo_class*, which promises a first token."""
    return f"promised {slo_class} in {scope}"


def scopes_of(model: str, region: str) -> tuple[str, ...]:
    """Return the scopes of a request of *model* in *region* besides its instance; without a region it was not served."""
    of_endpoint = (f"endpoint {model} {region}",) if region else ()
    return FLEET, f"model {model}", *of_endpoint
