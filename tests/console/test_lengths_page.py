"""The Lengths page: figures without a script, filters, sorting, CSV, access, charts, and its empty state."""

import csv
import io
import re

import pytest
from django.urls import reverse

from controlplane.console.live import length_service
from controlplane.console.pages.lengths import tables
from controlplane.lengths import selectors, training
from controlplane.lengths.models import LengthMinute, LengthSample, LengthVersion
from controlplane.lengths.selectors import scope_of
from tests.console import length_rows
from tests.inventory import Inventory, standing_with


def build(inventory: Inventory) -> None:
    length_rows.minutes(inventory.now, 40, (inventory.acme.name, inventory.globex.name), each=4)
    length_rows.samples(inventory.now, 60, inventory.acme)
    length_rows.samples(inventory.now, 40, inventory.globex)
    length_rows.versions(inventory.now)


standing = standing_with(build)


@pytest.fixture
def now(inventory):
    return inventory.now


@pytest.fixture
def furnished(standing_clock):
    """Minutes, samples and versions."""
    return list(LengthVersion.objects.order_by("number"))


@pytest.fixture
def bare(inventory):
    """The first day."""
    for model in (LengthMinute, LengthSample, LengthVersion):
        model.objects.all().delete()


def url(name="lengths", *args) -> str:
    return reverse(f"console:{name}", args=args)


def page(reader, **query) -> str:
    answer = reader.get(url(), query)
    assert answer.status_code == 200
    return answer.content.decode()


def table(reader, **query) -> list[dict[str, str]]:
    answer = reader.get(url(), {**query, "format": "csv"})
    return list(csv.DictReader(io.StringIO(b"".join(answer.streaming_content).decode())))


def region(html: str, name: str) -> str:
    """The part of the page with that id, up to the next section."""
    return html.split(f'id="{name}"', 1)[1].split("</section>", 1)[0]


# The page


def test_everything_is_there_before_any_script(reader, furnished, live, fleet_feed):
    live.show(fleet_feed)
    html = page(reader)
    for words in (
        "By model and tenant",
        "Error over time",
        "Versions",
        "data-live ",
        "trees 2 predicts, trees 3 in shadow",
        "the caches hold 1,830 prompts",
    ):
        assert words in html, words
    assert html.count(" data-plot>") == 1
    assert "Predictions good enough: <strong" in html
    assert region(html, "lines").count('<th scope="row">') == 4
    assert region(html, "versions").count('<th scope="row">') == 4


def test_the_service_is_shown_as_the_gateway_reports_it(reader, bare, live, fleet_feed):
    html = page(reader)
    assert "No live numbers yet" in html
    summary = live.show(fleet_feed)
    html = page(reader)
    answered = sum(count for source, count in summary["lengths"]["answered"].items() if source != "forced")
    assert f'data-tile="answered"' in html  # noqa: F541
    row = length_service.row_of(summary["lengths"])
    assert row["answered"] == answered
    assert row["cache_ratio"] == pytest.approx(summary["lengths"]["answered"]["cache"] / answered)
    assert row["late_ratio"] == pytest.approx(summary["lengths"]["late"] / answered)
    assert 'data-fragment="lengths/answered"' in html
    own = html.partition('id="length-models"')[2].partition("</table>")[0]
    cells = re.findall(r"<t[dh][^>]*>([^<]*)", own.partition("preserve 4")[2])
    assert (cells[0], cells[2]) == ("a separate process", "86%")
    assert cells[3].endswith(" ms")
    assert length_service.model_of({"asked": 0})["in_time_ratio"] is None


@pytest.mark.parametrize(
    ("service", "coverage", "why"),
    [
        (None, None, []),
        ({"late_ratio": 0.05}, 0.88, []),
        ({"late_ratio": 0.13}, 0.9, ["13% of answers are late"]),
        ({}, 0.97, ["the 0.9 quantile holds 97% of lengths"]),
    ],
)
def test_one_line_says_whether_predictions_are_good_enough(service, coverage, why):
    assert length_service.doubts(service, coverage) == why


def test_the_first_day_says_what_is_missing_and_how_to_get_it(reader, bare):
    html = page(reader)
    assert "No request with a predicted length ended in the last 6 hours" in html
    assert "No version has been trained yet" in html
    assert url("requests") in html
    assert " data-plot>" not in html


def test_a_filter_without_rows_offers_the_way_back(reader, furnished, globex):
    LengthMinute.objects.filter(tenant="globex").delete()
    html = page(reader, tenant="globex", hours="1")
    assert "ended in the last hour of globex" in html
    assert ">Show all</a>" in html


# Filters, order, CSV


def test_filters_narrow_every_part_and_stay_in_the_address(reader, furnished, now):
    html = page(reader, model="llama-2-70b", tenant="acme", hours="1", sort="-mae_tokens")
    assert '<option value="llama-2-70b" selected>' in html
    assert '<option value="acme" selected>' in html
    assert '<option value="1" selected>' in html
    assert '<input type="hidden" name="sort" value="-mae_tokens">' in html
    assert region(html, "lines").count('<th scope="row">') == 1
    scope = scope_of(now, 1, "llama-2-70b", ["acme"])
    whole = selectors.total(selectors.by(scope, "model", "tenant").values())
    assert sum(int(row["Requests"]) for row in table(reader, model="llama-2-70b", tenant="acme", hours="1")) in (
        whole.requests,
        whole.requests + 4,  # the minute may have turned
    )
    mistyped = page(reader, model="nothing", tenant="nobody", hours="7", sort="-colour")
    assert region(mistyped, "lines").count('<th scope="row">') == 4


def test_the_files_hold_the_numbers_of_the_page(reader, furnished, now):
    rows = table(reader, sort="model")
    by_series = selectors.by(scope_of(now, 6), "model", "tenant")
    assert [(row["Model"], row["Tenant"]) for row in rows] == sorted(by_series)
    for row in rows:
        assert float(row["MAE (tokens)"]) == pytest.approx(by_series[row["Model"], row["Tenant"]].mae, rel=0.1)


# Access


def test_a_tenants_people_see_their_own_figures_only(client, member, furnished, live, fleet_feed):
    live.show(fleet_feed)
    client.force_login(member)
    html = page(client)
    assert "globex" not in html
    assert region(html, "lines").count('<th scope="row">') == 2
    for hidden in ("The length service now", 'id="versions"', "data-live", "Train now"):
        assert hidden not in html, hidden
    assert {row["Tenant"] for row in table(client, tenant="globex")} == {"acme"}
    assert "Version" not in table(client, table="versions")[0]
    charts = client.get(url(), {"charts": "trend", "tenant": "globex"})
    assert (charts.status_code, list(charts.json()["charts"])) == (200, ["trend"])
    assert f'href="{url()}" data-go="l"' in html


def test_queries_do_not_grow_with_rows(reader, furnished, django_assert_max_num_queries):
    with django_assert_max_num_queries(29):
        page(reader)


# Versions


def test_versions_show_how_they_fare_and_the_shadow_against_the_active_one(reader, furnished, now):
    scope = scope_of(now, 6)
    rows = tables.version_rows(selectors.by(scope, "predictor", shadows=True), scope)
    requests = {row.number: row.measured["requests"] for row in rows}
    assert requests[3] > requests[2] > 0  # it also predicts what caches answer
    assert requests[1] is requests[4] is None
    assert [row.number for row in rows if row.gain is not None] == [3]
    html = page(reader)
    assert "better</span>" in region(html, "versions")
    assert "Promote…" not in html
    (row,) = [row for row in table(reader, table="versions") if row["State"] == "shadow"]
    assert row["Held out: MAE (tokens)"] == "52.6"


def test_a_version_that_was_never_measured_still_shows(acting, bare):
    LengthVersion.objects.create(number=1, kind="trees")
    html = page(acting)
    assert region(html, "versions").count('<th scope="row">') == 1
    assert table(acting, table="versions")[0]["Held out: MAE (tokens)"] == ""


def test_training_is_asked_for(acting, furnished, monkeypatch, settings):
    settings.LENGTH_TRAIN_SAMPLES = 1_000
    answer = acting.post(url("train-lengths"), {"reason": "new prompts"}, follow=True)
    assert "There are 100 samples to learn from" in answer.content.decode()
    settings.LENGTH_TRAIN_SAMPLES = 50
    asked = []
    monkeypatch.setattr(training, "send_task", lambda task, *args, **kwargs: asked.append((task, *args)) or True)
    answer = acting.post(url("train-lengths"), {"reason": "new prompts"}, follow=True)
    assert "A worker trains a new version" in answer.content.decode()
    assert asked == [(training.TASK, "trees", "operator", "new prompts")]
    assert "50 more samples with text wanted" in acting.get(url("lengths")).content.decode(), "nobody keeps prompts"
    monkeypatch.setattr(training, "send_task", lambda *args, **kwargs: False)
    answer = acting.post(url("train-lengths"), {"reason": "new prompts"}, follow=True)
    assert "broker does not answer" in answer.content.decode()
