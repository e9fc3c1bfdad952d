"""What is noted of servers alongside their heartbeats: the phase of a start, figures, errors, and that logs stay short."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from controlplane.events.models import Event
from controlplane.fleet import services
from controlplane.fleet.lifecycle import engine_logs
from controlplane.fleet.lifecycle.states import InstanceState as S
from controlplane.fleet.models import Deployment, Instance, Launcher
from workers.tasks import observation
from workers.vllm import engine_log
from workers.vllm.client import VllmError
from workers.vllm.metrics import parse

pytestmark = pytest.mark.django_db
DATA = Path(__file__).parents[1] / "workers/data"


class Server:
    """Stands in for the client of a server whose pages were recorded from vLLM 0.32."""

    silent = False
    tokens: list[str] = []

    def __init__(self, url, *, api_key=""):
        self.tokens.append(api_key)

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        pass

    async def version(self):
        if self.silent:
            raise VllmError("no answer")
        return "0.32.0"

    async def metrics(self):
        return parse((DATA / "vllm-0.32.0-metrics.txt").read_text())


@pytest.fixture(autouse=True)
def server(monkeypatch, settings, tmp_path):
    settings.STATE_DIR = tmp_path
    (tmp_path / "instances").mkdir()
    monkeypatch.setattr(observation, "VllmClient", Server)
    Server.silent, Server.tokens = False, []
    return Server


@pytest.fixture
def process(make_instance):
    """`process(state)`: an instance whose server is a process of this machine, in its own session."""
    started = []

    def make(state=S.READY, **values):
        command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
        started.append(subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE))
        started[-1].stdout.readline()
        return make_instance(state=state, launcher=Launcher.PROCESS, process_id=started[-1].pid, **values)

    yield make
    for server in started:
        server.kill()
        server.communicate()


def write_log(instance, name):
    engine_logs.path_of(instance).write_text((DATA / f"logs/{name}.log").read_text())


def test_the_phase_of_a_start_until_it_is_ready(process):
    instance = process(S.LOADING)
    observation.observe_instances()
    instance.refresh_from_db()
    assert instance.startup == "Starting"
    engine_logs.path_of(instance).write_text(
        "Starting to load model m...\nLoading safetensors checkpoint shards:  25% Completed |"
    )
    observation.observe_instances()
    instance.refresh_from_db()
    assert instance.startup == "Loading weights, 25%"
    services.move(instance, S.READY, actor="gateway", reason="it answers")
    observation.observe_instances()
    instance.refresh_from_db()
    assert instance.startup == ""


def test_a_serving_instance_is_measured(process, server, deployment):
    Deployment.objects.update(api_key="changed since it was started")
    instance = process(api_key="token")
    observation.observe_instances()
    instance.refresh_from_db()
    engine = instance.engine
    assert engine["version"] == "0.32.0"
    assert engine["kv_cache_tokens"] == engine["kv_cache_blocks"] * engine["block_size_tokens"] > 0
    assert engine["memory_bytes"] > 2**20
    assert engine["arguments"]
    assert server.tokens == ["token"]
    observation.observe_instances()
    assert server.tokens == ["token"]  # once a minute
    Instance.objects.update(engine={**engine, "measured_at": time.time() - 61})
    observation.observe_instances()
    assert len(server.tokens) == 2


def test_one_that_does_not_answer_keeps_its_figures(process, server):
    instance = process(engine={"version": "0.31.0", "measured_at": 0.0})
    server.silent = True
    observation.observe_instances()
    instance.refresh_from_db()
    assert instance.engine["version"] == "0.31.0"


def test_one_started_elsewhere_has_what_it_answers_itself(make_instance):
    instance = make_instance(launcher=Launcher.EXTERNAL)
    observation.observe_instances()
    instance.refresh_from_db()
    assert instance.engine["version"] == "0.32.0"
    assert "arguments" not in instance.engine


def test_a_new_start_forgets_measurements(process):
    instance = process(S.STOPPED, engine={"version": "0.31.0"}, startup="Ready")
    services.start(instance, "test", "again")
    instance.refresh_from_db()
    assert (instance.engine, instance.startup) == ({}, "")


def test_long_logs_are_cut(process, monkeypatch):
    monkeypatch.setattr(engine_log.shorten, "__defaults__", (1000,))
    path = engine_logs.path_of(process())
    path.write_text("x" * 5000)
    observation.observe_instances()
    assert path.stat().st_size == 0
    assert path.with_name(f"{path.name}.1").stat().st_size == 1000


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["vllm", "--hf-token", "abc", "--port", "1"], ["vllm", "--hf-token", "…", "--port", "1"]),
        (["--hf-token=abc", "--max-num-batched-tokens", "8"], ["--hf-token=…", "--max-num-batched-tokens", "8"]),
    ],
)
def test_secrets_on_a_command_line_are_not_shown(words, shown):
    assert observation._without_secrets(words) == shown


class TestFailure:
    def test_the_event_quotes_the_root_error(self, process):
        instance = process()
        write_log(instance, "context-too-long")
        services.move(
            instance, S.FAILED, actor="gateway", reason="no answer to 3 heartbeats", inputs={"silent_count": 3}
        )
        event = Event.objects.get(kind="instance.moved")
        assert event.reason.startswith(
            "no answer to 3 heartbeats: ValidationError: User-specified max_model_len (40960)"
        )
        assert event.inputs["silent_count"] == 3
        assert event.inputs["error"].startswith("ValidationError: ")
        instance.refresh_from_db()
        assert instance.state_reason == event.reason[:255]

    def test_without_a_log_the_reason_stays_as_it_was(self, process, make_instance):
        for instance in (process(), make_instance()):
            services.move(instance, S.FAILED, actor="gateway", reason="silent")
            assert Event.objects.filter(subject=instance.name).get().reason == "silent"
