"""The registry and the interface of experiments: names, settings, options of the command."""

from dataclasses import replace
from io import StringIO

import pytest
from django.core.management import CommandError, call_command

from controlplane.experiments.experiment import Option, figure
from controlplane.experiments.registry import EXPERIMENTS


def test_every_experiment_says_what_it_is():
    assert list(EXPERIMENTS) == [
        "sageserve", "sageserve-mixed", "preserve-scaling", "preserve-routing", "ssjf", "qlm", "hermes",
        "hermes-prewarming",
        "lengths",
        "lengths-shipped", "bursts", "promises", "sessions",
    ]  # fmt: skip
    for experiment in EXPERIMENTS.values():
        assert all((experiment.paper, experiment.section, experiment.measures, experiment.results))
        assert "seed" in experiment.settings({})
        assert all(option.help for option in experiment.options)


def test_settings_are_the_defaults_and_the_values_given():
    settings = EXPERIMENTS["sageserve"].settings({"days": 2.0, "strategies": "lt_ua,reactive", "demand": "plain"})
    assert settings["days"] == 2.0
    assert settings["scale"] == 1.0
    assert settings["strategies"] == ["reactive", "lt_ua"]  # in the order of the strategies
    assert settings["forecaster"] == "blend"
    assert EXPERIMENTS["preserve-scaling"].settings({})["forecaster"] == "mlstm"
    assert EXPERIMENTS["preserve-scaling"].settings({})["days"] == 1.0
    with pytest.raises(ValueError, match="--demand: 'all' is none of plain, bursts, both"):
        EXPERIMENTS["sageserve"].settings({"demand": "all"})


def test_an_option_of_another_experiment_is_refused():
    with pytest.raises(CommandError, match="unrecognized arguments: --demand"):
        call_command("reproduce", "ssjf", "--demand", "plain", stdout=StringIO())
    with pytest.raises(CommandError, match="invalid choice: 'nothing'"):
        call_command("reproduce", "nothing", stdout=StringIO())


@pytest.mark.parametrize(("value", "unit", "text"), [
    (-0.248, "change", "-24.8 %"), (3.6, "factor", "x 3.60"), (0.477, "share", "47.7 %"), (78.25, "tokens", "78.2"),
    (None, "change", "not measured"), (float("nan"), "change", "not measured"),
])  # fmt: skip
def test_figures_are_shown_by_unit(value, unit, text):
    assert figure(value, unit) == text


def test_bounds_of_an_option_are_named():
    option = Option("days", "days", 1.0, float, above=0.0, at_most=7.0)
    assert option.parse(7.0) == 7.0
    with pytest.raises(ValueError, match="--days must be above 0 and at most 7"):
        option.parse(float("nan"))


def test_seeds_are_averaged_by_an_experiment_that_runs_one():
    def run(settings, progress):
        seed = settings["seed"]
        rows = [{"system": "a", "met": seed / 10, "late_s": None if seed == 4 else float(seed)}]
        return {"rows": rows, "calls": seed, "series": [0] * seed}

    seeded = replace(EXPERIMENTS["sessions"], run=run)
    result = seeded.measure(seeded.settings({"seed": 4, "seeds": 3}), print)
    assert result["rows"] == [{"system": "a", "met": pytest.approx(0.5), "late_s": 5.5}]
    assert (result["calls"], result["series"], result["seed"], result["seeds"]) == (5, [0] * 4, 4, 3)
