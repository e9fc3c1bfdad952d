"""`/api/settings`: what there is to tune, who may, and what a wrong value is answered."""

import pytest

from controlplane.tunable import Tunable
from controlplane.tuning.selectors import tuned

pytestmark = pytest.mark.django_db


def by_name(answer):
    return {item["name"]: item for item in answer.json()["items"]}


def test_every_setting_is_listed_with_unit_limits_and_purpose(sign_in):
    items = by_name(sign_in("viewer").get("settings"))
    assert set(items) == set(Tunable.model_fields)
    window = items["FORECAST_WINDOW_S"]
    assert (window["value"], window["default"], window["unit"], window["kind"]) == (600, 600, "s", "integer")
    assert (window["limits"], window["group"]) == ("at least 60, a multiple of 60", "Forecasts of demand")
    assert not window["changed"]
    assert items["PLAN_DEMAND"]["choices"] == ["strategy", "mean", "upper_80", "upper_95"]
    assert "blend" in items["FORECASTER"]["choices"]


def test_a_value_is_changed_and_set_back(sign_in, operator):
    caller = sign_in("operator")
    changed = caller.send("PUT", "settings/PLAN_EPSILON", {"value": 0.5, "reason": "less spills"}).json()
    assert (changed["value"], changed["default"], changed["changed"]) == (0.5, 0.8, True)
    assert changed["changed_by"] == operator.get_username()
    assert tuned().PLAN_EPSILON == 0.5
    for _ in range(2):
        back = caller.send("PUT", "settings/PLAN_EPSILON", {"value": None, "reason": "enough"}).json()
        assert (back["value"], back["changed"]) == (0.8, False)


def test_a_value_can_be_overridden_for_one_model(sign_in, language_model):
    caller = sign_in("operator")
    caller.send("PUT", "settings/FORECASTER", {"value": "arima"})
    body = {"value": "ets", "model": language_model.name}
    changed = caller.send("PUT", "settings/FORECASTER", body).json()
    assert (changed["value"], changed["default"], changed["model"]) == ("ets", "arima", language_model.name)
    items = by_name(caller.get("settings", model=language_model.name))
    assert "PLAN_EVERY_S" not in items
    assert items["FORECASTER"]["value"] == "ets"
    assert by_name(caller.get("settings"))["FORECASTER"]["value"] == "arima"
    caller.send("PUT", "settings/FORECASTER", {"value": None, "model": language_model.name})
    assert tuned(language_model.name).FORECASTER == "arima"


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("PLAN_EPSILON", {"value": 1.5}, 422, "PLAN_EPSILON cannot be 1.5. Input should be less than or equal to 1."),
        ("PLAN_EPSILON", {"value": 0.5, "model": "nobody"}, 404, "Not found, or no access."),
        ("NO_SUCH", {"value": 1}, 404, "Not found, or no access."),
        ("PLAN_EPSILON", {"valu": 1}, 422, "Field required"),
        ("PLAN_EVERY_S", {"value": 60, "model": "llama-3.1-8b"}, 422, "has one value for all models"),
    ],
)
def test_what_cannot_be_is_said(sign_in, language_model, path, body, status, says):
    answer = sign_in("operator").send("PUT", f"settings/{path}", body)
    assert answer.status_code == status
    assert says in answer.json()["error"]["message"]
