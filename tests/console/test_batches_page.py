"""The page of batches: each state as it is shown, who sees what, and the parts that are kept fresh."""

import html
import time
from datetime import timedelta

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import TestCase
from django.urls import reverse
from django.utils import timezone

from controlplane.accounts.models import Tenant
from controlplane.accounts.services import create_api_key
from controlplane.alerts.problems import read_known
from controlplane.batches import services
from controlplane.batches.models import Batch, BatchStatus, StoredFile
from controlplane.batches.selectors import keys_for_batches
from controlplane.console.formats import MINUS
from controlplane.console.live import batches as live_batches
from controlplane.console.live import fragments
from controlplane.console.live.state import LiveState
from controlplane.events.models import Event
from controlplane.fleet.models import SloKind

pytestmark = pytest.mark.django_db
URL = "/batches/"


@pytest.fixture
def deferring(acme):
    """`acme`, which may use the class of batches."""
    acme.slo_classes.create(name="deferred", title="Deferred", kind=SloKind.NON_INTERACTIVE, deadline_s=86_400)
    return acme


@pytest.fixture
def make_batch(acme):
    """`make_batch(status="in_progress", done=…, …)`: a batch of `acme` that began 10 minutes ago."""

    def make(tenant=acme, *, status="in_progress", done=0, total=12_000, due_in_s=3_600.0, **values):
        now = time.time()
        content = StoredFile.objects.create(tenant=tenant, filename="in.jsonl", purpose="batch", size_bytes=1)
        began = now - 600
        return Batch.objects.create(
            tenant=tenant,
            input_file=content,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            status=status,
            model="llama-3.1-8b",
            total=total,
            completed=done,
            samples=[(began + 10 * step, done * step / 60) for step in range(60)] if done else [(began, 0)],
            moments={"in_progress": began, status: now},
            expires_at=timezone.now() + timedelta(seconds=due_in_s),
            **values,
        )

    return make


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"status": "validating", "total": 0, "lines_read": 12_400}, ["Validating", "12,400 lines read"]),
        ({"done": 6_000}, ["Running", "6,000 of 12,000", "50%", "+49 min"]),
        ({"done": 50, "total": 50_000}, ["Running", "too few lines done", "…"]),
        ({"done": 6_000, "due_in_s": 605}, ["At risk", "1 of 1 running batch is at risk", "less than a tenth"]),
        ({"done": 6_000, "due_in_s": 300}, ["Late", "1 of 1 running batch will be late", f"{MINUS}5 min"]),
        ({"status": "cancelling", "done": 500}, ["Canceling", "lines that run finish"]),
        ({"status": "expired", "done": 8_410}, ["Expired", "8,410 of 12,000 done by the deadline"]),
        (
            {"status": "failed", "errors": [{"line": 812, "code": "duplicate_custom_id", "message": "Twice."}]},
            ["Failed", "line 812: Twice."],
        ),
        ({"status": "completed", "done": 12_000}, ["Completed", "100%", "+1 h"]),
    ],
)
def test_each_state_has_its_words(client, viewer, make_batch, values, words):
    batch = make_batch(**values)
    client.force_login(viewer)
    shown = client.get(URL).content.decode()
    assert batch.short_id in shown
    for word in words:
        assert word in shown, word
    Batch.objects.filter(pk=batch.pk).update(moments=batch.moments | {"resumed": time.time()})
    text = client.get(reverse("console:batch", args=[batch.public_id])).content.decode()
    assert "<dt>Running</dt>" in text
    assert "<dt>Resumed by another process; no line is answered twice</dt>" in text


def test_running_batches_come_first_the_least_slack_first(client, viewer, make_batch):
    relaxed, urgent = make_batch(done=6_000, due_in_s=7_200), make_batch(done=6_000, due_in_s=1_800)
    ended = make_batch(status="completed", done=12_000)
    client.force_login(viewer)
    rows = client.get(URL).context["rows"]
    assert [row.pk for row in rows] == [urgent.pk, relaxed.pk, ended.pk]


LINE = b'{"custom_id": "1", "url": "/v1/chat/completions", "body": {"model": "llama-3.1-8b", "messages": []}}'


@pytest.mark.parametrize(
    ("content", "hours", "refused"),
    [
        (b"\xef\xbb\xbf\n" + LINE, "3", ""),
        (LINE, "25", "completion_window must be whole hours from 1h to 24h"),
        (b"no json", "3", "The first line is not valid JSON"),
        (LINE.replace(b"chat/completions", b"images"), "3", "The url of the first line must be one of"),
        (b"", "3", "The first line"),
        (None, "3", "Choose a JSONL file"),
    ],
)
@pytest.mark.usefixtures("language_model")
def test_a_file_is_uploaded_and_becomes_a_batch(client, operator, deferring, monkeypatch, content, hours, refused):
    sent = []
    monkeypatch.setattr(services, "send_task", lambda *task: sent.append(task))
    key, _ = create_api_key(deferring, "nightly", operator)
    client.force_login(operator)
    assert "client.files.create(file=open(" in client.get(URL).content.decode()
    file = {} if content is None else {"file": SimpleUploadedFile("in.jsonl", content)}
    with TestCase.captureOnCommitCallbacks(execute=True):
        answer = client.post(URL, {"key": key.pk, "hours": hours, **file})
    if refused:
        assert answer.status_code == 400
        assert refused in html.unescape(answer.content.decode())
        assert not StoredFile.objects.exists()
        assert not sent
        return
    assert answer.status_code == 302, answer.content.decode()[-3000:]
    batch = Batch.objects.get()
    assert (answer.url, sent) == (f"/batches/{batch.public_id}/", [(services.VALIDATE_TASK, batch.pk)])
    assert (batch.api_key, batch.endpoint, batch.completion_window) == (key, "/v1/chat/completions", "3h")
    with batch.input_file.content as stored:
        assert stored.read() == content


def test_only_keys_that_can_have_a_batch_are_offered(client, operator, deferring, language_model):
    other = Tenant.objects.create(name="other", title="Other", default_slo_class=deferring.default_slo_class)
    create_api_key(other, "without the class", operator)
    create_api_key(deferring, "of a model that is gone", operator, allowed_models=["gone"])
    assert keys_for_batches(operator) == []
    client.force_login(operator)
    assert "of a tenant that may use a non-interactive SLO class" in client.get(URL).content.decode()
    rows = [
        create_api_key(deferring, "able", operator, allowed_models=names)[0] for names in ([], [language_model.name])
    ]
    assert {key.pk for key in keys_for_batches(operator)} == {key.pk for key in rows}


def test_keys_of_others_make_no_batch(client, member, acme, operator):
    key, _ = create_api_key(acme, "nightly", operator)
    client.force_login(member)  # sees the tenant, and makes no keys of it
    answer = client.post(URL, {"key": key.pk, "hours": "3", "file": SimpleUploadedFile("in.jsonl", LINE)})
    assert (answer.status_code, Batch.objects.count()) == (400, 0)


def test_a_tenant_sees_its_own_batches_alone(client, member, stranger, make_batch):
    own = make_batch(done=6_000)
    other = make_batch(Tenant.objects.get(name="globex"), done=6_000, due_in_s=60)
    client.force_login(member)
    shown = client.get(URL).content.decode()
    assert own.short_id in shown
    assert other.short_id not in shown
    assert "will be late" not in shown
    assert 'class="tabs"' not in shown
    for path in (reverse("console:batch", args=[other.public_id]), f"/batches/{other.public_id}/input.jsonl"):
        assert client.get(path).status_code == 404


def test_files_are_downloaded_by_those_who_see_the_batch(client, viewer, make_batch, acme):
    batch = make_batch(status=BatchStatus.FINALIZING)
    batch.output_file = services._write_file(batch, "output", ['{"custom_id": "1"}'])
    batch.save()
    client.force_login(viewer)
    download = client.get(f"/batches/{batch.public_id}/output.jsonl")
    assert download.status_code == 200
    for close in download._resource_closers:  # `download.close()` would end the test's connection to the database
        close()
    for kind in ("errors", "no"):
        assert client.get(f"/batches/{batch.public_id}/{kind}.jsonl").status_code == 404


def test_canceling_says_what_it_costs_and_keeps_a_reason(client, operator, make_batch):
    batch = make_batch(done=6_000)
    client.force_login(operator)
    assert "6,000 of 12,000 lines will get no answer" in client.get(URL).content.decode()
    client.post(
        reverse("console:operate", args=["batches", batch.pk, "cancel"]),
        {"reason": "wrong prompt", "next": "/batches/"},
    )
    batch.refresh_from_db()
    assert batch.status == BatchStatus.CANCELLING
    assert Event.objects.get(kind="batch.canceled").reason == "wrong prompt"


def test_a_tenants_page_is_redrawn_by_time(client, member, make_batch, globex):
    """It has no live connection, which is the fleet's, and nothing of others."""
    mine, other = make_batch(done=6_000), make_batch(globex, done=6_000)
    client.force_login(member)
    page = client.get(URL).content.decode()
    assert "data-live" not in page
    assert 'id="batches-panel" data-region data-refresh-s="5"' in page
    assert 'id="batch-tiles" data-region' in page
    assert mine.short_id in page
    assert other.short_id not in page
    assert "Spot pool" not in page


def test_the_first_token_of_the_class_that_does_worst_is_the_tile(client, viewer, live, fleet_feed):
    summary = fleet_feed.summary
    fleet_feed.summary = lambda ts: (
        summary(ts) | {"fleet": summary(ts)["fleet"] | {"ttft_p95_ms": 312.0, "ttft_class": "premium"}}
    )
    live.show(fleet_feed)
    client.force_login(viewer)
    page = client.get(URL).content.decode()
    assert "TTFT p95, premium" in page
    assert "312" in page


def test_a_fragment_is_what_the_page_draws(client, viewer, make_batch):
    batch = make_batch(done=6_000, due_in_s=300)
    client.force_login(viewer)
    page = client.get(URL).content.decode()
    html = fragments.html_of(LiveState(batches=live_batches.read()), "batches")
    assert "Held work" in html["batches/held"]
    assert {f"batch/{batch.pk}/{name}" for name in live_batches.CELLS} <= html.keys()
    assert html.pop("drawn/batches")
    for name in html:
        assert f'data-fragment="{name}"' in page
    assert html[f"batch/{batch.pk}/state"] in page
    marks = [fragments.drawn_of(LiveState(batches=live_batches.read()), "batches")]
    services.cancel_batch(batch)
    marks.append(fragments.drawn_of(LiveState(), "batches"))
    assert marks[0] != marks[1]


def test_batches_at_risk_are_on_the_attention_list(make_batch):
    make_batch(done=6_000)
    late = make_batch(done=6_000, due_in_s=300)
    (problem,) = read_known(timezone.now()).problems
    assert (problem.severity, problem.model) == ("critical", "llama-3.1-8b")
    assert problem.title.startswith(f"{late.short_id} will be late by ")
