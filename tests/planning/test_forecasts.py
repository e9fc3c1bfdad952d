"""Forecasts from rows: one for each series, whatever fails."""

from datetime import timedelta
from types import SimpleNamespace

import pytest

from controlplane.events.models import Event
from controlplane.fleet.models import SloClass, SloKind
from controlplane.planning.forecasts import demand
from controlplane.planning.forecasts import services as forecasts
from controlplane.planning.models import Forecast, Quantity
from controlplane.tuning.services import change
from forecasting.workload import Fallback, load
from tests.planning.conftest import NOW, PLACE

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("minute_windows")]


class TestForecasts:
    def test_one_row_a_series_for_the_windows_to_come(self, make_minutes):
        make_minutes(40)
        rows = forecasts.make_forecasts(NOW)
        assert {(row.model, row.region, row.quantity) for row in rows} == {(*PLACE, "prompt"), (*PLACE, "output")}
        row = Forecast.objects.get(quantity="prompt", slo_class="")
        assert row.start_at == NOW.replace(second=0)
        assert (row.window_s, len(row.mean), row.made_at) == (60, 5, NOW)
        assert row.mean == [1000.0] * 5
        assert all(low <= mean <= high for low, mean, high in zip(row.lower_95, row.mean, row.upper_95, strict=True))

    def test_a_model_without_a_set_one_has_the_best_in_its_own_backtests(self, make_minutes, settings):
        settings.FORECASTER = ""
        make_minutes(40)
        forecasts.fit_forecasters(NOW)
        assert forecasts.forecaster_name(PLACE[0]) == "blend", "too little demand to judge"
        for number in range(12):  # steps, which the last value follows best
            make_minutes(10, prompt=(number % 3 + 1) * 60_000, until=NOW - timedelta(minutes=40 + 10 * number))
        forecasts.fit_forecasters(NOW)
        made = forecasts._chosen()[PLACE[0]]
        assert made["name"] == min(made["errors"], key=made["errors"].get)
        assert made["errors"].keys() >= {"seasonal_naive", "ets", "blend"}
        assert {row.forecaster for row in forecasts.make_forecasts(NOW)} == {made["name"]}
        settings.FORECASTER = "ets"
        assert forecasts.forecaster_name(PLACE[0]) == "ets", "a set one counts"

    def test_nothing_from_nothing(self, make_minutes):
        assert forecasts.make_forecasts(NOW) == []
        make_minutes(1)
        assert forecasts.make_forecasts(NOW) == []

    def test_a_fitted_forecaster_is_updated_with_new_windows(self, make_minutes, monkeypatch):
        make_minutes(40)
        forecasts.make_forecasts(NOW)
        fitted = []
        monkeypatch.setattr(forecasts._Learner, "_keep", lambda self, forecaster, how: fitted.append(how.windows))
        later = NOW + timedelta(minutes=3)
        make_minutes(3, prompt=120_000, until=later)
        rows = forecasts.make_forecasts(later)
        assert fitted == [40, 40]  # taken in, not fitted again
        assert rows[0].start_at == later.replace(second=0)

    def test_slow_forecasters_are_never_fitted_for_deferred_demand(self, make_minutes, settings):
        SloClass.objects.create(name="batch", title="Batch", kind=SloKind.NON_INTERACTIVE, deadline_s=3600)
        settings.FORECASTER = "arima"
        make_minutes(40)
        make_minutes(40, prompt=6_000, slo_class="batch")
        notes = {(row.slo_class, row.note) for row in forecasts.make_forecasts(NOW)}
        assert ("+", "arima is not fitted for deferred demand: blend stands in") in notes
        assert ("", "arima is not fitted yet: blend stands in") in notes

    def test_slow_forecasters_are_fitted_by_a_separate_job(self, make_minutes, settings):
        settings.FORECASTER = "arima"
        make_minutes(40)
        rows = forecasts.make_forecasts(NOW)
        assert {(row.forecaster, row.note) for row in rows} == {("blend", "arima is not fitted yet: blend stands in")}
        assert forecasts.fit_forecasters(NOW, requested_work_waits=lambda: True) == 0
        assert forecasts.fit_forecasters(NOW) == 2  # what plans follow: of all classes together
        assert forecasts.fit_forecasters(NOW) == 0
        made = {row.slo_class: row.forecaster for row in forecasts.make_forecasts(NOW)}
        assert made[""] == "arima"
        settings.FORECAST_REFIT_S = -1.0
        assert {row.forecaster for row in forecasts.make_forecasts(NOW) if not row.slo_class} == {
            "arima"
        }  # the old one
        assert forecasts.fit_forecasters(NOW) == 2
        settings.FORECASTER = "blend"
        assert forecasts.fit_forecasters(NOW) == 0

    def test_a_slow_one_that_cannot_be_read_is_fitted_again(self, make_minutes, settings):
        settings.FORECASTER = "arima"
        make_minutes(40)
        assert forecasts.fit_forecasters(NOW) == 2
        for file in (settings.STATE_DIR / "forecasters").rglob("*.npz"):
            file.write_bytes(b"not what it was")
        assert "stands in" in forecasts.make_forecasts(NOW)[0].note
        assert forecasts.fit_forecasters(NOW) == 2

    def test_a_broken_file_costs_a_fit(self, make_minutes, settings):
        make_minutes(40)
        forecasts.make_forecasts(NOW)
        for file in (settings.STATE_DIR / "forecasters").rglob("*.npz"):
            file.write_bytes(b"not what it was")
        assert len(forecasts.make_forecasts(NOW)) == 2

    def test_one_series_that_fails_costs_no_other(self, make_minutes, monkeypatch, caplog):
        make_minutes(40)
        real = forecasts._Learner.predict

        def predict(self, horizon):
            if "prompt" in self.series.name:
                raise ArithmeticError("no convergence")
            return real(self, horizon)

        monkeypatch.setattr(forecasts._Learner, "predict", predict)
        assert [row.quantity for row in forecasts.make_forecasts(NOW)] == ["output"]
        assert "no convergence" in caplog.text

    def test_interactive_and_deferred_demand_have_rows_and_files(self, make_minutes, settings):
        SloClass.objects.create(name="flexible", title="Flexible", kind=SloKind.NON_INTERACTIVE, deadline_s=3600)
        make_minutes(40)
        make_minutes(40, prompt=6_000, output=0, slo_class="flexible")
        forecasts.make_forecasts(NOW)
        rows = {(row.slo_class, row.quantity): row for row in Forecast.objects.all()}
        assert {key: row.mean[0] for key, row in rows.items()} == {
            ("", "prompt"): 1000.0,
            ("", "output"): 200.0,
            (demand.DEFERRED, "prompt"): 100.0,
        }
        assert {row.start_at for row in rows.values()} == {NOW.replace(second=0)}
        assert len(list((settings.STATE_DIR / "forecasters").rglob("*.npz"))) == 3

    def test_a_failed_forecaster_is_replaced_by_a_simpler_one_and_the_row_says_so(
        self, make_minutes, monkeypatch, settings, caplog
    ):
        from forecasting.workload.blend import BlendModel

        def fails(*_):
            raise IndexError("index 20 is out of bounds")

        settings.FORECASTER = "blend"
        monkeypatch.setattr(BlendModel, "fit", fails)
        make_minutes(20)
        for minute in range(3):
            now = NOW + timedelta(minutes=minute)
            rows = forecasts.make_forecasts(now)
            make_minutes(1, until=now + timedelta(minutes=1))
            assert {(row.slo_class, row.forecaster) for row in rows} == {("", "ets")}
            assert {row.note for row in rows} == {"blend failed (IndexError: index 20 is out of bounds): ets stands in"}
        # Once for all series and rounds: neither an event nor a traceback for each.
        event = Event.objects.get(kind="planning.forecaster_failed")
        assert event.severity == "warning"
        assert event.reason.startswith(
            "2 series are forecast by a simpler forecaster. llama-3.1-8b us-east prompt: Index"
        )
        assert caplog.text.count("Traceback") == 1
        # When it is fitted again, the forecaster itself is tried again.
        monkeypatch.undo()
        settings.FORECASTER, settings.FORECAST_REFIT_S = "blend", -1.0
        rows = forecasts.make_forecasts(NOW + timedelta(minutes=3))
        assert {(row.forecaster, row.note) for row in rows} == {("blend", "")}

    def test_refits_take_a_part_of_a_round_and_the_others_wait(self, make_minutes, monkeypatch, settings):
        make_minutes(40)
        forecasts.make_forecasts(NOW)
        settings.FORECAST_REFIT_S = -1.0
        fitted, real = [], Fallback.refit
        monkeypatch.setattr(Fallback, "refit", lambda self, series: fitted.append(series.name) or real(self, series))
        clock = iter(range(0, 100_000, int(forecasts.REFITS_SHARE * settings.FORECAST_EVERY_S) - 1))
        monkeypatch.setattr(forecasts, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        assert len(forecasts.make_forecasts(NOW)) == 2
        assert fitted == ["llama-3.1-8b us-east prompt"]

    def test_learned_errors_survive_a_fit(self, make_minutes, settings):
        settings.FORECASTER = "blend"
        make_minutes(40)
        forecasts.make_forecasts(NOW)
        name = forecasts._file((PLACE, Quantity.PROMPT, ""), 60, "blend").name
        (file,) = (settings.STATE_DIR / "forecasters").rglob(name)
        before = load(file).bands.written
        settings.FORECAST_REFIT_S = -1.0
        make_minutes(2, until=NOW + timedelta(minutes=2))
        forecasts.make_forecasts(NOW + timedelta(minutes=2))
        assert load(file).since_fit == 0
        assert load(file).bands.written == before + 2

    def test_a_model_may_override_the_forecaster(self, make_minutes, deployment):
        make_minutes(40)
        change("FORECASTER", "ets", "test", model=deployment.model)
        assert {row.forecaster for row in forecasts.make_forecasts(NOW)} == {"ets"}
