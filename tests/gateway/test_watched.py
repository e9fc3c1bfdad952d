"""The gateway monitors its own jobs: readiness, metrics and the summary."""

import asyncio

from django.db import OperationalError

from controlplane.gateway import process as parts_module
from controlplane.gateway.ledger import writer as ledger_module
from controlplane.jobs import monitor
from controlplane.jobs.parts import Part, PartState
from tests.gateway.conftest import until

OWN = {
    "feed-batches",
    "applications",
    "alerts",
    "count-tokens",
    "report-figures",
    "sweep-queues",
    "hear-relays",
    "follow-dispatchers",
    "queue-commands",
    "refresh-budgets",
    "note-key-use",
    "refresh-keys",
    "read-inventory",
    "heartbeats",
    "publish-summary",
    "scale",
    "renew-lease",
    "flush-ledger",
    "lengths",
    "watch-jobs",
    "probe-parts",
}


async def ready(served) -> dict:
    async with served.http.get(f"{served.url}/readyz") as response:
        return {"status_code": response.status, **await response.json()}


async def test_every_job_of_the_process_is_known_and_runs(served):
    of_redis = {"probe-parts", "publish-summary", "queue-commands"}  # which is not here
    quick = OWN - of_redis
    await until(lambda: all(served.gateway.jobs[name].last_success_at for name in quick))
    body = await ready(served)
    assert body["status_code"] == 200
    assert set(body["jobs"]) >= OWN | {"forecasts", "plans", "advance-rollouts"}
    assert all(body["jobs"][name]["state"] == "ok" for name in quick)
    assert monitor.current is served.gateway.monitor
    assert {record.name for record in served.gateway.jobs.records()} == OWN


async def test_without_redis_the_part_is_down_and_serving_continues(served):
    await until(lambda: not served.gateway.publisher.job.ok)
    body = await ready(served)
    assert body["status_code"] == 200
    report = served.gateway.monitor.report()
    parts = {part["name"]: part for part in report["parts"]}
    assert parts["redis"]["state"] == "down"
    assert parts["database"]["state"] == "ok"
    assert parts["celery"]["detail"] == "not known while Redis does not answer"
    assert parts["instances"]["detail"] == "1 of 1 ready"
    assert served.gateway.publisher.summary.snapshot()["system"]["parts"]


async def test_workers_that_stop_answering_are_down_and_stay_so_while_they_are_asked(served, monkeypatch):
    """With Redis up: the part is down from the second miss on, without being well in between."""
    answers = [{"host@a": ["control"]}]
    seen = []

    def ask(url, timeout_s):
        seen.append(celery().state)
        return answers[0]

    def celery():
        return next(part for part in parts() if part.name == "celery")

    parts = served.gateway.parts
    monkeypatch.setattr(parts_module, "answering_workers", ask)
    monkeypatch.setattr(type(parts), "_redis", lambda self: Part("redis", PartState.OK))
    assert celery().detail == "being asked"
    await parts.probe()
    assert (celery().state, celery().detail) == (PartState.OK, "host@a: control")
    answers[0] = {}
    for _ in range(4):
        await parts.probe()
    assert (celery().state, celery().detail) == (PartState.DOWN, "no worker answers")
    assert seen[1:] == [PartState.OK, PartState.OK, PartState.DOWN, PartState.DOWN]
    assert next(part for part in parts() if part.name == "beat").state == PartState.WARNING


async def test_a_ledger_that_cannot_be_written_is_said_once_and_shows_everywhere(served, monkeypatch, caplog):
    def fail(batch, *, again):
        raise OperationalError("database is locked")

    job = served.gateway.ledger.job
    with monkeypatch.context() as patch:
        patch.setattr(ledger_module, "write", fail)
        assert (await served.chat()).status == 200
        await until(lambda: job.failures_in_a_row > 2)
        assert [line.getMessage() for line in caplog.records if "is locked" in line.getMessage()] == [
            "flush-ledger: OperationalError: database is locked"
        ]
        async with served.http.get(f"{served.url}/metrics") as response:
            text = await response.text()
        failures = next(
            line for line in text.splitlines() if line.startswith('pilothouse_job_failures_total{job="flush-ledger"}')
        )
        assert float(failures.split()[1]) > 2
        assert 'pilothouse_part_up{part="database"} 1.0' in text
        assert (await ready(served))["jobs"]["flush-ledger"]["failures_in_a_row"] > 2
    await until(lambda: job.ok)
    assert len(await served.rows()) == 1


async def test_a_job_that_loses_its_cancellation_is_cancelled_again(monkeypatch):
    monkeypatch.setattr(parts_module, "CANCEL_AGAIN_S", 0.01)
    lost = []

    async def deaf() -> None:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                if lost:
                    raise
                lost.append(True)

    tasks = [asyncio.create_task(deaf()), asyncio.create_task(asyncio.sleep(60))]
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await parts_module.end(tasks)
    assert (lost, [task.cancelled() for task in tasks]) == ([True], [True, True])
