"""Runs that the demo sends are followed as applications: their units and steps are those of the suite."""

import asyncio
from types import SimpleNamespace

from channels.db import database_sync_to_async
from django.utils import timezone

from controlplane.applications.models import Application
from controlplane.applications.selectors import graph_of
from controlplane.applications.services import IDLE, follow_runs
from scheduling.applications.suite import SUITE
from tests.gateway.conftest import until
from workers.traffic import waves
from workers.traffic.waves import KINDS, Stream, Waves


async def test_runs_of_the_demo_become_applications(served, monkeypatch):
    monkeypatch.setattr(waves, "SUITE", {name: SUITE[name] for name in ("KBQAV", "PE")})
    monkeypatch.setattr(waves, "MAX_OPEN_RUNS", 2)
    quick = SimpleNamespace(
        sleep=lambda seconds: asyncio.sleep(min(seconds, 0.1)),
        **{name: getattr(asyncio, name) for name in ("gather", "TaskGroup", "get_running_loop", "Task")},
    )
    monkeypatch.setattr(waves, "asyncio", quick)
    monkeypatch.setattr(waves, "RUN_EVERY_S", 0.1)

    async def no_flow(*_):
        pass

    monkeypatch.setattr(Waves, "_flow", no_flow)
    for backend in served.backends:  # calls of a step are at their instances together
        backend.script.first_token_s = 0.3
    stream = Stream("m", "east", "interactive", served.secret, 8192, 0.0, KINDS["interactive"], share=1e-6, runs=True)
    sender = Waves(f"{served.url}/v1", [stream], seed=1)
    task = asyncio.create_task(sender.run())
    await until(lambda: sender.runs_done >= 6, 60.0)
    task.cancel()
    await asyncio.wait([task])
    rows = await served.rows()
    assert {row.application for row in rows} == {"KBQAV", "PE"}

    def followed():
        follow_runs(timezone.now() + 2 * IDLE)
        return {each.name: graph_of(each) for each in Application.objects.all()}

    graphs = await database_sync_to_async(followed)()
    verified = [record for record in graphs["KBQAV"].records if len(record.steps) == 4]
    assert verified
    for record in verified:
        assert [step.unit for step in record.steps] == ["extract-claims", "generate-queries", "search", "verify-claim"]
        assert record.steps[1].parallelism == record.steps[2].parallelism == record.steps[3].parallelism >= 2
    assert graphs["KBQAV"].units["search"].kind == "tool"
    assert set(graphs["PE"].units) >= {"plan", "choose-model"}
