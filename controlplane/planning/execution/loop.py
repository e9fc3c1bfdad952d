"""The scaling loop: strategies above the reactive floor, in the process that owns the regions.

It views every endpoint once a second from memory, as simulations do (`scheduling.simulation.strategies`). At the tick of
a model's strategy that decides, with the floor beneath it; between ticks the floor does. Policies and plans are read, moves
written, and commands that no worker takes carried out in separate threads (`rows`), so neither a slow database nor a dead
broker holds up a request, and scaling needs neither Redis nor Celery.
"""

import asyncio
import contextlib
import logging
import math
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from controlplane.background import spawn
from controlplane.dispatch.dispatcher import Dispatcher
from controlplane.dispatch.live_fleet.topology import Endpoint, Replica
from controlplane.dispatch.observation import Observation
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.jobs.record import Job
from controlplane.planning.execution import rows, strategies
from controlplane.planning.execution.rows import NO_RULE, Rule, Rules
from controlplane.tunable import Tunable
from scheduling.control.swaps import Swaps
from scheduling.scaling import NO_STRATEGY, Advice, ByEndpoint, EndpointView, floor_moves, without_timers
from scheduling.scaling.endpoint import Move, Mover

logger = logging.getLogger(__name__)
SETTLE_S = 60.0
"""Time after the start in which only the floor acts: rates are measured over it."""
GAP_S = 300.0
"""Time without a check after which the time of low use starts again: nothing was measured meanwhile."""
ROWS_S = 5.0
"""Period of reading policies and plans, and of approved plans, drains and commands left behind."""
HEARD_S = 10.0
"""Maximum age of an instance's metrics that show that it is idle."""
REFUSED_HOLD_S = 30.0
"""Time without a possible move after which requests that wait for an instance are refused."""
RETRY_S = 2.0
"""Time until an addition that was refused is tried again."""
STOP_WAIT_S = 1.0
PAUSE_S = 5.0
"""Time without moves after a database error."""
COMPLAIN_EVERY_S = 30.0


class Seen(NamedTuple):
    """One endpoint at a check."""

    endpoint: Endpoint
    view: EndpointView
    members: list[Replica]


@dataclass(slots=True)
class Writing:
    """Moves of one endpoint: whether some are being written, and what became of earlier ones."""

    busy: bool = False
    restoring: bool = False  # the minimum is being brought back
    refused_since_s: float | None = None  # start of a series of refused additions
    retry_s: float = -math.inf


@dataclass(slots=True)
class Scaled:
    """The strategy of one model, and when it ticks next."""

    rule: Rule
    values: Tunable
    strategy: ByEndpoint
    next_s: float = -math.inf


class ScalingLoop:
    """*owns*: whether this process has the regions; *read_inventory* updates the topology from rows."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        observation: Observation,
        *,
        owns: Callable[[], bool],
        read_inventory: Callable[[], Awaitable[None]],
        job: Job,
    ) -> None:
        self.dispatcher, self.topology, self.observation = dispatcher, dispatcher.topology, observation
        self.job = job
        self.rules: Rules | None = None  # None: not read yet
        self.swaps = Swaps(dispatcher.fleet, dispatcher.prewarming.control.early)
        self._owns, self._read_inventory = owns, read_inventory
        self._scaled: dict[str, Scaled] = {}
        self._writing: defaultdict[int, Writing] = defaultdict(Writing)
        self._threads: set[asyncio.Future[None]] = set()
        self._next_rows_s: dict[str, float] = {}  # by work, infinity while it is being done
        self._checked_s = self._paused_until_s = self._complained_s = -math.inf

    @property
    def _now_s(self) -> float:
        return self.observation.clock()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self.job.period_s)
            with self.job:
                if self._owns():
                    self.check()

    async def stop(self) -> None:
        """Stop after a moment for moves that are being written; a longer one ends with the process."""
        if self._threads:
            await asyncio.wait(self._threads, timeout=STOP_WAIT_S)

    def check(self) -> None:
        """View every endpoint, and request the moves that are wanted."""
        now_s = self._now_s
        if now_s - self._checked_s > GAP_S:
            for scaled in self._scaled.values():
                kept = without_timers(scaled.strategy.memory)
                scaled.strategy.memory.clear()
                scaled.strategy.memory.update(kept)
        self._checked_s = now_s
        replicas = self.observation.replicas()
        models = defaultdict[str, list[Seen]](list)
        for at, view in self.observation.views().items():
            models[view.model].append(Seen(self.topology.endpoints[at], view, replicas.get(at, [])))
            changed_s, delta = self.observation.changes.changed(at)
            if delta:
                self.dispatcher.holding.work.scaled(view.model, view.region, changed_s)
        self._work_on_rows(models, now_s)
        if now_s < self._paused_until_s:
            self.swaps.keep()
            return
        evicted = self.dispatcher.reordering.evicted
        if evicted:
            self._in_thread(partial(rows.record_evictions, [*evicted]))
            evicted.clear()
        for model, each in models.items():
            self._scale(model, each, now_s)
        for instance, reason in self.swaps.wanted():
            instance_id = self.topology.by_slot[instance].spec.instance_id
            self._in_thread(partial(rows.swap, instance_id, reason), moves=True)

    # Decide

    def _scale(self, model: str, seen: list[Seen], now_s: float) -> None:
        values = seen[0].endpoint.spec.tuned
        scaled = self._strategy_of(model, values, now_s)
        seen = [each._replace(view=self._with_minimum(each, now_s)) for each in seen]
        views = [each.view for each in seen]
        advice: list[Advice | None] = [None] * len(seen)
        before: dict[str, float] | None = None
        decided: list[Move] | None = None
        if scaled and now_s >= scaled.next_s and not any(self._writing[each.endpoint.index].busy for each in seen):
            tick_s = scaled.strategy.tick_s
            scaled.next_s = (now_s // tick_s + 1) * tick_s
            before = dict(scaled.strategy.memory)
            try:
                at_s, plans = self.observation.wall_clock(), scaled.rule.plans
                advice = [plans[view.region].advice(at_s) if view.region in plans else None for view in views]
                decided = list(strategies.floored(scaled.strategy, values).decide(at_s, views, advice))
            except Exception:  # it costs only its model the tick
                logger.exception("scaling: the strategy of %s failed", model)
        if decided is None:
            decided = floor_moves(views, strategies.floor(values)) if values.FLOOR else []
        wanted = {each.endpoint: each for each in decided if self._possible(seen[each.endpoint], each, now_s)}
        for at, each in enumerate(seen):
            writing = self._writing[each.endpoint.index]
            each.endpoint.can_start = (
                values.FLOOR
                and each.endpoint.spec.launches
                and not self.topology.is_dark(each.view.region)
                and (writing.refused_since_s is None or now_s - writing.refused_since_s < REFUSED_HOLD_S)
            )
            if at not in wanted and values.FLOOR and not writing.busy and (reason := self._wakes(each)):
                wanted[at] = Move(at, 1, reason, Mover.FLOOR)
        if wanted:
            self._move([(seen[at], move, advice[at]) for at, move in wanted.items()], scaled, before)

    def _strategy_of(self, model: str, values: Tunable, now_s: float) -> Scaled | None:
        """Return the strategy of *model*, with its memory; None while only the floor acts."""
        if self.rules is None or now_s - self.observation.began_s < SETTLE_S:
            return None
        rule = self.rules.of.get(model, NO_RULE)
        if not rule.strategy and (rule.approved or not values.FLOOR):
            self._scaled.pop(model, None)
            return None
        scaled = self._scaled.get(model)
        if scaled is None or (scaled.rule.strategy, scaled.rule.parameters, scaled.values) != (
            rule.strategy,
            rule.parameters,
            values,
        ):
            is_same = scaled is not None and scaled.rule.strategy == rule.strategy
            memory = scaled.strategy.memory if scaled and is_same else {}
            try:
                strategy = strategies.make(rule.strategy or NO_STRATEGY, rule.parameters, values, memory)
            except ValueError as error:
                logger.error("scaling: %s: %s", model, error)
                return None
            scaled = self._scaled[model] = Scaled(rule, values, strategy, scaled.next_s if scaled and is_same else 0.0)
            self.observation.strategies[model] = strategy.memory
        scaled.rule = rule
        return scaled

    def _with_minimum(self, seen: Seen, now_s: float) -> EndpointView:
        """Return the view with the minimum that is to be brought back now; missing instances are waited for otherwise.

        At once where one failed or requests wait. Instances that an operator holds or has cordoned are not missing.
        """
        view, spec, writing = seen.view, seen.endpoint.spec, self._writing[seen.endpoint.index]
        missing = spec.missing_instances if spec.launches else 0
        if missing:
            failed = any(one.spec.state == InstanceState.FAILED and one.spec.launched for one in seen.members)
            if failed or view.waiting or view.since_change_s >= spec.tuned.SCALE_COOLDOWN_S:
                writing.restoring = True
        else:
            writing.restoring = False
        at_least = view.instances + missing if writing.restoring else min(view.min_instances, view.instances)
        return view._replace(min_instances=max(at_least, self.observation.scheduled(seen.endpoint)))

    def _possible(self, seen: Seen, move: Move, now_s: float) -> bool:
        view, writing = seen.view, self._writing[seen.endpoint.index]
        if writing.busy or self.topology.is_dark(view.region):
            return False
        if move.delta > 0:
            swapped = seen.endpoint.spec.shares_gpus and not view.ready  # a swap brings one up
            return now_s >= writing.retry_s and (not swapped or view.instances < view.min_instances)
        # One that could not be started again stays.
        startable = any(one.spec.launched and one.spec.state == InstanceState.READY for one in seen.members)
        return startable or not move.drains

    def _wakes(self, seen: Seen) -> str:
        """Return why to wake an instance before a likely call; those on shared GPUs are woken by a swap."""
        endpoint, view = seen.endpoint, seen.view
        sleeps = any(one.spec.state == InstanceState.SLEEPING and not one.spec.swap_group for one in seen.members)
        if view.ready or view.coming or not sleeps or endpoint.spec.shares_gpus:
            return ""
        return self.dispatcher.prewarming.control.early(endpoint.index)

    # Carry out

    def _move(
        self, wanted: list[tuple[Seen, Move, Advice | None]], scaled: Scaled | None, before: dict[str, float] | None
    ) -> None:
        """Write the moves of one model in a thread. If that fails, its strategy is as *before*, and ticks again."""
        load, rule = self._left_tokens(), scaled.rule if scaled else NO_RULE
        for seen, move, _ in wanted:
            self._writing[seen.endpoint.index].busy = True
            self.observation.changes.moved(seen.endpoint.index, move.delta)
            logger.info("scaling: %+d %s in %s: %s", move.delta, seen.view.model, seen.view.region, move.reason)
        made: list[int] = []

        def work() -> None:
            for seen, move, advised in wanted:
                made.append(len(rows.carry_out(move, seen.view, rule, advised, load, seen.endpoint.spec.min_instances)))

        def done() -> None:
            for at, (seen, move, _) in enumerate(wanted):
                writing = self._writing[seen.endpoint.index]
                writing.busy = False
                if at >= len(made):
                    continue
                if move.delta > 0 and not made[at]:
                    writing.retry_s = self._now_s + RETRY_S
                    writing.refused_since_s = writing.refused_since_s or self._now_s
                else:
                    writing.refused_since_s = None
            if scaled and before is not None and len(made) < len(wanted):
                scaled.strategy.memory.clear()
                scaled.strategy.memory.update(before)
                scaled.next_s = -math.inf

        self._in_thread(work, done, moves=True)

    def _left_tokens(self) -> dict[str, float]:
        """Return remaining tokens by instance: the removable one with the fewest is removed."""
        left = self.topology.fleet.remaining_tokens
        return {replica.name: float(left[replica.slot]) for replica in self.topology.replicas.values()}

    def _work_on_rows(self, models: dict[str, list[Seen]], now_s: float) -> None:
        """Read the rules, and continue what earlier decisions began, each in its own thread every `ROWS_S`."""
        present = {(seen.view.model, seen.view.region): seen.view.instances for of in models.values() for seen in of}

        def read() -> None:
            self.rules = rows.read_rules(present)
            self.observation.spot_other = self.rules.spot_other

        jobs: dict[str, Callable[[], object]] = {
            "rules": read,
            "plans": partial(rows.apply_plans, self._left_tokens()),
            "drains": partial(rows.finish_drains, self._running()),
            "commands": rows.run_commands,
        }
        for name, work in jobs.items():
            if now_s < self._next_rows_s.get(name, -math.inf):
                continue
            self._next_rows_s[name] = math.inf

            def done(name: str = name) -> None:
                self._next_rows_s[name] = self._now_s + ROWS_S

            self._in_thread(work, done)

    def _running(self) -> dict[str, int]:
        """Return requests by draining instance, of callers and of its server; one that was not heard of is left out."""
        wall_s = self.observation.wall_clock()
        return {
            one.name: max(len(one.requests), one.metrics.running + one.metrics.waiting)
            for one in self.topology.replicas.values()
            if one.spec.state == InstanceState.DRAINING and one.metrics is not None
            if one.heartbeat_at is not None and wall_s - one.heartbeat_at < HEARD_S
        }

    def _in_thread(
        self, work: Callable[[], object], done: Callable[[], None] = lambda: None, *, moves: bool = False
    ) -> None:
        """Do *work* in a separate thread, then *done* on the event loop. An error of *moves* stops these for a while.

        Not in Django's one thread for rows, where the ledger is written, and not in a pool, whose threads the process
        would wait for at its end: stopping a server may take a minute.
        """
        loop = asyncio.get_running_loop()
        finished: asyncio.Future[None] = loop.create_future()
        self._threads.add(finished)

        async def end(error: Exception | None) -> None:
            if error is not None:
                self._report(error, moves=moves)
            if moves:  # the rows must be read before the next decision, or it would be repeated
                with contextlib.suppress(Exception):
                    await self._read_inventory()
            done()
            self._threads.discard(finished)
            finished.set_result(None)

        def run() -> None:
            error = None
            try:
                work()
            except Exception as caught:
                error = caught
            ended = end(error)
            try:
                loop.call_soon_threadsafe(spawn, ended, "end of scaling's thread")
            except RuntimeError:  # the loop is closed: the process ends
                ended.close()

        threading.Thread(target=copy_context().run, args=(run,), name="scaling", daemon=True).start()

    def _report(self, error: Exception, *, moves: bool) -> None:
        """Log a failed write occasionally; it is tried again."""
        now_s = self._now_s
        if moves:
            self._paused_until_s = now_s + PAUSE_S
        if now_s - self._complained_s >= COMPLAIN_EVERY_S:
            self._complained_s = now_s
            logger.warning("scaling: rows could not be read or written, this is tried again: %s", error, exc_info=error)
