"""Holding of non-interactive requests until an endpoint has room for them (SageServe section 6.3).

The rules are `scheduling.queueing.held_work`; here they get requests and signals of a fleet, and act on it.
"""

import math
from collections import deque
from collections.abc import Iterable
from typing import Final

from scheduling.control.fleet import Endpoint, Fleet
from scheduling.fleet.profile import USUAL
from scheduling.fleet.state import BacklogState
from scheduling.queueing.held import OPPORTUNISTIC
from scheduling.queueing.held_work import Held, HeldWork, Release, Signal, service_s
from scheduling.queueing.release_rule import AT_ONCE, ReleaseRule

RECENT_RELEASES: Final = 50
SPOT: Final = "A donated instance has room"


class Holding:
    """Call `release_due` every `held_work.LOOK_S`."""

    def __init__(self, fleet: Fleet, backlogs: Iterable[BacklogState] = ()) -> None:
        self.fleet, self.work = fleet, HeldWork()
        self.work.resume(backlogs)
        self.signals: list[Signal] = []
        """Of the endpoints, as last read."""
        self.released: deque[tuple[float, Release]] = deque(maxlen=RECENT_RELEASES)
        """The last releases, oldest first, with their moments."""
        self.release_count = 0

    def __len__(self) -> int:
        return len(self.work)

    def rules(self) -> dict[str, ReleaseRule]:
        """Return the release rule of each model: that of its first endpoint."""
        return {one.model: one.policy.niw for one in reversed(self.fleet.endpoints)}

    def holds(self, model: str) -> bool:
        """Whether non-interactive requests of *model* are held."""
        rule = next((one.policy.niw for one in self.fleet.endpoints if one.model == model), None)
        return rule is not None and rule.by != AT_ONCE

    def hold(self, row: int, endpoint: Endpoint, until_s: float | None = None) -> None:
        """Hold the request of *row*, which would be queued at *endpoint*, until *until_s* at the most; None: for its
        `hold_s`.
        """
        requests = self.fleet.requests
        if endpoint.model not in self.work.waiting:
            self.work.follow(endpoint.model, self.rules()[endpoint.model])
        arrival_s, hold_s = float(requests.arrival_s[row]), float(requests.hold_s[row])
        prompt, output = int(requests.prompt_tokens[row]), int(requests.predicted_tokens[row])
        self.work.hold(
            Held(
                number=row,
                model=endpoint.model,
                arrived_s=float(requests.since_s[row]),
                due_s=arrival_s + min(float(requests.end_s[row]), hold_s),
                expires_s=arrival_s + hold_s if until_s is None else until_s,
                service_s=service_s(endpoint.profile, prompt, output),
                tokens=prompt + output,
                regions=self.fleet.origin(row)[1],
                opportunistic=bool(requests.held[row] & OPPORTUNISTIC),
            )
        )

    def release_due(self) -> None:
        """Give up what is too late, and release what the endpoints have room for."""
        fleet, work, now_s = self.fleet, self.work, self.fleet.now_s
        for row in work.expired(now_s):
            fleet.expire(row)
        if not len(work):
            return
        for model, rule in self.rules().items():
            work.follow(model, rule)
        releases = work.pull(self._signals(waiting_only=True), now_s)
        at = (
            {(one.model, one.region): at for at, one in enumerate(fleet.endpoints) if fleet.serves(at)}
            if releases
            else {}
        )
        for release in releases:
            self._release(release, at[release.model, release.region])
        for model in [name for name, count in work.waiting.items() if count]:
            for held, endpoint in work.to_spot(model, self._spot_with_room):
                age_s, priority = now_s - held.arrived_s, int(fleet.requests.priority[held.number])
                region = fleet.endpoints[endpoint].region
                self._release(Release(held.number, model, region, priority, SPOT, math.inf, age_s), endpoint)

    def _spot_with_room(self, row: int) -> int | None:
        endpoint = self.fleet.spot_with_room(row)
        return None if endpoint < 0 else endpoint

    def _release(self, release: Release, endpoint: int) -> None:
        self.released.append((self.fleet.now_s, release))
        self.release_count += 1
        self.fleet.queue(release.number, endpoint, release)

    def read_signals(self) -> None:
        """Read the signals of all endpoints that get requests."""
        self.signals = self._signals()

    def _signals(self, *, waiting_only: bool = False) -> list[Signal]:
        """Return the signals of the endpoints that get requests; *waiting_only*: of models with held requests."""
        fleet, waiting = self.fleet, self.work.waiting
        rows = zip(fleet.endpoints, fleet.waiting.size.tolist(), fleet.occupancy().tolist(), strict=False)
        return [
            signal(endpoint, waits, *row)
            for at, (endpoint, waits, row) in enumerate(rows)
            if fleet.serves(at) and (not waiting_only or waiting[endpoint.model])
        ]

    def reason(self, model: str) -> str:
        """Return why requests of *model* are held, by the signals as last read."""
        return self.work.reason(self.signals, model, self.fleet.now_s)


def signal(
    endpoint: Endpoint, waiting: int, capacity_tokens: int, sequences: int, interactive_tokens: int, other_tokens: int,
    interactive_requests: int, other_requests: int, instances: int, given: int, prompt_tokens: int, output_tokens: int,
) -> Signal:  # fmt: skip
    """Return the signal of *endpoint* from its row of `Fleet.occupancy`, with *waiting* requests in its queue."""
    return Signal(
        model=endpoint.model,
        region=endpoint.region,
        capacity_tokens=capacity_tokens,
        sequences=sequences,
        interactive_tokens=interactive_tokens,
        interactive_requests=interactive_requests,
        other_tokens=other_tokens,
        other_requests=other_requests,
        waiting=waiting,
        instances=instances,
        prompt_tokens=prompt_tokens // max(given, 1),
        output_tokens=output_tokens // max(given, 1),
        profile=None if endpoint.profile == USUAL else endpoint.profile,
        front_end=endpoint.front_end,
    )
