"""`manage.py replay` from the command line to the last line; against the real gateway in tests/supervisor/test_up.py."""

import json
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from controlplane.accounts.models import ApiKey, Tenant
from controlplane.fleet.models import SloClass, SloKind
from controlplane.simulation.management.commands import replay as command
from tests.traffic.conftest import FakeGateway

TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,4
2023-11-16 18:15:50.9951690,396,10
2023-11-16 18:15:51.2225670,9000,55
2023-11-16 18:15:52.2225670,879,5
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def replay(trace: Path, gateway: FakeGateway, *options: str) -> None:
    arguments = ["--format", "azure", "--speed", "1000", "--url", gateway.url, "--key", "good", *options]
    call_command("replay", str(trace), *arguments)


@pytest.mark.django_db
def test_a_run_with_a_key_of_a_server_elsewhere(trace: Path, gateway_with_rows: FakeGateway, capsys) -> None:
    replay(trace, gateway_with_rows)
    said = json.loads(capsys.readouterr().out)
    assert (said["sent"], said["done"], said["failed"], "ledger" in said) == (3, 3, 0, False)
    assert said["model"] == "a-long"  # the longest context, first by name
    assert said["skipped"] == {"longer than the model's context of 8192 tokens": 1}
    assert (said["prompt_tokens"], said["output_tokens"]) == (374 + 396 + 879, 19)


@pytest.mark.django_db
def test_a_ledger_without_the_rows_fails_the_run(
    trace: Path, gateway_with_rows: FakeGateway, capsys, monkeypatch
) -> None:
    """The key is in this database, so the rows should be too; the fake gateway writes none."""
    slo_class = SloClass.objects.create(name="batch", title="B", kind=SloKind.NON_INTERACTIVE, deadline_s=60)
    tenant = Tenant.objects.create(name="acme", default_slo_class=slo_class)
    monkeypatch.setattr(ApiKey, "new_secret", staticmethod(lambda: "good"))
    monkeypatch.setattr(command, "LEDGER_S", 0.0)
    with pytest.raises(SystemExit) as ended:
        call_command(
            "replay", str(trace), "--format", "azure", "--speed", "1000", "--url", gateway_with_rows.url, "--limit", "2"
        )
    assert ended.value.code == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["ledger"] == {"sent": 0, "done": 0}
    assert "The ledger does not hold the same." in said.err
    key = ApiKey.objects.get()
    assert key.tenant == tenant
    assert key.revoked_at is not None


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "gone"], r"serves no gone; it serves: b-long, a-long, short\.$"),
        (["--key", "bad"], r"401 This API key is unknown\."),
        (["--url", "http://127.0.0.1:9/v1"], r"does not answer .*Is Pilothouse running there\?$"),
        (["--speed", "0"], r"must be more than 0"),
        (["--format", "mooncake"], r"line 1: is not JSON"),
    ],
)
def test_what_cannot_begin_is_said_in_one_line(
    trace: Path, gateway_with_rows: FakeGateway, options: list[str], message: str
) -> None:
    with pytest.raises(CommandError, match=message) as caught:
        replay(trace, gateway_with_rows, *options)
    assert "\n" not in str(caught.value)


@pytest.mark.django_db
def test_a_mistake_halfway_keeps_what_was_sent(trace: Path, gateway_with_rows: FakeGateway, capsys) -> None:
    trace.write_text(TRACE.replace("9000", "many"))
    replay(trace, gateway_with_rows)
    said = capsys.readouterr()
    assert json.loads(said.out)["done"] == 2
    assert "line 4, column ContextTokens: 'many' is not a number" in said.err
