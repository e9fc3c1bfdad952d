"""Ledger rows when the database fails."""

import asyncio

import pytest
from channels.db import database_sync_to_async
from django.db import OperationalError, connection

from controlplane.fleet.models import Deployment
from controlplane.gateway.explanation import trace_of
from controlplane.gateway.ledger import writer as module
from controlplane.gateway.ledger.entry import ARRIVED_AT, Row
from controlplane.gateway.ledger.journal import PATTERN
from controlplane.gateway.ledger.writer import Ledger
from controlplane.gateway.models import LedgerRow, MinuteRow
from controlplane.gateway.selectors import prefix_hits
from tests.gateway.rows import ledger_row, make_rows


@pytest.fixture
def entries(transactional_db) -> list[Row]:
    make_rows([], regions=[], max_num_seqs=1, queue_bound=1)
    tenant = module.LedgerRow._meta.get_field("tenant").related_model.objects.get()
    blank = {
        "tenant_id": tenant.pk,
        "api_key_id": None,
        "streamed": True,
        "outcome": "done",
        "status_code": 200,
        "prompt_tokens": 10,
        "output_tokens": 4,
        "predicted_output_tokens": 5,
        "predicted_prompt_tokens": 0,
        "unserved": False,
        "queue_ms": 0.5,
        "ttft_ms": None,
        "itl_ms": None,
        "e2e_ms": 9.0,
        "slo_met": None,
        "attempts": 1,
        "trace": '[{"instance": "m-0"}]',
        "model": "m",
    }
    return [
        ledger_row(**(blank | {"request_id": f"r{index}", "arrived_at": 1_700_000_000.0 + index * 40}))
        for index in range(4)
    ]


def filled(entries, folder) -> Ledger:
    ledger = Ledger(10, folder)
    for entry in entries:
        ledger.add(entry)
    return ledger


async def started(folder) -> None:
    """Start another process's ledger, which writes what it finds there, and stop it."""
    following = Ledger(10, folder)
    await following.start()
    await following.stop()


def rows() -> list[LedgerRow]:
    return list(LedgerRow.objects.order_by("id"))


@pytest.mark.sql
async def test_rows_and_minutes_agree(entries, tmp_path):
    ledger = Ledger(10, tmp_path)
    for entry in entries:
        ledger.add(entry)
        await ledger.flush()  # one batch each: minute rows must add up over batches
    written = await database_sync_to_async(rows)()
    assert [row.request_id for row in written] == ["r0", "r1", "r2", "r3"]
    assert written[0].trace == [{"instance": "m-0"}]
    assert written[0].arrived_at.timestamp() == 1_700_000_000.0
    minutes = await database_sync_to_async(lambda: list(MinuteRow.objects.order_by("minute")))()
    assert [minute.requests for minute in minutes] == [1, 2, 1]
    assert sum(minute.prompt_tokens for minute in minutes) == 40


@pytest.mark.sql
async def test_a_full_batch_is_written_before_its_time(entries, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "BATCH_ROWS", 3)
    ledger = Ledger(1000, tmp_path)
    await ledger.start()
    for entry in entries[:2]:
        ledger.add(entry)
    await asyncio.sleep(0.05)
    assert ledger.written == 0
    ledger.add(entries[2])
    async with asyncio.timeout(30):
        while ledger.written < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    ledger.add(entries[3])
    await ledger.stop()
    assert (ledger.held, ledger.written) == (0, 4)


async def test_what_cannot_be_written_at_a_stop_is_there_at_the_next_start(entries, tmp_path, monkeypatch):
    folder = tmp_path / "state"
    ledger = filled(entries, folder)

    def fail(batch, **_):
        raise OperationalError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(module, "write", fail)
        await ledger.stop()
    assert list(folder.glob(PATTERN))
    await started(folder)
    assert not list(folder.glob(PATTERN))
    assert [row.request_id for row in await database_sync_to_async(rows)()] == ["r0", "r1", "r2", "r3"]


async def test_memory_is_bounded_and_dropped_entries_are_reported(entries, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "HELD_ROWS", 3)

    def fail(batch, **_):
        raise OperationalError("gone")

    monkeypatch.setattr(module, "write", fail)
    ledger = filled(entries, tmp_path)
    await ledger.flush()
    assert (ledger.held, ledger.given_up) == (3, 1)


async def killed(entries, folder) -> None:
    """A process that ended before writing *entries*: its locks are gone, its files stay."""
    filled(entries, folder).journal.close()


@pytest.mark.sql
async def test_a_kill_between_the_commit_and_the_journal_doubles_nothing(entries, tmp_path):
    await killed(entries, tmp_path)
    await database_sync_to_async(module.write)(entries[:3])
    following = Ledger(10, tmp_path)
    await following.start()
    again = ledger_row(entries[0], arrived_at=entries[0][ARRIVED_AT] + 300)  # another request of the same id
    following.add(again)
    await following.stop()
    written = await database_sync_to_async(rows)()
    assert [row.request_id for row in written] == ["r0", "r1", "r2", "r3", "r0"]
    assert not list(tmp_path.glob(PATTERN))
    minutes = await database_sync_to_async(lambda: sum(row.requests for row in MinuteRow.objects.all()))()
    assert minutes == 5


@pytest.mark.sql
async def test_an_error_after_the_commit_doubles_nothing(entries, tmp_path, monkeypatch):
    ledger = filled(entries, tmp_path)
    real = module.write

    def commit_and_fail(batch, **options):
        real(batch, **options)
        raise OperationalError("server closed the connection unexpectedly")

    with monkeypatch.context() as patch:
        patch.setattr(module, "write", commit_and_fail)
        assert not await ledger.flush()
    assert await ledger.flush()
    assert len(await database_sync_to_async(rows)()) == 4
    assert not list(tmp_path.glob(PATTERN))


async def test_files_of_a_process_that_lives_are_left_alone(entries, tmp_path):
    living = Ledger(10, tmp_path)
    living.add(entries[0])
    await started(tmp_path)
    assert await database_sync_to_async(rows)() == []
    await living.stop()
    assert [row.request_id for row in await database_sync_to_async(rows)()] == ["r0"]


@pytest.mark.parametrize("line", [b'["r9",17', b'["too", "few"]\n', b"7\n"])
async def test_a_line_that_is_cut_off_or_of_another_kind_is_left_out(entries, tmp_path, line):
    await killed(entries[:1], tmp_path)
    (path,) = tmp_path.glob(PATTERN)
    path.write_bytes(path.read_bytes() + line)
    await started(tmp_path)
    assert [row.request_id for row in await database_sync_to_async(rows)()] == ["r0"]


async def test_a_disk_that_takes_nothing_fails_no_request(entries, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    ledger = filled(entries, tmp_path / "file")
    assert await ledger.flush()
    assert [record.levelname for record in caplog.records] == ["ERROR"]


@pytest.mark.sql
@pytest.mark.django_db
def test_no_index_of_the_ledger_is_the_beginning_of_another():
    with connection.cursor() as cursor:
        constraints = connection.introspection.get_constraints(cursor, LedgerRow._meta.db_table)
    indexes = {name: tuple(one["columns"]) for name, one in constraints.items() if one["index"] or one["unique"]}
    assert ("tenant_id", "arrived_at") in indexes.values()
    for name, columns in indexes.items():
        longer = [other for other in indexes.values() if len(other) > len(columns) and other[: len(columns)] == columns]
        assert not longer, name


@pytest.mark.parametrize("stream", [True, False])
async def test_cached_prompt_tokens_are_kept_as_reported_and_as_expected(served, stream):
    await database_sync_to_async(Deployment.objects.update)(routing_policy="least_delay")
    await served.gateway.dispatching.read_inventory()
    prompt, rows = [{"role": "user", "content": "word " * 400}], []
    for cached in (None, 5):
        served.backends[0].script.cached_tokens = cached
        async with await served.chat(messages=prompt, stream=stream) as response:
            await response.read()
        rows.append(await served.new_row())
    assert [row.cached_tokens for row in rows] == [None, 5]
    assert rows[0].expected_cached_tokens == 0
    assert rows[1].expected_cached_tokens == trace_of(rows[1])[-1]["seen"][0]["parts"]["affinity_tokens"] > 0
    hits = await database_sync_to_async(prefix_hits)(rows[0].arrived_at, model="m")
    assert (hits.requests, hits.cached_tokens, hits.ratio, hits.of_tokens) == (1, 5, 5 / 7, 7)
    assert hits.expected_ratio == rows[1].expected_cached_tokens / 7
    assert [row.expected_by for row in rows] == ["estimate", "estimate"]
    assert (hits.wrong_by_events, hits.wrong_by_estimate) == (None, abs(rows[1].expected_cached_tokens - 5) / 7)
    async with served.http.get(f"{served.url}/metrics") as response:
        metrics = await response.text()
    assert 'pilothouse_cached_prompt_tokens_total{by="estimate",kind="reported",model="m"} 5.0' in metrics
