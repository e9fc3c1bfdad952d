"""Keys and budgets: what a new key's form says and takes, and budgets made, changed and removed beside the keys."""

import re

import pytest
from django.urls import reverse
from django.utils import timezone

from controlplane.accounts.models import Budget
from controlplane.accounts.services import create_api_key
from controlplane.events.models import Event

pytestmark = pytest.mark.django_db
URL = "/keys/"
REASON = {"reason": "a test"}


def text_of(client, **query) -> str:
    return client.get(URL, query).content.decode()


def panel(page: str) -> str:
    return page.partition('id="budgets"')[2]


@pytest.fixture
def key(acme):
    return create_api_key(acme, "shop window", "a test")[0]


@pytest.mark.parametrize(("spent", "words"), [(10.0, "Within its limits"), (60.0, "Warned"), (100.0, "Spent")])
def test_budgets_show_what_is_used(reader, acme, key, spent, words):
    usd = {"kind": "usd_per_month", "soft": 50.0, "hard": 100.0, "spent_usd": spent, "spent_until": timezone.now()}
    Budget.objects.create(tenant=acme, **usd)
    row = panel(text_of(reader)).partition("<tbody>")[2]
    assert f"${spent:,.2f}" in row.partition("$50.00")[0]
    assert words in row
    Budget.objects.create(tenant=acme, api_key=key, **usd)
    beside = text_of(reader).partition('id="budgets"')[0]
    assert re.search(rf"{spent:.0f}\s?% of \$100.00 a month", beside)
    assert panel(text_of(reader)).count('<th scope="row">') == 1


def test_admins_make_change_and_remove_a_budget(client, fleet_admin, key):
    client.force_login(fleet_admin)
    page = text_of(client, edit="new", api_key=key.pk)
    assert re.search(rf'value="{key.pk}" selected>shop window', page)
    for label in ("Warn at", "Stop at", "Limits"):
        assert f">{label}</label>" in page
    new = f"{URL}?edit=new&api_key={key.pk}&show=all"
    form = {"api_key": key.pk, "kind": "tokens_per_minute", "soft": "900", "hard": "500"} | REASON
    assert "It warns before it stops" in client.post(new, form).content.decode()
    assert client.post(new, form | {"soft": "400"})["Location"] == f"{URL}?show=all"
    budget = Budget.objects.get()
    assert (budget.tenant, budget.api_key, budget.soft, budget.hard) == (key.tenant, key, 400.0, 500.0)
    assert "500 tokens a minute" in text_of(client)
    client.post(f"{URL}?edit={budget.pk}", {"soft": "", "hard": "600"} | REASON)
    budget.refresh_from_db()
    assert (budget.soft, budget.hard) == (None, 600.0)
    client.post(f"{URL}?edit={budget.pk}", {"delete": "1"} | REASON)
    assert not Budget.objects.exists()
    events = Event.objects.filter(kind__startswith="budget.").order_by("pk")
    assert [(one.kind, one.reason) for one in events] == [
        ("budget.created", "a test"), ("budget.changed", "a test"), ("budget.deleted", "a test")
    ]  # fmt: skip


def test_a_key_is_made_with_its_budget_or_not_at_all(client, fleet_admin, acme):
    client.force_login(fleet_admin)
    form = {"name": "shop window", "tenant": acme.pk, "usd": "-5"}
    assert client.post(URL, form).status_code == 422
    assert not acme.api_keys.exists()
    assert "Give a finite number" in client.post(URL, form | {"usd": "nan"}).content.decode()
    assert client.post(URL, form | {"usd": "50"}).status_code == 200
    assert Budget.objects.get(api_key=acme.api_keys.get()).hard == 50.0


@pytest.mark.parametrize("days", ["0", "-1", "abc", "1.5", "3661", "9" * 40])
def test_what_is_no_number_of_days_makes_no_key_that_never_expires(client, fleet_admin, acme, days):
    client.force_login(fleet_admin)
    answer = client.post(URL, {"name": "short", "tenant": acme.pk, "days": days})
    assert (answer.status_code, acme.api_keys.count()) == (422, 0)
    assert "A key expires after 1 to 3,660 days" in answer.content.decode()


def test_who_may_give_no_budget_makes_no_key_without_the_one_asked_for(client, key_manager, acme):
    client.force_login(key_manager)
    assert client.post(URL, {"name": "small", "tenant": acme.pk, "usd": "5"}).status_code == 403
    assert not acme.api_keys.exists()


def test_others_see_budgets_and_change_none(client, key_manager, key, globex):
    Budget.objects.create(tenant=globex, kind="batch_lines", hard=7.0)
    own = Budget.objects.create(tenant=key.tenant, api_key=key, kind="batch_lines", hard=9.0)
    client.force_login(key_manager)
    page = text_of(client)
    assert "9 batch lines waiting" in page
    assert "edit=" not in page
    assert "Globex" not in page
    assert client.get(URL, {"edit": "new"}).status_code == 403
    assert client.post(f"{URL}?edit={own.pk}", {"hard": "1"} | REASON).status_code == 403


def test_what_a_service_key_needs_stands_at_the_field(client, operator, operations, acme, language_model):
    client.force_login(operator)
    page = text_of(client)
    help_ = re.search(r'id="access-help">([^<]+)<', page)[1]
    assert f"operates the fleet ({operations})" in help_
    assert "within 366 days" in help_
    assert f"<option>{language_model.name}</option>" in page
    given = {"name": "both", "tenant": acme.pk, "allowed_models": [language_model.name]}
    assert client.post(reverse("console:keys"), given).status_code == 200
    assert acme.api_keys.get().allowed_models == [language_model.name]
