"""One rule for how an SLO class is kept, wherever it is shown."""

import pytest

from controlplane.fleet.attainment import Attainment, level_of, together, worst


def test_each_class_is_held_to_its_own_percentile():
    interactive, batch = Attainment("interactive", 882, 1000, 0.95), Attainment("batch", 2000, 2000, 0.99)
    assert worst([batch, interactive]) == interactive
    assert interactive.burn == pytest.approx(2.36)
    assert (interactive.below, interactive.level, interactive.budget_left) == (True, "critical", 0.0)
    assert (batch.below, batch.level, batch.burn, batch.budget_left) == (False, "", 0.0, 1.0)
    strict, lax = Attainment("strict", 985, 1000, 0.99), Attainment("lax", 900, 1000, 0.8)
    assert worst([lax, strict]) == strict  # 98.5 % is worse than 90.0 % where more was promised
    assert (strict.level, lax.level) == ("warning", "")
    assert lax.budget_left == pytest.approx(0.5)


@pytest.mark.parametrize(("met", "level"), [(950, ""), (949, "warning"), (900, "critical")])
def test_the_objective_itself_is_kept(met, level):
    assert Attainment("a", met, 1000, 0.95).level == level


def test_a_class_that_promises_all_has_a_finite_burn():
    assert Attainment("a", 999, 1000, 1.0).burn == pytest.approx(1.0)
    assert Attainment("a", 0, 10, 1.0).level == "critical"


def test_nothing_judged_is_no_verdict():
    none = Attainment("a", 0, 0, 0.95)
    assert (none.ratio, none.burn, none.budget_left, none.below, none.level) == (None, None, None, False, "")
    assert worst([none]) is None
    assert level_of(None, None, None) == ""


def test_endpoints_are_added_by_class():
    rows = [Attainment("a", 1, 2, 0.9), Attainment("b", 3, 3, 0.9), Attainment("a", 4, 4, 0.9)]
    assert together(rows) == {"a": Attainment("a", 5, 6, 0.9), "b": Attainment("b", 3, 3, 0.9)}
