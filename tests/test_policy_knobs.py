"""A knob of an endpoint's policy is declared once, and kernels number its values in that order."""

from scheduling.policy import GROUP_ORDERS, KNOBS, MEASURED, ORDERS, ROUTERS, SETTINGS
from scheduling.queueing import groups, ordering
from scheduling.routing import requests_ahead, routers


def test_arrays_hold_the_codes_of_the_kernels():
    assert list(ROUTERS) == sorted(routers.POLICY_CODES, key=lambda name: routers.POLICY_CODES[name])
    assert list(ORDERS) == sorted(ordering.ORDERINGS, key=lambda name: ordering.ORDERINGS[name])
    assert list(GROUP_ORDERS) == sorted(groups.GROUP_ORDERS, key=lambda name: groups.GROUP_ORDERS[name])
    assert requests_ahead.MEASURED == MEASURED


def test_a_value_out_of_range_is_refused_by_name():
    for name, declared in (*KNOBS.items(), *SETTINGS.items()):
        wrong = [declared.knob.ge - 1] if declared.knob.ge is not None else []
        wrong += [declared.knob.gt] if declared.knob.gt is not None else []
        wrong += [declared.knob.le + 1] if declared.knob.le is not None else []
        wrong += [float("nan")] if declared.type is float else []
        wrong += ["no such name"] if declared.knob.choices else []
        assert all(declared.problem(value) for value in wrong), name
        assert not declared.problem(declared.default), name
