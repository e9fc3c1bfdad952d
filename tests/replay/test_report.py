"""The closing table, its JSON twin, and the comparison with the ledger."""

import io
import json
from datetime import timedelta

import pytest
from django.utils import timezone
from rich.console import Console

from controlplane.accounts.models import Tenant
from controlplane.fleet.models import SloClass, SloKind
from controlplane.gateway.admission.keys import SloTerms
from controlplane.gateway.models import LedgerRow, Outcome
from controlplane.gateway.replay import report as ledger_check
from controlplane.gateway.replay.report import (
    Comparison,
    Report,
    Sums,
    TenantError,
    compare,
    key_for_run,
    known_key,
    terms_of,
)
from controlplane.gateway.replay.sender import Answer, Tally

TERMS = SloTerms(
    "interactive", "priority", 0, ttft_target_ms=100, itl_target_ms=None, e2e_target_ms=None, deadline_s=None
)


@pytest.fixture
def tally() -> Tally:
    tally = Tally(sent=5, late=1, latest_s=0.25, most_open=3)
    tally.skipped["no output in the trace"] = 2
    for ttft_ms in (50.0, 90.0, 150.0, 100.0):
        tally.enter(Answer("done", 100, 11, ttft_ms, 10.0, ttft_ms + 100))
    tally.enter(Answer("429 queue_full"))
    return tally


def shown(report: Report) -> str:
    stream = io.StringIO()
    report.show(Console(file=stream, width=100))
    return stream.getvalue()


def test_the_table(tally: Tally) -> None:
    """C79: the table says that ITL is a mean of each request."""
    text = shown(Report("replay-1", "llama", 12.0, tally, TERMS))
    for line in (
        "inter-token latency, mean (ITL)",
        "sent",
        "429 queue_full",
        "not sent: no output in the trace",
        "3 of 4 (75.0%)",
        "latest 0.2 s",
    ):
        assert line in text
    assert "sent 5 = done 4 + failed 1; the ledger was not compared." in text


def test_the_json_twin(tally: Tally) -> None:
    comparison = Comparison(Sums(5, 4, 400, 44), Sums(5, 4, 400, 43))
    said = json.loads(json.dumps(Report("replay-1", "llama", 12.0, tally, TERMS, comparison).as_json()))
    assert (said["sent"], said["done"], said["failed"], said["failures"]) == (5, 4, 1, {"429 queue_full": 1})
    assert (said["prompt_tokens"], said["output_tokens"]) == (400, 44)
    assert said["ttft_ms"] == {"p50": 95.0, "p95": pytest.approx(142.5), "p99": pytest.approx(148.5)}
    assert (said["slo_met"], said["slo_judged"]) == (3, 4)
    assert said["ledger"]["equal"] is said["balanced"] is False


def test_nothing_done_and_an_unknown_class() -> None:
    tally = Tally(sent=1)
    tally.enter(Answer("not reached"))
    report = Report("replay-1", "llama", 1.0, tally)
    assert report.as_json()["e2e_ms"] == {"p50": None, "p95": None, "p99": None}
    assert report.slo_met is None
    assert "class not known here" in shown(report)


def test_a_request_without_an_end_does_not_balance(tally: Tally) -> None:
    assert Report("replay-1", "llama", 1.0, tally).balanced
    tally.sent += 1
    assert not Report("replay-1", "llama", 1.0, tally).balanced


@pytest.fixture
def tenant(db) -> Tenant:
    slo_class = SloClass.objects.create(name="batch", title="B", kind=SloKind.NON_INTERACTIVE, deadline_s=60)
    return Tenant.objects.create(name="acme", default_slo_class=slo_class)


def row(
    tenant: Tenant, request_id: str, outcome: Outcome = Outcome.DONE, tokens: tuple[int, int] = (10, 3)
) -> LedgerRow:
    return LedgerRow.objects.create(
        request_id=request_id,
        arrived_at=timezone.now() - timedelta(seconds=1),
        tenant=tenant,
        model="m",
        slo_class="batch",
        streamed=True,
        outcome=outcome,
        status_code=200,
        prompt_tokens=tokens[0],
        output_tokens=tokens[1],
    )


def test_only_this_runs_rows_count_and_tokens_only_of_those_done(tenant: Tenant) -> None:
    row(tenant, "replay-a-1")
    row(tenant, "replay-a-2", Outcome.FAILED, (99, 99))
    row(tenant, "replay-ab-1")
    row(tenant, "elsewhere")
    comparison = compare("replay-a", Sums(2, 1, 10, 3))
    assert comparison.equal
    assert not compare("replay-a", Sums(2, 1, 10, 4)).equal


def test_rows_that_are_still_on_their_way_are_waited_for(tenant: Tenant) -> None:
    row(tenant, "replay-a-1")
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        row(tenant, f"replay-a-{len(naps) + 1}")

    assert compare("replay-a", Sums(3, 3, 30, 9), sleep=sleep).equal
    assert len(naps) == 2


def test_rows_that_never_come_are_given_up(tenant: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_check, "PATIENCE_S", 0.0)
    comparison = compare("replay-a", Sums(1, 1, 10, 3), sleep=lambda _: None)
    assert not comparison.equal
    text = shown(Report("replay-a", "m", 1.0, Tally(), None, comparison))
    assert "differs by -1" in text
    assert "THE LEDGER DOES NOT HOLD THE SAME" in text


def test_a_key_for_the_run(tenant: Tenant) -> None:
    key, secret = key_for_run("acme", "replay-a")
    assert known_key(secret) == key
    assert known_key("ph_other") is None
    terms = terms_of(key, "")
    assert terms is not None
    assert terms.name == "batch"
    assert terms_of(key, "unknown") is None
    with pytest.raises(TenantError, match=r"no active tenant 'globex' here \(there are: acme\)"):
        key_for_run("globex", "replay-a")
    assert ledger_check.ACTOR == "manage.py replay"
