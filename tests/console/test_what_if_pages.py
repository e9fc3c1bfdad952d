"""What-if pages: the form and its notes, the comparison of runs, and permissions."""

from datetime import timedelta

import pytest
from django.http import QueryDict
from django.urls import reverse
from django.utils import timezone

from controlplane.accounts.models import User
from controlplane.console.formats import MINUS
from controlplane.console.live import fragments, what_ifs
from controlplane.console.pages.what_if import building
from controlplane.console.pages.what_if.forms import asked
from controlplane.console.pages.what_if.rows import FAILURE, OF_ALL, OF_FLEET
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.fleet.models import Node
from controlplane.simulation.whatif import selectors, services
from controlplane.simulation.whatif.changes.applying import applied, in_words, parsed
from controlplane.simulation.whatif.models import FutureSeed, TwinError, WhatIf, WhatIfState
from controlplane.simulation.whatif.start import Start
from tests import database
from tests.simulation.whatif import rows

NEW = "/what-if/new"
NOW = rows.start()["scenario"]
DOUBLED = {"demand-edit": "factor", "demand-by": "2", "demand-region": "", "demand-model": ""}


@pytest.fixture
def begun(monkeypatch):
    """Every what-if begins with the small fleet."""
    start = Start.model_validate(rows.start() | {"remarks": ["4 of 4 instances reported"]})
    monkeypatch.setattr(building, "begun", lambda begin, horizon_s: start)
    return start


def run_two() -> None:
    """Two futures, two seeds, done."""
    operator = User.objects.get(username="operator")
    faster = {"name": "Reactive", "changes": [{"kind": "policy", "part": "strategy", "value": "reactive"}]}
    row = rows.draft(
        operator, faster, edits=[{"kind": "demand", "edit": "burst", "by": 2, "from_s": 60, "until_s": 300}]
    )
    rows.run_all(services.submit(row, operator))


@pytest.fixture
def ran(operator):
    database.write(run_two)
    return WhatIf.objects.get()


def page(client, user, path):
    client.force_login(user)
    answer = client.get(path)
    assert answer.status_code == 200, answer.content[:400]
    return answer.content.decode()


def entered(**fields):
    data = QueryDict(mutable=True)
    for name, value in fields.items():
        data.setlist(name.replace("_", "-"), value if isinstance(value, list) else [value])
    return data


def test_a_window_of_the_ledger_is_as_long_as_what_is_simulated(client, operator, deployment, make_request):
    def looked_at(**fields):
        return page(client, operator, f"{NEW}?{entered(start='ledger', **fields).urlencode()}")

    at = timezone.now().replace(second=0, microsecond=0)
    minute = "%Y-%m-%dT%H:%M"
    assert "The ledger has no request from" in looked_at()  # the last hour
    make_request(arrived_at=at - timedelta(minutes=20))
    assert f'name="since" value="{timezone.now() - timedelta(hours=1):{minute}}"' in looked_at()
    assert "Give since, before until." in looked_at(since="")
    window = {"since": f"{at - timedelta(minutes=30):{minute}}", "until": f"{at:{minute}}"}
    wanted = asked(entered(start="ledger", horizon="600", **window), NOW)
    assert (wanted.errors, wanted.horizon_s) == ({}, 1800.0)
    assert "crit-text" not in looked_at(**window)
    assert "crit-text" not in looked_at(since=window["since"])  # until a moment with a zone: now
    wrong = asked(entered(start="ledger", since="2026-01-01T00:00", until="2026-02-01T00:00"), NOW)
    assert "7 days" in wrong.errors["until"]
    assert "since" not in building.address_of(entered(start="fleet", **window), NOW)
    assert "since" in building.address_of(entered(start="ledger", **window), NOW)


@pytest.mark.django_db
def test_every_row_with_what_its_buttons_fill_in_is_a_change():
    for kind in (*OF_ALL, *OF_FLEET):
        for _, filled in kind.adds:
            row = {column.name: "" for column in kind.columns} | filled
            row |= {
                column.name: next((name for name, _ in column.choices(NOW) if name), "")
                for column in kind.columns
                if column.choices and not row[column.name]
            }
            if kind.name == "fallback":  # the first model is the model itself
                row["to"] = ""
            if kind.name == "bounds":
                row["least"] = "1"
            if kind.name == "slo":
                row["ttft"] = "200"
            if kind.name == "key":
                row["value"] = "0.5"
            assert parsed([kind.change(row)])


def test_a_form_is_a_request():
    data = entered(
        horizon="600", seeds="3", warmup="1", title="Twice", chosen="yes", preset=["qlm", "reactive"],
        custom_ordering="ssjf",
        demand_edit="burst", demand_by="2", demand_from="5", demand_until="8", demand_ramp="", demand_region="east",
    )  # fmt: skip
    data["gpus:east:g"], data["price:g"] = "4", "3"
    wanted = asked(data, NOW)
    assert wanted.errors == {}
    assert (wanted.horizon_s, wanted.warmup_s, wanted.seeds, wanted.title) == (600.0, 60.0, 3, "Twice")
    [edit] = wanted.edits
    assert edit == {
        "kind": "demand", "edit": "burst", "regions": ["east"], "by": 2.0, "from_s": 300.0, "until_s": 480.0,
    }  # fmt: skip
    assert [one["name"] for one in wanted.futures] == ["As now", "QLM", "Reactive", "Custom", "Other fleet"]
    assert {change["kind"] for change in wanted.futures[-1]["changes"]} == {"gpus", "price"}
    data["fleet-for"] = "all"
    assert [one["name"] for one in asked(data, NOW).futures] == ["As now", "QLM", "Reactive", "Custom"]
    assert {"gpus", "price"} < {change["kind"] for change in asked(data, NOW).edits}


def test_a_spot_price_a_deadline_and_a_daily_swing_are_asked():
    tenant = {
        "tenant_tenant": "new",
        "tenant_model": "m",
        "tenant_class": "chat",
        "tenant_rate": "2",
        "tenant_region": "",
    }
    data = entered(
        **tenant, tenant_prompt="300", tenant_output="150", tenant_swing="40", tenant_peak="6",
        slo_class="chat", slo_ttft="", slo_deadline="90", chosen="yes",
    )  # fmt: skip
    data["price:g"], data["spot:g"] = f"{NOW['gpus']['g']['usd_per_hour']:g}", "0.25"
    wanted = asked(data, NOW)
    assert wanted.errors == {}
    [change] = parsed(wanted.edits)
    assert (change.client.daily_swing, change.client.peak_h) == (0.4, 6.0)
    price, slo = parsed(wanted.futures[-1]["changes"])
    assert (price.usd_per_hour, price.spot_usd_per_hour) == (NOW["gpus"]["g"]["usd_per_hour"], 0.25)
    assert price.words(NOW) == "g spot $0.00 to $0.25 an hour"
    assert slo.deadline_s == 90.0
    data["spot:g"] = "0"
    assert [change["kind"] for change in asked(data, NOW).futures[-1]["changes"]] == ["slo"]


def test_runs_of_applications_are_asked():
    fields = {"suite": "mix", "model": "m", "class": "chat", "region": "", "rate": "60", "cv": "3", "due": "1.5"}
    data = entered(**{f"application_{name}": value for name, value in fields.items()}, chosen="yes")
    wanted = asked(data, NOW)
    assert wanted.errors == {}
    [change] = parsed(wanted.edits)
    assert change.words(NOW) == "60 runs an hour of the application mix on m"
    assert (change.application.cv, change.application.deadline_factor) == (3.0, [1.5])
    data["application-rate"] = "many"
    assert "no number" in asked(data, NOW).errors["Applications 1, Rate"]


def test_edits_of_the_fleet_join_a_future():
    """They are a separate future, with the policies of a preset if one is chosen, or those of the custom future."""

    def futures(**fields):
        data = entered(chosen="yes", preset=["qlm"], **fields)
        data["gpus:east:g"] = "9"
        wanted = asked(data, NOW)
        return {one["name"]: [change["kind"] for change in one["changes"]] for one in wanted.futures}, wanted

    plain = {"As now": [], "QLM": ["policy"]}
    assert futures()[0] == plain | {"Other fleet": ["gpus"]}
    made, wanted = futures(fleet_for="qlm")
    assert made == plain | {"QLM, other fleet": ["policy", "gpus"]}
    assert parsed(wanted.futures[-1]["changes"])[0].value == "qlm"
    assert futures(fleet_for="qlm", fleet_name="Eight more")[0] == plain | {"Eight more": ["policy", "gpus"]}
    made, _ = futures(fleet_for="custom", custom_ordering="ssjf", custom_routing="round_robin")
    assert made == plain | {"Custom": ["policy", "policy", "gpus"]}
    made, wanted = futures(fleet_for="custom")
    assert made == plain
    assert "there is no custom future" in wanted.errors["Applies to"]


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"seeds": "many"}, "seeds"),
        ({"seeds": "0"}, "seeds"),
        ({"horizon": "1"}, "horizon"),
        ({"demand_edit": "factor", "demand_by": "x"}, "Demand 1, By"),
        ({"price:g": "x"}, "price:g"),
    ],
)
def test_what_is_wrong_is_named(fields, where):
    assert where in asked(entered(**fields), NOW).errors


@pytest.mark.django_db
def test_a_node_is_lost_with_its_instances(client, operator, make_instance):
    first, other = make_instance(), make_instance()
    node = Node.objects.create(
        name="gpu-7", region=first.deployment.region, gpu_type=first.deployment.gpu_type, gpu_count=8
    )
    for instance in (first, other):
        instance.node = node
        instance.save()
    now = selectors.present_scenario()
    fields = {"failure_what": "node", "failure_node": "gpu-7", "failure_at": "10", "failure_for": "5"}
    wanted = asked(entered(**fields), now)
    assert not wanted.errors
    [change] = wanted.futures[-1]["changes"]
    ready = [f"{first.deployment.model.name}-us-east-{number}" for number in (1, 2)]
    assert change["instances"][:2] == ready
    assert len(change["instances"]) == 3  # and the empty place on its free GPUs
    [words] = in_words(now, parsed([change]))
    model = first.deployment.model.name
    assert words.startswith("node gpu-7 in ")
    assert words.endswith(f"is lost with 2 instances of {model} after 10 min, back 5 min later")
    failures = applied(now, parsed([change]), asks=False).scenario.failures
    assert [one.instance for one in failures] == change["instances"]
    assert f"gpu-7: 2 {model}" in dict(FAILURE.columns[2].choices(now)).values()
    wrong = asked(entered(**fields | {"failure_node": "gpu-8"}), now)
    assert wrong.errors == {"Failures, Node": "gpu-8 has no instance that is ready: nothing is lost with it"}
    # By REST and command it is named alone.
    lost = {"kind": "failure", "what": "node", "node": "gpu-7", "at_s": 600.0}
    start = {"kind": "synthetic", "at": timezone.now().isoformat(), "scenario": now}
    row = services.save_draft(None, {"start": start, "edits": [lost]}, [{"name": "B", "changes": [lost]}], operator)
    assert row.edits[0]["instances"] == row.futures.get(letter="B").changes[0]["instances"] == change["instances"]
    row = services.save_draft(None, {"start": start, "edits": [lost | {"node": "gpu-8"}]}, [], operator)
    assert services.check(row)["edits[0]"] == "node gpu-8 has no instance that is ready: nothing is lost with it"


def test_the_form_says_what_it_asks_for(client, operator, begun):
    text = page(client, operator, f"{NEW}?chosen=yes&preset=qlm&seeds=4&demand-edit=factor&demand-by=2")
    assert '<option value="qlm" selected>QLM</option>' in page(client, operator, f"{NEW}?fleet-for=qlm")
    assert '<option value="900" selected>15 min</option>' in page(client, operator, f"{NEW}?horizon=900")
    assert "2x demand" in text
    assert "8 (2 futures" in text
    assert "4 of 4 instances reported" in text
    assert "policy to QLM" in text
    assert "Run 2 futures" in text


def test_gpus_are_those_that_are_fitted(client, operator, make_instance, monkeypatch):
    """Fewer than the bounds allow."""
    place = make_instance().deployment
    place.max_instances = 60
    place.save()
    Node.objects.create(name="gpu-7", region=place.region, gpu_type=place.gpu_type, gpu_count=8)
    fitted = sum(Node.objects.filter(region=place.region, gpu_type=place.gpu_type).values_list("gpu_count", flat=True))
    start = Start.model_validate(rows.start() | {"scenario": selectors.present_scenario()})
    monkeypatch.setattr(building, "begun", lambda begin, horizon_s: start)
    text = page(client, operator, NEW)
    cell = f'name="gpus:{place.region.name}:{place.gpu_type.name}" type="number" min="0" step="1" value="{fitted}"'
    assert cell in text


@pytest.mark.django_db
def test_a_fleet_that_cannot_be_forked_is_said_so(client, operator, monkeypatch):
    def refuse(begin, horizon_s):
        raise ActionError("No gateway answers.")

    monkeypatch.setattr(building, "begun", refuse)
    text = page(client, operator, NEW)
    assert "No gateway answers." in text
    assert "disabled" in text


@pytest.mark.django_db
def test_running_it_makes_a_what_if_that_can_be_edited_again(client, operator, begun):
    client.force_login(operator)
    answer = client.post(NEW, {"seeds": "2", "horizon": "600", "chosen": "yes", "preset": "qlm", **DOUBLED})
    row = WhatIf.objects.get()
    assert answer["Location"] == reverse("console:what-if", args=[row.pk])
    assert row.title == "What if … 2x demand"
    assert (row.state, row.seeds, row.requested_by) == (WhatIfState.QUEUED, 2, operator)
    assert row.edits == [{"kind": "demand", "edit": "factor", "by": 2.0}]
    assert "demand-by=2" in row.asked
    assert "demand-by" in page(client, operator, row.asked)


@pytest.mark.django_db
def test_a_wrong_form_is_refused_and_nothing_is_lost(acting, begun):
    answer = acting.post(NEW, {"seeds": "0", "title": "My question", **DOUBLED})
    assert answer.status_code == 422
    text = answer.content.decode()
    assert "0 is not between 1 and 20" in text.replace("&#x27;", "'")
    assert "My question" in text
    assert not WhatIf.objects.exists()


@pytest.mark.django_db
def test_a_viewer_reads_and_runs_nothing(client, begun, ran, viewer):
    assert "Operators run what-ifs." in page(client, viewer, NEW)
    client.post(NEW, {"seeds": "1"})
    assert WhatIf.objects.count() == 1
    text = page(client, viewer, f"/what-if/{ran.pk}/")
    assert "Make this the plan" not in text
    assert client.post(f"/what-if/{ran.pk}/cancel/").status_code == 403


@pytest.mark.django_db
def test_the_comparison_has_every_future_with_its_verdict(client, operator, ran):
    ran.futures.filter(letter="B").update(first_difference="First differs at 3.0 min.")
    text = page(client, operator, f"/what-if/{ran.pk}/?future=B")
    assert ran.state == WhatIfState.DONE
    for words in (
        "strategy to Reactive",
        "2x demand from 1 min to 5 min",
        "Cost against SLO met",
        "TTFT p95 of",
    ):
        assert words in text
    assert text.count('data-state="done"') == 2
    assert 'value="B" aria-label="B Reactive" checked' in text
    assert "Only a what-if that began from the live fleet can become a plan." in text
    assert "First differs at 3.0 min." in text
    assert 'aria-current="true">Edited time only' in page(client, operator, f"/what-if/{ran.pk}/?scope=all, edited")


def test_runs_of_applications_are_shown_where_there_are_any(client, operator, ran):
    address = f"/what-if/{ran.pk}/"
    assert "Application runs" not in page(client, operator, address)
    for run in FutureSeed.objects.filter(future__what_if=ran, future__letter="B"):
        times = {"mean_s": 10.0 + run.seed, "p50_s": 9.0, "p95_s": 30.0}
        run.result["runs"] = {"CG": {"runs": 20, "ended": 19, "abandoned": 1, "due": 10, "in_time": 4, **times}}
        run.save()
    ((one, row, met),) = client.get(address).context["runs"]
    assert (one["letter"], row["application"], row["mean_s"], met) == ("B", "CG", 11.5, 0.4)
    text = page(client, operator, address)
    assert all(words in text for words in ("Application runs", "11.5 s", "40%"))
    futures = client.get(f"/api/what-ifs/{ran.pk}/comparison").json()["futures"]
    assert futures[0]["runs"] is None
    assert futures[1]["runs"][0]["abandoned"] == 1


@pytest.mark.django_db
def test_its_files(acting, ran):

    def csv(table):
        answer = acting.get(f"/what-if/{ran.pk}/?format=csv&table={table}")
        return b"".join(answer.streaming_content).decode().splitlines()

    assert len(csv("futures")) == 3
    assert len(csv("what-if-cost")) == 3
    assert len(csv("what-if-latency")) > 10


@pytest.mark.django_db
def test_cancel_resume_and_more_seeds(acting, begun):
    acting.post(NEW, {"seeds": "2", "chosen": "yes", "preset": "qlm", "horizon": "600"})
    row = WhatIf.objects.get()
    for action, fields, state in (
        ("cancel", {"future": "B"}, "queued"),
        ("cancel", {}, "cancelled"),
        ("resume", {}, "queued"),
        ("add-seeds", {"count": "1"}, "queued"),
    ):
        acting.post(f"/what-if/{row.pk}/{action}/", fields)
        row.refresh_from_db()
        assert row.state == state, action
    assert row.seeds == 3
    text = acting.post(f"/what-if/{row.pk}/nothing/", follow=True).content.decode()
    assert "There is no action" in text


@pytest.mark.django_db
def test_the_list_names_them_and_an_empty_one_asks(client, operator, viewer):
    assert "No what-if yet." in page(client, operator, "/what-if/")
    assert "New what-if" not in page(client, viewer, "/what-if/")


def test_the_list_shows_the_twin_error(acting):
    empty = acting.get("/what-if/").content.decode()
    assert "No window is judged yet." in empty
    now = timezone.now()
    measured = {"ttft_p50": 100.0, "ttft_p95": 400.0, "itl_p50": 20.0, "itl_p95": 30.0, "slo_met": 0.99}
    simulated = {**measured, "ttft_p95": 380.0, "slo_met": 0.98}
    TwinError.objects.create(
        model="m", gpu="2 x h100", from_at=now, to_at=now, requests=77, measured=measured, simulated=simulated
    )
    shown = acting.get("/what-if/").content.decode()
    assert f"{MINUS}5%" in shown
    assert f"{MINUS}1.0 pt" in shown
    rows = acting.get("/api/twin-errors").json()["items"]
    assert rows[0]["last"]["ttft_p95"] == pytest.approx(-0.05)
    assert (rows[0]["gpu"], rows[0]["windows"], rows[0]["requests"]) == ("2 x h100", 1, 77)


def test_the_page_says_what_it_has_drawn_and_lines_of_futures_are_kept_fresh(acting, ran, live):
    marks = set()
    for state in (WhatIfState.DONE, WhatIfState.FAILED):
        error = "no instance fits" if state == WhatIfState.FAILED else ""
        FutureSeed.objects.filter(future__letter="B", seed=1).update(state=state, error=error)
        mark = fragments.drawn_of(live.feed.latest(), f"what-if:{ran.pk}")
        text = acting.get(f"/what-if/{ran.pk}/").content.decode()
        assert mark in text
        assert ("Done, 1 of 2 futures failed" in text) == ("failed: Seed 1: no instance fits" in text) == bool(error)
        marks.add(mark)
    assert len(marks) == 2
    html = what_ifs.html(what_ifs.read(ran.pk) | {"state": "running"})
    assert set(html) == {"what-if", *(f"future/{future.letter}" for future in ran.futures.all())}
