"""When an endpoint changed, as the fleet shows it."""

import math

import numpy as np

from scheduling.control.views import Views
from scheduling.scaling.view import Stage
from tests.scheduling.scaling.views import view


class Fleet:
    """*shown*: the stage of each instance, and since when it is in the state that its row has."""

    shown = ()

    def stages(self):
        stages, since_s = zip(*self.shown, strict=True)
        return np.zeros(len(stages), np.int64), np.array(stages, np.int64), np.array(since_s)

    def loads(self):
        yield 0, view()


def test_an_instance_that_is_first_heard_from_now_was_not_added_now():
    fleet, now_s = Fleet(), [1000.0]
    views = Views(fleet, lambda: now_s[0], lambda: (None, None))
    views._use_now = lambda *_: (0.0, 0.0)
    changes = []
    for now_s[0], shown in (
        (1000.0, [(Stage.READY, 10.0), (Stage.AWAY, 20.0)]),  # a process takes over, before it hears from all
        (1001.0, [(Stage.READY, 10.0), (Stage.READY, 20.0)]),
        (1100.0, [(Stage.READY, 10.0), (Stage.READY, 20.0), (Stage.COMING, 1099.0)]),
        (1200.0, [(Stage.READY, 10.0), (Stage.DRAINING, 1150.0), (Stage.READY, 1110.0)]),
        (1300.0, [(Stage.READY, -math.inf), (Stage.DRAINING, 1150.0), (Stage.READY, 1110.0)]),
    ):
        fleet.shown = shown
        views()
        changes.append(views.changed(0))
    assert changes == [(1000.0, 0), (1000.0, 0), (1099.0, 1), (1150.0, -1), (1150.0, -1)]
