"""The scaling loop over rows on a clock of the test: its threads are calls, and its views may be given."""

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import MagicMock

from django.db import connection
from django.utils import timezone

from controlplane.dispatch.live_fleet import inventory
from controlplane.dispatch.live_fleet.topology import Topology
from controlplane.dispatch.observation import Observation
from controlplane.dispatch.token_accounts import Outlook
from controlplane.planning.execution import rows
from controlplane.planning.execution.loop import ScalingLoop
from scheduling.scaling import EndpointView

LONG_S = 1e6


class Given(Observation):
    """Views of the rows with `shown` instead of what is measured."""

    shown: ClassVar[dict] = {}

    def views(self) -> dict[int, EndpointView]:
        return {at: view._replace(**self.shown) for at, view in super().views().items()}


class LoopOverRows(ScalingLoop):
    """`ahead_s` moves its clocks and Django's."""

    def __init__(self, monkeypatch, observation=None, owns=lambda: True) -> None:
        monkeypatch.setattr(rows.connections, "close_all", lambda: None)
        monkeypatch.setattr(rows, "run_commands", lambda: 0)  # nothing is started
        self.ahead_s, self.began, self.in_thread = 0.0, timezone.now(), False
        monkeypatch.setattr(timezone, "now", self.now)
        if observation is None:
            observation = Given(
                Topology(), lambda _: 0, lambda _: Outlook(0, float("nan"), float("nan")), lambda: LONG_S + self.ahead_s,
                lambda: self.now().timestamp(),
            )  # fmt: skip
            observation.began_s = 0.0
        dispatcher = MagicMock(topology=observation.topology)
        dispatcher.reordering.evicted = []
        dispatcher.prewarming.wakes.return_value = None
        super().__init__(
            dispatcher, observation, owns=owns, read_inventory=MagicMock(), job=SimpleNamespace(period_s=1.0)
        )

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.began.timestamp() + self.ahead_s, UTC)

    def check(self) -> None:
        self.topology.apply(inventory.read())
        with connection.execute_wrapper(self._only_in_threads):
            super().check()

    def _only_in_threads(self, execute, *query) -> object:
        assert self.in_thread, "the event loop waits for the database"
        return execute(*query)

    def _in_thread(self, work, done=lambda: None, *, moves=False) -> None:
        self.in_thread = True
        try:
            work()
        except Exception as error:
            self._report(error, moves=moves)
        self.in_thread = False
        done()
