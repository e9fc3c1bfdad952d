"""Settings in rows: which value is in force, what a wrong one is answered, and what a change leaves behind."""

import pytest
from django.core.exceptions import ValidationError

from controlplane.events.models import Event
from controlplane.fleet.models import Model
from controlplane.planning.execution import strategies
from controlplane.planning.models import ScalingPolicy
from controlplane.tunable import GROUPS, Tunable
from controlplane.tuning import selectors, services
from controlplane.tuning.models import Setting
from controlplane.tuning.selectors import tuned
from scheduling.scaling import FLOOR, STRATEGIES

pytestmark = pytest.mark.django_db


def test_every_setting_is_of_one_group():
    grouped = [name for group in GROUPS for name in group.model_fields]
    assert sorted(grouped) == sorted(Tunable.model_fields)
    assert [each.name for each in selectors.described()] == grouped


def test_defaults_are_those_of_the_library():
    declared = Tunable()
    assert strategies.floor(declared) == FLOOR
    for name in strategies.names():
        assert strategies.make(name, {}, declared) == STRATEGIES[name]()


def test_marks_are_those_of_the_model_unless_its_policy_says_otherwise(language_model):
    services.change("SCALE_OUT_ABOVE", 0.6, "test", model=language_model)
    given = strategies.make("lt_ua", {"in_below": 0.2}, tuned("llama-3.1-8b"))
    assert (given.out_above, given.in_below) == (0.6, 0.2)
    assert strategies.make("lt_ua", {"out_above": 0.8}, tuned("llama-3.1-8b")).out_above == 0.8
    assert strategies.make("pilothouse", {}, tuned("llama-3.1-8b")).out_above == 0.9
    assert strategies.pace("lt_u", tuned("llama-3.1-8b")).endswith("above 60%, and takes away only below 30%")


def test_a_mark_that_does_not_go_with_a_policy_is_refused(language_model):
    ScalingPolicy.objects.create(model=language_model, strategy="lt_u", parameters={"out_above": 0.4})
    with pytest.raises(ValidationError) as error:
        services.change("SCALE_IN_BELOW", 0.5, "test")
    (message,) = error.value.messages
    assert message.startswith("SCALE_IN_BELOW cannot be 0.5. llama-3.1-8b is scaled by ")
    assert message.endswith("in_below (0.5) must be at least 0 and below out_above (0.4).")
    services.change("SCALE_IN_BELOW", 0.35, "test")
    services.change("PLAN_EPSILON", 0.5, "test")
    policy = ScalingPolicy.objects.get()
    policy.parameters = {"out_above": 0.33}
    with pytest.raises(ValidationError, match="below out_above"):
        policy.full_clean()


def test_the_models_own_value_goes_first_then_that_of_all_then_the_default(language_model, settings):
    settings.SPILL_ABOVE = 0.6
    assert tuned().SPILL_ABOVE == tuned("llama-3.1-8b").SPILL_ABOVE == 0.6
    services.change("SPILL_ABOVE", 0.8, "test")
    assert tuned().SPILL_ABOVE == tuned("llama-3.1-8b").SPILL_ABOVE == 0.8
    services.change("SPILL_ABOVE", 0.9, "test", model=language_model)
    assert (tuned().SPILL_ABOVE, tuned("llama-3.1-8b").SPILL_ABOVE, tuned("another").SPILL_ABOVE) == (0.8, 0.9, 0.8)
    services.reset(Setting.objects.get(model=language_model), "test")
    services.reset(Setting.objects.get(model=None), "test")
    assert tuned().SPILL_ABOVE == tuned("llama-3.1-8b").SPILL_ABOVE == 0.6


def test_rows_are_read_once_a_second(monkeypatch, django_assert_num_queries):
    assert tuned().PLAN_EPSILON == 0.8
    Setting.objects.create(name="PLAN_EPSILON", value=0.5)  # by another process
    with django_assert_num_queries(0):
        assert tuned().PLAN_EPSILON == 0.8
    monkeypatch.setattr(selectors.latest, "_read_s", selectors.latest._read_s - selectors.FRESH_S)
    with django_assert_num_queries(1):
        assert tuned().PLAN_EPSILON == tuned("m").PLAN_EPSILON == 0.5


def test_a_change_is_an_event_with_before_and_after(operator, language_model):
    services.change("PLAN_EPSILON", 0.5, operator, "less spills")
    services.change("PLAN_EPSILON", 0.5, operator, "the same again")
    services.change("FORECASTER", "ets", operator, model=language_model)
    services.reset(Setting.objects.get(name="PLAN_EPSILON"), operator, "as it was")
    events = Event.objects.order_by("pk")
    assert [(event.kind, event.subject, event.before, event.after, event.reason) for event in events] == [
        ("setting.changed", "PLAN_EPSILON", {"PLAN_EPSILON": 0.8}, {"PLAN_EPSILON": 0.5}, "less spills"),
        ("setting.changed", "FORECASTER of llama-3.1-8b", {"FORECASTER": ""}, {"FORECASTER": "ets"}, ""),
        ("setting.changed", "PLAN_EPSILON", {"PLAN_EPSILON": 0.5}, {"PLAN_EPSILON": 0.8}, "as it was"),
    ]
    assert {event.user for event in events} == {operator}
    assert Setting.objects.get().changed_by == operator.get_username()


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("PLAN_EPSILON", 2, "PLAN_EPSILON cannot be 2. Input should be less than or equal to 1."),
        ("PLAN_EPSILON", 0, "PLAN_EPSILON cannot be 0. Input should be greater than 0."),
        ("PLAN_EPSILON", "much", "PLAN_EPSILON cannot be 'much'. Input should be a valid number"),
        ("PLAN_EPSILON", True, "valid number"),
        ("FORECAST_WINDOW_S", 90, "multiple of 60"),
        ("FLOOR", 1, "valid boolean"),
        ("FORECASTER", "crystal ball", "there is no such forecaster; there are seasonal_naive"),
        ("PLAN_DEMAND", "median", "'strategy', 'mean', 'upper_80' or 'upper_95'"),
        ("SCALE_OUT_ABOVE", 0.2, "must be above SCALE_IN_BELOW, 0.3"),
        ("SCALE_IN_BELOW", 0.8, "SCALE_OUT_ABOVE must be above SCALE_IN_BELOW, 0.8"),
        ("LOOKAHEAD_ITERATIONS", 4000, "less than or equal to 2048"),
        ("LOOKAHEAD_OVERLOAD_SHARE", 1.5, "less than or equal to 1"),
        ("NO_SUCH", 1, "There is no setting 'NO_SUCH'."),
    ],
)
def test_a_wrong_value_is_an_error_with_setting_value_and_limit(name, value, says):
    with pytest.raises(ValidationError) as error:
        services.change(name, value, "test")
    assert says in " ".join(error.value.messages)
    assert not Setting.objects.exists()
    assert not Event.objects.exists()


def test_a_value_for_all_must_go_with_those_of_each_model(language_model):
    services.change("SCALE_OUT_ABOVE", 0.5, "test", model=language_model)
    with pytest.raises(ValidationError, match=r"with the values of llama-3.1-8b. SCALE_OUT_ABOVE must be above"):
        services.change("SCALE_IN_BELOW", 0.6, "test")
    services.change("SCALE_IN_BELOW", 0.1, "test", model=language_model)
    services.change("SCALE_IN_BELOW", 0.6, "test")
    with pytest.raises(ValidationError, match="must be above"):
        services.reset(Setting.objects.get(name="SCALE_IN_BELOW", model=language_model), "test")
    assert tuned("llama-3.1-8b").SCALE_IN_BELOW == 0.1


def test_a_global_setting_cannot_be_overridden_per_model(language_model):
    with pytest.raises(ValidationError, match="PLAN_EVERY_S has one value for all models"):
        services.change("PLAN_EVERY_S", 60, "test", model=language_model)


def test_a_text_is_read_as_the_environments_are():
    assert services.change("FORECAST_WINDOW_S", "120", "test").value == 120
    assert services.change("LENGTHS", "off", "test").value is False


def test_a_row_that_an_older_release_left_is_not_read(language_model):
    Setting.objects.create(name="GONE", value=1)
    Setting.objects.create(name="PLAN_EVERY_S", value=1, model=language_model)
    assert selectors.read().rows == {}


def test_values_of_a_model_go_with_it(language_model):
    services.change("FORECASTER", "ets", "test", model=language_model)
    Model.objects.filter(pk=language_model.pk).delete()
    assert not Setting.objects.exists()
