"""The exported ledger is what the trace format `ledger` reads: demand as it was asked for, in the order of arrival."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from controlplane.accounts.models import Tenant
from controlplane.fleet.models import SloClass
from controlplane.gateway.models import LedgerRow
from controlplane.simulation.selectors import LEDGER_COLUMNS, ledger_rows, ledger_trace
from scheduling.simulation.measures.tables import write_csv
from scheduling.simulation.workload.traces import load_trace, read_trace
from tests.gateway.rows import served_row

START = datetime(2026, 11, 20, 10, tzinfo=UTC)


@pytest.fixture
def ledger(db):
    slo_class = SloClass.objects.create(name="interactive", title="Interactive", kind="opportunistic")
    tenant = Tenant.objects.create(name="acme", default_slo_class=slo_class)
    for number, (late_s, model, prompt) in enumerate(
        [(2.25, "llama", 30), (0.0, "llama", 10), (1.000001, "bloom", 20)]
    ):
        served_row(
            request_id=f"r{number}", arrived_at=START + timedelta(seconds=late_s), tenant=tenant, model=model,
            region="us-east", prompt_tokens=prompt, output_tokens=5,
        ).save()  # fmt: skip


@pytest.fixture
def exported(ledger, tmp_path: Path):
    """Export the rows from and until the given moments and return the file."""

    def export(*moments: datetime) -> Path:
        path = tmp_path / "ledger.csv"
        write_csv(path, LEDGER_COLUMNS, ledger_trace(ledger_rows(*moments)))
        return path

    return export


def test_an_export_can_be_read_back(exported) -> None:
    requests = list(read_trace(exported(), "ledger"))  # in the order of arrival, which the rows are not
    assert [request.prompt_tokens for request in requests] == [10, 20, 30]
    assert [request.arrival_s for request in requests] == pytest.approx([0.0, 1.000001, 2.25], abs=1e-6)
    assert (requests[1].model, requests[1].tenant, requests[1].slo_class) == ("bloom", "acme", "interactive")
    assert load_trace(exported(), "ledger").region.names == ["us-east"]
    part = exported(START + timedelta(seconds=1), START + timedelta(seconds=2))
    assert [request.prompt_tokens for request in read_trace(part, "ledger")] == [20]


def test_demand_is_exported_as_it_was_asked_for(exported) -> None:
    spilled, refused = LedgerRow.objects.order_by("arrived_at")[:2]
    LedgerRow.objects.filter(pk=spilled.pk).update(own_region="us-west")
    LedgerRow.objects.filter(pk=refused.pk).update(
        unserved=True, prompt_tokens=0, output_tokens=0, predicted_prompt_tokens=70, predicted_output_tokens=9
    )
    requests = list(read_trace(exported(), "ledger"))
    assert [request.region for request in requests] == ["us-west", "us-east", "us-east"]
    assert [(request.prompt_tokens, request.output_tokens) for request in requests] == [(10, 5), (70, 9), (30, 5)]


def test_a_request_without_output_is_exported_as_one_that_ends_with_its_prefill(exported) -> None:
    embedded, tokenized = LedgerRow.objects.order_by("arrived_at")[:2]
    LedgerRow.objects.filter(pk=embedded.pk).update(surface="embeddings", output_tokens=0)
    LedgerRow.objects.filter(pk=tokenized.pk).update(surface="tokenize", prompt_tokens=0, output_tokens=0)
    trace = load_trace(exported(), "ledger")  # what the engine computed nothing of is left out
    assert (trace.prompt_tokens.tolist(), trace.output_tokens.tolist()) == ([10, 30], [1, 5])
