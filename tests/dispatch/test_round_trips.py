"""The dispatch round trip of an instance: what it takes beyond the time that its engine says."""

import pytest

from controlplane.dispatch.live_fleet.health import WINDOW_S, RoundTrip
from scheduling.fleet.arrays import allocate_fleet
from scheduling.routing.requests_ahead import ROUND_TRIP_S
from workers.vllm.metrics import VllmMetrics


class Measured:
    """One instance; every second *each_s* requests end that it held for *held_s*, its engine for *inside_s* of that."""

    def __init__(self):
        self.fleet, self.trip = allocate_fleet(1), RoundTrip()
        self.now_s = self.served = self.inside_s = 0.0

    def pass_time(self, seconds: int, each_s: int = 5, held_s: float = 1.3, inside_s: float = 1.1, of_others: int = 0):
        for _ in range(seconds):
            self.now_s += 1.0
            for _ in range(each_s):
                self.trip.request_ended(held_s)
            self.served += each_s + of_others
            self.inside_s += inside_s * (each_s + of_others)
            metrics = VllmMetrics(served_total=self.served, inside_s_total=self.inside_s)
            self.trip.heartbeat_came(self.fleet, 0, 0.004, metrics, self.now_s)

    @property
    def round_trip_s(self) -> float:
        return float(self.fleet.round_trips[0, ROUND_TRIP_S])


def test_what_an_instance_has_a_request_for_beyond_its_engine():
    measured = Measured()
    measured.pass_time(12)
    assert measured.round_trip_s == pytest.approx(0.2)
    measured.pass_time(30, held_s=1.15)
    assert measured.round_trip_s == pytest.approx(0.05)


def test_without_enough_requests_heartbeats_count_and_headers_before_them():
    measured = Measured()
    measured.pass_time(3, each_s=0)
    assert measured.round_trip_s == pytest.approx(0.004)
    measured.trip.headers_came(measured.fleet, 0, 0.084, measured.now_s)
    assert measured.round_trip_s == pytest.approx(0.014)
    measured.pass_time(int(WINDOW_S) - 1, each_s=0)
    assert measured.round_trip_s == pytest.approx(0.014)
    measured.pass_time(60, each_s=0)
    assert measured.round_trip_s == pytest.approx(0.004, rel=0.01)


def test_metrics_go_before_headers():
    measured = Measured()
    measured.pass_time(12)
    measured.trip.headers_came(measured.fleet, 0, 5.0, measured.now_s)
    assert measured.round_trip_s == pytest.approx(0.2)


def test_an_instance_that_others_use_as_well_is_not_measured_by_its_metrics():
    measured = Measured()
    measured.pass_time(20, of_others=5)
    assert measured.round_trip_s == pytest.approx(0.004)


def test_a_restart_starts_over():
    measured = Measured()
    measured.pass_time(12)
    measured.served = measured.inside_s = 0.0
    measured.pass_time(1)
    assert measured.round_trip_s == pytest.approx(0.2)
    measured.pass_time(5, held_s=1.2)
    assert measured.round_trip_s == pytest.approx(0.1)
