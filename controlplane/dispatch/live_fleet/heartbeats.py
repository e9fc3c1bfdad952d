"""Reading every instance once a second, and moving those that came up, went silent or came back.

The rows are written by `fleet.services.move`, so each move is an event with its reason. Requests on an instance that is
given up are interrupted: those that have sent no byte go elsewhere.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable

import aiohttp
from channels.db import database_sync_to_async
from django.conf import settings
from django.db import transaction

from controlplane.dispatch.lease import Lease
from controlplane.dispatch.live_fleet.inventory import POLLED, InstanceSpec
from controlplane.dispatch.live_fleet.topology import Replica, Topology
from controlplane.fleet import services
from controlplane.fleet.lifecycle.states import ActionError, InstanceState
from controlplane.fleet.models import CommandState, CommandVerb, Instance
from controlplane.jobs.record import Job
from workers.vllm.metrics import VllmMetrics, parse

logger = logging.getLogger(__name__)
ACTOR = "gateway"
READ_TIMEOUT_S = 1.5
HISTORY_S = 60.0  # over which preemptions and prefix hits are rates
TOKENS_S = 10.0  # over which tokens are


class Heartbeats:
    """*session* gives the connections; *refresh* has the inventory read again soon."""

    def __init__(
        self,
        topology: Topology,
        lease: Lease,
        *,
        session: Callable[[], aiohttp.ClientSession],
        refresh: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self.topology = topology
        self.lease = lease
        self.session = session
        self.refresh = refresh
        self.clock = clock
        self.lag_ms = 0.0  # how long the last round took
        self.job = Job("heartbeats", "gateway", settings.HEARTBEAT_S)
        self._readings: dict[int, deque[tuple[float, VllmMetrics]]] = {}

    async def run(self) -> None:
        while True:
            began = time.monotonic()
            with self.job:
                if self.lease.held:  # the owner of the regions reads them
                    await self._round()
                    self.lag_ms = (time.monotonic() - began) * 1000
            await asyncio.sleep(max(0.05, settings.HEARTBEAT_S - (time.monotonic() - began)))

    async def _round(self) -> None:
        """Read every instance once. Raises the first error that is not an instance's silence, when all were read."""
        replicas = [
            replica for replica in self.topology.replicas.values() if replica.spec.url and replica.spec.state in POLLED
        ]
        ends = await asyncio.gather(*(self._read(replica) for replica in replicas), return_exceptions=True)
        for gone in self._readings.keys() - self.topology.replicas.keys():
            del self._readings[gone]
        for error in ends:
            if isinstance(error, BaseException):
                raise error

    async def _read(self, replica: Replica) -> None:
        began_s = self.clock()
        try:
            async with self.session().get(
                f"{replica.spec.url}/metrics",
                timeout=aiohttp.ClientTimeout(total=READ_TIMEOUT_S),
                allow_redirects=False,
            ) as response:
                if response.status != 200:
                    raise ConnectionError(f"/metrics answered {response.status}")
                answer = await response.read()
                now_s = self.clock()
                metrics = parse(answer)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if self._was_forgotten(replica):
                return
            if replica.lost:  # now its server is gone as well; what answers next is another one
                await self._give_up(replica, replica.lost)
                replica.lost = ""
            else:
                await self._silent(replica, str(error) or type(error).__name__)
        else:
            if self._was_forgotten(replica):
                return
            replica.round_trip.heartbeat_came(self.topology.fleet, replica.slot, now_s - began_s, metrics, now_s)
            if replica.lost:
                await self._give_up(replica, replica.lost)
            else:
                await self._answered(replica, metrics)

    def _was_forgotten(self, replica: Replica) -> bool:
        """Whether *replica* went from the inventory while it was read: its slot is free, or another's."""
        return self.topology.replicas.get(replica.spec.instance_id) is not replica

    async def _answered(self, replica: Replica, metrics: VllmMetrics) -> None:
        replica.heartbeat_at, replica.silent_count = time.time(), 0
        if not replica.reachable:
            replica.reachable = True
        self._rates(replica, metrics)
        self.topology.observe(replica, metrics)
        state = replica.spec.state
        if state == InstanceState.FAILED and not metrics.sleeping:
            await self._move(replica, InstanceState.LOADING, "it answers again")
        elif state == InstanceState.LOADING and not metrics.sleeping:
            if metrics.kv_cache_size_tokens and metrics.kv_cache_size_tokens != replica.spec.kv_capacity_tokens:
                await database_sync_to_async(Instance.objects.filter(pk=replica.spec.instance_id).update)(
                    kv_capacity_tokens=metrics.kv_cache_size_tokens
                )
            await self._move(replica, InstanceState.READY, "it answers")

    async def _silent(self, replica: Replica, why: str) -> None:
        replica.silent_count += 1
        if replica.silent_count < settings.HEARTBEAT_FAILURES:
            return
        await self._give_up(
            replica,
            f"no answer to {replica.silent_count} heartbeats: {why}",
            inputs={"silent_count": replica.silent_count, "interval_s": settings.HEARTBEAT_S},
        )

    async def _give_up(self, replica: Replica, reason: str, inputs: dict[str, object] | None = None) -> None:
        if replica.spec.state not in (InstanceState.READY, InstanceState.DRAINING, InstanceState.SLEEPING):
            return  # it is still loading, or known to be gone
        replica.reachable = False
        self.topology.settle(replica)
        self.topology.lose(replica)
        await self._move(replica, InstanceState.FAILED, reason, inputs=inputs)

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
            logger.info("gateway: %s (somebody was faster)", error)
            self.refresh()
        finally:
            replica.moving = False

    @staticmethod
    def _write_move(seen: InstanceSpec, to: InstanceState, reason: str, inputs: dict[str, object] | None) -> None:
        """Raises ActionError where the row has moved since it was *seen*: what was heard is of a server before.

        One that is started again must not fail for its last server's silence: its start would be done, and it would wait
        as after a failure.
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
        """Tokens a second over the last ten seconds; preemptions and the share of prefix-cache hits over the last minute.

        Tokens are vLLM's own counters, which grow while an answer is made, streamed or not.
        """
        now = time.monotonic()
        readings = self._readings.setdefault(replica.spec.instance_id, deque())
        if readings and metrics.generation_tokens_total < readings[-1][1].generation_tokens_total:
            readings.clear()  # it was restarted
            replica.output_tokens_per_s = replica.prompt_tokens_per_s = 0.0
        readings.append((now, metrics))
        while readings[0][0] < now - HISTORY_S:
            readings.popleft()
        first_s, first = readings[0]
        elapsed_s = now - first_s
        if elapsed_s <= 0:
            return
        replica.preemptions_per_min = (metrics.preemptions_total - first.preemptions_total) * 60 / elapsed_s
        recent_s, recent = next((one for one in readings if now - TOKENS_S <= one[0] < now), readings[-2])
        replica.output_tokens_per_s = (metrics.generation_tokens_total - recent.generation_tokens_total) / (
            now - recent_s
        )
        replica.prompt_tokens_per_s = (metrics.prompt_tokens_total - recent.prompt_tokens_total) / (now - recent_s)
        queries = metrics.prefix_queries_total - first.prefix_queries_total
        replica.prefix_hit_ratio = (
            (metrics.prefix_hits_total - first.prefix_hits_total) / queries if queries > 0 else None
        )
        self.topology.fleet.cached_share[replica.slot] = replica.prefix_hit_ratio or 0.0
