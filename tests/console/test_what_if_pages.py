"""What-if pages: the form and its notes, the comparison of runs, and permissions."""

import re
from datetime import timedelta
from urllib.parse import parse_qsl

import pytest
from django.http import QueryDict
from django.urls import reverse
from django.utils import timezone

from controlplane.accounts.models import User
from controlplane.console.formats import MINUS
from controlplane.console.live import fragments, what_ifs
from controlplane.console.pages.what_if import building
from controlplane.console.pages.what_if.forms import asked
from controlplane.console.pages.what_if.rows import FAILURE, FLEET, SCENARIO
from controlplane.fleet.lifecycle.states import ActionError
from controlplane.fleet.models import Node
from controlplane.simulation.whatif import selectors, services
from controlplane.simulation.whatif.changes.applying import applied, in_words, parsed
from controlplane.simulation.whatif.changes.questions import QUESTIONS
from controlplane.simulation.whatif.models import FutureSeed, TwinError, WhatIf, WhatIfState
from controlplane.simulation.whatif.start import Start
from controlplane.simulation.whatif.starts import nodes
from tests import database
from tests.simulation.whatif import rows

pytestmark = pytest.mark.django_db
NEW = "/what-if/new"
NOW = rows.start()["scenario"]
DOUBLED = {"demand-edit": "factor", "demand-by": "2", "demand-regions": "", "demand-models": ""}


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
        data.setlist(name, value if isinstance(value, list) else [value])
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
    assert (wanted.errors, wanted.values["horizon_s"]) == ({}, 1800.0)
    assert "crit-text" not in looked_at(**window)
    assert "crit-text" not in looked_at(since=window["since"])  # until a moment with a zone: now
    wrong = asked(entered(start="ledger", since="2026-01-01T00:00", until="2026-02-01T00:00"), NOW)
    assert "7 days" in wrong.errors["until"]
    assert "since" not in building.address_of(entered(start="fleet", **window))
    assert "since" in building.address_of(entered(start="ledger", **window))


NEEDS = {
    "bounds": {"min_instances": "1"}, "slo": {"ttft_ms": "200"}, "gpus": {"count": "4"}, "policy": {"value": "round_robin"},
    "failure": {"region": "east", "node": "n"},
}  # fmt: skip


@pytest.mark.parametrize("kind", [*SCENARIO, *FLEET], ids=lambda kind: kind.name)
def test_every_row_with_what_its_buttons_fill_in_is_a_change(kind, monkeypatch):
    node = nodes.NodeOf("n", "east", ["m-east-1"])
    monkeypatch.setattr(nodes, "nodes_of", lambda values: {"n": node})
    for _, filled in kind.adds:
        row = {
            column.name: next((name for name, _ in column.choices(NOW) or () if name), "") if column.is_required else ""
            for column in kind.columns
        }
        assert parsed([kind.change(row | NEEDS.get(kind.name, {}) | filled, NOW)])


@pytest.mark.parametrize(
    ("kind", "row", "change"),
    [
        (
            "demand",
            {"edit": "burst", "by": "2,5", "from_s": "300", "until_s": "480", "ramp_s": "", "regions": "east"},
            {"edit": "burst", "by": 2.5, "from_s": 300.0, "until_s": 480.0, "regions": ["east"]},
        ),
        ("slo", {"slo_class": "chat", "ttft_ms": "", "deadline_s": "90"}, {"slo_class": "chat", "deadline_s": 90.0}),
        ("bounds", {"model": "m", "max_instances": "3"}, {"model": "m", "max_instances": 3}),
    ],
)
def test_a_row_is_a_change(kind, row, change):
    of = next(each for each in (*SCENARIO, *FLEET) if each.name == kind)
    assert of.change(row, NOW) == {"kind": kind, **change}


GPUS = {"gpus-region": "east", "gpus-gpu": "g", "gpus-count": "4"}


def test_a_form_is_a_request():
    wanted = asked(
        entered(
            horizon="600", seeds="3", warmup="1", title="Twice", chosen="yes", preset=["qlm", "pilothouse"],
            **{"demand-edit": "factor", "demand-by": "2"}, **GPUS,
        ),
        NOW,
    )  # fmt: skip
    assert wanted.errors == {}
    twice = {"kind": "demand", "edit": "factor", "by": 2.0}
    values = {"horizon_s": 600.0, "warmup_s": 60.0, "seeds": 3, "title": "Twice", "edits": [twice]}
    assert wanted.values == values
    names = [one["name"] for one in wanted.futures]
    assert names == ["As now", "QLM", "Pilothouse", "g 2 to 4 in East"]


LOST = {"failure-what": "region", "failure-region": "east", "failure-at_s": "60", "failure-for_s": "300"}
GONE = "East is lost after 1 min, back 5 min later"


@pytest.mark.parametrize(
    ("fields", "futures", "edits"),
    [
        ({}, {"QLM": ["policy"], "g 2 to 4 in East": ["gpus"]}, ["demand", "failure"]),
        (
            {"beside": "yes"},
            {
                f"2x demand; {GONE}": ["demand", "failure"],
                f"QLM with 2x demand; {GONE}": ["demand", "failure", "policy"],
                f"g 2 to 4 in East with 2x demand; {GONE}"[:80]: ["demand", "failure", "gpus"],
            },
            [],
        ),
    ],
)
def test_what_happens_is_in_all_futures_or_in_all_but_a_and_their_names_say_so(fields, futures, edits):
    wanted = asked(entered(chosen="yes", preset=["qlm"], **fields, **DOUBLED, **LOST, **GPUS), NOW)
    made = {one["name"]: [change["kind"] for change in one["changes"]] for one in wanted.futures}
    assert made == {"As now": [], **futures}
    assert [edit["kind"] for edit in wanted.values["edits"]] == edits


TENANT = """
[begin]
kind = "ledger"
since = "2026-01-01T00:00:00Z"
until = "2026-01-01T02:00:00Z"
[[edits]]
kind = "price"
gpu = "g"
usd_per_hour = 3.0
[[futures]]
preset = "fcfs-jsq"
[[futures]]
name = "Slow"
changes = [{kind = "key", path = "planner.epsilon", value = 0.9}]
"""


def test_the_rest_is_a_file_as_rest_takes_it():
    wanted = asked(entered(chosen="yes", advanced=TENANT), NOW)
    assert wanted.errors == {}
    assert (wanted.begin["kind"], wanted.values["horizon_s"]) == ("ledger", 7200.0)
    assert [edit["kind"] for edit in wanted.values["edits"]] == ["price"]
    assert [one["name"] for one in wanted.futures] == ["As now", "FCFS and JSQ", "Slow"]
    again = asked(
        entered(chosen="yes", advanced='{"edits": [{"kind": "price", "gpu": "g", "usd_per_hour": 3.0}]}'), NOW
    )
    assert again.values["edits"] == wanted.values["edits"]


@pytest.mark.parametrize(
    ("fields", "where", "what"),
    [
        ({"seeds": "many"}, "seeds", "whole number"),
        ({"seeds": "0"}, "seeds", "greater than or equal to 1"),
        ({"horizon": "1"}, "horizon", "greater than or equal to 60"),
        ({"demand-edit": "factor", "demand-by": "x"}, "Demand 1, Times", "valid number"),
        ({"demand-edit": "burst", "demand-by": "2"}, "Demand 1", "until_s is missing"),
        ({"advanced": "edits = 3"}, "Advanced, edits", "valid list"),
        ({"advanced": "{"}, "Advanced", "neither TOML nor JSON"),
        ({"advanced": "hope = 1"}, "Advanced, hope", "not permitted"),
        ({"advanced": "[[futures]]\npreset = 'hope'"}, "Advanced", "There is no preset 'hope'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(fields, where, what):
    assert what in asked(entered(**fields), NOW).errors[where]


def test_columns_of_several_rows_stay_together_in_the_address():
    data = entered(**{"demand-edit": ["factor", "burst"], "demand-by": ["2", "3"], "demand-until_s": ["", "60"]})
    again = QueryDict(building.address_of(data))
    assert asked(again, NOW).scenario == asked(data, NOW).scenario
    assert len(asked(data, NOW).scenario) == 2


def test_a_node_is_lost_with_its_instances(client, operator, make_instance):
    first, other = make_instance(), make_instance()
    node = Node.objects.create(
        name="gpu-7", region=first.deployment.region, gpu_type=first.deployment.gpu_type, gpu_count=8
    )
    for instance in (first, other):
        instance.node = node
        instance.save()
    now = selectors.present_scenario()
    fields = {"failure-what": "node", "failure-node": "gpu-7", "failure-at_s": "600", "failure-for_s": "300"}
    wanted = asked(entered(**fields), now)
    assert not wanted.errors
    [change] = wanted.futures[-1]["changes"]
    ready = [f"{first.deployment.model.name}-us-east-{number}" for number in (1, 2)]
    assert change["instances"][:2] == ready
    assert len(change["instances"]) == 3  # and the empty place on its free GPUs
    [words] = in_words(now, parsed([change]))
    model = first.deployment.model.name
    assert words.startswith("node gpu-7 in ")
    assert words.endswith("is lost with its 3 places after 10 min, back 5 min later")
    failures = applied(now, parsed([change]), asks=False).scenario.failures
    assert [one.instance for one in failures] == change["instances"]
    assert f"gpu-7: 2 {model}" in dict(FAILURE.columns[2].choices(now)).values()
    wrong = asked(entered(**fields | {"failure-node": "gpu-8"}), now)
    assert wrong.errors == {"Failures 1": "node gpu-8 has no instance that is ready: nothing is lost with it"}
    # By REST and command it is named alone.
    lost = {"kind": "failure", "what": "node", "node": "gpu-7", "at_s": 600.0}
    start = {"kind": "synthetic", "at": timezone.now().isoformat(), "scenario": now}
    row = services.write({"start": start, "edits": [lost]}, [{"name": "B", "changes": [lost]}], operator)
    assert row.edits[0]["instances"] == row.futures.get(letter="B").changes[0]["instances"] == change["instances"]
    row = services.write({"start": start, "edits": [lost | {"node": "gpu-8"}]}, [], operator)
    assert services.check(row)["edits[0]"] == "node gpu-8 has no instance that is ready: nothing is lost with it"


def test_the_form_says_what_it_asks_for(client, operator, begun):
    text = page(client, operator, f"{NEW}?chosen=yes&preset=qlm&seeds=4&demand-edit=factor&demand-by=2")
    assert '<option value="900" selected>15 min</option>' in page(client, operator, f"{NEW}?horizon=900")
    assert "2x demand" in text
    assert "8 runs (2 futures" in text
    assert re.search(r"<b>\d+ s</b>.*at a usual pace: the first run measures it", text)
    assert "4 of 4 instances reported" in text
    assert "policy to QLM" in text
    assert "Run 2 futures" in text


def test_a_fleet_that_cannot_be_forked_is_said_so(client, operator, monkeypatch):
    def refuse(begin, horizon_s):
        raise ActionError("No gateway answers.")

    monkeypatch.setattr(building, "begun", refuse)
    text = page(client, operator, NEW)
    assert "No gateway answers." in text
    assert "disabled" in text


def test_running_it_makes_a_what_if_that_can_be_edited_again(client, operator, begun):
    client.force_login(operator)
    answer = client.post(NEW, {"seeds": "2", "horizon": "600", "chosen": "yes", "preset": "qlm", **DOUBLED})
    row = WhatIf.objects.get()
    assert answer["Location"] == reverse("console:what-if", args=[row.pk])
    assert row.title == "What if … 2x demand; QLM"
    assert (row.state, row.seeds, row.requested_by) == (WhatIfState.QUEUED, 2, operator)
    assert row.edits == [{"kind": "demand", "edit": "factor", "by": 2.0}]
    assert "demand-by=2" in row.asked
    assert "demand-by" in page(client, operator, row.asked)


def test_a_wrong_form_is_refused_and_nothing_is_lost(acting, begun):
    answer = acting.post(NEW, {"seeds": "0", "title": "My question", **DOUBLED})
    assert answer.status_code == 422
    text = answer.content.decode()
    assert "greater than or equal to 1" in text
    assert "My question" in text
    assert not WhatIf.objects.exists()


def test_a_viewer_reads_and_runs_nothing(client, begun, ran, viewer):
    assert "Operators run what-ifs." in page(client, viewer, NEW)
    client.post(NEW, {"seeds": "1"})
    assert WhatIf.objects.count() == 1
    text = page(client, viewer, f"/what-if/{ran.pk}/")
    assert "Make this the plan" not in text
    assert client.post(f"/what-if/{ran.pk}/cancel/").status_code == 403


def test_the_comparison_has_every_future_with_its_verdict(client, operator, ran):
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
    # The class with a promise is chosen, with its own target: 95 of 100 if the class says nothing else.
    assert 'aria-current="true">iw<' in text
    assert "SLO met, 95% promised" in text
    assert "99%" not in text
    assert re.search(r"repetitions would (not )?decide|the same", text)


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


def test_its_files(acting, ran):

    def csv(table):
        answer = acting.get(f"/what-if/{ran.pk}/?format=csv&table={table}")
        return b"".join(answer.streaming_content).decode().splitlines()

    assert len(csv("futures")) == 3
    assert len(csv("what-if-cost")) == 3
    assert len(csv("what-if-latency")) > 10


def test_cancel_resume_and_more_repetitions(acting, begun):
    acting.post(NEW, {"seeds": "2", "chosen": "yes", "preset": "qlm", "horizon": "600"})
    row = WhatIf.objects.get()
    for action, fields, state in (
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


def test_the_list_asks_and_has_one_replay_of_the_ledger(client, operator, viewer):
    text = page(client, operator, "/what-if/")
    assert "No what-if yet." in text
    assert all(f"?ask={name}" in text for name in QUESTIONS)
    assert "New what-if" not in page(client, viewer, "/what-if/")
    kept = [WhatIf.objects.create(title=f"Replay {day}", nightly=True, state="done") for day in (1, 2)]
    asked_for = WhatIf.objects.create(title="Mine", state="done")
    shown = page(client, viewer, "/what-if/")
    assert [f"/what-if/{each.pk}/" in shown for each in (*kept, asked_for)] == [False, True, True]
    assert "Replay 1" in page(client, viewer, "/what-if/?replays=all")


def test_the_list_shows_the_simulator_error(acting):
    assert "No window is judged yet." in acting.get("/what-if/").content.decode()
    now = timezone.now()
    measured = {"ttft_p50": 100.0, "ttft_p95": 400.0, "itl_p50": 20.0, "itl_p95": 30.0, "slo_met": 0.99}
    simulated = {**measured, "ttft_p95": 380.0, "slo_met": 0.98}
    TwinError.objects.create(
        model="m", gpu="2 x h100", from_at=now, to_at=now, requests=77, measured=measured, simulated=simulated
    )
    shown = acting.get("/what-if/").content.decode()
    assert all(words in shown for words in (f"{MINUS}5%", f"{MINUS}1.0 pt", "2 x h100"))


@pytest.mark.parametrize("question", QUESTIONS)
def test_every_question_opens_a_valid_form_that_runs_to_its_end(
    client, operator, make_instance, slo_class, monkeypatch, question
):
    """On the fleet of the database, whose busiest node, region and model are asked about."""
    first, second = make_instance(), make_instance()
    place = first.deployment
    node = Node.objects.create(name="gpu-7", region=place.region, gpu_type=place.gpu_type, gpu_count=8)
    type(first).objects.filter(pk__in=(first.pk, second.pk)).update(node=node)
    length = {"median": 100.0, "p95": 300.0, "maximum": 800}
    client_of = {"tenant": "acme", "model": place.model.name, "slo_class": slo_class.name, "requests_per_s": 2.0}
    scenario = selectors.present_scenario() | {"demand": {"too_long": "clip", "duration_h": 0.2}}
    scenario["clients"] = [client_of | {"prompt": length, "output": length}]
    start = Start(kind="fleet", at=timezone.now(), scenario=scenario, arrivals={"kind": "clients"})
    monkeypatch.setattr(building, "begun", lambda begin, horizon_s: start)
    client.force_login(operator)
    answer = client.get(f"{NEW}?ask={question}", follow=True)
    assert "crit-text" not in answer.content.decode()
    fields = dict(parse_qsl(answer.redirect_chain[-1][0].partition("?")[2]))
    assert client.post(NEW, fields | {"horizon": "600", "seeds": "1"}).status_code == 302
    row = rows.run_all(WhatIf.objects.get())
    assert not [run.error for run in FutureSeed.objects.all() if run.error]
    assert row.state == WhatIfState.DONE
    first_of, second_of = row.futures.order_by("letter")
    assert not first_of.changes
    said = {
        "region": "US East is lost",
        "double": "2x demand",
        "node": "node gpu-7 in US East is lost",
        "model": "1.5x demand of",
    }
    assert second_of.name.startswith(said[question])
    assert row.title == f"What if … {second_of.name}"
    requests = [each["requests"]["mean"] for each in selectors.comparison(row)["futures"]]
    assert (requests[1] > 1.2 * requests[0]) == (question in ("double", "model"))


def test_a_question_that_the_fleet_has_no_answer_to_is_said_so(client, operator, begun):
    assert "No node of the fleet has an instance that is ready." in page(client, operator, f"{NEW}?ask=node")


def test_a_future_that_breaks_its_promises_is_asked_about_twice(client, operator, ran, deployment):
    WhatIf.objects.update(start=ran.start | {"kind": "fleet"})
    for run in FutureSeed.objects.filter(future__letter="B"):
        for columns in run.result["columns"].values():
            columns |= {"slo_met": 0.5, "missed": columns["judged"] // 2}
        run.save()
    text = page(client, operator, f"/what-if/{ran.pk}/?future=B")
    doubt = "It keeps its promises in 0 of 2 repetitions (iw)"
    assert f'id="doubt">{doubt}.' in text
    assert 'name="anyway" value="yes" required' in text
    assert "Misses a promise" in text
    fields = {"future": "B", "reason": "to try it"}
    refused = client.post(f"/what-if/{ran.pk}/plan/", fields, follow=True).content.decode()
    assert f"{doubt}. It becomes the plan only if that is confirmed" in refused
    assert not WhatIf.objects.get().plan


def test_the_page_says_what_it_has_drawn_and_lines_of_futures_are_kept_fresh(acting, ran, live):
    marks = set()
    for state in (WhatIfState.DONE, WhatIfState.FAILED):
        error = "no instance fits" if state == WhatIfState.FAILED else ""
        FutureSeed.objects.filter(future__letter="B", seed=1).update(state=state, error=error)
        mark = fragments.drawn_of(live.feed.latest(), f"what-if:{ran.pk}")
        text = acting.get(f"/what-if/{ran.pk}/").content.decode()
        assert mark in text
        assert (
            ("Done, 1 of 2 futures failed" in text) == ("failed: Repetition 1: no instance fits" in text) == bool(error)
        )
        marks.add(mark)
    assert len(marks) == 2
    html = what_ifs.html(what_ifs.read(ran.pk) | {"state": "running"})
    assert set(html) == {"what-if", *(f"future/{future.letter}" for future in ran.futures.all())}
