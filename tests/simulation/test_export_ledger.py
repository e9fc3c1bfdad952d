"""The exported ledger is what the trace format `ledger` reads: demand as it was asked for, in the order of arrival."""

import csv
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from controlplane.accounts.models import Tenant
from controlplane.fleet.models import SloClass
from controlplane.gateway.models import LedgerRow
from controlplane.simulation.selectors import LEDGER_COLUMNS, ledger_rows, ledger_trace, own_rows, workload_of
from scheduling.simulation.measures.tables import write_csv
from scheduling.simulation.workload import prefix_groups
from scheduling.simulation.workload.traces import load_trace, read_trace
from scheduling.table_files import TraceError
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


RUNS = [
    ("r0", "agent", "7", "plan", 30.0, prefix_groups.as_text([1, 2, 3], 40)),
    ("r1", "agent", "7", "work", None, prefix_groups.as_text([1, 2, 4], 40)),
    ("r2", "", "", "", None, ""),
]


@pytest.fixture
def with_runs(ledger) -> None:
    for request_id, application, run, unit, due_s, groups in RUNS:
        values = {"application": application, "run": run, "unit": unit, "run_due_s": due_s, "prefix_groups": groups}
        LedgerRow.objects.filter(request_id=request_id).update(e2e_ms=500.0, **values)
    LedgerRow.objects.filter(request_id="r0").update(outcome="failed", prompt_tokens=300)
    LedgerRow.objects.filter(request_id="r1").update(prompt_tokens=100)


def test_an_export_has_runs_and_prefix_groups_as_the_ledger_has(with_runs, exported) -> None:
    rows = ledger_rows()
    of_file, of_rows = load_trace(exported(), "ledger"), workload_of(own_rows(rows), START)
    for each in (of_file, of_rows):
        calls = each.calls
        assert calls.run.tolist() == [0, -1, 0]
        own = np.flatnonzero(calls.run == 0)
        assert calls.step[own].tolist() == [1, 2]
        assert [calls.unit.names[code] for code in calls.unit.codes[own]] == ["work", "plan"]
        assert (calls.took_s[own].tolist(), calls.failed[own].tolist()) == ([0.5, 0.5], [False, True])
        assert sorted(calls.due_in_s[own].tolist()) == [30.0, np.inf]
    for name in ("prefix_first", "prefix_hashes"):
        np.testing.assert_array_equal(getattr(of_file, name), getattr(of_rows, name))
    own = np.diff(of_file.prefix_first)[np.flatnonzero(of_file.calls.run == 0)]
    assert own.tolist() == [2 * 40 // 16] * 2, "the blocks that only one prompt has are left out"
    LedgerRow.objects.filter(request_id="r2").update(prefix_groups=None)
    assert workload_of(own_rows(rows), START).prefix_block_tokens == 0, (
        "what began before they were recorded shares nothing"
    )


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("Step", "0", "column Step: is missing: the number of the call"),
        ("Step", "1.5", "column Step: '1.5' is not a whole number"),
        ("Step", "1", "column Step: is 1, and run 7 has had step 1 before"),
        ("E2E (ms)", "-3", "column E2E (ms): '-3' is not a number from 0 up"),
        ("Run due (s)", "soon", "column Run due (s): 'soon' is not a number"),
        ("Prefix groups", "AAAA", "column Prefix groups: 'AAAA' does not begin with the tokens of a block"),
        ("Prefix groups", "16:AAA=", "column Prefix groups: '16:AAA=' has no 1 to 64 hashes"),
        ("Prefix groups", "16:?", "column Prefix groups: '16:?' has no 1 to 64 hashes"),
    ],
)
def test_a_bad_value_says_what_and_where(with_runs, exported, column, value, message) -> None:
    path = exported()
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    next(row for row in rows if row[0] == "r0")[header.index(column)] = value
    write_csv(path, header, rows)
    with pytest.raises(TraceError, match=re.escape(f"line 4, {message}")):
        load_trace(path, "ledger")
