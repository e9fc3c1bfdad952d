"""A tenant tries every path of `/v1` that names an object with the objects of another tenant, and learns nothing.

The paths come from the URL configuration and from the OpenAPI document: one that is new and has no entry fails. Those of
`/api` and of the console are tried in `tests/access`.
"""

import json
import re

import pytest
from django.core.files.base import ContentFile
from django.test import Client
from django.urls import URLPattern, get_resolver
from django.utils import timezone

from controlplane.accounts.models import ApiKey, Tenant, hash_secret
from controlplane.api.urls import api
from controlplane.applications.models import ApplicationRun
from controlplane.applications.reporting import open_run
from controlplane.batches import services
from controlplane.batches.models import Batch, StoredFile
from tests.gateway.rows import make_rows

pytestmark = pytest.mark.django_db
SECRET, MARK = "ph_of-the-other-tenant", "of-acme-alone"

# By path: methods, and what a tenant tries with it.
TRIES = {
    "/v1/files/{}": ("file", ("GET", "DELETE")),
    "/v1/files/{}/content": ("file", ("GET",)),
    "/v1/batches/{}": ("batch", ("GET",)),
    "/v1/batches/{}/cancel": ("batch", ("POST",)),
    "/v1/models/{}": None,  # known to the gateway alone: adapters of others are tried in tests/gateway/test_adapters.py
    "/v1/runs/{}?application=review": ("run", ("GET",)),
    "/v1/runs/{}/close": ("run", ("POST",)),
    "/v1/runs/{}/units": None,  # a report begins a run of the tenant's own, whatever runs others have by that name
}
LISTS = ("/v1/files", "/v1/batches")


def paths_with_objects() -> set[str]:
    configured = {
        f"/{resolver.pattern}{pattern.pattern}" if not isinstance(resolver, URLPattern) else f"/{resolver.pattern}"
        for resolver in get_resolver().url_patterns
        for pattern in getattr(resolver, "url_patterns", [resolver])
    }
    described = set(api.get_openapi_schema()["paths"])
    every = {path for path in configured | described if path.startswith("/v1/")}
    return {re.sub(r"<[^>]+>|\{[^}]+\}", "{}", path) for path in every if re.search(r"[<{]", path)}


@pytest.fixture
def objects():
    make_rows([], regions=[], max_num_seqs=1, queue_bound=1)
    key = ApiKey.objects.select_related("tenant").get()
    other = Tenant.objects.create(name="globex", default_slo_class=key.tenant.default_slo_class)
    other.slo_classes.set(key.tenant.slo_classes.all())
    ApiKey.objects.create(tenant=other, name="k", prefix=SECRET[:11], sha256=hash_secret(SECRET))
    line = {"custom_id": MARK, "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": []}}
    file = services.create_file(key.tenant, ContentFile(json.dumps(line).encode(), "in"), f"{MARK}.jsonl", "batch")
    batch = services.create_batch(key, file, "/v1/chat/completions", "24h", metadata={"mark": MARK})
    run = open_run(key.tenant, "review", f"{MARK}-run", None, timezone.now())
    return {"file": file.pk, "batch": batch.public_id, "run": run.run}


def ask(method, path, body=None):
    given = {"data": json.dumps(body), "content_type": "application/json"} if body else {}
    return Client().generic(method, path, headers={"authorization": f"Bearer {SECRET}"}, **given)


def test_every_path_that_names_an_object_has_an_entry():
    assert paths_with_objects() == {path.partition("?")[0] for path in TRIES}


@pytest.mark.parametrize(
    ("path", "method"), [(path, method) for path, each in TRIES.items() if each for method in each[1]]
)
def test_the_object_of_another_tenant_is_as_one_that_does_not_exist(objects, path, method):
    kind = TRIES[path][0]
    body = {"application": "review"} if kind == "run" and method == "POST" else None
    tried, nowhere = (ask(method, path.format(name), body) for name in (objects[kind], f"{kind}-nowhere"))
    assert tried.status_code == nowhere.status_code == 404
    answers = [response.content.decode().replace(name, "NAME")
               for response, name in ((tried, objects[kind]), (nowhere, f"{kind}-nowhere"))]  # fmt: skip
    assert answers[0] == answers[1]
    assert MARK not in answers[0]
    assert StoredFile.objects.filter(pk=objects["file"]).exists()
    assert Batch.objects.get().status == "validating"
    assert ApplicationRun.objects.get().closed_at is None


def test_lists_and_bodies_lead_to_nothing_of_another_tenant(objects):
    for path in LISTS:
        answer = ask("GET", path)
        assert answer.json()["data"] == []
        refused = ask("GET", f"{path}?after={objects['file' if path == '/v1/files' else 'batch']}")
        assert refused.status_code == 400
    body = {"input_file_id": objects["file"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    answer = ask("POST", "/v1/batches", body)
    assert answer.status_code == 404
    assert MARK not in answer.content.decode()
    assert Batch.objects.count() == 1


def test_json_that_is_called_a_form_makes_no_batch(objects):
    """Such a body is not searched for NUL, which PostgreSQL cannot store."""
    headers = {"authorization": f"Bearer {SECRET}"}
    answer = Client().post("/v1/batches", b"{}", content_type="multipart/form-data", headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
