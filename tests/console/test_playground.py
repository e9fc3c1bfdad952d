"""The playground: who gets which key, and what is said about a request once the ledger has it."""

from datetime import timedelta

import pytest
from django.utils import timezone

from controlplane.accounts.models import ApiKey
from controlplane.usage.models import UsageHour
from tests.console.conftest import ledger_row

pytestmark = pytest.mark.django_db


def test_who_may_make_keys_gets_one_for_a_quarter_of_an_hour(client, operator, acme, deployment):
    client.force_login(operator)
    text = client.get("/playground/").content.decode()
    assert f'value="{deployment.model.name}"' in text
    assert 'value="acme"' in text
    assert 'name="secret"' not in text
    secrets = [client.post("/playground/key/", {"tenant": "acme"}).json()["key"] for _ in range(2)]
    old, new = ApiKey.objects.filter(tenant=acme).order_by("pk")
    assert secrets[1].startswith(new.prefix)
    assert (old.usable, new.usable, new.created_by) == (False, True, operator)
    assert timedelta(minutes=14) < new.expires_at - timezone.now() <= timedelta(minutes=15)


def test_others_paste_theirs(client, member, acme, deployment):
    client.force_login(member)
    assert 'name="secret" type="password" required' in client.get("/playground/").content.decode()
    assert client.post("/playground/key/", {"tenant": "acme"}).status_code == 404
    assert not ApiKey.objects.exists()


def test_the_decision_is_shown_once_the_ledger_has_the_request(client, operator, acme, make_instance):
    instance = make_instance()
    client.force_login(operator)
    address = "/playground/decision/?id=asked-1"
    assert client.get(address).status_code == client.get("/playground/decision/").status_code == 204
    values = {
        "predicted_output_tokens": 210,
        "output_tokens": 180,
        "prompt_tokens": 20,
        "queue_ms": 31.0,
        "ttft_ms": 412.0,
    }
    row = ledger_row(acme, request_id="asked-1", instance=instance.name, arrived_at=timezone.now(), **values)
    text = client.get(address).content.decode()
    said = (
        "210 tokens",
        "31 ms",
        "412 ms",
        "20 prompt, 180 output",
        instance.name,
        f"/requests/{row.pk}/",
        "not known before",
    )
    assert all(words in text for words in said)
    UsageHour.objects.create(
        hour=timezone.now(), tenant=acme, model=row.model, prompt_tokens=900, output_tokens=100, charged_usd=2.0
    )
    assert "$0.40" in client.get(address).content.decode()


def test_requests_of_other_tenants_are_not_found(client, member, globex):
    ledger_row(globex, request_id="theirs", arrived_at=timezone.now())
    client.force_login(member)
    assert client.get("/playground/decision/?id=theirs").status_code == 204
