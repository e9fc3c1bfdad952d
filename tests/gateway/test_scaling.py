"""The scaling loop of a whole gateway without workers and broker. For its decisions see `tests/planning/test_loop.py`."""

import asyncio
import threading
import time
from datetime import timedelta

import pytest
from channels.db import database_sync_to_async
from django.conf import settings
from django.utils import timezone

from controlplane.dispatch import process
from controlplane.events.models import Event
from controlplane.fleet import services
from controlplane.fleet.lifecycle import restarts
from controlplane.fleet.models import Deployment, Instance, InstanceCommand, PerformanceProfile
from controlplane.planning.execution import executor, rows
from controlplane.planning.execution import loop as module
from controlplane.planning.models import ScalingMove
from scheduling.scaling import Floor
from scheduling.scaling import floor as scaling_floor
from tests.gateway.backend import Backend
from tests.gateway.conftest import until
from workers.tasks import fleet as tasks
from workers.vllm.launcher import Launched, LaunchError

WITHIN_S = 10.0


class FakeLauncher:
    """Starts scripted backends in the test's own event loop, as Celery's worker would start servers."""

    def __init__(self, loop) -> None:
        self.loop, self.backends, self.delay_s, self.calls = loop, {}, 0.0, []

    async def start(self, spec):
        self.calls.append(("start", spec.name, threading.current_thread().name))
        time.sleep(self.delay_s)  # noqa: ASYNC251 (a slow launcher blocks the thread that it runs in)
        backend = self.backends[spec.name] = Backend(spec.name)
        asyncio.run_coroutine_threadsafe(backend.start(), self.loop).result(10)
        return Launched(backend.url, None)

    async def stop(self, name, *, grace_s=10.0):
        self.calls.append(("stop", name, threading.current_thread().name))
        if name in self.backends:
            asyncio.run_coroutine_threadsafe(self.backends.pop(name).stop(), self.loop).result(10)

    async def alive(self, name):
        return True


@pytest.fixture
def quick(monkeypatch):
    """Shorten periods and waits for tests."""
    monkeypatch.setattr(process, "FLOOR", Floor(period_s=0.05))
    for name, seconds in {"ROWS_S": 0.1, "SETTLE_S": 0.0, "RETRY_S": 0.1, "PAUSE_S": 0.1}.items():
        monkeypatch.setattr(module, name, seconds)
    monkeypatch.setattr(rows, "COMMAND_PATIENCE", timedelta(seconds=0.2))
    monkeypatch.setattr(scaling_floor, "GRACE_S", 0.0)
    monkeypatch.setattr(restarts, "FIRST", timedelta(seconds=0.5))
    monkeypatch.setattr(executor, "DRAIN_SETTLE", timedelta(seconds=0.3))
    values = {"HEARTBEAT_FAILURES": 2, "SCALE_EASE_S": 0.3, "SCALE_COOLDOWN_S": 0.2, "FLEET_REFRESH_S": 0.1}
    for name, value in values.items():
        monkeypatch.setattr(settings, name, value)


@pytest.fixture
def gateway_options():
    return {"max_num_seqs": 4}


@pytest.fixture
async def launcher(monkeypatch):
    fake = FakeLauncher(asyncio.get_running_loop())
    monkeypatch.setattr(tasks, "launcher_for", lambda instance: fake)
    yield fake
    for backend in fake.backends.values():
        await backend.stop()


def end_of_threads() -> None:
    """Wait for the threads that carry out commands; one that has only been made cannot be joined yet."""
    while threads := [each for each in threading.enumerate() if each.name == "scaling"]:
        for each in threads:
            if each.is_alive():
                each.join(10)
            else:
                time.sleep(0.01)


@pytest.fixture
async def managed(quick, launcher, served, monkeypatch):
    """The served gateway, with instances started by Pilothouse."""

    def make() -> None:
        instance = Instance.objects.select_related("deployment").get()
        deployment = instance.deployment
        values = {"prefill_a_s": 0.01, "prefill_b_s_per_token": 0.0, "decode_a_s": 0.01}
        rest = {"decode_b_s_per_sequence": 0.0, "decode_c_s_per_token": 0.0, "source": "a test"}
        PerformanceProfile.objects.create(
            model=deployment.model, gpu_type=deployment.gpu_type, tensor_parallel=1, **values, **rest
        )
        Instance.objects.update(launcher="emulated")

    await database_sync_to_async(make)()
    served.gateway.dispatching.refresh_now()
    await until(lambda: all(replica.spec.launched for replica in served.gateway.dispatching.topology.replicas.values()))
    yield served
    # A thread that still starts a server must not reach into the next test.
    monkeypatch.setattr(served.gateway.dispatching.scaling, "_owns", lambda: False)
    await asyncio.to_thread(end_of_threads)


async def fill(served, count: int) -> list[asyncio.Task]:
    """Send requests that stay until the backend's hold is released."""
    served.backends[0].script.hold = served.backends[0].script.hold or asyncio.Event()
    sent = [asyncio.create_task(served.chat()) for _ in range(count)]
    await until(lambda: sum(replica_tickets(served)) + len(served.gateway.dispatching.dispatcher.queue) >= count)
    return sent


def replica_tickets(served) -> list[int]:
    return [len(replica.requests) for replica in served.gateway.dispatching.topology.replicas.values()]


async def looks(served, times: int = 6) -> None:
    """Wait until the loop has checked so many times more."""
    job = served.gateway.dispatching.scaling.job
    for _ in range(times):
        before = job.last_success_at
        await until(lambda before=before: job.last_success_at != before)


async def release(served, sent) -> None:
    served.backends[0].script.hold.set()
    for response in await asyncio.gather(*sent):
        assert response.status == 200


async def of(rows_of, *values):
    return await database_sync_to_async(lambda: list(rows_of.values_list(*values)))()


async def until_rows(rows_of, wanted, *values) -> None:
    async with asyncio.timeout(WITHIN_S):
        while await of(rows_of, *values) != wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


class TestLoad:
    """Nothing listens at the test's Redis address."""

    async def test_a_surge_brings_an_instance_that_serves_what_waits_and_an_idle_one_is_stopped(
        self, managed, launcher
    ):
        sent = await fill(managed, 5)  # four run, one waits: the only instance is full
        await until(lambda: "m-east-1" in launcher.backends, WITHIN_S)
        await until(lambda: sum(task.done() for task in sent) == 1, WITHIN_S)  # it was served there
        done = [task for task in sent if task.done()]
        assert {task.result().status for task in done} == {200}
        assert [call[1:] for call in launcher.calls if call[0] == "start"] == [("m-east-1", "scaling")]
        ((delta, reason, source),) = await of(ScalingMove.objects, "delta", "reason", "source")
        assert (delta, source) == (1, "floor")
        assert reason.startswith("Safety autoscaler: use is ")
        assert await of(Event.objects.filter(kind="scaling.added"), "actor") == [("safety autoscaler",)]
        assert await of(InstanceCommand.objects, "verb", "state") == [("start", "done")]
        await release(managed, sent)
        await until(lambda: any(call[0] == "stop" for call in launcher.calls[2:]), 20)
        assert await of(ScalingMove.objects.order_by("pk"), "delta") == [(1,), (-1,)]
        await until(lambda: managed.gateway.dispatching.topology.fleet.accepting.sum() == 1, WITHIN_S)
        assert (await managed.chat()).status == 200

    async def test_a_start_that_is_no_longer_needed_is_cancelled_once(self, managed, launcher, monkeypatch):
        monkeypatch.setattr(rows, "COMMAND_PATIENCE", timedelta(minutes=1))  # it is not begun
        sent = await fill(managed, 5)
        await until_rows(ScalingMove.objects, [(1,)], "delta")
        await release(managed, sent)
        await until_rows(ScalingMove.objects.order_by("pk"), [(1,), (-1,)], "delta")
        monkeypatch.setattr(rows, "COMMAND_PATIENCE", timedelta())
        await until_rows(Instance.objects.filter(name="m-east-1"), [("stopped",)], "state")
        await looks(managed, 12)
        assert await of(ScalingMove.objects.order_by("pk"), "delta") == [(1,), (-1,)]
        assert "start" not in {call[0] for call in launcher.calls}
        ((reason,),) = await of(Event.objects.filter(kind="scaling.removed"), "reason")
        assert reason.startswith("Safety autoscaler: without 1 of 1 starts, use would be 0%")
        assert (await managed.chat()).status == 200

    async def test_a_slow_launcher_holds_up_no_request(self, managed, launcher):
        launcher.delay_s = 1.0
        sent = await fill(managed, 5)
        await until(lambda: any(call[0] == "start" for call in launcher.calls), WITHIN_S)
        began = time.monotonic()
        await release(managed, sent)
        for _ in range(5):
            assert (await managed.chat()).status == 200
        assert "m-east-1" not in launcher.backends, f"the launcher is not slow: {time.monotonic() - began:.1f} s"

    async def test_what_a_worker_takes_it_leaves_to_the_worker(self, managed, launcher, monkeypatch):
        """A worker claims the command before the floor's patience ends."""
        monkeypatch.setattr(rows, "COMMAND_PATIENCE", timedelta(minutes=1))
        sent = await fill(managed, 5)

        def pending():
            return InstanceCommand.objects.filter(state="pending").values_list("pk", flat=True).first()

        async with asyncio.timeout(WITHIN_S):
            while (key := await database_sync_to_async(pending)()) is None:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert launcher.calls == []
        assert await asyncio.to_thread(rows.in_a_thread(tasks.claim), key) is not None
        monkeypatch.setattr(rows, "COMMAND_PATIENCE", timedelta())
        await looks(managed)
        assert launcher.calls == []
        await release(managed, sent)

    async def test_a_model_without_instances_is_started_when_requested(self, managed, launcher, monkeypatch):
        """C44: A request is held until the instance is ready."""
        await database_sync_to_async(Deployment.objects.update)(min_instances=0)
        await database_sync_to_async(Instance.objects.update)(state="stopped", url="")
        await until(lambda: not managed.gateway.dispatching.topology.replicas)
        assert not launcher.backends
        async with asyncio.timeout(WITHIN_S):
            assert (await managed.chat()).status == 200
        assert "m-0" in launcher.backends  # the stopped one is the nearest way

    async def test_many_requests_for_it_start_as_many_as_they_fill(self, managed, launcher):
        """C30: at once, not one after the other."""
        await database_sync_to_async(Deployment.objects.update)(min_instances=0, max_instances=3, max_num_seqs=2)
        await database_sync_to_async(Instance.objects.update)(state="stopped", url="")
        await until(lambda: not managed.gateway.dispatching.topology.replicas)
        sent = [asyncio.create_task(managed.chat()) for _ in range(5)]
        async with asyncio.timeout(WITHIN_S):
            assert {response.status for response in await asyncio.gather(*sent)} == {200}
        moves = await of(ScalingMove.objects, "reason", "delta")
        assert [delta for _, delta in moves] == [1, 1, 1]
        assert len(set(moves)) == 1, "one decision"

    async def test_requests_for_what_cannot_start_are_not_held_forever(self, managed, launcher, monkeypatch):
        monkeypatch.setattr(module, "REFUSED_HOLD_S", 0.5)
        monkeypatch.setattr(launcher, "start", refuse)
        looping = {"state": "failed", "url": "", "failures": 12}
        await database_sync_to_async(Deployment.objects.update)(max_instances=1)
        await database_sync_to_async(Instance.objects.update)(**looping, state_changed_at=timezone.now())
        await until(lambda: not managed.gateway.dispatching.topology.fleet.accepting.any())
        async with asyncio.timeout(WITHIN_S):
            response = await managed.chat()
        assert response.status == 503
        assert (await response.json())["error"]["code"] == "model_unavailable"


async def refuse(spec):
    raise AssertionError("it is in a crash loop")


class TestTheMinimum:
    async def test_a_failed_instance_is_started_again(self, managed, launcher):
        managed.backends[0].script.metrics = False  # silent, as when its server was killed
        await until(lambda: "m-0" in launcher.backends, WITHIN_S)
        await until(lambda: managed.gateway.dispatching.topology.fleet.accepting.sum() == 1, WITHIN_S)
        assert (await managed.chat()).status == 200
        (move,) = await of(ScalingMove.objects, "delta", "instance", "reason")
        assert move == (1, "m-0", "Safety autoscaler: below its minimum of 1: 0 → 1 instances, on free GPUs.")
        assert await database_sync_to_async(Instance.objects.count)() == 1

    @pytest.mark.nightly
    async def test_each_failure_waits_longer_and_a_crash_loop_is_said(self, managed, launcher, monkeypatch):
        starts, names = [], set()

        async def fails(spec):
            starts.append(time.monotonic())
            names.add(spec.name)
            raise LaunchError("the driver is too old")

        monkeypatch.setattr(launcher, "start", fails)
        monkeypatch.setattr(tasks, "EMULATOR_PATIENCE_S", 0.0)
        managed.backends[0].script.metrics = False
        crash_loop = Event.objects.filter(kind="instance.crash_loop")
        async with asyncio.timeout(2 * WITHIN_S):
            while not await of(crash_loop, "pk"):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert len(starts) == 2  # it failed, and twice again
        assert starts[1] - starts[0] > 0.9  # 0.5 s, doubled
        reason = (await managed.instance(0)).state_reason
        assert reason == "Crash loop: failed 3 times in a row, the next start waits 2 s. the driver is too old"
        assert names == {"m-0"}

    async def test_stopping_the_last_one_under_load_refuses_no_request(self, managed, launcher):
        answers = []

        async def keep_asking() -> None:
            while len(answers) < 200 and not launcher.backends:
                answers.append((await managed.chat()).status)
                await asyncio.sleep(0.01)
            answers.append((await managed.chat()).status)

        asking = [asyncio.create_task(keep_asking()) for _ in range(2)]  # half of what it runs at once
        await until(lambda: len(answers) > 10)

        def stop() -> None:
            command = services.stop(Instance.objects.get(), "an operator", "a new driver")
            tasks.run_command(command.pk)

        await asyncio.to_thread(rows.in_a_thread(stop))
        async with asyncio.timeout(2 * WITHIN_S):
            await asyncio.gather(*asking)
        assert set(answers) == {200}
        assert launcher.backends  # itself again, or a new one where it had not stopped yet


class TestWhatItSees:
    async def test_servers_that_others_started_are_neither_added_nor_taken(self, quick, served):
        sent = await fill(served, 7)
        refused = Event.objects.filter(kind="scaling.refused")
        async with asyncio.timeout(30.0):
            while not await of(refused, "pk"):  # noqa: ASYNC110 - written after the look that was refused
                await asyncio.sleep(0.02)
        await looks(served)
        assert await of(ScalingMove.objects, "pk") == []
        ((reason, actor),) = await of(refused, "reason", "actor")
        assert "does not know how to start one" in reason
        assert actor == "safety autoscaler"
        await release(served, sent)
