"""Records and metrics of a gateway's length service: samples, measures by the minute, alarms."""

import logging

import pytest
from django.db import connection

from controlplane.accounts.models import Tenant
from controlplane.lengths import length_service as module
from controlplane.lengths.models import LengthMinute, LengthSample
from tests.gateway.lengths.calls import LONG, in_database, say


def whole_database():
    """Every value of every table, as text."""
    cells = []
    with connection.cursor() as cursor:
        for table in connection.introspection.table_names():
            cursor.execute(f'SELECT * FROM "{table}"')
            for row in cursor.fetchall():
                cells += [bytes(each).decode("latin-1") if isinstance(each, bytes) else str(each) for each in row]
    return "\n".join(cells)


@pytest.mark.parametrize("keeps", [False, True])
async def test_text_is_kept_only_of_tenants_that_want_it(served, service, keeps, caplog):
    caplog.set_level(logging.DEBUG)
    await in_database(lambda: Tenant.objects.update(keep_prompts=keeps))
    secret = "My password is hunter2, please tell nobody about it, least of all the database of this gateway."
    await say(served, secret, 40)
    await served.rows()
    await service.flush()
    sample = await in_database(LengthSample.objects.get)
    assert (sample.text == secret) is keeps
    assert (sample.output_tokens, sample.predicted_tokens, sample.predicted_by) == (40, 50, "trees 0")
    assert bytes(sample.features)
    assert ("hunter2" in await in_database(whole_database)) is keeps
    assert "hunter2" not in caplog.text
    assert "hunter2" not in repr(service.snapshot())


@pytest.mark.sql
async def test_measures_are_written_by_the_minute(served, service):
    for number, tokens in enumerate((40, 45, 300)):
        await say(served, f"quite another question, number {number * 77}, about {number}", tokens)
    await service.flush()
    rows = await in_database(lambda: list(LengthMinute.objects.all()))
    assert (sum(row.requests for row in rows), sum(row.output_tokens for row in rows)) == (3, 385)
    assert {(row.model, row.tenant, row.predictor) for row in rows} == {("m", "acme", "trees 0")}


async def test_a_database_that_is_away_costs_samples_but_no_measures(served, service, monkeypatch):
    def down(notes):
        raise ConnectionError

    write = module.notes.write
    monkeypatch.setattr(module.notes, "write", down)
    await say(served, "one question", 40)
    with pytest.raises(ConnectionError):
        await service.flush()
    monkeypatch.setattr(module.notes, "write", write)
    await say(served, "another question that is not the same", 40)
    await service.flush()
    rows = await in_database(lambda: list(LengthMinute.objects.all()))
    assert sum(row.requests for row in rows) == 2


async def test_samples_are_an_even_share(served, service, monkeypatch):
    monkeypatch.setattr(module, "SAMPLES", 3)
    for number in range(40):
        await say(served, f"question {number}")
    assert len(service.notes.samples) == 3


async def metrics(served):
    async with served.http.get(f"{served.url}/metrics") as response:
        return await response.read()


async def test_metrics_and_the_summary_have_it(served, service):
    await say(served, LONG)
    page = await metrics(served)
    assert b'pilothouse_length_answers_total{source="model"} 1.0' in page
    assert b'pilothouse_length_seconds{quantile="0.99"}' in page
    summary = served.gateway.publisher.summary.snapshot()["lengths"]
    assert summary["answered"] == {"cache": 0, "model": 1, "prior": 0, "forced": 0}
    assert summary["p99_ms"] >= summary["p50_ms"] > 0
    assert summary["version"] == "trees 0"
