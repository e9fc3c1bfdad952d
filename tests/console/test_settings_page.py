"""The settings page: values in force, changes and their authors, changing and resetting."""

import re

import pytest
from django.urls import reverse

from controlplane.console.pages.settings.views import FIRST
from controlplane.events.models import Event
from controlplane.tunable import GROUPS
from controlplane.tuning import services
from controlplane.tuning.selectors import tuned

pytestmark = pytest.mark.django_db
PAGE = "/settings/"


def html_of(client, **query):
    return client.get(PAGE, query).content.decode()


def shown(html):
    return re.findall(r'<tr id="([a-z0-9-]+)"', html)


def test_what_is_used_most_stands_first_and_search_finds_the_rest(reader):
    html = html_of(reader)
    assert shown(html) == [name.lower().replace("_", "-") for name in FIRST]
    assert "search finds the others" in html
    assert '<dialog id="change-' not in html
    assert shown(html_of(reader, q="window_s forecast"))[0] == "forecast-window-s"
    (row,) = re.findall(r'<tr id="forecast-window-s">.*?</tr>', html_of(reader, q="FORECAST_WINDOW_S"), re.S)
    assert "<strong>600</strong>" in row
    assert "at least 60, a multiple of 60" in row
    for group in GROUPS:
        names = {name.lower().replace("_", "-") for name in group.model_fields}
        assert set(shown(html_of(reader, group=group.__doc__))) == names
    assert "No setting fits." in html_of(reader, q="no such thing")


def test_an_operator_changes_a_value_and_sets_it_back(client, operator):
    client.force_login(operator)
    address = reverse("console:setting", args=["PLAN_EPSILON"])
    page = client.post(address, {"value": "0.5", "reason": "less spills"}, follow=True).content.decode()
    assert "PLAN_EPSILON is 0.5, within seconds and without a restart." in page
    assert '<tr id="plan-epsilon" class="chosen">' in page
    assert f"changed by {operator.get_username()}" in page
    assert shown(page)[0] == "plan-epsilon", "what is changed is first"
    assert tuned().PLAN_EPSILON == 0.5
    page = client.post(address, {"reset": "1", "reason": "enough"}, follow=True).content.decode()
    assert "has its default again" in page
    assert [event.reason for event in Event.objects.order_by("pk")] == ["less spills", "enough"]
    assert (
        "has its default already" in client.post(address, {"reset": "1", "reason": "x"}, follow=True).content.decode()
    )


def test_what_another_changed_meanwhile_is_said_before_it_is_overwritten(client, operator):
    client.force_login(operator)
    address = reverse("console:setting", args=["PLAN_EPSILON"])

    def saved(page, **values):
        drawn = re.search(r'action="/settings/PLAN_EPSILON/".*?name="drawn_after" value="(\d+)"', page, re.S)[1]
        form = {"drawn_after": drawn, "reason": "mine"} | values
        return client.post(address, form, follow=True).content.decode()

    first = html_of(client, q="PLAN_EPSILON")
    services.change("PLAN_EPSILON", 0.6, "alice")
    services.change("PLAN_EVERY_S", 1200.0, "bob")
    for values, said in (({"value": "0.5"}, "0.5"), ({"reset": "1"}, "its default")):
        again = saved(first, **values)
        assert "Nothing was saved: since this was read, alice changed PLAN_EPSILON from 0.8 to 0.6 at " in again
        assert f"; this form says {said}. Save again to overwrite that." in again
        assert tuned().PLAN_EPSILON == 0.6
    assert "PLAN_EPSILON is 0.5" in saved(again, value="0.5")
    both = f"{operator} changed PLAN_EPSILON from 0.8 to 0.5"
    assert both in saved(first, value="0.4"), "of a form drawn before two changes, the last one's author"


def test_the_values_of_one_model(acting, language_model):
    services.change("FORECASTER", "arima", "test")
    acting.post(
        reverse("console:setting", args=["FORECASTER"]),
        {"value": "ets", "model": language_model.name, "reason": "a test"},
    )
    html = html_of(acting, model=language_model.name)
    (row,) = re.findall(r'<tr id="forecaster" class="chosen">.*?</tr>', html, re.S)
    assert "<strong>ets</strong>" in row
    assert ">arima</td>" in row
    assert 'id="plan-every-s"' not in html
    assert f"?model={language_model.name}" in html_of(acting)


def test_switches_are_said_as_words(acting):
    acting.post(reverse("console:setting", args=["FLOOR"]), {"value": "off", "reason": "a test"})
    assert tuned().FLOOR is False
    assert "<strong>off</strong>" in html_of(acting)
