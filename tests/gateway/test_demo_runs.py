"""Runs that the demo sends are followed as applications: their units and steps are those of the suite."""

import asyncio
from functools import partial
from random import Random
from types import SimpleNamespace

from channels.db import database_sync_to_async
from django.utils import timezone

from controlplane.applications.models import Application
from controlplane.applications.selectors import graph_of
from controlplane.applications.services import IDLE, follow_runs
from controlplane.gateway.replay import runs
from controlplane.gateway.replay.runs import RunSender, RunStream
from controlplane.gateway.replay.waves import KINDS, Stream, Waves
from scheduling.applications.suite import SUITE
from tests.gateway.conftest import until


async def test_runs_of_the_demo_become_applications(served, monkeypatch):
    monkeypatch.setattr(runs, "SUITE", {name: SUITE[name] for name in ("KBQAV", "PE")})
    monkeypatch.setattr(runs, "MOST_OPEN_RUNS", 2)
    quick = SimpleNamespace(
        sleep=lambda seconds: asyncio.sleep(min(seconds, 0.1)), gather=asyncio.gather, TaskGroup=asyncio.TaskGroup
    )
    monkeypatch.setattr(runs, "asyncio", quick)
    for backend in served.backends:  # calls of a step are at their instances together
        backend.script.first_token_s = 0.3
    stream = Stream("m", "east", "interactive", served.secret, 8192, 0.0, KINDS["interactive"])
    waves = Waves(f"{served.url}/v1", [], seed=1)
    sender = RunSender(waves.post, seed=1)
    waves.others.append(partial(sender.run, runs=RunStream(stream, 0.1), draw=Random(2)))
    task = asyncio.create_task(waves.run())
    await until(lambda: sender.ended >= 6, 60.0)
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
