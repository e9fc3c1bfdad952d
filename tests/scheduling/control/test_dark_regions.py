"""When a region is left as a whole, and how it is returned to."""

import pytest

from scheduling.control.dark_regions import (
    DOUBLED_S,
    FIRST_SHARE,
    FORGIVEN_S,
    LOOK_S,
    MAX_RETURN_S,
    RETURN_S,
    DarkRegions,
    Sight,
)

WELL, SILENT = Sight(10, 0), Sight(10, 10)


class Clock:
    """Looks at a fixed pace."""

    def __init__(self):
        self.rule, self.now_s = DarkRegions(), 0.0
        self.look(1, west=WELL, east=WELL)

    def look(self, times, **seen):
        """Return the changes of so many looks."""
        changed = {}
        for _ in range(times):
            self.now_s += LOOK_S
            changed |= self.rule.look(seen, self.now_s)
        return changed

    def until_returned(self, **seen):
        """Return the seconds of *seen* until west is returned to."""
        began_s = self.now_s
        while self.look(1, **seen).get("west") is not False:
            assert self.now_s - began_s < 2 * MAX_RETURN_S
        return self.now_s - began_s

    def leave(self):
        assert self.look(2, west=SILENT, east=WELL) == {"west": True}


@pytest.mark.parametrize(
    ("west", "east", "dark"),
    [
        (SILENT, WELL, True),
        (Sight(10, 9), WELL, True),
        (Sight(10, 8), WELL, False),  # some of its instances answer: the others are judged one by one
        (SILENT, SILENT, False),  # the gateway itself hears nothing
        (SILENT, Sight(0, 0), False),  # nobody else could serve
        (Sight(1, 1), WELL, False),  # one instance may hang
        (Sight(2, 2), Sight(1, 0), True),
    ],
)
def test_a_region_is_dark_when_nearly_all_of_it_is_silent_and_others_answer(west, east, dark):
    clock = Clock()
    assert clock.look(3, west=west, east=east) == ({"west": True} if dark else {})
    assert clock.rule.share("west", clock.now_s) == (0.0 if dark else 1.0)


def test_a_silence_that_one_look_saw_or_a_late_one_may_be_the_gateway_s_own():
    clock = Clock()
    assert not clock.look(1, west=SILENT, east=WELL)
    assert not clock.look(1, west=WELL, east=WELL)
    for _ in range(5):
        clock.now_s += 10 * LOOK_S
        assert not clock.look(1, west=SILENT, east=WELL)


def test_a_region_that_answers_is_returned_to_with_a_growing_share():
    clock = Clock()
    clock.leave()
    assert clock.until_returned(west=WELL, east=WELL) == pytest.approx(RETURN_S, abs=2 * LOOK_S)
    back_s = clock.now_s
    shares = [clock.rule.share("west", back_s + step * DOUBLED_S) for step in range(6)]
    assert shares == [min(1.0, FIRST_SHARE * 2**step) for step in range(6)]


def test_an_answer_in_between_starts_no_return():
    clock = Clock()
    clock.leave()
    for _ in range(10):
        assert not clock.look(round(RETURN_S / LOOK_S) - 1, west=WELL, east=WELL)
        assert not clock.look(1, west=SILENT, east=WELL)


def test_one_that_flaps_is_left_for_longer_each_time_up_to_a_bound_and_is_forgiven():
    clock, waits_s = Clock(), []
    for _ in range(10):
        clock.leave()
        waits_s.append(clock.until_returned(west=WELL, east=WELL))
    assert waits_s == pytest.approx([min(MAX_RETURN_S, RETURN_S * 2**n) for n in range(10)], abs=2 * LOOK_S)
    clock.now_s += FORGIVEN_S
    clock.look(1, west=WELL, east=WELL)
    clock.leave()
    assert clock.until_returned(west=WELL, east=WELL) == pytest.approx(RETURN_S, abs=2 * LOOK_S)


def test_one_without_instances_that_should_answer_is_returned_to():
    """They were stopped, or their hosts refuse connections, so that they failed one by one: new ones may start."""
    clock = Clock()
    clock.leave()
    assert clock.until_returned(east=WELL) == pytest.approx(RETURN_S, abs=2 * LOOK_S)


def test_the_next_owner_remembers_a_dark_region():
    clock = Clock()
    clock.rule.remember("west")
    assert not clock.look(30, west=SILENT, east=WELL)
    assert clock.rule.share("west", clock.now_s) == 0.0
    assert clock.until_returned(west=WELL, east=WELL) == pytest.approx(RETURN_S, abs=2 * LOOK_S)
