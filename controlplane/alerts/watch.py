"""Judges the rules and calls the webhooks, in the process that owns the regions: a dead Celery reports nothing."""

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final

from channels.db import database_sync_to_async
from django.utils import timezone

from controlplane.alerts import services, webhooks
from controlplane.alerts.conditions import Problem, Signals, problems_of
from controlplane.alerts.models import Alert, AlertRule, Condition
from controlplane.jobs.record import Job

LOOK_S: Final = 10.0
LOOKS_IN_WINDOW: Final = 120
"""Of an SLO burn: how often it is computed in its window, which may be days."""
PRUNE_EVERY: Final = timedelta(hours=1)


class AlertWatch:
    """*signals* reads what only this process knows; *owns* is whether it is the one that judges."""

    def __init__(self, job: Job, signals: Callable[[], Signals], owns: Callable[[], bool] = lambda: True) -> None:
        self.job, self.signals, self.owns = job, signals, owns
        self._seen: services.Seen = {}
        self._burns: dict[tuple[object, ...], tuple[datetime, list[Problem]]] = {}
        self._began: datetime | None = None
        self._pruned_at: datetime | None = None

    async def run(self) -> None:
        """Look every `LOOK_S` until cancelled."""
        while True:
            with self.job:
                if self.owns():
                    await self.look(timezone.now())
                else:
                    self._began = None
            await asyncio.sleep(LOOK_S)

    async def look(self, now: datetime) -> None:
        """Open and resolve alerts, then call the webhooks that are due. Raises database errors."""
        calls = await database_sync_to_async(self.judge)(now, self.signals())
        if calls:
            ended = await webhooks.call_all(calls)
            await database_sync_to_async(self._note)(ended, now)

    def judge(self, now: datetime, signals: Signals) -> list[tuple[AlertRule, list[Alert]]]:
        """Open and resolve alerts; return the webhooks to call."""
        rules = list(AlertRule.objects.filter(active=True))
        terms = {_terms(rule) for rule in rules}
        self._burns = {key: made for key, made in self._burns.items() if key in terms}
        problems = {rule: self._problems(rule, now, signals) for rule in rules}
        self._began = self._began or now
        services.follow(problems, self._seen, now, self._began)
        if self._pruned_at is None or now - self._pruned_at >= PRUNE_EVERY:
            services.prune(now)
            self._pruned_at = now
        return webhooks.due(now)

    def _problems(self, rule: AlertRule, now: datetime, signals: Signals) -> list[Problem]:
        if rule.condition != Condition.SLO_BURN:
            return problems_of(rule, now, signals)
        made = self._burns.get(_terms(rule))
        if made is None or now - made[0] >= timedelta(seconds=rule.window_s / LOOKS_IN_WINDOW):
            made = self._burns[_terms(rule)] = now, problems_of(rule, now, signals)
        return made[1]

    @staticmethod
    def _note(ended: list[tuple[AlertRule, list[Alert], str]], now: datetime) -> None:
        for rule, alerts, error in ended:
            webhooks.note(rule, alerts, error, now)


def _terms(rule: AlertRule) -> tuple[object, ...]:
    """Return what the burns of *rule* follow from."""
    return rule.pk, rule.limit, rule.window_s, rule.model, rule.slo_class
