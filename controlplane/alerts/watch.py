"""Judges the rules and notifies their receivers, in the process that owns the regions: a dead Celery reports nothing."""

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Final

from channels.db import database_sync_to_async
from django.utils import timezone

from controlplane.alerts import messages, services
from controlplane.alerts.conditions import problems_of
from controlplane.alerts.models import Alert, AlertRule, Condition
from controlplane.alerts.problems import Problem
from controlplane.jobs.record import Job

LOOK_S: Final = 5.0
LOOKS_IN_WINDOW: Final = 120
"""Of an SLO burn: how often it is computed in its window, which may be days."""
Found = Sequence[Problem]
PRUNE_EVERY: Final = timedelta(hours=1)


class AlertWatch:
    """*found* returns what is wrong now; *owns* is whether this process is the one that judges."""

    def __init__(self, job: Job, found: Callable[[], Found], owns: Callable[[], bool] = lambda: True) -> None:
        self.job, self.found, self.owns = job, found, owns
        self._seen: services.Seen = {}
        self._burns: dict[tuple[object, ...], tuple[datetime, list[Problem]]] = {}
        self._began: datetime | None = None
        self._pruned_at: datetime | None = None

    async def run(self) -> None:
        """Judge the rules every `LOOK_S` until cancelled."""
        while True:
            with self.job:
                if self.owns():
                    await self.look(timezone.now())
                else:
                    self._began = None
            await asyncio.sleep(LOOK_S)

    async def look(self, now: datetime) -> None:
        """Open and resolve alerts, then notify the receivers that are due. Raises database errors."""
        calls = await database_sync_to_async(lambda: self.judge(now, self.found()))()
        if calls:
            ended = await messages.notify_all(calls)
            await database_sync_to_async(self._note)(ended, now)

    def judge(self, now: datetime, found: Found) -> list[tuple[AlertRule, list[Alert]]]:
        """Open and resolve alerts; return the rules whose receivers are to be notified."""
        rules = list(AlertRule.objects.filter(active=True))
        terms = {_terms(rule) for rule in rules}
        self._burns = {key: made for key, made in self._burns.items() if key in terms}
        problems = {rule: self._problems(rule, now, found) for rule in rules}
        self._began = self._began or now
        services.follow(problems, self._seen, now, self._began)
        if self._pruned_at is None or now - self._pruned_at >= PRUNE_EVERY:
            services.prune(now)
            self._pruned_at = now
        return messages.due(now)

    def _problems(self, rule: AlertRule, now: datetime, found: Found) -> list[Problem]:
        if rule.condition != Condition.SLO_BURN:
            return problems_of(rule, now, found)
        made = self._burns.get(_terms(rule))
        if made is None or now - made[0] >= timedelta(seconds=rule.window_s / LOOKS_IN_WINDOW):
            made = self._burns[_terms(rule)] = now, problems_of(rule, now, found)
        return made[1]

    @staticmethod
    def _note(ended: list[tuple[AlertRule, list[Alert], str]], now: datetime) -> None:
        for rule, alerts, error in ended:
            messages.note(rule, alerts, error, now)


def _terms(rule: AlertRule) -> tuple[object, ...]:
    """Return what the burns of *rule* follow from."""
    return rule.pk, rule.limit, rule.window_s, rule.model, rule.slo_class
