"""Heartbeats: reads every instance once a second, and moves those that came up, went silent, stalled or recovered.

Rows are written by `fleet.services.move`, so each move is an event with its reason. Requests on an instance that is given
up are interrupted: those that have sent no byte are placed elsewhere. Only complete silence fails an instance: a slow or
missing `/metrics` does not while `/health` answers or tokens arrive (docs/operate/health.md).
"""

import asyncio
import contextlib
import errno
import logging
import math
import time
from collections.abc import Callable, Iterable
from datetime import datetime

import aiohttp
import orjson
from channels.db import database_sync_to_async
from django.conf import settings
from django.db import transaction

from controlplane.background import spawn
from controlplane.dispatch.dispatcher import Dispatcher
from controlplane.dispatch.live_fleet import dark_regions
from controlplane.dispatch.live_fleet.dark_regions import DarkRegions
from controlplane.dispatch.live_fleet.health import Notice
from controlplane.dispatch.live_fleet.inventory import POLLED, InstanceSpec
from controlplane.dispatch.live_fleet.topology import Counted, Replica
from controlplane.events.services import record
from controlplane.fleet import services
from controlplane.fleet.lifecycle.states import SERVING, ActionError, InstanceState
from controlplane.fleet.models import CommandState, CommandVerb, Instance, Model, Region
from controlplane.fleet.spot.services import record_evicted
from controlplane.jobs.record import Job
from scheduling.control.dark_regions import LOOK_S
from scheduling.model_task import Task
from workers.vllm.metrics import VllmMetrics, parse
from workers.vllm.tasks import missing_paths, task_of

logger = logging.getLogger(__name__)
S = InstanceState
ACTOR = "gateway"
GIVEN_UP = SERVING | {S.SLEEPING}
"""States of instances that silence or a failure fails."""
ROUND_S = 1.0
"""Longest wait of a round for its answers; a slower one is awaited during the next rounds."""
METRICS_S = 30.0
HEALTH_S = 1.5
CHECKED_SHARE, CHECKED_MOST_S = 0.25, 5.0
"""A silent instance is checked again after this share of its silence, and this time at the most."""
BEHIND_S = 0.5
"""Delay of the watch for silence that shows that the process itself had no processor: silence counts from then on."""
DOUBT_S = 0.05
"""Pause before checking a server that cut a request off: one that shuts down closes its sockets one by one."""
TOKENS_FLOW_S = 1.0
SLOW_S = 3.0
"""Silence after which an instance gets no more requests while another of its endpoint serves."""
SILENT_S = 10.0
"""Silence after which an instance fails. One that refuses connections fails after `HEARTBEAT_FAILURES` of them."""
WEDGED_FACTOR = 3.0
"""Times the expected length of an iteration after which work that makes no progress is stuck."""
UNKNOWN_FACTOR = 10.0
"""Times `WEDGED_S` after which it is where no length is expected."""
TOKEN_BUDGET = 16_384
"""vLLM's largest default of --max-num-batched-tokens."""
IDENTIFY_EVERY_S = 10.0
"""Period of checks of an instance that does not match its registration."""
HISTORY_S = 60.0  # window of the rates of preemptions and prefix hits
TOKENS_S = 10.0  # window of the token rate


class Answered(ConnectionError):
    """An answer with a status other than 200."""

    def __init__(self, status: int, path: str) -> None:
        super().__init__(f"{path} answered {status}")
        self.status = status


class Heartbeats:
    """The heartbeat loop. *owns*: whether this process reads instances; *session* provides the connections; *refresh*
    requests an early read of the inventory."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        owns: Callable[[], bool],
        *,
        session: Callable[[], aiohttp.ClientSession],
        refresh: Callable[[], None],
        job: Job,
    ) -> None:
        self.dispatcher, self.topology, self.clock = dispatcher, dispatcher.topology, dispatcher.clock
        self.owns = owns
        self.session = session
        self.refresh = refresh
        self.lag_ms = 0.0  # duration of the last round
        self.job = job
        self.regions = DarkRegions(dispatcher, self.clock)
        self._reading: dict[Replica, asyncio.Task[None]] = {}
        self._checking: dict[Replica, asyncio.Task[None]] = {}
        self._behind_s = -math.inf
        """When this process was last found behind: it did not listen until then, whatever instances said."""

    async def run(self) -> None:
        watch = spawn(self._watch(), "watch for silent instances and regions")
        try:
            while True:
                began = time.monotonic()
                with self.job:
                    if self.owns():
                        await self._round(self.topology.replicas.values())
                        self.lag_ms = (time.monotonic() - began) * 1000
                next_s = max(time.monotonic() + 0.05, began + settings.HEARTBEAT_S)
                while await self._is_doubted(next_s - time.monotonic()):
                    with self.job:
                        await self._round(self._doubted())
        finally:
            for task in (watch, *self._reading.values(), *self._checking.values()):
                task.cancel()

    async def _watch(self) -> None:
        """Check instances that leave a heartbeat unanswered, and look for regions that do as a whole."""
        owned, looked_s = False, self.clock()
        while True:
            await asyncio.sleep(LOOK_S)
            before_s, looked_s = looked_s, self.clock()
            if looked_s - before_s > LOOK_S + BEHIND_S:
                self._behind_s = looked_s
            try:
                owned, before = self.owns(), owned
                if owned:
                    if not before:
                        self.regions.remember()
                    self.regions.look()
                    self._check_silence()
            except Exception:
                logger.exception("heartbeats: the watch for silence failed, and goes on")

    def _check_silence(self) -> None:
        """Check instances that are silent for long, and a few of those of a region that seems to go dark."""
        now_s, suspects = self.clock(), self.regions.suspects
        for replica in (*self._reading, *suspects):
            health, silence_s = replica.health, self.clock() - replica.health.heard_s
            if replica in self._checking or replica.spec.state not in GIVEN_UP:
                continue
            pause_s = min(CHECKED_MOST_S, CHECKED_SHARE * silence_s)
            if replica in suspects or (silence_s >= SLOW_S and now_s - health.checked_s >= pause_s):
                health.checked_s = now_s
                self._checking[replica] = asyncio.create_task(self._look_at_silence(replica))

    async def _is_doubted(self, within_s: float) -> bool:
        """Wait, and return whether an instance came into doubt meanwhile."""
        try:
            async with asyncio.timeout(within_s):
                await self.topology.doubted.wait()
        except TimeoutError:
            return False
        await asyncio.sleep(DOUBT_S)
        return True

    def _doubted(self) -> list[Replica]:
        """Return the instances in doubt, which are checked immediately."""
        self.topology.doubted.clear()
        doubted = [replica for replica in self.topology.replicas.values() if replica.in_doubt]
        for replica in doubted:
            replica.in_doubt = False
        return doubted if self.owns() else []

    async def _round(self, replicas: Iterable[Replica]) -> None:
        """Read each of *replicas* once. Raises the first error other than an instance's silence, after all were read."""
        replicas = list(replicas)
        begun, now_s = [], self.clock()
        for replica in replicas:
            if not replica.spec.url or replica.spec.state not in POLLED:
                continue
            if replica.health.heard_s == -math.inf:  # its silence begins here
                replica.health.heard(now_s)
            replica.health.unanswered_s = min(replica.health.unanswered_s, now_s)
            if replica not in self._reading:
                self._reading[replica] = asyncio.create_task(self._read(replica))
                begun.append(self._reading[replica])
        if begun:
            await asyncio.wait(begun, timeout=min(ROUND_S, settings.HEARTBEAT_S))
        ended = []
        for tasks in (self._reading, self._checking):
            for replica, task in [*tasks.items()]:
                if task.done():
                    ended.append(tasks.pop(replica))
        await self._write_notices()
        for task in ended:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def _read(self, replica: Replica) -> None:
        began_s, before = self.clock(), replica.metrics
        try:
            metrics = parse(await self._get(replica, "/metrics", METRICS_S))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            await self._missed(replica, error, began_s)
            return
        if self._was_forgotten(replica):
            return
        now_s = self.clock()
        replica.round_trip.heartbeat_came(self.topology.fleet, replica.slot, now_s - began_s, metrics, now_s)
        started_anew = before is not None and metrics.generation_tokens_total < before.generation_tokens_total
        self.dispatcher.suspects.checked(replica, began_s, ended=started_anew)
        await self._look_at_work(replica, metrics, now_s)
        if replica.lost:
            await self._give_up(replica, replica.lost)
        elif obstacle := await self._other_model(replica, before, metrics):
            await self._give_up(replica, obstacle)
        else:
            await self._answered(replica, metrics, now_s)

    async def _other_model(self, replica: Replica, before: VllmMetrics | None, metrics: VllmMetrics) -> str:
        """Return why *replica* is no longer what is registered, if its server changed models within two heartbeats."""
        known = {replica.spec.model, before.model_name if before else ""}
        if replica.spec.state not in SERVING or metrics.model_name in known | {""}:
            return ""
        try:
            return await self._obstacle(replica, metrics)
        except (aiohttp.ClientError, TimeoutError, OSError):
            return ""

    async def _missed(self, replica: Replica, error: Exception, began_s: float) -> None:
        """Look for other signs of life of *replica*, whose `/metrics` failed with *error*."""
        gone = _says_gone(error)
        healthy = not gone and await self._is_healthy(replica)
        if self._was_forgotten(replica):
            return
        if healthy and not replica.lost:
            await self._answered(replica, replica.metrics or VllmMetrics(), self.clock())
        elif replica.lost:
            await self._give_up(replica, replica.lost)
            if not isinstance(error, Answered):  # its server is gone as well; whatever answers next is another one
                replica.lost = replica.wedged = ""
        elif not isinstance(error, TimeoutError):
            await self._silent(replica, str(error) or type(error).__name__, gone=gone)
        if not healthy:
            await self._say_what_is_missing(replica, f"no answer as of vLLM: {str(error) or type(error).__name__}")
        self.dispatcher.suspects.checked(replica, began_s, ended=gone)

    async def _is_healthy(self, replica: Replica) -> bool:
        try:
            await self._get(replica, "/health", HEALTH_S)
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False
        return True

    async def _look_at_silence(self, replica: Replica) -> None:
        """Handle a slow `/metrics` of *replica*: fail it if nothing else was heard from it for too long."""
        if await self._is_healthy(replica):
            replica.health.heard(self.clock())
        if replica not in self._reading or self._was_forgotten(replica):  # it has failed or answered otherwise
            return
        silence_s = self.clock() - max(replica.health.heard_s, self._behind_s)
        replica.health.slow = silence_s >= SLOW_S and not self.topology.alone(replica)
        self.topology.settle(replica)
        if silence_s >= SILENT_S:
            why = f"silent for {silence_s:.0f} s: it takes connections, but answers neither /metrics nor /health"
            await self._give_up(replica, f"{why}, and no token came", inputs={"silence_s": round(silence_s, 1)})

    async def _get(self, replica: Replica, path: str, timeout_s: float, **headers: str) -> bytes:
        """Return the body of the answer. Raises ConnectionError for a status other than 200."""
        async with self.session().get(
            replica.spec.url + path,
            timeout=aiohttp.ClientTimeout(total=timeout_s),
            allow_redirects=False,
            headers=headers,
        ) as response:
            if response.status != 200:
                raise Answered(response.status, path)
            return await response.read()

    async def _look_at_work(self, replica: Replica, metrics: VllmMetrics, now_s: float) -> None:
        """Give *replica* up while its work makes no progress; take it back when it does.

        Its requests become suspects only where its profile says that they should have taken less time.
        """
        still_s = replica.health.still_s(metrics, now_s)
        floor_s = self.topology.tuned.WEDGED_S
        if still_s >= floor_s and not replica.lost and replica.spec.state in SERVING:
            model = self.topology.models.get(replica.spec.model)
            expected_s = longest_iteration_s(replica, metrics, model.context_tokens if model else 0)
            limit_s = UNKNOWN_FACTOR * floor_s if expected_s is None else max(floor_s, WEDGED_FACTOR * expected_s)
            if still_s < limit_s:
                return
            replica.lost = replica.wedged = (
                f"it is wedged: {metrics.running} requests run, and no iteration ended and no token came for {limit_s:.0f} s"
                + ("" if expected_s is None else f"; one takes {expected_s:.1f} s at the most by its profile")
            )
            replica.health.wedge(now_s)
            if expected_s is not None:
                self.dispatcher.suspects.died(replica)
        elif replica.wedged and replica.lost == replica.wedged and replica.health.progresses(metrics, now_s):
            replica.lost = ""

    async def _obstacle(self, replica: Replica, metrics: VllmMetrics) -> str:
        """Return why the server there is not the vLLM server that is registered; empty if it is."""
        try:
            await self._get(replica, "/version", HEALTH_S)
        except Answered as answer:
            if not metrics.model_name:
                return f"it is no vLLM server: /version answered {answer.status}, and /metrics has no series of vLLM"
        key = {"Authorization": f"Bearer {replica.spec.api_key}"} if replica.spec.api_key else {}
        try:
            said = orjson.loads(await self._get(replica, "/v1/models", HEALTH_S, **key))
            names = [str(one["id"]) for one in said["data"]]
        except Answered as answer:
            return "" if answer.status == 404 else f"it does not say which models it serves: {answer}"
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return "it does not say which models it serves: /v1/models is not as that of vLLM"
        if replica.spec.model in names:
            return await self._wrong_task(replica, key)
        return f"it serves {', '.join(names[:5]) or 'no model'}, not {replica.spec.model}"

    async def _wrong_task(self, replica: Replica, key: dict[str, str]) -> str:
        """Return what is wrong if the server lacks paths of its model's task and has those of another; empty otherwise."""
        try:
            paths = orjson.loads(await self._get(replica, "/openapi.json", HEALTH_S, **key))["paths"].keys()
        except (Answered, orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
            return ""  # it may have been started without its document
        task = Task(self.topology.models[replica.spec.model].task)
        missing, real = missing_paths(task, paths), task_of(paths)
        if not missing or real is None:
            return ""
        model = replica.spec.model
        return f"it does not answer {missing[0]}: the task of {model} is set to {task}, and its server's is {real}"

    def _was_forgotten(self, replica: Replica) -> bool:
        """Whether *replica* left the inventory while it was read: its slot is free, or another's."""
        return self.topology.replicas.get(replica.spec.instance_id) is not replica

    async def _answered(self, replica: Replica, metrics: VllmMetrics, now_s: float) -> None:
        replica.heartbeat_at, replica.silent_count = time.time(), 0
        replica.health.heard(now_s)
        replica.health.slow = False
        replica.reachable = True
        self._rates(replica, metrics)
        self.topology.observe(replica, metrics)
        await self._say_what_is_missing(replica, "")
        state = replica.spec.state
        if state in (S.FAILED, S.LOADING) and not metrics.sleeping and await self._is_another(replica, metrics, now_s):
            return
        if state == InstanceState.FAILED and not metrics.sleeping:
            await self._move(replica, InstanceState.LOADING, "health check passed again")
        elif state == InstanceState.LOADING and not metrics.sleeping:
            if metrics.kv_cache_size_tokens and metrics.kv_cache_size_tokens != replica.spec.kv_capacity_tokens:
                await database_sync_to_async(Instance.objects.filter(pk=replica.spec.instance_id).update)(
                    kv_capacity_tokens=metrics.kv_cache_size_tokens
                )
            await self._move(replica, InstanceState.READY, "health check passed")
        elif replica.endpoint.is_spot and state in (S.RECLAIMING, S.DRAINING):
            await self._reclaim(replica)

    async def _reclaim(self, replica: Replica) -> None:
        """Take the requests off *replica*, which is reclaimed; it is ready once nothing runs there.

        One that was drained for another model is stopped then (`executor.finish_drain`).
        """
        waited_s = time.time() - replica.spec.state_changed_at
        late = waited_s > self.topology.tuned.SPOT_RECLAIM_S
        evicted, ended = self.dispatcher.spot.reclaim(replica, late=late)
        if evicted or ended:
            await database_sync_to_async(record_evicted)(replica.spec.instance_id, evicted, ended)
        if replica.spec.state == S.RECLAIMING and not replica.requests:
            await self._move(replica, S.READY, f"reclaimed from spot in {waited_s:.0f} s")

    async def _say_what_is_missing(self, replica: Replica, why: str) -> None:
        """Note on the row of a loading instance, started elsewhere, why it is not considered present."""
        spec = replica.spec
        if not spec.launched and spec.state == S.LOADING and replica.obstacle != why:
            replica.obstacle = why
            rows = Instance.objects.filter(pk=spec.instance_id, state=S.LOADING)
            await database_sync_to_async(rows.update)(startup=why[:120])

    async def _is_another(self, replica: Replica, metrics: VllmMetrics, now_s: float) -> bool:
        """Whether *replica* differs from its registration, or that is not known yet. Then it does not become ready."""
        if now_s - replica.identified_s < IDENTIFY_EVERY_S:
            return True
        try:
            obstacle = await self._obstacle(replica, metrics)
        except (aiohttp.ClientError, TimeoutError, OSError):
            return True
        if not obstacle:
            replica.identified_s = -math.inf
            return False
        replica.identified_s = now_s
        if replica.spec.state == S.LOADING:
            await self._move(replica, S.FAILED, obstacle)
        return True

    async def _silent(self, replica: Replica, why: str, *, gone: bool) -> None:
        """Handle a server that is gone or unwell. Ignored while tokens arrive."""
        now_s = self.clock()
        if now_s - replica.health.served_s < max(TOKENS_FLOW_S, settings.HEARTBEAT_S):
            replica.silent_count = 0
            return
        if now_s - replica.missed_s < settings.HEARTBEAT_S / 2:
            return  # an extra check, for a doubt
        replica.missed_s = now_s
        replica.silent_count += 1
        if replica.silent_count >= settings.HEARTBEAT_FAILURES:
            if gone and replica.spec.state == S.READY:
                self.dispatcher.suspects.died(replica)
            await self._give_up(
                replica,
                f"no answer to {replica.silent_count} heartbeats: {why}",
                inputs={"silent_count": replica.silent_count, "interval_s": settings.HEARTBEAT_S},
            )

    async def _give_up(self, replica: Replica, reason: str, inputs: dict[str, object] | None = None) -> None:
        if replica.spec.state not in GIVEN_UP:
            return  # it is still loading, or known to be gone
        replica.reachable = False
        self.topology.settle(replica)
        self.dispatcher.lose(replica)
        if self.topology.is_dark(replica.spec.region):  # no instance fails for the silence of its region
            return
        await self._move(replica, InstanceState.FAILED, reason, inputs=inputs)

    async def _write_notices(self) -> None:
        """Write the notices as events. Raises what the database raises; then they are written later."""
        notices = list(self.topology.notices)
        if notices:
            await database_sync_to_async(_write)(notices)
            for _ in notices:
                self.topology.notices.popleft()

    async def _move(
        self, replica: Replica, to: InstanceState, reason: str, inputs: dict[str, object] | None = None
    ) -> None:
        if replica.moving:
            return
        replica.moving = True
        try:
            await database_sync_to_async(self._write_move)(replica.spec, to, reason, inputs)
            self.refresh()
        except ActionError as error:
            logger.info("gateway: %s (another process was faster)", error)
            self.refresh()
        finally:
            replica.moving = False

    @staticmethod
    def _write_move(seen: InstanceSpec, to: InstanceState, reason: str, inputs: dict[str, object] | None) -> None:
        """Raise ActionError where the row has moved since it was *seen*: the readings are of an earlier server.

        An instance that is started again must not fail for its last server's silence: its start would be over, and it would
        wait as after a failure.
        """
        with contextlib.suppress(Instance.DoesNotExist), transaction.atomic():
            instance = Instance.objects.select_for_update().get(pk=seen.instance_id)
            if instance.state != seen.state or instance.state_changed_at.timestamp() != seen.state_changed_at:
                raise ActionError(f"{instance.name} is {instance.state} by now, and cannot become {to} as {seen.state}")
            stopping = instance.commands.filter(verb=CommandVerb.STOP, state=CommandState.RUNNING)
            if to == InstanceState.FAILED and stopping.exists():
                return  # a server that is being stopped goes silent before it is gone
            services.move(instance, to, actor=ACTOR, reason=reason, inputs=inputs)

    def _rates(self, replica: Replica, metrics: VllmMetrics) -> None:
        """Update tokens a second over the last ten seconds, preemptions and the prefix-hit share over the last minute.

        Tokens are vLLM's own counters, which grow while an answer is made, streamed or not.
        """
        now = Counted(
            time.monotonic(), metrics.generation_tokens_total, metrics.prompt_tokens_total, metrics.preemptions_total,
            metrics.prefix_queries_total, metrics.prefix_hits_total,
        )  # fmt: skip
        readings = replica.readings
        if readings and now.output_tokens < readings[-1].output_tokens:
            readings.clear()  # it was restarted
            replica.output_tokens_per_s = replica.prompt_tokens_per_s = 0.0
        readings.append(now)
        while readings[0].at_s < now.at_s - HISTORY_S:
            readings.popleft()
        first = readings[0]
        if now.at_s <= first.at_s:
            return
        replica.preemptions_per_min = (now.preemptions - first.preemptions) * 60 / (now.at_s - first.at_s)
        recent = next((one for one in readings if now.at_s - TOKENS_S <= one.at_s < now.at_s), readings[-2])
        recent_s = now.at_s - recent.at_s
        replica.output_tokens_per_s = (now.output_tokens - recent.output_tokens) / recent_s
        replica.prompt_tokens_per_s = (now.prompt_tokens - recent.prompt_tokens) / recent_s
        queries = now.prefix_queries - first.prefix_queries
        replica.prefix_hit_ratio = (now.prefix_hits - first.prefix_hits) / queries if queries > 0 else None
        self.topology.fleet.cached_share[replica.slot] = replica.prefix_hit_ratio or 0.0
        self.topology.time_restores(replica)


def longest_iteration_s(replica: Replica, metrics: VllmMetrics, context_tokens: int) -> float | None:
    """Return the expected length of the longest iteration of what runs on *replica*, whose model has *context_tokens*.

    None while it is not known: without a measured profile, and until the first prefill since its start has ended, which
    may have to compile kernels first. Without chunks an iteration takes whole prompts, as many as its token budget has
    room for, which is no smaller than the context then.
    """
    profile = replica.spec.profile
    if profile is None or not metrics.prompt_tokens_total + metrics.generation_tokens_total:
        return None
    prefill_tokens = sum(one.asked.prompt_tokens for one in replica.requests if not one.output_tokens)
    held_tokens = sum(one.asked.prompt_tokens + one.output_tokens for one in replica.requests)
    return profile.step_time_s(min(prefill_tokens, max(TOKEN_BUDGET, context_tokens)), metrics.running, held_tokens)


def _says_gone(error: Exception) -> bool:
    """Whether *error* means that nothing listens at the address; silence or an unreachable network does not."""
    if isinstance(error, TimeoutError | Answered):
        return False
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    return getattr(cause, "errno", None) not in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT)


def _write(notices: list[Notice]) -> None:
    for one in notices:
        kinds = {"instance": Instance.objects, "region": Region.objects}
        subject = kinds.get(one.kind.partition(".")[0], Model.objects).filter(name=one.name).first()
        if isinstance(subject, Region):
            if bool(subject.dark_since) is (one.kind == dark_regions.DARK):
                continue  # the dispatcher of another shard has found it, too
            subject.dark_since = datetime.fromisoformat(one.inputs["at"]) if one.kind == dark_regions.DARK else None
            subject.save(update_fields=["dark_since"])
            services.notify()
        record(one.kind, subject, actor=ACTOR, reason=one.reason, inputs=one.inputs, severity=one.severity)
