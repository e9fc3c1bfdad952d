"""`manage.py export_ledger` writes what the trace format `ledger` reads."""

from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from controlplane.accounts.models import Tenant
from controlplane.fleet.models import SloClass
from controlplane.gateway.models import LedgerRow
from scheduling.simulation.workload.traces import load_trace, read_trace

START = datetime(2026, 11, 20, 10, tzinfo=UTC)


@pytest.fixture
def ledger(db):
    slo_class = SloClass.objects.create(name="interactive", title="Interactive", kind="opportunistic")
    tenant = Tenant.objects.create(name="acme", default_slo_class=slo_class)
    for number, (late_s, model, prompt) in enumerate(
        [(2.25, "llama", 30), (0.0, "llama", 10), (1.000001, "bloom", 20)]
    ):
        LedgerRow.objects.create(
            request_id=f"r{number}",
            arrived_at=START + timedelta(seconds=late_s),
            tenant=tenant,
            model=model,
            slo_class="interactive",
            region="us-east",
            streamed=True,
            outcome="done",
            status_code=200,
            prompt_tokens=prompt,
            output_tokens=5,
        )


def test_an_export_can_be_read_back(ledger, tmp_path: Path) -> None:
    path = tmp_path / "ledger.csv"
    out = StringIO()
    call_command("export_ledger", str(path), stdout=out)
    assert out.getvalue().startswith("3 requests written")
    requests = list(read_trace(path, "ledger"))  # in the order of arrival, which the rows are not
    assert [request.prompt_tokens for request in requests] == [10, 20, 30]
    assert [request.arrival_s for request in requests] == pytest.approx([0.0, 1.000001, 2.25], abs=1e-6)
    assert (requests[1].model, requests[1].tenant, requests[1].slo_class) == ("bloom", "acme", "interactive")
    assert load_trace(path, "ledger").region.names == ["us-east"]


def test_demand_is_exported_as_it_was_asked_for(ledger, tmp_path: Path) -> None:
    spilled, refused = LedgerRow.objects.order_by("arrived_at")[:2]
    LedgerRow.objects.filter(pk=spilled.pk).update(own_region="us-west")
    LedgerRow.objects.filter(pk=refused.pk).update(
        unserved=True, prompt_tokens=0, output_tokens=0, predicted_prompt_tokens=70, predicted_output_tokens=9
    )
    path = tmp_path / "ledger.csv"
    call_command("export_ledger", str(path), stdout=StringIO())
    requests = list(read_trace(path, "ledger"))
    assert [request.region for request in requests] == ["us-west", "us-east", "us-east"]
    assert [(request.prompt_tokens, request.output_tokens) for request in requests] == [(10, 5), (70, 9), (30, 5)]


def test_a_part_of_the_ledger(ledger, tmp_path: Path) -> None:
    path = tmp_path / "ledger.csv"
    call_command("export_ledger", str(path), "--model", "llama", stdout=StringIO())
    assert [request.prompt_tokens for request in read_trace(path, "ledger")] == [10, 30]
    call_command(
        "export_ledger",
        str(path),
        "--since",
        "2026-11-20T10:00:01",
        "--until",
        "2026-11-20T10:00:02",
        stdout=StringIO(),
    )
    assert [request.prompt_tokens for request in read_trace(path, "ledger")] == [20]


def test_nothing_to_export(ledger, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="no such request"):
        call_command("export_ledger", str(tmp_path / "x"), "--model", "other")
    with pytest.raises(CommandError, match="No such file"):
        call_command("export_ledger", str(tmp_path / "nowhere" / "x"))


def test_a_request_without_output_is_exported_as_one_that_ends_with_its_prefill(ledger, tmp_path: Path) -> None:
    embedded, tokenized = LedgerRow.objects.order_by("arrived_at")[:2]
    LedgerRow.objects.filter(pk=embedded.pk).update(surface="embeddings", output_tokens=0)
    LedgerRow.objects.filter(pk=tokenized.pk).update(surface="tokenize", prompt_tokens=0, output_tokens=0)
    path = tmp_path / "ledger.csv"
    call_command("export_ledger", str(path), stdout=StringIO())
    trace = load_trace(path, "ledger")  # what the engine computed nothing of is left out
    assert (trace.prompt_tokens.tolist(), trace.output_tokens.tolist()) == ([10, 30], [1, 5])
