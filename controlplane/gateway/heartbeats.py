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

from controlplane.fleet import services
from controlplane.fleet.models import CommandState, CommandVerb, Instance
from controlplane.fleet.states import IllegalMove, InstanceState
from controlplane.gateway.inventory import POLLED
from controlplane.gateway.lease import Lease
from controlplane.gateway.ticket import Interrupt
from controlplane.gateway.topology import Replica, Topology
from controlplane.gateway.upstream import Upstream
from workers.vllm.metrics import VllmMetrics, parse

logger = logging.getLogger(__name__)
ACTOR = "gateway"
READ_TIMEOUT_S = 1.5
HISTORY_S = 60.0  # over which preemptions and prefix hits are rates


class Heartbeats:
    def __init__(self, topology: Topology, upstream: Upstream, lease: Lease, refresh: Callable[[], None]) -> None:
        self.topology = topology
        self.lease = lease
        self.upstream = upstream
        self.refresh = refresh
        self.lag_ms = 0.0  # how long the last round took
        self._readings: dict[int, deque[tuple[float, VllmMetrics]]] = {}

    async def run(self) -> None:
        while True:
            began = time.monotonic()
            if not self.lease.held:  # the owner of the regions reads them
                await asyncio.sleep(settings.HEARTBEAT_S)
                continue
            replicas = [
                replica
                for replica in self.topology.replicas.values()
                if replica.spec.url and replica.spec.state in POLLED
            ]
            await asyncio.gather(*(self._read(replica) for replica in replicas))
            for gone in self._readings.keys() - self.topology.replicas.keys():
                del self._readings[gone]
            took_s = time.monotonic() - began
            self.lag_ms = took_s * 1000
            await asyncio.sleep(max(0.05, settings.HEARTBEAT_S - took_s))

    async def _read(self, replica: Replica) -> None:
        try:
            async with self.upstream.session.get(
                f"{replica.spec.url}/metrics",
                timeout=aiohttp.ClientTimeout(total=READ_TIMEOUT_S),
                allow_redirects=False,
            ) as response:
                if response.status != 200:
                    raise ConnectionError(f"/metrics answered {response.status}")
                metrics = parse(await response.read())
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            await self._silent(replica, str(error) or type(error).__name__)
        except Exception:
            logger.exception("heartbeat of %s", replica.name)
        else:
            await self._answered(replica, metrics)

    async def _answered(self, replica: Replica, metrics: VllmMetrics) -> None:
        replica.heartbeat_at, replica.silent_count = time.time(), 0
        if not replica.reachable:
            replica.reachable = True
        self._rates(replica, metrics)
        self.topology.observe(replica, metrics)
        state = replica.spec.state
        if state == InstanceState.FAILED:
            await self._move(replica, InstanceState.LOADING, "it answers again")
        elif state == InstanceState.LOADING and not metrics.sleeping:
            if metrics.kv_cache_size_tokens and metrics.kv_cache_size_tokens != replica.spec.kv_capacity_tokens:
                await database_sync_to_async(Instance.objects.filter(pk=replica.spec.instance_id).update)(
                    kv_capacity_tokens=metrics.kv_cache_size_tokens
                )
            await self._move(replica, InstanceState.READY, "it answers")

    async def _silent(self, replica: Replica, why: str) -> None:
        replica.silent_count += 1
        if replica.spec.state not in (InstanceState.READY, InstanceState.DRAINING, InstanceState.SLEEPING):
            return  # it is still loading, or known to be gone
        if replica.silent_count < settings.HEARTBEAT_FAILURES:
            return
        replica.reachable = False
        self.topology.settle(replica)
        for ticket in list(replica.tickets):
            ticket.interrupt(Interrupt.INSTANCE_LOST)
        await self._move(
            replica,
            InstanceState.FAILED,
            f"no answer to {replica.silent_count} heartbeats: {why}",
            inputs={"silent_count": replica.silent_count, "interval_s": settings.HEARTBEAT_S},
        )

    async def _move(
        self, replica: Replica, to: InstanceState, reason: str, inputs: dict[str, object] | None = None
    ) -> None:
        if replica.moving:
            return
        replica.moving = True
        try:
            await database_sync_to_async(self._write_move)(replica.spec.instance_id, to, reason, inputs)
            self.refresh()
        except IllegalMove as error:
            logger.info("gateway: %s (an operator was faster)", error)
            self.refresh()
        except Exception as error:
            logger.warning("gateway: %s could not be moved to %s: %s", replica.name, to, error)
        finally:
            replica.moving = False

    @staticmethod
    def _write_move(instance_id: int, to: InstanceState, reason: str, inputs: dict[str, object] | None) -> None:
        with contextlib.suppress(Instance.DoesNotExist):
            instance = Instance.objects.get(pk=instance_id)
            stopping = instance.commands.filter(verb=CommandVerb.STOP, state=CommandState.RUNNING)
            if to == InstanceState.FAILED and stopping.exists():
                return  # a server that is being stopped goes silent before it is gone
            services.move(instance, to, actor=ACTOR, reason=reason, inputs=inputs)

    def _rates(self, replica: Replica, metrics: VllmMetrics) -> None:
        """Preemptions a minute and the share of prefix-cache hits over the last minute."""
        now = time.monotonic()
        readings = self._readings.setdefault(replica.spec.instance_id, deque())
        if readings and metrics.generation_tokens_total < readings[-1][1].generation_tokens_total:
            readings.clear()  # it was restarted
        readings.append((now, metrics))
        while readings[0][0] < now - HISTORY_S:
            readings.popleft()
        first_s, first = readings[0]
        elapsed_s = now - first_s
        if elapsed_s <= 0:
            return
        replica.preemptions_per_min = (metrics.preemptions_total - first.preemptions_total) * 60 / elapsed_s
        queries = metrics.prefix_queries_total - first.prefix_queries_total
        replica.prefix_hit_ratio = (
            (metrics.prefix_hits_total - first.prefix_hits_total) / queries if queries > 0 else None
        )
