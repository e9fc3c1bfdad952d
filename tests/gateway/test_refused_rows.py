"""Values are cleaned once, and a ledger row that the database refuses all the same blocks no others."""

import json
import math

import pytest
from asgiref.sync import sync_to_async
from django.db import DatabaseError, InterfaceError, OperationalError, ProgrammingError
from hypothesis import given
from hypothesis import strategies as st

from controlplane.events.models import Event
from controlplane.gateway.ledger import writer
from controlplane.gateway.ledger.entry import COLUMNS, REQUEST_ID, Row, fitted
from controlplane.gateway.ledger.writer import DEAD_LETTERS, Ledger, is_away, write_all
from controlplane.gateway.models import LedgerRow
from tests.gateway.rows import ledger_row
from tests.gateway.test_ledger import entries, filled, started  # noqa: F401
from tests.triggers import refuse, stop_refusing

NOBODY = 10**9  # no tenant has this number


def request_ids() -> list[str]:
    return list(LedgerRow.objects.order_by("id").values_list("request_id", flat=True))


def bad(entry: Row) -> Row:
    return ledger_row(entry, tenant_id=NOBODY)


def letters(folder) -> list[str]:
    """Request ids of the rows in the dead-letter file."""
    lines = (folder / DEAD_LETTERS).read_bytes().splitlines()
    return [json.loads(line)[REQUEST_ID] for line in lines]


@pytest.mark.sql
@pytest.mark.parametrize("at", [[0], [3], [1, 2], [0, 1, 2, 3]])
async def test_all_others_are_written_in_order_at_once(entries, tmp_path, at):  # noqa: F811
    """C27."""
    ledger = filled([bad(entry) if number in at else entry for number, entry in enumerate(entries)], tmp_path)
    assert await ledger.flush()
    assert await sync_to_async(request_ids)() == [f"r{number}" for number in range(4) if number not in at]
    assert (ledger.held, ledger.refused, ledger.written) == (0, len(at), 4 - len(at))
    assert letters(tmp_path) == [f"r{number}" for number in at]
    event = await Event.objects.aget(kind="ledger.refused")
    assert event.severity == "critical"
    assert event.after == {"rows": len(at), "request_id": f"r{at[0]}", "file": DEAD_LETTERS}
    assert ledger.trouble == f"the database refused {len(at)} rows, kept in {DEAD_LETTERS}"
    await ledger.stop()


REFUSES = {
    "P0001": "RAISE EXCEPTION 'not this tenant'",
    "XX000": "RAISE EXCEPTION 'not this tenant' USING ERRCODE = 'XX000'",
    "0A000": "RAISE EXCEPTION 'not this tenant' USING ERRCODE = '0A000'",
    "22003": "RAISE EXCEPTION 'not this tenant' USING ERRCODE = '22003'",
    "23514": "RAISE EXCEPTION 'not this tenant' USING ERRCODE = '23514'",
}
"""Statements of a trigger, by SQLSTATE: ProgrammingError, InternalError, NotSupportedError, DataError, IntegrityError."""


@pytest.mark.sql
@pytest.mark.parametrize("sqlstate", REFUSES)
async def test_a_trigger_against_one_row_holds_no_other(entries, tmp_path, sqlstate):  # noqa: F811
    """C27, of every class of error that a row may cause."""
    table = LedgerRow._meta.db_table
    await sync_to_async(refuse)(table, "INSERT", "NEW.request_id = 'r1'", REFUSES[sqlstate])
    try:
        ledger = filled(entries, tmp_path)
        assert await ledger.flush()
    finally:
        await sync_to_async(stop_refusing)()
    assert await sync_to_async(request_ids)() == ["r0", "r2", "r3"]
    assert letters(tmp_path) == ["r1"]
    await ledger.stop()


def of_postgresql(sqlstate: str, error: DatabaseError | None = None) -> DatabaseError:
    cause = Exception()
    cause.sqlstate = sqlstate  # type: ignore[attr-defined]
    error = error or ProgrammingError()
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "away"),
    [
        (OperationalError("database is locked"), True),
        (InterfaceError("connection already closed"), True),
        (of_postgresql("25006"), True),  # read-only
        (of_postgresql("42P01"), True),  # no such table
        (of_postgresql("42501"), True),  # no right to
        (of_postgresql("P0001"), False),
        (of_postgresql("54000", OperationalError()), False),  # a row beyond its limits
        (ProgrammingError("of SQLite"), False),
        (TypeError("Integer exceeds 64-bit range"), False),
    ],
)
async def test_rows_wait_for_the_database_alone_and_it_is_said_since_when(
    entries,  # noqa: F811
    tmp_path,
    monkeypatch,
    error,
    away,
):
    assert is_away(error) is away
    seen = []
    ledger = Ledger(10, tmp_path)

    def fail(batch, **_):
        seen.append(ledger.held)
        raise error

    monkeypatch.setattr(writer, "write", fail)
    for entry in entries:
        ledger.add(entry)
    assert await ledger.flush() is not away
    assert seen[0] == 4, "while they are being written, too"
    assert (ledger.held, ledger.refused) == ((4, 0) if away else (0, 4))
    assert ledger.trouble.startswith("4 rows wait since 20" if away else "the database refused 4 rows")
    monkeypatch.undo()
    assert await ledger.flush()
    assert len(await sync_to_async(request_ids)()) == (4 if away else 0)
    assert ledger.held == 0
    await ledger.stop()


async def test_a_journal_is_read_the_same_way(entries, tmp_path):  # noqa: F811
    """C27."""
    filled((entries[0], bad(entries[1]), entries[2]), tmp_path).journal.close()  # killed
    await started(tmp_path)
    assert await sync_to_async(request_ids)() == ["r0", "r2"]
    third = Ledger(10, tmp_path)
    await third.start()
    assert third.held == 0
    await third.stop()


async def test_dead_letters_under_a_journals_name_are_written_by_the_next_start(entries, tmp_path):  # noqa: F811
    ledger = Ledger(10, tmp_path)
    ledger.add(ledger_row(entries[0], output_tokens="many"))
    ledger.add(entries[1])
    assert await ledger.flush()
    await ledger.stop()
    assert await sync_to_async(request_ids)() == ["r1"]
    text = (tmp_path / DEAD_LETTERS).read_text()
    (tmp_path / DEAD_LETTERS).unlink()
    (tmp_path / "ledger-unsaved-again.jsonl").write_text(text.replace('"many"', "7"))
    await started(tmp_path)
    assert await sync_to_async(request_ids)() == ["r1", "r0"]


TEXTS = st.one_of(
    st.text(max_size=700), st.text(st.characters(categories=["Cs"]), max_size=3), st.just("a\0b"), st.just("x" * 999)
)
NUMBERS = st.one_of(st.integers(), st.integers(2**31 - 2, 2**70))
REALS = st.one_of(st.none(), st.floats())
KINDS = {
    "request_id": TEXTS, "model": TEXTS, "slo_class": TEXTS, "region": TEXTS, "instance": TEXTS, "application": TEXTS,
    "run": TEXTS, "unit": TEXTS, "error_code": TEXTS, "error_message": TEXTS, "own_region": TEXTS, "asked_model": TEXTS,
    "prompt_tokens": NUMBERS, "output_tokens": NUMBERS, "predicted_output_tokens": NUMBERS,
    "predicted_prompt_tokens": NUMBERS, "attempts": NUMBERS, "cached_tokens": NUMBERS, "status_code": NUMBERS,
    "queue_ms": REALS, "ttft_ms": REALS, "itl_ms": REALS, "e2e_ms": REALS, "estimated_wait_s": REALS,
}  # fmt: skip
"""What an instance or a tenant may put into a row, by column."""


@pytest.mark.sql
@pytest.mark.django_db
def test_whatever_is_said_the_row_is_cleaned_and_written(entries, tmp_path):  # noqa: F811
    @given(st.lists(st.fixed_dictionaries({}, optional=KINDS), min_size=1, max_size=5))
    def written(rows):
        LedgerRow.objects.all().delete()
        given_ = [fitted(ledger_row(entries[0], **values)) for values in rows]
        assert write_all(given_, tmp_path) == 0
        assert request_ids() == [entry[REQUEST_ID] for entry in given_]
        for row in LedgerRow.objects.all():
            assert all(0 <= number < 2**31 for number in (row.prompt_tokens, row.output_tokens, row.attempts))
            assert all(number is None or math.isfinite(number) for number in (row.ttft_ms, row.itl_ms, row.e2e_ms))
            assert len(row.run) <= 80
            assert len(row.error_message) <= 500

    written()


def test_what_fits_stays_as_it_is_and_what_does_not_is_the_nearest(entries):  # noqa: F811
    assert fitted(entries[0]) == entries[0]
    values = {
        "predicted_output_tokens": (3_000_000_000, 2**31 - 1), "attempts": (-4, 0), "e2e_ms": (math.inf, None),
        "run": ("ü" * 200, "ü" * 80), "unit": ("\ud800\0", "?\ufffd"),
    }  # fmt: skip
    row = fitted(ledger_row(**{name: given for name, (given, _) in values.items()}))
    assert {name: row[COLUMNS.index(name)] for name in values} == {name: fits for name, (_, fits) in values.items()}


async def test_the_page_and_readyz_say_it(served):
    (await served.chat()).release()
    await served.rows()
    ledger = served.gateway.ledger
    parts = {part.name: part for part in served.gateway.monitor.parts()}
    assert parts["database"].state == "ok"
    ledger.job.failed(OperationalError("disk full"))
    ledger.add(ledger_row(request_id="r"))
    parts = {part.name: part for part in served.gateway.monitor.parts()}
    assert parts["database"].state == "warning"
    assert parts["database"].detail.startswith("ledger: 1 rows wait since 20")
    async with served.http.get(f"{served.url}/readyz") as response:
        assert response.status == 200, "requests are served"
        assert (await response.json())["checks"]["ledger"].endswith("UTC: OperationalError: disk full")
    async with served.http.get(f"{served.url}/metrics") as response:
        metrics = dict(line.rsplit(" ", 1) for line in (await response.text()).splitlines() if line[0] != "#")
    assert float(metrics["pilothouse_ledger_held_rows"]) == 1
    assert float(metrics["pilothouse_ledger_failing_seconds"]) > 0
    ledger._held.clear()
    ledger.journal.cut()
    ledger.journal.forget()


HUGE = [
    ("chat/completions", {"max_tokens": 2**62, "n": 4, "ignore_eos": True}),
    ("chat/completions", {"max_tokens": 2**64 - 1, "ignore_eos": True}),
    ("chat/completions", {"max_completion_tokens": 2**64 - 1, "min_tokens": 2**64 - 1}),
    ("chat/completions", {"max_tokens": 2**64 - 1, "n": 16_384, "ignore_eos": True, "stream": True}),
    ("completions", {"prompt": ["a"] * 1000, "n": 16_384, "max_tokens": 2**64 - 1, "ignore_eos": True}),
    ("responses", {"input": "hi", "max_output_tokens": 2**64 - 1}),
    ("messages", {"max_tokens": 2**64 - 1}),
]


@pytest.mark.parametrize("status", [200, 400])
async def test_a_placed_request_for_more_than_64_bits_has_its_row(served, subtests, status):
    """C01: it was served and left no row."""
    served.backends[0].script.status = status
    for path, body in HUGE:
        said = {} if "prompt" in body or "input" in body else {"messages": [{"role": "user", "content": "hello"}]}
        asked = {"model": "m"} | body | said
        with subtests.test(path=path, **body):
            async with served.post(f"/v1/{path}", asked) as response:
                await response.read()
            assert (await served.new_row()).attempts >= 1, "it was placed"
    assert served.gateway.ledger.refused == 0
    await served.gateway.lengths.flush()


async def test_an_error_of_an_instance_with_nul_and_half_characters_has_its_row(served):
    body = json.dumps({"error": {"message": "bad \0 and \ud800 \\u0000", "code": 500}}).encode()
    served.backends[0].script.plays = [
        b"HTTP/1.1 500 Oh\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    ]
    async with await served.chat() as response:
        assert response.status == 502
    row = await served.new_row()
    assert "\0" not in json.dumps(row.trace)
    assert served.gateway.ledger.refused == 0
