"""A ledger row that the database refuses blocks no others: it is quarantined, reported, repaired and added again."""

import asyncio
import math
from io import StringIO
from pathlib import Path

import pytest
from asgiref.sync import sync_to_async
from django.core.management import call_command
from django.core.management.base import CommandError
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from controlplane.accounts.models import Tenant
from controlplane.events.models import Event
from controlplane.gateway.ledger import refused
from controlplane.gateway.ledger.entry import COLUMNS, RequestRecord, fit
from controlplane.gateway.ledger.writer import Ledger, write_all
from controlplane.gateway.models import LedgerRow
from tests.gateway.conftest import until
from tests.gateway.test_ledger import entries  # noqa: F401

NOBODY = 10**9  # no tenant has this number, and no bound can catch it


def request_ids() -> list[str]:
    return list(LedgerRow.objects.order_by("id").values_list("request_id", flat=True))


def bad(entry: RequestRecord) -> RequestRecord:
    return replace(entry, tenant_id=NOBODY)


@pytest.mark.sql
@pytest.mark.parametrize("at", [[0], [3], [1, 2], [0, 1, 2, 3]])
async def test_all_others_are_written_in_order_at_once(entries, tmp_path, at):  # noqa: F811
    """C27."""
    ledger = Ledger(10, tmp_path)
    for number, entry in enumerate(entries):
        ledger.add(bad(entry) if number in at else entry)
    assert await ledger.flush()
    assert await sync_to_async(request_ids)() == [f"r{number}" for number in range(4) if number not in at]
    assert (ledger.held, ledger.refused, ledger.written) == (0, len(at), 4 - len(at))
    quarantine = refused.read(tmp_path)
    assert [one.row["request_id"] for one in quarantine] == [f"r{number}" for number in at]
    assert all(one.reason.startswith("IntegrityError") for one in quarantine)
    event = await Event.objects.aget(kind="ledger.refused")
    assert event.severity == "critical"
    assert event.after == {"rows": len(at), "request_id": f"r{at[0]}"}
    await ledger.stop()


async def test_a_journal_is_taken_up_the_same_way(entries, tmp_path):  # noqa: F811
    """C27."""
    first = Ledger(10, tmp_path)
    for entry in (entries[0], bad(entries[1]), entries[2]):
        first.add(entry)
    first.journal.close()  # killed
    second = Ledger(10, tmp_path)
    await second.start()
    await second.stop()
    assert await sync_to_async(request_ids)() == ["r0", "r2"]
    assert Ledger(10, tmp_path).refused == 1
    third = Ledger(10, tmp_path)
    await third.start()
    assert third.held == 0
    await third.stop()


async def test_journal_lines_of_another_kind_are_left_out(entries, tmp_path):  # noqa: F811
    first = Ledger(10, tmp_path)
    first.add(entries[0])
    first.journal.append(b'["too", "few"]')
    first.journal.append(b"7")
    first.journal.close()
    second = Ledger(10, tmp_path)
    await second.start()
    await second.stop()
    assert await sync_to_async(request_ids)() == ["r0"]


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(2**31 - 2, 2**70), st.floats(), st.text(max_size=700),
    st.text(st.characters(categories=["Cs"]), max_size=3), st.just("a\0b"),
)  # fmt: skip
NUMBERS = st.one_of(st.integers(), st.integers(2**31 - 2, 2**70), st.floats(allow_nan=False, allow_infinity=False))


@st.composite
def odd(draw: st.DrawFn) -> dict[str, object]:
    """Values that an instance or a tenant may put into a row."""
    texts = (
        "model",
        "slo_class",
        "instance",
        "application",
        "run",
        "unit",
        "error_code",
        "error_message",
        "own_region",
    )
    wholes = (
        "prompt_tokens",
        "output_tokens",
        "predicted_output_tokens",
        "predicted_prompt_tokens",
        "retry",
        "attempts",
    )
    reals = ("queue_ms", "ttft_ms", "itl_ms", "e2e_ms", "estimated_wait_s")
    values = dict(draw(st.dictionaries(st.sampled_from(texts), ANYTHING, max_size=3)))
    values |= draw(st.dictionaries(st.sampled_from(wholes), NUMBERS, max_size=3))
    return values | draw(st.dictionaries(st.sampled_from(reals), st.one_of(st.none(), st.floats()), max_size=2))


@pytest.mark.sql
@pytest.mark.django_db
def test_whatever_is_said_the_row_is_bounded_and_written(entries, tmp_path):  # noqa: F811
    @given(st.lists(odd(), min_size=1, max_size=5))
    def written(rows):
        LedgerRow.objects.all().delete()
        given_ = [replace(entries[0], request_id=f"odd{at}", **values) for at, values in enumerate(rows)]
        assert write_all(given_, tmp_path) == 0
        assert request_ids() == [f"odd{at}" for at in range(len(rows))]
        for row in LedgerRow.objects.all():
            assert all(0 <= number < 2**31 for number in (row.prompt_tokens, row.output_tokens, row.attempts))
            assert all(number is None or math.isfinite(number) for number in (row.ttft_ms, row.itl_ms, row.e2e_ms))
            assert len(row.run) <= 80
            assert len(row.error_message) <= 500

    written()


@given(st.lists(odd(), min_size=1, max_size=4))
def test_what_fits_is_what_bounding_leaves_as_it_is(rows):
    made = [replace(WELL, **values) for values in rows]
    bounded = [entry.bounded() for entry in made]
    assert fit(bounded)
    assert fit(made) == all(map(same, made, bounded))


WELL = RequestRecord(
    "r", 1e9, 1, None, "m", "interactive", "east", "m-0", "", "", "", True, "done", 200, "", 1, 1, 1, None, None, None, None,
    None, 1, "[]",
)  # fmt: skip


def same(one: RequestRecord, other: RequestRecord) -> bool:
    """Values and their types."""
    return all(type(mine) is type(its) and mine == its for mine, its in zip(one.values(), other.values(), strict=True))


async def test_a_row_that_no_journal_can_hold_is_held_all_the_same(entries, tmp_path):  # noqa: F811
    ledger = Ledger(10, tmp_path)
    ledger.add(replace(entries[0], output_tokens=2**70, run="\ud800"))
    ledger.journal.close()  # killed
    second = Ledger(10, tmp_path)
    await second.start()
    await second.stop()
    row = await LedgerRow.objects.aget()
    assert (row.output_tokens, row.run) == (2**31 - 1, "?")


async def test_a_value_of_another_kind_is_quarantined(entries, tmp_path):  # noqa: F811
    ledger = Ledger(10, tmp_path)
    ledger.add(replace(entries[0], output_tokens="many"))
    ledger.add(entries[1])
    assert await ledger.flush()
    assert await sync_to_async(request_ids)() == ["r1"]
    assert "many" in refused.read(tmp_path)[0].reason or refused.read(tmp_path)[0].row["output_tokens"] == "many"
    await ledger.stop()


def test_a_number_beyond_its_column_is_the_largest_and_what_is_no_number_raises(entries):  # noqa: F811
    entry = replace(
        entries[0], predicted_output_tokens=3_000_000_000, attempts=-4, e2e_ms=math.inf, run="x" * 200
    ).bounded()
    assert (entry.predicted_output_tokens, entry.attempts, entry.e2e_ms, len(entry.run)) == (2**31 - 1, 0, None, 80)
    with pytest.raises(ValueError, match="invalid literal"):
        replace(entries[0], output_tokens="many").bounded()


def command(folder, settings, *arguments: str) -> str:
    settings.STATE_DIR = folder
    output = StringIO()
    call_command("ledger_refused", *arguments, stdout=output)
    return output.getvalue()


@pytest.fixture
def quarantine(entries, tmp_path):  # noqa: F811
    """Two rows without an owner, one of them of a class that cannot be added."""
    rows = [(asdict(bad(entry)), "IntegrityError: no such tenant") for entry in entries[:2]]
    refused.quarantine(tmp_path, rows)
    return tmp_path


def test_rows_are_listed_mended_and_added_again(quarantine, entries, settings):  # noqa: F811
    tenant = entries[0].tenant_id
    listed = command(quarantine, settings)
    assert "r0  " in listed
    assert "UTC  IntegrityError: no such tenant" in listed
    with pytest.raises(CommandError, match="2 refused again"):
        command(quarantine, settings, "--add")
    assert request_ids() == []
    assert command(quarantine, settings, "r1", "--set", f"tenant_id={tenant}", "--add") == "1 added\n"
    assert request_ids() == ["r1"]
    command(quarantine, settings, "r0", "--set", f"tenant_id={tenant}", "--set", "error_code=odd")
    assert command(quarantine, settings, "--add") == "1 added\n"
    assert request_ids() == ["r1", "r0"]
    assert LedgerRow.objects.get(request_id="r0").error_code == "odd"
    assert command(quarantine, settings) == "No row is quarantined.\n"


def test_rows_are_dropped_and_mistakes_are_said(quarantine, settings):
    with pytest.raises(CommandError, match=r"No refused row is of r9\."):
        command(quarantine, settings, "r9")
    with pytest.raises(CommandError, match="'colour=red' is not COLUMN=VALUE"):
        command(quarantine, settings, "--set", "colour=red")
    assert command(quarantine, settings, "r0", "--drop") == "1 dropped\n"
    assert [one.row["request_id"] for one in refused.read(quarantine)] == ["r1"]
    assert refused.count(quarantine) == 1


@pytest.fixture
def empty_quarantine(settings):
    yield
    (Path(settings.STATE_DIR) / refused.FILE).unlink(missing_ok=True)


async def test_the_page_and_readyz_say_it(served, empty_quarantine):
    (await served.chat()).release()
    (row,) = await served.rows()
    values = {name: getattr(row, name) for name in COLUMNS}
    served.gateway.ledger.add(bad(RequestRecord(**values | {"arrived_at": row.arrived_at.timestamp(), "trace": "[]"})))
    await served.gateway.ledger.flush()
    parts = {part.name: part for part in served.gateway.monitor.parts()}
    assert parts["database"].state == "warning"
    assert parts["database"].detail == "it refused 1 ledger row, quarantined: `manage.py ledger_refused`"
    async with served.http.get(f"{served.url}/readyz") as response:
        assert response.status == 200
        assert (await response.json())["checks"]["ledger"] == "1 refused rows are quarantined"


@pytest.mark.parametrize("asked", [3_000_000_000, 2**63])
async def test_a_request_for_more_than_any_column_holds_is_a_row_like_others(served, asked):
    """C01: It is refused by its tenant's own limit; it once stopped the ledger of all tenants."""
    await sync_to_async(Tenant.objects.update)(tokens_per_minute=300)
    served.gateway.keys._grants.clear()
    backend = served.backends[0]
    backend.script.hold = asyncio.Event()
    first = asyncio.create_task(served.chat(max_tokens=200, ignore_eos=True))
    await until(lambda: backend.running == 1)  # about 200 of its 300 tokens are reserved
    async with await served.chat(max_tokens=asked, ignore_eos=True) as response:
        assert response.status == 429
    backend.script.hold.set()
    assert (await first).status == 200
    outcomes = {row.outcome: row for row in await served.rows()}
    assert outcomes["done"].output_tokens > 0
    assert outcomes["rejected"].predicted_output_tokens < 2**31
    assert served.gateway.ledger.held == served.gateway.ledger.refused == 0
