"""The Capacity page: its form, errors at their fields, the answer, its file, and the line on Overview."""

import pytest

from controlplane.api.urls import api
from controlplane.console.live import capacity, fragments
from controlplane.console.live.state import LiveState
from controlplane.planning.models import CapacityPlan, CapacityState
from controlplane.planning.sizing import services
from tests.planning import capacity_rows

pytestmark = pytest.mark.django_db
assert api


def test_a_question_is_posted_and_wrong_ones_come_back_with_a_sentence_at_the_field(
    client, operator, deployment, slo_class
):
    client.force_login(operator)
    page = client.get("/capacity/").content.decode()
    assert "Which GPUs will the coming months need?" in page
    assert 'name="gpus.b200-180gb"' in page
    posted = {"growth": "percent", "percent": "12", "months": "3", "reserved": "55", "spot": "40",
              "promises.interactive.chosen": "on", "promises.interactive.ttft_ms": "800",
              "promises.interactive.percentile": "99", "gpus.a100-80gb.chosen": "on", "gpus.a100-80gb": "1.35"}  # fmt: skip
    wrong = client.post("/capacity/", posted | {"gpus.b200-180gb.chosen": "on", "months": "99"})
    assert wrong.status_code == 422
    assert "less than or equal to 60" in wrong.content.decode()
    wrong = client.post("/capacity/", posted | {"gpus.b200-180gb.chosen": "on"}).content.decode()
    assert "No price is kept for it: say what one costs an hour." in wrong
    answer = client.post("/capacity/", posted)
    row = CapacityPlan.objects.get()
    assert (answer.status_code, answer.url) == (302, f"/capacity/{row.pk}/#answer")
    assert row.question["promises"]["interactive"]["percentile"] == 99
    assert row.question["gpus"] == {"a100-80gb": 1.35}
    page = client.get(answer.url).content.decode()
    assert "Waits for a worker" in page
    assert 'value="55.0"' in page, "the form shows what was asked"


def test_the_answer_its_file_and_rest_have_the_same_numbers(client, viewer, deployment, slo_class):
    row = capacity_rows.done()
    client.force_login(viewer)
    page = client.get(f"/capacity/{row.pk}/").content.decode()
    for shown in (
        *("$5,110", "2 to buy", "2027-01-29", "97.0", "estimated", "does not fit 8", "$2,555", "at most</span> $7,665"),
        "Fleets for up to 3 times the demand reach 99.2% for",
    ):
        assert shown in page, shown
    file = client.get(f"/capacity/{row.pk}/fleet.toml")
    assert 'gpu_type = "h200-141gb"' in file.content.decode()
    answer = client.get(f"/api/capacity-plans/{row.pk}").json()
    assert answer["answer"]["usd_per_month"]["on_demand"] == 5110.0
    assert answer["state"] == CapacityState.DONE


def test_a_plan_is_asked_for_by_rest(client, viewer, operator, deployment, slo_class):
    def ask(question):
        answer = client.post("/api/capacity-plans", question, content_type="application/json")
        return answer.status_code, answer.json()

    client.force_login(viewer)
    assert ask({})[0] == 403
    client.force_login(operator)
    status, made = ask({"months": 3})
    assert (status, made["question"]["months"], CapacityPlan.objects.get().pk) == (202, 3, made["id"])
    status, refused = ask({"gpus": {"none": 1.0}})
    assert (status, refused["error"]["field"]) == (422, "gpus.none")


def test_a_plan_in_progress_shows_its_phase_and_is_drawn_anew_with_its_first_answer(deployment, slo_class, operator):
    row = services.ask({}, operator)
    topic = f"capacity:{row.pk}"
    first = fragments.drawn_of(LiveState(), topic)
    CapacityPlan.objects.update(state=CapacityState.RUNNING, phase="One instance less", progress=0.4)
    html = fragments.html_of(LiveState(), topic)
    assert "One instance less" in html["capacity"]
    assert html[f"drawn/{topic}"] != first
    assert capacity.unanswered({"", topic})
    CapacityPlan.objects.update(answer={"first_s": 0.6})
    assert not capacity.unanswered({"", topic})
    assert not fragments.is_topic("capacity:x")


def test_overview_has_a_line_on_the_loss_of_each_region(client, viewer, deployment):
    client.force_login(viewer)
    assert "not simulated yet" in client.get("/").content.decode()
    capacity_rows.lost()
    page = client.get("/").content.decode()
    assert "US East: <strong>no</strong>, interactive falls to 81" in page
    assert "for 40 min" in page
    assert "US West: yes" in page
    (east, _) = client.get("/api/region-losses").json()["items"]
    assert (east["survives"], east["slo_met_ratio"], east["below_target_s"]) == (False, 0.81, 2400.0)
