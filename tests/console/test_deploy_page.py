"""The deploy page and its call: the estimate follows the form, errors are at their fields, the start is followed."""

import re

import pytest
from django.urls import reverse

from controlplane.events.models import Event
from controlplane.fleet.models import Deployment, Instance, Model, PerformanceProfile

FORM = {
    "region": "eu-west", "gpu_type": "h100-80gb", "gpus": "8", "usd_per_gpu_hour": "2.5", "model": "qwen-8b",
    "parameters_billion": "8.2", "bits": "16", "kv_kib_per_token": "144", "context_tokens": "32768",
    "tensor_parallel": "1", "gpu_memory_utilization": "0.9", "max_num_seqs": "64", "min_instances": "1",
    "max_instances": "4", "launcher": "emulated", "reason": "asked for",
}  # fmt: skip


def test_the_estimate_follows_what_is_entered(acting):
    html = acting.get(reverse("console:deploy")).content.decode()
    for name in ("region", "gpu_type", "model"):
        field = re.search(rf'<input[^>]* name="{name}"[^>]*>', html)
        assert field is not None
        assert "value=" not in field[0], "what must be given begins empty"
    html = acting.get(reverse("console:deploy"), FORM).content.decode()
    for words in ("16.4 GB", "413.1k tokens, 12 full-context requests", "$2.50 an hour", "Yes"):
        assert words in html
    half = {name: value for name, value in FORM.items() if name in ("gpu_type", "parameters_billion")}
    html = acting.get(reverse("console:deploy"), half).content.decode()
    assert "16.4 GB" in html
    assert "give the KV cache of a token" in html
    assert "field-error" not in html
    assert "aria-invalid" not in html, "what is not given has its default"
    assert not Model.objects.exists()


def test_sizes_that_are_not_read_yet_are_said_so(acting):
    source = {name: value for name, value in FORM.items() if name != "parameters_billion"} | {"source": "acme/qwen-8b"}
    html = acting.get(reverse("console:deploy"), source).content.decode()
    assert "not read from acme/qwen-8b yet: that is done when you deploy" in html


def test_one_post_does_all_and_the_page_follows(acting):
    answer = acting.post(reverse("console:deploy"), FORM, follow=True)
    html = answer.content.decode()
    deployment = Deployment.objects.get()
    assert answer.redirect_chain == [(reverse("console:deployed", args=[deployment.pk]), 302)]
    for words in (
        "Starting",
        "qwen-8b-eu-west-1",
        "profile estimated until it is measured",
        "/v1/chat/completions",
    ):
        assert words in html
    Instance.objects.update(state="ready")
    assert ">Ready</h2>" in acting.get(answer.redirect_chain[0][0]).content.decode()
    assert "speed estimated" in acting.get(reverse("console:models")).content.decode()
    html = acting.get(reverse("console:instance", args=["qwen-8b-eu-west-1"])).content.decode()
    assert "estimated until it is measured" in html


def test_room_for_adapters_is_deployed(acting):
    wrong = acting.post(reverse("console:deploy"), FORM | {"max_loras": "4", "max_cpu_loras": "2"})
    assert wrong.status_code == 422
    assert "Not below the 4 adapters on the GPU" in wrong.content.decode()
    acting.post(reverse("console:deploy"), FORM | {"max_loras": "2", "max_cpu_loras": "4"})
    deployment = Deployment.objects.get()
    assert (deployment.max_loras, deployment.max_cpu_loras) == (2, 4)
    deployment.model.adapters.create(name="sql", source="acme/sql")
    html = acting.get(reverse("console:model", args=["qwen-8b"])).content.decode()
    assert "1 of 1 instance serves adapters" in html
    assert "adapter=sql" in html
    Deployment.objects.update(max_loras=0)
    html = acting.get(reverse("console:model", args=["qwen-8b"])).content.decode()
    assert "No deployment serves adapters" in html


def test_a_model_that_embeds(acting):
    form = FORM | {"model": "qwen-embeds", "parameters_billion": "0.6", "task": "embed"}
    html = acting.get(reverse("console:deploy"), form).content.decode()
    assert "<dt>Answer</dt>" in html
    assert "Between tokens" not in html
    answer = acting.post(reverse("console:deploy"), form, follow=True)
    assert "/v1/embeddings" in answer.content.decode()
    assert Model.objects.get().task == "embed"
    html = acting.get(reverse("console:models")).content.decode()
    assert '<span class="under">Embed texts</span>' in html
    html = acting.get(reverse("console:model", args=["qwen-embeds"])).content.decode()
    assert "embed texts: requests are prefill alone" in html
    body = {name: value for name, value in form.items() if name != "gpus"} | {"model": "other", "task": "draws"}
    refused = acting.post("/api/deploy", body, content_type="application/json")
    assert (refused.status_code, refused.json()["error"]["field"]) == (422, "task")
    assert "'embed'" in refused.json()["error"]["message"]


def test_an_error_is_shown_at_its_field(acting):
    answer = acting.post(reverse("console:deploy"), FORM | {"parameters_billion": "180"})
    assert answer.status_code == 422
    html = answer.content.decode()
    assert html.index('id="id_tensor_parallel_error"') < html.index("Use more GPUs") < html.index("id_max_num_seqs")
    assert not Model.objects.exists()


def test_it_starts_from_a_published_model_and_a_place_of_the_fleet(acting, deployment, node):
    html = acting.get(reverse("console:deploy")).content.decode()
    assert html.index('name="model"') < html.index('name="region"')
    assert '<a href="?model=qwen3-14b"' in html
    html = acting.get(reverse("console:deploy"), {"model": "qwen3-14b"}).content.decode()
    assert 'placeholder="14.77"' in html
    row = html.partition('value="us-east a100-80gb"')[2].partition("</tr>")[0]
    assert re.search(r'8 of 8</td><td class="num">1</td><td class="num">\$1.35</td><td class="num">\$0\.\d+ <span', row)
    assert "scaled by the safety autoscaler alone" in html
    form = {
        name: value for name, value in FORM.items() if name in ("max_num_seqs", "launcher", "reason", "min_instances")
    }
    form |= {"model": "qwen3-14b", "place": "us-east a100-80gb", "gpus": "0", "bits": "16", "max_instances": "2"}
    form |= {"gpu_memory_utilization": "0.9"}
    refused = acting.post(reverse("console:deploy"), form | {"region": "us-west"})
    assert "Empty it, or choose no place of the list: there it is us-east." in refused.content.decode()
    refused = acting.post(reverse("console:deploy"), form | {"place": ""})
    assert "Choose a place of the list, or name it." in refused.content.decode()
    acting.post(reverse("console:deploy"), form)
    made = Deployment.objects.get(model__name="qwen3-14b")
    assert (made.region.name, made.tensor_parallel, made.model.weights_bytes) == ("us-east", 1, 29_540_000_000)
    assert made.profile().estimated


def test_the_address_of_a_node_is_for_admins(acting, client, fleet_admin):
    assert 'name="address"' not in acting.get(reverse("console:deploy")).content.decode()
    client.force_login(fleet_admin)
    assert 'name="address"' in client.get(reverse("console:deploy")).content.decode()


@pytest.mark.parametrize(("role", "address", "status"), [
    ("viewer", "127.0.0.1", 403), ("operator", "127.0.0.1", 201), ("operator", "10.0.0.7", 403),
    ("fleet_admin", "10.0.0.7", 201),
])  # fmt: skip
def test_the_same_by_rest(client, request, role, address, status):
    client.force_login(request.getfixturevalue(role))
    body = {
        "region": "eu-west", "gpu_type": "h100-80gb", "gpus": 8, "usd_per_gpu_hour": "2.5", "model": "qwen-8b",
        "weights_gb": 16.4, "kv_kib_per_token": 144, "context_tokens": 32_768, "launcher": "emulated", "address": address,
    }  # fmt: skip
    answer = client.post("/api/deploy", body, content_type="application/json")
    assert answer.status_code == status
    assert PerformanceProfile.objects.count() == (status == 201)
    if status == 201:
        assert answer.json()["instances"] == ["qwen-8b-eu-west-1"]
        assert answer.json()["profile_estimated"] is True
        again = client.post("/api/deploy", body, content_type="application/json")
        assert (again.status_code, again.json()["error"]["field"]) == (422, "gpu_type")


def test_a_retired_model_is_set_active_again_from_the_page(client, fleet_admin, operator):
    model = Model.objects.create(name="qwen-8b", active=False, weights_bytes=1, kv_bytes_per_token=1, context_tokens=9)
    for user, offered in ((operator, False), (fleet_admin, True)):
        client.force_login(user)
        html = client.post(reverse("console:deploy"), FORM).content.decode()
        assert "qwen-8b is retired. Set it active again: <code>PATCH /api/inventory</code>" in html
        assert ("Activate…" in html) is offered
    client.post(reverse("console:operate", args=("models", model.pk, "activate")), {"reason": "it is wanted again"})
    model.refresh_from_db()
    assert model.active
    assert Event.objects.get(kind="model.activated").reason == "it is wanted again"
