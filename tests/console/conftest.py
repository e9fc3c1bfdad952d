"""A console with live state set by the test: the feed's thread does not run, and summaries are handed to it."""

import functools
import time
from dataclasses import replace
from datetime import timedelta
from importlib import import_module

import orjson
import pytest
from django.apps import apps
from django.utils import timezone

from controlplane.alerts.models import AlertRule
from controlplane.alerts.problems import find, read_known
from controlplane.alerts.selectors import unresolved
from controlplane.alerts.watch import AlertWatch
from controlplane.console.charts import cache
from controlplane.console.live.feed import LiveFeed, feed
from controlplane.console.live.state import LiveState, Source
from controlplane.gateway.models import LedgerRow
from controlplane.tuning import selectors as tuning
from tests.console.feed import Feed
from tests.inventory import *  # noqa: F403 (fixtures)

REAL_START = LiveFeed.start
BUILT_IN = import_module("controlplane.alerts.migrations.0003_one_notion_of_alarm")


class Live:
    """The feed, driven by the test."""

    def __init__(self, feed: LiveFeed) -> None:
        self.feed = feed

    def show(self, feed: Feed, samples: int = 40, ts: float | None = None) -> dict:
        """Give history and a summary of *feed* to the live feed; return the summary."""
        ts = time.time() if ts is None else ts
        self.feed._history.clear()
        self.feed.add_history([orjson.dumps(sample) for sample in feed.history(ts, samples)])
        summary = feed.summary(ts)
        self.feed.read_summary(orjson.dumps(summary))
        return summary

    def judge(self) -> None:
        """Open and resolve alerts by the numbers shown, at once, and have the feed read them."""
        BUILT_IN.add_rules(apps, None)  # tests that commit leave none
        AlertRule.objects.update(for_s=0)
        now = timezone.now()
        AlertWatch(None, tuple).judge(now, find(self.feed.latest().tables, read_known(now)))
        self.feed._followed["alerts"] = unresolved()
        self.feed._state = replace(self.feed._state, **self.feed._followed)

    def source(self, source: Source) -> None:
        self.feed._set(LiveState(source=source))


@pytest.fixture(autouse=True)
def live(monkeypatch):
    monkeypatch.setattr(LiveFeed, "start", lambda self: None)
    monkeypatch.setattr(tuning, "FRESH_S", 1e9)  # no query more where a page takes a second
    feed._first_read.set()
    feed._state = LiveState(source=Source.SILENT)
    feed._history.clear()
    feed._followed["alerts"] = ()
    feed._followed["newest_event_id"] = None
    cache._built.clear()
    yield Live(feed)
    feed._state = LiveState()
    feed._first_read.clear()


@pytest.fixture
def fleet(make_instance):
    """Six instances in several states, as rows; `fleet_feed` matches them."""
    states = ("ready", "ready", "ready", "draining", "failed", "stopped")
    return [make_instance(state=state) for state in states]


@pytest.fixture
def fleet_feed(fleet):
    return Feed(rows_of(fleet))


def rows_of(instances) -> list[dict]:
    return [
        {
            "id": row.pk,
            "name": row.name,
            "model": row.deployment.model.name,
            "region": row.deployment.region.name,
            "gpu_type": row.deployment.gpu_type.name,
            "state": str(row.state),
        }
        for row in instances
        if row.state != "stopped"
    ]


@pytest.fixture
def make_request(acme):
    """`make_request(instance="…", outcome="done", …)`: a row of the ledger."""
    return functools.partial(ledger_row, acme)


def ledger_row(tenant, /, **values):
    number = LedgerRow.objects.count() + 1
    defaults = {
        "request_id": f"chatcmpl-{number:06}",
        "arrived_at": timezone.now() - timedelta(seconds=number),
        "tenant": tenant,
        "model": "llama-3.1-8b",
        "slo_class": "interactive",
        "region": "us-east",
        "instance": "instance-1",
        "streamed": True,
        "outcome": "done",
        "status_code": 200,
        "prompt_tokens": 120,
        "output_tokens": 40,
        "predicted_output_tokens": 64,
        "queue_ms": 3.2,
        "ttft_ms": 180.0,
        "itl_ms": 21.0,
        "e2e_ms": 1020.0,
        "slo_met": True,
        "attempts": 1,
        "trace": [
            {
                "instance": "instance-1",
                "region": "us-east",
                "policy": "join_shortest_queue",
                "ordering": "priority",
                "waited_ms": 3.2,
                "waiting": 2,
                "seen": [
                    {
                        "instance": name,
                        "accepting": True,
                        "running": 3,
                        "remaining_tokens": tokens,
                        "kv_tokens": 900,
                    }
                    for name, tokens in (("instance-1", 800), ("instance-2", 4200))
                ],
            }
        ],
    }
    return LedgerRow.objects.create(**(defaults | values))
