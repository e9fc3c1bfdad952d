"""Against a real Redis and a real emulator: messages arrive, and commands do what they say."""

import asyncio
import json
import re
import subprocess
import sys
import time

import pytest
import redis

from controlplane.fleet import services
from controlplane.fleet.lifecycle import launching
from controlplane.fleet.lifecycle.states import InstanceState
from controlplane.fleet.models import CommandState, Launcher
from tests.redis_server import RedisServer
from workers.celery import app as celery_app
from workers.tasks import fleet as tasks
from workers.vllm.client import VllmClient
from workers.vllm.launcher import EmulatedLauncher

pytestmark = [pytest.mark.services, pytest.mark.gate, pytest.mark.django_db(transaction=True)]
S = InstanceState
PATIENCE_S = 30.0


def until(condition, patience_s=PATIENCE_S):
    """Wait for *condition*, and fail if it does not come."""
    deadline = time.monotonic() + patience_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
    return value


@pytest.fixture(autouse=True)
def messages():
    """Nothing is replaced here, unlike in the other modules."""


@pytest.fixture
def redis_url(settings, monkeypatch):
    server = RedisServer().start()
    settings.REDIS_URL = server.url
    monkeypatch.setattr(celery_app.conf, "broker_url", server.url)
    monkeypatch.setattr(celery_app.conf, "broker_write_url", server.url)
    yield server.url
    server.stop()


@pytest.fixture
def emulator(monkeypatch):
    process = subprocess.Popen(
        [sys.executable, "-m", "workers.emulator", "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        url = re.search(r"http://[\w.:]+", process.stdout.readline())[0]
        monkeypatch.setattr(tasks, "launcher_for", lambda instance: EmulatedLauncher(url))
        monkeypatch.setattr(launching, "EMULATED_STARTUP_S", 0.0)
        yield url
    finally:
        process.terminate()
        process.wait(10)
        process.stdout.close()


def test_the_workers_are_notified_of_a_command(redis_url, make_instance):
    command = services.stop(make_instance(), "test", "retired")
    assert command.delivered is True
    with redis.Redis.from_url(redis_url) as client:
        message = json.loads(client.lpop("control"))
    assert message["headers"]["task"] == "workers.tasks.fleet.run_command"
    assert message["headers"]["argsrepr"] == f"({command.pk},)"


def test_a_command_outlives_a_broker_that_is_full(redis_url, make_instance):
    """C40: it is a row, which workers find later."""
    with redis.Redis.from_url(redis_url) as client:
        client.config_set("maxmemory", 1)
        command = services.stop(make_instance(), "test", "retired")
        assert (command.delivered, command.state) == (False, CommandState.PENDING)


def test_a_notification_is_heard(redis_url):
    with redis.Redis.from_url(redis_url) as client, client.pubsub(ignore_subscribe_messages=True) as heard:
        heard.subscribe("pilothouse:inventory")
        heard.get_message(timeout=5)  # the subscription itself
        assert services.notify() is True
        assert until(heard.get_message)["channel"] == b"pilothouse:inventory"


def test_the_life_of_an_emulated_instance(redis_url, emulator, make_instance):
    instance = make_instance(state=S.PROVISIONING)

    def ask(call):
        async def once():
            async with VllmClient(instance.url) as client:
                return await call(client)

        return asyncio.run(once())

    def run(command):
        tasks.run_command(command.pk)
        instance.refresh_from_db()
        command.refresh_from_db()
        assert command.state == CommandState.DONE, command.error

    run(services.start(instance, "test", "more load"))
    assert (instance.state, instance.url) == (S.LOADING, f"{emulator}/instance-1")
    until(lambda: ask(VllmClient.health))
    metrics = ask(VllmClient.metrics)
    assert metrics.kv_cache_size_tokens == instance.deployment.expected_kv_tokens // 16 * 16

    services.move(instance, S.READY, actor="gateway", reason="answers")
    run(services.sleep(instance, "test", "night"))
    assert instance.state == S.SLEEPING
    assert ask(VllmClient.is_sleeping)
    run(services.wake(instance, "test", "morning"))
    assert instance.state == S.LOADING
    assert not ask(VllmClient.is_sleeping)

    run(services.stop(instance, "test", "retired"))
    assert instance.state == S.STOPPED
    assert not ask(VllmClient.health)
    run(services.start(instance, "test", "again"))
    assert instance.state == S.LOADING
    until(lambda: ask(VllmClient.health))


def test_a_process_that_ends_while_loading_is_noticed(redis_url, settings, tmp_path, make_instance):
    """A Python without vLLM: the server exits at once, which looks like slow loading to heartbeats."""
    settings.VLLM_PYTHON, settings.STATE_DIR = sys.executable, tmp_path
    instance = make_instance(state=S.PROVISIONING, launcher=Launcher.PROCESS)
    tasks.run_command(services.start(instance, "test", "x").pk)
    instance.refresh_from_db()
    assert instance.state == S.LOADING
    assert instance.process_id
    until(tasks.watch_loading)
    instance.refresh_from_db()
    assert instance.state == S.FAILED
    log = tmp_path / "instances" / "instance-1.log"
    assert instance.state_reason == f"the server ended while loading: ended with status 1; its log is {log}"
    assert "No module named" in log.read_text()
    tasks.run_command(services.stop(instance, "test", "enough").pk)
    instance.refresh_from_db()
    assert (instance.state, instance.process_id) == (S.STOPPED, None)
