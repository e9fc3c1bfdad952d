"""The sixteen jobs of `tests.docs.jobs`, from Overview by clicks: a page that grows one fails here.

There is no gateway and no Celery: what they would do next is not part of a job.
"""

import json
import re

import pytest
from django.utils import timezone
from playwright.sync_api import expect

from controlplane.accounts.models import ApiKey, Budget, Membership, Tenant
from controlplane.alerts.models import Alert, AlertRule
from controlplane.alerts.problems import find, read_known
from controlplane.batches.models import Batch
from controlplane.fleet.models import Deployment, Instance, Maintenance, Node, Region, SloClass, SloKind
from controlplane.fleet.services import cordon
from controlplane.planning.models import PlanStatus
from controlplane.simulation.whatif.models import WhatIf
from tests.docs.jobs import JOBS
from tests.e2e import seed
from tests.e2e.test_accessibility import advice
from tests.e2e.test_console import expect_drawn

COUNT = """addEventListener("pointerdown", ({ target, isTrusted }) => {
  if (!isTrusted || target.closest("label, input, select, textarea")) return;
  sessionStorage.clicks = 1 + Number(sessionStorage.clicks ?? 0);
}, true);"""
"""Presses of anything but the fields of forms."""
STOPPED, MODEL = "llama-3-2-3b-us-west-1", "llama-3.1-8b"


def go(page, name: str) -> None:
    page.get_by_role("navigation", name="Main").get_by_role("link", name=re.compile(f"^{name}")).click()


def fill(form, **values: str) -> None:
    """Fill in fields by their labels; `_` stands for a space."""
    for label, value in values.items():
        form.get_by_label(label.replace("_", " ")).locator("visible=true").first.fill(value)


def said(page, text: str) -> None:
    expect(page.locator(".messages")).to_contain_text(text)


def deploy(page) -> None:
    page.get_by_role("link", name="Deploy a model").click()
    page.get_by_text("Another region or GPU type, or a new node").click()
    for label, value in (
        ("Model", "qwen3-8b"),
        ("Region", "eu-north"),
        ("GPU type", "h100-80gb"),
        ("GPUs of a new node", "8"),
    ):
        page.get_by_label(label, exact=True).fill(value)
    page.get_by_role("button", name="Deploy").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("qwen3-8b in EU North")
    assert Instance.objects.filter(deployment__region__name="eu-north").count() == 1


def slow(page) -> None:
    page.get_by_role("link", name="Slowest request").click()
    for part in ("Where the time went", "Why this instance"):
        expect(page.get_by_role("heading", name=part)).to_be_visible()


def spike(page) -> None:
    page.get_by_role("navigation", name="Sections").get_by_role("link", name="Timeline").click()
    expect_drawn(page, "demand")
    assert "Move" in page.evaluate("document.querySelector('#chart-demand [data-plot]').data.map((one) => one.name)")
    changes = page.locator("#changes .caption")
    before = changes.text_content()
    box = page.locator("#chart-demand .nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.8 * box["width"], box["y"] + 40, steps=8)
    page.mouse.up()
    expect(changes).not_to_have_text(before)


def usage(page) -> None:
    go(page, "Usage")
    page.locator("select[name=period]").select_option("1")
    page.locator("select[name=by]").select_option("gpu_type")
    expect(page.get_by_role("columnheader", name="GPU-hours").first).to_be_visible()
    expect(page.get_by_role("rowheader", name="h100-80gb")).to_be_visible()


def approve(page) -> None:
    plan, now = advice(), timezone.now()
    [problem] = [one for one in find({}, read_known(now)) if one.kind == "plan" and one.href.endswith(f"-{plan.pk}")]
    Alert.objects.create(  # as the process that judges does
        rule=AlertRule.objects.get_or_create(condition="plan", defaults={"name": "Plan awaits approval"})[0],
        subject=problem.subject, title=problem.title, page=problem.href, severity="critical",
        since=now, opened_at=now, seen_at=now,
    )  # fmt: skip
    page.get_by_role("link", name=problem.title).click()
    dialog = page.get_by_role("dialog", name=f"Approve plan {plan.pk} for {plan.model}?")
    for part in ("Needed now", "Forecast", "Use now", "SLO now"):
        expect(dialog).to_contain_text(part)
    fill(dialog, Reason="the evening peak comes")
    dialog.get_by_role("button", name="Approve").click()
    said(page, "is approved")
    plan.refresh_from_db()
    assert plan.status == PlanStatus.APPROVED


def what_if(page) -> None:
    # It begins with the ledger, as there is no gateway here.
    page.route(
        re.compile("ask=region$"), lambda route: route.continue_(url=f"{route.request.url}&start=ledger&seeds=1")
    )
    page.get_by_role("link", name="what if one is lost?").click()
    expect(page.get_by_label("Failures: Region")).to_be_visible()
    expect(page.get_by_label("Failures: Node")).to_be_hidden()
    page.wait_for_load_state()  # what is filled in before its script runs is not followed
    fill(page, **{"Demand: Times": "2"})
    expect(page.locator("#what-if-side")).to_contain_text("2x demand")
    page.get_by_role("button", name="Run 2 futures").click()
    heading = page.get_by_role("heading", level=1)
    expect(heading).to_contain_text("2x demand")
    expect(heading).to_contain_text("is lost")
    WhatIf.objects.get().delete()


def key(page) -> None:
    go(page, "Keys")
    page.get_by_role("textbox", name="Name", exact=True).fill("first call")
    page.get_by_role("combobox", name="Tenant").select_option("Acme Assistants")
    page.locator("#key-models").select_option([MODEL])
    fill(page, Budget="50")
    page.get_by_role("button", name="Create key").click()
    secret = page.get_by_role("status", name="Secret").text_content()
    assert secret in page.locator("#curl").text_content()
    row = ApiKey.objects.get(name="first call")
    assert row.allowed_models == [MODEL]
    assert Budget.objects.get(api_key=row).hard == 50


def _act(page, name: str, verb: str) -> None:
    """Do *verb* with the instance or node *name* on Fleet."""
    go(page, "Fleet")
    page.get_by_label(f"Select {name}", exact=True).check()
    page.get_by_role("combobox", name="What").select_option(verb)
    fill(page, Reason="a new driver")
    page.get_by_role("button", name="Carry out").click()
    said(page, f"{verb.capitalize()}: 1 of 1")


def maintenance(page) -> None:
    _act(page, seed.NODE, "maintenance")
    expect(page.locator("#maintenance")).to_contain_text(f"{seed.NODE} is in maintenance until")
    assert "a new driver" in Node.objects.get(name=seed.NODE).cordoned
    assert Maintenance.objects.get().reason == "a new driver"


def batch(page) -> None:
    acme = Tenant.objects.get(name="acme")
    acme.slo_classes.add(SloClass.objects.filter(kind=SloKind.NON_INTERACTIVE).first())
    go(page, "Batches")
    page.get_by_role("button", name="New batch…").first.click()
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
    line = json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body})
    file = {"name": "evening.jsonl", "mimeType": "application/jsonl", "buffer": line.encode()}
    page.get_by_label(re.compile("^File")).set_input_files([file])
    page.get_by_label(re.compile("^API key")).select_option(label="Acme Assistants: acme production")
    page.get_by_role("button", name="Upload and start").click()
    expect(page).to_have_url(re.compile("/batches/batch_"))
    assert Batch.objects.get(input_file__filename="evening.jsonl").endpoint == "/v1/chat/completions"


def application(page) -> None:
    go(page, "Applications")
    page.get_by_role("link", name=re.compile("^last run")).first.click()
    for part in ("Demand graph", "Calls"):
        expect(page.get_by_role("heading", name=part, exact=True)).to_be_visible()


def stop(page) -> None:
    _act(page, STOPPED, "stop")
    assert Instance.objects.get(name=STOPPED).held.startswith("admin, a new driver")


def roll_out(page) -> None:
    go(page, "Models")
    page.get_by_role("link", name=MODEL, exact=True).click()
    page.locator("#deployments").get_by_role("button", name=re.compile("^Change…")).first.click()
    dialog = page.locator("dialog[open]")
    fill(dialog, Sequences_at_once="11", Reason="shorter batches")
    dialog.get_by_role("button", name="Change", exact=True).click()
    said(page, "are changed")
    assert Deployment.objects.filter(model__name=MODEL, max_num_seqs=11).count() == 1


def alert(page) -> None:
    page.get_by_role("link", name="New rule").click()
    dialog = page.get_by_role("dialog", name="New rule")
    dialog.get_by_label("Condition").select_option("slo_burn")
    fill(dialog, Name="Night watch", Receivers="https://hooks.example.org/night", Reason="we sleep")
    dialog.get_by_role("button", name="Save").click()
    said(page, "Night watch is saved")
    assert AlertRule.objects.get(name="Night watch").receivers


def undo(page) -> None:
    place = Region.objects.get(name="us-west")
    cordon(place, "admin", "a mistake")
    page.get_by_role("link", name="All events").click()
    row = page.get_by_role("row").filter(has_text="a mistake")
    row.get_by_role("link", name="Undo…").click()
    fill(page.locator("dialog[open]"), Reason="it was the wrong one")
    page.locator("dialog[open]").get_by_role("button", name="Uncordon").click()
    expect(page.locator(".messages p")).to_be_visible()
    place.refresh_from_db()
    assert place.cordoned == ""


def rest(page) -> None:
    go(page, "API")
    expect(page.locator(".opblock").first).to_be_visible()
    page.get_by_role("button", name="Create service key").click()
    secret = page.get_by_role("status", name="Secret").text_content()
    answer = page.request.get("/api/me", headers={"Authorization": f"Bearer {secret}"})
    assert (answer.status, answer.json()["fleet_role"]) == (200, "operator")


def users(page) -> None:
    page.get_by_role("link", name="users and access").click()
    page.get_by_role("link", name="New user").click()
    dialog = page.get_by_role("dialog", name="New user")
    fill(dialog, Username="robin", New_password=seed.PASSWORD, Reason="joins on Monday")
    dialog.get_by_label("Add to tenant").select_option("Fleet operations")
    dialog.get_by_label("With the role").select_option("operator")
    dialog.get_by_role("button", name="Save").click()
    said(page, "robin is saved")
    assert Membership.objects.get(user__username="robin").role == "operator"


ACTS = {
    act.__name__: act
    for act in (
        deploy, slow, spike, usage, approve, what_if, key, maintenance, batch, application, stop, roll_out, alert, undo,
        rest, users,
    )
}  # fmt: skip


@pytest.fixture(scope="module")
def everything(furnished, batch_console):
    return batch_console


@pytest.mark.gate
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_a_job_takes_as_many_clicks_as_its_table_says(everything, open_page, complaints, job):
    complaints.allowed = ("escaping deep link whitespace",)  # Swagger UI's remark about tags of two words
    page = open_page(everything, "/", user="admin")
    page.evaluate(COUNT)
    page.context.add_init_script(COUNT)
    ACTS[job.name](page)
    assert int(page.evaluate("sessionStorage.clicks")) == job.clicks <= job.most
